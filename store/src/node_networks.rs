//! Rows of networks on nodes.
//!
//! A row exists from before a node creates the first device of a network until after it removed the last one, so that
//! every device on a host has a row.

use muster_types::ids::{NetworkId, NodeId};
use muster_types::time::now;

use super::{Read, StoreError, Tx, Value, columns, params, placeholders};

#[derive(Debug, Clone, PartialEq)]
pub struct NodeNetworkRow {
    pub node: NodeId,
    pub network: NetworkId,
    /// The generation that the node last applied; 0 before the first time.
    pub generation: i64,
    /// Why the node failed to apply the newest generation.
    pub error: Option<String>,
}

columns! { NodeNetworkRow { node: node_uuid, network: network_uuid, generation, error: error_message, } }

/// Returns the nodes that have a network.
pub async fn of_network(mut db: impl Read, network: NetworkId) -> Result<Vec<NodeNetworkRow>, StoreError> {
    db.select("FROM node_networks WHERE network_uuid = ? ORDER BY node_uuid", params![network]).await
}

/// Returns the networks that some nodes have.
pub async fn of_nodes(mut db: impl Read, nodes: &[NodeId]) -> Result<Vec<NodeNetworkRow>, StoreError> {
    let values: Vec<Value> = nodes.iter().map(|node| (*node).into()).collect();
    let tail = format!("FROM node_networks WHERE node_uuid IN ({})", placeholders(nodes.len()));
    db.select(&tail, &values).await
}

/// Adds or replaces a row.
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

/// Removes all rows of a node that has left the cluster.
pub async fn remove_of_node(tx: &mut Tx, node: NodeId) -> Result<(), StoreError> {
    tx.execute("DELETE FROM node_networks WHERE node_uuid = ?", params![node]).await?;
    Ok(())
}

/// Marks all networks of a node as not applied, because its host may have restarted.
pub async fn reset_generations(tx: &mut Tx, node: NodeId) -> Result<(), StoreError> {
    tx.execute("UPDATE node_networks SET generation = 0 WHERE node_uuid = ?", params![node]).await?;
    Ok(())
}
