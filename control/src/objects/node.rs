//! Nodes: list, get, delete. `node_join.rs` registers them.

use muster_types::event::{Event, EventType};
use muster_types::ids::{BlobId, NodeId};
use muster_types::node::{NodeRecord, NodeState};
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::time::format_utc;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::{blob, blob_copy, instance, network_handover};
use muster_store::attributes::ObjectAttributes;
use muster_store::instances::InstanceRow;
use muster_store::leases::{Lease, NETWORK_NODE_LEASE};
use muster_store::nodes::NodeRow;
use muster_store::{
    Read, StoreError, Tx, TxError, blob_locations, instance_replicas, instances, node_ledgers, node_networks,
    nodes, transaction,
};

/// The lease whose owner is the cluster maintainer.
pub const MAINTAINER_LEASE: &str = "maintainer";
/// The version of the record's format.
const VERSION: i64 = 1;
/// The name of the feature that a node lacks whose shared storage cannot be used.
const SHARED_STORAGE_LIMIT: &str = "shared-storage";
/// The maximum number of blobs that a message lists.
const MAX_LISTED_BLOBS: usize = 20;

/// Marks a node that checked in as up, unless it was deleted.
pub async fn revive(app: &App, id: NodeId) -> Result<()> {
    move_to(app, id, NodeState::Created, "checked in").await
}

/// Moves a node to a state if its current state allows it.
pub async fn move_to(app: &App, id: NodeId, to: NodeState, reason: &str) -> Result<()> {
    let from = transaction!(app.store, |tx| {
        let Some(row) = nodes::get(&mut *tx, &NameOrId::Id(id)).await? else { return Ok(None) };
        if !row.state.can_transition_to(to) {
            return Ok(None);
        }
        if !nodes::set_state(tx, &row, to).await? {
            return Err(StoreError::Conflict("the node changed".into()).into());
        }
        Ok(Some(row.state))
    })?;
    if let Some(from) = from {
        record_state_change(app, id, from, to, reason);
    }
    Ok(())
}

/// Records that the state of a node has changed.
pub(crate) fn record_state_change(app: &App, id: NodeId, from: NodeState, to: NodeState, reason: &str) {
    app.events.record(
        Event::new(EventType::Mutate, ObjectRef::new(ObjectType::Node, id), format!("state is now {to}"))
            .with("from", from.as_str())
            .with("reason", reason),
    );
}

pub async fn list(app: &App) -> Result<Vec<NodeRecord>> {
    let rows = nodes::list(&*app.store).await?;
    records(app, rows).await
}

pub async fn get(app: &App, node: &str) -> Result<NodeRecord> {
    let row = find(app, node).await?;
    record(app, row).await
}

/// Returns the row of a node, by name or id.
pub async fn find(app: &App, node: &str) -> Result<NodeRow> {
    let node = NameOrId::parse(node);
    nodes::get(&*app.store, &node).await?.ok_or_else(|| Error::not_found("node"))
}

/// Returns whether a node was deleted. Its daemon may still run; it must not remove any files then.
pub(crate) async fn is_deleted(app: &App, id: NodeId) -> Result<bool> {
    Ok(nodes::state(&*app.store, id).await? == Some(NodeState::Deleted))
}

/// Deletes a node permanently: its daemon is fenced and stops. A node that is alive must be drained; one that does not check
/// in is only deleted with `dead`, by which an operator declares that its host does not run.
pub async fn delete(app: &App, caller: &Caller, node: &str, dead: bool) -> Result<NodeRecord> {
    let row = find(app, node).await?;
    let id = row.identity.id;
    if row.state == NodeState::Created {
        require_deletable(&row, &instances::of_node(&*app.store, id).await?, dead)?;
        require_other_copies(&row, dead, &only_copies(&*app.store, id).await?)?;
        network_handover::leave(app, &row).await?;
    }
    let from = transaction!(app.store.unfenced(), |tx| {
        // Deleting a node of this daemon fences the daemon itself, so its membership is checked first.
        app.store.membership.require_in(tx).await?;
        delete_in(tx, id, dead).await
    })?;
    if let Some((from, lost_blobs)) = from {
        let object = ObjectRef::new(ObjectType::Node, id);
        app.record(caller, Event::audit(object, "deletion request from REST API").with("dead", dead));
        record_state_change(app, id, from, NodeState::Deleted, "deleted by request");
        for blob in lost_blobs {
            let event = Event::new(EventType::Health, blob::object(blob), "lost the last verified copy");
            let event = event.with("node", row.identity.name.clone());
            app.events.record(event.with("reason", "the node was deleted as dead"));
        }
    }
    // Repeated for a deleted node, in case that the last attempt failed. The maintainer repeats it, too.
    match instance::delete::release_deleted_node(app, &row).await {
        // This daemon has deleted its own last node.
        Ok(()) | Err(Error::StaleEpoch(_)) => {}
        Err(error) => return Err(error),
    }
    app.node_cache.clear();
    app.networks.notify_changed();
    get(app, &id.to_string()).await
}

