//! Rows of copies of blobs: which nodes have one, and in which state. See docs/decisions/0015.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use muster_types::blob::{BlobState, CopyState};
use muster_types::ids::{BlobId, NodeId};
use muster_types::node::NodeState;
use muster_types::time::now;

use super::uploads::UploadRow;
use super::{Read, Select as _, StoreError, Tx, Union, Value, columns, params, placeholders};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlobLocationRow {
    pub blob: BlobId,
    pub node: NodeId,
    pub state: CopyState,
    /// The Unix time when its content was last verified.
    pub verified: f64,
}

columns! { BlobLocationRow { blob: blob_uuid, node: node_uuid, state, verified, } }

/// Returns the copies of some blobs, by blob.
pub async fn of_blobs(
    mut db: impl Read,
    blobs: &[BlobId],
) -> Result<HashMap<BlobId, Vec<BlobLocationRow>>, StoreError> {
    let mut by_blob: HashMap<BlobId, Vec<BlobLocationRow>> = HashMap::new();
    if blobs.is_empty() {
        return Ok(by_blob);
    }
    let tail =
        format!("FROM blob_locations WHERE blob_uuid IN ({}) ORDER BY node_uuid", placeholders(blobs.len()));
    let values: Vec<Value> = blobs.iter().map(|id| (*id).into()).collect();
    for row in db.select::<BlobLocationRow>(&tail, &values).await? {
        by_blob.entry(row.blob).or_default().push(row);
    }
    Ok(by_blob)
}

/// Returns the copies of one blob.
pub async fn of_blob(db: impl Read, blob: BlobId) -> Result<Vec<BlobLocationRow>, StoreError> {
    Ok(of_blobs(db, &[blob]).await?.remove(&blob).unwrap_or_default())
}

/// What a node should store.
#[derive(Debug, Default)]
pub struct NodeContent {
    /// The state of the node.
    pub state: Option<NodeState>,
    pub copies: HashMap<BlobId, NodeCopy>,
    pub uploads: Vec<UploadRow>,
}

/// A copy of a node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NodeCopy {
    pub state: CopyState,
    /// The Unix time when its content was last verified.
    pub verified: f64,
    /// The state of the blob.
    pub blob: BlobState,
}

/// Returns what a node should store.
pub async fn of_node(db: impl Read, node: NodeId) -> Result<NodeContent, StoreError> {
    let mut union = Union::default();
    let state = union.add("state", "FROM nodes WHERE uuid = ?".into(), params![node]);
    let tail = "FROM blob_locations JOIN blobs ON blobs.uuid = blob_uuid WHERE node_uuid = ?";
    let columns = "blob_uuid, blob_locations.state, verified, blobs.state";
    let copies = union.add(columns, tail.into(), params![node]);
    let uploads = union.add(UploadRow::COLUMNS, "FROM uploads WHERE node_uuid = ?".into(), params![node]);
    let mut rows = union.fetch(db).await?;
    let found: Vec<(BlobId, CopyState, f64, BlobState)> = rows.take(copies)?;
    let copy = |(id, state, verified, blob)| (id, NodeCopy { state, verified, blob });
    Ok(NodeContent {
        state: rows.take(state)?.pop(),
        copies: found.into_iter().map(copy).collect(),
        uploads: rows.take(uploads)?,
    })
}

/// Returns the blobs that have at least one complete copy, but fewer than `wanted` on available nodes, to which the nodes
/// `excluded` do not belong.
pub async fn under_replicated(
    mut db: impl Read,
    excluded: &[NodeId],
    wanted: i64,
    limit: i64,
) -> Result<Vec<BlobId>, StoreError> {
    let excludes = " AND node_uuid <> ?".repeat(excluded.len());
    let sql = format!(
        "SELECT uuid FROM blobs WHERE state = 'created' AND EXISTS (SELECT 1 FROM blob_locations \
         WHERE blob_uuid = blobs.uuid AND blob_locations.state = 'whole') AND (SELECT COUNT(*) FROM blob_locations LEFT JOIN nodes ON nodes.uuid = node_uuid \
         WHERE blob_uuid = blobs.uuid AND blob_locations.state = 'whole' \
         AND COALESCE(nodes.state, '') NOT IN ('error', 'deleted'){excludes}) < ? ORDER BY created LIMIT ?"
    );
    let mut values: Vec<Value> = excluded.iter().map(|id| (*id).into()).collect();
    values.extend_from_slice(params![wanted, limit]);
    db.fetch(&sql, &values).await
}

