//! Rows of trusts. The trust of every namespace in `system` is a rule and has no row.

use muster_types::time::now;

use super::{Json, Read, StoreError, Tx, params};

/// Returns whether `namespace` trusts `other` explicitly.
pub async fn exists(mut db: impl Read, namespace: &str, other: &str) -> Result<bool, StoreError> {
    let rows = db
        .rows("SELECT 1 FROM trusts WHERE namespace = ? AND trusted = ?", params![namespace, other])
        .await?;
    Ok(!rows.is_empty())
}

/// Returns the scopes of the keys that granted a trust, if it exists; the inner `None` is an unrestricted key.
pub async fn scopes(
    mut db: impl Read,
    namespace: &str,
    other: &str,
) -> Result<Option<Option<Vec<String>>>, StoreError> {
    let sql = "SELECT scopes FROM trusts WHERE namespace = ? AND trusted = ?";
    let scopes = db.fetch_optional(sql, params![namespace, other]).await?;
    Ok(scopes.map(|Json(scopes)| scopes))
}

/// Returns the namespaces that trust `other`.
pub async fn trusting(mut db: impl Read, other: &str) -> Result<Vec<String>, StoreError> {
    db.fetch("SELECT namespace FROM trusts WHERE trusted = ? ORDER BY namespace", params![other]).await
}

/// Adds a trust that a key with `granted_by` scopes grants. The scopes are added to those of an existing trust.
pub async fn put(
    tx: &mut Tx,
    namespace: &str,
    other: &str,
    granted_by: Option<&[String]>,
) -> Result<(), StoreError> {
    let text = |scopes: &[String]| serde_json::json!(scopes).to_string();
    let Some(before) = scopes(&mut *tx, namespace, other).await? else {
        let sql = "INSERT INTO trusts (namespace, trusted, created, scopes) VALUES (?, ?, ?, ?)";
        let inserted = tx.execute(sql, params![namespace, other, now(), granted_by.map(text)]).await;
        // If it was added since it was read, the retry adds the scopes to it.
        return inserted.map(|_| ()).map_err(StoreError::retry_duplicate);
    };
    let both = before.zip(granted_by).map(|(mut all, granted_by)| {
        all.extend_from_slice(granted_by);
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

/// Removes all trusts in `other`.
pub async fn remove_naming(tx: &mut Tx, other: &str) -> Result<(), StoreError> {
    tx.execute("DELETE FROM trusts WHERE trusted = ?", params![other]).await?;
    Ok(())
}

/// Removes all trusts that `namespace` granted.
pub async fn remove_of(tx: &mut Tx, namespace: &str) -> Result<(), StoreError> {
    tx.execute("DELETE FROM trusts WHERE namespace = ?", params![namespace]).await?;
    Ok(())
}
