//! Nodes: join, list, get, delete.

use std::fmt::Write as _;

use muster_types::event::{Event, EventType};
use muster_types::ids::NodeId;
use muster_types::node::{NodeIdentity, NodeRecord, NodeState};
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::instance;
use muster_store::instances::InstanceRow;
use muster_store::nodes::NodeRow;
use muster_store::{
    StoreError, blob_locations, instances, leases, metadata, node_networks, nodes, references, transaction,
};

/// The lease whose owner is the cluster maintainer.
pub const MAINTAINER_LEASE: &str = "maintainer";
/// The version of the record's format.
const VERSION: i64 = 1;

/// Registers a node of this daemon when it starts, under the id that it had before.
pub async fn join(app: &App, identity: &NodeIdentity) -> Result<()> {
    let rejoined = transaction!(app.store, |tx| {
        if let Some(rejoined) = nodes::get(&mut *tx, &NameOrId::Id(identity.id)).await? {
            if rejoined.state == NodeState::Deleted {
                return Err(Error::Conflict(format!(
                    "node {} was deleted from the cluster: remove nodes.json from its data directory, and NODE_UUID \
                     from its settings, to let it join as a new node",
                    identity.name
                ))
                .into());
            }
            nodes::set_identity(tx, identity).await.map_err(|error| name_taken(error, identity))?;
            return Ok(true);
        }
        // A deleted node keeps its record but not its name.
        if let Some(old) = nodes::get(&mut *tx, &NameOrId::Name(identity.name.clone())).await?
            && old.state == NodeState::Deleted
        {
            let name = format!("{} (deleted {})", old.identity.name, old.identity.id);
            nodes::set_identity(tx, &NodeIdentity { name, ..old.identity }).await?;
        }
        nodes::insert(tx, identity).await.map_err(|error| name_taken(error, identity))?;
        Ok(false)
    })?;
    if !rejoined {
        app.events.record(
            Event::audit(ObjectRef::new(ObjectType::Node, identity.id), "db record created")
                .with("name", identity.name.clone())
                .with("simulated", identity.simulated),
        );
    }
    Ok(())
}

fn name_taken(error: StoreError, identity: &NodeIdentity) -> muster_store::TxError {
    match error {
        StoreError::Duplicate(_) => Error::Conflict(format!(
            "a node named {} exists with another id: two daemons cannot share a name (set NODE_NAME; only one \
             daemon can run simulated nodes), and a reinstalled host needs NODE_UUID set to that id",
            identity.name
        ))
        .into(),
        other => other.into(),
    }
}

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
        app.events.record(
            Event::new(EventType::Mutate, ObjectRef::new(ObjectType::Node, id), format!("state is now {to}"))
                .with("from", from.as_str())
                .with("reason", reason),
        );
    }
    Ok(())
}

pub async fn list(app: &App) -> Result<Vec<NodeRecord>> {
    let maintainer = leases::owner_node(&app.store, MAINTAINER_LEASE).await?;
    let mut records = Vec::new();
    for row in nodes::list(&*app.store).await? {
        records.push(record(app, row, maintainer.as_deref()).await?);
    }
    Ok(records)
}

pub async fn get(app: &App, node: &str) -> Result<NodeRecord> {
    let row = find(app, node).await?;
    let maintainer = leases::owner_node(&app.store, MAINTAINER_LEASE).await?;
    record(app, row, maintainer.as_deref()).await
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

/// Deletes a node permanently: checking in does not revive it. A node that is alive or has instances is only deleted
/// with `force`; its VMs are stopped then, and their disks stay on the host.
pub async fn delete(app: &App, caller: &Caller, node: &str, force: bool) -> Result<NodeRecord> {
    let row = find(app, node).await?;
    if row.state != NodeState::Deleted {
        if !force {
            require_unused(app, &row).await?;
        }
        let object = ObjectRef::new(ObjectType::Node, row.identity.id);
        app.record(caller, Event::audit(object, "deletion request from REST API").with("force", force));
        move_to(app, row.identity.id, NodeState::Deleted, "deleted by request").await?;
        // The cluster no longer tracks what the node still has.
        transaction!(app.store, |tx| {
            node_networks::remove_of_node(tx, row.identity.id).await?;
            Ok(blob_locations::remove_of_node(tx, row.identity.id).await?)
        })?;
        instance::delete::release_deleted_node(app, row.identity.id, &row.identity.name).await?;
        app.networks.notify_changed();
    }
    get(app, &row.identity.id.to_string()).await
}

/// Refuses the deletion of a node that is alive or has instances, and lists what would be lost.
async fn require_unused(app: &App, row: &NodeRow) -> Result<()> {
    let is_alive = matches!(row.state, NodeState::Created | NodeState::Stopping);
    let instances = instances::of_node(&*app.store, row.identity.id).await?;
    if !is_alive && instances.is_empty() {
        return Ok(());
    }
    let mut text = format!("node {} ", row.identity.name);
    text.push_str(if is_alive { "is alive" } else { "is not alive" });
    if !instances.is_empty() {
        let name = |row: &InstanceRow| format!("{} ({}, namespace {})", row.name, row.id, row.namespace);
        let names: Vec<String> = instances.iter().map(name).collect();
        let _ = write!(text, " and has {} instances: {}", names.len(), names.join(", "));
    }
    text.push_str(
        ". Stop its daemon and delete its instances first. With force, its instances are lost and end in error; \
         their disks stay on the host",
    );
    Err(Error::Conflict(text))
}

async fn record(app: &App, row: NodeRow, maintainer: Option<&str>) -> Result<NodeRecord> {
    let identity = row.identity;
    let object = ObjectRef::new(ObjectType::Node, identity.id);
    let references = references::of_object(&*app.store, &object).await?;
    Ok(NodeRecord {
        metadata: metadata::get(&*app.store, object.object_type, &object.id).await?,
        uuid: identity.id,
        fqdn: identity.name.clone(),
        is_cluster_maintainer: maintainer == Some(identity.name.as_str()),
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
        limits: row.report.limits.into_iter().map(|(limit, reason)| (limit.to_string(), reason)).collect(),
        references_to: references.to,
        references_from: references.from,
    })
}
