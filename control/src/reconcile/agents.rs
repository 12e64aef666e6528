//! Records the reports of guest agents in their instances.
//!
//! The agent state of an instance that is not running is written by `objects/instance/power.rs`.

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

/// The interval between passes over the nodes.
pub(super) const RECONCILE_INTERVAL: Duration = Duration::from_secs(10);
/// The maximum number of nodes per pass.
const NODES_PER_PASS: usize = 100;

/// The maximum number of reports of one guest that are recorded immediately between two passes: enough to boot, but a
/// misbehaving guest cannot overload the daemon.
const MAX_REPORTS_PER_INTERVAL: u32 = 20;

/// Records guest reports until `stop` is set.
pub async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let mut listeners = JoinSet::new();
    for node in &app.nodes {
        listeners.spawn(listen(Arc::clone(&app), Arc::clone(node)));
    }
    let mut next = 0;
    while !*stop.borrow() {
        for _ in 0..NODES_PER_PASS.min(app.nodes.len()) {
            let node = &app.nodes[next % app.nodes.len()];
            next = (next + 1) % app.nodes.len();
            if let Err(error) = reconcile_node(&app, node).await {
                tracing::warn!(node = node.identity().name, %error, "failed to reconcile guests");
            }
        }
        tokio::select! {
            () = tokio::time::sleep(RECONCILE_INTERVAL) => {}
            _ = stop.changed() => {}
        }
    }
    listeners.abort_all();
}

/// Limits how many reports of a guest are recorded immediately. The next pass records the latest report anyway.
#[derive(Debug, Default)]
struct ReportLimiter {
    since: Option<Instant>,
    counts: HashMap<InstanceId, u32>,
}

impl ReportLimiter {
    fn allows(&mut self, id: InstanceId, time: Instant) -> bool {
        if self.since.is_none_or(|since| time.duration_since(since) >= RECONCILE_INTERVAL) {
            *self = Self { since: Some(time), counts: HashMap::new() };
        }
        let count = self.counts.entry(id).or_default();
        *count = count.saturating_add(1);
        *count <= MAX_REPORTS_PER_INTERVAL
    }
}

async fn listen(app: Arc<App>, node: Arc<dyn NodeApi>) {
    let mut changes = node.guests().changes();
    let mut limiter = ReportLimiter::default();
    while let Some(id) = changes.next().await {
        if !limiter.allows(id, Instant::now()) {
            continue;
        }
        if let Err(error) = observe(&app, &node, id).await {
            tracing::warn!(instance = %id, %error, "failed to record a guest report");
        }
    }
}

/// Records the reports of all guests of a node, also those that a previous daemon missed.
async fn reconcile_node(app: &App, node: &Arc<dyn NodeApi>) -> Result<()> {
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
    fn limits_reports_per_guest_and_interval() {
        let (mut limiter, time) = (ReportLimiter::default(), Instant::now());
        let (noisy, quiet) = (InstanceId::new(), InstanceId::new());
        let allowed = (0..1000).filter(|_| limiter.allows(noisy, time)).count();
        assert_eq!(allowed, 20);
        assert!(limiter.allows(quiet, time), "other guests have their own limit");
        assert!(limiter.allows(noisy, time + RECONCILE_INTERVAL), "the next interval has its own limit");
    }
}
