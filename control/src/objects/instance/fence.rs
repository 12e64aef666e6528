//! Whether the VM of an instance is fenced, and what the watchdog has done.
//!
//! Stops VMs that must not run on a node: their instance was placed on another node, or again under a later generation,
//! or the node was deleted. Their files are moved to `lost+found`, because a disk is only removed by deleting its
//! instance. See docs/decisions/0052.

use std::collections::HashMap;
use std::sync::Arc;

use muster_store::instances::{self, InstanceRow, InstanceSpec, UnfencedVm};
use muster_store::nodes::{self, NodeRow};
use muster_store::{StoreError, Tx, TxError, transaction};
use muster_types::event::{Event, EventType};
use muster_types::ids::{InstanceId, NodeId};
use muster_types::instance::{FencingPolicy, InstanceState, RestartPolicy};
use muster_types::node::{NodeApi, NodeReport, NodeState};
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::time::format_utc;
use muster_types::vm::{FoundVm, VmPower};
use muster_types::{Error, Result};

use super::{incoming, object, placed_again, require_created};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::address::release_unfenced;
use crate::objects::audit::with_caller;

/// The number of seconds after the end of a fencing lease until a VM has certainly stopped: covers the poll interval of the
/// watchdog, the end of the process, and the difference between the clocks of two hosts.
const FENCING_MARGIN: f64 = 10.0;

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

/// Returns what happens to the VM of an instance when its node cannot reach the database.
pub(crate) fn policy(app: &App, spec: &InstanceSpec) -> FencingPolicy {
    spec.fencing.unwrap_or(app.settings.fencing)
}

/// Parses the policies of a request. Absent ones have their defaults.
pub(super) fn parse_policies(
    restart: Option<&str>,
    fencing: Option<&str>,
) -> Result<(RestartPolicy, Option<FencingPolicy>)> {
    let restart = restart.filter(|text| !text.is_empty()).map(|text| {
        let invalid = format!("restart: {text:?} is neither \"manual\" nor \"elsewhere\"");
        text.parse().map_err(|_| Error::Invalid(invalid))
    });
    let fencing = fencing.filter(|text| !text.is_empty()).map(|text| {
        let invalid = format!("fencing: {text:?} is neither \"none\" nor \"self\"");
        text.parse().map_err(|_| Error::Invalid(invalid))
    });
    Ok((restart.transpose()?.unwrap_or(RestartPolicy::Manual), fencing.transpose()?))
}

/// Replaces the policies of an instance. Call it on the daemon of the instance's node. The VM is never less fenced than the
/// record says, because other nodes rely on the record.
pub async fn set_policies(
    app: &App,
    caller: &Caller,
    node: &Arc<dyn NodeApi>,
    id: InstanceId,
    restart: Option<&str>,
    fencing: Option<&str>,
) -> Result<()> {
    let (restart, fencing) = parse_policies(restart, fencing)?;
    let _lock = app.instance_locks.lock(id).await;
    let row = instances::get(&*app.store, id).await?.ok_or_else(|| Error::not_found("instance"))?;
    require_created(&row)?;
    if row.node != Some(node.identity().id) {
        return Err(placed_again(id));
    }
    caller.deadline.require_waiting()?;
    let spec = InstanceSpec { restart, fencing, ..row.spec.clone() };
    check_restart(app, &spec)?;
    let policy = policy(app, &spec);
    if policy == FencingPolicy::Own {
        node.vms().set_fencing(id, policy).await?;
    }
    transaction!(app.store, |tx| {
        let is_placed = instances::lock_placed(tx, &row).await?;
        let current = instances::get(&mut *tx, id).await?;
        let Some(current) = current.filter(|row| is_placed && row.state == InstanceState::Created) else {
            return Err(StoreError::Conflict("the instance changed".into()).into());
        };
        let spec = InstanceSpec { restart, fencing, ..current.spec };
        Ok(instances::set_spec(tx, id, &spec, &current.disks).await?)
    })?;
    let event = Event::audit(object(id), "fencing request from REST API").with("restart", restart.as_str());
    app.record(caller, with_caller(caller, event.with("fencing", fencing.map(FencingPolicy::as_str))));
    if policy == FencingPolicy::None {
        node.vms().set_fencing(id, policy).await?;
    }
    Ok(())
}

