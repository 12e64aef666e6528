//! Migration: requests, and the rows of a migration. `operations/prepare_migration.rs` and
//! `operations/migrate_instance.rs` run it, `incoming.rs` ends it on the target. See docs/decisions/0070.

use muster_store::instance_migrations::{self, MigrationRow};
use muster_store::instances::{self, InstanceRow};
use muster_store::nodes::{NodeRelease, NodeRow};
use muster_store::operations::{self, OperationRow};
use muster_store::{Read, StoreError, Tx, TxError, interfaces, networks, node_ledgers, nodes, transaction};
use muster_types::capacity::{Capacity, CommittedCapacity};
use muster_types::event::{Event, EventType};
use muster_types::ids::{InstanceId, NodeId};
use muster_types::instance::PowerState;
use muster_types::migration::{MigrationMode, MigrationSettings, SwitchOver};
use muster_types::node::{CordonReason, NodeCordon, NodeState};
use muster_types::object::NameOrId;
use muster_types::operation::{OperationHandle, OperationRecord};
use muster_types::scheduling::SchedulingStage;
use muster_types::shared_storage::StorageType;
use muster_types::spec::DiskBus;
use muster_types::{Error, Result};

use super::placement::{self, Allocation, Candidates, RefusedNodes};
use super::reachability::require_reachable;
use super::{agent, find_own, node_row, object, operation_on, require_created};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::audit::with_caller;
use crate::objects::network::state::PRESENT;
use crate::objects::{claim, node, operation};
use crate::queue::{
    CreateInstance, EvacuateInstance, MigrateInstance, NewOperation, Operation as _, PrepareMigration,
};
use crate::scheduler::{self, PlacementRequest};

/// The maximum downtime limit in milliseconds, which is QEMU's.
const MAX_DOWNTIME_LIMIT: u64 = 2_000_000;
/// What to do about an instance that cannot be migrated live.
const STOP_HINT: &str = "let it be powered off and started on the target with `--stop` (`stop: true`)";
/// The maximum bandwidth limit in megabits per second.
const MAX_BANDWIDTH_LIMIT: u64 = 1_000_000;

/// A request to migrate an instance.
#[derive(Debug, Clone, Default)]
pub struct MigrationRequest {
    /// The name or id of the target; if unset, the scheduler chooses it.
    pub target: Option<String>,
    /// Whether an instance that is on is powered off, and started on the target.
    pub stop: bool,
    pub settings: MigrationSettings,
}

/// How an instance is migrated, and where it can go.
#[derive(Debug)]
pub(crate) struct MigrationPlan {
    pub(crate) mode: MigrationMode,
    /// Whether it is powered off first, and started on the target.
    pub(crate) restart: bool,
    source: NodeRow,
    request: PlacementRequest,
    candidates: Candidates,
}

impl MigrationPlan {
    /// Allocates capacity from the first candidate that has it, or returns the reasons of all.
    async fn allocate_in(
        &self,
        app: &App,
        tx: &mut Tx,
        namespace: &str,
    ) -> Result<Result<Allocation, RefusedNodes>, TxError> {
        placement::allocate_in(app, tx, namespace, &self.request, &self.candidates).await
    }

    /// Allocates capacity as part of a transaction that is rolled back. The claim of the namespace is not charged.
    pub(crate) async fn forecast_in(
        &self,
        app: &App,
        tx: &mut Tx,
        row: &InstanceRow,
    ) -> Result<Result<Allocation, RefusedNodes>, TxError> {
        let allocation = self.allocate_in(app, tx, &row.namespace).await?;
        if let Ok(allocation) = &allocation {
            // Only a few instances are on two nodes at the same time.
            claim::refund_in(tx, &row.namespace, &allocation.allocated).await?;
        }
        Ok(allocation)
    }
}

/// Returns whether nothing about an instance itself prevents its migration while it runs.
pub(crate) fn is_live_migratable(row: &InstanceRow) -> bool {
    row.power_state == PowerState::On && require_created(row).is_ok() && mode(row, false).is_ok()
}

