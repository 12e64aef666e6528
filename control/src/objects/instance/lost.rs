//! Instances whose node does not check in: their VMs may run or not. See docs/decisions/0052.

use muster_store::instances::InstanceRow;
use muster_store::nodes::{self, NodeRow};
use muster_store::{StoreError, Tx, TxError, agent_operations, instances, operations, transaction};
use muster_types::capacity::CommittedCapacity;
use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::ids::{NodeId, OperationId};
use muster_types::instance::{InstanceState, PowerState};
use muster_types::{Error, Result};

use super::reachability::silence;
use super::state::record_state_change;
use super::{delete, local_node, object, placement, read_again};
use crate::app::App;

/// The maximum number of instances that one transaction marks.
const BATCH_SIZE: i64 = 200;

/// Marks the power state and the agent state of instances as unknown whose node does not check in. A node whose daemon
/// was stopped counts after `NODE_CHECKIN_MAXIMUM`: its VMs keep running, but nothing observes them.
pub(crate) async fn mark_unknown(app: &App) -> Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "the limit is seconds")]
    let stopped_before = app.store.membership.database_time() - app.settings.node_checkin_maximum as f64;
    loop {
        let found = instances::unobserved(&*app.store, stopped_before, BATCH_SIZE).await?;
        let marked = transaction!(app.store, |tx| {
            let mut marked = Vec::new();
            for instance in &found {
                if instances::set_unknown(tx, instance.id, stopped_before).await? {
                    marked.push(instance.clone());
                }
            }
            Ok(marked)
        })?;
        let is_last = marked.is_empty() || i64::try_from(found.len()).is_ok_and(|count| count < BATCH_SIZE);
        for instance in marked {
            let message = EventMessage::PowerState(PowerState::Unknown);
            let event = Event::new(EventType::Mutate, object(instance.id), message)
                .with("from", instance.power_state.as_str())
                .with("node", instance.node.clone())
                .with("reason", silence(&instance.node, instance.node_lastseen));
            app.events.record(event);
        }
        if is_last {
            return Ok(());
        }
    }
}

/// Locks a node that was declared dead until the transaction ends, so that it cannot return before. Rejects one that has
/// returned since `node` was read.
pub(super) async fn lock_dead_in(tx: &mut Tx, node: &NodeRow) -> Result<(), TxError> {
    if nodes::lock_silent(tx, node).await? {
        return Ok(());
    }
    Err(Error::Conflict(format!("node {} is alive again", node.identity.name)).into())
}

/// Puts an instance in error whose evacuation to a node of this daemon failed, and removes the VM that it has created there.
pub(crate) async fn fail_evacuation(
    app: &App,
    row: &InstanceRow,
    reason: &str,
    operation: OperationId,
) -> Result<()> {
    let node = local_node(app, row.node)?;
    {
        let _lock = app.instance_locks.lock(row.id).await;
        if read_again(app, row).await?.is_none_or(|current| current.state != row.state) {
            return Ok(());
        }
        let vm = node.vms().list().await?.into_iter().find(|vm| vm.id == row.id);
        // Its disks were created from snapshots or images and never used, or are on shared storage, where they stay. Those of an
        // earlier generation are moved to `lost+found` by the reconciler.
        if vm.is_some_and(|vm| vm.generation.is_none_or(|generation| generation == row.generation)) {
            node.vms().remove(row.id).await?;
        }
    }
    fail_lost(app, row, reason, None, Some(operation)).await
}

/// Puts an instance in error whose VM is lost, and removes it from its node. It keeps its interfaces and addresses until it
/// is deleted. `row` tells whether its VM may still run. If its node was declared dead, `dead` is the node, which must not
/// have returned. Its operations are aborted, except the one that calls this.
pub(crate) async fn fail_lost(
    app: &App,
    row: &InstanceRow,
    reason: &str,
    dead: Option<&NodeRow>,
    operation: Option<OperationId>,
) -> Result<()> {
    let failed = transaction!(app.store, |tx| {
        if let Some(node) = dead {
            lock_dead_in(tx, node).await?;
        }
        fail_lost_in(tx, row, reason, operation).await
    })?;
    update_ledger(app, &failed);
    if failed.is_failed {
        record_state_change(app, row.id, row.state, InstanceState::Error, Some(reason));
    }
    Ok(())
}

/// Removes an instance that is being deleted from its lost node, and queues its deletion on a node with its shared storage. If
/// the node was declared dead, `dead` is the node, which must not have returned.
pub(crate) async fn delete_elsewhere(app: &App, row: &InstanceRow, dead: Option<&NodeRow>) -> Result<()> {
    let failed = transaction!(app.store, |tx| {
        if let Some(node) = dead {
            lock_dead_in(tx, node).await?;
        }
        let failed = fail_lost_in(tx, row, "its node is lost", None).await?;
        delete::enqueue(tx, row.id, None).await?;
        Ok(failed)
    })?;
    update_ledger(app, &failed);
    app.queue.wake();
    Ok(())
}

fn update_ledger(app: &App, failed: &FailedInstance) {
    if let Some((node, committed)) = failed.ledger {
        app.placement.update(node, committed);
    }
}

/// The outcome of [`fail_lost_in`].
#[derive(Debug, Default)]
struct FailedInstance {
    /// Unset if the instance was in error before, or was removed from the node.
    is_failed: bool,
    /// The ledger that has changed.
    ledger: Option<(NodeId, CommittedCapacity)>,
}

async fn fail_lost_in(
    tx: &mut Tx,
    row: &InstanceRow,
    reason: &str,
    operation: Option<OperationId>,
) -> Result<FailedInstance, TxError> {
    let id = row.id;
    if !instances::lock_placed(tx, row).await? {
        return Ok(FailedInstance::default());
    }
    let Some(current) = instances::get(&mut *tx, id).await? else { return Ok(FailedInstance::default()) };
    let is_failed = current.state != InstanceState::Error;
    if is_failed {
        let mut from = current.state;
        if let Some(failed) = from.error_state() {
            require_unchanged(instances::set_state(tx, id, from, failed, Some(reason)).await?)?;
            from = failed;
        }
        require_unchanged(instances::set_state(tx, id, from, InstanceState::Error, Some(reason)).await?)?;
    }
    if let Some(node) = current.node {
        instances::set_ports(tx, id, node, None).await?;
    }
    agent_operations::fail_all(tx, id, reason).await?;
    operations::abort_unfinished(tx, &object(id), operation).await?;
    instances::set_power(tx, id, PowerState::Unknown).await?;
    let mut spec = current.spec.clone();
    spec.set_unfenced_vms(row.spec.unfenced_vms().collect());
    instances::set_spec(tx, id, &spec, &current.disks).await?;
    let ledger = placement::release_in(tx, &current).await?;
    instances::clear_node(tx, id).await?;
    Ok(FailedInstance { is_failed, ledger })
}

fn require_unchanged(is_unchanged: bool) -> Result<(), StoreError> {
    if is_unchanged { Ok(()) } else { Err(StoreError::Conflict("the instance changed".into())) }
}
