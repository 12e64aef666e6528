//! Rows of what namespaces were promised of the whole cluster.
//!
//! A row is changed only while the ledgers of the nodes concerned are held (`node_claims`), and those come first.

use muster_types::ids::ClaimId;
use muster_types::time::now;

use super::{Read, Row, StoreError, Tx, params};
use muster_types::capacity::Capacity;

#[derive(Debug, Clone, PartialEq)]
pub struct ClaimRow {
    pub id: ClaimId,
    pub namespace: String,
    pub limit: Capacity,
    /// Stays as it is once the claim has expired.
    pub used: Capacity,
    /// Unix time from which on it promises nothing.
    pub expires: f64,
    /// When limit, use or end last changed.
    pub updated: f64,
}

impl ClaimRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        let amount = |first: usize| -> Result<Capacity, StoreError> {
            Ok(Capacity {
                cpus: row.get(first)?,
                memory_mb: row.get(first + 1)?,
                disk_gb: row.get(first + 2)?,
            })
        };
        Ok(Self {
            id: row.parse(0)?,
            namespace: row.get(1)?,
            limit: amount(2)?,
            used: amount(5)?,
            expires: row.get(8)?,
            updated: row.get(9)?,
        })
    }

    #[must_use]
    pub fn is_active(&self, now: f64) -> bool {
        self.expires > now
    }

    /// What was promised and is not used.
    #[must_use]
    pub fn unspent(&self) -> Capacity {
        self.limit.minus(&self.used)
    }
}

const COLUMNS: &str = "uuid, namespace, limit_cpus, limit_memory, limit_disk, used_cpus, used_memory, used_disk, \
                       expires, updated";

/// The claims of a namespace, oldest first, with those that have expired.
pub async fn list(mut db: impl Read, namespace: &str) -> Result<Vec<ClaimRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM namespace_claims WHERE namespace = ? ORDER BY created, uuid");
    db.rows(&sql, params![namespace]).await?.iter().map(ClaimRow::read).collect()
}

pub async fn get(mut db: impl Read, namespace: &str, id: ClaimId) -> Result<Option<ClaimRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM namespace_claims WHERE uuid = ? AND namespace = ?");
    db.rows(&sql, params![id, namespace]).await?.first().map(ClaimRow::read).transpose()
}

/// The claims of all namespaces that promise something at a time.
pub async fn active(mut db: impl Read, at: f64) -> Result<Vec<ClaimRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM namespace_claims WHERE expires > ? ORDER BY uuid");
    db.rows(&sql, params![at]).await?.iter().map(ClaimRow::read).collect()
}

/// The claims that promise something at a time, which nobody else changes until this transaction ends.
pub async fn hold_active(tx: &mut Tx, at: f64) -> Result<Vec<ClaimRow>, StoreError> {
    let sql = "UPDATE namespace_claims SET version = version + 1 WHERE expires > ?";
    // Most clusters promise nothing to anyone.
    if tx.execute(sql, params![at]).await? == 0 { Ok(vec![]) } else { active(tx, at).await }
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

/// Writes limit, use and end of a claim. Says whether it is there.
pub async fn set(tx: &mut Tx, row: &ClaimRow) -> Result<bool, StoreError> {
    let (limit, used) = (&row.limit, &row.used);
    let met = tx
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
    Ok(met == 1)
}

/// Takes a use back from the claim of a namespace that is active now.
pub async fn give_back(tx: &mut Tx, namespace: &str, less: &Capacity) -> Result<(), StoreError> {
    let time = now();
    tx.execute(
        "UPDATE namespace_claims SET \
         used_cpus = CASE WHEN used_cpus > ? THEN used_cpus - ? ELSE 0 END, \
         used_memory = CASE WHEN used_memory > ? THEN used_memory - ? ELSE 0 END, \
         used_disk = CASE WHEN used_disk > ? THEN used_disk - ? ELSE 0 END, \
         updated = ?, version = version + 1 WHERE namespace = ? AND expires > ?",
        params![
            less.cpus,
            less.cpus,
            less.memory_mb,
            less.memory_mb,
            less.disk_gb,
            less.disk_gb,
            time,
            namespace,
            time
        ],
    )
    .await?;
    Ok(())
}

/// Ends what a namespace was promised. The rows stay until it is cleaned.
pub async fn end_of(tx: &mut Tx, namespace: &str) -> Result<(), StoreError> {
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
    Ok(())
}
