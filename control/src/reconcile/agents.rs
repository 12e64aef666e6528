//! Hears what guests say of themselves, and writes it into the records of their instances.
//!
//! How an instance that is not on is called is written by `objects/instance/power.rs`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use muster_types::Result;
use muster_types::event::{Event, EventType};
use muster_types::guest::GuestReport;
use muster_types::ids::InstanceId;
use muster_types::instance::{InstanceState, PowerState};
use muster_types::node::NodeApi;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::app::App;
use crate::objects::instance::{object, power};
use crate::store::instances::{self, AgentSeen, InstanceRow};
use crate::store::transaction;

/// How often nodes are looked at.
const TICK: Duration = Duration::from_secs(10);
/// Nodes that are looked at in one tick.
const NODES_AT_ONCE: usize = 100;

/// How often one guest is heard at once between two looks: more than any needs to start, and nothing for one that only
/// wants to keep us busy.
const MOST_AT_ONCE: u32 = 20;

/// Looks after what is known of guests until told to stop.
pub async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let mut listeners = JoinSet::new();
    for node in &app.nodes {
        listeners.spawn(listen(Arc::clone(&app), Arc::clone(node)));
    }
    let mut next = 0;
    while !*stop.borrow() {
        for _ in 0..NODES_AT_ONCE.min(app.nodes.len()) {
            let node = &app.nodes[next % app.nodes.len()];
            next = (next + 1) % app.nodes.len();
            if let Err(error) = look(&app, node).await {
                tracing::warn!(node = node.identity().name, %error, "guests were not looked after");
            }
        }
        tokio::select! {
            () = tokio::time::sleep(TICK) => {}
            _ = stop.changed() => {}
        }
    }
    listeners.abort_all();
}

/// How often guests may change their mind and be heard at once. What is not is seen by the next look.
#[derive(Debug, Default)]
struct Patience {
    since: Option<Instant>,
    heard: HashMap<InstanceId, u32>,
}

impl Patience {
    fn hears(&mut self, id: InstanceId, time: Instant) -> bool {
        if self.since.is_none_or(|since| time.duration_since(since) >= TICK) {
            *self = Self { since: Some(time), heard: HashMap::new() };
        }
        let count = self.heard.entry(id).or_default();
        *count = count.saturating_add(1);
        *count <= MOST_AT_ONCE
    }
}

async fn listen(app: Arc<App>, node: Arc<dyn NodeApi>) {
    let mut changes = node.guests().changes();
    let mut patience = Patience::default();
    while let Some(id) = changes.next().await {
        if !patience.hears(id, Instant::now()) {
            continue;
        }
        if let Err(error) = observe(&app, &node, id).await {
            tracing::warn!(instance = %id, %error, "what a guest said was not written down");
        }
    }
}

/// One look at the guests of a node: a daemon that died may have left what is not so any more.
async fn look(app: &App, node: &Arc<dyn NodeApi>) -> Result<()> {
    for row in instances::of_node(&*app.store, node.identity().id).await? {
        if has_guest(&row, node) && !is_seen(&row, &seen(node.guests().report(row.id).as_ref())) {
            observe(app, node, row.id).await?;
        }
    }
    Ok(())
}

/// Writes down what is known of a guest, and tells those who wait for it.
pub(crate) async fn observe(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) -> Result<()> {
    let outcome = write(app, node, id).await;
    app.agents.reported(id);
    outcome
}

async fn write(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) -> Result<()> {
    let _last_word = app.agents.writing().await;
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
fn has_guest(row: &InstanceRow, node: &Arc<dyn NodeApi>) -> bool {
    row.state == InstanceState::Created
        && row.power_state == PowerState::On
        && row.node == Some(node.identity().id)
        && power::agent_state(row, PowerState::On).is_some()
}

/// What a report says; nobody has heard of a guest without one.
fn seen(report: Option<&GuestReport>) -> AgentSeen {
    let report = report.cloned().unwrap_or_default();
    AgentSeen {
        state: report.state.to_string(),
        start_time: report.agent_start_time,
        system_boot_time: report.system_boot_time,
    }
}

fn is_seen(row: &InstanceRow, seen: &AgentSeen) -> bool {
    row.agent_state.as_ref() == Some(&seen.state)
        && row.agent_start_time == seen.start_time
        && row.agent_system_boot_time == seen.system_boot_time
}

#[cfg(test)]
mod tests {
    use muster_types::guest::AgentState;

    use super::*;

    #[test]
    fn a_guest_that_changes_its_mind_all_the_time_is_not_always_heard() {
        let (mut patience, time) = (Patience::default(), Instant::now());
        let (busy, calm) = (InstanceId::new(), InstanceId::new());
        let heard = (0..1000).filter(|_| patience.hears(busy, time)).count();
        assert_eq!(heard, 20);
        assert!(patience.hears(calm, time), "others are");
        assert!(patience.hears(busy, time + TICK), "and later it is again");
    }

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
