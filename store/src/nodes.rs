//! Rows of nodes. See docs/decisions/0011.

#[cfg(test)]
pub(crate) mod tests;

use std::collections::HashMap;
use std::net::Ipv4Addr;

use muster_types::Error;
use muster_types::ids::NodeId;
use muster_types::node::{CordonReason, NodeCordon, NodeIdentity, NodeReport, NodeState};
use muster_types::object::{NameOrId, ObjectType};
use muster_types::time::now;

use super::attributes::{AttributeParts, ObjectAttributes};
use super::leases::Lease;
use super::membership::Member;
use super::time::NOW;
use super::{Read, Select as _, Store, StoreError, Tx, Union, Value, columns, params, placeholders, to_json};

#[derive(Debug, Clone)]
pub struct NodeRow {
    pub identity: NodeIdentity,
    pub state: NodeState,
    pub lastseen: f64,
    pub report: NodeReport,
    pub created: f64,
    pub version: i64,
    /// Incremented when the daemon of the node starts, and when the node is fenced.
    pub epoch: i64,
    /// When the daemon of the node started.
    pub started: f64,
    /// The lock file of the data directory of the node's daemon.
    pub lock_file: String,
    /// The seconds by which the clock of the node is ahead of that of the database.
    pub clock_skew: f64,
    /// Set while the node gets no new instances by request.
    pub cordon: Option<NodeCordon>,
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
    epoch,
    started,
    lock_file,
    clock_skew,
    cordon: json(cordon),
} }

impl NodeRow {
    /// Returns whether the node is being drained, or was: neither instances nor copies of blobs should be on it.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.cordon.as_ref().is_some_and(|cordon| cordon.reason == CordonReason::Drain)
    }

    /// Returns whether the node keeps the copies of blobs that it has: it is up and not drained.
    #[must_use]
    pub fn stores_copies(&self) -> bool {
        self.state == NodeState::Created && !self.is_drained()
    }
}

/// A node that may run the routers of networks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NetworkCandidate {
    pub id: NodeId,
    pub ip: Ipv4Addr,
    pub state: NodeState,
    /// Whether it does not reach its peers.
    pub is_degraded: bool,
    pub created: f64,
}

impl From<&NodeRow> for NetworkCandidate {
    fn from(row: &NodeRow) -> Self {
        Self {
            id: row.identity.id,
            ip: row.identity.ip,
            state: row.state,
            is_degraded: row.report.degraded.is_some(),
            created: row.created,
        }
    }
}

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

/// Returns the attributes of some nodes, by node, and the leases of the cluster.
pub async fn details(
    db: impl Read,
    ids: &[NodeId],
) -> Result<(HashMap<String, ObjectAttributes>, Vec<Lease>), StoreError> {
    if ids.is_empty() {
        return Ok((HashMap::new(), Vec::new()));
    }
    let values: Vec<Value> = ids.iter().map(|id| (*id).into()).collect();
    let mut union = Union::default();
    let attributes = AttributeParts::add(&mut union, ObjectType::Node, &placeholders(ids.len()), &values);
    let leases = union.add(Lease::COLUMNS, format!("FROM leases WHERE expires > {NOW}"), &[]);
    let mut rows = union.fetch(db).await?;
    Ok((attributes.take(&mut rows)?, rows.take(leases)?))
}

/// Returns the state of a node.
pub async fn state(mut db: impl Read, id: NodeId) -> Result<Option<NodeState>, StoreError> {
    db.fetch_optional("SELECT state FROM nodes WHERE uuid = ?", params![id]).await
}

/// Returns the nodes with the id or the mesh address of a node that have checked in during the last `seconds`, from a
/// daemon with another lock file. Simulated nodes have no mesh address.
pub async fn rivals(
    mut db: impl Read,
    identity: &NodeIdentity,
    lock_file: &str,
    seconds: f64,
) -> Result<Vec<NodeRow>, StoreError> {
    let sql = format!(
        "FROM nodes WHERE (uuid = ? OR (ip = ? AND simulated = 0 AND ? = 0)) AND lock_file <> ? \
         AND state IN ('created', 'stopping') AND lastseen >= {NOW} - ?"
    );
    let values = params![identity.id, identity.ip, identity.simulated, lock_file, seconds];
    db.select(&sql, values).await
}

/// Returns the nodes in some states whose last check-in is more than `seconds` ago, each with the time since then.
pub async fn silent(
    mut db: impl Read,
    states: &[NodeState],
    seconds: f64,
) -> Result<Vec<(NodeRow, f64)>, StoreError> {
    let sql = format!(
        "SELECT {}, {NOW} - lastseen FROM nodes WHERE state IN ({}) AND lastseen < {NOW} - ?",
        NodeRow::COLUMNS,
        placeholders(states.len())
    );
    let mut values: Vec<Value> = states.iter().map(|state| (*state).into()).collect();
    values.push(seconds.into());
    db.fetch(&sql, &values).await
}

/// Returns all nodes, each with the seconds since its last check-in.
pub async fn list_with_silence(mut db: impl Read) -> Result<Vec<(NodeRow, f64)>, StoreError> {
    let sql = format!("SELECT {}, {NOW} - lastseen FROM nodes ORDER BY name", NodeRow::COLUMNS);
    db.fetch(&sql, &[]).await
}

