//! Prepares the target of a migration: fetches the images of the disks, waits for the networks, and prepares a VM that waits
//! for its memory or its disks. See docs/decisions/0070.

use muster_store::instance_migrations::{self, MigrationRow};
use muster_store::instances::{self, InstanceRow};
use muster_store::membership::MAX_CLOCK_SKEW;
use muster_store::operations::{self, OperationRow};
use muster_types::instance::InstanceState;
use muster_types::time::now;
use muster_types::{Error, Result};

use super::step::{Implementation, Step, Undo, failure_message};
use crate::app::App;
use crate::objects::instance::{image, incoming, local_node, migrate, plan, power, stale_vms, target_id};
use crate::objects::network::wait::wait_instance_networks;
use crate::queue::{Operation as _, PrepareMigration};

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    PrepareMigration::KIND,
    &[
        Step {
            name: "instance_preflight",
            run: |app, row| Box::pin(async move { end_wait(row, preflight(app, row).await) }),
            undo: Undo::NotNeeded("other instances may use the images; unused ones are removed later"),
        },
        Step {
            name: "network_ensure_mesh",
            run: |app, row| Box::pin(async move { end_wait(row, ensure_networks(app, row).await) }),
            undo: Undo::NotNeeded("networks are removed from the node with the migration"),
        },
        Step {
            name: "instance_prepare_incoming",
            run: |app, row| Box::pin(prepare(app, row)),
            undo: Undo::Run(|app, row| Box::pin(fail(app, row))),
        },
    ],
);

/// The seconds after which a target that waits for something gives the migration up.
const WAIT_TIMEOUT: f64 = 3600.0;

/// Ends the migration if the target has waited for too long.
fn end_wait(row: &OperationRow, outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(Error::NotReady(reason)) if now() - row.created >= WAIT_TIMEOUT => {
            Err(Error::Conflict(format!("the target was not ready within an hour: {reason}")))
        }
        outcome => outcome,
    }
}

/// Waits for operations of the instance that were requested before the migration, for example snapshots. Most others are rejected
/// during a migration.
async fn wait_operations(app: &App, row: &OperationRow) -> Result<()> {
    let operations = operations::of_target(&*app.store, &row.target).await?;
    let is_own = |other: &OperationRow| {
        other.id == row.id || other.depends_on.iter().any(|parent| parent.op_uuid == row.id)
    };
    // The clocks of their hosts may differ.
    let latest = row.created + 2.0 * MAX_CLOCK_SKEW;
    let earlier = operations
        .iter()
        .find(|other| migrate::is_unfinished(other) && !is_own(other) && other.created <= latest);
    earlier.map_or(Ok(()), |earlier| Err(migrate::unfinished(earlier)))
}

/// Returns the migration and its instance, which is still on the source.
pub(super) async fn pending_migration(
    app: &App,
    row: &OperationRow,
    generation: i64,
) -> Result<(MigrationRow, InstanceRow)> {
    let id = target_id(&row.target.id)?;
    let migration = instance_migrations::get(&*app.store, id).await?;
    let migration = migration.filter(|migration| migration.generation == generation);
    let migration = migration.ok_or_else(|| Error::Conflict("the migration has ended".into()))?;
    if migration.cancelled {
        return Err(Error::Conflict("the migration was cancelled".into()));
    }
    let instance = instances::get(&*app.store, id).await?;
    let instance = instance.filter(|instance| {
        instance.node == Some(migration.source) && instance.state == InstanceState::Created
    });
    let instance = instance.ok_or_else(|| Error::Conflict("the instance changed".into()))?;
    Ok((migration, instance))
}

async fn preflight(app: &App, row: &OperationRow) -> Result<()> {
    let PrepareMigration { generation, .. } = PrepareMigration::parameters(row)?;
    let (migration, instance) = pending_migration(app, row, generation).await?;
    wait_operations(app, row).await?;
    let node = local_node(app, Some(migration.target))?;
    // The node may have a VM of an earlier generation, whose disks must not be used.
    stale_vms::remove_stale(app, node).await?;
    if instance.spec.storage_uuid.is_some() {
        return Ok(());
    }
    for blob in instance.spec.disks.iter().filter_map(|disk| disk.blob_uuid) {
        image::ensure_on(app, &instance.namespace, node, blob).await?;
    }
    Ok(())
}

async fn ensure_networks(app: &App, row: &OperationRow) -> Result<()> {
    let PrepareMigration { generation, .. } = PrepareMigration::parameters(row)?;
    let (migration, instance) = pending_migration(app, row, generation).await?;
    wait_instance_networks(app, instance.id, migration.target, row.created).await
}

async fn prepare(app: &App, row: &OperationRow) -> Result<()> {
    let PrepareMigration { generation, mode } = PrepareMigration::parameters(row)?;
    let (migration, _) = pending_migration(app, row, generation).await?;
    let node = local_node(app, Some(migration.target))?;
    let _lock = app.instance_locks.lock(migration.instance).await;
    let (migration, instance) = pending_migration(app, row, generation).await?;
    // An attempt that was interrupted may have left a VM.
    node.vms().remove(instance.id).await?;
    for _ in 0..power::PORT_ATTEMPTS {
        let ports = power::choose_ports(app, node, &instance, Some(&migration)).await?;
        let mut plan = plan::build(app, &instance, ports).await?;
        plan.generation = generation;
        // The content of the NVRAM arrives with the memory or the disks.
        plan.nvram_template = None;
        // Disks on shared storage stay where they are.
        if plan.shared_storage.is_none() {
            node.vms().build(&plan).await?;
        }
        match node.vms().prepare_incoming(&plan, mode).await {
            Err(Error::PortInUse(reason)) => {
                tracing::info!(instance = %instance.id, reason, "retrying with other ports");
            }
            outcome => return outcome,
        }
    }
    Err(Error::Unavailable("no free console ports found".into()))
}

/// Ends the migration, and removes the VM from the target.
async fn fail(app: &App, row: &OperationRow) -> Result<()> {
    let PrepareMigration { generation, .. } = PrepareMigration::parameters(row)?;
    let id = target_id(&row.target.id)?;
    let migration = instance_migrations::get(&*app.store, id).await?;
    let Some(migration) = migration.filter(|migration| migration.generation == generation) else {
        return Ok(());
    };
    if migrate::end_failed(app, &migration).await? {
        migrate::record_failure(app, id, failure_message(row));
    }
    incoming::settle(app, local_node(app, Some(migration.target))?, id).await
}
