//! Rows of receipts: when and with which properties each namespace received the content of a blob. The content is stored
//! once, but a namespace must not learn when others sent or used it.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use muster_types::ids::BlobId;
use muster_types::time::now;

use super::{Read, StoreError, Tx, Value, columns, params, placeholders};

#[derive(Debug, Clone, PartialEq)]
pub struct BlobReceiptRow {
    pub blob: BlobId,
    /// The Unix time when the namespace first received the content.
    pub received: f64,
    /// The Last-Modified header of the namespace's source.
    pub modified: Option<String>,
    /// The Unix time when the namespace last used the content.
    pub last_used: Option<f64>,
}

columns! { BlobReceiptRow { blob: blob_uuid, received, modified, last_used, } }

/// Returns a namespace's receipts of some blobs.
pub async fn of_namespace(
    mut db: impl Read,
    namespace: &str,
    blobs: &[BlobId],
) -> Result<HashMap<BlobId, BlobReceiptRow>, StoreError> {
    if blobs.is_empty() {
        return Ok(HashMap::new());
    }
    let tail =
        format!("FROM blob_namespaces WHERE namespace = ? AND blob_uuid IN ({})", placeholders(blobs.len()));
    let mut values = vec![Value::from(namespace)];
    values.extend(blobs.iter().map(|id| Value::from(*id)));
    let rows: Vec<BlobReceiptRow> = db.select(&tail, &values).await?;
    Ok(rows.into_iter().map(|row| (row.blob, row)).collect())
}

/// Records that a namespace received the content of a blob. The first time is kept.
pub async fn receive(
    tx: &mut Tx,
    blob: BlobId,
    namespace: &str,
    modified: Option<&str>,
) -> Result<(), StoreError> {
    if of_namespace(&mut *tx, namespace, &[blob]).await?.is_empty() {
        let sql =
            "INSERT INTO blob_namespaces (blob_uuid, namespace, received, modified) VALUES (?, ?, ?, ?)";
        let inserted = tx.execute(sql, params![blob, namespace, now(), modified]).await;
        return inserted.map(|_| ()).map_err(StoreError::retry_duplicate);
    }
    if modified.is_some() {
        let sql = "UPDATE blob_namespaces SET modified = ? WHERE blob_uuid = ? AND namespace = ?";
        tx.execute(sql, params![modified, blob, namespace]).await?;
    }
    Ok(())
}

/// Returns the namespaces that have received the content of a blob.
pub async fn receivers(mut db: impl Read, blob: BlobId) -> Result<Vec<String>, StoreError> {
    db.fetch("SELECT namespace FROM blob_namespaces WHERE blob_uuid = ?", params![blob]).await
}

/// Records that a namespace used the content of a blob, if it has received it.
pub async fn set_used(tx: &mut Tx, blob: BlobId, namespace: &str) -> Result<(), StoreError> {
    let sql = "UPDATE blob_namespaces SET last_used = ? WHERE blob_uuid = ? AND namespace = ?";
    tx.execute(sql, params![now(), blob, namespace]).await?;
    Ok(())
}

/// Removes all receipts of a blob.
pub async fn remove_of(tx: &mut Tx, blob: BlobId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM blob_namespaces WHERE blob_uuid = ?", params![blob]).await?;
    Ok(())
}

/// Removes all receipts of a namespace.
pub async fn remove_of_namespace(tx: &mut Tx, namespace: &str) -> Result<(), StoreError> {
    tx.execute("DELETE FROM blob_namespaces WHERE namespace = ?", params![namespace]).await?;
    Ok(())
}
