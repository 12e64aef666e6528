//! Rows of instances. See docs/decisions/0018.

mod details;
mod placement;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use muster_types::capacity::Capacity;
use muster_types::ids::{ArtifactId, BlobId, InstanceId, NodeId, StorageId};
use muster_types::instance::{
    ConfigDriveType, DiskRecord, DiskSpecRecord, FencingPolicy, InstanceState, MachineType, PowerState,
    RestartPolicy, SideChannel, manual_restart,
};
use muster_types::node::NodeState;
use muster_types::operation::OperationHandle;
use muster_types::shared_storage::{StorageType, local_storage};
use muster_types::spec::VideoSpec;
use muster_types::time::now;
use muster_types::vm::ConsolePorts;
use serde::{Deserialize, Serialize};

use super::nodes::NodeRow;
use super::{
    FAILED_LAST, Json, Read, Select as _, StoreError, Tx, Union, Value, columns, params, placeholders,
    to_json,
};

pub(crate) use details::DetailsParts;
pub use details::{InstanceDetails, details};
pub use placement::{
    awaiting_creation, clear_committed, clear_node, committed_of, lock_awaiting_creation, lock_placed,
    move_to_target, place_again, ports, reserve_generation, set_committed_disk, set_node, set_ports,
};

#[derive(Debug, Clone, PartialEq)]
pub struct InstanceRow {
    pub id: InstanceId,
    pub name: String,
    pub namespace: String,
    pub state: InstanceState,
    pub error_message: Option<String>,
    pub spec: InstanceSpec,
    /// Empty until the layout is known.
    pub disks: Vec<DiskRecord>,
    pub node: Option<NodeId>,
    /// The capacity that the node has committed to the instance; zero once it is released.
    pub committed: Capacity,
    /// The last observed state.
    pub power_state: PowerState,
    /// Since when the power state has its value.
    pub power_state_since: Option<f64>,
    /// The number of times that the instance was placed on a node. See docs/decisions/0052.
    pub generation: i64,
    /// The desired state: on, off or paused.
    pub power_wanted: PowerState,
    pub ports: Option<ConsolePorts>,
    pub agent_state: Option<String>,
    pub agent_start_time: Option<f64>,
    pub agent_system_boot_time: Option<f64>,
    pub last_operation: Option<OperationHandle>,
    pub created: f64,
}

/// The requested configuration of an instance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InstanceSpec {
    pub cpus: i64,
    pub memory: i64,
    pub disks: Vec<DiskSpecRecord>,
    /// The artifacts that disks wait for, by disk number, until their blobs are known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub awaited: BTreeMap<usize, ArtifactId>,
    pub video: VideoSpec,
    pub ssh_key: Option<String>,
    pub user_data: Option<String>,
    pub uefi: bool,
    pub secure_boot: bool,
    pub configdrive: ConfigDriveType,
    /// The blob that the NVRAM is initialized from.
    pub nvram_template: Option<BlobId>,
    pub machine_type: MachineType,
    pub side_channels: Vec<SideChannel>,
    pub requested_placement: Option<String>,
    /// Whether it may be created again from its images when its host is lost.
    #[serde(default)]
    pub disposable: bool,
    #[serde(default = "local_storage")]
    pub storage: StorageType,
    /// The shared storage that its disks are on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage_uuid: Option<StorageId>,
    /// Whether the shared storage has all of its disks.
    #[serde(default)]
    pub has_shared_disks: bool,
    /// The number of replicas of its disks.
    #[serde(default)]
    pub replicas: i64,
    /// The node whose replica becomes its disks, until it is created there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_from: Option<NodeId>,
    #[serde(default = "manual_restart")]
    pub restart: RestartPolicy,
    /// Unset: the policy of the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fencing: Option<FencingPolicy>,
    /// The VM of the last earlier placement that may still run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unfenced: Option<UnfencedVm>,
    /// The VMs of placements before that one that may still run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier_unfenced: Vec<UnfencedVm>,
}

