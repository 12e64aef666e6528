//! Changes the state of instances, and releases their resources at the end.

use muster_store::instances::{self, InstanceRow, InstanceSpec};
use muster_store::interfaces::{self, InterfaceRow};
use muster_store::nodes::NodeRow;
use muster_store::operations::{self, OperationRow};
use muster_store::{
    StoreError, Tx, TxError, agent_operations, blob_namespaces, blobs, instance_replicas, references,
    transaction,
};
use muster_types::capacity::CommittedCapacity;
use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::ids::{InstanceId, NodeId};
use muster_types::instance::{InstanceState, PowerState, first_generation};
use muster_types::{Error, Result};

use super::{fence, local_node, lost, object, placement, target_id};
use crate::app::App;
use crate::objects::interface;

/// Sets the state of an instance and records the event. Returns `false` if its state or its placement has changed since `row`
/// was read.
pub(crate) async fn set_state(
    app: &App,
    row: &InstanceRow,
    to: InstanceState,
    reason: Option<&str>,
) -> Result<bool> {
    let changed = transaction!(app.store, |tx| {
        Ok(instances::lock_placed(tx, row).await?
            && instances::set_state(tx, row.id, row.state, to, reason).await?)
    })?;
    if changed {
        record_state_change(app, row.id, row.state, to, reason);
    }
    Ok(changed)
}

pub(crate) fn record_state_change(
    app: &App,
    id: InstanceId,
    from: InstanceState,
    to: InstanceState,
    reason: Option<&str>,
) {
    let mut event = Event::new(EventType::Mutate, object(id), EventMessage::InstanceState(to))
        .with("from", from.as_str());
    if let Some(reason) = reason {
        event = event.with("reason", reason);
    }
    app.events.record(event);
}

/// Fails the instance of a creation that failed permanently: removes its VM and releases its resources. An instance that was
/// evacuated keeps its addresses instead, because the VM of an earlier generation may still run.
pub(crate) async fn fail_creation(app: &App, row: &OperationRow, reason: &str) -> Result<()> {
    let id = target_id(&row.target.id)?;
    let instance = instances::get(&*app.store, id).await?;
    let Some(instance) = instance.filter(|instance| instance.node == row.node) else { return Ok(()) };
    use InstanceState as S;
    let is_being_created = matches!(
        instance.state,
        S::Initial | S::Preflight | S::Creating | S::InitialError | S::PreflightError | S::CreatingError
    );
    if !is_being_created {
        return Ok(());
    }
    if instance.generation > first_generation() {
        return lost::fail_evacuation(app, &instance, reason, row.id).await;
    }
    let failed = instance.state.error_state().unwrap_or(instance.state);
    if failed != instance.state && !set_state(app, &instance, failed, Some(reason)).await? {
        return Err(Error::Unavailable("the instance changed concurrently".into()));
    }
    {
        let _lock = app.instance_locks.lock(id).await;
        let vms = local_node(app, instance.node)?.vms();
        vms.remove(id).await?;
        if let Some(storage) = instance.spec.storage_uuid
            && let Err(error) = vms.remove_shared_disks(id, storage).await
        {
            // The deletion of the instance removes them.
            tracing::warn!(instance = %id, %error, "failed to remove incomplete disks from the shared storage");
        }
    }
    release(app, &instance, failed, InstanceState::Error).await
}

/// Records that the shared storage has all disks of an instance that becomes `created`, or that they do not depend on a replica
/// any longer, as part of the transaction that changes its state.
pub(crate) async fn settle_disks_in(tx: &mut Tx, row: &InstanceRow) -> Result<(), StoreError> {
    let (has_shared_disks, is_restored) = (row.spec.storage_uuid.is_some(), row.spec.restore_from.is_some());
    if has_shared_disks == row.spec.has_shared_disks && !is_restored {
        return Ok(());
    }
    if is_restored {
        instance_replicas::delete_others(tx, row.id, None).await?;
    }
    let Some(current) = instances::get(&mut *tx, row.id).await? else { return Ok(()) };
    let spec = InstanceSpec { has_shared_disks, restore_from: None, ..current.spec };
    instances::set_spec(tx, row.id, &spec, &current.disks).await
}

