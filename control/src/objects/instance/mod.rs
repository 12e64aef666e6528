//! Instances. This module finds and lists them; its submodules implement the operations on them.
//!
//! | what | own namespace | trusted by the owner | `system` | anyone else |
//! |---|---|---|---|---|
//! | list and read | yes | yes | yes | 404 |
//! | create | yes | yes | yes | 404 |
//! | everything else | yes | 404 | yes | 404 |

pub(crate) mod agent;
pub mod console;
pub mod console_ticket;
pub mod create;
pub mod delete;
pub mod evacuate;
pub mod fence;
pub mod image;
pub mod incoming;
pub(crate) mod lost;
pub mod migrate;
pub(crate) mod migration_batch;
pub(crate) mod outgoing;
pub(crate) mod place_again;
pub mod placement;
pub mod plan;
pub mod plug;
pub mod power;
mod reachability;
pub(crate) mod replica;
mod replica_record;
pub mod snapshot;
pub(crate) mod stale_vms;
pub(crate) mod state;
mod user_data;

use std::collections::HashMap;
use std::sync::Arc;

use muster_types::agent_operation::AgentOperationRecord;
use muster_types::ids::{InstanceId, NodeId};
use muster_types::instance::{InstanceRecord, InstanceState};
use muster_types::interface::InterfaceRecord;
use muster_types::node::NodeApi;
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::lookup::{SearchScope, only_match, search_order};
use crate::objects::node_location::NodeLocation;
use crate::objects::{agent_operation_record, interface};
use crate::queue::{NewOperation, Operation};
use muster_store::attributes::ObjectAttributes;
use muster_store::instance_replicas::ReplicaRow;
use muster_store::instances::{self, InstanceDetails, InstanceRow};
use muster_store::nodes::{self, NodeRow};
use muster_store::{Read, interfaces};

/// The version of the record's format.
const VERSION: i64 = 19;
/// The number of instances in a page of a list.
const PAGE_SIZE: i64 = 500;
/// The relationship between an instance and the blob that a disk was created from; the value is the disk number.
pub(crate) const DISK: &str = "disk";
/// The relationship between an instance and the blob that its NVRAM was created from.
pub(crate) const NVRAM_TEMPLATE: &str = "nvram_template";

/// Returns the instance as the subject of events.
pub fn object(id: InstanceId) -> ObjectRef {
    ObjectRef::new(ObjectType::Instance, id)
}

/// Parses the target of an operation on an instance.
pub(crate) fn target_id(text: &str) -> Result<InstanceId> {
    text.parse().map_err(|_| Error::Internal("the target of the operation is not an instance id".into()))
}

/// Returns an operation on an instance that its node runs.
pub(crate) fn operation_on<P: Operation>(
    row: &InstanceRow,
    parameters: P,
    request_id: Option<&str>,
) -> NewOperation<P> {
    NewOperation {
        request_id: request_id.map(str::to_owned),
        node: row.node,
        ..NewOperation::new(object(row.id), Some(row.namespace.clone()), parameters)
    }
}

