//! Stops VMs that must not run on a node: their instance was placed on another node, or again under a later generation,
//! or the node was deleted. Their files are moved to `lost+found`, because a disk is only removed by deleting its
//! instance. See docs/decisions/0052.

use std::collections::HashMap;
use std::sync::Arc;

use muster_store::instances::{self, InstanceRow};
use muster_types::Result;
use muster_types::event::{Event, EventType};
use muster_types::ids::{InstanceId, NodeId};
use muster_types::instance::InstanceState;
use muster_types::node::{NodeApi, NodeState};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::vm::{FoundVm, VmPower};

use super::object;
use crate::app::App;

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
    /// The reason why it must not run here.
    MoveToLostFound(String),
}

fn required_action(row: Option<&InstanceRow>, node: NodeId, vm: &FoundVm) -> VmAction {
    // It may belong to another database.
    let Some(row) = row else { return VmAction::Keep };
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

/// Stops every stale VM of a node and moves its files to `lost+found`. Returns the VMs that remain. Call it before the node
/// serves or changes networks.
pub(crate) async fn remove_stale(app: &App, node: &Arc<dyn NodeApi>) -> Result<NodeVms> {
    // VMs first: a row is older than its VM.
    let found = node.vms().list().await?;
    let (id, name) = (node.identity().id, &node.identity().name);
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
        if required_action(row.as_ref(), id, &vm) == VmAction::Keep || !enforce(app, node, &vm).await? {
            vms.found.push((vm, row));
        }
    }
    vms.without_vm = rows.into_values().collect();
    Ok(vms)
}

/// Applies the required action to a VM once no operation works on it. Returns whether its files were moved.
async fn enforce(app: &App, node: &Arc<dyn NodeApi>, vm: &FoundVm) -> Result<bool> {
    let _lock = app.instance_locks.lock(vm.id).await;
    let row = instances::get(&*app.store, vm.id).await?;
    match required_action(row.as_ref(), node.identity().id, vm) {
        VmAction::Keep => Ok(false),
        VmAction::Stop => {
            if matches!(vm.power, VmPower::On | VmPower::Paused) {
                node.vms().stop(vm.id).await?;
                tracing::warn!(instance = %vm.id, node = node.identity().name, "stopped the VM of a deleted instance");
            }
            Ok(false)
        }
        VmAction::MoveToLostFound(reason) => {
            move_to_lost_found(app, node, vm.id, true, &reason).await?;
            Ok(true)
        }
    }
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
