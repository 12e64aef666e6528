//! Event queries, which all types of objects share.

use muster_types::event::EventRecord;
use muster_types::object::ObjectRef;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::error::ApiResult;
use crate::response::Json;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_store::events;

const DEFAULT_LIMIT: i64 = 100;
const MAX_LIMIT: i64 = 1000;

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventQuery {
    /// The maximum number of events; 100 if absent or not positive, and at most 1000. Also accepted in the body.
    limit: Option<i64>,
    /// Return only events of this type, such as `audit`. Also accepted in the body.
    event_type: Option<String>,
}

/// Returns the events of an object, newest first.
pub(crate) async fn events_of(
    app: &App,
    object: &ObjectRef,
    query: &EventQuery,
) -> ApiResult<Json<Vec<EventRecord>>> {
    list(app, object, None, query).await
}

/// Returns the events of an object without an owner: those that the caller's namespace caused, or all for `system`.
pub(crate) async fn own_events_of(
    app: &App,
    caller: &Caller,
    object: &ObjectRef,
    query: &EventQuery,
) -> ApiResult<Json<Vec<EventRecord>>> {
    let namespace = (!caller.is_system()).then_some(caller.namespace.as_str());
    list(app, object, namespace, query).await
}

async fn list(
    app: &App,
    object: &ObjectRef,
    namespace: Option<&str>,
    query: &EventQuery,
) -> ApiResult<Json<Vec<EventRecord>>> {
    let limit = query.limit.filter(|limit| *limit > 0).unwrap_or(DEFAULT_LIMIT).min(MAX_LIMIT);
    let event_type = match query.event_type.as_deref().map(str::parse) {
        None => None,
        Some(Ok(event_type)) => Some(event_type),
        // No events have an unknown type.
        Some(Err(_)) => return Ok(Json(Vec::new())),
    };
    Ok(Json(match namespace {
        None => events::list(&*app.store, object, event_type, limit).await?,
        Some(name) => events::list_of_namespace(&*app.store, object, name, event_type, limit).await?,
    }))
}
