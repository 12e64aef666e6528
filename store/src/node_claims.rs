//! What nodes have promised to their instances, in sum.

use std::collections::HashMap;

use muster_types::ids::NodeId;

use super::{Read, Row, StoreError, Tx, params};
use muster_types::capacity::CommittedCapacity;

const COLUMNS: &str = "node_uuid, cpus, memory, disk, demand, demand_at";

fn read(row: &Row) -> Result<(NodeId, CommittedCapacity), StoreError> {
    let committed = CommittedCapacity {
        cpus: row.get(1)?,
        memory_mb: row.get(2)?,
        disk_gb: row.get(3)?,
        demand: row.get(4)?,
        demand_at: row.get(5)?,
    };
    Ok((row.parse(0)?, committed))
}

/// The ledgers of all nodes that ever promised anything.
pub async fn list(mut db: impl Read) -> Result<HashMap<NodeId, CommittedCapacity>, StoreError> {
    db.rows(&format!("SELECT {COLUMNS} FROM node_claims"), &[]).await?.iter().map(read).collect()
}

/// The ledger of a node, which nobody else changes until this transaction ends.
pub async fn hold(tx: &mut Tx, node: NodeId) -> Result<CommittedCapacity, StoreError> {
    let touched =
        tx.execute("UPDATE node_claims SET version = version + 1 WHERE node_uuid = ?", params![node]).await?;
    if touched == 0 {
        let sql = "INSERT INTO node_claims (node_uuid, cpus, memory, disk, demand, demand_at, version) \
                   VALUES (?, 0, 0, 0, 0.0, 0.0, 1)";
        match tx.execute(sql, params![node]).await {
            Err(StoreError::Duplicate(why)) => return Err(StoreError::Conflict(why)),
            inserted => inserted?,
        };
    }
    let sql = format!("SELECT {COLUMNS} FROM node_claims WHERE node_uuid = ?");
    let row = tx.query_one(&sql, params![node]).await?;
    let row = row.ok_or_else(|| StoreError::Broken("a new ledger has no row".into()))?;
    Ok(read(&row)?.1)
}

/// The ledgers of these nodes and of all others that have one, which nobody else changes until this transaction ends.
pub async fn hold_all(
    tx: &mut Tx,
    nodes: &[NodeId],
) -> Result<HashMap<NodeId, CommittedCapacity>, StoreError> {
    tx.execute("UPDATE node_claims SET version = version + 1", &[]).await?;
    let mut ledgers = list(&mut *tx).await?;
    for node in nodes {
        if !ledgers.contains_key(node) {
            ledgers.insert(*node, hold(tx, *node).await?);
        }
    }
    Ok(ledgers)
}

/// Writes the ledger of a node that was held.
pub async fn set(tx: &mut Tx, node: NodeId, to: &CommittedCapacity) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE node_claims SET cpus = ?, memory = ?, disk = ?, demand = ?, demand_at = ? WHERE node_uuid = ?",
        params![to.cpus, to.memory_mb, to.disk_gb, to.demand, to.demand_at, node],
    )
    .await?;
    Ok(())
}
