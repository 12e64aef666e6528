//! Stops VMs that must not run on a node: their instance was placed on another node, or again under a later generation,
//! or the node was deleted. Their files are moved to `lost+found`, because a disk is only removed by deleting its
//! instance. Records what the watchdog has done. See docs/decisions/0052.

use std::collections::HashMap;
use std::sync::Arc;

use muster_store::instances::{self, InstanceRow};
use muster_store::transaction;
use muster_types::event::{Event, EventType};
use muster_types::ids::{InstanceId, NodeId};
use muster_types::instance::InstanceState;
use muster_types::node::{NodeApi, NodeState};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::format_utc;
use muster_types::vm::{FoundVm, VmPower};
use muster_types::{Error, Result};

use super::fence::policy;
use super::{incoming, object};
use crate::app::App;
use crate::objects::address::release_unfenced;

/// The event of a VM that the watchdog has stopped.
const FENCED: &str = "watchdog stopped the VM";

/// The VMs and the instances of a node, without stale VMs.
#[derive(Debug, Default)]
pub(crate) struct NodeVms {
    /// Whether the node checks in.
    pub(crate) is_active: bool,
    /// The VMs of the node, with the rows of their instances.
    pub(crate) found: Vec<(FoundVm, Option<InstanceRow>)>,
    /// The instances without a VM.
    pub(crate) without_vm: Vec<InstanceRow>,
}

/// What to do with a VM of a node.
#[derive(Debug, PartialEq)]
enum VmAction {
    Keep,
    /// Its instance is deleted, and the reconciler removes its files.
    Stop,
    /// It was prepared to receive a migration, which may have ended.
    SettleIncoming,
    /// The reason why it must not run here.
    MoveToLostFound(String),
}

fn required_action(row: Option<&InstanceRow>, node: NodeId, vm: &FoundVm) -> VmAction {
    // It may belong to another database.
    let Some(row) = row else { return VmAction::Keep };
    if vm.incoming {
        // It has never run here, and its disks were never used.
        return VmAction::SettleIncoming;
    }
    if row.node == Some(node) {
        return match vm.generation {
            Some(generation) if generation < row.generation => VmAction::MoveToLostFound(format!(
                "the VM has the generation {generation}, and the instance was placed again under the generation {}",
                row.generation
            )),
            _ => VmAction::Keep,
        };
    }
    match row.state {
        InstanceState::Deleted | InstanceState::DeleteWait => VmAction::Stop,
        _ => VmAction::MoveToLostFound(match row.node {
            Some(_) => "the instance was placed on another node".to_owned(),
            None => row
                .error_message
                .clone()
                .unwrap_or_else(|| "the instance was removed from this node".to_owned()),
        }),
    }
}

/// Stops every stale VM of a node that was not active, or was deleted, and releases the addresses that were reserved for them.
pub(crate) async fn remove_stale_after_return(app: &App, node: &Arc<dyn NodeApi>) -> Result<()> {
    let vms = remove_stale(app, node).await?;
    // A VM without a row may be one of these.
    if vms.found.iter().all(|(_, row)| row.is_some()) {
        release_unfenced(app, node.identity().id).await?;
    }
    Ok(())
}

/// Records that the VM of an earlier placement does not run any longer.
async fn clear_unfenced(app: &App, id: InstanceId, node: NodeId) -> Result<()> {
    transaction!(app.store.unfenced(), |tx| {
        if !instances::lock_undeleted(tx, id).await? {
            return Ok(());
        }
        let row = instances::get(&mut *tx, id).await?;
        let Some(mut row) = row.filter(|row| row.spec.unfenced_vms().any(|vm| vm.node == node)) else {
            return Ok(());
        };
        let others = row.spec.unfenced_vms().filter(|vm| vm.node != node).collect();
        row.spec.set_unfenced_vms(others);
        Ok(instances::set_spec(tx, id, &row.spec, &row.disks).await?)
    })
}

