//! Rows of agent operations: what is to be done inside guests, in order.

use std::collections::BTreeMap;

use muster_types::agent_operation::{AgentCommand, AgentOperationState, ExpiryReason};
use muster_types::ids::{AgentOperationId, InstanceId, NodeId};
use muster_types::instance::InstanceState;
use muster_types::object::ObjectType;
use muster_types::time::now;
use serde_json::{Map, Value as Json};

use super::{Read, Row, StoreError, Tx, Value, marks, params};

/// What came of the commands of an operation, by the number of the command.
pub type Results = BTreeMap<String, Map<String, Json>>;

#[derive(Debug, Clone, PartialEq)]
pub struct AgentOperationRow {
    pub id: AgentOperationId,
    pub instance: InstanceId,
    pub namespace: String,
    /// Its place among those of its instance.
    pub sequence: i64,
    pub state: AgentOperationState,
    pub commands: Vec<AgentCommand>,
    pub results: Results,
    pub attempts: i64,
    pub deadline: f64,
    pub progress_timeout: f64,
    pub last_progress: Option<f64>,
    pub expiry_reason: Option<ExpiryReason>,
    pub error_message: Option<String>,
    /// During which start of the guest it was sent.
    pub sent_boot: Option<String>,
    pub request_id: Option<String>,
    /// When the state last changed.
    pub updated: f64,
}

/// An operation to add.
#[derive(Debug, Clone)]
pub struct NewAgentOperation {
    pub id: AgentOperationId,
    pub instance: InstanceId,
    pub namespace: String,
    pub state: AgentOperationState,
    pub commands: Vec<AgentCommand>,
    pub deadline: f64,
    pub progress_timeout: f64,
    pub request_id: Option<String>,
}

/// How an operation ends.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct End<'a> {
    /// What came of its commands, if that is to be written.
    pub results: Option<&'a Results>,
    pub error: Option<&'a str>,
    pub expiry: Option<ExpiryReason>,
}

/// The unfinished operations of one instance, in order, and where it is.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Line {
    pub rows: Vec<AgentOperationRow>,
    pub node: Option<NodeId>,
    /// Whether anything may be done inside it.
    pub is_created: bool,
}

const COLUMNS: &str = "uuid, instance_uuid, namespace, sequence, state, commands, results, attempts, deadline, \
                       progress_timeout, last_progress, expiry_reason, error_message, sent_boot, request_id, updated";
const UNFINISHED: &str = "state IN ('preflight', 'queued', 'executing')";

impl AgentOperationRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self {
            id: row.parse(0)?,
            instance: row.parse(1)?,
            namespace: row.get(2)?,
            sequence: row.get(3)?,
            state: row.parse(4)?,
            commands: row.json(5)?,
            results: row.json(6)?,
            attempts: row.get(7)?,
            deadline: row.get(8)?,
            progress_timeout: row.get(9)?,
            last_progress: row.get(10)?,
            expiry_reason: row.parse_opt(11)?,
            error_message: row.get(12)?,
            sent_boot: row.get(13)?,
            request_id: row.get(14)?,
            updated: row.get(15)?,
        })
    }
}

fn json(value: &impl serde::Serialize) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|error| StoreError::Broken(error.to_string()))
}

/// The columns, for a statement in which the table is `o`.
fn own_columns() -> String {
    COLUMNS.split(", ").map(|name| format!("o.{name}")).collect::<Vec<_>>().join(", ")
}

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<AgentOperationRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM agent_operations WHERE {tail}");
    db.rows(&sql, values).await?.iter().map(AgentOperationRow::read).collect()
}

pub async fn get(db: impl Read, id: AgentOperationId) -> Result<Option<AgentOperationRow>, StoreError> {
    Ok(rows(db, "uuid = ?", params![id]).await?.pop())
}

/// The next operations of an instance after `after`, in order. Unless `all`, only unfinished ones.
pub async fn page(
    db: impl Read,
    instance: InstanceId,
    all: bool,
    after: Option<i64>,
    limit: i64,
) -> Result<Vec<AgentOperationRow>, StoreError> {
    let which = if all { String::new() } else { format!("AND {UNFINISHED} ") };
    let tail = format!("instance_uuid = ? AND sequence > ? {which}ORDER BY sequence LIMIT ?");
    rows(db, &tail, params![instance, after.unwrap_or(0), limit]).await
}

/// The unfinished operations of some instances, in order.
pub async fn unfinished(
    db: impl Read,
    instances: &[InstanceId],
) -> Result<Vec<AgentOperationRow>, StoreError> {
    if instances.is_empty() {
        return Ok(vec![]);
    }
    let values: Vec<Value> = instances.iter().map(|id| (*id).into()).collect();
    let tail = format!("instance_uuid IN ({}) AND {UNFINISHED} ORDER BY sequence", marks(instances.len()));
    rows(db, &tail, &values).await
}

