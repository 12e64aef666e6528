//! Hears what guests say of themselves, and writes it into the records of their instances.
//!
//! How an instance that is not on is called is written by `objects/instance/power.rs`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use muster_types::Result;
use muster_types::ids::InstanceId;
use muster_types::node::NodeApi;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::app::App;
use crate::objects::instance::agent::{agent_report, has_guest, is_recorded, observe};
use muster_store::instances;

/// How often nodes are looked at.
pub(super) const RECONCILE_INTERVAL: Duration = Duration::from_secs(10);
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
            () = tokio::time::sleep(RECONCILE_INTERVAL) => {}
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
        if self.since.is_none_or(|since| time.duration_since(since) >= RECONCILE_INTERVAL) {
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
        if has_guest(&row, node) && !is_recorded(&row, &agent_report(node.guests().report(row.id).as_ref())) {
            observe(app, node, row.id).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_changes_its_mind_all_the_time_is_not_always_heard() {
        let (mut patience, time) = (Patience::default(), Instant::now());
        let (busy, calm) = (InstanceId::new(), InstanceId::new());
        let heard = (0..1000).filter(|_| patience.hears(busy, time)).count();
        assert_eq!(heard, 20);
        assert!(patience.hears(calm, time), "others are");
        assert!(patience.hears(busy, time + RECONCILE_INTERVAL), "and later it is again");
    }
}
