//! Deletes an instance: removes its VM and its interfaces, then releases everything else that it uses.

use std::sync::Arc;

use muster_types::ids::NetworkId;
use muster_types::instance::InstanceState;
use muster_types::node::NodeApi;
use muster_types::{Error, Result};

use super::step::{Implementation, Step, Undo};
use crate::app::App;
use crate::objects::instance::state::release;
use crate::objects::instance::{fence, local_node, target_id};
use crate::objects::interface;
use crate::objects::network::wait::wait_interface_removed;
use crate::queue::{DeleteInstance, Operation as _, SnapshotInstance};
use muster_store::instances::{self, InstanceRow};
use muster_store::operations::OperationRow;
use muster_store::{interfaces, operations, transaction};

const UNDO_NOT_NEEDED: Undo = Undo::NotNeeded("the next attempt continues to delete the instance");

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    DeleteInstance::KIND,
    &[
        Step {
            name: "instance_power_off",
            run: |app, row| Box::pin(remove_vm(app, row)),
            undo: UNDO_NOT_NEEDED,
        },
        Step {
            name: "instance_delete_interfaces",
            run: |app, row| Box::pin(delete_interfaces(app, row)),
            undo: UNDO_NOT_NEEDED,
        },
        Step { name: "instance_delete", run: |app, row| Box::pin(delete(app, row)), undo: UNDO_NOT_NEEDED },
    ],
);

/// Returns the instance, or `None` if it no longer needs to be deleted.
async fn pending_instance(app: &App, row: &OperationRow) -> Result<Option<InstanceRow>> {
    let instance = instances::get(&*app.store, target_id(&row.target.id)?).await?;
    Ok(instance.filter(|row| row.state == InstanceState::DeleteWait))
}

async fn remove_vm(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = pending_instance(app, row).await? else { return Ok(()) };
    if instance.node.is_none() {
        // It was never placed, or its node was lost.
        return remove_shared_disks(&instance, &app.nodes).await;
    }
    // A snapshot that was requested before the deletion still completes.
    if operations::is_pending(&*app.store, &row.target, SnapshotInstance::KIND.name).await? {
        return Err(Error::NotReady("a snapshot of the instance is in progress".into()));
    }
    let _lock = app.instance_locks.lock(instance.id).await;
    let node = local_node(app, instance.node)?;
    node.vms().remove(instance.id).await?;
    remove_shared_disks(&instance, std::slice::from_ref(node)).await
}

/// Removes the disks of an instance from its shared storage, if it has one. `nodes` are nodes of this daemon.
async fn remove_shared_disks(instance: &InstanceRow, nodes: &[Arc<dyn NodeApi>]) -> Result<()> {
    let Some(storage) = instance.spec.storage_uuid else { return Ok(()) };
    let mut outcome = Err(Error::NotReady("this daemon has no node".into()));
    for node in nodes {
        outcome = node.vms().remove_shared_disks(instance.id, storage).await;
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

/// Deletes the interfaces and waits until the node removed them, so that a deleted instance has nothing on its node.
async fn delete_interfaces(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = pending_instance(app, row).await? else { return Ok(()) };
    let interfaces = interfaces::of_instances(&*app.store, &[instance.id]).await?;
    if interfaces.is_empty() {
        return Ok(());
    }
    fence::require_expired(app, &instance)?;
    transaction!(app.store, |tx| {
        let unfenced = fence::unfenced_nodes_in(app, tx, &instance).await?;
        for interface in &interfaces {
            interface::delete_in(app, tx, interface.id, &unfenced).await?;
        }
        Ok(())
    })?;
    app.networks.notify_changed();
    let mut networks: Vec<NetworkId> = interfaces.iter().map(|interface| interface.network).collect();
    networks.sort_unstable();
    networks.dedup();
    if let Some(node) = instance.node {
        for network in networks {
            wait_interface_removed(app, network, node).await?;
        }
    }
    Ok(())
}

async fn delete(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = pending_instance(app, row).await? else { return Ok(()) };
    release(app, &instance, InstanceState::DeleteWait, InstanceState::Deleted).await
}
