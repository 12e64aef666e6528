//! The target of a migration: its connections, and the end, when the instance is on this node. See
//! docs/decisions/0070.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::instance_migrations;
use muster_store::instances::{self, InstanceRow};
use muster_types::event::{Event, EventType};
use muster_types::ids::InstanceId;
use muster_types::instance::{InstanceState, PowerState};
use muster_types::migration::{IncomingState, MigrationChannel, MigrationConnection};
use muster_types::node::NodeApi;
use muster_types::vm::{FoundVm, VmPower};
use muster_types::{Error, Result};

use super::{object, power, replica};
use crate::app::App;

/// How often the state of a VM is polled that receives its memory, and then the row of its instance: part of the downtime.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long a VM that has received everything is polled as often. The reconciler continues afterwards.
const LOADED_TIMEOUT: Duration = Duration::from_secs(90);
/// How often a VM that is still receiving checks whether its migration has ended.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Opens a connection to the VM of an instance that is being migrated to a node of this daemon, or to its replica there.
pub async fn connect(
    app: &Arc<App>,
    id: InstanceId,
    generation: i64,
    connection: &MigrationConnection,
) -> Result<UnixStream> {
    if connection.channel == MigrationChannel::Replica {
        return replica::accept(app, id, generation).await;
    }
    let migration = instance_migrations::get(&*app.store, id).await?;
    let migration = migration.filter(|migration| migration.generation == generation && !migration.cancelled);
    let node = migration.and_then(|migration| {
        app.nodes.iter().find(|node| node.identity().id == migration.target).map(Arc::clone)
    });
    let node =
        node.ok_or_else(|| Error::Conflict("the instance is not being migrated to this node".into()))?;
    let stream = node.vms().connect_incoming(id, connection).await?;
    // A VM that is off has a connection for its files only.
    let is_off = matches!(node.vms().power(id).await?, Some(VmPower::Off { .. }));
    if connection.channel == MigrationChannel::Memory || is_off {
        tokio::spawn(wait_for_switch_over(Arc::clone(app), node, id, generation));
    }
    Ok(stream)
}

/// Lets a VM continue as soon as its instance is on this node.
async fn wait_for_switch_over(app: Arc<App>, node: Arc<dyn NodeApi>, id: InstanceId, generation: i64) {
    if let Err(error) = follow(&app, &node, id, generation).await {
        tracing::warn!(instance = %id, %error, "failed to complete a migration, the reconciler continues");
    }
}

async fn follow(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId, generation: i64) -> Result<()> {
    let mut next_check = Instant::now() + CHECK_INTERVAL;
    let mut loaded_since: Option<Instant> = None;
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let state = match node.vms().incoming_state(id).await {
            Ok(Some(state)) => state,
            Ok(None) | Err(Error::NotFound(_)) => return Ok(()),
            Err(error) => return Err(error),
        };
        match state {
            IncomingState::Failed(reason) => {
                let event =
                    Event::new(EventType::Status, object(id), "the target of the migration has failed");
                app.events.record(event.with("node", node.identity().name.clone()).with("reason", reason));
                return settle(app, node, id).await;
            }
            IncomingState::Loaded => {
                let since = *loaded_since.get_or_insert_with(Instant::now);
                if is_here(app, node, id, generation).await? {
                    return settle(app, node, id).await;
                }
                if since.elapsed() > LOADED_TIMEOUT {
                    return Ok(());
                }
            }
            IncomingState::Waiting => {}
        }
        if Instant::now() >= next_check {
            next_check = Instant::now() + CHECK_INTERVAL;
            let migration = instance_migrations::get(&*app.store, id).await?;
            if migration.is_none_or(|migration| migration.generation != generation) {
                return settle(app, node, id).await;
            }
        }
    }
}

fn owns(row: &InstanceRow, node: &Arc<dyn NodeApi>, generation: i64) -> bool {
    row.node == Some(node.identity().id) && row.generation == generation
}

async fn is_here(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId, generation: i64) -> Result<bool> {
    let row = instances::get(&*app.store, id).await?;
    Ok(row.is_some_and(|row| owns(&row, node, generation)))
}

/// Ends the migration of a VM that was prepared to receive one, if it can be decided: the VM continues if its instance is on
/// this node, and is removed, with disks that were never used, if its migration has ended otherwise.
pub(crate) async fn settle(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) -> Result<()> {
    let _lock = app.instance_locks.lock(id).await;
    let found = node.vms().list().await?.into_iter().find(|vm| vm.id == id && vm.incoming);
    let Some(FoundVm { generation: Some(generation), .. }) = found else { return Ok(()) };
    let row = instances::get(&*app.store, id).await?;
    let Some(row) = row.filter(|row| owns(row, node, generation)) else {
        let migration = instance_migrations::get(&*app.store, id).await?;
        if migration.is_some_and(|migration| migration.generation == generation) {
            return Ok(());
        }
        tracing::info!(instance = %id, node = node.identity().name, "removed the VM of a migration that has ended");
        return node.vms().remove(id).await;
    };
    if row.state != InstanceState::Created {
        // It is being deleted.
        return Ok(());
    }
    match node.vms().incoming_state(id).await? {
        Some(IncomingState::Loaded) => {
            let is_off = matches!(node.vms().power(id).await?, Some(VmPower::Off { .. }));
            if is_off && row.power_wanted == PowerState::On {
                // Before it is finished, so that it is not forgotten. The operation waits for the lock.
                power::start_after_migration(app, &row).await?;
            }
            node.vms().finish_incoming(id, row.power_wanted != PowerState::Paused).await?;
            let event = Event::new(EventType::Mutate, object(id), "migrated to another node");
            app.events.record(event.with("node", node.identity().name.clone()));
            app.networks.notify_changed();
            power::write_power_state(app, node, id).await
        }
        // Its disks are complete: it starts like after a failure of its host.
        Some(IncomingState::Failed(_)) if row.power_wanted == PowerState::On => {
            power::restart_after_host_failure(app, &row).await
        }
        _ => Ok(()),
    }
}
