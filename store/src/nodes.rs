//! Rows of nodes. See docs/decisions/0011.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use muster_types::ids::NodeId;
use muster_types::node::{NodeIdentity, NodeReport, NodeState};
use muster_types::object::NameOrId;
use muster_types::time::now;

use super::{Read, StoreError, Tx, Value, columns, params, placeholders, to_json};

#[derive(Debug, Clone)]
pub struct NodeRow {
    pub identity: NodeIdentity,
    pub state: NodeState,
    pub lastseen: f64,
    pub report: NodeReport,
    pub created: f64,
    pub version: i64,
}

columns! { NodeRow {
    identity: NodeIdentity {
        id: uuid,
        name,
        ip,
        release: software,
        simulated,
        is_hypervisor,
        is_network_node,
        is_database_node,
    },
    state,
    lastseen,
    report: json(report),
    created,
    version,
} }

pub async fn list(mut db: impl Read) -> Result<Vec<NodeRow>, StoreError> {
    db.select("FROM nodes ORDER BY name", &[]).await
}

pub async fn get(mut db: impl Read, node: &NameOrId<NodeId>) -> Result<Option<NodeRow>, StoreError> {
    let (column, value) = match node {
        NameOrId::Id(id) => ("uuid", id.to_string()),
        NameOrId::Name(name) => ("name", name.clone()),
    };
    db.select_optional(&format!("FROM nodes WHERE {column} = ?"), params![value]).await
}

/// Returns the state of a node.
pub async fn state(mut db: impl Read, id: NodeId) -> Result<Option<NodeState>, StoreError> {
    db.fetch_optional("SELECT state FROM nodes WHERE uuid = ?", params![id]).await
}

/// Adds a node; an existing name or id is a [`StoreError::Duplicate`].
pub async fn insert(tx: &mut Tx, identity: &NodeIdentity) -> Result<(), StoreError> {
    let time = now();
    tx.execute(
        "INSERT INTO nodes (uuid, name, ip, state, software, simulated, is_hypervisor, is_network_node, \
         is_database_node, lastseen, report, created, updated, version) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)",
        params![
            identity.id,
            &identity.name,
            identity.ip,
            NodeState::Created,
            &identity.release,
            identity.simulated,
            identity.is_hypervisor,
            identity.is_network_node,
            identity.is_database_node,
            time,
            "{\"resources\":{},\"process_metrics\":{}}",
            time,
            time
        ],
    )
    .await?;
    Ok(())
}

/// Records the identity that a node reports.
pub async fn set_identity(tx: &mut Tx, identity: &NodeIdentity) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE nodes SET name = ?, ip = ?, software = ?, simulated = ?, is_hypervisor = ?, is_network_node = ?, \
         is_database_node = ?, version = version + 1 WHERE uuid = ?",
        params![
            &identity.name,
            identity.ip,
            &identity.release,
            identity.simulated,
            identity.is_hypervisor,
            identity.is_network_node,
            identity.is_database_node,
            identity.id
        ],
    )
    .await?;
    Ok(())
}

/// Records a check-in.
pub async fn set_report(tx: &mut Tx, id: NodeId, report: &NodeReport) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE nodes SET lastseen = ?, report = ?, version = version + 1 WHERE uuid = ?",
        params![now(), to_json(report)?, id],
    )
    .await?;
    Ok(())
}

/// Changes the state of a node if it has not changed since `row` was read.
pub async fn set_state(tx: &mut Tx, row: &NodeRow, to: NodeState) -> Result<bool, StoreError> {
    let updated = tx
        .execute(
            "UPDATE nodes SET state = ?, updated = ?, version = version + 1 WHERE uuid = ? AND version = ?",
            params![to, now(), row.identity.id, row.version],
        )
        .await?;
    Ok(updated == 1)
}

/// Returns the names of some nodes.
pub async fn names(mut db: impl Read, ids: &[NodeId]) -> Result<HashMap<NodeId, String>, StoreError> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    let values: Vec<Value> = ids.iter().map(|id| (*id).into()).collect();
    let sql = format!("SELECT uuid, name FROM nodes WHERE uuid IN ({})", placeholders(ids.len()));
    Ok(db.fetch(&sql, &values).await?.into_iter().collect())
}