/// Returns the blobs of which a node has a complete copy, and none of the nodes `others` has one.
pub async fn only_on(mut db: impl Read, node: NodeId, others: &[NodeId]) -> Result<Vec<BlobId>, StoreError> {
    let is_other = match others {
        [] => "1 = 0".to_owned(),
        others => format!("node_uuid IN ({})", placeholders(others.len())),
    };
    let sql = format!(
        "SELECT own.blob_uuid FROM blob_locations own \
         JOIN blobs ON blobs.uuid = own.blob_uuid AND blobs.state = 'created' \
         WHERE own.node_uuid = ? AND own.state = 'whole' AND NOT EXISTS (SELECT 1 FROM blob_locations \
         WHERE blob_uuid = own.blob_uuid AND blob_locations.state = 'whole' AND {is_other}) ORDER BY own.blob_uuid"
    );
    let values: Vec<Value> = [node].iter().chain(others).map(|id| (*id).into()).collect();
    db.fetch(&sql, &values).await
}

/// Locks the blobs of which a node has a complete copy until the transaction ends, so that their other copies stay.
pub async fn lock_blobs_of_node(tx: &mut Tx, node: NodeId) -> Result<(), StoreError> {
    let sql = "UPDATE blobs SET version = version + 1 WHERE state = 'created' AND uuid IN \
               (SELECT blob_uuid FROM blob_locations WHERE node_uuid = ? AND blob_locations.state = 'whole')";
    tx.execute(sql, params![node]).await?;
    Ok(())
}

/// Returns the blobs of which a node has a complete copy that was last verified before `before`, and of which more than `wanted`
/// active nodes have one; those that were verified first come first.
pub async fn over_replicated(
    mut db: impl Read,
    node: NodeId,
    wanted: i64,
    before: f64,
    limit: i64,
) -> Result<Vec<BlobId>, StoreError> {
    let sql = "SELECT own.blob_uuid FROM blob_locations own \
               JOIN blobs ON blobs.uuid = own.blob_uuid AND blobs.state = 'created' \
               WHERE own.node_uuid = ? AND own.state = 'whole' AND own.verified <= ? \
               AND (SELECT COUNT(*) FROM blob_locations JOIN nodes ON nodes.uuid = node_uuid \
               WHERE blob_uuid = own.blob_uuid AND blob_locations.state = 'whole' AND nodes.state = 'created') > ? \
               ORDER BY own.verified LIMIT ?";
    db.fetch(sql, params![node, before, wanted, limit]).await
}

/// Records the state of a node's copy, which counts as verified now.
pub async fn set(tx: &mut Tx, blob: BlobId, node: NodeId, state: CopyState) -> Result<(), StoreError> {
    tx.execute(
        "REPLACE INTO blob_locations (blob_uuid, node_uuid, state, verified) VALUES (?, ?, ?, ?)",
        params![blob, node, state, now()],
    )
    .await?;
    Ok(())
}

/// Removes a node's copy of a blob.
pub async fn remove(tx: &mut Tx, blob: BlobId, node: NodeId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM blob_locations WHERE blob_uuid = ? AND node_uuid = ?", params![blob, node])
        .await?;
    Ok(())
}

/// Removes all copies of a node.
pub async fn remove_of_node(tx: &mut Tx, node: NodeId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM blob_locations WHERE node_uuid = ?", params![node]).await?;
    Ok(())
}
