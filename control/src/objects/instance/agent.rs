//! Writes what guests report about their agents into the records of their instances.
//!
//! The agent state of an instance that is not running is written by `power.rs`.

use std::sync::Arc;

use muster_store::instances::{self, AgentStatus, InstanceRow};
use muster_store::transaction;
use muster_types::Result;
use muster_types::event::{Event, EventType};
use muster_types::guest::GuestReport;
use muster_types::ids::InstanceId;
use muster_types::instance::{InstanceState, PowerState};
use muster_types::node::NodeApi;

use super::{object, power};
use crate::app::App;

/// Writes down what is known of a guest, and tells those who wait for it.
pub(crate) async fn observe(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) -> Result<()> {
    let outcome = write(app, node, id).await;
    app.agents.notify_reported(id);
    outcome
}

async fn write(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) -> Result<()> {
    let _writing = app.agents.lock_writing().await;
    let row = instances::get(&*app.store, id).await?;
    let Some(row) = row.filter(|row| has_guest(row, node)) else { return Ok(()) };
    let seen = seen(node.guests().report(id).as_ref());
    if is_seen(&row, &seen) {
        return Ok(());
    }
    let news = transaction!(app.store, |tx| { Ok(instances::set_agent(tx, id, &seen).await?) })?;
    if news && row.agent_state.as_ref() != Some(&seen.state) {
        let text = format!("agent state is now {}", seen.state);
        let event = Event::new(EventType::Status, object(id), text);
        app.events.record(event.with("from", row.agent_state));
    }
    Ok(())
}

/// Whether what a node says of the guest of an instance counts.
pub(crate) fn has_guest(row: &InstanceRow, node: &Arc<dyn NodeApi>) -> bool {
    row.state == InstanceState::Created
        && row.power_state == PowerState::On
        && row.node == Some(node.identity().id)
        && power::agent_state(row, PowerState::On).is_some()
}

/// What a report says; nobody has heard of a guest without one.
pub(crate) fn seen(report: Option<&GuestReport>) -> AgentStatus {
    let report = report.cloned().unwrap_or_default();
    AgentStatus {
        state: report.state.to_string(),
        start_time: report.agent_start_time,
        system_boot_time: report.system_boot_time,
    }
}

pub(crate) fn is_seen(row: &InstanceRow, seen: &AgentStatus) -> bool {
    row.agent_state.as_ref() == Some(&seen.state)
        && row.agent_start_time == seen.start_time
        && row.agent_system_boot_time == seen.system_boot_time
}

#[cfg(test)]
mod tests {
    use muster_types::guest::AgentState;

    use super::*;

    #[test]
    fn nobody_has_heard_of_a_guest_without_a_report() {
        assert_eq!(seen(None).state, "not ready (no contact)");
        let report = GuestReport {
            state: AgentState::Degraded,
            agent_start_time: Some(2.5),
            system_boot_time: Some(1.5),
            ..GuestReport::default()
        };
        let seen = seen(Some(&report));
        assert_eq!(
            (seen.state.as_str(), seen.start_time, seen.system_boot_time),
            ("ready (degraded)", Some(2.5), Some(1.5))
        );
    }
}
