//! Makes the machine of a new instance: its images come to the node, its networks too, then it is built and started.

use std::sync::Arc;

use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::ids::InstanceId;
use muster_types::instance::{DiskSpecRecord, InstanceState, PowerState};
use muster_types::interface::InterfaceState;
use muster_types::node::NodeApi;
use muster_types::operation::OperationType;
use muster_types::spec::DiskType;
use muster_types::{Error, Result};

use super::{Kind, Lane, Step, Undo};
use crate::app::App;
use crate::objects::agent_operation::end;
use crate::objects::instance::create::use_blobs_in;
use crate::objects::instance::{image, object, own_node, placement, plan, power, target};
use crate::objects::interface;
use crate::reconcile::networks::follow_instance;
use crate::store::instances::{self, InstanceRow};
use crate::store::operations::OperationRow;
use crate::store::{interfaces, operations, references, transaction};

pub const KIND: Kind = Kind {
    operation_type: OperationType::Instance,
    name: "create_instance",
    removes_target: false,
    lane: Lane::Machine,
    steps: &[
        Step {
            name: "instance_preflight",
            run: |app, row| Box::pin(preflight(app, row)),
            undo: Undo::NotNeeded("images are kept for others, until nobody has used them for long"),
        },
        Step {
            name: "network_ensure_mesh",
            run: |app, row| Box::pin(ensure_networks(app, row)),
            undo: Undo::NotNeeded(
                "what the node has of networks follows the interfaces, which go with the start",
            ),
        },
        Step {
            name: "instance_start",
            run: |app, row| Box::pin(start(app, row)),
            undo: Undo::Run(|app, row| Box::pin(fail(app, row))),
        },
    ],
};

/// States of an instance that is being made.
const MAKING: &[InstanceState] = &[InstanceState::Initial, InstanceState::Preflight, InstanceState::Creating];

/// The instance, while it is still to be made.
async fn making(app: &App, row: &OperationRow) -> Result<Option<InstanceRow>> {
    let instance = instances::get(&*app.store, target(&row.target.id)?).await?;
    Ok(instance.filter(|row| row.state.is_alive() && row.state != InstanceState::Created))
}

