//! Sets up a new network: allocates its address on the external network, then waits for its devices on the network
//! node. See docs/decisions/0011.

use muster_types::address::AddressType;
use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::network::NetworkState;
use muster_types::{Error, Result};

use super::step::{Implementation, Step, Undo, failure_message, parse_target_id};
use crate::app::App;
use crate::objects::network::address_pool::{floating_pool, quarantine};
use crate::objects::network::object;
use crate::objects::network::wait::wait_network_node;
use crate::queue::{CreateNetwork, Operation as _};
use muster_store::addresses::{self, Allocation};
use muster_store::networks::{self, NetworkRow};
use muster_store::operations::OperationRow;
use muster_store::transaction;

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    CreateNetwork::KIND,
    &[
        Step {
            name: "network_allocate_gateway",
            run: |app, row| Box::pin(allocate_gateway(app, row)),
            undo: Undo::NotNeeded("a network in error keeps its addresses until it is deleted"),
        },
        Step {
            name: "network_apply_create_network_node",
            run: |app, row| Box::pin(apply(app, row)),
            undo: Undo::Run(|app, row| Box::pin(fail(app, row))),
        },
    ],
);

/// Returns the network, or `None` if it no longer exists.
pub(super) async fn target(app: &App, row: &OperationRow) -> Result<Option<NetworkRow>> {
    Ok(networks::get(&*app.store, parse_target_id(row)?).await?)
}

async fn allocate_gateway(app: &App, row: &OperationRow) -> Result<()> {
    let Some(network) = target(app, row).await? else { return Ok(()) };
    if network.state != NetworkState::Initial || !network.provide_nat || network.floating_gateway.is_some() {
        return Ok(());
    }
    let pool = floating_pool(&*app.store).await?;
    transaction!(app.store, |tx| {
        // Another worker may have run this step since the network was read.
        let initial = networks::lock(tx, network.id, &[NetworkState::Initial]).await?;
        let current = networks::get(&mut *tx, network.id).await?;
        if !initial || current.is_none_or(|current| current.floating_gateway.is_some()) {
            return Ok(());
        }
        let allocation = Allocation::new(AddressType::Gateway, object(network.id));
        let address = addresses::allocate_any(tx, pool, &allocation, quarantine(app).reclaim_after).await?;
        let Some(address) = address else {
            return Err(Error::InsufficientCapacity("Unable to allocate floating gateway IP".into()).into());
        };
        Ok(networks::set_gateway(tx, network.id, Some(address)).await?)
    })
}

async fn apply(app: &App, row: &OperationRow) -> Result<()> {
    let Some(network) = target(app, row).await? else { return Ok(()) };
    if network.state != NetworkState::Initial {
        // Deleted meanwhile, or created by a worker that stopped before it recorded the step.
        return Ok(());
    }
    wait_network_node(app, network.id, row.created).await?;
    let (from, to) = (NetworkState::Initial, NetworkState::Created);
    let created =
        transaction!(app.store, |tx| { Ok(networks::set_state(tx, network.id, from, to, None).await?) })?;
    if created {
        app.events.record(
            Event::new(EventType::Mutate, object(network.id), EventMessage::NetworkState(to))
                .with("from", from.as_str()),
        );
    }
    Ok(())
}

/// Puts the network in error and removes it from all nodes.
async fn fail(app: &App, row: &OperationRow) -> Result<()> {
    let Some(network) = target(app, row).await? else { return Ok(()) };
    let reason = failure_message(row);
    let (from, to) = (NetworkState::Initial, NetworkState::Error);
    let failed = transaction!(app.store, |tx| {
        if !networks::set_state(tx, network.id, from, to, Some(reason)).await? {
            return Ok(false);
        }
        networks::set_unwanted(tx, network.id).await?;
        Ok(true)
    })?;
    if failed {
        app.networks.notify_changed();
        app.events.record(
            Event::new(EventType::Mutate, object(network.id), EventMessage::NetworkState(to))
                .with("from", from.as_str())
                .with("reason", reason),
        );
    }
    Ok(())
}
