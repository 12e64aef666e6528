//! Records the reports of guest agents in their instances. `vms.rs` finds missed ones.
//!
//! The agent state of an instance that is not running is written by `objects/instance/power.rs`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use muster_types::ids::InstanceId;
use muster_types::node::NodeApi;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::app::App;
use crate::objects::instance::agent::{agent_report, has_guest, is_recorded, observe};
use muster_store::instances::InstanceRow;

/// The interval in which the reports of a guest are counted.
pub(super) const RECONCILE_INTERVAL: Duration = Duration::from_secs(10);

/// The maximum number of reports of one guest that are recorded immediately between two passes: enough to boot, but a
/// misbehaving guest cannot overload the daemon.
const MAX_REPORTS_PER_INTERVAL: u32 = 20;

/// Records guest reports until `stop` is set.
pub async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let mut listeners = JoinSet::new();
    for node in &app.nodes {
        listeners.spawn(listen(Arc::clone(&app), Arc::clone(node)));
    }
    // The sender lives as long as the daemon.
    let _ = stop.wait_for(|stop| *stop).await;
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

/// Records the report of a guest, which a previous daemon may have missed.
pub(super) async fn reconcile_guest(app: &App, node: &Arc<dyn NodeApi>, row: &InstanceRow) {
    if has_guest(row, node)
        && !is_recorded(row, &agent_report(node.guests().report(row.id).as_ref()))
        && let Err(error) = observe(app, node, row.id).await
    {
        tracing::warn!(instance = %row.id, %error, "failed to record a guest report");
    }
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