impl InstanceSpec {
    /// Returns the VMs of earlier placements that may still run.
    pub fn unfenced_vms(&self) -> impl Iterator<Item = UnfencedVm> {
        self.earlier_unfenced.iter().copied().chain(self.unfenced)
    }

    /// Replaces the VMs of earlier placements that may still run, in the order of the placements.
    pub fn set_unfenced_vms(&mut self, mut vms: Vec<UnfencedVm>) {
        self.unfenced = vms.pop();
        self.earlier_unfenced = vms;
    }
}

/// The VM of an instance on a node that does not check in, from which the instance was removed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct UnfencedVm {
    pub node: NodeId,
    /// When its watchdog has certainly stopped it, by the clock of the database; unset without self-fencing.
    pub until: Option<f64>,
}

/// An instance to add.
#[derive(Debug, Clone)]
pub struct NewInstance {
    pub id: InstanceId,
    pub name: String,
    pub namespace: String,
    pub state: InstanceState,
    pub error_message: Option<String>,
    pub spec: InstanceSpec,
    pub node: Option<NodeId>,
    pub committed: Capacity,
}

columns! { InstanceRow {
    id: uuid,
    name,
    namespace,
    state,
    error_message,
    spec: json(spec),
    disks: json(disks),
    node: node_uuid,
    committed: Capacity { cpus: claimed_cpus, memory_mb: claimed_memory, disk_gb: claimed_disk, },
    power_state,
    power_state_since,
    generation,
    power_wanted,
    ports: console_ports(console_port, vdi_port, vdi_tls_port),
    agent_state,
    agent_start_time,
    agent_system_boot_time,
    last_operation: json(last_operation),
    created,
} }

pub(super) fn console_ports(
    console: Option<u16>,
    vdi: Option<u16>,
    vdi_tls: Option<u16>,
) -> Option<ConsolePorts> {
    Some(ConsolePorts { console: console?, vdi: vdi?, vdi_tls })
}

/// The states in which an instance can be found by its name.
const ACTIVE: &str = "state NOT IN ('deleted', 'delete-wait-error')";

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<InstanceRow>, StoreError> {
    db.select(&format!("FROM instances WHERE {tail}"), values).await
}

pub async fn get(db: impl Read, id: InstanceId) -> Result<Option<InstanceRow>, StoreError> {
    Ok(rows(db, "uuid = ?", params![id]).await?.pop())
}

/// Returns up to [`crate::MAX_NAMESAKES`] instances with a name, in one namespace or in all.
pub async fn by_name(
    db: impl Read,
    name: &str,
    namespace: Option<&str>,
) -> Result<Vec<InstanceRow>, StoreError> {
    match namespace {
        Some(namespace) => {
            let tail = format!("name = ? AND namespace = ? AND {ACTIVE} ORDER BY {FAILED_LAST}");
            rows(db, &tail, params![name, namespace]).await
        }
        None => rows(db, &format!("name = ? AND {ACTIVE} ORDER BY {FAILED_LAST}"), params![name]).await,
    }
}

/// Returns the next instances after `after`, by id. With `seen_by`, only those of that namespace and of those that
/// trust it; with `all`, also deleted ones.
pub async fn page(
    db: impl Read,
    seen_by: Option<&str>,
    all: bool,
    after: Option<InstanceId>,
    limit: i64,
) -> Result<Vec<InstanceRow>, StoreError> {
    let mut tail = "uuid > ?".to_owned();
    let mut values: Vec<Value> = vec![after.map_or_else(String::new, |id| id.to_string()).into()];
    if !all {
        tail = format!("{tail} AND {ACTIVE}");
    }
    if let Some(caller) = seen_by {
        tail.push_str(
            " AND (namespace = ? OR namespace IN (SELECT namespace FROM trusts WHERE trusted = ?))",
        );
        values.extend([caller.into(), caller.into()]);
    }
    values.push(limit.into());
    rows(db, &format!("{tail} ORDER BY uuid LIMIT ?"), &values).await
}

