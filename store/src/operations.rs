//! Rows of cluster operations: the queue. See docs/decisions/0004.

#[cfg(test)]
mod tests;

use muster_types::ids::{NodeId, OperationId};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::operation::{
    ErrorReport, OperationHandle, OperationProgress, OperationState, OperationType,
};
use muster_types::time::now;
use serde_json::Value as JsonValue;

use super::{
    Read, Store, StoreError, Tx, Value, columns, params, placeholders, references, time::NOW, to_json,
    transaction,
};

#[derive(Debug, Clone)]
pub struct OperationRow {
    pub id: OperationId,
    pub operation_type: OperationType,
    /// Selects the handler among the operations of the type.
    pub name: String,
    pub state: OperationState,
    pub tasks: Vec<String>,
    /// The number of completed steps.
    pub step: i64,
    pub arguments: JsonValue,
    pub depends_on: Vec<OperationHandle>,
    pub namespace: Option<String>,
    pub target: ObjectRef,
    pub attempts: i64,
    /// The id of the current lease; empty without one.
    pub lease_owner: String,
    pub lease_expires: f64,
    pub error_report: Option<ErrorReport>,
    pub request_id: Option<String>,
    pub created: f64,
    pub updated: f64,
    pub version: i64,
    pub progress: Option<OperationProgress>,
    /// The only node that can execute it; `None` for any.
    pub node: Option<NodeId>,
    /// The span of the operation, if it belongs to a trace.
    pub trace: Option<String>,
}

/// An operation to queue.
#[derive(Debug, Clone)]
pub struct NewOperation {
    pub operation_type: OperationType,
    pub name: &'static str,
    pub tasks: Vec<&'static str>,
    pub arguments: JsonValue,
    pub depends_on: Vec<OperationHandle>,
    pub namespace: Option<String>,
    pub target: ObjectRef,
    pub request_id: Option<String>,
    /// The only node that can execute it; `None` for any.
    pub node: Option<NodeId>,
    /// The span of the operation, if it belongs to a trace.
    pub trace: Option<String>,
}

columns! { OperationRow {
    id: uuid,
    operation_type,
    name,
    state,
    tasks: json(tasks),
    step,
    arguments: json(arguments),
    depends_on: json(depends_on),
    namespace,
    target: ObjectRef { object_type: target_type, id: target_id, },
    attempts,
    lease_owner: holder,
    lease_expires,
    error_report: json(error_report),
    request_id,
    created,
    updated,
    version,
    progress: json(progress),
    node: node_uuid,
    trace,
} }

pub async fn insert(tx: &mut Tx, new: &NewOperation) -> Result<OperationHandle, StoreError> {
    let id = OperationId::new();
    let time = now();
    let sql = format!(
        "INSERT INTO operations (uuid, operation_type, name, state, tasks, step, arguments, depends_on, namespace, \
         target_type, target_id, attempts, holder, lease_expires, run_after, request_id, created, updated, version, \
         node_uuid, trace) VALUES (?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, 0, '', 0.0, {NOW}, ?, ?, ?, 1, ?, ?)"
    );
    tx.execute(
        &sql,
        params![
            id,
            new.operation_type,
            new.name,
            OperationState::Queued,
            to_json(&new.tasks)?,
            to_json(&new.arguments)?,
            to_json(&new.depends_on)?,
            new.namespace.as_ref(),
            new.target.object_type,
            &new.target.id,
            new.request_id.as_ref(),
            time,
            time,
            new.node,
            new.trace.as_ref()
        ],
    )
    .await?;
    references::insert(
        tx,
        &ObjectRef::new(ObjectType::ClusterOperation, id),
        "operation_target",
        None,
        &new.target,
    )
    .await?;
    Ok(OperationHandle { op_type: new.operation_type, op_uuid: id })
}

pub async fn get(mut db: impl Read, id: OperationId) -> Result<Option<OperationRow>, StoreError> {
    db.select_optional("FROM operations WHERE uuid = ?", params![id]).await
}

/// Returns some operations by id.
pub async fn by_ids(mut db: impl Read, ids: &[OperationId]) -> Result<Vec<OperationRow>, StoreError> {
    if ids.is_empty() {
        return Ok(vec![]);
    }
    let values: Vec<Value> = ids.iter().map(|id| (*id).into()).collect();
    db.select(&format!("FROM operations WHERE uuid IN ({})", placeholders(ids.len())), &values).await
}

