//! Rows of instances.

use std::collections::BTreeMap;

use muster_types::ids::{ArtifactId, BlobId, InstanceId, NodeId};
use muster_types::instance::{
    ConfigDriveType, DiskRecord, DiskSpecRecord, InstanceState, MachineType, PowerState, SideChannel,
};
use muster_types::operation::OperationHandle;
use muster_types::spec::VideoSpec;
use muster_types::time::now;
use muster_types::vm::ConsolePorts;
use serde::{Deserialize, Serialize};

use super::{Read, Row, StoreError, Tx, Value, marks, params};

#[derive(Debug, Clone, PartialEq)]
pub struct InstanceRow {
    pub id: InstanceId,
    pub name: String,
    pub namespace: String,
    pub state: InstanceState,
    pub error_message: Option<String>,
    pub spec: InstanceSpec,
    /// Empty until they are laid out.
    pub disks: Vec<DiskRecord>,
    pub node: Option<NodeId>,
    pub claimed: Claimed,
    /// What was last seen.
    pub power_state: PowerState,
    /// What the user wants: on, off or paused.
    pub power_wanted: PowerState,
    pub ports: Option<ConsolePorts>,
    pub agent_state: Option<String>,
    pub agent_start_time: Option<f64>,
    pub agent_system_boot_time: Option<f64>,
    pub last_operation: Option<OperationHandle>,
    pub created: f64,
}

/// What a node has promised to an instance; nothing once that is given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Claimed {
    pub cpus: i64,
    pub memory_mb: i64,
    pub disk_gb: i64,
}

/// What was asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InstanceSpec {
    pub cpus: i64,
    pub memory: i64,
    pub disks: Vec<DiskSpecRecord>,
    /// The artifacts that disks wait for, by the number of the disk, until their content is known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub awaited: BTreeMap<usize, ArtifactId>,
    pub video: VideoSpec,
    pub ssh_key: Option<String>,
    pub user_data: Option<String>,
    pub uefi: bool,
    pub secure_boot: bool,
    pub configdrive: ConfigDriveType,
    /// As the record shows it.
    pub nvram_template: Option<String>,
    pub machine_type: MachineType,
    pub side_channels: Vec<SideChannel>,
    pub requested_placement: Option<String>,
}

impl InstanceSpec {
    /// The content that the memory of the firmware begins as.
    #[must_use]
    pub fn nvram_blob(&self) -> Option<BlobId> {
        self.nvram_template.as_ref().and_then(|text| text.parse().ok())
    }
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
    pub claimed: Claimed,
}

const COLUMNS: &str = "uuid, name, namespace, state, error_message, spec, disks, node_uuid, claimed_cpus, claimed_memory, \
                       claimed_disk, power_state, power_wanted, console_port, vdi_port, vdi_tls_port, agent_state, \
                       agent_start_time, agent_system_boot_time, last_operation, created";
/// States in which an instance goes by its name.
const ACTIVE: &str = "state NOT IN ('deleted', 'delete-wait-error')";

impl InstanceRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        let port =
            |at| Ok::<_, StoreError>(row.get::<Option<i64>>(at)?.and_then(|port| u16::try_from(port).ok()));
        let ports = match (port(13)?, port(14)?) {
            (Some(console), Some(vdi)) => Some(ConsolePorts { console, vdi, vdi_tls: port(15)? }),
            _ => None,
        };
        Ok(Self {
            id: row.parse(0)?,
            name: row.get(1)?,
            namespace: row.get(2)?,
            state: row.parse(3)?,
            error_message: row.get(4)?,
            spec: row.json(5)?,
            disks: row.json(6)?,
            node: row.parse_opt(7)?,
            claimed: Claimed { cpus: row.get(8)?, memory_mb: row.get(9)?, disk_gb: row.get(10)? },
            power_state: row.parse(11)?,
            power_wanted: row.parse(12)?,
            ports,
            agent_state: row.get(16)?,
            agent_start_time: row.get(17)?,
            agent_system_boot_time: row.get(18)?,
            last_operation: row.json_opt(19)?,
            created: row.get(20)?,
        })
    }
}

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<InstanceRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM instances WHERE {tail}");
    db.rows(&sql, values).await?.iter().map(InstanceRow::read).collect()
}

