//! Where instances are: their nodes, generations, committed capacity and ports.

use muster_types::capacity::Capacity;
use muster_types::ids::{InstanceId, NodeId};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::vm::ConsolePorts;

use super::{InstanceRow, rows};
use crate::instance_migrations::MigrationRow;
use crate::time::NOW;
use crate::{Read, StoreError, Tx, params};

/// Returns the condition that a node has nothing of an instance which is created or evacuated there: its networks and images may be
/// prepared, but the step `instance_start`, the third one, cannot have begun, because the step before is not recorded as complete.
fn awaiting_creation_condition() -> String {
    let is_waiting = format!(
        "name IN ('create_instance', 'evacuate_instance') AND step < 2 \
         AND (state = 'queued' OR (state = 'executing' AND lease_expires <= {NOW}))"
    );
    format!(
        "node_uuid = ? AND state IN ('initial', 'preflight') \
         AND EXISTS (SELECT 1 FROM operations WHERE target_type = 'instance' AND target_id = instances.uuid AND {is_waiting}) \
         AND NOT EXISTS (SELECT 1 FROM operations WHERE target_type = 'instance' AND target_id = instances.uuid \
         AND state = 'executing' AND NOT ({is_waiting}))"
    )
}

/// Returns the instances on a node of which it has nothing, although they are to be created there. The capacity of the node limits their number.
pub async fn awaiting_creation(db: impl Read, node: NodeId) -> Result<Vec<InstanceRow>, StoreError> {
    rows(db, &format!("{} ORDER BY created, uuid", awaiting_creation_condition()), params![node]).await
}

/// Locks an instance on a node and its operations until the transaction ends. Returns whether the node has nothing of it.
pub async fn lock_awaiting_creation(tx: &mut Tx, id: InstanceId, node: NodeId) -> Result<bool, StoreError> {
    let target = ObjectRef::new(ObjectType::Instance, id);
    let sql = "UPDATE operations SET version = version + 1 WHERE target_type = ? AND target_id = ?";
    tx.execute(sql, params![target.object_type, &target.id]).await?;
    let sql = format!(
        "UPDATE instances SET version = version + 1 WHERE uuid = ? AND {}",
        awaiting_creation_condition()
    );
    Ok(tx.execute(&sql, params![id, node]).await? == 1)
}

/// Places an instance on a node, with its committed capacity.
pub async fn set_node(
    tx: &mut Tx,
    id: InstanceId,
    node: NodeId,
    committed: Capacity,
) -> Result<(), StoreError> {
    let sql = "UPDATE instances SET node_uuid = ?, claimed_cpus = ?, claimed_memory = ?, claimed_disk = ?, \
               version = version + 1 WHERE uuid = ?";
    tx.execute(sql, params![node, committed.cpus, committed.memory_mb, committed.disk_gb, id]).await?;
    Ok(())
}

/// Locks an instance until the transaction ends. Returns whether it is still placed as when `row` was read: on the same node
/// under the same generation. A daemon must not record anything about its VM otherwise. See docs/decisions/0052.
pub async fn lock_placed(tx: &mut Tx, row: &InstanceRow) -> Result<bool, StoreError> {
    let sql = "UPDATE instances SET version = version + 1 \
               WHERE uuid = ? AND COALESCE(node_uuid, '') = ? AND generation = ?";
    let node = row.node.map_or_else(String::new, |node| node.to_string());
    Ok(tx.execute(sql, params![row.id, node, row.generation]).await? == 1)
}

/// Changes the disk space that is committed to an instance.
pub async fn set_committed_disk(tx: &mut Tx, id: InstanceId, disk_gb: i64) -> Result<(), StoreError> {
    let sql = "UPDATE instances SET claimed_disk = ?, version = version + 1 WHERE uuid = ?";
    tx.execute(sql, params![disk_gb, id]).await?;
    Ok(())
}

/// Clears the committed capacity of an instance, which stays on its node.
pub async fn clear_committed(tx: &mut Tx, id: InstanceId) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE instances SET claimed_cpus = 0, claimed_memory = 0, claimed_disk = 0, version = version + 1 \
         WHERE uuid = ?",
        params![id],
    )
    .await?;
    Ok(())
}

/// Returns the sum of the capacity that is committed to the instances of a namespace.
pub async fn committed_of(mut db: impl Read, namespace: &str) -> Result<Capacity, StoreError> {
    let (cpus, memory_mb, disk_gb) = db
        .fetch_one(
            "SELECT CAST(COALESCE(SUM(claimed_cpus), 0) AS SIGNED), CAST(COALESCE(SUM(claimed_memory), 0) AS SIGNED), \
             CAST(COALESCE(SUM(claimed_disk), 0) AS SIGNED) FROM instances WHERE namespace = ?",
            params![namespace],
        )
        .await?;
    Ok(Capacity { cpus, memory_mb, disk_gb })
}

