//! Rows of cluster operations: the queue. See docs/decisions/0004.

#[cfg(test)]
mod tests;

use muster_types::ids::{NodeId, OperationId};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::operation::{ErrorReport, OperationHandle, OperationState, OperationType, Progress};
use muster_types::time::now;
use serde_json::Value as JsonValue;

use super::{
    Read, Store, StoreError, Tx, Value, columns, params, placeholders, references, to_json, transaction,
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
    pub progress: Option<Progress>,
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
} }

pub async fn insert(tx: &mut Tx, new: &NewOperation) -> Result<OperationHandle, StoreError> {
    let id = OperationId::new();
    let time = now();
    tx.execute(
        "INSERT INTO operations (uuid, operation_type, name, state, tasks, step, arguments, depends_on, namespace, \
         target_type, target_id, attempts, holder, lease_expires, run_after, request_id, created, updated, version, \
         node_uuid) VALUES (?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, 0, '', 0.0, ?, ?, ?, ?, 1, ?)",
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
            time,
            new.request_id.as_ref(),
            time,
            time,
            new.node
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

/// Returns the executable operations that are due or whose lease has expired.
pub async fn due(
    mut store: &Store,
    executable: &ExecutableOperations,
    limit: i64,
) -> Result<Vec<OperationRow>, StoreError> {
    let time = now();
    let (condition, parameters) = executable.condition();
    let tail = format!(
        "FROM operations WHERE ((state = 'queued' AND run_after <= ?) \
         OR (state = 'executing' AND lease_expires <= ?)) AND {condition} ORDER BY run_after LIMIT ?"
    );
    let mut values = params![time, time].to_vec();
    values.extend(parameters);
    values.push(limit.into());
    store.select(&tail, &values).await
}

/// Returns when the next executable queued operation is due.
pub async fn next_due(
    mut store: &Store,
    executable: &ExecutableOperations,
) -> Result<Option<f64>, StoreError> {
    let (condition, values) = executable.condition();
    let sql = format!("SELECT MIN(run_after) FROM operations WHERE state = 'queued' AND {condition}");
    store.fetch_one(&sql, &values).await
}

/// Records the progress of a leased operation.
pub async fn set_progress(tx: &mut Tx, leased: &OperationRow, progress: &Progress) -> Result<(), StoreError> {
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
        let updated = tx.execute(
                "UPDATE operations SET state = ?, holder = ?, lease_expires = ?, attempts = attempts + 1, updated = ?, \
                 version = version + 1 WHERE uuid = ? AND version = ? AND (state = ? OR lease_expires <= ?)",
                params![
                    OperationState::Executing,
                    &owner,
                    now() + seconds,
                    now(),
                    row.id,
                    row.version,
                    OperationState::Queued,
                    now()
                ],
            ).await?;
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
        let updated = tx
            .execute(
                "UPDATE operations SET lease_expires = ? WHERE uuid = ? AND holder = ? AND state = ?",
                params![now() + seconds, leased.id, &leased.lease_owner, OperationState::Executing],
            )
            .await?;
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

/// Ends a lease: the operation is finished, or returns to the queue until `run_after`.
pub async fn release(
    tx: &mut Tx,
    leased: &OperationRow,
    to: OperationState,
    run_after: f64,
    report: Option<&ErrorReport>,
) -> Result<bool, StoreError> {
    if !OperationState::Executing.may_become(to) {
        return Err(StoreError::Internal(format!("an operation cannot go from executing to {to}")));
    }
    let report = report.map(to_json).transpose()?;
    let updated = tx.execute(
            "UPDATE operations SET state = ?, holder = '', lease_expires = 0.0, run_after = ?, error_report = ?, \
             updated = ?, version = version + 1 WHERE uuid = ? AND holder = ? AND state = ?",
            params![to, run_after, report, now(), leased.id, &leased.lease_owner, OperationState::Executing],
        ).await?;
    Ok(updated == 1)
}

/// Ends a lease without counting the attempt, because the operation has to wait for others.
pub async fn requeue(tx: &mut Tx, leased: &OperationRow, run_after: f64) -> Result<bool, StoreError> {
    let updated = tx
        .execute(
            "UPDATE operations SET state = ?, holder = '', lease_expires = 0.0, run_after = ?, \
             attempts = attempts - 1, version = version + 1 WHERE uuid = ? AND holder = ? AND state = ?",
            params![
                OperationState::Queued,
                run_after,
                leased.id,
                &leased.lease_owner,
                OperationState::Executing
            ],
        )
        .await?;
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

/// Postpones an operation that waits for others.
pub async fn postpone(tx: &mut Tx, row: &OperationRow, run_after: f64) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE operations SET run_after = ?, version = version + 1 WHERE uuid = ? AND version = ?",
        params![run_after, row.id, row.version],
    )
    .await?;
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
