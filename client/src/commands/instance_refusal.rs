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
    let query = EventQuery { limit: Some(MAX_EVENTS), event_type: None };
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

/// Explains why no node passed a stage. `None` is a stage that this client does not know. `transient` tells whether a later
/// attempt may succeed.
pub(super) fn stage_reason(stage: Option<SchedulingStage>, transient: bool) -> &'static str {
    match stage {
        Some(stage) if is_too_large(stage, transient) => "no node is large enough",
        Some(SchedulingStage::PreSchedule) => "no node is available",
        Some(SchedulingStage::IsHypervisor) => "no node runs instances",
        Some(SchedulingStage::CpuMaxPerInstance) => {
            "it requests more vCPUs than any node allows for one instance"
        }
        Some(SchedulingStage::SufficientIdleCpu) => "no node has enough vCPUs left",
        Some(SchedulingStage::SufficientIdleMemory) => "no node has enough memory left",
        Some(SchedulingStage::SufficientFreeDisk) => "no node has enough disk space left",
        Some(SchedulingStage::AffinityConstraints) => "no node satisfies its affinity rules",
        Some(SchedulingStage::QueueState) => "every node is busy with other operations",
        Some(SchedulingStage::SufficientIdleDisk) => "the disks of every node are busy",
        Some(SchedulingStage::CapacityGuard) => "the nodes filled up in the meantime",
        None => "no node is suitable",
    }
}

/// Returns whether no node could take the instance even if it had no other one.
fn is_too_large(stage: SchedulingStage, transient: bool) -> bool {
    stage.is_transient() && !transient
}

/// Returns whether the refusal that an event reports is transient. Older events do not say so.
pub(super) fn is_transient(event: &EventRecord) -> bool {
    event.extra.get("transient").and_then(Value::as_bool).unwrap_or(true)
}

/// Returns what to do if no node passed a stage. `transient` tells whether a later attempt may succeed.
pub(super) fn stage_advice(stage: Option<SchedulingStage>, transient: bool) -> &'static str {
    match stage {
        Some(stage) if is_too_large(stage, transient) => {
            "request less, or let an administrator add a larger node"
        }
        Some(SchedulingStage::PreSchedule | SchedulingStage::IsHypervisor) => {
            "an administrator can check the nodes with `muster node list`"
        }
        Some(SchedulingStage::CpuMaxPerInstance) => "request fewer vCPUs",
        Some(SchedulingStage::AffinityConstraints) => {
            "relax --affinity, or create the instances that it requires first"
        }
        Some(SchedulingStage::QueueState | SchedulingStage::SufficientIdleDisk) => "try again in a minute",
        Some(
            SchedulingStage::SufficientIdleCpu
            | SchedulingStage::SufficientIdleMemory
            | SchedulingStage::SufficientFreeDisk
            | SchedulingStage::CapacityGuard,
        ) => "request less, delete unused instances, or try again later",
        None => "see `muster instance events`",
    }
}
