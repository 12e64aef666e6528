//! Reading events, which every kind of object has alike.

use muster_types::event::EventRecord;
use muster_types::object::ObjectRef;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::error::ApiResult;
use crate::fields::{Integer, Text};
use crate::response::ok;
use muster_control::app::App;
use muster_store::events;

const DEFAULT: i64 = 100;
const MOST: i64 = 1000;

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventQuery {
    /// How many; 100 when absent or not positive, 1000 at most. Also taken from the body.
    #[param(value_type = Option<i64>)]
    limit: Option<Integer>,
    /// Only events of this type. Also taken from the body.
    #[param(value_type = Option<String>)]
    event_type: Option<Text>,
}

pub(crate) async fn answer(app: &App, object: &ObjectRef, query: &EventQuery) -> ApiResult {
    let limit = query.limit.map_or(DEFAULT, |limit| if limit.0 <= 0 { DEFAULT } else { limit.0.min(MOST) });
    let event_type = match query.event_type.as_ref().map(|text| text.0.parse()) {
        None => None,
        Some(Ok(event_type)) => Some(event_type),
        // No event is of a type that does not exist.
        Some(Err(_)) => return Ok(ok(&Vec::<EventRecord>::new())),
    };
    Ok(ok(&events::list(&*app.store, object, event_type, limit).await?))
}