/// Moves an instance on, and tells of it. Says whether it was where it was thought to be.
pub(crate) async fn move_on(
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

pub(super) fn announce(
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

async fn preflight(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = making(app, row).await? else { return Ok(()) };
    if instance.state == InstanceState::Initial {
        move_on(app, instance.id, InstanceState::Initial, InstanceState::Preflight, None).await?;
    }
    let node = own_node(app, instance.node)?;
    let mut spec = instance.spec.clone();
    for (number, artifact) in std::mem::take(&mut spec.awaited) {
        let blob = image::awaited(app, artifact).await?;
        if let Some(disk) = spec.disks.get_mut(number) {
            disk.blob_uuid = Some(blob);
        }
    }
    if spec != instance.spec {
        // From now on it is known what the disks begin as, and that stays.
        transaction!(app.store, |tx| {
            // Not if it is deleted meanwhile: nothing would end that use.
            if !instances::hold(tx, instance.id, MAKING).await? {
                return Ok(());
            }
            use_blobs_in(tx, instance.id, &spec).await?;
            Ok(instances::set_spec(tx, instance.id, &spec, &instance.disks).await?)
        })?;
    }
    let mut sizes = Vec::with_capacity(spec.disks.len());
    for disk in &mut spec.disks {
        sizes.push(match disk.blob_uuid {
            Some(blob) => Some(ready_image(app, node, instance.id, disk, blob).await?),
            None => None,
        });
    }
    if let Some(template) = spec.nvram_blob() {
        crate::reconcile::blob_copies::ensure_here(app, node, template).await?;
    }
    let disks = plan::lay_out(&spec, &sizes);
    if disks != instance.disks || spec != instance.spec {
        transaction!(app.store, |tx| { Ok(instances::set_spec(tx, instance.id, &spec, &disks).await?) })?;
    }
    Ok(())
}

/// Has an image on the node, ready to be used, and says how large a disk it makes.
async fn ready_image(
    app: &App,
    node: &Arc<dyn NodeApi>,
    id: InstanceId,
    disk: &mut DiskSpecRecord,
    blob: muster_types::ids::BlobId,
) -> Result<u64> {
    let started = std::time::Instant::now();
    let facts = image::ensure_on(app, node, blob).await?;
    if started.elapsed().as_millis() > 500 {
        let event = Event::new(EventType::Status, object(id), EventMessage::ImageReady);
        app.events.record(
            event
                .with("blob_uuid", blob.to_string())
                .with("node", node.identity().name.clone())
                .with("seconds", started.elapsed().as_secs_f64()),
        );
    }
    if facts.format == muster_types::blob::ImageFormat::Iso {
        // Nobody can write to an optical disc.
        disk.spec.disk_type = DiskType::Cdrom;
    }
    Ok(facts.virtual_size)
}

async fn ensure_networks(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = making(app, row).await? else { return Ok(()) };
    let node = own_node(app, instance.node)?.identity().id;
    follow_instance(app, instance.id, node, row.created).await
}

async fn start(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = making(app, row).await? else { return Ok(()) };
    let id = instance.id;
    if instance.state == InstanceState::Preflight {
        move_on(app, id, InstanceState::Preflight, InstanceState::Creating, None).await?;
    }
    let node = own_node(app, instance.node)?;
    // Those that its plan certainly has; others may come while it starts, and are plugged in afterwards.
    let mut fresh = interfaces::of_instances(&*app.store, &[id]).await?;
    fresh.retain(|interface| interface.state == InterfaceState::Initial);
    // One that came since the last step may be on another network.
    follow_instance(app, id, node.identity().id, row.created).await?;
    let _turn = app.turns.take(id).await;
    // It may have been deleted while this waited.
    let Some(instance) = making(app, row).await? else { return Ok(()) };
    power::switch_on(app, node, &instance).await?;
    let created = transaction!(app.store, |tx| {
        let (from, to) = (InstanceState::Creating, InstanceState::Created);
        if !instances::set_state(tx, id, from, to, None).await? {
            return Ok(false);
        }
        instances::set_power(tx, id, PowerState::On).await?;
        instances::set_agent_state(tx, id, power::agent_state(&instance, PowerState::On)).await?;
        for interface in &fresh {
            interfaces::set_state(tx, interface.id, InterfaceState::Initial, InterfaceState::Created).await?;
        }
        Ok(true)
    })?;
    if created {
        announce(app, id, InstanceState::Creating, InstanceState::Created, None);
    }
    // It may have ended already.
    power::write_seen(app, node, id).await
}

/// What cannot be made ends in error, with the reason, and gives back all that it had.
async fn fail(app: &App, row: &OperationRow) -> Result<()> {
    let report = row.error_report.as_ref();
    give_up(app, row, report.map_or("unknown", |report| report.message.as_str())).await
}

pub(super) async fn give_up(app: &App, row: &OperationRow, reason: &str) -> Result<()> {
    let id = target(&row.target.id)?;
    let Some(instance) = instances::get(&*app.store, id).await? else { return Ok(()) };
    let failed = match instance.state {
        InstanceState::Initial | InstanceState::Preflight | InstanceState::Creating => {
            let Some(failed) = instance.state.failed() else { return Ok(()) };
            if !move_on(app, id, instance.state, failed, Some(reason)).await? {
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
        let _turn = app.turns.take(id).await;
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
            instances::unplace(tx, id).await?;
        }
        Ok(Some(ledger))
    })?;
    let Some(ledger) = given_back else { return Ok(()) };
    if let Some((node, committed)) = ledger {
        app.placement.correct(node, committed);
    }
    app.networks.changed();
    announce(app, id, from, to, None);
    Ok(())
}