/// Adds a node; an existing name or id is a [`StoreError::Duplicate`].
pub async fn insert(tx: &mut Tx, identity: &NodeIdentity) -> Result<(), StoreError> {
    let sql = format!(
        "INSERT INTO nodes (uuid, name, ip, state, software, simulated, is_hypervisor, is_network_node, \
         is_database_node, lastseen, report, created, updated, version) \
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, {NOW}, ?, {NOW}, {NOW}, 1)"
    );
    tx.execute(
        &sql,
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
            "{\"resources\":{},\"process_metrics\":{}}"
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

/// Starts a new epoch of a node whose daemon starts, and returns it. `lock_file` identifies the daemon's data directory, and
/// `schema_version` is that of the daemon.
pub async fn begin_epoch(
    tx: &mut Tx,
    id: NodeId,
    lock_file: &str,
    schema_version: i64,
) -> Result<i64, StoreError> {
    // MariaDB assigns from left to right, so that the epoch comes after the columns that are computed from it.
    let sql = format!(
        "UPDATE nodes SET schema_version = ?, schema_epoch = epoch + 1, epoch = epoch + 1, started = {NOW}, lastseen = {NOW}, \
         lock_file = ?, version = version + 1 WHERE uuid = ?"
    );
    tx.execute(&sql, params![schema_version, lock_file, id]).await?;
    tx.fetch_one("SELECT epoch FROM nodes WHERE uuid = ?", params![id]).await
}

/// Fences a node: every later write of its daemon is rejected, and the daemon stops when it learns of it. The transaction
/// must be one of [`Store::unfenced`](crate::Store::unfenced) that calls
/// [`Membership::require_in`](crate::membership::Membership::require_in) first, because the node may be this daemon's.
pub async fn fence(tx: &mut Tx, id: NodeId) -> Result<(), StoreError> {
    tx.execute("UPDATE nodes SET epoch = epoch + 1, version = version + 1 WHERE uuid = ?", params![id])
        .await?;
    Ok(())
}

/// What the daemon of a node runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRelease {
    pub name: String,
    pub state: NodeState,
    pub release: String,
    /// The schema version of the daemon; `None` if its release does not record it.
    pub schema_version: Option<i64>,
}

columns! { NodeRelease {
    name,
    state,
    release: software,
    schema_version: recorded_version(schema_version, schema_epoch, epoch),
} }

/// Returns the schema version of a daemon, unless it was recorded by an earlier daemon of the node.
fn recorded_version(version: i64, recorded_epoch: i64, epoch: i64) -> Option<i64> {
    (version > 0 && recorded_epoch == epoch).then_some(version)
}

/// Returns what the daemons of all nodes run that are not deleted.
pub async fn releases(mut db: impl Read) -> Result<Vec<NodeRelease>, StoreError> {
    db.select("FROM nodes WHERE state <> 'deleted' ORDER BY name", &[]).await
}

/// Returns the names of the nodes whose daemon may be running with an older schema version.
pub async fn with_older_schema(mut db: impl Read, version: i64) -> Result<Vec<String>, StoreError> {
    let sql = "SELECT name FROM nodes WHERE state IN ('created', 'stopping', 'missing') \
               AND (schema_version < ? OR schema_epoch <> epoch) ORDER BY name";
    db.fetch(sql, params![version]).await
}

/// Fences the other nodes with an older schema version: a daemon that returns must not use the database.
pub(crate) async fn fence_older_schema(tx: &mut Tx, version: i64) -> Result<(), StoreError> {
    let sql = "UPDATE nodes SET epoch = epoch + 1, version = version + 1 WHERE state IN ('stopped', 'error') \
               AND (schema_version < ? OR schema_epoch <> epoch)";
    tx.execute(sql, params![version]).await?;
    Ok(())
}

/// The result of a check-in.
#[derive(Debug)]
pub struct CheckIn {
    /// The nodes that checked in, with their states.
    pub states: HashMap<NodeId, NodeState>,
    /// The nodes that have a newer epoch, so that this daemon must not run them.
    pub lost: Vec<Member>,
    /// The Unix time of the database.
    pub time: f64,
    /// When this host sent the query for the time, and when it received the result.
    pub queried: (f64, f64),
}

/// The maximum number of nodes in one statement of a check-in.
const CHECK_IN_BATCH: usize = 100;

/// Records that the nodes of this daemon are alive, except those that have another epoch.
pub async fn check_in(store: &Store, members: &[Member], clock_skew: f64) -> Result<CheckIn, Error> {
    let (mut states, mut lost) = (HashMap::new(), Vec::new());
    let (mut time, mut queried) = (0.0, (0.0, 0.0));
    for batch in members.chunks(CHECK_IN_BATCH) {
        let condition = vec!["(uuid = ? AND epoch = ?)"; batch.len()].join(" OR ");
        let of_batch = batch.iter().flat_map(|member| [Value::from(member.node), Value::from(member.epoch)]);
        let update = format!("UPDATE nodes SET lastseen = {NOW}, clock_skew = ? WHERE {condition}");
        let values: Vec<Value> = [Value::from(clock_skew)].into_iter().chain(of_batch).collect();
        store.execute(&update, &values).await?;
        let marks = placeholders(batch.len());
        let select =
            format!("SELECT uuid, epoch, state, CAST({NOW} AS DOUBLE) FROM nodes WHERE uuid IN ({marks})");
        let ids: Vec<Value> = batch.iter().map(|member| member.node.into()).collect();
        let before = now();
        let rows: Vec<(NodeId, i64, NodeState, f64)> = (&mut &*store).fetch(&select, &ids).await?;
        queried = (before, now());
        for (id, epoch, state, database_time) in rows {
            time = database_time;
            match batch.iter().find(|member| member.node == id) {
                Some(member) if epoch == member.epoch => {
                    states.insert(id, state);
                }
                Some(member) if epoch > member.epoch => lost.push(*member),
                // A server that has not applied the start of the epoch yet.
                _ => {}
            }
        }
    }
    Ok(CheckIn { states, lost, time, queried })
}

/// Records that the nodes of this daemon are alive that are up, except those that have another epoch. Returns their number.
pub async fn check_in_active(store: &Store, members: &[Member], clock_skew: f64) -> Result<usize, Error> {
    let mut count = 0;
    for batch in members.chunks(CHECK_IN_BATCH) {
        let condition = vec!["(uuid = ? AND epoch = ?)"; batch.len()].join(" OR ");
        let sql = format!(
            "UPDATE nodes SET lastseen = {NOW}, clock_skew = ? WHERE state = 'created' AND ({condition})"
        );
        let of_batch = batch.iter().flat_map(|member| [Value::from(member.node), Value::from(member.epoch)]);
        let values: Vec<Value> = [Value::from(clock_skew)].into_iter().chain(of_batch).collect();
        count += usize::try_from(store.execute(&sql, &values).await?).expect("a cluster has few nodes");
    }
    Ok(count)
}

/// Replaces the reports of nodes of this daemon, except those that have another epoch.
pub async fn report(store: &Store, reports: &[(Member, NodeReport)]) -> Result<(), Error> {
    for batch in reports.chunks(CHECK_IN_BATCH) {
        let cases = " WHEN ? THEN ?".repeat(batch.len());
        let condition = vec!["(uuid = ? AND epoch = ?)"; batch.len()].join(" OR ");
        let sql = format!(
            "UPDATE nodes SET report = CASE uuid{cases} ELSE report END, version = version + 1 WHERE {condition}"
        );
        let mut values = Vec::new();
        for (member, report) in batch {
            values.extend([Value::from(member.node), to_json(report)?.into()]);
        }
        values.extend(batch.iter().flat_map(|(member, _)| [member.node.into(), member.epoch.into()]));
        store.execute(&sql, &values).await?;
    }
    Ok(())
}

/// Replaces the report of a node.
pub async fn set_report(tx: &mut Tx, id: NodeId, report: &NodeReport) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE nodes SET report = ?, version = version + 1 WHERE uuid = ?",
        params![to_json(report)?, id],
    )
    .await?;
    Ok(())
}