/// Reserves capacity on the target of a migration, and queues its operations. Returns the one that completes last.
pub async fn start(
    app: &App,
    caller: &Caller,
    reference: &str,
    request: MigrationRequest,
) -> Result<OperationRecord> {
    check_settings(&request.settings)?;
    let row = find_own(app, caller, reference, None).await?;
    let target = match request.target.as_deref().filter(|target| !target.is_empty()) {
        Some(target) => Some(node::find(app, target).await?),
        None => None,
    };
    let plan = plan(app, &row, target.as_ref(), request.stop).await?;
    require_idle(app, row.id).await?;
    let (target, handle) = begin(app, caller, &row, &plan, request.settings, None).await?;
    let event = Event::audit(object(row.id), "migration request from REST API")
        .with("from_node", plan.source.identity.name.clone())
        .with("node", target);
    app.record(caller, with_caller(caller, event));
    operation::get(app, caller, handle.op_type.as_str(), &handle.op_uuid.to_string()).await
}

/// Determines how an instance can be migrated, and to which nodes, or why not.
pub(crate) async fn plan(
    app: &App,
    row: &InstanceRow,
    target: Option<&NodeRow>,
    stop: bool,
) -> Result<MigrationPlan> {
    require_created(row)?;
    let source = node_row(app, row).await?;
    require_reachable(&source)?;
    let (mode, restart) = mode(row, stop)?;
    require_not_migrating(&*app.store, row.id).await?;
    let releases = nodes::releases(&*app.store).await?;
    let check_target = |target: &NodeRow| {
        check_target(&source, target, mode)?;
        check_release(&releases, &source.identity.name, &target.identity.name)
    };
    if let Some(target) = target {
        check_target(target).map_err(Error::Conflict)?;
    }
    let nodes = nodes::list(&*app.store).await?;
    let others = other_nodes(&source, &nodes);
    if others.is_empty() {
        let name = &source.identity.name;
        return Err(Error::Conflict(format!(
            "no other node can take the instance: {name} is the only node that runs instances. Add a host with `muster node invite`"
        )));
    }
    let request = PlacementRequest {
        required_node: target.map(|target| target.identity.id),
        ..placement::request_again(app, row).await?
    };
    let mut candidates = placement::find_uncached(app, &row.namespace, &request).await?;
    let mut reasons = Vec::new();
    candidates.retain(|id| {
        let Some(node) = nodes.iter().find(|node| node.identity.id == id) else { return false };
        let checked = check_target(node);
        reasons.extend(checked.as_ref().err().filter(|_| id != source.identity.id).cloned());
        checked.is_ok()
    });
    match candidates.nodes() {
        Err(_) if !reasons.is_empty() => Err(Error::Conflict(reasons.join("; "))),
        // The source was the only candidate.
        Err(Error::Unschedulable { stage: stage @ SchedulingStage::CapacityGuard, transient, .. }) => {
            let reasons = others.iter().filter_map(|node| {
                let reason = refusal(node, &candidates)?;
                Some(format!("node {}: {reason}", node.identity.name))
            });
            let reasons = reasons.collect::<Vec<_>>().join("; ");
            let text = format!("no other node can take the instance: {reasons}");
            Err(Error::Unschedulable { text, stage, transient })
        }
        Err(error) => Err(error),
        Ok(_) => Ok(MigrationPlan { mode, restart, source, request, candidates }),
    }
}

/// Rejects a migration of an instance that has unfinished operations. A drain does not use it, because a new one could always
/// begin: its migrations wait for those that began before them.
pub(crate) async fn require_idle(app: &App, id: InstanceId) -> Result<()> {
    let operations = operations::of_target(&*app.store, &object(id)).await?;
    match operations.iter().find(|operation| is_unfinished(operation)) {
        Some(operation) => Err(unfinished(operation)),
        None => Ok(()),
    }
}

/// Returns whether an operation may still change its instance. What created the instance has nothing left to do for it, but may
/// not be marked as finished yet.
pub(crate) fn is_unfinished(operation: &OperationRow) -> bool {
    let is_creation =
        [CreateInstance::KIND.name, EvacuateInstance::KIND.name].contains(&operation.name.as_str());
    !operation.state.is_final() && !is_creation
}

pub(crate) fn unfinished(operation: &OperationRow) -> Error {
    let (name, id) = (&operation.name, operation.id);
    Error::NotReady(format!("operation {name} ({id}) of the instance is not finished: wait for it"))
}

