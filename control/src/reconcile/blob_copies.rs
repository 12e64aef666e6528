//! Copies blobs that too few nodes have. Every node decides for itself: all of them put the nodes in the same order
//! for a blob, and those in front that lack it fetch it.

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

/// Blobs considered in one pass.
const PASS: i64 = 500;

/// How many copies a blob should have: as many as the setting says, if there are that many nodes.
pub(super) async fn wanted(app: &App) -> Result<i64> {
    Ok(wanted_of(app, live_nodes(app).await?.len()))
}

fn wanted_of(app: &App, nodes: usize) -> i64 {
    let factor = i64::try_from(app.settings.blob_replication_factor).unwrap_or(i64::MAX);
    factor.min(i64::try_from(nodes).unwrap_or(i64::MAX))
}

/// Fetches what this node should have a copy of; one blob after the other.
pub(super) async fn run(app: &App, node: &Arc<dyn NodeApi>) -> Result<()> {
    let known = nodes::list(&*app.store).await?;
    // A node that is silent for so long that it is in error may never come back.
    let lost: Vec<NodeId> = known
        .iter()
        .filter(|row| matches!(row.state, NodeState::Error | NodeState::Deleted))
        .map(|row| row.identity.id)
        .collect();
    let living: Vec<NodeRow> = known.into_iter().filter(|row| row.state == NodeState::Created).collect();
    let wanted = wanted_of(app, living.len());
    if wanted < 2 && living.len() < 2 {
        return Ok(());
    }
    for id in blob_locations::under_replicated(&*app.store, wanted, PASS).await? {
        let copies = blob_locations::of_blob(&*app.store, id).await?;
        let whole = copies.iter().filter(|copy| copy.state == CopyState::Complete).map(|copy| copy.node);
        let whole: Vec<NodeId> = whole.filter(|node| !lost.contains(node)).collect();
        let lacking = usize::try_from(wanted).unwrap_or(0).saturating_sub(whole.len());
        let mut order: Vec<NodeId> =
            living.iter().map(|row| row.identity.id).filter(|id| !whole.contains(id)).collect();
        order.sort_by_cached_key(|node| rank(id, *node));
        if whole.is_empty() || !order.iter().take(lacking).any(|id| *id == node.identity().id) {
            continue;
        }
        if let Err(error) = copy(app, node, id, &whole, &living).await {
            tracing::warn!(blob = %id, node = node.identity().name, %error, "a blob was not copied");
        }
    }
    Ok(())
}

/// Where a node stands in the order for a blob.
fn rank(blob: BlobId, node: NodeId) -> Vec<u8> {
    let text = format!("{blob}{node}");
    digest::digest(&digest::SHA256, text.as_bytes()).as_ref().to_vec()
}