/// Returns the operations on an object, newest first.
pub async fn of_target(mut db: impl Read, target: &ObjectRef) -> Result<Vec<OperationRow>, StoreError> {
    let tail = "FROM operations WHERE target_type = ? AND target_id = ? ORDER BY created DESC, uuid";
    db.select(tail, params![target.object_type, &target.id]).await
}

/// Returns whether there is an unfinished operation with this name on the object.
pub async fn is_pending(mut db: impl Read, target: &ObjectRef, name: &str) -> Result<bool, StoreError> {
    let rows = db
        .rows(
            "SELECT 1 FROM operations WHERE target_type = ? AND target_id = ? AND name = ? \
             AND state IN ('queued', 'executing')",
            params![target.object_type, &target.id, name],
        )
        .await?;
    Ok(!rows.is_empty())
}

/// The operations that a daemon can execute: those with a handler, on the nodes that it controls.
#[derive(Debug, Clone)]
pub struct ExecutableOperations {
    pub names: Vec<&'static str>,
    pub nodes: Vec<NodeId>,
}

impl ExecutableOperations {
    /// Returns the SQL condition and its parameters.
    fn condition(&self) -> (String, Vec<Value>) {
        let sql = format!(
            "name IN ({}) AND (node_uuid IS NULL OR node_uuid IN ({}))",
            placeholders(self.names.len()),
            placeholders(self.nodes.len())
        );
        let values = self.names.iter().map(|name| Value::from(*name));
        (sql, values.chain(self.nodes.iter().map(|node| Value::from(*node))).collect())
    }
}

/// Returns the namespaces with executable operations that are queued or whose lease has expired, each with the seconds
/// until the first is due.
pub async fn waiting(
    mut store: &Store,
    executable: &ExecutableOperations,
) -> Result<Vec<(Option<String>, f64)>, StoreError> {
    let (condition, parameters) = executable.condition();
    let sql = format!(
        "SELECT namespace, MIN(run_after) - {NOW} FROM operations WHERE state = 'queued' AND {condition} \
         GROUP BY namespace UNION ALL SELECT namespace, MIN(lease_expires) - {NOW} FROM operations \
         WHERE state = 'executing' AND lease_expires <= {NOW} AND {condition} GROUP BY namespace"
    );
    let mut values = parameters.clone();
    values.extend(parameters);
    let mut waiting: Vec<(Option<String>, f64)> = Vec::new();
    for (namespace, due) in store.fetch::<(Option<String>, f64)>(&sql, &values).await? {
        match waiting.iter_mut().find(|(other, _)| *other == namespace) {
            Some((_, first)) => *first = first.min(due),
            None => waiting.push((namespace, due)),
        }
    }
    Ok(waiting)
}

/// Returns the executable operations of a namespace that are due or whose lease has expired.
pub async fn due(
    mut store: &Store,
    executable: &ExecutableOperations,
    namespace: Option<&str>,
    limit: i64,
) -> Result<Vec<OperationRow>, StoreError> {
    let (condition, parameters) = executable.condition();
    let owner = if namespace.is_some() { "namespace = ?" } else { "namespace IS NULL" };
    let tail = format!(
        "FROM operations WHERE {owner} AND ((state = 'queued' AND run_after <= {NOW}) \
         OR (state = 'executing' AND lease_expires <= {NOW})) AND {condition} ORDER BY run_after LIMIT ?"
    );
    let mut values: Vec<Value> = namespace.map(Value::from).into_iter().collect();
    values.extend(parameters);
    values.push(limit.into());
    store.select(&tail, &values).await
}

/// Records the progress of a leased operation.
pub async fn set_progress(
    tx: &mut Tx,
    leased: &OperationRow,
    progress: &OperationProgress,
) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE operations SET progress = ? WHERE uuid = ? AND holder = ?",
        params![to_json(progress)?, leased.id, &leased.lease_owner],
    )
    .await?;
    Ok(())
}

