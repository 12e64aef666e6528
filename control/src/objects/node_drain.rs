//! Drains nodes: they get no new instances, and their instances move to other nodes. `operations/drain_node.rs` runs
//! [`migrate_instances`] until none is left. See docs/decisions/0071.

use muster_store::instances::{self, InstanceRow};
use muster_store::nodes::{self, NodeRow};
use muster_store::operations::{self, OperationRow};
use muster_store::{Tx, TxError, instance_migrations, node_ledgers, transaction};
use muster_types::event::{Event, EventType};
use muster_types::ids::NodeId;
use muster_types::instance::{InstanceState, PowerState};
use muster_types::migration::{MigrationMode, MigrationSettings};
use muster_types::node::{
    CordonReason, DrainOutcome, DrainRecord, DrainedInstance, NodeCordon, NodeRecord, NodeState,
};
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::operation::{OperationHandle, OperationState};
use muster_types::time::now;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::audit::with_caller;
use crate::objects::instance::migrate::{self, MigrationPlan};
use crate::objects::instance::placement;
use crate::objects::{claim, instance, node};
use crate::queue::{DrainNode, MigrateInstance, NewOperation, Operation as _};

/// The maximum number of instances that are migrated from a node at the same time.
const MAX_MIGRATIONS: usize = 2;
/// The number of failed migrations after which an instance stays, or is powered off if that is allowed.
const MAX_FAILURES: usize = 3;
/// Rolls the transaction of a forecast back.
const FORECAST: &str = "a forecast changes nothing";

fn object(id: NodeId) -> ObjectRef {
    ObjectRef::new(ObjectType::Node, id)
}

/// Drains a node, or with `dry_run` only forecasts what happens. With `stop`, instances that cannot be migrated while they run
/// are powered off, and started on their new nodes.
pub async fn drain(
    app: &App,
    caller: &Caller,
    reference: &str,
    stop: bool,
    dry_run: bool,
) -> Result<DrainRecord> {
    let row = node::find(app, reference).await?;
    require_alive(&row)?;
    if dry_run {
        return Ok(DrainRecord { instances: forecast(app, &row, stop).await?, operation: None });
    }
    let id = row.identity.id;
    let cordon = NodeCordon { reason: CordonReason::Drain, since: now(), stop };
    let handle = transaction!(app.store, |tx| {
        cordon_in(tx, id, Some(&cordon)).await?;
        enqueue_in(tx, id, &caller.request_id).await
    })?;
    app.queue.wake();
    let event = Event::audit(object(id), "drain request from REST API").with("stop", stop);
    app.record(caller, with_caller(caller, event));
    Ok(DrainRecord { instances: forecast(app, &row, stop).await?, operation: Some(handle) })
}

/// Keeps new instances from a node, whose instances stay.
pub async fn start_maintenance(app: &App, caller: &Caller, reference: &str) -> Result<NodeRecord> {
    let row = node::find(app, reference).await?;
    let cordon = NodeCordon { reason: CordonReason::Maintenance, since: now(), stop: false };
    change(app, caller, &row, Some(&cordon), "maintenance request from REST API").await
}

/// Lets a node get new instances again. Migrations of a drain are cancelled.
pub async fn undrain(app: &App, caller: &Caller, reference: &str) -> Result<NodeRecord> {
    let row = node::find(app, reference).await?;
    change(app, caller, &row, None, "undrain request from REST API").await
}

/// Replaces the cordon of a node, and cancels its migrations if it was being drained.
async fn change(
    app: &App,
    caller: &Caller,
    row: &NodeRow,
    cordon: Option<&NodeCordon>,
    message: &'static str,
) -> Result<NodeRecord> {
    let id = row.identity.id;
    transaction!(app.store, |tx| {
        let before = cordon_in(tx, id, cordon).await?;
        if before.is_some_and(|before| before.reason == CordonReason::Drain) {
            for migration in instance_migrations::list(&mut *tx).await? {
                if migration.source == id {
                    instance_migrations::cancel(tx, migration.instance).await?;
                }
            }
        }
        Ok(())
    })?;
    app.queue.wake();
    app.record(caller, with_caller(caller, Event::audit(object(id), message)));
    node::get(app, &id.to_string()).await
}

