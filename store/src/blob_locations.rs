//! Rows of the copies of blobs: which node has one, and how it is.

use std::collections::HashMap;

use muster_types::blob::{BlobState, CopyState};
use muster_types::ids::{BlobId, NodeId};
use muster_types::time::now;

use super::{Read, Row, StoreError, Tx, Value, marks, params};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocationRow {
    pub blob: BlobId,
    pub node: NodeId,
    pub state: CopyState,
}

fn read(row: &Row) -> Result<LocationRow, StoreError> {
    Ok(LocationRow { blob: row.parse(0)?, node: row.parse(1)?, state: row.parse(2)? })
}

/// The copies of some blobs, by blob.
pub async fn of(
    mut db: impl Read,
    blobs: &[BlobId],
) -> Result<HashMap<BlobId, Vec<LocationRow>>, StoreError> {
    let mut found: HashMap<BlobId, Vec<LocationRow>> = HashMap::new();
    if blobs.is_empty() {
        return Ok(found);
    }
    let sql = format!(
        "SELECT blob_uuid, node_uuid, state FROM blob_locations WHERE blob_uuid IN ({}) ORDER BY node_uuid",
        marks(blobs.len())
    );
    let values: Vec<Value> = blobs.iter().map(|id| (*id).into()).collect();
    for row in db.rows(&sql, &values).await? {
        let row = read(&row)?;
        found.entry(row.blob).or_default().push(row);
    }
    Ok(found)
}

/// The copies of one blob.
pub async fn of_blob(db: impl Read, blob: BlobId) -> Result<Vec<LocationRow>, StoreError> {
    Ok(of(db, &[blob]).await?.remove(&blob).unwrap_or_default())
}

/// What a node should have, with the state of each blob.
pub async fn of_node(
    mut db: impl Read,
    node: NodeId,
) -> Result<HashMap<BlobId, (CopyState, BlobState)>, StoreError> {
    let sql = "SELECT blob_uuid, blob_locations.state, blobs.state FROM blob_locations \
               JOIN blobs ON blobs.uuid = blob_uuid WHERE node_uuid = ?";
    let rows = db.rows(sql, params![node]).await?;
    rows.iter().map(|row| Ok((row.parse(0)?, (row.parse(1)?, row.parse(2)?)))).collect()
}

/// Copies of a node, in this state, that were not compared since `before`, the longest ago first.
pub async fn unverified(
    mut db: impl Read,
    node: NodeId,
    state: CopyState,
    before: f64,
    limit: i64,
) -> Result<Vec<BlobId>, StoreError> {
    let sql = "SELECT blob_uuid FROM blob_locations \
               JOIN blobs ON blobs.uuid = blob_uuid AND blobs.state = 'created' \
               WHERE node_uuid = ? AND blob_locations.state = ? AND verified <= ? ORDER BY verified LIMIT ?";
    let rows = db.rows(sql, params![node, state, before, limit]).await?;
    rows.iter().map(|row| row.parse(0)).collect()
}

/// Whole blobs with some, but fewer than `wanted`, whole copies on nodes that were heard of not too long ago.
pub async fn scarce(mut db: impl Read, wanted: i64, limit: i64) -> Result<Vec<BlobId>, StoreError> {
    let sql = "SELECT uuid FROM blobs WHERE state = 'created' AND EXISTS (SELECT 1 FROM blob_locations \
               WHERE blob_uuid = blobs.uuid AND blob_locations.state = 'whole') AND (SELECT COUNT(*) FROM blob_locations LEFT JOIN nodes ON nodes.uuid = node_uuid \
               WHERE blob_uuid = blobs.uuid AND blob_locations.state = 'whole' \
               AND COALESCE(nodes.state, '') NOT IN ('error', 'deleted')) < ? ORDER BY created LIMIT ?";
    let rows = db.rows(sql, params![wanted, limit]).await?;
    rows.iter().map(|row| row.parse(0)).collect()
}

/// Writes down how a node's copy is. One that is whole was compared just now.
pub async fn set(tx: &mut Tx, blob: BlobId, node: NodeId, state: CopyState) -> Result<(), StoreError> {
    tx.execute(
        "REPLACE INTO blob_locations (blob_uuid, node_uuid, state, verified) VALUES (?, ?, ?, ?)",
        params![blob, node, state, now()],
    )
    .await?;
    Ok(())
}

/// A node has no copy any more.
pub async fn remove(tx: &mut Tx, blob: BlobId, node: NodeId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM blob_locations WHERE blob_uuid = ? AND node_uuid = ?", params![blob, node])
        .await?;
    Ok(())
}

/// A node has no copies any more.
pub async fn remove_of_node(tx: &mut Tx, node: NodeId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM blob_locations WHERE node_uuid = ?", params![node]).await?;
    Ok(())
}