/// Deletes a node as part of a transaction, and the rows of its networks and copies of blobs. Returns its last state and the
/// blobs of which no other node has a verified copy, or `None` if it was deleted before.
async fn delete_in(tx: &mut Tx, id: NodeId, dead: bool) -> Result<Option<(NodeState, Vec<BlobId>)>, TxError> {
    // Waits for allocations in progress, so that their instances are found. Later ones see that the node is deleted.
    node_ledgers::lock(tx, id).await?;
    let row = nodes::get(&mut *tx, &NameOrId::Id(id)).await?.ok_or_else(|| Error::not_found("node"))?;
    if row.state == NodeState::Deleted {
        return Ok(None);
    }
    require_deletable(&row, &instances::of_node(&mut *tx, id).await?, dead)?;
    // Other nodes neither remove their copies nor are deleted meanwhile.
    blob_locations::lock_blobs_of_node(tx, id).await?;
    let only_copies = only_copies(&mut *tx, id).await?;
    require_other_copies(&row, dead, &only_copies)?;
    // Stopped nodes have theirs, but nothing can read them now.
    let kept = nodes::list(&mut *tx).await?.into_iter();
    let kept = kept.filter(|node| node.identity.id != id && node.state != NodeState::Deleted);
    let kept: Vec<NodeId> = kept.map(|node| node.identity.id).collect();
    let lost = blob_locations::only_on(&mut *tx, id, &kept).await?;
    if !nodes::set_state(tx, &row, NodeState::Deleted).await? {
        return Err(StoreError::Conflict("the node changed".into()).into());
    }
    nodes::fence(tx, id).await?;
    node_networks::remove_of_node(tx, id).await?;
    blob_locations::remove_of_node(tx, id).await?;
    instance_replicas::remove_of_node(tx, id).await?;
    Ok(Some((row.state, lost)))
}

/// Returns the blobs of which a node has the only verified copy among the nodes that keep theirs.
async fn only_copies(mut db: impl Read, node: NodeId) -> Result<Vec<BlobId>, StoreError> {
    let others = blob_copy::storing_nodes(&mut db).await?;
    let others: Vec<NodeId> = others.into_iter().filter(|id| *id != node).collect();
    blob_locations::only_on(db, node, &others).await
}

/// Rejects the deletion of a node that could still copy its blobs, of which no other node has a verified copy.
fn require_other_copies(row: &NodeRow, dead: bool, only_copies: &[BlobId]) -> Result<()> {
    let (name, list) = (&row.identity.name, describe_blobs(only_copies));
    let hint = match row.state {
        _ if only_copies.is_empty() => return Ok(()),
        NodeState::Created | NodeState::Stopping => {
            format!("Copy them to other nodes with `muster node drain {name}`, and wait until it is complete")
        }
        NodeState::Stopped if !dead => format!(
            "Start its daemon, and copy them to other nodes with `muster node drain {name}`. To lose them, delete it with \
             `muster node delete {name} --dead` (`dead: true`)"
        ),
        NodeState::Stopped | NodeState::Missing | NodeState::Error | NodeState::Deleted => return Ok(()),
    };
    Err(Error::Conflict(format!("node {name} has the only verified copy of {list}. {hint}")))
}

/// Returns the number of blobs and the ids of the first ones, for a message.
pub(crate) fn describe_blobs(blobs: &[BlobId]) -> String {
    let mut ids: Vec<String> = blobs.iter().take(MAX_LISTED_BLOBS).map(ToString::to_string).collect();
    if blobs.len() > MAX_LISTED_BLOBS {
        ids.push("…".to_owned());
    }
    let noun = if blobs.len() == 1 { "blob" } else { "blobs" };
    format!("{} {noun} ({})", blobs.len(), ids.join(", "))
}