fn json(value: &impl Serialize) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|error| StoreError::Broken(error.to_string()))
}

pub async fn get(db: impl Read, id: InstanceId) -> Result<Option<InstanceRow>, StoreError> {
    Ok(rows(db, "uuid = ?", params![id]).await?.pop())
}

/// The instances of a name, in one namespace or in all.
pub async fn by_name(
    db: impl Read,
    name: &str,
    namespace: Option<&str>,
) -> Result<Vec<InstanceRow>, StoreError> {
    match namespace {
        Some(namespace) => {
            let tail = format!("name = ? AND namespace = ? AND {ACTIVE} LIMIT 2");
            rows(db, &tail, params![name, namespace]).await
        }
        None => rows(db, &format!("name = ? AND {ACTIVE} LIMIT 2"), params![name]).await,
    }
}

/// The instances of a name in namespaces that trust the caller.
pub async fn by_name_trusting(
    db: impl Read,
    name: &str,
    caller: &str,
) -> Result<Vec<InstanceRow>, StoreError> {
    let tail = format!(
        "name = ? AND namespace IN (SELECT namespace FROM trusts WHERE trusted = ?) AND {ACTIVE} LIMIT 2"
    );
    rows(db, &tail, params![name, caller]).await
}

/// The next instances after `after`, by id. `seen_by` keeps those of namespaces that are or trust that one; `all`
/// keeps deleted ones.
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

/// Every instance of a namespace that is not deleted; of all namespaces without one.
pub async fn of_namespace(db: impl Read, namespace: Option<&str>) -> Result<Vec<InstanceRow>, StoreError> {
    match namespace {
        Some(namespace) => {
            rows(db, "namespace = ? AND state <> 'deleted' ORDER BY uuid", params![namespace]).await
        }
        None => rows(db, "state <> 'deleted' ORDER BY uuid", &[]).await,
    }
}

/// Every instance that is or was on a node and has a row.
pub async fn of_node(db: impl Read, node: NodeId) -> Result<Vec<InstanceRow>, StoreError> {
    rows(db, "node_uuid = ? AND state <> 'deleted' ORDER BY uuid", params![node]).await
}

/// Which of some instances belong to a namespace that is or trusts the caller's.
pub async fn visible(
    mut db: impl Read,
    ids: &[String],
    caller: &str,
) -> Result<std::collections::HashSet<String>, StoreError> {
    if ids.is_empty() {
        return Ok(std::collections::HashSet::new());
    }
    let sql = format!(
        "SELECT uuid FROM instances WHERE uuid IN ({}) \
         AND (namespace = ? OR namespace IN (SELECT namespace FROM trusts WHERE trusted = ?))",
        marks(ids.len())
    );
    let mut values: Vec<Value> = ids.iter().map(Value::from).collect();
    values.extend([caller.into(), caller.into()]);
    db.rows(&sql, &values).await?.iter().map(|row| row.get(0)).collect()
}

/// The tags of the placed instances of a namespace, with where they are.
pub async fn tags(
    mut db: impl Read,
    namespace: &str,
) -> Result<Vec<(NodeId, serde_json::Value)>, StoreError> {
    let sql = format!(
        "SELECT node_uuid, value FROM instances JOIN metadata ON object_type = 'instance' AND object_id = uuid \
         AND metadata.name = 'tags' WHERE namespace = ? AND node_uuid IS NOT NULL AND {ACTIVE}"
    );
    db.rows(&sql, params![namespace]).await?.iter().map(|row| Ok((row.parse(0)?, row.json(1)?))).collect()
}

/// Nodes that are deleted and still have instances.
pub async fn on_deleted_nodes(mut db: impl Read) -> Result<Vec<(NodeId, String)>, StoreError> {
    let sql = "SELECT uuid, name FROM nodes WHERE state = 'deleted' \
               AND uuid IN (SELECT node_uuid FROM instances WHERE node_uuid IS NOT NULL AND state <> 'deleted')";
    db.rows(sql, &[]).await?.iter().map(|row| Ok((row.parse(0)?, row.get(1)?))).collect()
}

