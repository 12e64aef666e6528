//! Rows of trusts. That everyone trusts `system` is a rule, not a row.

use muster_types::time::now;

use super::{Read, StoreError, Tx, params};

/// Whether `namespace` trusts `other` by a row of its own.
pub async fn exists(mut db: impl Read, namespace: &str, other: &str) -> Result<bool, StoreError> {
    let rows = db
        .rows("SELECT 1 FROM trusts WHERE namespace = ? AND trusted = ?", params![namespace, other])
        .await?;
    Ok(!rows.is_empty())
}

/// `(namespace, trusted)` for the namespaces from `first` to `last`, in the order they were added.
pub async fn range(mut db: impl Read, first: &str, last: &str) -> Result<Vec<(String, String)>, StoreError> {
    let rows = db
        .rows(
            "SELECT namespace, trusted FROM trusts WHERE namespace >= ? AND namespace <= ? \
             ORDER BY namespace, created, trusted",
            params![first, last],
        )
        .await?;
    rows.iter().map(|row| Ok((row.get(0)?, row.get(1)?))).collect()
}

/// Namespaces that trust `other`.
pub async fn trusting(mut db: impl Read, other: &str) -> Result<Vec<String>, StoreError> {
    let rows =
        db.rows("SELECT namespace FROM trusts WHERE trusted = ? ORDER BY namespace", params![other]).await?;
    rows.iter().map(|row| row.get(0)).collect()
}

pub async fn insert(tx: &mut Tx, namespace: &str, other: &str) -> Result<(), StoreError> {
    tx.execute(
        "INSERT INTO trusts (namespace, trusted, created) VALUES (?, ?, ?)",
        params![namespace, other, now()],
    )
    .await?;
    Ok(())
}

pub async fn remove(tx: &mut Tx, namespace: &str, other: &str) -> Result<(), StoreError> {
    tx.execute("DELETE FROM trusts WHERE namespace = ? AND trusted = ?", params![namespace, other]).await?;
    Ok(())
}

/// Removes every trust that names `other`.
pub async fn remove_naming(tx: &mut Tx, other: &str) -> Result<(), StoreError> {
    tx.execute("DELETE FROM trusts WHERE trusted = ?", params![other]).await?;
    Ok(())
}

/// Removes every trust that `namespace` gave.
pub async fn remove_of(tx: &mut Tx, namespace: &str) -> Result<(), StoreError> {
    tx.execute("DELETE FROM trusts WHERE namespace = ?", params![namespace]).await?;
    Ok(())
}