/// Stops every stale VM of a node and moves its files to `lost+found`. Returns the VMs that remain. Call it before the node
/// serves or changes networks.
pub(crate) async fn remove_stale(app: &App, node: &Arc<dyn NodeApi>) -> Result<NodeVms> {
    // VMs first: a row is older than its VM.
    let found = node.vms().list().await?;
    let (id, name) = (node.identity().id, &node.identity().name);
    for vm in &found {
        record_fenced(app, node, vm).await?;
    }
    let (rows, state) = instances::of_node_with_state(&*app.store, id).await?;
    if state == Some(NodeState::Deleted) {
        for vm in &found {
            let _lock = app.instance_locks.lock(vm.id).await;
            let row = instances::get(&*app.store, vm.id).await?;
            let reason = format!("node {name} was deleted from the cluster");
            move_to_lost_found(app, node, vm.id, row.is_some(), &reason).await?;
        }
        return Ok(NodeVms::default());
    }
    let mut rows: HashMap<InstanceId, InstanceRow> = rows.into_iter().map(|row| (row.id, row)).collect();
    let is_active = matches!(state, Some(NodeState::Created | NodeState::Stopping));
    let mut vms = NodeVms { is_active, ..NodeVms::default() };
    for vm in found {
        let row = match rows.remove(&vm.id) {
            Some(row) => Some(row),
            None => instances::get(&*app.store, vm.id).await?,
        };
        let action = required_action(row.as_ref(), id, &vm);
        if action == VmAction::SettleIncoming {
            incoming::settle(app, node, vm.id).await?;
            continue;
        }
        if action == VmAction::Keep || !enforce(app, node, vm.id).await? {
            let is_own = row.as_ref().filter(|row| row.node == Some(id));
            if is_own.is_some_and(|row| policy(app, &row.spec) != vm.fencing) {
                match apply_policy(app, node, vm.id).await {
                    // Before its first check-in the node has no lease. Its next report starts the watchdog.
                    Err(Error::Unavailable(reason)) => {
                        tracing::info!(instance = %vm.id, reason, "the VM has no watchdog yet");
                    }
                    applied => applied?,
                }
            }
            vms.found.push((vm, row));
        }
    }
    vms.without_vm = rows.into_values().collect();
    Ok(vms)
}

/// Applies the required action to a VM once no operation works on it. Returns whether the node no longer has its files.
async fn enforce(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) -> Result<bool> {
    let _lock = app.instance_locks.lock(id).await;
    // An operation may have replaced it by one of the current generation. First, because a row is older than its VM.
    let Some(vm) = node.vms().list().await?.into_iter().find(|vm| vm.id == id) else { return Ok(true) };
    let row = instances::get(&*app.store, id).await?;
    match required_action(row.as_ref(), node.identity().id, &vm) {
        VmAction::Keep => Ok(false),
        VmAction::Stop => {
            if matches!(vm.power, VmPower::On | VmPower::Paused) {
                node.vms().stop(vm.id).await?;
                tracing::warn!(instance = %vm.id, node = node.identity().name, "stopped the VM of a deleted instance");
            }
            Ok(false)
        }
        VmAction::SettleIncoming => Ok(false),
        VmAction::MoveToLostFound(reason) => {
            move_to_lost_found(app, node, vm.id, true, &reason).await?;
            Ok(true)
        }
    }
}

/// Gives a VM the fencing policy of its instance, which may have changed, or the setting of the cluster.
async fn apply_policy(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) -> Result<()> {
    let _lock = app.instance_locks.lock(id).await;
    let row = instances::get(&*app.store, id).await?;
    match row.filter(|row| row.node == Some(node.identity().id)) {
        Some(row) => node.vms().set_fencing(id, policy(app, &row.spec)).await,
        None => Ok(()),
    }
}

/// Records that the watchdog has stopped a VM, once.
async fn record_fenced(app: &App, node: &Arc<dyn NodeApi>, vm: &FoundVm) -> Result<()> {
    if vm.fenced_at.is_none() {
        return Ok(());
    }
    let _lock = app.instance_locks.lock(vm.id).await;
    // A concurrent pass may have recorded it.
    let current = node.vms().list().await?.into_iter().find(|current| current.id == vm.id);
    let Some(time) = current.and_then(|current| current.fenced_at) else { return Ok(()) };
    let name = &node.identity().name;
    let event = Event::new(EventType::Health, ObjectRef::new(ObjectType::Node, node.identity().id), FENCED)
        .with("instance_uuid", vm.id.to_string())
        .with("node", name.clone())
        .with("stopped_at", format_utc(time))
        .with("reason", "the node could not check in, and its fencing lease expired");
    let has_row = instances::get(&*app.store, vm.id).await?.is_some();
    app.events.record(if has_row { event.with_object(object(vm.id)) } else { event });
    node.vms().acknowledge_fencing(vm.id).await
}

/// Moves the files of a VM. The caller holds the instance lock.
async fn move_to_lost_found(
    app: &App,
    node: &Arc<dyn NodeApi>,
    id: InstanceId,
    has_row: bool,
    reason: &str,
) -> Result<()> {
    let Some(path) = node.vms().move_to_lost_found(id, reason).await? else { return Ok(()) };
    if has_row {
        clear_unfenced(app, id, node.identity().id).await?;
    }
    let (name, path) = (&node.identity().name, path.display().to_string());
    let message = "stale VM stopped and moved to lost+found";
    tracing::warn!(instance = %id, node = name, path, reason, message);
    let event = Event::new(EventType::Health, ObjectRef::new(ObjectType::Node, node.identity().id), message)
        .with("instance_uuid", id.to_string())
        .with("node", name.clone())
        .with("path", path)
        .with("reason", reason);
    app.events.record(if has_row { event.with_object(object(id)) } else { event });
    Ok(())
}
