//! Reads cluster operations and finds them for their metadata. Requires the namespace of the operation or `system`; trust is not enough.

use std::collections::HashSet;

use muster_types::ids::{ArtifactId, InstanceId, NetworkId, OperationId};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::operation::{OperationRecord, OperationType};
use muster_types::{Error, Result};
use serde_json::{Map, Value};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::{blob, node};
use muster_store::operations::{self, OperationRow};
use muster_store::{artifacts, instances, metadata, namespaces, networks};

/// The version of the record's format.
const VERSION: i64 = 1;
/// The maximum number of operations in a chain.
const MAX_CHAIN: usize = 256;

pub async fn get(app: &App, caller: &Caller, operation_type: &str, id: &str) -> Result<OperationRecord> {
    let row = find_readable(app, caller, operation_type, id).await?;
    Ok(records(app, vec![row]).await?.remove(0))
}

/// Returns an operation as the subject of metadata, which callers that may read it may change.
pub async fn subject(app: &App, caller: &Caller, operation_type: &str, id: &str) -> Result<ObjectRef> {
    let row = find_readable(app, caller, operation_type, id).await?;
    Ok(ObjectRef::new(ObjectType::ClusterOperation, row.id))
}

/// Returns an operation that the caller may read.
pub(crate) async fn find_readable(
    app: &App,
    caller: &Caller,
    operation_type: &str,
    id: &str,
) -> Result<OperationRow> {
    let operation_type: OperationType =
        operation_type.parse().map_err(|_| Error::not_found("operation type"))?;
    let row = find(app, id).await?;
    if row.operation_type != operation_type {
        return Err(Error::not_found("operation"));
    }
    if !may_read(caller, &row) {
        return Err(Error::Forbidden("cluster operation belongs to a foreign namespace".into()));
    }
    Ok(row)
}

/// Returns an operation and all its dependencies, newest first.
pub async fn chain(app: &App, caller: &Caller, id: &str) -> Result<Vec<OperationRecord>> {
    let first = find(app, id).await?;
    let mut seen: HashSet<OperationId> = HashSet::from([first.id]);
    let mut level = vec![first];
    let mut chain = Vec::new();
    while !level.is_empty() {
        let mut parents = Vec::new();
        for row in level {
            if !may_read(caller, &row) {
                let text = if row.namespace.is_none() {
                    "cluster operation chain includes a cluster-scoped target you cannot see"
                } else {
                    "cluster operation chain crosses into a namespace you cannot see"
                };
                return Err(Error::Forbidden(text.into()));
            }
            if chain.len() == MAX_CHAIN {
                return Err(Error::Invalid(format!(
                    "cluster operation chain exceeds maximum size of {MAX_CHAIN} nodes"
                )));
            }
            parents.extend(row.depends_on.iter().map(|parent| parent.op_uuid).filter(|id| seen.insert(*id)));
            chain.push(row);
        }
        level = operations::by_ids(&*app.store, &parents).await?;
    }
    chain.sort_by(|a, b| b.created.total_cmp(&a.created));
    records(app, chain).await
}

/// Returns the operations on an object, newest first.
pub async fn of_target(
    app: &App,
    caller: &Caller,
    object_type: Option<&str>,
    id: Option<&str>,
) -> Result<Vec<OperationRecord>> {
    let missing = |name: &str| Error::Invalid(format!("{name} parameter is required"));
    let object_type = object_type.ok_or_else(|| missing("target_object_type"))?;
    let id = id.ok_or_else(|| missing("target_uuid"))?;
    let object_type: ObjectType = object_type
        .parse()
        .map_err(|_| Error::Invalid(format!("invalid target_object_type: '{object_type}'")))?;
    let target = find_target(app, caller, object_type, id).await?;
    records(app, operations::of_target(&*app.store, &target).await?).await
}

