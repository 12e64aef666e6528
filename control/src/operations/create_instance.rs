//! Creates the VM of a new instance: fetches its images to the node, waits for its networks, builds and starts it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::instance::{DiskSpecRecord, InstanceState, PowerState};
use muster_types::interface::InterfaceState;
use muster_types::node::NodeApi;
use muster_types::spec::DiskType;
use muster_types::{Error, Result};

use super::step::{Implementation, Step, Undo, failure_message};
use crate::app::App;
use crate::objects::instance::create::reference_blobs_in;
use crate::objects::instance::state::{fail_creation, record_state_change, set_state, settle_disks_in};
use crate::objects::instance::{
    agent, image, local_node, object, placement, plan, power, read_again, target_id,
};
use crate::objects::network::wait::wait_instance_networks;
use crate::queue::{CreateInstance, Operation as _};
use muster_store::instances::{self, InstanceRow};
use muster_store::operations::OperationRow;
use muster_store::{interfaces, transaction};

/// Waits until the networks of an instance are on its node.
pub(super) const ENSURE_NETWORKS: Step = Step {
    name: "network_ensure_mesh",
    run: |app, row| Box::pin(ensure_networks(app, row)),
    undo: Undo::NotNeeded("networks are removed from the node after the interfaces"),
};

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    CreateInstance::KIND,
    &[
        Step {
            name: "instance_preflight",
            run: |app, row| {
                Box::pin(async move {
                    preflight(app, row).await?;
                    commit_disks(app, row).await
                })
            },
            undo: Undo::NotNeeded("other instances may use the images; unused ones are removed later"),
        },
        ENSURE_NETWORKS,
        Step {
            name: "instance_start",
            run: |app, row| Box::pin(start(app, row)),
            undo: Undo::Run(|app, row| Box::pin(fail(app, row))),
        },
    ],
);

/// The time after which an event reports how long it took to prepare an image.
const SLOW_IMAGE_THRESHOLD: Duration = Duration::from_millis(500);

/// The number of bytes in a GB of disk sizes.
const GIB: u64 = 1 << 30;

/// The states of an instance that is being created.
const CREATING_STATES: &[InstanceState] =
    &[InstanceState::Initial, InstanceState::Preflight, InstanceState::Creating];

/// Returns the instance, or `None` if it no longer needs to be created on the node of the operation.
pub(super) async fn pending_instance(app: &App, row: &OperationRow) -> Result<Option<InstanceRow>> {
    let instance = instances::get(&*app.store, target_id(&row.target.id)?).await?;
    Ok(instance.filter(|instance| instance.node == row.node && is_pending(instance)))
}

/// Returns whether an instance needs to be created.
pub(super) fn is_pending(row: &InstanceRow) -> bool {
    row.state.is_active() && row.state != InstanceState::Created
}

pub(super) async fn preflight(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = pending_instance(app, row).await? else { return Ok(()) };
    if instance.state == InstanceState::Initial {
        set_state(app, &instance, InstanceState::Preflight, None).await?;
    }
    if instance.spec.has_shared_disks {
        // Its images are part of its disks.
        return Ok(());
    }
    let node = local_node(app, instance.node)?;
    let mut spec = instance.spec.clone();
    for (number, artifact) in std::mem::take(&mut spec.awaited) {
        let blob = image::fetched_blob(app, artifact).await?;
        let disk = spec.disks.get_mut(number);
        let disk =
            disk.ok_or_else(|| Error::Internal(format!("instance {}: no disk {number}", instance.id)))?;
        disk.blob_uuid = Some(blob);
    }
    if spec != instance.spec {
        // From now on the blobs of the disks are fixed.
        transaction!(app.store, |tx| {
            // Not if it is being deleted: the references would never be removed.
            if !instances::lock(tx, instance.id, CREATING_STATES).await?
                || !instances::lock_placed(tx, &instance).await?
            {
                return Ok(());
            }
            reference_blobs_in(tx, instance.id, &spec).await?;
            Ok(instances::set_spec(tx, instance.id, &spec, &instance.disks).await?)
        })?;
    }
    let mut sizes = Vec::with_capacity(spec.disks.len());
    for (number, disk) in spec.disks.iter_mut().enumerate() {
        sizes.push(match disk.blob_uuid {
            Some(blob) => {
                let needed = prepare_image(app, node, &instance, disk, blob).await?;
                require_fit(number, disk.spec.size, needed)?;
                Some(needed)
            }
            None => None,
        });
    }
    if let Some(template) = spec.nvram_template {
        crate::objects::blob_copy::ensure_local(app, node, template).await?;
    }
    let disks = plan::disk_records(&spec, &sizes);
    if disks != instance.disks || spec != instance.spec {
        transaction!(app.store, |tx| {
            if !instances::lock_placed(tx, &instance).await? {
                return Ok(());
            }
            Ok(instances::set_spec(tx, instance.id, &spec, &disks).await?)
        })?;
    }
    Ok(())
}

