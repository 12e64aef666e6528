//! Attaches an interface to the VM of an existing instance.

use muster_types::event::{Event, EventType};
use muster_types::instance::InstanceState;
use muster_types::interface::InterfaceState;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::{Error, Result};

use super::step::{Implementation, Step, Undo, failure_message};
use crate::app::App;
use crate::objects::instance::{local_node, object, plan, read_again, target_id};
use crate::objects::interface::{delete_in, set_state_in};
use crate::objects::network::plan::mtu;
use crate::objects::network::wait::wait_network_on_node;
use crate::queue::{Operation as _, PlugInterface};
use muster_store::instances::{self, InstanceRow};
use muster_store::interfaces::{self, InterfaceRow};
use muster_store::operations::OperationRow;
use muster_store::{networks, nodes, transaction};

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    PlugInterface::KIND,
    &[Step {
        name: "hot_plug_instance_interface",
        run: |app, row| Box::pin(plug(app, row)),
        undo: Undo::Run(|app, row| Box::pin(fail(app, row))),
    }],
);

/// Returns the instance and the interface, or `None` if the interface no longer needs to be attached.
async fn pending_interface(app: &App, row: &OperationRow) -> Result<Option<(InstanceRow, InterfaceRow)>> {
    let PlugInterface { interface: id } = PlugInterface::parameters(row)?;
    let interface = interfaces::get(&*app.store, id).await?;
    let instance = instances::get(&*app.store, target_id(&row.target.id)?).await?;
    let interface = interface.filter(|interface| interface.state == InterfaceState::Initial);
    Ok(instance.filter(|instance| instance.node == row.node && instance.state.is_active()).zip(interface))
}

async fn plug(app: &App, row: &OperationRow) -> Result<()> {
    let Some((instance, interface)) = pending_interface(app, row).await? else { return Ok(()) };
    if instance.state != InstanceState::Created {
        // Its creation attaches the interface.
        return Err(Error::NotReady(format!("instance {} is not ready ({})", instance.id, instance.state)));
    }
    let node = local_node(app, instance.node)?;
    wait_network_on_node(app, interface.network, node.identity().id, row.created).await?;
    let _lock = app.instance_locks.lock(instance.id).await;
    let Some((_, interface)) = pending_interface(app, row).await? else { return Ok(()) };
    let Some(instance) = read_again(app, &instance).await? else { return Ok(()) };
    let mtu = mtu(nodes::list(&*app.store).await?.iter(), &app.settings);
    let network = networks::get(&*app.store, interface.network).await?;
    let network = network.ok_or_else(|| Error::Conflict("the network was deleted".into()))?;
    node.vms().attach_nic(instance.id, &plan::nic(&interface, &network, mtu)).await?;
    let to = InterfaceState::Created;
    transaction!(app.store, |tx| { set_state_in(tx, &interface, to).await })?;
    app.events.record(
        Event::new(EventType::Mutate, object(instance.id), "interface was plugged in")
            .with_object(ObjectRef::new(ObjectType::Interface, interface.id))
            .with("interface_uuid", interface.id.to_string()),
    );
    Ok(())
}

/// Deletes the interface, and records the reason as an event of the instance.
async fn fail(app: &App, row: &OperationRow) -> Result<()> {
    let Some((instance, interface)) = pending_interface(app, row).await? else { return Ok(()) };
    transaction!(app.store, |tx| { delete_in(app, tx, interface.id, &[]).await })?;
    app.networks.notify_changed();
    app.events.record(
        Event::new(EventType::Mutate, object(instance.id), "failed to plug in interface")
            .with_object(ObjectRef::new(ObjectType::Interface, interface.id))
            .with("interface_uuid", interface.id.to_string())
            .with("reason", failure_message(row)),
    );
    Ok(())
}
