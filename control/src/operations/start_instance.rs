//! Restarts the VM of an instance after its host went down.

use muster_types::Result;
use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::instance::{InstanceState, PowerState};

use super::step::{Implementation, Step, Undo, failure_message};
use crate::app::App;
use crate::objects::instance::{local_node, object, power, read_again, target_id};
use crate::objects::network::wait::wait_instance_networks;
use crate::queue::{Operation as _, StartInstance};
use muster_store::instances::{self, InstanceRow};
use muster_store::operations::OperationRow;
use muster_store::transaction;

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    StartInstance::KIND,
    &[Step {
        name: "instance_start",
        run: |app, row| Box::pin(start(app, row)),
        undo: Undo::Run(|app, row| Box::pin(fail(app, row))),
    }],
);

/// Returns the instance, or `None` if it no longer needs to run on the node of the operation.
async fn pending_instance(app: &App, row: &OperationRow) -> Result<Option<InstanceRow>> {
    let instance = instances::get(&*app.store, target_id(&row.target.id)?).await?;
    Ok(instance.filter(|instance| instance.node == row.node && is_pending(instance)))
}

fn is_pending(row: &InstanceRow) -> bool {
    row.state == InstanceState::Created && row.power_wanted != PowerState::Off
}

async fn start(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = pending_instance(app, row).await? else { return Ok(()) };
    let node = local_node(app, instance.node)?;
    wait_instance_networks(app, instance.id, node.identity().id, row.created).await?;
    let _lock = app.instance_locks.lock(instance.id).await;
    let Some(instance) = read_again(app, &instance).await?.filter(is_pending) else { return Ok(()) };
    power::start_vm(app, node, &instance).await?;
    power::write_power_state(app, node, instance.id).await
}

/// Records that the instance crashed, with the reason.
async fn fail(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = pending_instance(app, row).await? else { return Ok(()) };
    let reason = failure_message(row);
    let (id, power) = (instance.id, PowerState::Crashed);
    let changed = transaction!(app.store, |tx| {
        Ok(instances::lock_placed(tx, &instance).await? && instances::set_power(tx, id, power).await?)
    })?;
    if changed {
        let event = Event::new(EventType::Mutate, object(id), EventMessage::PowerState(power));
        app.events.record(event.with("reason", format!("it could not be started again: {reason}")));
    }
    Ok(())
}
