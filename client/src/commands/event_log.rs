//! `--follow` of events: prints them as they happen.

use std::io;

use anyhow::Context as _;
use serde_json::{Map, Value};

use super::event_follower::EventFollower;
use super::events::format_fields;
use super::session::Session;
use crate::api::{EventQuery, ObjectPath, StreamMessage, StreamQuery};
use crate::output::{compact, escape_control, or_dash};
use crate::terminal::write_output;
use crate::time::format_utc;

/// The number of events before the new ones.
const DEFAULT_HISTORY: u32 = 10;

/// Prints the newest events of an object, and then new ones.
pub(super) async fn follow_object(
    session: &Session,
    object: ObjectPath<'_>,
    query: &EventQuery,
) -> anyhow::Result<()> {
    let client = &session.client;
    let record = client.object(object).await?;
    // The name of a namespace is its id.
    let id = ["uuid", "name"].iter().find_map(|name| record.json().get(*name)).map(compact);
    let id = id.context("the response does not contain the id of the object")?;
    let stream = StreamQuery { object: Some((object.object_type().to_string(), id)) };
    // Opened first, so that no event is missed.
    let mut follower = EventFollower::open(client, stream).await?;
    let query = EventQuery { limit: query.limit.or(Some(DEFAULT_HISTORY)), ..query.clone() };
    let history = client.events(object, &query).await?;
    for event in history.json().as_array().into_iter().flatten().rev() {
        if let Some(id) = event.get("event_uuid").and_then(Value::as_str) {
            follower.remember(id);
        }
        if !print_event(session, event, false)? {
            return Ok(());
        }
    }
    print_new(session, follower, query.event_type.as_deref(), false).await
}

/// Prints the events of everything that the caller may see.
pub(super) async fn follow_all(session: &Session, event_type: Option<&str>) -> anyhow::Result<()> {
    let follower = EventFollower::open(&session.client, StreamQuery::default()).await?;
    print_new(session, follower, event_type, true).await
}

async fn print_new(
    session: &Session,
    mut follower: EventFollower<'_>,
    event_type: Option<&str>,
    with_object: bool,
) -> anyhow::Result<()> {
    loop {
        let StreamMessage { kind, data } = follower.next().await?;
        let is_selected =
            event_type.is_none_or(|selected| data.get("event_type").is_some_and(|of| of == selected));
        if kind == "event" && is_selected && !print_event(session, &data, with_object)? {
            return Ok(());
        }
    }
}

/// Prints an event. Returns false if the reader closed the pipe.
fn print_event(session: &Session, event: &Value, with_object: bool) -> anyhow::Result<bool> {
    let text = if session.is_structured() {
        session.format.render_document(event)
    } else {
        escape_control(&line(event, with_object)) + "\n"
    };
    write_output(&mut io::stdout(), text.as_bytes())
}

/// Returns the line of an event: time, type, the object or the node, message and fields.
fn line(event: &Value, with_object: bool) -> String {
    let text = |name: &str| {
        or_dash(event.get(name).filter(|value| !value.is_null()).map(compact).unwrap_or_default())
    };
    let time = event.get("timestamp").and_then(Value::as_f64).map_or_else(|| "-".to_owned(), format_utc);
    let subject =
        if with_object { format!("{} {}", text("object_type"), text("object_uuid")) } else { text("node") };
    let none = Map::new();
    let fields = format_fields(event.get("extra").and_then(Value::as_object).unwrap_or(&none));
    let line = format!("{time}  {:<9}  {subject}  {}  {fields}", text("event_type"), text("message"));
    line.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn shows_the_object_of_an_event() {
        let event = json!({
            "timestamp": 1_767_225_600.0, "event_type": "audit", "message": "created", "node": "sim-1",
            "object_type": "instance", "object_uuid": "5d5e", "extra": { "by": "me" }
        });
        assert_eq!(line(&event, true), "2026-01-01T00:00:00.000Z  audit      instance 5d5e  created  by=me");
        assert_eq!(line(&event, false), "2026-01-01T00:00:00.000Z  audit      sim-1  created  by=me");
    }
}