/// What is unfinished at one instance, and where that is; one statement.
pub async fn line(mut db: impl Read, instance: InstanceId) -> Result<Line, StoreError> {
    let sql = format!(
        "SELECT {}, i.node_uuid, i.state FROM agent_operations o JOIN instances i ON i.uuid = o.instance_uuid \
         WHERE o.instance_uuid = ? AND o.{UNFINISHED} ORDER BY o.sequence",
        own_columns()
    );
    let found = db.rows(&sql, params![instance]).await?;
    let Some(first) = found.first() else { return Ok(Line::default()) };
    Ok(Line {
        node: first.parse_opt(16)?,
        is_created: first.parse::<InstanceState>(17)? == InstanceState::Created,
        rows: found.iter().map(AgentOperationRow::read).collect::<Result<_, _>>()?,
    })
}

/// The instances on some nodes at which something is unfinished.
pub async fn waiting(mut db: impl Read, nodes: &[NodeId]) -> Result<Vec<InstanceId>, StoreError> {
    let sql = format!(
        "SELECT DISTINCT o.instance_uuid FROM agent_operations o JOIN instances i ON i.uuid = o.instance_uuid \
         WHERE o.{UNFINISHED} AND i.node_uuid IN ({})",
        marks(nodes.len())
    );
    let values: Vec<Value> = nodes.iter().map(|id| (*id).into()).collect();
    db.rows(&sql, &values).await?.iter().map(|row| row.parse(0)).collect()
}

/// Unfinished operations whose time was over at `time`. Those without any budget have `most` seconds after each
/// change of their state.
pub async fn overdue(
    db: impl Read,
    time: f64,
    most: f64,
    limit: i64,
) -> Result<Vec<AgentOperationRow>, StoreError> {
    let tail = format!(
        "{UNFINISHED} AND ((deadline > 0 AND deadline <= ?) \
         OR (deadline = 0 AND progress_timeout = 0 AND updated <= ?)) ORDER BY updated LIMIT ?"
    );
    rows(db, &tail, params![time, time - most, limit]).await
}

/// Those that were given up while a command may have been under way, with the node of their instance: of all
/// instances on some nodes, or of one of them.
pub async fn given_up(
    mut db: impl Read,
    nodes: &[NodeId],
    instance: Option<InstanceId>,
) -> Result<Vec<(AgentOperationRow, NodeId)>, StoreError> {
    let sql = format!(
        "SELECT {}, i.node_uuid FROM agent_operations o JOIN instances i ON i.uuid = o.instance_uuid \
         WHERE o.state IN ('deleted', 'expired') AND o.sent_boot IS NOT NULL AND i.node_uuid IN ({}){} \
         ORDER BY o.updated LIMIT 1000",
        own_columns(),
        marks(nodes.len()),
        if instance.is_some() { " AND o.instance_uuid = ?" } else { "" }
    );
    let values: Vec<Value> = nodes.iter().map(|id| (*id).into()).chain(instance.map(Value::from)).collect();
    let found = db.rows(&sql, &values).await?;
    found.iter().map(|row| Ok((AgentOperationRow::read(row)?, row.parse(16)?))).collect()
}

/// What may wait at one instance.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    pub operations: i64,
    /// Of their commands, in bytes: all of them are part of the instance's record.
    pub bytes: i64,
}

/// Adds an operation behind all others of its instance, which the caller holds. Nothing if there is no room for it.
pub async fn insert(
    tx: &mut Tx,
    new: &NewAgentOperation,
    room: Room,
) -> Result<Option<AgentOperationRow>, StoreError> {
    let commands = json(&new.commands)?;
    let sql = format!(
        "SELECT COUNT(*), CAST(COALESCE(SUM(LENGTH(commands)), 0) AS SIGNED) FROM agent_operations \
         WHERE instance_uuid = ? AND {UNFINISHED}"
    );
    let (there, bytes): (i64, i64) = match tx.query_one(&sql, params![new.instance]).await? {
        Some(row) => (row.get(0)?, row.get(1)?),
        None => (0, 0),
    };
    let own = i64::try_from(commands.len()).unwrap_or(i64::MAX);
    if there >= room.operations || (there > 0 && bytes.saturating_add(own) > room.bytes) {
        return Ok(None);
    }
    let sql = "SELECT COALESCE(MAX(sequence), 0) FROM agent_operations WHERE instance_uuid = ?";
    let last: i64 = tx.query_one(sql, params![new.instance]).await?.map_or(Ok(0), |row| row.get(0))?;
    let time = now();
    tx.execute(
        "INSERT INTO agent_operations (uuid, instance_uuid, namespace, sequence, state, commands, results, attempts, \
         deadline, progress_timeout, request_id, created, updated, version) \
         VALUES (?, ?, ?, ?, ?, ?, '{}', 0, ?, ?, ?, ?, ?, 1)",
        params![
            new.id,
            new.instance,
            &new.namespace,
            last + 1,
            new.state,
            commands,
            new.deadline,
            new.progress_timeout,
            new.request_id.as_ref(),
            time,
            time
        ],
    )
    .await?;
    Ok(Some(AgentOperationRow {
        id: new.id,
        instance: new.instance,
        namespace: new.namespace.clone(),
        sequence: last + 1,
        state: new.state,
        commands: new.commands.clone(),
        results: Results::new(),
        attempts: 0,
        deadline: new.deadline,
        progress_timeout: new.progress_timeout,
        last_progress: None,
        expiry_reason: None,
        error_message: None,
        sent_boot: None,
        request_id: new.request_id.clone(),
        updated: time,
    }))
}