/// Lets a node get new instances or not. Returns `false` if it was deleted. The transaction must have locked the node's ledger,
/// so that every later allocation notices it.
pub async fn set_cordon(tx: &mut Tx, id: NodeId, cordon: Option<&NodeCordon>) -> Result<bool, StoreError> {
    let sql = "UPDATE nodes SET cordon = ?, version = version + 1 WHERE uuid = ? AND state <> 'deleted'";
    let cordon = cordon.map(to_json).transpose()?;
    Ok(tx.execute(sql, params![cordon, id]).await? == 1)
}

/// Changes the state of a node if it has neither changed nor checked in since `row` was read.
pub async fn set_state(tx: &mut Tx, row: &NodeRow, to: NodeState) -> Result<bool, StoreError> {
    let updated = tx
        .execute(
            "UPDATE nodes SET state = ?, updated = ?, version = version + 1 \
             WHERE uuid = ? AND version = ? AND lastseen <= ?",
            params![to, now(), row.identity.id, row.version, row.lastseen],
        )
        .await?;
    Ok(updated == 1)
}

/// Locks a node until the transaction ends. Returns whether it has neither checked in nor started nor stopped since `row` was
/// read, in which it did not check in. It cannot become active before the transaction ends.
pub async fn lock_silent(tx: &mut Tx, row: &NodeRow) -> Result<bool, StoreError> {
    let states = match row.state {
        NodeState::Stopped => "'stopped'",
        NodeState::Missing | NodeState::Error => "'missing', 'error'",
        NodeState::Created | NodeState::Stopping | NodeState::Deleted => return Ok(false),
    };
    // Any other time of a check-in, because the clock of the database may have been set back.
    let sql = format!(
        "UPDATE nodes SET version = version + 1 WHERE uuid = ? AND state IN ({states}) AND epoch = ? AND lastseen = ?"
    );
    Ok(tx.execute(&sql, params![row.identity.id, row.epoch, row.lastseen]).await? == 1)
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