/// Instances that wait for an artifact.
pub async fn awaiting(mut db: impl Read, artifact: ArtifactId) -> Result<Vec<InstanceId>, StoreError> {
    let sql = "SELECT uuid FROM instances WHERE state IN ('initial', 'preflight') AND spec LIKE ? LIMIT 100";
    let rows = db.rows(sql, params![format!("%\"awaited\":{{%{artifact}%")]).await?;
    rows.iter().map(|row| row.parse(0)).collect()
}

/// Instances that an operation should be bringing to another state, and that no operation is at.
pub async fn abandoned(db: impl Read) -> Result<Vec<InstanceRow>, StoreError> {
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
            json(&new.spec)?,
            new.node,
            new.claimed.cpus,
            new.claimed.memory_mb,
            new.claimed.disk_gb,
            PowerState::Initial,
            PowerState::On,
            time,
            time
        ],
    )
    .await?;
    let row = get(&mut *tx, new.id).await?;
    row.ok_or_else(|| StoreError::Broken("a new instance has no row".into()))
}

/// Keeps an instance in one of `states` until this transaction ends. Says whether it is in one of them.
pub async fn hold(tx: &mut Tx, id: InstanceId, states: &[InstanceState]) -> Result<bool, StoreError> {
    let sql = format!(
        "UPDATE instances SET version = version + 1 WHERE uuid = ? AND state IN ({})",
        marks(states.len())
    );
    let mut values: Vec<Value> = vec![id.into()];
    values.extend(states.iter().map(|state| Value::from(*state)));
    Ok(tx.execute(&sql, &values).await? == 1)
}

/// Keeps an instance that is not deleted from going until this transaction ends.
pub async fn hold_present(tx: &mut Tx, id: InstanceId) -> Result<bool, StoreError> {
    let sql = "UPDATE instances SET version = version + 1 WHERE uuid = ? AND state <> 'deleted'";
    Ok(tx.execute(sql, params![id]).await? == 1)
}

/// Moves an instance to another state if it is still in `from`.
pub async fn set_state(
    tx: &mut Tx,
    id: InstanceId,
    from: InstanceState,
    to: InstanceState,
    error: Option<&str>,
) -> Result<bool, StoreError> {
    if !from.may_become(to) {
        return Err(StoreError::Broken(format!("an instance cannot go from {from} to {to}")));
    }
    let met = tx
        .execute(
            "UPDATE instances SET state = ?, error_message = COALESCE(?, error_message), updated = ?, \
             version = version + 1 WHERE uuid = ? AND state = ?",
            params![to, error, now(), id, from],
        )
        .await?;
    Ok(met == 1)
}

/// Writes what was found out about what was asked for, and how the disks are laid out.
pub async fn set_spec(
    tx: &mut Tx,
    id: InstanceId,
    spec: &InstanceSpec,
    disks: &[DiskRecord],
) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE instances SET spec = ?, disks = ?, version = version + 1 WHERE uuid = ?",
        params![json(spec)?, json(&disks)?, id],
    )
    .await?;
    Ok(())
}

/// Writes what was seen of the power of an instance. Says whether that is new.
pub async fn set_power(tx: &mut Tx, id: InstanceId, power: PowerState) -> Result<bool, StoreError> {
    let sql =
        "UPDATE instances SET power_state = ?, version = version + 1 WHERE uuid = ? AND power_state <> ?";
    Ok(tx.execute(sql, params![power, id, power]).await? == 1)
}

/// Writes how an instance is wanted to be.
pub async fn set_wanted(tx: &mut Tx, id: InstanceId, power: PowerState) -> Result<(), StoreError> {
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

/// What is known of the agent of an instance.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentSeen {
    pub state: String,
    pub start_time: Option<f64>,
    pub system_boot_time: Option<f64>,
}

