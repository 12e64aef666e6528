//! Rows of capacity ledgers: the capacity that each node has committed to its instances (table `node_claims`). See
//! docs/decisions/0019.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use muster_types::capacity::CommittedCapacity;
use muster_types::ids::NodeId;
use muster_types::node::NodeState;

use super::time::NOW;
use super::{Read, Select, StoreError, Tx, columns, params};

struct LedgerRow {
    node: NodeId,
    committed: CommittedCapacity,
}

columns! { LedgerRow {
    node: node_uuid,
    committed: CommittedCapacity { cpus, memory_mb: memory, disk_gb: disk, demand, demand_at, },
} }

/// Returns the ledgers of all nodes that have one.
pub async fn list(mut db: impl Read) -> Result<HashMap<NodeId, CommittedCapacity>, StoreError> {
    let rows: Vec<LedgerRow> = db.select("FROM node_claims", &[]).await?;
    Ok(rows.into_iter().map(|row| (row.node, row.committed)).collect())
}

/// Locks the ledger of a node until the transaction ends, and returns it. Creates it if it does not exist.
pub async fn lock(tx: &mut Tx, node: NodeId) -> Result<CommittedCapacity, StoreError> {
    lock_row(tx, node).await?;
    let row: Option<LedgerRow> =
        tx.select_optional("FROM node_claims WHERE node_uuid = ?", params![node]).await?;
    row.map(|row| row.committed).ok_or_else(no_row)
}

fn no_row() -> StoreError {
    StoreError::Internal("a new ledger has no row".into())
}

async fn lock_row(tx: &mut Tx, node: NodeId) -> Result<(), StoreError> {
    let updated =
        tx.execute("UPDATE node_claims SET version = version + 1 WHERE node_uuid = ?", params![node]).await?;
    if updated == 0 {
        let sql = "INSERT INTO node_claims (node_uuid, cpus, memory, disk, demand, demand_at, version) \
                   VALUES (?, 0, 0, 0, 0.0, 0.0, 1)";
        tx.execute(sql, params![node]).await.map_err(StoreError::retry_duplicate)?;
    }
    Ok(())
}

/// A ledger that a transaction has locked, and its node.
#[derive(Debug, Clone, PartialEq)]
pub struct LockedLedger {
    pub committed: CommittedCapacity,
    /// The state of the node; `None` if it does not exist.
    pub state: Option<NodeState>,
    /// Whether the node gets no new instances by request.
    pub is_cordoned: bool,
    /// The seconds since the last check-in of the node.
    pub silence: f64,
}

/// Locks the ledger of a node like [`lock`], and reads its node as well.
pub async fn lock_with_state(tx: &mut Tx, node: NodeId) -> Result<LockedLedger, StoreError> {
    lock_row(tx, node).await?;
    let sql = format!(
        "SELECT {}, n.state, n.cordon IS NOT NULL, {NOW} - COALESCE(n.lastseen, 0.0) FROM node_claims c LEFT JOIN nodes n ON n.uuid = c.node_uuid WHERE c.node_uuid = ?",
        LedgerRow::columns_of("c")
    );
    let row: Option<(LedgerRow, Option<NodeState>, bool, f64)> =
        tx.fetch_optional(&sql, params![node]).await?;
    let (row, state, is_cordoned, silence) = row.ok_or_else(no_row)?;
    Ok(LockedLedger { committed: row.committed, state, is_cordoned, silence })
}

/// Locks all ledgers until the transaction ends, and returns them. Creates those of `nodes` that have none.
pub async fn lock_all(
    tx: &mut Tx,
    nodes: &[NodeId],
) -> Result<HashMap<NodeId, CommittedCapacity>, StoreError> {
    tx.execute("UPDATE node_claims SET version = version + 1", &[]).await?;
    let mut ledgers = list(&mut *tx).await?;
    for node in nodes {
        if !ledgers.contains_key(node) {
            ledgers.insert(*node, lock(tx, *node).await?);
        }
    }
    Ok(ledgers)
}

/// Replaces the ledger of a node, which the transaction has locked.
pub async fn set(tx: &mut Tx, node: NodeId, to: &CommittedCapacity) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE node_claims SET cpus = ?, memory = ?, disk = ?, demand = ?, demand_at = ? WHERE node_uuid = ?",
        params![to.cpus, to.memory_mb, to.disk_gb, to.demand, to.demand_at, node],
    )
    .await?;
    Ok(())
}
