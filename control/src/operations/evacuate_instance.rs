//! Creates the VM of an instance again on another node, because the host of its former node is dead. The request has
//! placed it and chosen the content of its disks. See docs/decisions/0052.

use muster_types::Result;
use muster_types::instance::{InstanceState, PowerState};

use super::create_instance::{self, is_pending, pending_instance};
use super::step::{Implementation, Step, Undo, failure_message};
use crate::app::App;
use crate::objects::instance::state::{record_state_change, set_state, settle_disks_in};
use crate::objects::instance::{agent, local_node, lost, power, read_again, stale_vms};
use crate::queue::{EvacuateInstance, Operation as _};
use muster_store::operations::OperationRow;
use muster_store::{instances, transaction};

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    EvacuateInstance::KIND,
    &[
        Step {
            name: "instance_preflight",
            run: |app, row| Box::pin(preflight(app, row)),
            undo: Undo::NotNeeded("other instances may use the images; unused ones are removed later"),
        },
        create_instance::ENSURE_NETWORKS,
        Step {
            name: "instance_start",
            run: |app, row| Box::pin(start(app, row)),
            undo: Undo::Run(|app, row| Box::pin(fail(app, row))),
        },
    ],
);

async fn preflight(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = pending_instance(app, row).await? else { return Ok(()) };
    // The node may have a VM of an earlier generation, whose disks must not be used.
    stale_vms::remove_stale(app, local_node(app, instance.node)?).await?;
    create_instance::preflight(app, row).await
}

async fn start(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = pending_instance(app, row).await? else { return Ok(()) };
    if instance.power_wanted != PowerState::Off {
        return create_instance::start(app, row).await;
    }
    // It was off, and stays off.
    let (id, off) = (instance.id, PowerState::Off);
    if instance.state == InstanceState::Preflight {
        set_state(app, &instance, InstanceState::Creating, None).await?;
    }
    let node = local_node(app, instance.node)?;
    let _lock = app.instance_locks.lock(id).await;
    let Some(instance) = read_again(app, &instance).await?.filter(is_pending) else { return Ok(()) };
    power::build_vm(app, node, &instance).await?;
    let (from, to) = (InstanceState::Creating, InstanceState::Created);
    let created = transaction!(app.store, |tx| {
        if !instances::lock_placed(tx, &instance).await?
            || !instances::set_state(tx, id, from, to, None).await?
        {
            return Ok(false);
        }
        settle_disks_in(tx, &instance).await?;
        instances::set_power(tx, id, off).await?;
        instances::set_agent_state(tx, id, agent::state_for_power(&instance, off)).await?;
        Ok(true)
    })?;
    if created {
        record_state_change(app, id, from, to, None);
    }
    Ok(())
}

/// Puts the instance in error. It keeps its addresses, and its snapshots and images are unchanged.
async fn fail(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = pending_instance(app, row).await? else { return Ok(()) };
    let EvacuateInstance { from } = EvacuateInstance::parameters(row)?;
    let reason = format!("failed to evacuate it from node {from}: {}", failure_message(row));
    lost::fail_evacuation(app, &instance, &reason, row.id).await
}
