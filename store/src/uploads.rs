//! Rows of uploads. How much has arrived is known to the node that keeps the bytes.

use muster_types::ids::{NodeId, UploadId};
use muster_types::time::now;

use super::{Read, Row, StoreError, Tx, params};

#[derive(Debug, Clone, PartialEq)]
pub struct UploadRow {
    pub id: UploadId,
    pub namespace: String,
    pub node: NodeId,
    /// Whether only its file is still to be removed.
    pub ended: bool,
    pub created: f64,
}

const COLUMNS: &str = "uuid, namespace, node_uuid, ended, created";

impl UploadRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self {
            id: row.parse(0)?,
            namespace: row.get(1)?,
            node: row.parse(2)?,
            ended: row.get(3)?,
            created: row.get(4)?,
        })
    }
}

pub async fn get(mut db: impl Read, id: UploadId) -> Result<Option<UploadRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM uploads WHERE uuid = ?");
    db.rows(&sql, params![id]).await?.first().map(UploadRow::read).transpose()
}

/// The uploads that a node keeps.
pub async fn of_node(mut db: impl Read, node: NodeId) -> Result<Vec<UploadRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM uploads WHERE node_uuid = ?");
    db.rows(&sql, params![node]).await?.iter().map(UploadRow::read).collect()
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

/// Ends an upload: nothing can be added to it. Says whether it had not ended.
pub async fn end(tx: &mut Tx, id: UploadId) -> Result<bool, StoreError> {
    Ok(tx.execute("UPDATE uploads SET ended = 1 WHERE uuid = ? AND ended = 0", params![id]).await? == 1)
}

/// Ends every upload of a namespace.
pub async fn end_of(tx: &mut Tx, namespace: &str) -> Result<(), StoreError> {
    tx.execute("UPDATE uploads SET ended = 1 WHERE namespace = ? AND ended = 0", params![namespace]).await?;
    Ok(())
}

/// Removes the row of an upload that has ended.
pub async fn remove(tx: &mut Tx, id: UploadId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM uploads WHERE uuid = ? AND ended = 1", params![id]).await?;
    Ok(())
}
