//! Small cluster-wide values: stamps and cursors of scheduled work.

use super::{Read, StoreError, Tx, params};

pub async fn get(mut db: impl Read, name: &str) -> Result<Option<String>, StoreError> {
    let rows = db.rows("SELECT value FROM cluster_values WHERE name = ?", params![name]).await?;
    rows.first().map(|row| row.get(0)).transpose()
}

/// Adds a value; a taken name is [`StoreError::Duplicate`].
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