/// Rejects an instance that would restart elsewhere although its VM may still run.
pub(super) fn check_restart(app: &App, spec: &InstanceSpec) -> Result<()> {
    if spec.restart == RestartPolicy::Elsewhere && policy(app, spec) != FencingPolicy::Own {
        return Err(Error::Invalid(
            "restart: \"elsewhere\" requires self-fencing, without which the VM could run twice. Set fencing to \"self\", or \
             FENCING = self on every node"
                .into(),
        ));
    }
    Ok(())
}

/// Returns the number of seconds after the last check-in of a node when the VM of an instance has certainly stopped, or `None`
/// if it may keep running. The daemon of the node reports a lease only after its VMs have the policies of their instances.
pub(super) fn certain_end(spec: &InstanceSpec, report: &NodeReport) -> Option<f64> {
    let lease = match spec.fencing {
        None => report.fencing_lease,
        Some(FencingPolicy::Own) => report.instance_fencing_lease,
        Some(FencingPolicy::None) => None,
    };
    lease.map(|lease| lease + FENCING_MARGIN)
}

/// Returns the row of an instance that is to be removed from a node which does not check in, with the VM that may still run
/// there. An earlier one is then forgotten.
pub(super) fn with_unfenced(app: &App, mut row: InstanceRow, node: &NodeRow) -> InstanceRow {
    // A daemon that was stopped on purpose has ended its lease. Of a deleted node, this is unknown.
    let has_lease = matches!(node.state, NodeState::Missing | NodeState::Error);
    let end = certain_end(&row.spec, &node.report).filter(|_| has_lease);
    let vm = UnfencedVm { node: node.identity.id, until: end.map(|end| node.lastseen + end) };
    if !is_expired(app, &vm) {
        row.spec.unfenced = Some(vm);
    }
    row
}

fn is_expired(app: &App, vm: &UnfencedVm) -> bool {
    vm.until.is_some_and(|until| app.store.membership.database_time() >= until)
}

/// Rejects an instance with [`Error::NotReady`] whose VM on a lost node stops when the fencing lease expires.
pub(crate) fn require_expired(app: &App, row: &InstanceRow) -> Result<()> {
    match row.spec.unfenced.filter(|vm| vm.until.is_some() && !is_expired(app, vm)) {
        Some(_) => Err(Error::NotReady("the fencing lease of its former node has not expired".into())),
        None => Ok(()),
    }
}

/// Returns the node on which a VM of an instance may still run. It does not return before the transaction ends.
pub(crate) async fn unfenced_node_in(
    app: &App,
    tx: &mut Tx,
    row: &InstanceRow,
) -> Result<Option<NodeId>, TxError> {
    let Some(vm) = row.spec.unfenced.filter(|vm| !is_expired(app, vm)) else { return Ok(None) };
    if let Some(node) = nodes::get(&mut *tx, &NameOrId::Id(vm.node)).await?
        && nodes::lock_silent(tx, &node).await?
    {
        return Ok(Some(vm.node));
    }
    let state = nodes::state(&mut *tx, vm.node).await?;
    // A node that checks in has stopped its stale VMs.
    Ok((!matches!(state, Some(NodeState::Created | NodeState::Stopping))).then_some(vm.node))
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
        let Some(row) = row.filter(|row| row.spec.unfenced.is_some_and(|vm| vm.node == node)) else {
            return Ok(());
        };
        let spec = InstanceSpec { unfenced: None, ..row.spec };
        Ok(instances::set_spec(tx, id, &spec, &row.disks).await?)
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
