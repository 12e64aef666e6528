//! Records what guests report about their agents in the records of their instances.
//!
//! `power.rs` records the agent state of an instance that is not running.

use std::sync::Arc;

use muster_store::instances::{self, AgentStatus, InstanceRow};
use muster_store::transaction;
use muster_types::Result;
use muster_types::event::{Event, EventType};
use muster_types::guest::GuestReport;
use muster_types::ids::InstanceId;
use muster_types::instance::{InstanceState, PowerState, SideChannel};
use muster_types::node::NodeApi;

use super::object;
use crate::app::App;

/// Records the latest report of a guest and notifies its waiters.
pub(crate) async fn observe(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) -> Result<()> {
    let outcome = record_status(app, node, id).await;
    app.agents.notify_reported(id);
    outcome
}

async fn record_status(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) -> Result<()> {
    let _writing = app.agents.lock_writing().await;
    let row = instances::get(&*app.store, id).await?;
    let Some(row) = row.filter(|row| has_guest(row, node)) else { return Ok(()) };
    let status = agent_report(node.guests().report(id).as_ref());
    if is_recorded(&row, &status) {
        return Ok(());
    }
    let written = transaction!(app.store, |tx| { Ok(instances::set_agent(tx, &row, &status).await?) })?;
    if written && row.agent_state.as_ref() != Some(&status.state) {
        let text = format!("agent state is now {}", status.state);
        let event = Event::new(EventType::Status, object(id), text);
        app.events.record(event.with("from", row.agent_state));
    }
    Ok(())
}

/// Returns whether the node's reports about the guest of an instance are valid.
pub(crate) fn has_guest(row: &InstanceRow, node: &Arc<dyn NodeApi>) -> bool {
    row.state == InstanceState::Created
        && row.power_state == PowerState::On
        && row.node == Some(node.identity().id)
        && state_for_power(row, PowerState::On).is_some()
}

/// Returns the agent state of an instance whose power state changed, `None` without a side channel for an agent.
pub(crate) fn state_for_power(row: &InstanceRow, power: PowerState) -> Option<&'static str> {
    if !row.spec.side_channels.contains(&SideChannel::Agent)
        && !row.spec.side_channels.contains(&SideChannel::Agent2)
    {
        return None;
    }
    Some(match power {
        PowerState::On => "not ready (no contact)",
        PowerState::Paused => "not ready (instance paused)",
        PowerState::Unknown => "unknown",
        PowerState::Initial | PowerState::Off | PowerState::Crashed => "not ready (instance powered off)",
    })
}

/// Converts a report into the columns of the instance. A guest without a report had no contact.
pub(crate) fn agent_report(report: Option<&GuestReport>) -> AgentStatus {
    let report = report.cloned().unwrap_or_default();
    AgentStatus {
        state: report.state.to_string(),
        start_time: report.agent_start_time,
        system_boot_time: report.system_boot_time,
    }
}

pub(crate) fn is_recorded(row: &InstanceRow, status: &AgentStatus) -> bool {
    row.agent_state.as_ref() == Some(&status.state)
        && row.agent_start_time == status.start_time
        && row.agent_system_boot_time == status.system_boot_time
}

#[cfg(test)]
mod tests {
    use muster_types::guest::AgentState;

    use super::*;

    #[test]
    fn guest_without_report_has_no_contact() {
        assert_eq!(agent_report(None).state, "not ready (no contact)");
        let report = GuestReport {
            state: AgentState::Degraded,
            agent_start_time: Some(2.5),
            system_boot_time: Some(1.5),
            ..GuestReport::default()
        };
        let status = agent_report(Some(&report));
        assert_eq!(
            (status.state.as_str(), status.start_time, status.system_boot_time),
            ("ready (degraded)", Some(2.5), Some(1.5))
        );
    }
}
