//! Rows of agent operations: commands for guests, which are executed in order. See docs/decisions/0022.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use muster_types::agent_operation::{AgentCommand, AgentOperationState, ExpiryReason};
use muster_types::ids::{AgentOperationId, InstanceId, NodeId};
use muster_types::instance::InstanceState;
use muster_types::object::ObjectType;
use muster_types::time::now;
use serde_json::{Map, Value as JsonValue};

use super::{Read, Select, StoreError, Tx, Value, columns, params, placeholders, to_json};

/// The results of the commands of an operation, by the number of the command.
pub type CommandResults = BTreeMap<String, Map<String, JsonValue>>;

#[derive(Debug, Clone, PartialEq)]
pub struct AgentOperationRow {
    pub id: AgentOperationId,
    pub instance: InstanceId,
    pub namespace: String,
    /// The position among the operations of its instance.
    pub sequence: i64,
    pub state: AgentOperationState,
    pub commands: Vec<AgentCommand>,
    pub results: CommandResults,
    pub attempts: i64,
    pub deadline: f64,
    pub progress_timeout: f64,
    pub last_progress: Option<f64>,
    pub expiry_reason: Option<ExpiryReason>,
    pub error_message: Option<String>,
    /// The boot of the guest during which a command was sent; `None` if none is in flight.
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

/// The outcome of an operation; fields that are `None` stay unchanged.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AgentOperationOutcome<'a> {
    pub results: Option<&'a CommandResults>,
    pub error: Option<&'a str>,
    pub expiry: Option<ExpiryReason>,
}

/// The unfinished operations of one instance, in order, and the node of the instance.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct InstanceQueue {
    pub rows: Vec<AgentOperationRow>,
    pub node: Option<NodeId>,
    /// Whether the instance accepts operations.
    pub is_created: bool,
}

columns! { AgentOperationRow {
    id: uuid,
    instance: instance_uuid,
    namespace,
    sequence,
    state,
    commands: json(commands),
    results: json(results),
    attempts,
    deadline,
    progress_timeout,
    last_progress,
    expiry_reason,
    error_message,
    sent_boot,
    request_id,
    updated,
} }

pub(crate) const UNFINISHED: &str = "state IN ('preflight', 'queued', 'executing')";

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<AgentOperationRow>, StoreError> {
    db.select(&format!("FROM agent_operations WHERE {tail}"), values).await
}

pub async fn get(db: impl Read, id: AgentOperationId) -> Result<Option<AgentOperationRow>, StoreError> {
    Ok(rows(db, "uuid = ?", params![id]).await?.pop())
}

/// Returns the next operations of an instance after `after`, in order; with `all`, also finished ones.
pub async fn page(
    db: impl Read,
    instance: InstanceId,
    all: bool,
    after: Option<i64>,
    limit: i64,
) -> Result<Vec<AgentOperationRow>, StoreError> {
    let filter = if all { String::new() } else { format!("AND {UNFINISHED} ") };
    let tail = format!("instance_uuid = ? AND sequence > ? {filter}ORDER BY sequence LIMIT ?");
    rows(db, &tail, params![instance, after.unwrap_or(0), limit]).await
}

/// Returns the unfinished operations of some instances, in order.
pub async fn unfinished(
    db: impl Read,
    instances: &[InstanceId],
) -> Result<Vec<AgentOperationRow>, StoreError> {
    if instances.is_empty() {
        return Ok(vec![]);
    }
    let values: Vec<Value> = instances.iter().map(|id| (*id).into()).collect();
    let tail =
        format!("instance_uuid IN ({}) AND {UNFINISHED} ORDER BY sequence", placeholders(instances.len()));
    rows(db, &tail, &values).await
}

/// Returns the unfinished operations of one instance.
pub async fn queue_of(mut db: impl Read, instance: InstanceId) -> Result<InstanceQueue, StoreError> {
    let sql = format!(
        "SELECT {}, i.node_uuid, i.state FROM agent_operations o JOIN instances i ON i.uuid = o.instance_uuid \
         WHERE o.instance_uuid = ? AND o.{UNFINISHED} ORDER BY o.sequence",
        AgentOperationRow::columns_of("o")
    );
    let found: Vec<(AgentOperationRow, Option<NodeId>, InstanceState)> =
        db.fetch(&sql, params![instance]).await?;
    let Some((_, node, state)) = found.first() else { return Ok(InstanceQueue::default()) };
    Ok(InstanceQueue {
        node: *node,
        is_created: *state == InstanceState::Created,
        rows: found.into_iter().map(|(row, _, _)| row).collect(),
    })
}

