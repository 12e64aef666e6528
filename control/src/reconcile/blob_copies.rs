//! Replicates blobs that have too few copies. Each node decides for itself: all nodes rank the nodes of a blob in the
//! same order, and the first ones without a copy fetch it. Each node also removes its own surplus copies.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::digest;
use muster_types::Result;
use muster_types::blob::CopyState;
use muster_types::event::{Event, EventType};
use muster_types::ids::{BlobId, InstanceId, NodeId};
use muster_types::node::{NodeApi, NodeState};
use muster_types::storage::StoredFileKind;
use muster_types::time::now;

use crate::app::App;
use crate::objects::agent_operation::input_blob;
use crate::objects::blob;
use crate::objects::blob_copy::{copy, storing_nodes};
use muster_store::instances::{self, InstanceRow};
use muster_store::nodes::{self, NodeRow};
use muster_store::{StoreError, Tx, agent_operations, blob_locations, blobs, transaction};

/// The maximum number of blobs checked in one pass.
const BATCH: i64 = 500;
/// The maximum number of surplus copies that a node removes in one pass.
const MAX_TRIMS: usize = 10;
/// The age in seconds up to which a copy is not removed: it may have been made for something that has not used it yet.
const MIN_TRIM_AGE: f64 = 600.0;

/// Returns the number of copies that a blob should have: `BLOB_REPLICATION_FACTOR`, but at most one for each live node that is not
/// drained.
pub(super) async fn target_copies(app: &App) -> Result<usize> {
    Ok(target_copies_on(app, storing_nodes(&*app.store).await?.len()))
}

fn target_copies_on(app: &App, nodes: usize) -> usize {
    // A factor that does not fit is larger than the number of nodes.
    usize::try_from(app.settings.blob_replication_factor).map_or(nodes, |factor| factor.min(nodes))
}

