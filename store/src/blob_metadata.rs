//! Rows of metadata of blobs. A blob has no owner, so each namespace has its own.

#[cfg(test)]
mod tests;

use muster_types::ids::BlobId;
use serde_json::Value as JsonValue;

use super::{Read, StoreError, Tx, Value, columns, params};

#[derive(Debug, Clone, PartialEq)]
pub struct BlobMetadataRow {
    pub blob: BlobId,
    pub namespace: String,
    pub name: String,
    pub value: JsonValue,
}

columns! { BlobMetadataRow { blob: blob_uuid, namespace, name, value: json(value), } }

/// Returns the metadata of a blob, of one namespace or of all.
pub async fn of_blob(
    mut db: impl Read,
    blob: BlobId,
    namespace: Option<&str>,
) -> Result<Vec<BlobMetadataRow>, StoreError> {
    let filter = if namespace.is_some() { " AND namespace = ?" } else { "" };
    let values: Vec<Value> = [Value::from(blob)].into_iter().chain(namespace.map(Value::from)).collect();
    db.select(&format!("FROM blob_metadata WHERE blob_uuid = ?{filter}"), &values).await
}

/// Returns the approximate size of a namespace's metadata of a blob in bytes.
pub async fn size(mut db: impl Read, blob: BlobId, namespace: &str) -> Result<i64, StoreError> {
    // Two digits for each byte: LENGTH alone counts characters on SQLite.
    let digits: i64 = db
        .fetch_one(
            "SELECT CAST(COALESCE(SUM(LENGTH(HEX(name)) + LENGTH(HEX(value))), 0) AS SIGNED) FROM blob_metadata \
             WHERE blob_uuid = ? AND namespace = ?",
            params![blob, namespace],
        )
        .await?;
    Ok(digits / 2)
}

pub async fn set(
    tx: &mut Tx,
    blob: BlobId,
    namespace: &str,
    name: &str,
    value: &JsonValue,
) -> Result<(), StoreError> {
    tx.execute(
        "REPLACE INTO blob_metadata (blob_uuid, namespace, name, value) VALUES (?, ?, ?, ?)",
        params![blob, namespace, name, value.to_string()],
    )
    .await?;
    Ok(())
}

pub async fn remove(tx: &mut Tx, blob: BlobId, namespace: &str, name: &str) -> Result<(), StoreError> {
    tx.execute(
        "DELETE FROM blob_metadata WHERE blob_uuid = ? AND namespace = ? AND name = ?",
        params![blob, namespace, name],
    )
    .await?;
    Ok(())
}

/// Removes all metadata of a blob.
pub async fn remove_of(tx: &mut Tx, blob: BlobId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM blob_metadata WHERE blob_uuid = ?", params![blob]).await?;
    Ok(())
}

/// Removes the metadata that a namespace has written.
pub async fn remove_of_namespace(tx: &mut Tx, namespace: &str) -> Result<(), StoreError> {
    tx.execute("DELETE FROM blob_metadata WHERE namespace = ?", params![namespace]).await?;
    Ok(())
}
