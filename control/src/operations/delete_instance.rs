//! Takes an instance apart: its machine, then everything that it had, then the record says so.

use muster_types::ids::NetworkId;
use muster_types::instance::InstanceState;
use muster_types::{Error, Result};

use super::step::{Implementation, Step, Undo};
use crate::app::App;
use crate::objects::instance::state::release;
use crate::objects::instance::{local_node, target_id};
use crate::objects::interface;
use crate::objects::network::wait::wait_interface_removed;
use crate::queue::{DeleteInstance, Operation as _, SnapshotInstance};
use muster_store::instances::{self, InstanceRow};
use muster_store::operations::OperationRow;
use muster_store::{interfaces, operations, transaction};

const NO_WAY_BACK: Undo = Undo::NotNeeded("an instance that is being deleted is deleted by the next attempt");

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    DeleteInstance::KIND,
    &[
        Step {
            name: "instance_power_off",
            run: |app, row| Box::pin(remove_machine(app, row)),
            undo: NO_WAY_BACK,
        },
        Step {
            name: "instance_delete_interfaces",
            run: |app, row| Box::pin(delete_interfaces(app, row)),
            undo: NO_WAY_BACK,
        },
        Step { name: "instance_delete", run: |app, row| Box::pin(delete(app, row)), undo: NO_WAY_BACK },
    ],
);

async fn going(app: &App, row: &OperationRow) -> Result<Option<InstanceRow>> {
    let instance = instances::get(&*app.store, target_id(&row.target.id)?).await?;
    Ok(instance.filter(|row| row.state == InstanceState::DeleteWait))
}

async fn remove_machine(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = going(app, row).await? else { return Ok(()) };
    if instance.node.is_none() {
        // It never had a place.
        return Ok(());
    }
    // What was asked for before is still copied.
    if operations::is_pending(&*app.store, &row.target, SnapshotInstance::KIND.name).await? {
        return Err(Error::NotReady("a copy of its disks is being made".into()));
    }
    let _lock = app.instance_locks.lock(instance.id).await;
    local_node(app, instance.node)?.vms().remove(instance.id).await
}

/// The interfaces go before the record does, so that nothing of an instance that is deleted is left on its node.
async fn delete_interfaces(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = going(app, row).await? else { return Ok(()) };
    let left = interfaces::of_instances(&*app.store, &[instance.id]).await?;
    if left.is_empty() {
        return Ok(());
    }
    transaction!(app.store, |tx| {
        for interface in &left {
            interface::delete_in(app, tx, interface.id).await?;
        }
        Ok(())
    })?;
    app.networks.notify_changed();
    let mut networks: Vec<NetworkId> = left.iter().map(|interface| interface.network).collect();
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
    let Some(instance) = going(app, row).await? else { return Ok(()) };
    release(app, &instance, InstanceState::DeleteWait, InstanceState::Deleted).await
}
