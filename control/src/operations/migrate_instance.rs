//! Migrates the VM of an instance, live or while it is off, to the target that `prepare_migration` has prepared. See docs/decisions/0070.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::instance_migrations;
use muster_store::operations::OperationRow;
use muster_store::{instances, nodes};
use muster_types::event::{Event, EventType};
use muster_types::ids::InstanceId;
use muster_types::instance::PowerState;
use muster_types::node::NodeApi;
use muster_types::object::NameOrId;
use muster_types::vm::VmPower;
use muster_types::{Error, Result};

use super::prepare_migration::pending_migration;
use super::step::{Implementation, Step, Undo, failure_message};
use super::worker::is_retryable;
use crate::app::App;
use crate::objects::instance::outgoing::{OutgoingMigration, record_progress};
use crate::objects::instance::{incoming, local_node, migrate, object, power, target_id};
use crate::queue::{MigrateInstance, Operation as _};

/// How long a guest may take to power off before its VM is stopped.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);
const POWER_POLL_INTERVAL: Duration = Duration::from_millis(100);

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    MigrateInstance::KIND,
    &[
        Step {
            name: "instance_migrate",
            run: |app, row| Box::pin(migrate(app, row)),
            undo: Undo::Run(|app, row| Box::pin(fail(app, row))),
        },
        Step {
            name: "instance_remove_source",
            run: |app, row| Box::pin(remove_source(app, row)),
            undo: Undo::NotNeeded("the reconciler of the source moves a stale VM to lost+found"),
        },
    ],
);

/// Returns whether the instance has moved to the target.
async fn is_moved(app: &App, row: &OperationRow, parameters: &MigrateInstance) -> Result<bool> {
    let instance = instances::get(&*app.store, target_id(&row.target.id)?).await?;
    Ok(instance.is_some_and(|instance| instance.generation >= parameters.generation))
}

async fn migrate(app: &App, row: &OperationRow) -> Result<()> {
    let parameters = MigrateInstance::parameters(row)?;
    if is_moved(app, row, &parameters).await? {
        return Ok(());
    }
    let (migration, instance) = pending_migration(app, row, parameters.generation).await?;
    if row.progress.is_some() {
        // The VM on the target received a part, and cannot receive anything else.
        return Err(Error::Conflict("the migration was interrupted".into()));
    }
    let (id, node) = (instance.id, local_node(app, Some(parameters.source))?);
    let target = nodes::get(&*app.store, &NameOrId::Id(parameters.target)).await?;
    let target = target.ok_or_else(|| Error::Conflict("the target was deleted".into()))?;
    let target_name = target.identity.name.clone();
    if parameters.restart {
        shut_down(node, id).await?;
        let _lock = app.instance_locks.lock(id).await;
        pending_migration(app, row, parameters.generation).await?;
        node.vms().stop(id).await?;
        power::write_power_state(app, node, id).await?;
    }
    // Another attempt may shut the guest down, but not send a part again.
    record_progress(app, row, None).await?;
    let outgoing = OutgoingMigration::new(app, row, migration, target);
    let downtime = match node.vms().migrate(id, parameters.mode, &parameters.settings, &outgoing).await {
        // Another attempt needs another target, unless only the rest is missing.
        Err(error) if is_retryable(&error) && !is_moved(app, row, &parameters).await? => {
            return Err(Error::Conflict(error.to_string()));
        }
        outcome => outcome?,
    };
    // The instance is locked: nothing else finds the VM while it is stale.
    node.vms().remove(id).await?;
    let local_target = outgoing.local_target().cloned();
    drop(outgoing);
    let event = Event::new(EventType::Status, object(id), "moved to the target of its migration")
        .with("from_node", node.identity().name.clone())
        .with("node", target_name)
        .with("downtime_ms", downtime);
    app.events.record(event);
    match local_target {
        Some(target) => incoming::settle(app, &target, id).await,
        None => Ok(()),
    }
}

/// Requests that the guest powers off, and waits for it for some time.
async fn shut_down(node: &Arc<dyn NodeApi>, id: InstanceId) -> Result<()> {
    // A paused guest does not receive the request.
    if node.vms().power(id).await? != Some(VmPower::On) {
        return Ok(());
    }
    node.vms().request_power_off(id).await?;
    let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
    while node.vms().power(id).await? == Some(VmPower::On) {
        if Instant::now() >= deadline {
            tracing::info!(instance = %id, "the guest does not power off, stopping its VM");
            return Ok(());
        }
        tokio::time::sleep(POWER_POLL_INTERVAL).await;
    }
    Ok(())
}

async fn remove_source(app: &App, row: &OperationRow) -> Result<()> {
    let parameters = MigrateInstance::parameters(row)?;
    let id = target_id(&row.target.id)?;
    let _lock = app.instance_locks.lock(id).await;
    let instance = instances::get(&*app.store, id).await?;
    // It may be back already.
    if instance.is_none_or(|instance| instance.node != Some(parameters.source)) {
        local_node(app, Some(parameters.source))?.vms().remove(id).await?;
    }
    Ok(())
}

/// Ends the migration. Unless the instance has moved, its guest continues on the source.
async fn fail(app: &App, row: &OperationRow) -> Result<()> {
    let parameters = MigrateInstance::parameters(row)?;
    let id = target_id(&row.target.id)?;
    let migration = instance_migrations::get(&*app.store, id).await?;
    if let Some(migration) = migration.filter(|migration| migration.generation == parameters.generation) {
        migrate::end_failed(app, &migration).await?;
    }
    let node = local_node(app, Some(parameters.source))?;
    {
        let _lock = app.instance_locks.lock(id).await;
        // From here on the migration cannot move it.
        let instance = instances::get(&*app.store, id).await?;
        let Some(instance) = instance.filter(|instance| instance.node == Some(parameters.source)) else {
            return Ok(());
        };
        node.vms().cancel_migration(id, instance.power_wanted != PowerState::Paused).await?;
        power::write_power_state(app, node, id).await?;
        if parameters.restart {
            power::start_after_migration(app, &instance).await?;
        }
    }
    migrate::record_failure(app, id, failure_message(row));
    let target = app.nodes.iter().find(|node| node.identity().id == parameters.target);
    match target {
        Some(target) => incoming::settle(app, target, id).await,
        None => Ok(()),
    }
}