/// Reserves capacity on the first node of a plan that has it, and queues the operations of the migration. Returns the name
/// of the target, and the operation that completes last. A migration of a drain begins only while the node has its cordon.
pub(crate) async fn begin(
    app: &App,
    caller: &Caller,
    row: &InstanceRow,
    plan: &MigrationPlan,
    settings: MigrationSettings,
    drain: Option<&NodeCordon>,
) -> Result<(String, OperationHandle)> {
    let begun = transaction!(app.store, |tx| {
        if let Some(cordon) = drain {
            require_drained_in(tx, plan.source.identity.id, cordon).await?;
        }
        begin_in(app, tx, caller, row, plan, settings).await
    });
    let (allocation, handle) = begun?;
    placement::update_cache(app, &allocation);
    placement::record_scheduling(app, caller, row.id, &plan.request, &plan.candidates, Ok(&allocation));
    app.networks.notify_changed();
    app.queue.wake();
    Ok((allocation.name, handle))
}

/// Requires that a node still has the cordon of a drain. `undrain` waits for this transaction, and cancels what it has begun, or
/// this transaction finds that the drain was cancelled.
async fn require_drained_in(tx: &mut Tx, node: NodeId, cordon: &NodeCordon) -> Result<(), TxError> {
    // Before anything is read.
    node_ledgers::lock(tx, node).await?;
    let row = nodes::get(&mut *tx, &NameOrId::Id(node)).await?;
    if row.and_then(|row| row.cordon).as_ref() == Some(cordon) {
        return Ok(());
    }
    Err(Error::NotReady("the drain was cancelled or requested again".into()).into())
}

/// Rejects what would end the migration of an instance from a node that is drained, unless the caller may cancel the drain.
pub(crate) async fn require_may_end(app: &App, caller: &Caller, id: InstanceId) -> Result<()> {
    if caller.is_system() {
        return Ok(());
    }
    let Some(migration) = instance_migrations::get(&*app.store, id).await? else { return Ok(()) };
    let source = nodes::get(&*app.store, &NameOrId::Id(migration.source)).await?;
    match source.and_then(|source| source.cordon) {
        Some(cordon) if cordon.reason == CordonReason::Drain => Err(Error::Conflict(
            "the instance is being migrated because its node is drained: wait for the migration".into(),
        )),
        _ => Ok(()),
    }
}

/// Requests the cancellation of a migration. The instance continues on its node, unless it has moved already.
pub async fn cancel(app: &App, caller: &Caller, reference: &str) -> Result<()> {
    let row = find_own(app, caller, reference, None).await?;
    require_may_end(app, caller, row.id).await?;
    let cancelled = transaction!(app.store, |tx| { Ok(instance_migrations::cancel(tx, row.id).await?) })?;
    if !cancelled {
        return Err(Error::Conflict("the instance is not being migrated".into()));
    }
    app.queue.wake();
    let event = Event::audit(object(row.id), "migration cancel request from REST API");
    app.record(caller, with_caller(caller, event));
    Ok(())
}

/// Rejects a change of an instance that is being migrated, which would be lost.
pub(crate) async fn require_not_migrating(db: impl Read, id: InstanceId) -> Result<()> {
    match instance_migrations::get(db, id).await? {
        None => Ok(()),
        Some(_) => Err(Error::Conflict(
            "the instance is being migrated: wait for it, or cancel it with `muster instance cancel-migration`".into(),
        )),
    }
}

/// Returns the nodes besides the source of a migration that run instances, whatever their state.
fn other_nodes<'a>(source: &NodeRow, nodes: &'a [NodeRow]) -> Vec<&'a NodeRow> {
    let others = nodes.iter().filter(|node| node.identity.id != source.identity.id);
    others.filter(|node| node.identity.is_hypervisor && node.state != NodeState::Deleted).collect()
}

/// Returns why the scheduler did not propose a node.
fn refusal(node: &NodeRow, candidates: &Candidates) -> Option<String> {
    match node.state {
        NodeState::Created => candidates.dropped(&node.identity.name).map(str::to_owned),
        state => Some(format!("its state is {state}")),
    }
}

fn check_settings(settings: &MigrationSettings) -> Result<()> {
    let check = |name: &str, value: Option<u64>, max: u64| match value {
        Some(value) if !(1..=max).contains(&value) => {
            Err(Error::Invalid(format!("{name}: {value} is not between 1 and {max}")))
        }
        _ => Ok(()),
    };
    check("downtime_limit_ms", settings.downtime_limit_ms, MAX_DOWNTIME_LIMIT)?;
    check("bandwidth_limit_mbps", settings.bandwidth_limit_mbps, MAX_BANDWIDTH_LIMIT)
}

