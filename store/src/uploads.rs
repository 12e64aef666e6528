//! Rows of uploads. Their size is that of the file on the node that stores them.

#[cfg(test)]
mod tests;

use muster_types::ids::{NodeId, UploadId};
use muster_types::time::now;

use super::{Read, StoreError, Tx, columns, params};

#[derive(Debug, Clone, PartialEq)]
pub struct UploadRow {
    pub id: UploadId,
    pub namespace: String,
    pub node: NodeId,
    /// Whether the upload is over and its file is to be removed.
    pub ended: bool,
    pub created: f64,
}

columns! { UploadRow { id: uuid, namespace, node: node_uuid, ended, created, } }

pub async fn get(mut db: impl Read, id: UploadId) -> Result<Option<UploadRow>, StoreError> {
    db.select_optional("FROM uploads WHERE uuid = ?", params![id]).await
}

/// Returns the uploads whose bytes a node stores.
pub async fn of_node(mut db: impl Read, node: NodeId) -> Result<Vec<UploadRow>, StoreError> {
    db.select("FROM uploads WHERE node_uuid = ?", params![node]).await
}

pub async fn insert(tx: &mut Tx, namespace: &str, node: NodeId) -> Result<UploadRow, StoreError> {
    let row =
        UploadRow { id: UploadId::new(), namespace: namespace.into(), node, ended: false, created: now() };
    tx.execute(
        "INSERT INTO uploads (uuid, namespace, node_uuid, ended, created) VALUES (?, ?, ?, 0, ?)",
        params![row.id, namespace, node, row.created],
    )
    .await?;
    Ok(row)
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

/// Removes the row of an upload that has ended.
pub async fn remove(tx: &mut Tx, id: UploadId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM uploads WHERE uuid = ? AND ended = 1", params![id]).await?;
    Ok(())
}