/// Returns all undeleted instances of a namespace.
pub async fn of_namespace(db: impl Read, namespace: &str) -> Result<Vec<InstanceRow>, StoreError> {
    rows(db, "namespace = ? AND state <> 'deleted' ORDER BY uuid", params![namespace]).await
}

/// Returns all undeleted instances that were placed on a node.
pub async fn of_node(db: impl Read, node: NodeId) -> Result<Vec<InstanceRow>, StoreError> {
    rows(db, "node_uuid = ? AND state <> 'deleted' ORDER BY uuid", params![node]).await
}

/// Returns all undeleted instances that were placed on a node, and the state of the node.
pub async fn of_node_with_state(
    db: impl Read,
    node: NodeId,
) -> Result<(Vec<InstanceRow>, Option<NodeState>), StoreError> {
    let mut union = Union::default();
    let tail = "FROM instances WHERE node_uuid = ? AND state <> 'deleted'";
    let instances = union.add(InstanceRow::COLUMNS, tail.into(), params![node]);
    let state = union.add("state", "FROM nodes WHERE uuid = ?".into(), params![node]);
    let mut rows = union.fetch(db).await?;
    Ok((rows.take(instances)?, rows.take(state)?.pop()))
}

/// Returns the tags of the placed instances of a namespace, with their nodes.
pub async fn tags(
    mut db: impl Read,
    namespace: &str,
) -> Result<Vec<(NodeId, serde_json::Value)>, StoreError> {
    let sql = format!(
        "SELECT node_uuid, value FROM instances JOIN metadata ON object_type = 'instance' AND object_id = uuid \
         AND metadata.name = 'tags' WHERE namespace = ? AND node_uuid IS NOT NULL AND {ACTIVE}"
    );
    let rows = db.fetch(&sql, params![namespace]).await?;
    Ok(rows.into_iter().map(|(node, Json(tags))| (node, tags)).collect())
}

/// Returns the deleted nodes that still have instances or unfinished operations.
pub async fn on_deleted_nodes(mut db: impl Read) -> Result<Vec<NodeRow>, StoreError> {
    let tail = "FROM nodes WHERE state = 'deleted' \
                AND (uuid IN (SELECT node_uuid FROM instances WHERE node_uuid IS NOT NULL AND state <> 'deleted') \
                OR uuid IN (SELECT node_uuid FROM operations WHERE node_uuid IS NOT NULL \
                AND state IN ('queued', 'executing')))";
    db.select(tail, &[]).await
}

/// Returns the instances that wait for an artifact.
pub async fn awaiting(mut db: impl Read, artifact: ArtifactId) -> Result<Vec<InstanceId>, StoreError> {
    let sql = "SELECT uuid FROM instances WHERE state IN ('initial', 'preflight') AND spec LIKE ? LIMIT 100";
    db.fetch(sql, params![format!("%\"awaited\":{{%{artifact}%")]).await
}

/// Returns the instances in a transitional state that no unfinished operation will change.
pub async fn without_operation(db: impl Read) -> Result<Vec<InstanceRow>, StoreError> {
    let tail = "state NOT IN ('created', 'error', 'deleted') AND NOT EXISTS (SELECT 1 FROM operations \
                WHERE target_type = 'instance' AND target_id = instances.uuid AND state IN ('queued', 'executing')) \
                ORDER BY updated LIMIT 500";
    rows(db, tail, &[]).await
}

pub async fn insert(tx: &mut Tx, new: &NewInstance) -> Result<InstanceRow, StoreError> {
    let time = now();
    tx.execute(
        "INSERT INTO instances (uuid, name, namespace, state, error_message, spec, disks, node_uuid, claimed_cpus, \
         claimed_memory, claimed_disk, power_state, power_wanted, created, updated, version) \
         VALUES (?, ?, ?, ?, ?, ?, '[]', ?, ?, ?, ?, ?, ?, ?, ?, 1)",
        params![
            new.id,
            &new.name,
            &new.namespace,
            new.state,
            new.error_message.as_ref(),
            to_json(&new.spec)?,
            new.node,
            new.committed.cpus,
            new.committed.memory_mb,
            new.committed.disk_gb,
            PowerState::Initial,
            PowerState::On,
            time,
            time
        ],
    )
    .await?;
    let row = get(&mut *tx, new.id).await?;
    row.ok_or_else(|| StoreError::Internal("a new instance has no row".into()))
}

