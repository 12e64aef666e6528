//! Rows of capacity claims of namespaces. See docs/decisions/0023.
//!
//! To change a row, first lock the ledgers of the nodes concerned ([`node_ledgers`](super::node_ledgers)).

#[cfg(test)]
mod tests;

use muster_types::capacity::Capacity;
use muster_types::ids::ClaimId;
use muster_types::object::ObjectType;
use muster_types::time::now;
use serde_json::{Map, Value as JsonValue};

use super::{Read, StoreError, Tx, columns, metadata, params};

#[derive(Debug, Clone, PartialEq)]
pub struct ClaimRow {
    pub id: ClaimId,
    pub namespace: String,
    pub limit: Capacity,
    /// No longer updated once the claim has expired.
    pub used: Capacity,
    /// Unix time.
    pub expires: f64,
    /// When `limit`, `used` or `expires` last changed.
    pub updated: f64,
}

columns! { ClaimRow {
    id: uuid,
    namespace,
    limit: Capacity { cpus: limit_cpus, memory_mb: limit_memory, disk_gb: limit_disk, },
    used: Capacity { cpus: used_cpus, memory_mb: used_memory, disk_gb: used_disk, },
    expires,
    updated,
} }

impl ClaimRow {
    #[must_use]
    pub fn is_active(&self, now: f64) -> bool {
        self.expires > now
    }

    /// Returns the claimed capacity that is not in use.
    #[must_use]
    pub fn unused(&self) -> Capacity {
        self.limit.minus(&self.used)
    }
}

/// Returns the claims of a namespace, oldest first, including expired ones.
pub async fn list(mut db: impl Read, namespace: &str) -> Result<Vec<ClaimRow>, StoreError> {
    let tail = "FROM namespace_claims WHERE namespace = ? ORDER BY created, uuid";
    db.select(tail, params![namespace]).await
}

pub async fn get(mut db: impl Read, namespace: &str, id: ClaimId) -> Result<Option<ClaimRow>, StoreError> {
    db.select_optional("FROM namespace_claims WHERE uuid = ? AND namespace = ?", params![id, namespace]).await
}

/// Returns a claim of a namespace with its metadata.
pub async fn with_metadata(
    db: impl Read,
    namespace: &str,
    id: ClaimId,
) -> Result<Option<(ClaimRow, Map<String, JsonValue>)>, StoreError> {
    let tail = "FROM namespace_claims WHERE uuid = ? AND namespace = ?";
    metadata::select(db, ObjectType::NamespaceClaim, tail, params![id, namespace]).await
}

/// Returns the claims of all namespaces that have not expired at a time.
pub async fn active(mut db: impl Read, at: f64) -> Result<Vec<ClaimRow>, StoreError> {
    db.select("FROM namespace_claims WHERE expires > ? ORDER BY uuid", params![at]).await
}

/// Locks the claims that have not expired at a time until the transaction ends, and returns them.
pub async fn lock_active(tx: &mut Tx, at: f64) -> Result<Vec<ClaimRow>, StoreError> {
    let sql = "UPDATE namespace_claims SET version = version + 1 WHERE expires > ?";
    // Most clusters have no claims.
    if tx.execute(sql, params![at]).await? == 0 { Ok(vec![]) } else { active(tx, at).await }
}

/// Locks a claim until the transaction ends. Returns whether it exists.
pub async fn lock(tx: &mut Tx, id: ClaimId) -> Result<bool, StoreError> {
    let sql = "UPDATE namespace_claims SET version = version + 1 WHERE uuid = ?";
    Ok(tx.execute(sql, params![id]).await? == 1)
}

pub async fn insert(tx: &mut Tx, row: &ClaimRow) -> Result<(), StoreError> {
    let (limit, used) = (&row.limit, &row.used);
    tx.execute(
        "INSERT INTO namespace_claims (uuid, namespace, limit_cpus, limit_memory, limit_disk, used_cpus, used_memory, \
         used_disk, expires, created, updated, version) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)",
        params![
            row.id,
            &row.namespace,
            limit.cpus,
            limit.memory_mb,
            limit.disk_gb,
            used.cpus,
            used.memory_mb,
            used.disk_gb,
            row.expires,
            row.updated,
            row.updated
        ],
    )
    .await?;
    Ok(())
}

/// Replaces the limit, use and expiry of a claim. Returns whether it exists.
pub async fn set(tx: &mut Tx, row: &ClaimRow) -> Result<bool, StoreError> {
    let (limit, used) = (&row.limit, &row.used);
    let updated = tx
        .execute(
            "UPDATE namespace_claims SET limit_cpus = ?, limit_memory = ?, limit_disk = ?, used_cpus = ?, \
             used_memory = ?, used_disk = ?, expires = ?, updated = ?, version = version + 1 WHERE uuid = ?",
            params![
                limit.cpus,
                limit.memory_mb,
                limit.disk_gb,
                used.cpus,
                used.memory_mb,
                used.disk_gb,
                row.expires,
                row.updated,
                row.id
            ],
        )
        .await?;
    Ok(updated == 1)
}

/// Subtracts from the use of the active claim of a namespace.
pub async fn release_use(tx: &mut Tx, namespace: &str, released: &Capacity) -> Result<(), StoreError> {
    let time = now();
    tx.execute(
        "UPDATE namespace_claims SET \
         used_cpus = CASE WHEN used_cpus > ? THEN used_cpus - ? ELSE 0 END, \
         used_memory = CASE WHEN used_memory > ? THEN used_memory - ? ELSE 0 END, \
         used_disk = CASE WHEN used_disk > ? THEN used_disk - ? ELSE 0 END, \
         updated = ?, version = version + 1 WHERE namespace = ? AND expires > ?",
        params![
            released.cpus,
            released.cpus,
            released.memory_mb,
            released.memory_mb,
            released.disk_gb,
            released.disk_gb,
            time,
            namespace,
            time
        ],
    )
    .await?;
    Ok(())
}

/// Expires the claims of a namespace. The rows are removed with the namespace.
pub async fn expire_of(tx: &mut Tx, namespace: &str) -> Result<(), StoreError> {
    let time = now();
    tx.execute(
        "UPDATE namespace_claims SET expires = ?, updated = ?, version = version + 1 \
         WHERE namespace = ? AND expires > ?",
        params![time, time, namespace, time],
    )
    .await?;
    Ok(())
}

pub async fn remove(tx: &mut Tx, id: ClaimId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM namespace_claims WHERE uuid = ?", params![id]).await?;
    metadata::remove_of(tx, ObjectType::NamespaceClaim, &id.to_string()).await?;
    Ok(())
}