/// Leases an operation, under a new owner id each time so that even the same daemon cannot lease it twice. Returns
/// `None` if another worker leased it first.
pub async fn lease(
    store: &Store,
    row: &OperationRow,
    seconds: f64,
) -> muster_types::Result<Option<OperationRow>> {
    let owner = uuid::Uuid::new_v4().to_string();
    let is_leased = transaction!(store, |tx| {
        let sql = format!(
            "UPDATE operations SET state = ?, holder = ?, lease_expires = {NOW} + ?, attempts = attempts + 1, \
             updated = ?, version = version + 1 WHERE uuid = ? AND version = ? AND (state = ? OR lease_expires <= {NOW})"
        );
        let (executing, queued) = (OperationState::Executing, OperationState::Queued);
        let values = params![executing, &owner, seconds, now(), row.id, row.version, queued];
        let updated = tx.execute(&sql, values).await?;
        Ok(updated == 1)
    })?;
    if !is_leased {
        return Ok(None);
    }
    Ok(get(store, row.id).await?.filter(|row| row.lease_owner == owner))
}

/// Renews the lease of an operation. Returns `false` if it was lost.
pub async fn renew(store: &Store, leased: &OperationRow, seconds: f64) -> muster_types::Result<bool> {
    transaction!(store, |tx| {
        let sql = format!(
            "UPDATE operations SET lease_expires = {NOW} + ? WHERE uuid = ? AND holder = ? AND state = ?"
        );
        let values = params![seconds, leased.id, &leased.lease_owner, OperationState::Executing];
        let updated = tx.execute(&sql, values).await?;
        Ok(updated == 1)
    })
}

/// Records that the first `step` steps are complete. Returns `false` if the lease was lost.
pub async fn set_step(tx: &mut Tx, leased: &OperationRow, step: i64) -> Result<bool, StoreError> {
    let updated = tx
        .execute(
            "UPDATE operations SET step = ?, updated = ?, version = version + 1 \
             WHERE uuid = ? AND holder = ? AND state = ?",
            params![step, now(), leased.id, &leased.lease_owner, OperationState::Executing],
        )
        .await?;
    Ok(updated == 1)
}

/// Locks a leased operation until the transaction ends. Returns `false` if the lease was lost.
pub async fn lock_leased(tx: &mut Tx, leased: &OperationRow) -> Result<bool, StoreError> {
    let sql = "UPDATE operations SET state = state WHERE uuid = ? AND holder = ? AND state = ?";
    let values = params![leased.id, &leased.lease_owner, OperationState::Executing];
    Ok(tx.execute(sql, values).await? == 1)
}

/// Ends a lease: the operation is finished, or returns to the queue for `delay` seconds.
pub async fn release(
    tx: &mut Tx,
    leased: &OperationRow,
    to: OperationState,
    delay: f64,
    report: Option<&ErrorReport>,
) -> Result<bool, StoreError> {
    if !OperationState::Executing.can_transition_to(to) {
        return Err(StoreError::Internal(format!("an operation cannot go from executing to {to}")));
    }
    let report = report.map(to_json).transpose()?;
    let sql = format!(
        "UPDATE operations SET state = ?, holder = '', lease_expires = 0.0, run_after = {NOW} + ?, error_report = ?, \
         updated = ?, version = version + 1 WHERE uuid = ? AND holder = ? AND state = ?"
    );
    let executing = OperationState::Executing;
    let values = params![to, delay, report, now(), leased.id, &leased.lease_owner, executing];
    let updated = tx.execute(&sql, values).await?;
    Ok(updated == 1)
}

/// Ends a lease for `delay` seconds without counting the attempt, because the operation has to wait for others.
pub async fn requeue(tx: &mut Tx, leased: &OperationRow, delay: f64) -> Result<bool, StoreError> {
    let sql = format!(
        "UPDATE operations SET state = ?, holder = '', lease_expires = 0.0, run_after = {NOW} + ?, \
         attempts = attempts - 1, version = version + 1 WHERE uuid = ? AND holder = ? AND state = ?"
    );
    let (queued, executing) = (OperationState::Queued, OperationState::Executing);
    let updated = tx.execute(&sql, params![queued, delay, leased.id, &leased.lease_owner, executing]).await?;
    Ok(updated == 1)
}

/// Aborts an operation that is not leased.
pub async fn abort(tx: &mut Tx, row: &OperationRow, report: &ErrorReport) -> Result<bool, StoreError> {
    let updated = tx
        .execute(
            "UPDATE operations SET state = ?, error_report = ?, updated = ?, version = version + 1 \
             WHERE uuid = ? AND version = ?",
            params![OperationState::Abort, to_json(report)?, now(), row.id, row.version],
        )
        .await?;
    Ok(updated == 1)
}

