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

/// What whoever gave a trust held, if it was given: `None` inside is everything.
pub async fn scopes(
    mut db: impl Read,
    namespace: &str,
    other: &str,
) -> Result<Option<Option<Vec<String>>>, StoreError> {
    let sql = "SELECT scopes FROM trusts WHERE namespace = ? AND trusted = ?";
    let rows = db.rows(sql, params![namespace, other]).await?;
    rows.first().map(|row| row.json_opt(0)).transpose()
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

/// Adds a trust, given by somebody who holds `scopes`. One that is there gets what it did not have.
pub async fn put(
    tx: &mut Tx,
    namespace: &str,
    other: &str,
    held: Option<&[String]>,
) -> Result<(), StoreError> {
    let text = |scopes: &[String]| serde_json::json!(scopes).to_string();
    let Some(before) = scopes(&mut *tx, namespace, other).await? else {
        let sql = "INSERT INTO trusts (namespace, trusted, created, scopes) VALUES (?, ?, ?, ?)";
        let inserted = tx.execute(sql, params![namespace, other, now(), held.map(text)]).await;
        return match inserted {
            Ok(_) => Ok(()),
            // Somebody gave it since we looked: run again and add to it.
            Err(StoreError::Duplicate(why)) => Err(StoreError::Conflict(why)),
            Err(error) => Err(error),
        };
    };
    let both = before.zip(held).map(|(mut all, held)| {
        all.extend_from_slice(held);
        all.sort_unstable();
        all.dedup();
        text(&all)
    });
    let sql = "UPDATE trusts SET scopes = ? WHERE namespace = ? AND trusted = ?";
    tx.execute(sql, params![both, namespace, other]).await?;
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