/// Says that an operation is begun, or begun again, in a guest that was started as `boot`. `false`: nobody wants it
/// any more.
pub async fn begin(
    tx: &mut Tx,
    id: AgentOperationId,
    from: AgentOperationState,
    boot: Option<&str>,
) -> Result<bool, StoreError> {
    let (to, time) = (AgentOperationState::Executing, now());
    // What is begun again has not changed its state: that it has no budget does not give it time without an end.
    let changed = if from == to { None } else { Some(time) };
    let sql = "UPDATE agent_operations SET state = ?, attempts = attempts + 1, last_progress = ?, sent_boot = ?, \
               updated = COALESCE(?, updated), version = version + 1 WHERE uuid = ? AND state = ?";
    Ok(tx.execute(sql, params![to, time, boot, changed, id, from]).await? == 1)
}

/// Moves an operation to another state if it is still in `from`.
pub async fn set_state(
    tx: &mut Tx,
    id: AgentOperationId,
    from: AgentOperationState,
    to: AgentOperationState,
    end: &End<'_>,
) -> Result<bool, StoreError> {
    if !from.may_become(to) {
        return Err(StoreError::Broken(format!("an agent operation cannot go from {from} to {to}")));
    }
    let results = end.results.map(json).transpose()?;
    // A command that is given up is still to be ended in the guest.
    let given_up = matches!(to, AgentOperationState::Expired | AgentOperationState::Deleted);
    let sent = if given_up { "" } else { "sent_boot = NULL, " };
    let sql = format!(
        "UPDATE agent_operations SET state = ?, results = COALESCE(?, results), {sent}\
         error_message = COALESCE(?, error_message), expiry_reason = COALESCE(?, expiry_reason), updated = ?, \
         version = version + 1 WHERE uuid = ? AND state = ?"
    );
    let expiry = end.expiry.map(ExpiryReason::as_str);
    Ok(tx.execute(&sql, params![to, results, end.error, expiry, now(), id, from]).await? == 1)
}

/// Writes down when bytes last moved.
pub async fn set_progress(tx: &mut Tx, id: AgentOperationId, time: f64) -> Result<(), StoreError> {
    let sql = "UPDATE agent_operations SET last_progress = ? WHERE uuid = ? AND state = 'executing'";
    tx.execute(sql, params![time, id]).await?;
    Ok(())
}

/// Writes down that nothing of an operation is under way in its guest any more.
pub async fn clear_sent(tx: &mut Tx, id: AgentOperationId) -> Result<(), StoreError> {
    let sql = "UPDATE agent_operations SET sent_boot = NULL WHERE uuid = ? AND state <> 'executing'";
    tx.execute(sql, params![id]).await?;
    Ok(())
}

/// Says of all operations of an instance that they are deleted, and forgets what they used.
pub async fn delete_all(tx: &mut Tx, instance: InstanceId) -> Result<(), StoreError> {
    let sql = "UPDATE agent_operations SET state = 'deleted', updated = ?, version = version + 1 \
               WHERE instance_uuid = ? AND state <> 'deleted'";
    tx.execute(sql, params![now(), instance]).await?;
    forget_uses(tx, instance, "").await
}

/// Says of all unfinished operations of an instance that they failed, and forgets what these used.
pub async fn fail_all(tx: &mut Tx, instance: InstanceId, why: &str) -> Result<(), StoreError> {
    forget_uses(tx, instance, &format!(" AND {UNFINISHED}")).await?;
    let sql = format!(
        "UPDATE agent_operations SET state = 'error', error_message = ?, sent_boot = NULL, updated = ?, \
         version = version + 1 WHERE instance_uuid = ? AND {UNFINISHED}"
    );
    tx.execute(&sql, params![why, now(), instance]).await?;
    Ok(())
}

/// Forgets what operations of an instance used.
async fn forget_uses(tx: &mut Tx, instance: InstanceId, which: &str) -> Result<(), StoreError> {
    let sql = format!(
        "DELETE FROM object_references WHERE source_type = ? AND source_id IN \
         (SELECT uuid FROM agent_operations WHERE instance_uuid = ?{which})"
    );
    tx.execute(&sql, params![ObjectType::AgentOperation, instance]).await?;
    Ok(())
}

/// Operations that ended before `before`.
pub async fn finished_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<AgentOperationId>, StoreError> {
    let sql = "SELECT uuid FROM agent_operations WHERE state IN ('complete', 'error', 'expired', 'deleted') \
               AND updated <= ? ORDER BY updated LIMIT ?";
    db.rows(sql, params![before, limit]).await?.iter().map(|row| row.parse(0)).collect()
}

/// Removes the row of an operation that ended.
pub async fn remove(tx: &mut Tx, id: AgentOperationId) -> Result<bool, StoreError> {
    let sql = format!("DELETE FROM agent_operations WHERE uuid = ? AND NOT ({UNFINISHED})");
    Ok(tx.execute(&sql, params![id]).await? == 1)
}
