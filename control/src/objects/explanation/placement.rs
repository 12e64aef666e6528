//! What the scheduler decided about each node.

use std::collections::BTreeMap;

use muster_types::event::EventRecord;
use muster_types::event_message::EventMessage;
use muster_types::explanation::NodeVerdict;
use muster_types::scheduling::SchedulingStage;
use serde_json::Value;

/// The last scheduling run, as its events report it.
#[derive(Debug, Default)]
pub(super) struct LastPlacement {
    pub(super) verdicts: Vec<NodeVerdict>,
    /// The stage at which no node was left, and whether a later attempt may succeed.
    pub(super) refusal: Option<(SchedulingStage, bool)>,
}

impl LastPlacement {
    /// Reads the last run from events, newest first.
    pub(super) fn read(events: &[EventRecord]) -> Self {
        let messages = events.iter().map(|event| (event, EventMessage::parse(&event.message)));
        let run = messages.take_while(|(_, message)| *message != Some(EventMessage::SchedulingStarted));
        let mut last = Self::default();
        let mut nodes: BTreeMap<String, NodeVerdict> = BTreeMap::new();
        for (event, message) in run {
            match message {
                Some(EventMessage::SchedulingStage(stage)) => {
                    add_rejected(&mut nodes, event, "dropped", stage);
                }
                Some(EventMessage::SchedulingAborted(stage)) => {
                    let transient = event.extra.get("transient").and_then(Value::as_bool).unwrap_or(true);
                    last.refusal = Some((stage, transient));
                }
                Some(EventMessage::SchedulingFinalCandidates) => {
                    add_rejected(&mut nodes, event, "refused", SchedulingStage::CapacityGuard);
                    let chosen = event.extra.get("chosen").and_then(Value::as_str);
                    let candidates = event.extra.get("candidates").and_then(Value::as_array);
                    let names = candidates.into_iter().flatten().filter_map(Value::as_str).chain(chosen);
                    for node in names {
                        nodes.entry(node.to_owned()).or_insert_with(|| NodeVerdict {
                            node: node.to_owned(),
                            chosen: chosen == Some(node),
                            stage: None,
                            reason: None,
                        });
                    }
                }
                _ => {}
            }
        }
        last.verdicts = nodes.into_values().collect();
        last
    }
}

/// Adds the nodes that a field of an event rejects, with their reasons.
fn add_rejected(
    nodes: &mut BTreeMap<String, NodeVerdict>,
    event: &EventRecord,
    field: &str,
    stage: SchedulingStage,
) {
    for (node, reason) in event.extra.get(field).and_then(Value::as_object).into_iter().flatten() {
        let reason = reason.as_str().map_or_else(|| reason.to_string(), str::to_owned);
        let verdict =
            NodeVerdict { node: node.clone(), chosen: false, stage: Some(stage), reason: Some(reason) };
        nodes.insert(node.clone(), verdict);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(message: &EventMessage, extra: &Value) -> EventRecord {
        serde_json::from_value(json!({
            "event_uuid": "x", "request_id": null, "timestamp": 0.0, "event_type": "status", "type": "status",
            "message": message.to_string(), "extra": extra, "node": "a", "fqdn": "a", "duration": null
        }))
        .unwrap()
    }

    #[test]
    fn reads_only_the_last_run() {
        let events = [
            event(
                &EventMessage::SchedulingFinalCandidates,
                &json!({ "candidates": ["b", "c", "d"], "chosen": "c", "refused": {"b": "full"} }),
            ),
            event(
                &EventMessage::SchedulingStage(SchedulingStage::IsHypervisor),
                &json!({ "dropped": {"a": "no VMs"} }),
            ),
            event(&EventMessage::SchedulingStarted, &json!({})),
            event(
                &EventMessage::SchedulingAborted(SchedulingStage::QueueState),
                &json!({ "transient": true }),
            ),
            event(
                &EventMessage::SchedulingStage(SchedulingStage::QueueState),
                &json!({ "dropped": {"z": "busy"} }),
            ),
        ];
        let last = LastPlacement::read(&events);
        assert_eq!(last.refusal, None);
        let verdicts: Vec<_> = last
            .verdicts
            .iter()
            .map(|verdict| (verdict.node.as_str(), verdict.chosen, verdict.stage, verdict.reason.as_deref()))
            .collect();
        assert_eq!(
            verdicts,
            [
                ("a", false, Some(SchedulingStage::IsHypervisor), Some("no VMs")),
                ("b", false, Some(SchedulingStage::CapacityGuard), Some("full")),
                ("c", true, None, None),
                ("d", false, None, None),
            ]
        );
    }

    #[test]
    fn reads_why_no_node_was_left() {
        let aborted = EventMessage::SchedulingAborted(SchedulingStage::SufficientIdleMemory);
        let events = [event(&aborted, &json!({ "transient": false }))];
        assert_eq!(
            LastPlacement::read(&events).refusal,
            Some((SchedulingStage::SufficientIdleMemory, false))
        );
    }
}
