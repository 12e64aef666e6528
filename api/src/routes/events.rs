//! Event queries, which all types of objects share.

use std::sync::Arc;

use muster_types::event::{EventRecord, EventType};
use muster_types::object::ObjectRef;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::error::ApiResult;
use crate::lists;
use crate::pages::Pages;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_store::events::{self, EventPage, EventPosition};

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
) -> ApiResult<Pages<EventRecord>> {
    list(app, object, None, query).await
}

/// Returns the events of an object without an owner: those that the caller's namespace caused, or all for `system`.
pub(crate) async fn own_events_of(
    app: &App,
    caller: &Caller,
    object: &ObjectRef,
    query: &EventQuery,
) -> ApiResult<Pages<EventRecord>> {
    let namespace = (!caller.is_system()).then(|| caller.namespace.clone());
    list(app, object, namespace, query).await
}

async fn list(
    app: &App,
    object: &ObjectRef,
    namespace: Option<String>,
    query: &EventQuery,
) -> ApiResult<Pages<EventRecord>> {
    let event_type: Option<EventType> = match query.event_type.as_deref().map(str::parse) {
        None => None,
        Some(Ok(event_type)) => Some(event_type),
        // No events have an unknown type.
        Some(Err(_)) => return Pages::of(Vec::new()),
    };
    let limit = query.limit.filter(|limit| *limit > 0).unwrap_or(DEFAULT_LIMIT).min(MAX_LIMIT);
    let Some(request) = lists::requested() else {
        let page = EventPage { namespace: namespace.as_deref(), event_type, after: None, limit };
        return Pages::of(events::page(&*app.store, object, &page).await?);
    };
    let request = request.with_limit(limit);
    let (store, object, limit) = (Arc::clone(&app.store), object.clone(), request.read_size());
    let read = move |after: Option<EventPosition>| {
        let (store, object, namespace) = (Arc::clone(&store), object.clone(), namespace.clone());
        async move {
            let page = EventPage { namespace: namespace.as_deref(), event_type, after, limit };
            let records = events::page(&*store, &object, &page).await?;
            let is_full = i64::try_from(records.len()).is_ok_and(|count| count == limit);
            let last = records.last().filter(|_| is_full).map(EventPosition::of);
            Ok((records, last))
        }
    };
    Pages::select(&request, read).await
}
