//! Rows of namespaces.

#[cfg(test)]
mod tests;

use muster_types::namespace::NamespaceState;
use muster_types::time::now;

use super::{Read, StoreError, Tx, columns, params};

#[derive(Debug, Clone)]
pub struct NamespaceRow {
    pub name: String,
    pub state: NamespaceState,
    /// When the state last changed.
    pub updated: f64,
}

columns! { NamespaceRow { name, state, updated, } }

pub async fn get(mut db: impl Read, name: &str) -> Result<Option<NamespaceRow>, StoreError> {
    db.select_optional("FROM namespaces WHERE name = ?", params![name]).await
}

/// Returns the next `limit` live namespaces after `after`, by name. With `seen_by`, only that namespace and those that
/// trust it.
pub async fn page(
    mut db: impl Read,
    seen_by: Option<&str>,
    after: Option<&str>,
    limit: i64,
) -> Result<Vec<NamespaceRow>, StoreError> {
    let after = after.unwrap_or_default();
    match seen_by {
        None => {
            db.select(
                "FROM namespaces WHERE name > ? AND state = 'created' ORDER BY name LIMIT ?",
                params![after, limit],
            )
            .await
        }
        Some(caller) => {
            db.select(
                "FROM namespaces WHERE name > ? AND state = 'created' \
                 AND (name = ? OR name IN (SELECT namespace FROM trusts WHERE trusted = ?)) ORDER BY name LIMIT ?",
                params![after, caller, caller, limit],
            )
            .await
        }
    }
}

/// Returns the soft-deleted namespaces whose state changed before `before`.
pub async fn deleted_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<NamespaceRow>, StoreError> {
    let tail = "FROM namespaces WHERE state = 'deleted' AND updated <= ? ORDER BY updated LIMIT ?";
    db.select(tail, params![before, limit]).await
}

/// Adds a namespace; an existing name is a [`StoreError::Duplicate`].
pub async fn insert(tx: &mut Tx, name: &str) -> Result<(), StoreError> {
    let time = now();
    tx.execute(
        "INSERT INTO namespaces (name, state, created, updated, version) VALUES (?, ?, ?, ?, 1)",
        params![name, NamespaceState::Created, time, time],
    )
    .await?;
    Ok(())
}

/// Locks a namespace until the transaction ends. Returns whether it is in `state`.
pub async fn lock(tx: &mut Tx, name: &str, state: NamespaceState) -> Result<bool, StoreError> {
    let sql = "UPDATE namespaces SET version = version + 1 WHERE name = ? AND state = ?";
    Ok(tx.execute(sql, params![name, state]).await? == 1)
}

/// Changes the state of a namespace if it is still `from`.
pub async fn set_state(
    tx: &mut Tx,
    name: &str,
    from: NamespaceState,
    to: NamespaceState,
) -> Result<bool, StoreError> {
    if !from.can_transition_to(to) {
        return Err(StoreError::Internal(format!("a namespace cannot go from {from} to {to}")));
    }
    let sql =
        "UPDATE namespaces SET state = ?, updated = ?, version = version + 1 WHERE name = ? AND state = ?";
    Ok(tx.execute(sql, params![to, now(), name, from]).await? == 1)
}

/// Removes the row of a soft-deleted namespace.
pub async fn remove(tx: &mut Tx, name: &str) -> Result<bool, StoreError> {
    let sql = "DELETE FROM namespaces WHERE name = ? AND state = ?";
    Ok(tx.execute(sql, params![name, NamespaceState::Deleted]).await? == 1)
}