/// Returns how an instance is migrated, and whether it is powered off for it.
fn mode(row: &InstanceRow, stop: bool) -> Result<(MigrationMode, bool)> {
    match row.power_state {
        PowerState::On | PowerState::Paused if stop => Ok((MigrationMode::Off, true)),
        PowerState::On | PowerState::Paused => {
            if row.spec.storage == StorageType::Shared {
                return Err(Error::Conflict(format!(
                    "its disks are on shared storage, which only one running VM may use: {STOP_HINT}"
                )));
            }
            if let Some(disk) = row.disks.iter().find(|disk| disk.bus == DiskBus::Nvme) {
                let device = &disk.device;
                return Err(Error::Conflict(format!(
                    "disk {device} is on the bus nvme, which QEMU cannot migrate: {STOP_HINT}"
                )));
            }
            Ok((MigrationMode::Live, false))
        }
        PowerState::Off | PowerState::Crashed | PowerState::Initial => Ok((MigrationMode::Off, false)),
        PowerState::Unknown => Err(Error::Conflict("the power state of the instance is unknown".into())),
    }
}

/// Returns a fact that a node has reported.
fn reported<'a>(node: &'a NodeRow, name: &str) -> Option<&'a str> {
    node.report.resources.get(name).and_then(|value| value.as_str())
}

/// Returns the part of a version of QEMU that determines the devices of a VM.
fn device_version(version: &str) -> Vec<&str> {
    version.split('.').take(2).collect()
}

/// Returns why a VM cannot be migrated from one node to another, whatever it is.
pub(crate) fn check_target(source: &NodeRow, target: &NodeRow, mode: MigrationMode) -> Result<(), String> {
    let (from, to) = (&source.identity.name, &target.identity.name);
    if source.identity.id == target.identity.id {
        return Err(format!("the instance is on node {to} already"));
    }
    if source.identity.simulated != target.identity.simulated {
        return Err(format!("only one of the nodes {from} and {to} is simulated"));
    }
    if mode == MigrationMode::Off {
        return Ok(());
    }
    match (reported(source, "accelerator"), reported(target, "accelerator")) {
        (Some(old), Some(new)) if old != new => {
            return Err(format!(
                "its CPU would change: node {from} runs VMs with {old}, node {to} with {new}. Otherwise {STOP_HINT}"
            ));
        }
        _ => {}
    }
    match (reported(source, "qemu_version"), reported(target, "qemu_version")) {
        (Some(old), Some(new)) if device_version(old) != device_version(new) => Err(format!(
            "its devices would change: node {from} has QEMU {old}, node {to} has QEMU {new}. Install the same version, or \
             {STOP_HINT}"
        )),
        _ => Ok(()),
    }
}

/// Returns why the daemon of a target is too old to receive a VM. A newer one understands what an older one sends.
fn check_release(releases: &[NodeRelease], from: &str, to: &str) -> Result<(), String> {
    let find = |name: &str| releases.iter().find(|release| release.name == name);
    match (find(from), find(to)) {
        (Some(source), Some(target)) if target.schema_version < source.schema_version => Err(format!(
            "node {to} runs an older release ({}) than node {from} ({}): upgrade it first",
            target.release, source.release
        )),
        _ => Ok(()),
    }
}

/// Inserts the rows of a migration: the reservation on the target, and the operations.
async fn begin_in(
    app: &App,
    tx: &mut Tx,
    caller: &Caller,
    row: &InstanceRow,
    plan: &MigrationPlan,
    settings: MigrationSettings,
) -> Result<(Allocation, OperationHandle), TxError> {
    // Another attempt finds the reason, if there is one.
    let changed = || Error::NotReady("the instance is changing: try again".into());
    let source = row.node.ok_or_else(changed)?;
    let generation = instances::reserve_generation(tx, row).await?.ok_or_else(changed)?;
    let allocation = plan.allocate_in(app, tx, &row.namespace).await?;
    let allocation = allocation.map_err(|refused| placement::no_capacity(&refused))?;
    let (instance, target) = (row.id, allocation.node);
    let reserved = allocation.allocated;
    let migration =
        MigrationRow { instance, source, target, generation, cancelled: false, reserved, ports: None };
    if !instance_migrations::insert(tx, &migration).await? {
        return Err(Error::Conflict("the instance is being migrated already".into()).into());
    }
    notify_networks_in(tx, instance).await?;
    let request = Some(caller.request_id.as_str());
    let on_target = InstanceRow { node: Some(target), ..row.clone() };
    let prepare = operation_on(&on_target, PrepareMigration { generation, mode: plan.mode }, request)
        .enqueue(tx)
        .await?;
    let MigrationPlan { mode, restart, .. } = *plan;
    let migrate = MigrateInstance { source, target, generation, mode, restart, settings };
    let migrate = NewOperation { depends_on: vec![prepare], ..operation_on(row, migrate, request) };
    let handle = migrate.enqueue(tx).await?;
    instances::set_operation(tx, instance, &handle).await?;
    Ok((allocation, handle))
}

