//! Rows of uploads. Their size is that of the file on the node that stores them; `bytes` is the size that they may have.

#[cfg(test)]
mod tests;

use muster_types::ids::{NodeId, UploadId};
use muster_types::object::ObjectType;
use muster_types::time::now;

use super::{Read, StoreError, Tx, columns, metadata, params};

#[derive(Debug, Clone, PartialEq)]
pub struct UploadRow {
    pub id: UploadId,
    pub namespace: String,
    pub node: NodeId,
    /// Whether the upload is over and its file is to be removed.
    pub ended: bool,
    pub created: f64,
    /// The reserved size: at least that of the file.
    pub bytes: i64,
    /// How often it was truncated.
    pub truncations: i64,
}

columns! { UploadRow { id: uuid, namespace, node: node_uuid, ended, created, bytes, truncations, } }

pub async fn get(mut db: impl Read, id: UploadId) -> Result<Option<UploadRow>, StoreError> {
    db.select_optional("FROM uploads WHERE uuid = ?", params![id]).await
}

pub async fn insert(tx: &mut Tx, namespace: &str, node: NodeId) -> Result<UploadRow, StoreError> {
    let (id, created) = (UploadId::new(), now());
    let row =
        UploadRow { id, namespace: namespace.into(), node, ended: false, created, bytes: 0, truncations: 0 };
    tx.execute(
        "INSERT INTO uploads (uuid, namespace, node_uuid, ended, created) VALUES (?, ?, ?, 0, ?)",
        params![row.id, namespace, node, row.created],
    )
    .await?;
    Ok(row)
}

/// Locks an upload until the transaction ends. Returns whether it exists and has not ended.
pub async fn lock(tx: &mut Tx, id: UploadId) -> Result<bool, StoreError> {
    Ok(tx.execute("UPDATE uploads SET ended = 0 WHERE uuid = ? AND ended = 0", params![id]).await? == 1)
}

/// Sets the reserved size of an upload. Returns whether it has not ended.
pub async fn set_bytes(tx: &mut Tx, id: UploadId, bytes: i64) -> Result<bool, StoreError> {
    Ok(tx.execute("UPDATE uploads SET bytes = ? WHERE uuid = ? AND ended = 0", params![bytes, id]).await?
        == 1)
}

/// Counts a truncation of an upload.
pub async fn count_truncation(tx: &mut Tx, id: UploadId) -> Result<(), StoreError> {
    tx.execute("UPDATE uploads SET truncations = truncations + 1 WHERE uuid = ?", params![id]).await?;
    Ok(())
}

/// Ends an upload, which then accepts no more bytes. Returns whether it had not ended before.
pub async fn end(tx: &mut Tx, id: UploadId) -> Result<bool, StoreError> {
    Ok(tx.execute("UPDATE uploads SET ended = 1 WHERE uuid = ? AND ended = 0", params![id]).await? == 1)
}

/// Ends all uploads of a namespace.
pub async fn end_of(tx: &mut Tx, namespace: &str) -> Result<(), StoreError> {
    tx.execute("UPDATE uploads SET ended = 1 WHERE namespace = ? AND ended = 0", params![namespace]).await?;
    Ok(())
}

/// Removes the row and the metadata of an upload that has ended.
pub async fn remove(tx: &mut Tx, id: UploadId) -> Result<(), StoreError> {
    let removed = tx.execute("DELETE FROM uploads WHERE uuid = ? AND ended = 1", params![id]).await?;
    if removed == 1 {
        metadata::remove_of(tx, ObjectType::Upload, &id.to_string()).await?;
    }
    Ok(())
}
