//! Rows of cluster operations: the queue.

use muster_types::ids::{NodeId, OperationId};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::operation::{ErrorReport, OperationHandle, OperationState, OperationType, Progress};
use muster_types::time::now;
use serde_json::Value as Json;

use super::{Read, Row, Store, StoreError, Tx, Value, marks, params, references, transaction};

#[derive(Debug, Clone)]
pub struct OperationRow {
    pub id: OperationId,
    pub operation_type: OperationType,
    /// Which operation of that type; the engine finds the code by it.
    pub name: String,
    pub state: OperationState,
    pub tasks: Vec<String>,
    /// How many steps are done.
    pub step: i64,
    pub arguments: Json,
    pub depends_on: Vec<OperationHandle>,
    pub namespace: Option<String>,
    pub target: ObjectRef,
    pub attempts: i64,
    pub holder: String,
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
    pub arguments: Json,
    pub depends_on: Vec<OperationHandle>,
    pub namespace: Option<String>,
    pub target: ObjectRef,
    pub request_id: Option<String>,
    /// The node that alone can do it.
    pub node: Option<NodeId>,
}

const COLUMNS: &str = "uuid, operation_type, name, state, tasks, step, arguments, depends_on, namespace, target_type, \
                       target_id, attempts, holder, lease_expires, error_report, request_id, created, updated, version, progress";

impl OperationRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self {
            id: row.parse(0)?,
            operation_type: row.parse(1)?,
            name: row.get(2)?,
            state: row.parse(3)?,
            tasks: row.json(4)?,
            step: row.get(5)?,
            arguments: row.json(6)?,
            depends_on: row.json(7)?,
            namespace: row.get(8)?,
            target: ObjectRef { object_type: row.parse(9)?, id: row.get(10)? },
            attempts: row.get(11)?,
            holder: row.get(12)?,
            lease_expires: row.get(13)?,
            error_report: row.json_opt(14)?,
            request_id: row.get(15)?,
            created: row.get(16)?,
            updated: row.get(17)?,
            version: row.get(18)?,
            progress: row.json_opt(19)?,
        })
    }
}

fn json(value: &impl serde::Serialize) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|e| StoreError::Broken(e.to_string()))
}

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
            json(&new.tasks)?,
            json(&new.arguments)?,
            json(&new.depends_on)?,
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
    let sql = format!("SELECT {COLUMNS} FROM operations WHERE uuid = ?");
    db.rows(&sql, params![id]).await?.first().map(OperationRow::read).transpose()
}

/// The operations on an object, newest first.
pub async fn of_target(mut db: impl Read, target: &ObjectRef) -> Result<Vec<OperationRow>, StoreError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM operations WHERE target_type = ? AND target_id = ? ORDER BY created DESC, uuid"
    );
    let rows = db.rows(&sql, params![target.object_type, &target.id]).await?;
    rows.iter().map(OperationRow::read).collect()
}

/// Whether an unfinished operation of this name waits for or works on the object.
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

/// What a daemon can do: the operations that it knows, on the nodes that it speaks for.
#[derive(Debug, Clone)]
pub struct Able {
    pub names: Vec<&'static str>,
    pub nodes: Vec<NodeId>,
}

impl Able {
    /// The condition, and its values.
    fn condition(&self) -> (String, Vec<Value>) {
        let sql = format!(
            "name IN ({}) AND (node_uuid IS NULL OR node_uuid IN ({}))",
            marks(self.names.len()),
            marks(self.nodes.len())
        );
        let values = self.names.iter().map(|name| Value::from(*name));
        (sql, values.chain(self.nodes.iter().map(|node| Value::from(*node))).collect())
    }
}

/// Operations that a worker may take now: due ones, and those whose worker has gone silent. What only a newer daemon
/// or another node can do is left to it.
pub async fn due(store: &Store, able: &Able, limit: i64) -> Result<Vec<OperationRow>, StoreError> {
    let time = now();
    let (condition, able) = able.condition();
    let sql = format!(
        "SELECT {COLUMNS} FROM operations WHERE ((state = 'queued' AND run_after <= ?) \
         OR (state = 'executing' AND lease_expires <= ?)) AND {condition} ORDER BY run_after LIMIT ?"
    );
    let mut values = params![time, time].to_vec();
    values.extend(able);
    values.push(limit.into());
    store.query(&sql, &values).await?.iter().map(OperationRow::read).collect()
}

/// When the next queued operation that this daemon can do is due, if there is one.
pub async fn next_due(store: &Store, able: &Able) -> Result<Option<f64>, StoreError> {
    let (condition, values) = able.condition();
    let sql = format!("SELECT MIN(run_after) FROM operations WHERE state = 'queued' AND {condition}");
    store.query_one(&sql, &values).await?.map_or(Ok(None), |row| row.get(0))
}

/// Writes down how far an operation has come, while its claim holds.
pub async fn set_progress(
    tx: &mut Tx,
    claimed: &OperationRow,
    progress: &Progress,
) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE operations SET progress = ? WHERE uuid = ? AND holder = ?",
        params![json(progress)?, claimed.id, &claimed.holder],
    )
    .await?;
    Ok(())
}