/// Makes the nodes apply the networks of an instance again, because the nodes of its interfaces change.
async fn notify_networks_in(tx: &mut Tx, id: InstanceId) -> Result<(), StoreError> {
    for interface in interfaces::of_instances(&mut *tx, &[id]).await? {
        networks::bump_generation(tx, interface.network, PRESENT).await?;
    }
    Ok(())
}

/// Releases capacity of a node that is not needed there any longer. The ledger does not have disks on shared storage.
async fn release_in(
    tx: &mut Tx,
    node: NodeId,
    row: Option<&InstanceRow>,
    capacity: &Capacity,
) -> Result<(NodeId, CommittedCapacity), StoreError> {
    let ledger = node_ledgers::lock(tx, node).await?;
    let namespace = row.map_or("", |row| &row.namespace);
    let has_shared_disks = row.is_some_and(|row| row.spec.storage_uuid.is_some());
    let Capacity { cpus, memory_mb, disk_gb } = *capacity;
    let disk_gb = if has_shared_disks { 0 } else { disk_gb };
    let committed = scheduler::release_capacity(&ledger, cpus, memory_mb, disk_gb);
    node_ledgers::set(tx, node, &committed).await?;
    claim::refund_in(tx, namespace, capacity).await?;
    Ok((node, committed))
}

/// Ends a migration that has failed: the instance stays where it is, and cannot be moved by it. Returns `false` if the
/// migration has ended already.
pub(crate) async fn end_failed(app: &App, migration: &MigrationRow) -> Result<bool> {
    let released = transaction!(app.store, |tx| {
        if !instance_migrations::remove_failed(tx, migration).await? {
            return Ok(None);
        }
        let row = instances::get(&mut *tx, migration.instance).await?;
        notify_networks_in(tx, migration.instance).await?;
        Ok(Some(release_in(tx, migration.target, row.as_ref(), &migration.reserved).await?))
    })?;
    let Some((node, committed)) = released else { return Ok(false) };
    app.placement.update(node, committed);
    app.networks.notify_changed();
    Ok(true)
}

/// Ends the migrations whose operations ended without a result, and those from or to a node that does not check in.
pub(crate) async fn end_orphaned(app: &App) -> Result<()> {
    for migration in instance_migrations::without_operation(&*app.store).await? {
        if end_failed(app, &migration).await? {
            record_failure(app, migration.instance, "its operation ended without a result");
        }
    }
    for migration in instance_migrations::of_lost_nodes(&*app.store).await? {
        if end_failed(app, &migration).await? {
            record_failure(app, migration.instance, "its source or its target does not check in");
        }
        let (object, name) = (object(migration.instance), PrepareMigration::KIND.name);
        // The operation of the source remains: when its daemon is back, it lets the guest continue.
        transaction!(app.store, |tx| {
            Ok(operations::abort_named(tx, &object, name, migration.target).await?)
        })?;
        app.queue.wake();
    }
    Ok(())
}

pub(crate) fn record_failure(app: &App, id: InstanceId, reason: &str) {
    let event = Event::new(EventType::Status, object(id), "migration failed, the instance stays on its node");
    app.events.record(event.with("reason", reason));
}

/// Moves an instance to the target, which has received everything. The guest is stopped. The outcome of a transaction
/// that failed is read back; an error means that it is unknown.
pub(crate) async fn switch_over(
    app: &App,
    leased: &OperationRow,
    migration: &MigrationRow,
) -> Result<SwitchOver> {
    let moved = transaction!(app.store, |tx| { switch_over_in(app, tx, leased, migration).await });
    match moved {
        Ok(Ok((node, committed))) => {
            app.placement.update(node, committed);
            app.networks.notify_changed();
            Ok(SwitchOver::Moved)
        }
        Ok(Err(reason)) => refuse(app, migration, reason).await,
        Err(error) => {
            tracing::warn!(instance = %migration.instance, %error, "failed to move the instance to the target of its migration");
            refuse(app, migration, error.to_string()).await
        }
    }
}

