//! `muster why`, and the same for each type of object: why it is in its state, as the server explains it.

use muster_types::explanation::{Explanation, NodeVerdict};

use super::session::Session;
use crate::api::{ApiResponse, ObjectPath};
use crate::output::{self, Table, escape_control, or_dash};
use crate::time::format_utc;

/// Explains the instance with a name or id, or else the network.
pub(super) async fn run(session: &Session, reference: &str) -> anyhow::Result<()> {
    match session.client.explain(ObjectPath::Instance(reference)).await {
        Err(error) if error.is_not_found() => {
            let network = session.client.explain(ObjectPath::Network(reference)).await;
            // Most callers mean an instance.
            show(session, &network.map_err(|other| if other.is_not_found() { error } else { other })?)
        }
        explained => show(session, &explained?),
    }
}

/// Explains an object.
pub(super) async fn explain(session: &Session, object: ObjectPath<'_>) -> anyhow::Result<()> {
    show(session, &session.client.explain(object).await?)
}

fn show(session: &Session, response: &ApiResponse<Explanation>) -> anyhow::Result<()> {
    if session.is_structured() {
        return session.print_value(response.json());
    }
    let explanation = response.clone().value()?;
    let name = explanation.name.as_ref().map_or_else(String::new, |name| format!(" {name}"));
    let title = format!("{}{name} ({})", explanation.object_type, explanation.uuid);
    let mut text = format!("{}\n{}", escape_control(&title), lines(&explanation));
    if !explanation.placement.is_empty() {
        text.push_str(&format!("\n{}", nodes(explanation.placement).render(None)));
    }
    output::print(&text)
}

/// Returns the state, what it waits for and what to do, one per line.
pub(super) fn lines(explanation: &Explanation) -> String {
    let since = explanation.since.map_or_else(String::new, |since| format!(" since {}", format_utc(since)));
    let mut lines = vec![format!("now: {}{since}: {}", explanation.state, explanation.why)];
    for awaited in &explanation.waits_for {
        lines.push(format!(
            "waits for: {} ({} {}, {})",
            awaited.text, awaited.object_type, awaited.uuid, awaited.state
        ));
    }
    for step in &explanation.next {
        let command = step.command.as_ref().map_or_else(String::new, |command| format!(": `{command}`"));
        lines.push(format!("next: {}{command}", step.text));
    }
    lines.iter().map(|line| escape_control(line) + "\n").collect()
}

/// What the scheduler decided about each node.
fn nodes(verdicts: Vec<NodeVerdict>) -> Table {
    Table::new(&["NODE", "PLACEMENT"], &["STAGE", "REASON"]).rows(verdicts.into_iter().map(|verdict| {
        let placement = match (verdict.chosen, verdict.stage) {
            (true, _) => "chosen",
            (false, None) => "candidate",
            (false, Some(_)) => "rejected",
        };
        let stage = verdict.stage.map(|stage| stage.to_string()).unwrap_or_default();
        [verdict.node, placement.to_owned(), or_dash(stage), or_dash(verdict.reason.unwrap_or_default())]
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn prints_state_reason_and_next_steps_escaped() {
        let explanation: Explanation = from_value(json!({
            "object_type": "instance", "uuid": "u", "name": "web", "state": "error", "since": 1_767_225_600.0,
            "why": "it failed: \u{1b}[31mbad", "waits_for": [
                {"object_type": "clusteroperation", "uuid": "o", "state": "queued", "text": "instance_start"}],
            "next": [{"text": "request less", "command": null}, {"text": "delete it", "command": "muster instance delete u"}],
            "placement": [
                {"node": "a", "chosen": false, "stage": "is_hypervisor", "reason": "runs no VMs"},
                {"node": "b", "chosen": true, "stage": null, "reason": null}]
        }))
        .unwrap();
        let expected = "now: error since 2026-01-01T00:00:00.000Z: it failed: \\u{1b}[31mbad\n\
                        waits for: instance_start (clusteroperation o, queued)\n\
                        next: request less\n\
                        next: delete it: `muster instance delete u`\n";
        assert_eq!(lines(&explanation), expected);
        let table = nodes(explanation.placement).render(None);
        assert!(
            table.contains("rejected") && table.contains("runs no VMs") && table.contains("chosen"),
            "{table}"
        );
    }
}
