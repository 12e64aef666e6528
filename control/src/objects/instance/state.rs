//! Moves instances between states, and releases what they hold when they end.

use muster_store::instances::{self, InstanceRow};
use muster_store::operations::{self, OperationRow};
use muster_store::{interfaces, references, transaction};
use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::ids::InstanceId;
use muster_types::instance::{InstanceState, PowerState};
use muster_types::{Error, Result};

use super::{object, own_node, placement, target};
use crate::app::App;
use crate::objects::agent_operation::end;
use crate::objects::interface;

/// Moves an instance on, and tells of it. Says whether it was where it was thought to be.
pub(crate) async fn set_state(
    app: &App,
    id: InstanceId,
    from: InstanceState,
    to: InstanceState,
    reason: Option<&str>,
) -> Result<bool> {
    let moved = transaction!(app.store, |tx| { Ok(instances::set_state(tx, id, from, to, reason).await?) })?;
    if moved {
        announce(app, id, from, to, reason);
    }
    Ok(moved)
}

pub(crate) fn announce(
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

pub(crate) async fn give_up(app: &App, row: &OperationRow, reason: &str) -> Result<()> {
    let id = target(&row.target.id)?;
    let Some(instance) = instances::get(&*app.store, id).await? else { return Ok(()) };
    let failed = match instance.state {
        InstanceState::Initial | InstanceState::Preflight | InstanceState::Creating => {
            let Some(failed) = instance.state.failed() else { return Ok(()) };
            if !set_state(app, id, instance.state, failed, Some(reason)).await? {
                return Err(Error::Unavailable("the instance changed while it failed".into()));
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
        own_node(app, instance.node)?.vms().remove(id).await?;
    }
    release(app, &instance, failed, InstanceState::Error).await
}

/// Gives back all that an instance without a machine had: addresses, ports, room, contents.
pub(crate) async fn release(
    app: &App,
    instance: &InstanceRow,
    from: InstanceState,
    to: InstanceState,
) -> Result<()> {
    release_from(app, instance, from, to, false).await
}

/// The same, if its node is gone, too: it is on none any more, and nobody waits for what only that could do.
pub(crate) async fn release_from(
    app: &App,
    instance: &InstanceRow,
    from: InstanceState,
    to: InstanceState,
    node_is_gone: bool,
) -> Result<()> {
    let id = instance.id;
    // No interface can come any more: the instance is on its way out.
    let left = interfaces::of_instances(&*app.store, &[id]).await?;
    let given_back = transaction!(app.store, |tx| {
        if !instances::set_state(tx, id, from, to, None).await? {
            return Ok(None);
        }
        for interface in &left {
            interface::delete_in(app, tx, interface.id).await?;
        }
        if let Some(node) = instance.node {
            instances::set_ports(tx, id, node, None).await?;
        }
        references::remove_from(tx, &object(id)).await?;
        end::leave_in(tx, id, to == InstanceState::Deleted).await?;
        instances::set_power(tx, id, PowerState::Off).await?;
        let fresh = instances::get(&mut *tx, id).await?;
        let ledger = match fresh {
            Some(fresh) => placement::give_back_in(tx, &fresh).await?,
            None => None,
        };
        if node_is_gone {
            operations::abort_queued(tx, &object(id), "").await?;
            instances::clear_node(tx, id).await?;
        }
        Ok(Some(ledger))
    })?;
    let Some(ledger) = given_back else { return Ok(()) };
    if let Some((node, committed)) = ledger {
        app.placement.update(node, committed);
    }
    app.networks.notify_changed();
    announce(app, id, from, to, None);
    Ok(())
}
