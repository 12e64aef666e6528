//! Replicates blobs that have too few copies. Each node decides for itself: all nodes rank the nodes of a blob in the
//! same order, and the first ones without a copy fetch it.

use std::sync::Arc;

use aws_lc_rs::digest;
use muster_types::Result;
use muster_types::blob::CopyState;
use muster_types::ids::{BlobId, NodeId};
use muster_types::node::{NodeApi, NodeState};

use crate::app::App;
use crate::objects::blob_copy::{copy, live_nodes};
use muster_store::blob_locations;
use muster_store::nodes::{self, NodeRow};

/// The maximum number of blobs checked in one pass.
const BATCH: i64 = 500;

/// Returns the number of copies that a blob should have: `BLOB_REPLICATION_FACTOR`, but at most one for each live node.
pub(super) async fn target_copies(app: &App) -> Result<usize> {
    Ok(target_copies_on(app, live_nodes(app).await?.len()))
}

fn target_copies_on(app: &App, nodes: usize) -> usize {
    // A factor that does not fit is larger than the number of nodes.
    usize::try_from(app.settings.blob_replication_factor).map_or(nodes, |factor| factor.min(nodes))
}

/// Fetches the blobs of which this node should have a copy, one after the other.
pub(super) async fn run(app: &App, node: &Arc<dyn NodeApi>) -> Result<()> {
    let all_nodes = nodes::list(&*app.store).await?;
    let is_own = |row: &&NodeRow| row.identity.id == node.identity().id;
    if all_nodes.iter().find(is_own).is_some_and(|row| row.state == NodeState::Deleted) {
        return Ok(());
    }
    // A node in error has not checked in for so long that it may never return.
    let lost: Vec<NodeId> = all_nodes
        .iter()
        .filter(|row| matches!(row.state, NodeState::Error | NodeState::Deleted))
        .map(|row| row.identity.id)
        .collect();
    let live: Vec<NodeRow> = all_nodes.into_iter().filter(|row| row.state == NodeState::Created).collect();
    let target = target_copies_on(app, live.len());
    if target < 2 && live.len() < 2 {
        return Ok(());
    }
    let min_copies = i64::try_from(target).expect("a cluster has few nodes");
    for id in blob_locations::under_replicated(&*app.store, min_copies, BATCH).await? {
        let copies = blob_locations::of_blob(&*app.store, id).await?;
        let complete = copies.iter().filter(|copy| copy.state == CopyState::Complete).map(|copy| copy.node);
        let complete: Vec<NodeId> = complete.filter(|node| !lost.contains(node)).collect();
        let missing = target.saturating_sub(complete.len());
        let mut candidates: Vec<NodeId> =
            live.iter().map(|row| row.identity.id).filter(|id| !complete.contains(id)).collect();
        candidates.sort_by_cached_key(|node| rank(id, *node));
        if complete.is_empty() || !candidates.iter().take(missing).any(|id| *id == node.identity().id) {
            continue;
        }
        if let Err(error) = copy(app, node, id, &complete, &live).await {
            tracing::warn!(blob = %id, node = node.identity().name, %error, "failed to copy a blob");
        }
    }
    Ok(())
}

/// Returns the sort key of a node for a blob, the same on every node.
fn rank(blob: BlobId, node: NodeId) -> Vec<u8> {
    let text = format!("{blob}{node}");
    digest::digest(&digest::SHA256, text.as_bytes()).as_ref().to_vec()
}
