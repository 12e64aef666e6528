//! Drains nodes: they get no new instances, and their instances move to other nodes. `operations/drain_node.rs` runs
//! [`migrate_instances`] until none is left. See docs/decisions/0071.

use muster_store::instances::{self, InstanceRow};
use muster_store::nodes::{self, NodeRow};
use muster_store::operations::{self, OperationRow};
use muster_store::{Tx, TxError, blob_locations, instance_migrations, node_ledgers, transaction};
use muster_types::event::{Event, EventType};
use muster_types::ids::NodeId;
use muster_types::instance::{InstanceState, PowerState};
use muster_types::migration::{MigrationMode, MigrationSettings};
use muster_types::node::{
    CordonReason, DrainOutcome, DrainRecord, DrainedInstance, NodeCordon, NodeRecord, NodeState,
};
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::operation::OperationHandle;
use muster_types::time::now;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::audit::with_caller;
use crate::objects::instance::migrate::{self, MigrationPlan};
use crate::objects::instance::migration_batch::{self, MigrationBatch, failure, is_temporary};
use crate::objects::instance::placement;
use crate::objects::{blob_copy, node};
use crate::queue::{DrainNode, NewOperation, Operation as _};

/// The number of failed migrations after which an instance stays, or is powered off if that is allowed.
const MAX_FAILURES: usize = 3;
/// The seconds after which a drain does not wait any longer for an instance that is not ready, or a node that does not check in.
const WAIT_TIMEOUT: f64 = 3600.0;

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
    let possible: Vec<_> =
        plans.iter().filter_map(|(row, planned)| Some((row, planned.as_ref().ok()?))).collect();
    let mut forecasts = migration_batch::forecast(app, &possible).await?.into_iter();
    Ok(plans
        .iter()
        .map(|(row, planned)| {
            let (outcome, node, reason) = match (planned, planned.is_ok().then(|| forecasts.next()).flatten())
            {
                (Ok(plan), Some(Ok(allocation))) => (outcome(plan), Some(allocation.name), None),
                (Ok(_), refused) => {
                    let refused = refused.and_then(Result::err).unwrap_or_default();
                    (DrainOutcome::Blocked, None, Some(placement::no_capacity(&refused).to_string()))
                }
                (Err(error), _) if is_temporary(error) => (DrainOutcome::Wait, None, Some(error.to_string())),
                (Err(error), _) => (DrainOutcome::Blocked, None, Some(error.to_string())),
            };
            let (name, namespace) = (row.name.clone(), row.namespace.clone());
            DrainedInstance { instance_uuid: row.id, name, namespace, outcome, node, reason }
        })
        .collect())
}

fn outcome(plan: &MigrationPlan) -> DrainOutcome {
    match (plan.mode, plan.restart) {
        (MigrationMode::Live, _) => DrainOutcome::Migrate,
        (MigrationMode::Off, true) => DrainOutcome::Restart,
        (MigrationMode::Off, false) => DrainOutcome::Copy,
    }
}

/// Rejects the end of a drain with [`Error::NotReady`] while the node has the only verified copies of blobs, which other nodes
/// copy (`reconcile/blob_copies.rs`), or with another error if no other node can or they have not done so for an hour.
async fn require_copies_elsewhere(app: &App, row: &NodeRow, cordon: &NodeCordon) -> Result<()> {
    let id = row.identity.id;
    let others = blob_copy::storing_nodes(&*app.store).await?;
    let only_copies = blob_locations::only_on(&*app.store, id, &others).await?;
    if only_copies.is_empty() {
        return Ok(());
    }
    let list = node::describe_blobs(&only_copies);
    let name = &row.identity.name;
    if others.is_empty() {
        return Err(Error::Conflict(format!(
            "node {name} has the only verified copy of {list}, and no other node is up that could store them"
        )));
    }
    // This daemon may have the node that copies them.
    app.node_cache.clear();
    let waits =
        Error::NotReady(format!("other nodes copy {list}, of which node {name} has the only verified copy"));
    Err(end_wait(waits, now() - cordon.since))
}