/// Postpones an operation that waits for others by `delay` seconds.
pub async fn postpone(tx: &mut Tx, row: &OperationRow, delay: f64) -> Result<(), StoreError> {
    let sql = format!(
        "UPDATE operations SET run_after = {NOW} + ?, version = version + 1 WHERE uuid = ? AND version = ?"
    );
    tx.execute(&sql, params![delay, row.id, row.version]).await?;
    Ok(())
}

/// Returns the operations that finished before `before`.
pub async fn finished_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<OperationId>, StoreError> {
    db.fetch(
        "SELECT uuid FROM operations WHERE state IN ('complete', 'error', 'abort') AND updated <= ? LIMIT ?",
        params![before, limit],
    )
    .await
}

/// Aborts the queued operations on an object, except those with one name.
pub async fn abort_queued(tx: &mut Tx, target: &ObjectRef, except: &str) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE operations SET state = ?, updated = ?, version = version + 1 \
         WHERE target_type = ? AND target_id = ? AND state = ? AND name <> ?",
        params![OperationState::Abort, now(), target.object_type, &target.id, OperationState::Queued, except],
    )
    .await?;
    Ok(())
}

/// Aborts all unfinished operations on an object, except one. A worker that runs one notices that it has lost the lease.
pub async fn abort_unfinished(
    tx: &mut Tx,
    target: &ObjectRef,
    except: Option<OperationId>,
) -> Result<(), StoreError> {
    let except = except.map_or_else(String::new, |id| id.to_string());
    tx.execute(
        "UPDATE operations SET state = ?, updated = ?, version = version + 1 \
         WHERE target_type = ? AND target_id = ? AND state IN ('queued', 'executing') AND uuid <> ?",
        params![OperationState::Abort, now(), target.object_type, &target.id, except],
    )
    .await?;
    Ok(())
}

/// Aborts all unfinished operations that only one node can run. A worker that runs one notices that it has lost the lease.
pub async fn abort_of_node(tx: &mut Tx, node: NodeId) -> Result<(), StoreError> {
    let sql = "UPDATE operations SET state = ?, updated = ?, version = version + 1 \
               WHERE node_uuid = ? AND state IN ('queued', 'executing')";
    tx.execute(sql, params![OperationState::Abort, now(), node]).await?;
    Ok(())
}

/// Aborts the unfinished operations on an object with one name that only one node can run.
pub async fn abort_named(
    tx: &mut Tx,
    target: &ObjectRef,
    name: &str,
    node: NodeId,
) -> Result<(), StoreError> {
    let sql = "UPDATE operations SET state = ?, updated = ?, version = version + 1 WHERE target_type = ? \
               AND target_id = ? AND name = ? AND node_uuid = ? AND state IN ('queued', 'executing')";
    let values = params![OperationState::Abort, now(), target.object_type, &target.id, name, node];
    tx.execute(sql, values).await?;
    Ok(())
}

/// Lets another node run the queued operations on an object that only one node can run.
pub async fn set_node(tx: &mut Tx, target: &ObjectRef, node: NodeId) -> Result<(), StoreError> {
    let sql = "UPDATE operations SET node_uuid = ?, version = version + 1 \
               WHERE target_type = ? AND target_id = ? AND state = ? AND node_uuid IS NOT NULL";
    tx.execute(sql, params![node, target.object_type, &target.id, OperationState::Queued]).await?;
    Ok(())
}

/// Removes a finished operation and its references. Returns whether there was one.
pub async fn remove(tx: &mut Tx, id: OperationId) -> Result<bool, StoreError> {
    let removed = tx
        .execute(
            "DELETE FROM operations WHERE uuid = ? AND state IN ('complete', 'error', 'abort')",
            params![id],
        )
        .await?;
    if removed == 1 {
        references::remove_from(tx, &ObjectRef::new(ObjectType::ClusterOperation, id)).await?;
    }
    Ok(removed == 1)
}

/// Returns the number of unfinished operations.
pub async fn unfinished(mut db: impl Read) -> Result<i64, StoreError> {
    db.fetch_one("SELECT COUNT(*) FROM operations WHERE state IN ('queued', 'executing')", &[]).await
}

/// Locks an operation until the transaction ends, without changing it. Returns whether it exists.
pub async fn lock(tx: &mut Tx, id: OperationId) -> Result<bool, StoreError> {
    let sql = "UPDATE operations SET state = state WHERE uuid = ?";
    Ok(tx.execute(sql, params![id]).await? == 1)
}