fn require_alive(row: &NodeRow) -> Result<()> {
    let name = &row.identity.name;
    match row.state {
        NodeState::Created => Ok(()),
        NodeState::Deleted => Err(Error::Conflict(format!("node {name} is deleted"))),
        state => Err(Error::Conflict(format!(
            "node {name} does not check in (its state is {state}), so its instances cannot be migrated: start its daemon. If \
             the host is dead, use `muster node evacuate {name} --dead`"
        ))),
    }
}

/// Replaces the cordon of a node, and returns the earlier one.
async fn cordon_in(
    tx: &mut Tx,
    id: NodeId,
    cordon: Option<&NodeCordon>,
) -> Result<Option<NodeCordon>, TxError> {
    // Waits for allocations in progress, so that their instances are found. Later ones notice it.
    node_ledgers::lock(tx, id).await?;
    let row = nodes::get(&mut *tx, &NameOrId::Id(id)).await?;
    if !nodes::set_cordon(tx, id, cordon).await? {
        return Err(Error::Conflict("the node is deleted".into()).into());
    }
    Ok(row.and_then(|row| row.cordon))
}

/// Queues the operation of a drain, unless it is queued.
async fn enqueue_in(tx: &mut Tx, id: NodeId, request_id: &str) -> Result<OperationHandle, TxError> {
    let target = object(id);
    let pending = operations::of_target(&mut *tx, &target).await?;
    let is_pending = |row: &&OperationRow| row.name == DrainNode::KIND.name && !row.state.is_final();
    if let Some(row) = pending.iter().find(is_pending) {
        return Ok(OperationHandle { op_type: DrainNode::KIND.operation_type, op_uuid: row.id });
    }
    let new = NewOperation {
        request_id: Some(request_id.to_owned()),
        ..NewOperation::new(target, None, DrainNode {})
    };
    Ok(new.enqueue(tx).await?)
}

/// Returns how an instance can leave its node: while it runs or, if that is not possible and `stop` is set, powered off.
async fn plan(app: &App, row: &InstanceRow, stop: bool) -> Result<MigrationPlan> {
    match migrate::plan(app, row, None, false).await {
        Err(Error::Conflict(_)) if stop && is_active(row) => migrate::plan(app, row, None, true).await,
        planned => planned,
    }
}

fn is_active(row: &InstanceRow) -> bool {
    matches!(row.power_state, PowerState::On | PowerState::Paused)
}

/// Returns the instances of a node that have a VM.
async fn instances_of(app: &App, id: NodeId) -> Result<Vec<InstanceRow>> {
    let rows = instances::of_node(&*app.store, id).await?;
    Ok(rows.into_iter().filter(|row| row.state != InstanceState::Error).collect())
}

/// Returns whether an instance can be migrated later.
fn is_temporary(error: &Error) -> bool {
    matches!(error, Error::NotReady(_) | Error::Unavailable(_) | Error::Contended)
}

/// Forecasts what happens to the instances of a node, in the order in which they are migrated.
async fn forecast(app: &App, node: &NodeRow, stop: bool) -> Result<Vec<DrainedInstance>> {
    let mut plans = Vec::new();
    for row in instances_of(app, node.identity.id).await? {
        let migrating = instance_migrations::get(&*app.store, row.id).await?;
        let planned = match migrating {
            Some(_) => Err(Error::NotReady("it is being migrated".into())),
            None => plan(app, &row, stop).await,
        };
        plans.push((row, planned));
    }
    let mut forecasts = Vec::new();
    let rolled_back: Result<()> = transaction!(app.store, |tx| {
        forecasts.clear();
        for (row, planned) in &plans {
            forecasts.push(forecast_in(app, tx, row, planned).await?);
        }
        Err(Error::Conflict(FORECAST.into()).into())
    });
    match rolled_back {
        Err(Error::Conflict(reason)) if reason == FORECAST => Ok(forecasts),
        Err(error) => Err(error),
        Ok(()) => Err(Error::Internal("a forecast was committed".into())),
    }
}