/// Starts migrations from a node that is drained. Returns [`Error::NotReady`] until it has no instances and other nodes have copies
/// of its blobs, or an error if the remaining ones cannot leave it. Completes as well when the drain was cancelled.
pub(crate) async fn migrate_instances(app: &App, id: NodeId) -> Result<()> {
    let Some(node) = nodes::get(&*app.store, &NameOrId::Id(id)).await? else { return Ok(()) };
    let cordon = node.cordon.clone().filter(|cordon| cordon.reason == CordonReason::Drain);
    let Some(cordon) = cordon.filter(|_| node.state != NodeState::Deleted) else { return Ok(()) };
    if node.state != NodeState::Created {
        let name = &node.identity.name;
        if app.store.membership.database_time() - node.lastseen < WAIT_TIMEOUT {
            return Err(Error::NotReady(format!("node {name} does not check in")));
        }
        return Err(Error::Conflict(format!(
            "node {name} has not checked in for an hour: start its daemon and drain it again, or use `muster node evacuate \
             {name} --dead` if the host is dead"
        )));
    }
    let migrations = instance_migrations::list(&*app.store).await?;
    let mut batch = MigrationBatch::new(migrations.iter().filter(|migration| migration.source == id).count());
    // An instance may still arrive, by a migration that began before.
    if migrations.iter().any(|migration| migration.source == id || migration.target == id) {
        batch.wait();
    }
    for row in instances_of(app, id).await? {
        if migrations.iter().all(|migration| migration.instance != row.id) {
            batch.start(&row, migrate_instance(app, &row, &cordon)).await;
        }
    }
    batch.finish()?;
    require_copies_elsewhere(app, &node, &cordon).await?;
    app.events.record(Event::new(EventType::Status, object(id), "drained"));
    Ok(())
}

/// Starts the migration of an instance of a node that has a cordon.
pub async fn migrate_instance(app: &App, row: &InstanceRow, cordon: &NodeCordon) -> Result<bool> {
    let failures = migration_batch::failed_since(app, row.id, cordon.since).await?;
    let planned = if failures.len() < MAX_FAILURES {
        plan(app, row, cordon.stop).await
    } else if cordon.stop && is_active(row) && failures.len() < 2 * MAX_FAILURES {
        migrate::plan(app, row, None, true).await
    } else {
        let reason = failures.first().map_or("", failure);
        return Err(Error::Conflict(format!("its migration failed {} times: {reason}", failures.len())));
    };
    let plan = planned.map_err(|error| end_wait(error, now() - cordon.since))?;
    let caller = Caller::daemon("drain");
    // The node is to be emptied, even if the guest is slower for that.
    let settings = MigrationSettings { auto_converge: true, ..MigrationSettings::default() };
    migrate::begin(app, &caller, row, &plan, settings, Some(cordon)).await?;
    Ok(true)
}

/// Ends a wait for something that is not ready, after some time since the drain was requested.
fn end_wait(error: Error, waited: f64) -> Error {
    match error {
        Error::NotReady(reason) if waited >= WAIT_TIMEOUT => {
            Error::Conflict(format!("{reason}, an hour after the drain was requested"))
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_for_an_instance_ends_with_its_reason() {
        let not_ready = || Error::NotReady("instance web is not ready (creating)".into());
        assert!(matches!(end_wait(not_ready(), WAIT_TIMEOUT - 1.0), Error::NotReady(_)));
        let ended = end_wait(not_ready(), WAIT_TIMEOUT);
        assert!(matches!(&ended, Error::Conflict(reason) if reason.contains("(creating)")), "{ended}");
        assert!(matches!(end_wait(Error::Contended, WAIT_TIMEOUT), Error::Contended));
    }
}