/// Locks an instance until the transaction ends. Returns whether it is in one of `states`.
pub async fn lock(tx: &mut Tx, id: InstanceId, states: &[InstanceState]) -> Result<bool, StoreError> {
    let sql = format!(
        "UPDATE instances SET version = version + 1 WHERE uuid = ? AND state IN ({})",
        placeholders(states.len())
    );
    let mut values: Vec<Value> = vec![id.into()];
    values.extend(states.iter().map(|state| Value::from(*state)));
    Ok(tx.execute(&sql, &values).await? == 1)
}

/// Locks an instance until the transaction ends. Returns whether it is not deleted.
pub async fn lock_undeleted(tx: &mut Tx, id: InstanceId) -> Result<bool, StoreError> {
    let sql = "UPDATE instances SET version = version + 1 WHERE uuid = ? AND state <> 'deleted'";
    Ok(tx.execute(sql, params![id]).await? == 1)
}

/// Changes the state of an instance if it is still `from`.
pub async fn set_state(
    tx: &mut Tx,
    id: InstanceId,
    from: InstanceState,
    to: InstanceState,
    error: Option<&str>,
) -> Result<bool, StoreError> {
    if !from.can_transition_to(to) {
        return Err(StoreError::Internal(format!("an instance cannot go from {from} to {to}")));
    }
    let updated = tx
        .execute(
            "UPDATE instances SET state = ?, error_message = COALESCE(?, error_message), updated = ?, \
             version = version + 1 WHERE uuid = ? AND state = ?",
            params![to, error, now(), id, from],
        )
        .await?;
    Ok(updated == 1)
}

/// Records the resolved configuration and the layout of the disks.
pub async fn set_spec(
    tx: &mut Tx,
    id: InstanceId,
    spec: &InstanceSpec,
    disks: &[DiskRecord],
) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE instances SET spec = ?, disks = ?, version = version + 1 WHERE uuid = ?",
        params![to_json(spec)?, to_json(&disks)?, id],
    )
    .await?;
    Ok(())
}

/// Records the observed power state of an instance. Returns whether it changed.
pub async fn set_power(tx: &mut Tx, id: InstanceId, power: PowerState) -> Result<bool, StoreError> {
    let sql = "UPDATE instances SET power_state = ?, power_state_since = ?, version = version + 1 \
               WHERE uuid = ? AND power_state <> ?";
    Ok(tx.execute(sql, params![power, now(), id, power]).await? == 1)
}

/// The condition that the VMs of a node cannot be observed: it does not check in, or its daemon was stopped and has not
/// checked in since the time of the parameter.
const UNOBSERVED: &str =
    "(nodes.state IN ('missing', 'error') OR (nodes.state = 'stopped' AND nodes.lastseen <= ?))";

/// An instance whose node does not check in.
#[derive(Debug, Clone, PartialEq)]
pub struct UnobservedInstance {
    pub id: InstanceId,
    /// The last observed state.
    pub power_state: PowerState,
    pub node: String,
    pub node_lastseen: f64,
}

