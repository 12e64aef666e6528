//! Why the scheduler found no node for an instance.

use muster_types::event::EventRecord;
use muster_types::event_message::EventMessage;
use muster_types::scheduling::SchedulingStage;
use serde_json::Value;

use super::session::Session;
use crate::api::{ApiResponse, EventQuery, ObjectPath};
use crate::output::compact;
use crate::transfer::poll_pause;

/// The maximum number of events that the server returns.
pub(super) const MAX_EVENTS: u32 = 1000;
/// How often the events are queried: the server writes them with a delay.
const MAX_EVENT_QUERIES: usize = 10;
/// The maximum number of nodes that one stage names; a cluster may have thousands.
pub(super) const MAX_NODES: usize = 12;

/// Returns why each node rejected an instance, from the events of the last scheduling run.
pub(super) async fn node_rejections(session: &Session, instance: &str) -> Vec<String> {
    let query = EventQuery { limit: Some(MAX_EVENTS), ..EventQuery::default() };
    for _ in 0..MAX_EVENT_QUERIES {
        let events = session.client.events(ObjectPath::Instance(instance), &query).await;
        let events = events.and_then(ApiResponse::value).unwrap_or_default();
        let messages = events.iter().map(|event| (event, EventMessage::parse(&event.message)));
        let last_run: Vec<_> =
            messages.take_while(|(_, message)| *message != Some(EventMessage::SchedulingStarted)).collect();
        let is_complete = last_run.iter().any(|(_, message)| {
            matches!(
                message,
                Some(EventMessage::SchedulingAborted(_) | EventMessage::SchedulingFinalCandidates)
            )
        });
        if is_complete {
            return last_run.iter().rev().flat_map(|(event, _)| rejected_nodes(event)).collect();
        }
        poll_pause().await;
    }
    vec![]
}

/// Returns the nodes that an event rejects, each with the reason.
pub(super) fn rejected_nodes(event: &EventRecord) -> Vec<String> {
    let mut lines = vec![];
    for (node, reason) in
        ["dropped", "refused"].iter().filter_map(|name| event.extra.get(*name)?.as_object()).flatten()
    {
        lines.push(format!("not on {node}: {}", compact(reason)));
    }
    if lines.len() > MAX_NODES {
        let more = lines.len() - MAX_NODES;
        lines.truncate(MAX_NODES);
        lines.push(format!("and {more} more nodes"));
    }
    lines
}

/// Explains why no node passed a stage. `None` is a stage that this client does not know.
pub(super) fn stage_reason(stage: Option<SchedulingStage>, transient: bool) -> &'static str {
    stage.map_or("no node is suitable", |stage| stage.refusal(transient))
}

/// Returns whether the refusal that an event reports is transient. Older events do not say so.
pub(super) fn is_transient(event: &EventRecord) -> bool {
    event.extra.get("transient").and_then(Value::as_bool).unwrap_or(true)
}

/// Returns what to do if no node passed a stage.
pub(super) fn stage_advice(stage: Option<SchedulingStage>, transient: bool) -> &'static str {
    stage.map_or("see `muster instance events`", |stage| stage.advice(transient))
}
