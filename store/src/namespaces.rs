//! Rows of namespaces.

use muster_types::namespace::NamespaceState;
use muster_types::time::now;

use super::{Read, Row, StoreError, Tx, params};

#[derive(Debug, Clone)]
pub struct NamespaceRow {
    pub name: String,
    pub state: NamespaceState,
    /// When the state last changed.
    pub updated: f64,
}

impl NamespaceRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self { name: row.get(0)?, state: row.parse(1)?, updated: row.get(2)? })
    }
}

pub async fn get(mut db: impl Read, name: &str) -> Result<Option<NamespaceRow>, StoreError> {
    let rows = db.rows("SELECT name, state, updated FROM namespaces WHERE name = ?", params![name]).await?;
    rows.first().map(NamespaceRow::read).transpose()
}

/// The next `limit` live namespaces after `after`, by name. `seen_by` keeps those that are or trust that one.
pub async fn page(
    mut db: impl Read,
    seen_by: Option<&str>,
    after: Option<&str>,
    limit: i64,
) -> Result<Vec<NamespaceRow>, StoreError> {
    let after = after.unwrap_or_default();
    let rows = match seen_by {
        None => {
            db.rows(
                "SELECT name, state, updated FROM namespaces WHERE name > ? AND state = 'created' \
                 ORDER BY name LIMIT ?",
                params![after, limit],
            )
            .await?
        }
        Some(caller) => {
            db.rows(
                "SELECT name, state, updated FROM namespaces WHERE name > ? AND state = 'created' \
                 AND (name = ? OR name IN (SELECT namespace FROM trusts WHERE trusted = ?)) ORDER BY name LIMIT ?",
                params![after, caller, caller, limit],
            )
            .await?
        }
    };
    rows.iter().map(NamespaceRow::read).collect()
}

/// Soft-deleted namespaces whose state changed before `before`.
pub async fn deleted_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<NamespaceRow>, StoreError> {
    let rows = db
        .rows(
            "SELECT name, state, updated FROM namespaces WHERE state = 'deleted' AND updated <= ? \
             ORDER BY updated LIMIT ?",
            params![before, limit],
        )
        .await?;
    rows.iter().map(NamespaceRow::read).collect()
}

/// Adds a namespace; a taken name is [`StoreError::Duplicate`].
pub async fn insert(tx: &mut Tx, name: &str) -> Result<(), StoreError> {
    let time = now();
    tx.execute(
        "INSERT INTO namespaces (name, state, created, updated, version) VALUES (?, ?, ?, ?, 1)",
        params![name, NamespaceState::Created, time, time],
    )
    .await?;
    Ok(())
}

/// Keeps the namespace in `state` until this transaction ends. Says whether it is in it.
pub async fn hold(tx: &mut Tx, name: &str, state: NamespaceState) -> Result<bool, StoreError> {
    let met = tx
        .execute(
            "UPDATE namespaces SET version = version + 1 WHERE name = ? AND state = ?",
            params![name, state],
        )
        .await?;
    Ok(met == 1)
}

/// Moves a namespace to another state if it is still in `from`.
pub async fn set_state(
    tx: &mut Tx,
    name: &str,
    from: NamespaceState,
    to: NamespaceState,
) -> Result<bool, StoreError> {
    if !from.may_become(to) {
        return Err(StoreError::Broken(format!("a namespace cannot go from {from} to {to}")));
    }
    let met = tx
        .execute(
            "UPDATE namespaces SET state = ?, updated = ?, version = version + 1 WHERE name = ? AND state = ?",
            params![to, now(), name, from],
        )
        .await?;
    Ok(met == 1)
}

/// Removes the row of a soft-deleted namespace.
pub async fn remove(tx: &mut Tx, name: &str) -> Result<bool, StoreError> {
    let met = tx
        .execute(
            "DELETE FROM namespaces WHERE name = ? AND state = ?",
            params![name, NamespaceState::Deleted],
        )
        .await?;
    Ok(met == 1)
}