/// Takes an operation. Every claim has a holder of its own, so that even one daemon cannot hold it twice.
/// `None`: somebody else was faster.
pub async fn claim(
    store: &Store,
    row: &OperationRow,
    lease: f64,
) -> muster_types::Result<Option<OperationRow>> {
    let holder = uuid::Uuid::new_v4().to_string();
    let claimed = transaction!(store, |tx| {
        let met = tx
            .execute(
                "UPDATE operations SET state = ?, holder = ?, lease_expires = ?, attempts = attempts + 1, updated = ?, \
                 version = version + 1 WHERE uuid = ? AND version = ? AND (state = ? OR lease_expires <= ?)",
                params![
                    OperationState::Executing,
                    &holder,
                    now() + lease,
                    now(),
                    row.id,
                    row.version,
                    OperationState::Queued,
                    now()
                ],
            )
            .await?;
        Ok(met == 1)
    })?;
    if !claimed {
        return Ok(None);
    }
    Ok(get(store, row.id).await?.filter(|row| row.holder == holder))
}

/// Keeps a claim alive. Says whether it is still ours.
pub async fn renew(store: &Store, claimed: &OperationRow, lease: f64) -> muster_types::Result<bool> {
    transaction!(store, |tx| {
        let met = tx
            .execute(
                "UPDATE operations SET lease_expires = ? WHERE uuid = ? AND holder = ? AND state = ?",
                params![now() + lease, claimed.id, &claimed.holder, OperationState::Executing],
            )
            .await?;
        Ok(met == 1)
    })
}

/// Records that the first `step` steps are done, if the claim still holds.
pub async fn set_step(tx: &mut Tx, claimed: &OperationRow, step: i64) -> Result<bool, StoreError> {
    let met = tx
        .execute(
            "UPDATE operations SET step = ?, updated = ?, version = version + 1 \
             WHERE uuid = ? AND holder = ? AND state = ?",
            params![step, now(), claimed.id, &claimed.holder, OperationState::Executing],
        )
        .await?;
    Ok(met == 1)
}

/// Ends a claim: the operation is over, or goes back to the queue until `run_after`.
pub async fn release(
    tx: &mut Tx,
    claimed: &OperationRow,
    to: OperationState,
    run_after: f64,
    report: Option<&ErrorReport>,
) -> Result<bool, StoreError> {
    if !OperationState::Executing.may_become(to) {
        return Err(StoreError::Broken(format!("an operation cannot go from executing to {to}")));
    }
    let report = report.map(json).transpose()?;
    let met = tx
        .execute(
            "UPDATE operations SET state = ?, holder = '', lease_expires = 0.0, run_after = ?, error_report = ?, \
             updated = ?, version = version + 1 WHERE uuid = ? AND holder = ? AND state = ?",
            params![to, run_after, report, now(), claimed.id, &claimed.holder, OperationState::Executing],
        )
        .await?;
    Ok(met == 1)
}

/// Gives a claim back as if it had not been taken: the operation has to wait for others.
pub async fn put_back(tx: &mut Tx, claimed: &OperationRow, run_after: f64) -> Result<bool, StoreError> {
    let met = tx
        .execute(
            "UPDATE operations SET state = ?, holder = '', lease_expires = 0.0, run_after = ?, \
             attempts = attempts - 1, version = version + 1 WHERE uuid = ? AND holder = ? AND state = ?",
            params![
                OperationState::Queued,
                run_after,
                claimed.id,
                &claimed.holder,
                OperationState::Executing
            ],
        )
        .await?;
    Ok(met == 1)
}

/// Ends an operation that nobody holds.
pub async fn abort(tx: &mut Tx, row: &OperationRow, report: &ErrorReport) -> Result<bool, StoreError> {
    let met = tx
        .execute(
            "UPDATE operations SET state = ?, error_report = ?, updated = ?, version = version + 1 \
             WHERE uuid = ? AND version = ?",
            params![OperationState::Abort, json(report)?, now(), row.id, row.version],
        )
        .await?;
    Ok(met == 1)
}

/// Puts off an operation that waits for others.
pub async fn put_off(tx: &mut Tx, row: &OperationRow, run_after: f64) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE operations SET run_after = ?, version = version + 1 WHERE uuid = ? AND version = ?",
        params![run_after, row.id, row.version],
    )
    .await?;
    Ok(())
}

/// Finished operations that ended before `before`.
pub async fn finished_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<OperationId>, StoreError> {
    let rows = db
        .rows(
            "SELECT uuid FROM operations WHERE state IN ('complete', 'error', 'abort') AND updated <= ? LIMIT ?",
            params![before, limit],
        )
        .await?;
    rows.iter().map(|row| row.parse(0)).collect()
}

/// Gives up what waits to be done to an object, but for operations of one name.
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

/// How many operations have not ended.
pub async fn unfinished(mut db: impl Read) -> Result<i64, StoreError> {
    let rows = db.rows("SELECT COUNT(*) FROM operations WHERE state IN ('queued', 'executing')", &[]).await?;
    rows.first().map_or(Ok(0), |row| row.get(0))
}
