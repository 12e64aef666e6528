//! Rows of nodes.

use std::collections::HashMap;

use muster_types::ids::NodeId;
use muster_types::node::{NodeIdentity, NodeReport, NodeState};
use muster_types::object::NameOrId;
use muster_types::time::now;

use super::{Read, Row, StoreError, Tx, Value, marks, params};

#[derive(Debug, Clone)]
pub struct NodeRow {
    pub identity: NodeIdentity,
    pub state: NodeState,
    pub lastseen: f64,
    pub report: NodeReport,
    pub created: f64,
    pub version: i64,
}

const COLUMNS: &str = "uuid, name, ip, state, software, simulated, is_hypervisor, is_network_node, \
                       is_database_node, lastseen, report, version, created";

impl NodeRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self {
            identity: NodeIdentity {
                id: row.parse(0)?,
                name: row.get(1)?,
                ip: row.get(2)?,
                release: row.get(4)?,
                simulated: row.get(5)?,
                is_hypervisor: row.get(6)?,
                is_network_node: row.get(7)?,
                is_database_node: row.get(8)?,
            },
            state: row.parse(3)?,
            lastseen: row.get(9)?,
            report: row.json(10)?,
            version: row.get(11)?,
            created: row.get(12)?,
        })
    }
}

pub async fn list(mut db: impl Read) -> Result<Vec<NodeRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM nodes ORDER BY name");
    db.rows(&sql, &[]).await?.iter().map(NodeRow::read).collect()
}

pub async fn get(mut db: impl Read, node: &NameOrId<NodeId>) -> Result<Option<NodeRow>, StoreError> {
    let (column, value) = match node {
        NameOrId::Id(id) => ("uuid", id.to_string()),
        NameOrId::Name(name) => ("name", name.clone()),
    };
    let sql = format!("SELECT {COLUMNS} FROM nodes WHERE {column} = ?");
    db.rows(&sql, params![value]).await?.first().map(NodeRow::read).transpose()
}

/// The state of a node.
pub async fn state(mut db: impl Read, id: NodeId) -> Result<Option<NodeState>, StoreError> {
    let rows = db.rows("SELECT state FROM nodes WHERE uuid = ?", params![id]).await?;
    rows.first().map(|row| row.parse(0)).transpose()
}

/// Adds a node; a taken name or id is [`StoreError::Duplicate`].
pub async fn insert(tx: &mut Tx, identity: &NodeIdentity) -> Result<(), StoreError> {
    let time = now();
    tx.execute(
        "INSERT INTO nodes (uuid, name, ip, state, software, simulated, is_hypervisor, is_network_node, \
         is_database_node, lastseen, report, created, updated, version) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)",
        params![
            identity.id,
            &identity.name,
            &identity.ip,
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

/// Writes what a node says of itself.
pub async fn set_identity(tx: &mut Tx, identity: &NodeIdentity) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE nodes SET name = ?, ip = ?, software = ?, simulated = ?, is_hypervisor = ?, is_network_node = ?, \
         is_database_node = ?, version = version + 1 WHERE uuid = ?",
        params![
            &identity.name,
            &identity.ip,
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
    let report = serde_json::to_string(report).map_err(|e| StoreError::Broken(e.to_string()))?;
    tx.execute(
        "UPDATE nodes SET lastseen = ?, report = ?, version = version + 1 WHERE uuid = ?",
        params![now(), report, id],
    )
    .await?;
    Ok(())
}

/// Moves a node to another state if nobody changed it since `row` was read.
pub async fn set_state(tx: &mut Tx, row: &NodeRow, to: NodeState) -> Result<bool, StoreError> {
    let met = tx
        .execute(
            "UPDATE nodes SET state = ?, updated = ?, version = version + 1 WHERE uuid = ? AND version = ?",
            params![to, now(), row.identity.id, row.version],
        )
        .await?;
    Ok(met == 1)
}

/// The names of some nodes.
pub async fn names(mut db: impl Read, ids: &[NodeId]) -> Result<HashMap<NodeId, String>, StoreError> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    let values: Vec<Value> = ids.iter().map(|id| (*id).into()).collect();
    let sql = format!("SELECT uuid, name FROM nodes WHERE uuid IN ({})", marks(ids.len()));
    db.rows(&sql, &values).await?.iter().map(|row| Ok((row.parse(0)?, row.get(1)?))).collect()
}