/// Fetches the blobs of which this node should have a copy, one after the other. The nodes are those of at most `max_age` ago.
pub(super) async fn run(app: &App, node: &Arc<dyn NodeApi>, max_age: Duration) -> Result<()> {
    let all_nodes = app.node_cache.get(&app.store, max_age).await?;
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
    let live: Vec<NodeRow> =
        all_nodes.iter().filter(|row| row.state == NodeState::Created).cloned().collect();
    if live.len() < 2 {
        return Ok(());
    }
    // The copies of drained nodes are read, but do not count.
    let drained: Vec<NodeId> =
        all_nodes.iter().filter(|row| row.is_drained()).map(|row| row.identity.id).collect();
    let storing: Vec<NodeId> =
        live.iter().filter(|row| row.stores_copies()).map(|row| row.identity.id).collect();
    let target = target_copies_on(app, storing.len());
    let min_copies = i64::try_from(target).expect("a cluster has few nodes");
    let mut ids = blob_locations::under_replicated(&*app.store, &drained, min_copies, BATCH).await?;
    // A drain waits until nodes that are up have copies of these blobs. The copies of stopped nodes do not suffice.
    for row in live.iter().filter(|row| row.is_drained()) {
        let only_copies = blob_locations::only_on(&*app.store, row.identity.id, &storing).await?;
        ids.extend(only_copies.into_iter().filter(|id| !ids.contains(id)).collect::<Vec<_>>());
    }
    for id in ids {
        let copies = blob_locations::of_blob(&*app.store, id).await?;
        let complete = copies.iter().filter(|copy| copy.state == CopyState::Complete).map(|copy| copy.node);
        let complete: Vec<NodeId> = complete.filter(|node| !lost.contains(node)).collect();
        let kept = complete.iter().filter(|node| !drained.contains(node)).count();
        let is_stored = complete.iter().any(|node| storing.contains(node));
        let missing = target.saturating_sub(kept).max(usize::from(!is_stored));
        let mut candidates: Vec<NodeId> =
            storing.iter().copied().filter(|id| !complete.contains(id)).collect();
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

/// Removes copies of this node that other nodes have in sufficient number.
///
/// Copies stay that the instances of this node use, that have a conversion, because VMs were created from them lately, and
/// that were written or verified within [`MIN_TRIM_AGE`].
pub(super) async fn trim(app: &App, node: &Arc<dyn NodeApi>) -> Result<()> {
    let node_id = node.identity().id;
    let target = target_copies(app).await?;
    let wanted = i64::try_from(target).expect("a cluster has few nodes");
    let before = now() - MIN_TRIM_AGE;
    let surplus = blob_locations::over_replicated(&*app.store, node_id, wanted, before, BATCH).await?;
    if surplus.is_empty() {
        return Ok(());
    }
    let files: HashSet<_> = node.storage().list_files().await?.iter().map(|file| file.kind).collect();
    let mut trimmed = 0;
    for id in surplus.into_iter().filter(|id| !files.contains(&StoredFileKind::Conversion(*id))) {
        if trimmed >= MAX_TRIMS {
            break;
        }
        // Another task uses the copy.
        let Some(_in_progress) = app.blobs_in_progress.begin(node_id, id) else { continue };
        // Not complete: it is neither served nor counted, and the next pass adopts it if this one is interrupted.
        let others = transaction!(app.store, |tx| {
            // Nodes decide about the copies of a blob one after the other, and not while an instance is created from it.
            if !blobs::lock(tx, id).await? || blobs_in_use(tx, node_id).await?.contains(&id) {
                return Ok(None);
            }
            let others = verified_elsewhere(app, tx, node_id, id).await?;
            if others < target.max(1) {
                return Ok(None);
            }
            blob_locations::set(tx, id, node_id, CopyState::Copying).await?;
            Ok(Some(others))
        })?;
        let Some(others) = others else { continue };
        node.storage().remove(id).await?;
        transaction!(app.store, |tx| { Ok(blob_locations::remove(tx, id, node_id).await?) })?;
        trimmed += 1;
        let event = Event::new(EventType::Status, blob::object(id), "surplus copy removed from a node")
            .with("node", node.identity().name.clone())
            .with("verified_copies", others);
        app.events.record(event);
    }
    Ok(())
}

/// Returns the number of other nodes that are up, reach their peers and are not drained, and whose copy of a blob was verified
/// lately.
async fn verified_elsewhere(app: &App, tx: &mut Tx, node: NodeId, id: BlobId) -> Result<usize, StoreError> {
    #[expect(clippy::cast_precision_loss, reason = "intervals are seconds")]
    let max_age = 2.0 * app.settings.checksum_verification_frequency as f64;
    let nodes = nodes::list(&mut *tx).await?;
    let is_up = |id: NodeId| {
        nodes.iter().any(|row| row.identity.id == id && row.stores_copies() && row.report.degraded.is_none())
    };
    let copies = blob_locations::of_blob(&mut *tx, id).await?;
    let verified = copies.iter().filter(|copy| copy.node != node && copy.state == CopyState::Complete);
    Ok(verified.filter(|copy| now() - copy.verified <= max_age && is_up(copy.node)).count())
}

/// Returns the blobs that the instances of a node were created from, with those that they depend on, and those that pending
/// agent operations copy into guests.
async fn blobs_in_use(tx: &mut Tx, node: NodeId) -> Result<HashSet<BlobId>, StoreError> {
    let rows = instances::of_node(&mut *tx, node).await?;
    let images = |row: &InstanceRow| {
        let disks = row.spec.disks.iter().filter_map(|disk| disk.blob_uuid);
        disks.chain(row.spec.nvram_template).collect::<Vec<_>>()
    };
    let mut next: Vec<BlobId> = rows.iter().flat_map(images).collect();
    let mut in_use: HashSet<BlobId> = next.iter().copied().collect();
    while !next.is_empty() {
        let found = blobs::by_ids(&mut *tx, &next).await?;
        next = found.values().filter_map(|row| row.depends_on).filter(|id| in_use.insert(*id)).collect();
    }
    let ids: Vec<InstanceId> = rows.iter().map(|row| row.id).collect();
    for operation in agent_operations::unfinished(&mut *tx, &ids).await? {
        in_use.extend(input_blob(&operation.commands));
    }
    Ok(in_use)
}

/// Returns the sort key of a node for a blob, the same on every node.
fn rank(blob: BlobId, node: NodeId) -> Vec<u8> {
    let text = format!("{blob}{node}");
    digest::digest(&digest::SHA256, text.as_bytes()).as_ref().to_vec()
}