/// Releases all resources of an instance without a VM: addresses, ports, capacity, blobs.
pub(crate) async fn release(
    app: &App,
    instance: &InstanceRow,
    from: InstanceState,
    to: InstanceState,
) -> Result<()> {
    let remaining = interfaces::of_instances(&*app.store, &[instance.id]).await?;
    let released =
        transaction!(app.store, |tx| { release_in(app, tx, instance, from, to, &remaining).await })?;
    finish_release(app, instance, from, to, released);
    Ok(())
}

/// Deletes an instance that was being deleted on a node that is lost, and aborts its operations. If the node was declared
/// dead, `dead` is the node, which must not have returned.
pub(crate) async fn release_lost(app: &App, instance: &InstanceRow, dead: Option<&NodeRow>) -> Result<()> {
    let (from, to) = (InstanceState::DeleteWait, InstanceState::Deleted);
    let remaining = interfaces::of_instances(&*app.store, &[instance.id]).await?;
    let released = transaction!(app.store, |tx| {
        if let Some(node) = dead {
            lost::lock_dead_in(tx, node).await?;
        }
        let released = release_in(app, tx, instance, from, to, &remaining).await?;
        if released.is_some() {
            operations::abort_unfinished(tx, &object(instance.id), None).await?;
            instances::clear_node(tx, instance.id).await?;
        }
        Ok(released)
    })?;
    finish_release(app, instance, from, to, released);
    Ok(())
}

/// The ledger that has changed when an instance was released, if any.
type ReleasedLedger = Option<(NodeId, CommittedCapacity)>;

/// Releases the resources of an instance with the interfaces `remaining` as part of a transaction. Returns `None` if its state or its
/// placement has changed.
async fn release_in(
    app: &App,
    tx: &mut Tx,
    instance: &InstanceRow,
    from: InstanceState,
    to: InstanceState,
    // The state keeps interfaces from being added.
    remaining: &[InterfaceRow],
) -> Result<Option<ReleasedLedger>, TxError> {
    let id = instance.id;
    let unfenced = fence::unfenced_nodes_in(app, tx, instance).await?;
    if !instances::lock_placed(tx, instance).await? || !instances::set_state(tx, id, from, to, None).await? {
        return Ok(None);
    }
    for interface in remaining {
        interface::delete_in(app, tx, interface.id, &unfenced).await?;
    }
    if let Some(node) = instance.node {
        instances::set_ports(tx, id, node, None).await?;
    }
    end_use_of_blobs(tx, instance).await?;
    references::remove_from(tx, &object(id)).await?;
    if to == InstanceState::Deleted {
        agent_operations::delete_all(tx, id).await?;
        instance_replicas::delete_others(tx, id, None).await?;
    } else {
        agent_operations::fail_all(tx, id, "the instance is in error").await?;
    }
    instances::set_power(tx, id, PowerState::Off).await?;
    match instances::get(&mut *tx, id).await? {
        Some(current) => Ok(Some(placement::release_in(tx, &current).await?)),
        None => Ok(Some(None)),
    }
}

fn finish_release(
    app: &App,
    instance: &InstanceRow,
    from: InstanceState,
    to: InstanceState,
    released: Option<ReleasedLedger>,
) {
    let Some(ledger) = released else { return };
    if let Some((node, committed)) = ledger {
        app.placement.update(node, committed);
    }
    app.networks.notify_changed();
    record_state_change(app, instance.id, from, to, None);
}

/// Records that an instance used its blobs until now.
async fn end_use_of_blobs(tx: &mut Tx, instance: &InstanceRow) -> Result<(), StoreError> {
    let spec = &instance.spec;
    for blob in spec.disks.iter().filter_map(|disk| disk.blob_uuid).chain(spec.nvram_template) {
        blobs::set_used(tx, blob).await?;
        blob_namespaces::set_used(tx, blob, &instance.namespace).await?;
    }
    Ok(())
}
