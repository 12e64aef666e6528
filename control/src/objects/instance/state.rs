//! Changes the state of instances, and releases their resources at the end.

use muster_store::instances::{self, InstanceRow};
use muster_store::operations::{self, OperationRow};
use muster_store::{
    StoreError, Tx, agent_operations, blob_namespaces, blobs, interfaces, references, transaction,
};
use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::ids::InstanceId;
use muster_types::instance::{InstanceState, PowerState};
use muster_types::{Error, Result};

use super::{fence, local_node, object, placement, target_id};
use crate::app::App;
use crate::objects::interface;

/// Sets the state of an instance and records the event. Returns `false` if it was not in the state `from`.
pub(crate) async fn set_state(
    app: &App,
    id: InstanceId,
    from: InstanceState,
    to: InstanceState,
    reason: Option<&str>,
) -> Result<bool> {
    let changed =
        transaction!(app.store, |tx| { Ok(instances::set_state(tx, id, from, to, reason).await?) })?;
    if changed {
        record_state_change(app, id, from, to, reason);
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

/// Fails the instance of a creation that failed permanently: removes its VM and releases its resources.
pub(crate) async fn fail_creation(app: &App, row: &OperationRow, reason: &str) -> Result<()> {
    let id = target_id(&row.target.id)?;
    let Some(instance) = instances::get(&*app.store, id).await? else { return Ok(()) };
    let failed = match instance.state {
        InstanceState::Initial | InstanceState::Preflight | InstanceState::Creating => {
            let Some(failed) = instance.state.error_state() else { return Ok(()) };
            if !set_state(app, id, instance.state, failed, Some(reason)).await? {
                return Err(Error::Unavailable("the instance changed state concurrently".into()));
            }
            failed
        }
        InstanceState::InitialError | InstanceState::PreflightError | InstanceState::CreatingError => {
            instance.state
        }
        _ => return Ok(()),
    };
    {
        let _lock = app.instance_locks.lock(id).await;
        local_node(app, instance.node)?.vms().remove(id).await?;
    }
    release(app, &instance, failed, InstanceState::Error).await
}

/// Releases all resources of an instance without a VM: addresses, ports, capacity, blobs.
pub(crate) async fn release(
    app: &App,
    instance: &InstanceRow,
    from: InstanceState,
    to: InstanceState,
) -> Result<()> {
    release_from_node(app, instance, from, to, false).await
}

/// Like [`release`]; with `node_deleted` it also clears the node and aborts the operations that only that node could
/// run.
pub(crate) async fn release_from_node(
    app: &App,
    instance: &InstanceRow,
    from: InstanceState,
    to: InstanceState,
    node_deleted: bool,
) -> Result<()> {
    let id = instance.id;
    // The state keeps interfaces from being added.
    let remaining = interfaces::of_instances(&*app.store, &[id]).await?;
    let released = transaction!(app.store, |tx| {
        let unfenced = fence::unfenced_node_in(app, tx, instance).await?;
        if !instances::set_state(tx, id, from, to, None).await? {
            return Ok(None);
        }
        for interface in &remaining {
            interface::delete_in(app, tx, interface.id, unfenced).await?;
        }
        if let Some(node) = instance.node {
            instances::set_ports(tx, id, node, None).await?;
        }
        end_use_of_blobs(tx, instance).await?;
        references::remove_from(tx, &object(id)).await?;
        if to == InstanceState::Deleted {
            agent_operations::delete_all(tx, id).await?;
        } else {
            agent_operations::fail_all(tx, id, "the instance is in error").await?;
        }
        instances::set_power(tx, id, PowerState::Off).await?;
        let current = instances::get(&mut *tx, id).await?;
        let ledger = match current {
            Some(current) => placement::release_in(tx, &current).await?,
            None => None,
        };
        if node_deleted {
            operations::abort_queued(tx, &object(id), "").await?;
            instances::clear_node(tx, id).await?;
        }
        Ok(Some(ledger))
    })?;
    let Some(ledger) = released else { return Ok(()) };
    if let Some((node, committed)) = ledger {
        app.placement.update(node, committed);
    }
    app.networks.notify_changed();
    record_state_change(app, id, from, to, None);
    Ok(())
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