/// Finds an object whose operations the caller may read.
async fn find_target(app: &App, caller: &Caller, object_type: ObjectType, id: &str) -> Result<ObjectRef> {
    let absent = || Error::not_found("target object");
    let not_found = |error| match error {
        Error::NotFound(_) => absent(),
        other => other,
    };
    let (target, may_read) = match object_type {
        ObjectType::Namespace => {
            namespaces::get(&*app.store, id).await?.ok_or_else(absent)?;
            (ObjectRef::namespace(id), caller.may_change(id))
        }
        ObjectType::Network => {
            let id: NetworkId = id.parse().map_err(|_| absent())?;
            let row = networks::get(&*app.store, id).await?.ok_or_else(absent)?;
            let own = row.namespace.map_or_else(|| caller.is_system(), |owner| caller.may_change(&owner));
            (ObjectRef::new(object_type, id), own)
        }
        ObjectType::Artifact => {
            let id: ArtifactId = id.parse().map_err(|_| absent())?;
            let row = artifacts::get(&*app.store, id).await?.ok_or_else(absent)?;
            (ObjectRef::new(object_type, id), caller.may_change(&row.namespace))
        }
        ObjectType::Instance => {
            let id: InstanceId = id.parse().map_err(|_| absent())?;
            let row = instances::get(&*app.store, id).await?.ok_or_else(absent)?;
            (ObjectRef::new(object_type, id), caller.may_change(&row.namespace))
        }
        // Knowing the id of a blob implies reading it, but not reading the operations of its users.
        ObjectType::Node | ObjectType::Blob if !caller.is_system() => return Err(foreign_target()),
        ObjectType::Node => {
            let row = node::find(app, id).await.map_err(not_found)?;
            (ObjectRef::new(object_type, row.identity.id), true)
        }
        ObjectType::Blob => {
            let row = blob::find(app, id).await.map_err(not_found)?;
            (ObjectRef::new(object_type, row.id), true)
        }
        ObjectType::ApiRequest
        | ObjectType::Upload
        | ObjectType::NamespaceKey
        | ObjectType::NamespaceClaim
        | ObjectType::ClusterOperation
        | ObjectType::AgentOperation
        | ObjectType::Issuer
        | ObjectType::Rule
        | ObjectType::Interface => {
            return Err(Error::Invalid(format!("unsupported target_object_type: '{object_type}'")));
        }
    };
    if may_read { Ok(target) } else { Err(foreign_target()) }
}

fn foreign_target() -> Error {
    Error::Forbidden("target object is in a namespace you cannot see".into())
}

/// Returns the operations on an object that the caller may access, newest first; without `all`, only unfinished ones.
pub async fn of_object(app: &App, target: &ObjectRef, all: bool) -> Result<Vec<OperationRecord>> {
    let rows = operations::of_target(&*app.store, target).await?;
    records(app, rows.into_iter().filter(|row| all || !row.state.is_final()).collect()).await
}

async fn find(app: &App, id: &str) -> Result<OperationRow> {
    let id: OperationId = id.parse().map_err(|_| Error::not_found("operation"))?;
    operations::get(&*app.store, id).await?.ok_or_else(|| Error::not_found("operation"))
}

fn may_read(caller: &Caller, row: &OperationRow) -> bool {
    caller.is_system() || row.namespace.as_ref() == Some(&caller.namespace)
}

/// Returns the records of rows, with their metadata.
async fn records(app: &App, rows: Vec<OperationRow>) -> Result<Vec<OperationRecord>> {
    let ids: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
    let mut metadata_of = metadata::of_objects(&*app.store, ObjectType::ClusterOperation, &ids).await?;
    let records = rows.into_iter().zip(ids);
    Ok(records.map(|(row, id)| record(row, metadata_of.remove(&id).unwrap_or_default())).collect())
}

/// Returns the record of a row, without its metadata.
pub(crate) fn record_without_metadata(row: OperationRow) -> OperationRecord {
    record(row, Map::new())
}

fn record(row: OperationRow, metadata: Map<String, Value>) -> OperationRecord {
    OperationRecord {
        uuid: row.id,
        object_type: ObjectType::ClusterOperation.to_string(),
        operation_type: row.operation_type,
        state: row.state,
        tasks: row.tasks,
        tasks_completed: row.step,
        depends_on: row.depends_on,
        error_report: row.error_report,
        namespace: row.namespace,
        target_object_type: row.target.object_type.to_string(),
        target_uuid: row.target.id,
        attempts: row.attempts,
        progress: row.progress,
        created: row.created,
        updated: row.updated,
        version: VERSION,
        metadata,
    }
}
