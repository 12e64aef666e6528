//! Polls the summary of the database, and notifies the tasks of this daemon of changes that other daemons made.

use std::sync::Arc;
use std::time::Duration;

use muster_store::changes::{self, ChangeSummary};
use muster_types::ids::NodeId;
use tokio::sync::watch;

use crate::app::App;

/// The interval between reads of the summary: the delay with which the changes of other daemons are noticed.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Polls until `stop` is set.
pub(super) async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let nodes: Vec<NodeId> = app.nodes.iter().map(|node| node.identity().id).collect();
    while !*stop.borrow() {
        let time = app.store.membership.database_time();
        match changes::read(&*app.store, &nodes, time).await {
            Ok(summary) => {
                app.health.database_responded();
                if summary.next_operation.is_some_and(|due| due <= time) {
                    app.queue.wake();
                }
                let before = app.cluster_changes.replace(summary);
                let topology =
                    |summary: ChangeSummary| (summary.networks, summary.nodes, summary.network_owner);
                if before.is_some_and(|before| topology(before) != topology(summary)) {
                    app.networks.notify_changed();
                }
            }
            Err(error) => tracing::warn!(%error, "failed to read the changes of other daemons"),
        }
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            _ = stop.changed() => {}
        }
    }
}