/// The next generation, which no VM of the instance has, not even one of a failed migration.
const NEXT_GENERATION: &str =
    "CASE WHEN reserved_generation > generation THEN reserved_generation ELSE generation END + 1";

/// Reserves the next generation for a migration of a created instance, and locks the instance until the transaction ends.
/// Returns `None` if the instance was placed again since `row` was read.
pub async fn reserve_generation(tx: &mut Tx, row: &InstanceRow) -> Result<Option<i64>, StoreError> {
    let sql = format!(
        "UPDATE instances SET reserved_generation = {NEXT_GENERATION}, version = version + 1 \
         WHERE uuid = ? AND generation = ? AND node_uuid = ? AND state = 'created'"
    );
    if tx.execute(&sql, params![row.id, row.generation, row.node]).await? != 1 {
        return Ok(None);
    }
    let sql = "SELECT reserved_generation FROM instances WHERE uuid = ?";
    tx.fetch_one(sql, params![row.id]).await.map(Some)
}

/// Moves a created instance to the target of its migration, if it is still on the source and was not placed again.
pub async fn move_to_target(tx: &mut Tx, migration: &MigrationRow) -> Result<bool, StoreError> {
    let sql = "UPDATE instances SET node_uuid = ?, generation = ?, version = version + 1 WHERE uuid = ? \
               AND node_uuid = ? AND generation < ? AND reserved_generation = ? AND state = 'created'";
    let (id, generation) = (migration.instance, migration.generation);
    let values = params![migration.target, generation, id, migration.source, generation, generation];
    Ok(tx.execute(sql, values).await? == 1)
}

/// Removes an instance from its node. A VM that the node still has is stale from now on.
pub async fn clear_node(tx: &mut Tx, id: InstanceId) -> Result<(), StoreError> {
    let sql = format!(
        "UPDATE instances SET node_uuid = NULL, generation = {NEXT_GENERATION}, version = version + 1 WHERE uuid = ?"
    );
    tx.execute(&sql, params![id]).await?;
    Ok(())
}

/// Places an instance on another node under the next generation, if it has not been placed again since `row` was read.
pub async fn place_again(
    tx: &mut Tx,
    row: &InstanceRow,
    node: NodeId,
    committed: &Capacity,
) -> Result<bool, StoreError> {
    let sql = format!(
        "UPDATE instances SET node_uuid = ?, generation = {NEXT_GENERATION}, claimed_cpus = ?, claimed_memory = ?, \
         claimed_disk = ?, version = version + 1 WHERE uuid = ? AND generation = ? AND node_uuid = ?"
    );
    let values = params![
        node,
        committed.cpus,
        committed.memory_mb,
        committed.disk_gb,
        row.id,
        row.generation,
        row.node
    ];
    Ok(tx.execute(&sql, values).await? == 1)
}

/// Returns the ports of a node that are in use.
pub async fn ports(mut db: impl Read, node: NodeId) -> Result<Vec<u16>, StoreError> {
    db.fetch("SELECT port FROM instance_ports WHERE node_uuid = ?", params![node]).await
}

/// Replaces the ports of an instance. Returns `false` if another instance has one of them.
pub async fn set_ports(
    tx: &mut Tx,
    id: InstanceId,
    node: NodeId,
    ports: Option<ConsolePorts>,
) -> Result<bool, StoreError> {
    tx.execute("DELETE FROM instance_ports WHERE instance_uuid = ?", params![id]).await?;
    let all: Vec<u16> = ports
        .map(|ports| [ports.console, ports.vdi].into_iter().chain(ports.vdi_tls).collect())
        .unwrap_or_default();
    for port in all {
        let sql = "INSERT INTO instance_ports (node_uuid, port, instance_uuid) VALUES (?, ?, ?)";
        match tx.execute(sql, params![node, port, id]).await {
            Err(StoreError::Duplicate(_)) => return Ok(false),
            inserted => inserted?,
        };
    }
    tx.execute(
        "UPDATE instances SET console_port = ?, vdi_port = ?, vdi_tls_port = ?, version = version + 1 WHERE uuid = ?",
        params![
            ports.map(|ports| ports.console),
            ports.map(|ports| ports.vdi),
            ports.and_then(|ports| ports.vdi_tls),
            id
        ],
    )
    .await?;
    Ok(true)
}