/// Rejects the deletion of a node whose VMs may run, and says what to do.
fn require_deletable(row: &NodeRow, instances: &[InstanceRow], dead: bool) -> Result<()> {
    let name = &row.identity.name;
    let is_allowed = match row.state {
        NodeState::Created | NodeState::Stopping => row.cordon.is_some() && instances.is_empty(),
        NodeState::Stopped => dead || instances.is_empty(),
        NodeState::Missing | NodeState::Error => dead,
        NodeState::Deleted => true,
    };
    if is_allowed {
        return Ok(());
    }
    let describe = |row: &InstanceRow| format!("{} ({}, namespace {})", row.name, row.id, row.namespace);
    let list: Vec<String> = instances.iter().map(describe).collect();
    let has = match list.len() {
        0 => String::new(),
        1 => format!(" and has 1 instance: {}", list.join(", ")),
        count => format!(" and has {count} instances: {}", list.join(", ")),
    };
    Err(Error::Conflict(match row.state {
        NodeState::Created | NodeState::Stopping => {
            format!(
                "node {name} is alive{has}. Drain it first with `muster node drain {name}`: its instances move to other nodes, \
                 and it gets no new ones"
            )
        }
        _ => format!(
            "node {name} has not checked in since {}{has}. Its VMs may still be running: start its daemon again. If \
             the host is dead, restart its instances on other nodes with `muster node evacuate {name} --dead`, and \
             then delete it with `muster node delete {name} --dead` (`dead: true`). Instances that remain end in error",
            format_utc(row.lastseen)
        ),
    }))
}

async fn record(app: &App, row: NodeRow) -> Result<NodeRecord> {
    let mut records = records(app, vec![row]).await?;
    records.pop().ok_or_else(|| Error::not_found("node"))
}

/// Returns the records of rows, with a constant number of queries.
async fn records(app: &App, rows: Vec<NodeRow>) -> Result<Vec<NodeRecord>> {
    let ids: Vec<NodeId> = rows.iter().map(|row| row.identity.id).collect();
    let (mut attributes_of, leases) = nodes::details(&*app.store, &ids).await?;
    let record = |row: NodeRow| {
        let attributes = attributes_of.remove(&row.identity.id.to_string()).unwrap_or_default();
        to_record(row, attributes, &leases)
    };
    Ok(rows.into_iter().map(record).collect())
}

fn to_record(row: NodeRow, attributes: ObjectAttributes, leases: &[Lease]) -> NodeRecord {
    let ObjectAttributes { metadata, references } = attributes;
    let identity = row.identity;
    let limits = row.report.limits.into_iter().map(|(limit, reason)| (limit.to_string(), reason));
    let storage_problem = row.report.shared_storage.as_ref().and_then(|storage| storage.problem.clone());
    let storage_problem = storage_problem.map(|problem| (SHARED_STORAGE_LIMIT.to_owned(), problem));
    let lease = |name: &str| leases.iter().find(|lease| lease.name == name);
    NodeRecord {
        metadata,
        uuid: identity.id,
        fqdn: identity.name.clone(),
        is_cluster_maintainer: lease(MAINTAINER_LEASE).is_some_and(|lease| lease.node == identity.name),
        is_active_network_node: lease(NETWORK_NODE_LEASE)
            .is_some_and(|lease| lease.owner == identity.id.to_string()),
        name: identity.name,
        ip: identity.ip.to_string(),
        state: row.state,
        version: VERSION,
        lastseen: row.lastseen,
        release: identity.release,
        is_hypervisor: identity.is_hypervisor,
        is_network_node: identity.is_network_node,
        is_database_node: identity.is_database_node,
        is_etcd_master: false,
        is_eventlog_node: false,
        simulated: identity.simulated,
        spice_server_cert_subject: row.report.display.map(|display| display.subject),
        clock_skew: row.clock_skew,
        epoch: row.epoch,
        started: row.started,
        limits: limits.chain(storage_problem).collect(),
        checks: row.report.checks,
        degraded: row.report.degraded,
        cordon: row.cordon,
        fencing_lease: row.report.instance_fencing_lease.or(row.report.fencing_lease),
        shared_storage: row.report.shared_storage,
        references_to: references.to,
        references_from: references.from,
    }
}
