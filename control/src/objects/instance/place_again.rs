//! Places instances on another node whose creation or evacuation has not reached the start of the VM when their node becomes missing.

use muster_store::instances::{self, InstanceRow};
use muster_store::networks;
use muster_store::nodes::NodeRow;
use muster_store::{interfaces, operations, transaction};
use muster_types::event::{Event, EventType};
use muster_types::ids::NodeId;
use muster_types::instance::first_generation;
use muster_types::{Error, Result};

use super::{object, placement};
use crate::app::App;
use crate::objects::network::state::PRESENT;
use crate::scheduler::PlacementRequest;

/// Places the instances of a missing node again of which it has nothing: the step that builds and starts the VM cannot have begun.
/// Those for which no other node has capacity wait. A failure of one does not affect the others.
pub(crate) async fn run(app: &App, missing: &NodeRow) -> Result<()> {
    // What no node has capacity for, so that many equal instances that wait do not cause a search each.
    let mut refused: Vec<(String, PlacementRequest)> = Vec::new();
    for row in instances::awaiting_creation(&*app.store, missing.identity.id).await? {
        // An instance that was requested on this node waits for it, unless it was evacuated from there.
        if row.spec.requested_placement.is_some() && row.generation == first_generation() {
            continue;
        }
        let request = match placement::request_again(app, &row).await {
            Ok(request) => request,
            Err(error) => {
                tracing::warn!(instance = %row.id, %error, "failed to place instance again");
                continue;
            }
        };
        if refused.iter().any(|(namespace, same)| *namespace == row.namespace && *same == request) {
            continue;
        }
        match place_again(app, missing.identity.id, &row, &request).await {
            Ok(Some(node)) => {
                tracing::info!(instance = %row.id, from = missing.identity.name, to = node, "placed instance again");
                let message = "placed on another node, because its node is missing";
                let event = Event::new(EventType::Mutate, object(row.id), message);
                app.events.record(event.with("from", missing.identity.name.clone()).with("node", node));
            }
            Ok(None) => {}
            Err(Error::Unschedulable { text, .. }) => {
                tracing::debug!(instance = %row.id, reason = text, "instance waits for its missing node");
                refused.push((row.namespace, request));
            }
            Err(error) => tracing::warn!(instance = %row.id, %error, "failed to place instance again"),
        }
    }
    Ok(())
}

/// Moves an instance to another node. Returns its name, or `None` if the creation has started meanwhile.
async fn place_again(
    app: &App,
    from: NodeId,
    row: &InstanceRow,
    request: &PlacementRequest,
) -> Result<Option<String>> {
    let candidates = placement::find_uncached(app, &row.namespace, request).await?;
    candidates.nodes()?;
    let attached = interfaces::of_instances(&*app.store, &[row.id]).await?;
    let moved = transaction!(app.store, |tx| {
        if !instances::lock_awaiting_creation(tx, row.id, from).await? {
            return Ok(None);
        }
        // A worker of the node may have committed the sizes of the disks meanwhile.
        let current = instances::get(&mut *tx, row.id).await?;
        if current.is_none_or(|current| current.committed != row.committed || current.spec != row.spec) {
            return Ok(None);
        }
        let released = placement::release_in(tx, row).await?;
        let allocation = placement::allocate_in(app, tx, &row.namespace, request, &candidates).await?;
        // The error also reverts the release.
        let allocation = allocation.map_err(|refused| placement::no_capacity(&refused))?;
        instances::set_node(tx, row.id, allocation.node, allocation.allocated).await?;
        interfaces::set_node(tx, row.id, allocation.node).await?;
        operations::move_to_node(tx, &object(row.id), allocation.node).await?;
        for interface in &attached {
            networks::bump_generation(tx, interface.network, PRESENT).await?;
        }
        Ok(Some((released, allocation)))
    })?;
    let Some((released, allocation)) = moved else { return Ok(None) };
    if let Some((node, committed)) = released {
        app.placement.update(node, committed);
    }
    placement::update_cache(app, &allocation);
    app.networks.notify_changed();
    app.queue.wake();
    Ok(Some(allocation.name))
}