/// Commits the space of disks without a size, which is that of their images.
async fn commit_disks(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = pending_instance(app, row).await? else { return Ok(()) };
    if instance.spec.disks.iter().all(|disk| disk.spec.size.is_some()) {
        return Ok(());
    }
    let disk_gb = image::disk_gb(app, &instance.spec).await?;
    if disk_gb <= instance.committed.disk_gb {
        return Ok(());
    }
    let max_age = Duration::from_secs(app.settings.scheduler_cache_timeout);
    let nodes = app.placement.get(&app.store, max_age).await?;
    let ledger = transaction!(app.store, |tx| {
        // The capacity of an instance that is being deleted is released.
        if !instances::lock(tx, instance.id, CREATING_STATES).await?
            || !instances::lock_placed(tx, &instance).await?
        {
            return Ok(None);
        }
        placement::add_disk_in(app, tx, &instance, disk_gb, &nodes).await
    })?;
    if let Some((node, committed)) = ledger {
        app.placement.update(node, committed);
    }
    Ok(())
}

/// Rejects a disk that is smaller than its image. `size` is in GB, `needed` in bytes.
fn require_fit(number: usize, size: Option<u64>, needed: u64) -> Result<()> {
    let Some(size) = size.filter(|size| size.saturating_mul(GIB) < needed) else { return Ok(()) };
    let needed = needed.div_ceil(GIB);
    Err(Error::Invalid(format!(
        "disk[{number}].size: {size} GB is smaller than the image, which needs {needed} GB"
    )))
}

/// Ensures that the node has an image in a usable format. Returns the size of its disk.
async fn prepare_image(
    app: &App,
    node: &Arc<dyn NodeApi>,
    instance: &InstanceRow,
    disk: &mut DiskSpecRecord,
    blob: muster_types::ids::BlobId,
) -> Result<u64> {
    let started = Instant::now();
    let facts = image::ensure_on(app, &instance.namespace, node, blob).await?;
    if started.elapsed() > SLOW_IMAGE_THRESHOLD {
        let event = Event::new(EventType::Status, object(instance.id), EventMessage::ImageReady);
        app.events.record(
            event
                .with("blob_uuid", blob.to_string())
                .with("node", node.identity().name.clone())
                .with("seconds", started.elapsed().as_secs_f64()),
        );
    }
    if facts.format == muster_types::blob::ImageFormat::Iso {
        // Optical discs are read-only.
        disk.spec.disk_type = DiskType::Cdrom;
    }
    Ok(facts.virtual_size)
}

async fn ensure_networks(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = pending_instance(app, row).await? else { return Ok(()) };
    let node = local_node(app, instance.node)?.identity().id;
    wait_instance_networks(app, instance.id, node, row.created).await
}

pub(super) async fn start(app: &App, row: &OperationRow) -> Result<()> {
    let Some(instance) = pending_instance(app, row).await? else { return Ok(()) };
    let id = instance.id;
    if instance.state == InstanceState::Preflight {
        set_state(app, &instance, InstanceState::Creating, None).await?;
    }
    let node = local_node(app, instance.node)?;
    // The plan includes these; interfaces that are added while it starts are plugged in afterwards.
    let mut initial = interfaces::of_instances(&*app.store, &[id]).await?;
    initial.retain(|interface| interface.state == InterfaceState::Initial);
    // An interface that was added since the last step may be on another network.
    wait_instance_networks(app, id, node.identity().id, row.created).await?;
    let _lock = app.instance_locks.lock(id).await;
    // It may have been deleted or placed again meanwhile.
    let Some(instance) = read_again(app, &instance).await?.filter(is_pending) else { return Ok(()) };
    power::start_vm(app, node, &instance).await?;
    let created = transaction!(app.store, |tx| {
        let (from, to) = (InstanceState::Creating, InstanceState::Created);
        if !instances::lock_placed(tx, &instance).await?
            || !instances::set_state(tx, id, from, to, None).await?
        {
            return Ok(false);
        }
        settle_disks_in(tx, &instance).await?;
        instances::set_power(tx, id, PowerState::On).await?;
        instances::set_agent_state(tx, id, agent::state_for_power(&instance, PowerState::On)).await?;
        for interface in &initial {
            interfaces::set_state(tx, interface.id, InterfaceState::Initial, InterfaceState::Created).await?;
        }
        Ok(true)
    })?;
    if created {
        record_state_change(app, id, InstanceState::Creating, InstanceState::Created, None);
    }
    // It may have stopped already.
    power::write_power_state(app, node, id).await
}

/// Puts the instance in error and releases everything that it uses.
async fn fail(app: &App, row: &OperationRow) -> Result<()> {
    fail_creation(app, row, failure_message(row)).await
}
