//! Rows of namespaces.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use muster_types::namespace::NamespaceState;
use muster_types::object::ObjectType;
use muster_types::time::now;
use serde_json::{Map, Value as JsonValue};

use super::{Json, Read, StoreError, Tx, Union, columns, keys, params};

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

/// The keys, the trusts and the metadata of namespaces, by namespace.
#[derive(Debug, Default)]
pub struct NamespaceDetails {
    /// The names of the live keys, in order.
    pub keys: HashMap<String, Vec<String>>,
    /// The trusted namespaces, in the order in which they were added.
    pub trusts: HashMap<String, Vec<String>>,
    pub metadata: HashMap<String, Map<String, JsonValue>>,
}

/// Returns the details of the namespaces from `first` to `last`, by name.
pub async fn details(db: impl Read, first: &str, last: &str) -> Result<NamespaceDetails, StoreError> {
    let mut union = Union::default();
    let range = |column: &str| format!("{column} >= ? AND {column} <= ?");
    let tail = format!("FROM namespace_keys WHERE {} AND {}", range("namespace"), keys::LIVE);
    let live_keys = union.add("namespace, name", tail, params![first, last, now()]);
    let tail = format!("FROM trusts WHERE {}", range("namespace"));
    let trusts = union.add("namespace, trusted, created", tail, params![first, last]);
    let tail = format!("FROM metadata WHERE object_type = ? AND {}", range("object_id"));
    let metadata = union.add("object_id, name, value", tail, params![ObjectType::Namespace, first, last]);
    let mut rows = union.fetch(db).await?;
    let mut details = NamespaceDetails::default();
    for (namespace, key) in rows.take(live_keys)? {
        details.keys.entry(namespace).or_default().push(key);
    }
    details.keys.values_mut().for_each(|names| names.sort_unstable());
    let mut trusts: Vec<(String, String, f64)> = rows.take(trusts)?;
    trusts.sort_by(|a, b| a.2.total_cmp(&b.2).then_with(|| a.1.cmp(&b.1)));
    for (namespace, trusted, _) in trusts {
        details.trusts.entry(namespace).or_default().push(trusted);
    }
    for (namespace, name, Json(value)) in rows.take::<(String, String, Json<_>)>(metadata)? {
        details.metadata.entry(namespace).or_default().insert(name, value);
    }
    Ok(details)
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

/// Keeps a namespace from being changed until the transaction ends, but others may share that. Returns whether it is in
/// `state`.
pub async fn lock_shared(tx: &mut Tx, name: &str, state: NamespaceState) -> Result<bool, StoreError> {
    if !tx.has_shared_locks() {
        return lock(tx, name, state).await;
    }
    let sql = "SELECT name FROM namespaces WHERE name = ? AND state = ? LOCK IN SHARE MODE";
    Ok(tx.query_one(sql, params![name, state]).await?.is_some())
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
