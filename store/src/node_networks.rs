//! Rows of what each node has of each network.
//!
//! A row exists from before a node makes the first device until after it removed the last one, so that nothing
//! is left on a machine without a row that tells of it.

use muster_types::ids::{NetworkId, NodeId};
use muster_types::time::now;

use super::{Read, Row, StoreError, Tx, Value, marks, params};

#[derive(Debug, Clone, PartialEq)]
pub struct NodeNetworkRow {
    pub node: NodeId,
    pub network: NetworkId,
    /// What the node last followed; 0 before the first time.
    pub generation: i64,
    /// Why it could not.
    pub error: Option<String>,
}

const COLUMNS: &str = "node_uuid, network_uuid, generation, error_message";

impl NodeNetworkRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self { node: row.parse(0)?, network: row.parse(1)?, generation: row.get(2)?, error: row.get(3)? })
    }
}

/// What nodes have of one network.
pub async fn of_network(mut db: impl Read, network: NetworkId) -> Result<Vec<NodeNetworkRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM node_networks WHERE network_uuid = ? ORDER BY node_uuid");
    db.rows(&sql, params![network]).await?.iter().map(NodeNetworkRow::read).collect()
}

/// What some nodes have.
pub async fn of_nodes(mut db: impl Read, nodes: &[NodeId]) -> Result<Vec<NodeNetworkRow>, StoreError> {
    let values: Vec<Value> = nodes.iter().map(|node| (*node).into()).collect();
    let sql = format!("SELECT {COLUMNS} FROM node_networks WHERE node_uuid IN ({})", marks(nodes.len()));
    db.rows(&sql, &values).await?.iter().map(NodeNetworkRow::read).collect()
}

/// Writes what a node has now.
pub async fn put(tx: &mut Tx, row: &NodeNetworkRow) -> Result<(), StoreError> {
    tx.execute(
        "REPLACE INTO node_networks (node_uuid, network_uuid, generation, error_message, updated) \
         VALUES (?, ?, ?, ?, ?)",
        params![row.node, row.network, row.generation, row.error.as_ref(), now()],
    )
    .await?;
    Ok(())
}

pub async fn remove(tx: &mut Tx, node: NodeId, network: NetworkId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM node_networks WHERE node_uuid = ? AND network_uuid = ?", params![node, network])
        .await?;
    Ok(())
}

/// Forgets what a node had that is no longer part of the cluster.
pub async fn remove_of_node(tx: &mut Tx, node: NodeId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM node_networks WHERE node_uuid = ?", params![node]).await?;
    Ok(())
}

/// Nothing is known any more of how far a node has followed: its host may have been down. What it may have stays known.
pub async fn void(tx: &mut Tx, node: NodeId) -> Result<(), StoreError> {
    tx.execute("UPDATE node_networks SET generation = 0 WHERE node_uuid = ?", params![node]).await?;
    Ok(())
}