/// Ends a migration, after which it cannot move the instance, unless it has done so.
async fn refuse(app: &App, migration: &MigrationRow, reason: String) -> Result<SwitchOver> {
    end_failed(app, migration).await?;
    Ok(if is_moved(app, migration).await? { SwitchOver::Moved } else { SwitchOver::Refused(reason) })
}

/// Returns whether a migration has moved its instance.
pub(crate) async fn is_moved(app: &App, migration: &MigrationRow) -> Result<bool> {
    let row = instances::get(&*app.store, migration.instance).await?;
    Ok(row.is_some_and(|row| row.generation >= migration.generation))
}

/// Moves an instance to its target under the generation of the VM there. Returns the ledger of the source, or why the
/// instance cannot be moved.
async fn switch_over_in(
    app: &App,
    tx: &mut Tx,
    leased: &OperationRow,
    migration: &MigrationRow,
) -> Result<Result<(NodeId, CommittedCapacity), String>, TxError> {
    let id = migration.instance;
    let current = instance_migrations::get(&mut *tx, id).await?;
    let Some(current) = current.filter(|current| current.generation == migration.generation) else {
        return Ok(Err("the migration has ended".into()));
    };
    if current.cancelled {
        return Ok(Err("the migration was cancelled".into()));
    }
    if !operations::lock_leased(tx, leased).await? {
        return Ok(Err("another worker took over the migration".into()));
    }
    let target = node_ledgers::lock_with_state(tx, current.target).await?;
    if target.state != Some(NodeState::Created)
        || target.silence > scheduler::SchedulerPolicy::from(&app.settings).max_silence
    {
        return Ok(Err("the target does not check in".into()));
    }
    let Some(row) = instances::get(&mut *tx, id).await? else { return Ok(Err("it was deleted".into())) };
    if !instances::move_to_target(tx, &current).await? {
        return Ok(Err(format!("its state is {}, or it was placed again", row.state)));
    }
    if !instance_migrations::remove(tx, &current).await? {
        return Err(StoreError::Conflict("the migration changed".into()).into());
    }
    if !instances::set_ports(tx, id, current.target, current.ports).await? {
        return Err(StoreError::Conflict("the ports changed".into()).into());
    }
    let MigrateInstance { mode, restart, .. } = MigrateInstance::parameters(leased)?;
    let power = if mode == MigrationMode::Off { PowerState::Off } else { row.power_state };
    if mode == MigrationMode::Off {
        instances::set_power(tx, id, power).await?;
        let wanted = if restart { PowerState::On } else { PowerState::Off };
        instances::set_power_wanted(tx, id, wanted).await?;
    }
    instances::set_agent_state(tx, id, agent::state_for_power(&row, power)).await?;
    interfaces::set_node(tx, id, current.target).await?;
    notify_networks_in(tx, id).await?;
    operations::set_node(tx, &object(id), current.target).await?;
    Ok(Ok(release_in(tx, current.source, Some(&row), &row.committed).await?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_daemon_is_no_target() {
        let node = |name: &str, schema_version| NodeRelease {
            name: name.into(),
            state: NodeState::Created,
            release: "muster 0.1.0".into(),
            schema_version,
        };
        let releases = [node("old", Some(20)), node("new", Some(22)), node("unknown", None)];
        for (from, to) in [("old", "old"), ("old", "new"), ("unknown", "old")] {
            assert_eq!(check_release(&releases, from, to), Ok(()));
        }
        for (from, to) in [("new", "old"), ("old", "unknown")] {
            let reason = check_release(&releases, from, to).unwrap_err();
            assert!(reason.contains(&format!("node {to} runs an older release")), "{reason}");
        }
    }

    #[test]
    fn limits_must_be_in_range() {
        let settings = |downtime_limit_ms, bandwidth_limit_mbps| MigrationSettings {
            downtime_limit_ms,
            bandwidth_limit_mbps,
            auto_converge: false,
        };
        assert!(check_settings(&settings(None, None)).is_ok());
        assert!(check_settings(&settings(Some(1), Some(MAX_BANDWIDTH_LIMIT))).is_ok());
        for invalid in [settings(Some(0), None), settings(None, Some(0)), settings(Some(u64::MAX), None)] {
            assert!(matches!(check_settings(&invalid), Err(Error::Invalid(_))), "{invalid:?}");
        }
    }
}