/// Returns the instances whose power state is not marked as unknown although their node does not check in. A stopped
/// node counts if it has not checked in since `stopped_before`.
pub async fn unobserved(
    mut db: impl Read,
    stopped_before: f64,
    limit: i64,
) -> Result<Vec<UnobservedInstance>, StoreError> {
    let sql = format!(
        "SELECT instances.uuid, power_state, nodes.name, nodes.lastseen FROM instances \
         JOIN nodes ON nodes.uuid = node_uuid WHERE instances.state = 'created' AND power_state <> 'unknown' \
         AND {UNOBSERVED} ORDER BY instances.uuid LIMIT ?"
    );
    let rows = db.fetch(&sql, params![stopped_before, limit]).await?;
    let row =
        |(id, power_state, node, node_lastseen)| UnobservedInstance { id, power_state, node, node_lastseen };
    Ok(rows.into_iter().map(row).collect())
}

/// Marks the power state and the agent state of an instance as unknown, if its node still does not check in.
pub async fn set_unknown(tx: &mut Tx, id: InstanceId, stopped_before: f64) -> Result<bool, StoreError> {
    let sql = format!(
        "UPDATE instances SET power_state = 'unknown', power_state_since = ?, \
         agent_state = CASE WHEN agent_state IS NULL THEN NULL ELSE 'unknown' END, version = version + 1 \
         WHERE uuid = ? AND state = 'created' AND power_state <> 'unknown' \
         AND node_uuid IN (SELECT uuid FROM nodes WHERE {UNOBSERVED})"
    );
    Ok(tx.execute(&sql, params![now(), id, stopped_before]).await? == 1)
}

/// Sets the desired power state of an instance.
pub async fn set_power_wanted(tx: &mut Tx, id: InstanceId, power: PowerState) -> Result<(), StoreError> {
    let sql = "UPDATE instances SET power_wanted = ?, version = version + 1 WHERE uuid = ?";
    tx.execute(sql, params![power, id]).await?;
    Ok(())
}

pub async fn set_agent_state(
    tx: &mut Tx,
    id: InstanceId,
    agent_state: Option<&str>,
) -> Result<(), StoreError> {
    tx.execute("UPDATE instances SET agent_state = ? WHERE uuid = ?", params![agent_state, id]).await?;
    Ok(())
}

/// The observed status of the agent of an instance.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentStatus {
    pub state: String,
    pub start_time: Option<f64>,
    pub system_boot_time: Option<f64>,
}

/// Records the status of an agent if its instance is on, and is still placed as when `row` was read.
pub async fn set_agent(tx: &mut Tx, row: &InstanceRow, agent: &AgentStatus) -> Result<bool, StoreError> {
    let sql = "UPDATE instances SET agent_state = ?, agent_start_time = ?, agent_system_boot_time = ? \
               WHERE uuid = ? AND state = 'created' AND power_state = 'on' AND node_uuid = ? AND generation = ?";
    let AgentStatus { state, start_time, system_boot_time } = agent;
    let values = params![state, *start_time, *system_boot_time, row.id, row.node, row.generation];
    Ok(tx.execute(sql, values).await? == 1)
}

pub async fn set_operation(
    tx: &mut Tx,
    id: InstanceId,
    operation: &OperationHandle,
) -> Result<(), StoreError> {
    let handle = to_json(operation)?;
    tx.execute("UPDATE instances SET last_operation = ? WHERE uuid = ?", params![handle, id]).await?;
    Ok(())
}

/// The condition that an instance uses nothing: it is deleted, or its creation was refused before it had a node and an
/// operation.
const REMOVABLE: &str =
    "state = 'deleted' OR (state = 'error' AND node_uuid IS NULL AND last_operation IS NULL)";

/// Returns the instances that were deleted, or whose creation was refused, before `before`.
pub async fn deleted_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<InstanceId>, StoreError> {
    let sql =
        format!("SELECT uuid FROM instances WHERE ({REMOVABLE}) AND updated <= ? ORDER BY updated LIMIT ?");
    db.fetch(&sql, params![before, limit]).await
}

/// Removes the row of an instance that is deleted or was never placed.
pub async fn remove(tx: &mut Tx, id: InstanceId) -> Result<bool, StoreError> {
    let sql = format!("DELETE FROM instances WHERE uuid = ? AND ({REMOVABLE})");
    Ok(tx.execute(&sql, params![id]).await? == 1)
}
