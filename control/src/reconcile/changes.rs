//! Polls the summary of the database, and notifies the tasks of this daemon of changes that other daemons made.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::changes::{self, ChangeSummary};
use muster_types::ids::NodeId;
use tokio::sync::watch;

use crate::app::App;

/// The interval between reads of the summary: the delay with which the changes of other daemons are noticed.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The interval while no other daemon has a node.
const SOLE_POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Polls until `stop` is set.
pub(super) async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let nodes: Vec<NodeId> = app.nodes.iter().map(|node| node.identity().id).collect();
    let own_nodes = i64::try_from(nodes.len()).expect("a daemon has few nodes");
    let mut interval = POLL_INTERVAL;
    while !*stop.borrow() {
        let (read_at, time) = (Instant::now(), app.store.membership.database_time());
        match changes::read(&*app.store, &nodes, time).await {
            Ok(summary) => {
                app.health.database_responded();
                if summary.next_operation.is_some_and(|due| due <= time) {
                    app.queue.wake();
                }
                interval = if summary.nodes.0 > own_nodes { POLL_INTERVAL } else { SOLE_POLL_INTERVAL };
                let topology =
                    |summary: &ChangeSummary| (summary.networks, summary.nodes, summary.network_owner);
                let current = topology(&summary);
                let before = app.cluster_changes.replace(read_at, summary);
                if before.is_some_and(|before| topology(&before) != current) {
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