/// Writes what an agent said, if its instance is on.
pub async fn set_agent(tx: &mut Tx, id: InstanceId, seen: &AgentSeen) -> Result<bool, StoreError> {
    let sql = "UPDATE instances SET agent_state = ?, agent_start_time = ?, agent_system_boot_time = ? \
               WHERE uuid = ? AND state = 'created' AND power_state = 'on'";
    Ok(tx.execute(sql, params![&seen.state, seen.start_time, seen.system_boot_time, id]).await? == 1)
}

/// What the node promised is given back; what it has of the instance stays known.
pub async fn unclaim(tx: &mut Tx, id: InstanceId) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE instances SET claimed_cpus = 0, claimed_memory = 0, claimed_disk = 0, version = version + 1 \
         WHERE uuid = ?",
        params![id],
    )
    .await?;
    Ok(())
}

/// What nodes have promised to the instances of a namespace, in sum.
pub async fn claimed_of(mut db: impl Read, namespace: &str) -> Result<Claimed, StoreError> {
    let rows = db
        .rows(
            "SELECT CAST(COALESCE(SUM(claimed_cpus), 0) AS SIGNED), CAST(COALESCE(SUM(claimed_memory), 0) AS SIGNED), \
             CAST(COALESCE(SUM(claimed_disk), 0) AS SIGNED) FROM instances WHERE namespace = ?",
            params![namespace],
        )
        .await?;
    let row = rows.first().ok_or_else(|| StoreError::Broken("a sum has no row".into()))?;
    Ok(Claimed { cpus: row.get(0)?, memory_mb: row.get(1)?, disk_gb: row.get(2)? })
}

/// It is on no node any more.
pub async fn unplace(tx: &mut Tx, id: InstanceId) -> Result<(), StoreError> {
    tx.execute("UPDATE instances SET node_uuid = NULL, version = version + 1 WHERE uuid = ?", params![id])
        .await?;
    Ok(())
}

/// The ports of a node that are taken.
pub async fn ports(mut db: impl Read, node: NodeId) -> Result<Vec<u16>, StoreError> {
    let rows = db.rows("SELECT port FROM instance_ports WHERE node_uuid = ?", params![node]).await?;
    let port = |row: &Row| Ok(u16::try_from(row.get::<i64>(0)?).unwrap_or(0));
    rows.iter().map(port).collect()
}

/// Gives an instance its ports in place of those that it had. `false`: another one was faster.
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
        match tx.execute(sql, params![node, i64::from(port), id]).await {
            Err(StoreError::Duplicate(_)) => return Ok(false),
            inserted => inserted?,
        };
    }
    tx.execute(
        "UPDATE instances SET console_port = ?, vdi_port = ?, vdi_tls_port = ?, version = version + 1 WHERE uuid = ?",
        params![
            ports.map(|ports| i64::from(ports.console)),
            ports.map(|ports| i64::from(ports.vdi)),
            ports.and_then(|ports| ports.vdi_tls).map(i64::from),
            id
        ],
    )
    .await?;
    Ok(true)
}

pub async fn set_operation(
    tx: &mut Tx,
    id: InstanceId,
    operation: &OperationHandle,
) -> Result<(), StoreError> {
    let handle = json(operation)?;
    tx.execute("UPDATE instances SET last_operation = ? WHERE uuid = ?", params![handle, id]).await?;
    Ok(())
}

/// Deleted instances whose state changed before `before`.
pub async fn deleted_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<InstanceId>, StoreError> {
    let sql = "SELECT uuid FROM instances WHERE state = 'deleted' AND updated <= ? ORDER BY updated LIMIT ?";
    db.rows(sql, params![before, limit]).await?.iter().map(|row| row.parse(0)).collect()
}

/// Removes the row of a deleted instance.
pub async fn remove(tx: &mut Tx, id: InstanceId) -> Result<bool, StoreError> {
    let sql = "DELETE FROM instances WHERE uuid = ? AND state = 'deleted'";
    Ok(tx.execute(sql, params![id]).await? == 1)
}