/// Returns the instances on some nodes that have unfinished operations.
pub async fn instances_with_unfinished(
    mut db: impl Read,
    nodes: &[NodeId],
) -> Result<Vec<InstanceId>, StoreError> {
    let sql = format!(
        "SELECT DISTINCT o.instance_uuid FROM agent_operations o JOIN instances i ON i.uuid = o.instance_uuid \
         WHERE o.{UNFINISHED} AND i.node_uuid IN ({})",
        placeholders(nodes.len())
    );
    let values: Vec<Value> = nodes.iter().map(|id| (*id).into()).collect();
    db.fetch(&sql, &values).await
}

/// Returns the unfinished operations that have expired at `time`. Those without a timeout expire `max_age` seconds after
/// the last change of their state.
pub async fn overdue(
    db: impl Read,
    time: f64,
    max_age: f64,
    limit: i64,
) -> Result<Vec<AgentOperationRow>, StoreError> {
    let tail = format!(
        "{UNFINISHED} AND ((deadline > 0 AND deadline <= ?) \
         OR (deadline = 0 AND progress_timeout = 0 AND updated <= ?)) ORDER BY updated LIMIT ?"
    );
    rows(db, &tail, params![time, time - max_age, limit]).await
}

/// Returns the operations that were cancelled while a command may have been in flight, with the nodes of their
/// instances: of all instances on some nodes, or of one of them.
pub async fn cancelled_in_flight(
    mut db: impl Read,
    nodes: &[NodeId],
    instance: Option<InstanceId>,
) -> Result<Vec<(AgentOperationRow, NodeId)>, StoreError> {
    let sql = format!(
        "SELECT {}, i.node_uuid FROM agent_operations o JOIN instances i ON i.uuid = o.instance_uuid \
         WHERE o.state IN ('deleted', 'expired') AND o.sent_boot IS NOT NULL AND i.node_uuid IN ({}){} \
         ORDER BY o.updated LIMIT 1000",
        AgentOperationRow::columns_of("o"),
        placeholders(nodes.len()),
        if instance.is_some() { " AND o.instance_uuid = ?" } else { "" }
    );
    let values: Vec<Value> = nodes.iter().map(|id| (*id).into()).chain(instance.map(Value::from)).collect();
    db.fetch(&sql, &values).await
}

/// The limits of the unfinished operations of an instance.
#[derive(Debug, Clone, Copy)]
pub struct QueueLimits {
    pub operations: i64,
    /// The size of their commands, all of which are part of the instance's record.
    pub bytes: i64,
}

