//! Rows of small cluster-wide values, such as timestamps and cursors of periodic tasks.

use super::{Read, StoreError, Tx, params};

pub async fn get(mut db: impl Read, name: &str) -> Result<Option<String>, StoreError> {
    db.fetch_optional("SELECT value FROM cluster_values WHERE name = ?", params![name]).await
}

/// Adds a value; an existing name is a [`StoreError::Duplicate`].
pub async fn insert(tx: &mut Tx, name: &str, value: &str) -> Result<(), StoreError> {
    tx.execute("INSERT INTO cluster_values (name, value, version) VALUES (?, ?, 1)", params![name, value])
        .await?;
    Ok(())
}

pub async fn set(tx: &mut Tx, name: &str, value: &str) -> Result<(), StoreError> {
    tx.execute("REPLACE INTO cluster_values (name, value, version) VALUES (?, ?, 1)", params![name, value])
        .await?;
    Ok(())
}

/// Returns the names that start with `prefix`, with their values.
pub async fn with_prefix(mut db: impl Read, prefix: &str) -> Result<Vec<(String, String)>, StoreError> {
    let sql = "SELECT name, value FROM cluster_values WHERE SUBSTR(name, 1, ?) = ?";
    let length = i64::try_from(prefix.len()).unwrap_or(i64::MAX);
    db.fetch(sql, params![length, prefix]).await
}

/// Locks the values whose names start with `prefix` until the transaction ends.
pub async fn lock_prefix(tx: &mut Tx, prefix: &str) -> Result<(), StoreError> {
    let sql = "UPDATE cluster_values SET version = version + 1 WHERE SUBSTR(name, 1, ?) = ?";
    let length = i64::try_from(prefix.len()).unwrap_or(i64::MAX);
    tx.execute(sql, params![length, prefix]).await?;
    Ok(())
}

/// Removes a value. Returns whether it existed.
pub async fn remove(tx: &mut Tx, name: &str) -> Result<bool, StoreError> {
    Ok(tx.execute("DELETE FROM cluster_values WHERE name = ?", params![name]).await? == 1)
}