/// Allocates the capacity of an instance on another node, as part of a transaction that is rolled back.
async fn forecast_in(
    app: &App,
    tx: &mut Tx,
    row: &InstanceRow,
    planned: &Result<MigrationPlan>,
) -> Result<DrainedInstance, TxError> {
    let (outcome, node, reason) = match planned {
        Err(error) if is_temporary(error) => (DrainOutcome::Wait, None, Some(error.to_string())),
        Err(error) => (DrainOutcome::Blocked, None, Some(error.to_string())),
        Ok(plan) => match plan.allocate_in(app, tx, &row.namespace).await? {
            Ok(allocation) => {
                // Only a few instances are on two nodes at the same time.
                claim::refund_in(tx, &row.namespace, &allocation.allocated).await?;
                (outcome(plan), Some(allocation.name), None)
            }
            Err(refused) => (DrainOutcome::Blocked, None, Some(placement::no_capacity(&refused).to_string())),
        },
    };
    let (name, namespace) = (row.name.clone(), row.namespace.clone());
    Ok(DrainedInstance { instance_uuid: row.id, name, namespace, outcome, node, reason })
}

fn outcome(plan: &MigrationPlan) -> DrainOutcome {
    match (plan.mode, plan.restart) {
        (MigrationMode::Live, _) => DrainOutcome::Migrate,
        (MigrationMode::Off, true) => DrainOutcome::Restart,
        (MigrationMode::Off, false) => DrainOutcome::Copy,
    }
}

/// Starts migrations from a node that is drained. Returns [`Error::NotReady`] until it has no instances, or an error if the
/// remaining ones cannot be migrated. Completes as well when the drain was cancelled.
pub(crate) async fn migrate_instances(app: &App, id: NodeId) -> Result<()> {
    let Some(node) = nodes::get(&*app.store, &NameOrId::Id(id)).await? else { return Ok(()) };
    let cordon = node.cordon.clone().filter(|cordon| cordon.reason == CordonReason::Drain);
    let Some(cordon) = cordon.filter(|_| node.state != NodeState::Deleted) else { return Ok(()) };
    if node.state != NodeState::Created {
        return Err(Error::NotReady("the node does not check in".into()));
    }
    let migrations = instance_migrations::list(&*app.store).await?;
    let mut running = migrations.iter().filter(|migration| migration.source == id).count();
    // An instance may still arrive, by a migration that began before.
    let mut is_waiting = migrations.iter().any(|migration| migration.source == id || migration.target == id);
    let mut blocked = Vec::new();
    for row in instances_of(app, id).await? {
        if migrations.iter().any(|migration| migration.instance == row.id) {
            continue;
        }
        if running >= MAX_MIGRATIONS {
            is_waiting = true;
            break;
        }
        match migrate_instance(app, &row, &cordon).await {
            Ok(()) => {
                running += 1;
                is_waiting = true;
            }
            Err(error) if is_temporary(&error) => is_waiting = true,
            Err(error) => blocked.push((row, error)),
        }
    }
    if is_waiting {
        return Err(Error::NotReady("instances of the node are being migrated".into()));
    }
    if blocked.is_empty() {
        app.events.record(Event::new(EventType::Status, object(id), "drained"));
        return Ok(());
    }
    let list: Vec<String> =
        blocked.iter().map(|(row, error)| format!("{} ({}): {error}", row.name, row.id)).collect();
    Err(Error::Conflict(format!("{} instances stay on the node: {}", list.len(), list.join("; "))))
}

/// Starts the migration of an instance.
async fn migrate_instance(app: &App, row: &InstanceRow, cordon: &NodeCordon) -> Result<()> {
    let failures: Vec<OperationRow> = operations::of_target(&*app.store, &instance::object(row.id))
        .await?
        .into_iter()
        .filter(|operation| operation.name == MigrateInstance::KIND.name && operation.created >= cordon.since)
        .filter(|operation| matches!(operation.state, OperationState::Error | OperationState::Abort))
        .collect();
    let plan = if failures.len() < MAX_FAILURES {
        plan(app, row, cordon.stop).await?
    } else if cordon.stop && is_active(row) && failures.len() < 2 * MAX_FAILURES {
        migrate::plan(app, row, None, true).await?
    } else {
        let last = failures.iter().filter_map(|operation| operation.error_report.as_ref()).next_back();
        let reason = last.map_or("it was cancelled", |report| report.message.as_str());
        return Err(Error::Conflict(format!("its migration failed {} times: {reason}", failures.len())));
    };
    let caller = Caller::daemon("drain");
    migrate::begin(app, &caller, row, &plan, MigrationSettings::default()).await?;
    Ok(())
}