/// Returns an instance by id or name that the caller may read. A name refers to the caller's namespace; `system` also finds
/// names of all others.
pub async fn find<D: Read + Copy>(
    db: D,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<InstanceRow> {
    let absent = || Error::not_found("instance");
    let namespace = namespace.filter(|name| !name.is_empty());
    let row = match NameOrId::parse(reference) {
        NameOrId::Id(id) => instances::get(db, id).await?,
        NameOrId::Name(name) => by_name(db, caller, &name, namespace).await?,
    };
    let row = row.ok_or_else(absent)?;
    if namespace.is_some_and(|wanted| row.namespace != wanted) || !caller.may_see(db, &row.namespace).await? {
        return Err(absent());
    }
    Ok(row)
}

async fn by_name<D: Read + Copy>(
    db: D,
    caller: &Caller,
    name: &str,
    namespace: Option<&str>,
) -> Result<Option<InstanceRow>> {
    for scope in search_order(caller, namespace) {
        let found = match scope {
            SearchScope::Namespace(namespace) => instances::by_name(db, name, Some(namespace)).await?,
            SearchScope::AllNamespaces => instances::by_name(db, name, None).await?,
            // Instances are not shared.
            SearchScope::Shared => vec![],
        };
        if let Some(row) = only_match(found, "instances", name)? {
            return Ok(Some(row));
        }
    }
    Ok(None)
}

/// Returns an instance by id or name that the caller may change.
pub async fn find_own(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<InstanceRow> {
    let row = find(&*app.store, caller, reference, namespace).await?;
    if caller.may_change(&row.namespace) { Ok(row) } else { Err(Error::not_found("instance")) }
}

/// Rejects an instance that is not created. Waiting may help.
pub fn require_created(row: &InstanceRow) -> Result<()> {
    if row.state == InstanceState::Created { Ok(()) } else { Err(not_ready(row)) }
}

pub(crate) fn not_ready(row: &InstanceRow) -> Error {
    Error::NotReady(format!("instance {} is not ready ({})", row.id, row.state))
}

/// Returns where an instance runs; `None` before it is placed. [`Error::Unavailable`] if its node does not check in.
pub async fn locate(app: &App, row: &InstanceRow) -> Result<Option<NodeLocation>> {
    let Some(node) = row.node else { return Ok(None) };
    let Some(node) = nodes::get(&*app.store, &NameOrId::Id(node)).await? else { return Ok(None) };
    reachability::require_reachable(&node)?;
    Ok(Some(NodeLocation::of(app, node)))
}

/// Reads an instance again whose lock the caller has acquired since it read `row`. Returns `None` if the instance was placed
/// again meanwhile, or removed from its node: the caller must not touch a VM then. See docs/decisions/0052.
pub(crate) async fn read_again(app: &App, row: &InstanceRow) -> Result<Option<InstanceRow>> {
    let current = instances::get(&*app.store, row.id).await?;
    Ok(current.filter(|current| current.node == row.node && current.generation == row.generation))
}

/// Returns the error for an instance that is not where the caller has found it.
pub(crate) fn placed_again(id: InstanceId) -> Error {
    Error::Conflict(format!("instance {id} was placed again or removed from its node; retry"))
}

/// Returns the node of this daemon that an instance runs on.
pub(crate) fn local_node(app: &App, node: Option<NodeId>) -> Result<&Arc<dyn NodeApi>> {
    let found = app.nodes.iter().find(|own| Some(own.identity().id) == node);
    found.ok_or_else(|| Error::Internal("the instance runs on a node of another daemon".into()))
}

pub async fn get(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<InstanceRecord> {
    let snapshot = app.store.snapshot()?;
    let row = find(&snapshot, caller, reference, namespace).await?;
    to_record(app, &snapshot, row).await
}

/// Returns the next page of the instances that the caller may read, by id.
pub async fn list_page(
    app: &App,
    caller: &Caller,
    all: bool,
    after: Option<InstanceId>,
) -> Result<(Vec<InstanceRecord>, Option<InstanceId>)> {
    let seen_by = (!caller.is_system()).then_some(caller.namespace.as_str());
    let rows = instances::page(&*app.store, seen_by, all, after, PAGE_SIZE).await?;
    let full = i64::try_from(rows.len()).is_ok_and(|count| count == PAGE_SIZE);
    let next = rows.last().filter(|_| full).map(|row| row.id);
    Ok((records(app, &*app.store, rows).await?, next))
}

/// Returns the record of one instance.
pub(crate) async fn to_record<D: Read + Copy>(app: &App, db: D, row: InstanceRow) -> Result<InstanceRecord> {
    let mut records = records(app, db, vec![row]).await?;
    records.pop().ok_or_else(|| Error::not_found("instance"))
}

/// Returns the record of an existing instance.
pub(crate) async fn record(app: &App, id: InstanceId) -> Result<InstanceRecord> {
    let row = instances::get(&*app.store, id).await?.ok_or_else(|| Error::not_found("instance"))?;
    to_record(app, &*app.store, row).await
}

/// Returns the records of rows, with a constant number of queries.
async fn records<D: Read + Copy>(app: &App, db: D, rows: Vec<InstanceRow>) -> Result<Vec<InstanceRecord>> {
    let ids: Vec<InstanceId> = rows.iter().map(|row| row.id).collect();
    let details = instances::details(db, &ids).await?;
    Ok(records_from(app, rows, details))
}

/// Returns the records of rows, whose details were read.
pub(crate) fn records_from(
    app: &App,
    rows: Vec<InstanceRow>,
    mut details: InstanceDetails,
) -> Vec<InstanceRecord> {
    let mut interfaces_of: HashMap<InstanceId, Vec<InterfaceRecord>> = HashMap::new();
    for (row, metadata) in details.interfaces {
        interfaces_of.entry(row.instance).or_default().push(interface::to_record(row, metadata));
    }
    let mut replicas_of: HashMap<InstanceId, Vec<(ReplicaRow, Option<String>)>> = HashMap::new();
    for (row, node) in details.replicas {
        replicas_of.entry(row.instance).or_default().push((row, node));
    }
    let mut queues: HashMap<InstanceId, Vec<AgentOperationRecord>> = HashMap::new();
    for (row, attributes) in details.agent_operations {
        let queue = queues.entry(row.instance).or_default();
        queue.push(agent_operation_record::to_record(row, attributes));
    }
    rows.into_iter()
        .map(|row| {
            let id = row.id.to_string();
            let ObjectAttributes { metadata, references } =
                details.attributes.remove(&id).unwrap_or_default();
            // Closed ports are reserved, but of no use to clients.
            let ports = row.ports.filter(|_| app.settings.console_ports);
            InstanceRecord {
                uuid: row.id,
                name: row.name,
                namespace: row.namespace,
                state: row.state,
                error_message: row.error_message,
                power_state: row.power_state,
                power_state_since: row.power_state_since,
                generation: row.generation,
                cpus: row.spec.cpus,
                memory: row.spec.memory,
                disk_spec: row.spec.disks,
                disks: row.disks,
                video: row.spec.video,
                ssh_key: row.spec.ssh_key,
                user_data: row.spec.user_data,
                uefi: row.spec.uefi,
                secure_boot: row.spec.secure_boot,
                configdrive: row.spec.configdrive,
                nvram_template: row.spec.nvram_template.map(|id| id.to_string()),
                machine_type: row.spec.machine_type,
                side_channels: row.spec.side_channels,
                agent_state: row.agent_state,
                agent_start_time: row.agent_start_time,
                agent_system_boot_time: row.agent_system_boot_time,
                console_port: ports.map(|ports| ports.console),
                vdi_port: ports.map(|ports| ports.vdi),
                vdi_tls_port: ports.and_then(|ports| ports.vdi_tls),
                node: details.node_names.remove(&row.id),
                requested_placement: row.spec.requested_placement,
                disposable: row.spec.disposable,
                storage: row.spec.storage,
                storage_uuid: row.spec.storage_uuid,
                replicas: row.spec.replicas,
                replica: replicas_of.remove(&row.id).and_then(|rows| replica_record::to_record(app, rows)),
                restart: row.spec.restart,
                fencing: row.spec.fencing,
                interfaces: interfaces_of.remove(&row.id).unwrap_or_default(),
                last_cluster_operation: row.last_operation,
                agent_operations_queue: queues.remove(&row.id).unwrap_or_default(),
                metadata,
                version: VERSION,
                references_to: references.to,
                references_from: references.from,
            }
        })
        .collect()
}

/// Returns the interfaces of an instance in order.
pub async fn list_interfaces(app: &App, caller: &Caller, reference: &str) -> Result<Vec<InterfaceRecord>> {
    let row = find(&*app.store, caller, reference, None).await?;
    interface::records(&*app.store, interfaces::of_instances(&*app.store, &[row.id]).await?).await
}

/// Returns the row of the node that an instance runs on.
pub(crate) async fn node_row(app: &App, row: &InstanceRow) -> Result<NodeRow> {
    let id = row.node.ok_or_else(not_placed)?;
    nodes::get(&*app.store, &NameOrId::Id(id)).await?.ok_or_else(not_placed)
}

/// The error for an instance without a node.
#[must_use]
pub fn not_placed() -> Error {
    Error::NotFound("placement node not found".into())
}
