//! Deletes a network once it has no interfaces: its devices, its addresses, then its record. See docs/decisions/0011.

use muster_types::address::AddressType;
use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::network::NetworkState;
use muster_types::{Error, Result};

use super::create_network::target;
use super::step::{Implementation, Step, Undo};
use crate::app::App;
use crate::objects::network::address_pool::{floating_pool, quarantine};
use crate::objects::network::object;
use crate::objects::network::wait::wait_removed;
use crate::queue::{DeleteNetwork, Operation as _};
use muster_store::operations::OperationRow;
use muster_store::{addresses, dns_entries, interfaces, networks, references, transaction};

const UNDO_NOT_NEEDED: Undo = Undo::NotNeeded("the next attempt continues to delete the network");

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    DeleteNetwork::KIND,
    &[
        Step {
            name: "network_wait_for_interfaces",
            run: |app, row| Box::pin(wait_for_interfaces(app, row)),
            undo: UNDO_NOT_NEEDED,
        },
        Step {
            name: "network_apply_delete_network_node",
            run: |app, row| Box::pin(remove_devices(app, row)),
            undo: UNDO_NOT_NEEDED,
        },
        Step {
            name: "network_release_addresses",
            run: |app, row| Box::pin(release_addresses(app, row)),
            undo: UNDO_NOT_NEEDED,
        },
        Step {
            name: "network_delete_record",
            run: |app, row| Box::pin(delete_record(app, row)),
            undo: UNDO_NOT_NEEDED,
        },
    ],
);

async fn wait_for_interfaces(app: &App, row: &OperationRow) -> Result<()> {
    let Some(network) = target(app, row).await? else { return Ok(()) };
    let count = interfaces::count(&*app.store, network.id).await?;
    if count > 0 {
        return Err(Error::NotReady(format!("the network has {count} interfaces")));
    }
    // The network is in delete-wait, so none can be added.
    transaction!(app.store, |tx| {
        if networks::lock(tx, network.id, &[NetworkState::DeleteWait]).await? {
            networks::set_unwanted(tx, network.id).await?;
        }
        Ok(())
    })
}

async fn remove_devices(app: &App, row: &OperationRow) -> Result<()> {
    let Some(network) = target(app, row).await? else { return Ok(()) };
    wait_removed(app, network.id).await
}

async fn release_addresses(app: &App, row: &OperationRow) -> Result<()> {
    let Some(network) = target(app, row).await? else { return Ok(()) };
    let pool = floating_pool(&*app.store).await?;
    let id = network.id.to_string();
    for kind in [AddressType::Routed, AddressType::Gateway] {
        let allocated = addresses::of_kind(&*app.store, pool.network, kind).await?;
        for (address, _) in allocated.into_iter().filter(|(_, user)| *user == id) {
            transaction!(app.store, |tx| {
                let (user, quarantined) = (object(network.id), quarantine(app).enabled);
                addresses::release(tx, pool, address, kind, &user, quarantined).await?;
                if kind == AddressType::Gateway {
                    networks::set_gateway(tx, network.id, None).await?;
                }
                Ok(())
            })?;
        }
    }
    while transaction!(app.store, |tx| { Ok(addresses::remove_batch_of(tx, network.id).await?) })? {}
    transaction!(app.store, |tx| {
        references::remove_from(tx, &object(network.id)).await?;
        Ok(dns_entries::remove_of(tx, network.id).await?)
    })
}

async fn delete_record(app: &App, row: &OperationRow) -> Result<()> {
    let Some(network) = target(app, row).await? else { return Ok(()) };
    let (from, to) = (NetworkState::DeleteWait, NetworkState::Deleted);
    let deleted =
        transaction!(app.store, |tx| { Ok(networks::set_state(tx, network.id, from, to, None).await?) })?;
    if deleted {
        app.events.record(
            Event::new(EventType::Mutate, object(network.id), EventMessage::NetworkState(to))
                .with("from", from.as_str()),
        );
    }
    Ok(())
}