/// Appends an operation to the queue of its instance, which the caller has locked. Returns `None` if the queue is full.
pub async fn insert(
    tx: &mut Tx,
    new: &NewAgentOperation,
    limits: QueueLimits,
) -> Result<Option<AgentOperationRow>, StoreError> {
    let commands = to_json(&new.commands)?;
    let sql = format!(
        "SELECT COUNT(*), CAST(COALESCE(SUM(LENGTH(HEX(commands))), 0) AS SIGNED) FROM agent_operations \
         WHERE instance_uuid = ? AND {UNFINISHED}"
    );
    // Two digits for each byte: LENGTH alone counts characters on SQLite.
    let (operations, digits): (i64, i64) = tx.fetch_one(&sql, params![new.instance]).await?;
    let added = i64::try_from(commands.len()).expect("the length of a text fits in an i64");
    // Commands of any size are accepted if the queue is empty.
    if operations >= limits.operations
        || (operations > 0 && (digits / 2).saturating_add(added) > limits.bytes)
    {
        return Ok(None);
    }
    let sql = "SELECT COALESCE(MAX(sequence), 0) FROM agent_operations WHERE instance_uuid = ?";
    let last: i64 = tx.fetch_one(sql, params![new.instance]).await?;
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
        results: CommandResults::new(),
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

/// Records that an operation is started, or started again, during `boot` of the guest. Returns `false` if it is no
/// longer in `from`.
pub async fn begin(
    tx: &mut Tx,
    id: AgentOperationId,
    from: AgentOperationState,
    boot: Option<&str>,
) -> Result<bool, StoreError> {
    let (to, time) = (AgentOperationState::Executing, now());
    // Restarting an operation does not change its state and must not extend its time.
    let changed = if from == to { None } else { Some(time) };
    let sql = "UPDATE agent_operations SET state = ?, attempts = attempts + 1, last_progress = ?, sent_boot = ?, \
               updated = COALESCE(?, updated), version = version + 1 WHERE uuid = ? AND state = ?";
    Ok(tx.execute(sql, params![to, time, boot, changed, id, from]).await? == 1)
}

/// Changes the state of an operation if it is still `from`.
pub async fn set_state(
    tx: &mut Tx,
    id: AgentOperationId,
    from: AgentOperationState,
    to: AgentOperationState,
    outcome: &AgentOperationOutcome<'_>,
) -> Result<bool, StoreError> {
    if !from.can_transition_to(to) {
        return Err(StoreError::Internal(format!("an agent operation cannot go from {from} to {to}")));
    }
    let results = outcome.results.map(to_json).transpose()?;
    // The command of a cancelled operation still has to be stopped in the guest.
    let is_cancelled = matches!(to, AgentOperationState::Expired | AgentOperationState::Deleted);
    let sent = if is_cancelled { "" } else { "sent_boot = NULL, " };
    let sql = format!(
        "UPDATE agent_operations SET state = ?, results = COALESCE(?, results), {sent}\
         error_message = COALESCE(?, error_message), expiry_reason = COALESCE(?, expiry_reason), updated = ?, \
         version = version + 1 WHERE uuid = ? AND state = ?"
    );
    let params = params![to, results, outcome.error, outcome.expiry, now(), id, from];
    Ok(tx.execute(&sql, params).await? == 1)
}

/// Records when an operation last made progress.
pub async fn set_progress(tx: &mut Tx, id: AgentOperationId, time: f64) -> Result<(), StoreError> {
    let sql = "UPDATE agent_operations SET last_progress = ? WHERE uuid = ? AND state = 'executing'";
    tx.execute(sql, params![time, id]).await?;
    Ok(())
}

/// Records that no command of an operation is in flight.
pub async fn clear_sent(tx: &mut Tx, id: AgentOperationId) -> Result<(), StoreError> {
    let sql = "UPDATE agent_operations SET sent_boot = NULL WHERE uuid = ? AND state <> 'executing'";
    tx.execute(sql, params![id]).await?;
    Ok(())
}

/// Marks all operations of an instance as deleted and removes their references.
pub async fn delete_all(tx: &mut Tx, instance: InstanceId) -> Result<(), StoreError> {
    let sql = "UPDATE agent_operations SET state = 'deleted', updated = ?, version = version + 1 \
               WHERE instance_uuid = ? AND state <> 'deleted'";
    tx.execute(sql, params![now(), instance]).await?;
    remove_references(tx, instance, "").await
}

/// Marks all unfinished operations of an instance as failed and removes their references.
pub async fn fail_all(tx: &mut Tx, instance: InstanceId, reason: &str) -> Result<(), StoreError> {
    remove_references(tx, instance, &format!(" AND {UNFINISHED}")).await?;
    let sql = format!(
        "UPDATE agent_operations SET state = 'error', error_message = ?, sent_boot = NULL, updated = ?, \
         version = version + 1 WHERE instance_uuid = ? AND {UNFINISHED}"
    );
    tx.execute(&sql, params![reason, now(), instance]).await?;
    Ok(())
}

/// Removes the references of operations of an instance.
async fn remove_references(tx: &mut Tx, instance: InstanceId, filter: &str) -> Result<(), StoreError> {
    let sql = format!(
        "DELETE FROM object_references WHERE source_type = ? AND source_id IN \
         (SELECT uuid FROM agent_operations WHERE instance_uuid = ?{filter})"
    );
    tx.execute(&sql, params![ObjectType::AgentOperation, instance]).await?;
    Ok(())
}

/// Returns the operations that finished before `before`.
pub async fn finished_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<AgentOperationId>, StoreError> {
    let sql = "SELECT uuid FROM agent_operations WHERE state IN ('complete', 'error', 'expired', 'deleted') \
               AND updated <= ? ORDER BY updated LIMIT ?";
    db.fetch(sql, params![before, limit]).await
}

/// Removes the row of a finished operation.
pub async fn remove(tx: &mut Tx, id: AgentOperationId) -> Result<bool, StoreError> {
    let sql = format!("DELETE FROM agent_operations WHERE uuid = ? AND NOT ({UNFINISHED})");
    Ok(tx.execute(&sql, params![id]).await? == 1)
}

/// Locks an operation until the transaction ends, without changing it. Returns whether it exists and is not deleted.
pub async fn lock(tx: &mut Tx, id: AgentOperationId) -> Result<bool, StoreError> {
    let sql = "UPDATE agent_operations SET state = state WHERE uuid = ? AND state <> 'deleted'";
    Ok(tx.execute(sql, params![id]).await? == 1)
}
