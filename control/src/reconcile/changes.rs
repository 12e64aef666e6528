//! Polls the summary of the database, and notifies the tasks of this daemon of changes that other daemons made.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::changes::{self, ChangeSummary};
use muster_types::ids::NodeId;
use tokio::sync::watch;

use crate::app::App;

/// The interval between reads of the summary while the cluster is busy: the delay with which the changes of other daemons are
/// noticed.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The interval while nothing changes.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(2500);
/// The interval while no other daemon has a node.
const SOLE_POLL_INTERVAL: Duration = Duration::from_secs(3);
/// The time for which the cluster counts as busy after a change.
const BUSY_PERIOD: Duration = Duration::from_secs(15);
/// The age up to which a summary is the last one that was read in time.
pub(super) const MAX_SUMMARY_AGE: Duration = Duration::from_secs(4);

/// Polls until `stop` is set.
pub(super) async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let nodes: Vec<NodeId> = app.nodes.iter().map(|node| node.identity().id).collect();
    let own_nodes = i64::try_from(nodes.len()).expect("a daemon has few nodes");
    let mut interval = POLL_INTERVAL;
    let mut busy_until = Instant::now() + BUSY_PERIOD;
    while !*stop.borrow() {
        let (read_at, time) = (Instant::now(), app.store.membership.database_time());
        let outcome = changes::read(&*app.store, &nodes, time).await;
        app.metrics.passed("changes", read_at, outcome.is_ok());
        match outcome {
            Ok(summary) => {
                app.lease_observations.observe(&summary.leases, Instant::now());
                app.health.database_responded();
                if summary.next_operation.is_some_and(|due| due <= time) {
                    app.queue.wake();
                }
                let before = app.cluster_changes.latest();
                let differs = before.as_ref().is_some_and(|before| topology(before) != topology(&summary));
                let nodes = |summary: &ChangeSummary| (summary.nodes, summary.cordoned_nodes);
                if before.as_ref().is_some_and(|before| nodes(before) != nodes(&summary)) {
                    app.node_cache.clear();
                }
                if before.is_some_and(|before| is_busy(&before, &summary)) {
                    busy_until = read_at + BUSY_PERIOD;
                }
                interval = if summary.nodes.0 <= own_nodes {
                    SOLE_POLL_INTERVAL
                } else if read_at < busy_until {
                    POLL_INTERVAL
                } else {
                    IDLE_POLL_INTERVAL
                };
                app.cluster_changes.replace(read_at, summary);
                if differs {
                    app.networks.notify_changed();
                }
            }
            Err(error) => tracing::warn!(%error, "failed to read the changes of other daemons"),
        }
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            _ = stop.changed() => {}
        }
    }
}

/// Returns whether there is work to do, or something changed between two summaries.
fn is_busy(before: &ChangeSummary, after: &ChangeSummary) -> bool {
    let content = |summary: &ChangeSummary| {
        (topology(summary), summary.blobs, summary.leases.len(), summary.agent_operations)
    };
    after.next_operation.is_some() || after.agent_operations > 0 || content(before) != content(after)
}

/// Returns what decides which networks are on which nodes.
fn topology(summary: &ChangeSummary) -> ((i64, i64), (i64, i64, i64), Option<NodeId>) {
    (summary.networks, summary.nodes, summary.network_owner)
}
