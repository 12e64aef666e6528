//! Changes the power state of VMs and records it.
//!
//! Only the daemon of a VM's node changes it, one change at a time. The node is the source of truth; the record
//! follows. See docs/decisions/0018.

use std::sync::Arc;

use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::ids::InstanceId;
use muster_types::instance::{InstanceState, PowerState};
use muster_types::node::{NodeApi, NodeFuture};
use muster_types::spec::Vdi;
use muster_types::time::now;
use muster_types::vm::{ConsolePorts, VmPlan, VmPower};
use muster_types::{Error, Result};

use super::{agent, migrate, object, operation_on, placed_again, plan, read_again, replica, require_created};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::audit::with_caller;
use crate::objects::network::wait::wait_instance_networks;
use crate::objects::shared_storage;
use crate::queue::{Operation as _, StartInstance};
use muster_store::instance_migrations::MigrationRow;
use muster_store::instances::{self, InstanceRow};
use muster_store::{beside_change, instance_migrations, operations, transaction};

/// The number of attempts with other ports when another process has taken them.
pub(crate) const PORT_ATTEMPTS: usize = 5;

/// An action on the power state of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PowerAction {
    On,
    Off,
    Pause,
    Unpause,
    RebootSoft,
    RebootHard,
}

impl PowerAction {
    fn as_str(self) -> &'static str {
        match self {
            Self::On => "poweron",
            Self::Off => "poweroff",
            Self::Pause => "pause",
            Self::Unpause => "unpause",
            Self::RebootSoft => "soft reboot",
            Self::RebootHard => "hard reboot",
        }
    }
}

/// Applies an action to the VM of an instance. Call it on the daemon of the instance's node.
pub async fn apply(
    app: &App,
    caller: &Caller,
    node: &Arc<dyn NodeApi>,
    id: InstanceId,
    action: PowerAction,
) -> Result<()> {
    let _lock = app.instance_locks.lock(id).await;
    let row = instances::get(&*app.store, id).await?.ok_or_else(|| Error::not_found("instance"))?;
    require_created(&row)?;
    if row.node != Some(node.identity().id) {
        return Err(placed_again(id));
    }
    caller.deadline.require_waiting()?;
    let vms = node.vms();
    let power = vms.power(id).await?;
    let running = matches!(power, Some(VmPower::On | VmPower::Paused));
    let invalid = |reason: &str| Err(Error::Conflict(format!("Invalid lifecycle state: {reason}")));
    match action {
        PowerAction::On if running => return Ok(()),
        // Its disks are being copied.
        PowerAction::On => migrate::require_not_migrating(&*app.store, id).await?,
        PowerAction::Off if !running => {}
        PowerAction::Off => migrate::require_may_end(app, caller, id).await?,
        PowerAction::Pause | PowerAction::Unpause | PowerAction::RebootSoft | PowerAction::RebootHard
            if !running =>
        {
            let verb = match action {
                PowerAction::Pause => "pause",
                PowerAction::Unpause => "unpause",
                _ => "reboot",
            };
            return invalid(&format!("you cannot {verb} a powered off instance"));
        }
        PowerAction::Pause if power == Some(VmPower::Paused) => {
            return invalid("pause failed after 1 attempts: the instance is paused");
        }
        PowerAction::Unpause if power == Some(VmPower::On) => {
            return invalid("unpause failed after 1 attempts: the instance is not paused");
        }
        _ => {}
    }
    let event = Event::audit(object(id), format!("{} request from REST API", action.as_str()));
    app.record(caller, with_caller(caller, event));
    let wanted = match action {
        PowerAction::On | PowerAction::Unpause => Some(PowerState::On),
        PowerAction::Off => Some(PowerState::Off),
        PowerAction::Pause => Some(PowerState::Paused),
        PowerAction::RebootSoft | PowerAction::RebootHard => None,
    };
    if let Some(wanted) = wanted {
        transaction!(app.store, |tx| {
            if !instances::lock_placed(tx, &row).await? {
                return Err(placed_again(id).into());
            }
            Ok(instances::set_power_wanted(tx, id, wanted).await?)
        })?;
    }
    match action {
        PowerAction::On => {
            wait_instance_networks(app, id, node.identity().id, now()).await?;
            let row = read_again(app, &row).await?.ok_or_else(|| placed_again(id))?;
            start_vm(app, node, &row).await?;
        }
        PowerAction::Off => vms.stop(id).await?,
        PowerAction::Pause => vms.pause(id).await?,
        PowerAction::Unpause => vms.resume(id).await?,
        PowerAction::RebootSoft => vms.reboot(id).await?,
        PowerAction::RebootHard => vms.reset(id).await?,
    }
    let written = write_power_state(app, node, id);
    match action {
        // The reboot has happened, although nothing was written: a precondition must not make the request fail now.
        PowerAction::RebootSoft | PowerAction::RebootHard => beside_change(written).await,
        _ => written.await,
    }
}

/// Starts the VM of an instance with free ports. The caller holds the instance lock, and has read the row since it acquired
/// it ([`read_again`]).
pub(crate) async fn start_vm(app: &App, node: &Arc<dyn NodeApi>, row: &InstanceRow) -> Result<()> {
    let outcome = start_with_free_ports(app, node, row).await;
    shared_storage::record_wait(app, row, &outcome);
    outcome
}

async fn start_with_free_ports(app: &App, node: &Arc<dyn NodeApi>, row: &InstanceRow) -> Result<()> {
    let mut ports = row.ports;
    for _ in 0..PORT_ATTEMPTS {
        let chosen = match ports.take() {
            Some(ports) => ports,
            None => choose_ports(app, node, row, None).await?,
        };
        let plan = plan::build(app, row, chosen).await?;
        // The VMs of a simulated node do not survive its daemon, and their disks hold no data.
        if row.state == InstanceState::Creating || node.identity().simulated {
            build_disks(app, node, row, &plan).await?;
        }
        match node.vms().start(&plan).await {
            // The port belongs to a process that is not one of our VMs.
            Err(Error::PortInUse(reason)) => {
                tracing::info!(instance = %row.id, reason, "retrying VM start with other ports");
            }
            outcome => return outcome,
        }
    }
    Err(Error::Unavailable("no free console ports found".into()))
}

/// Builds the disks of the VM of an instance without starting it. The caller holds the instance lock, and has read the row
/// since it acquired it ([`read_again`]).
pub(crate) async fn build_vm(app: &App, node: &Arc<dyn NodeApi>, row: &InstanceRow) -> Result<()> {
    let ports = match row.ports {
        Some(ports) => ports,
        None => choose_ports(app, node, row, None).await?,
    };
    let built = build_disks(app, node, row, &plan::build(app, row, ports).await?).await;
    shared_storage::record_wait(app, row, &built);
    built
}

/// Builds the disks of a VM: from the replica that they come from, if any, and those that are missing.
async fn build_disks(app: &App, node: &Arc<dyn NodeApi>, row: &InstanceRow, plan: &VmPlan) -> Result<()> {
    replica::restore(app, node, row, plan).await?;
    node.vms().build(plan).await
}

/// Reserves ports of a node for an instance, or for a migration of it to the node.
pub(crate) async fn choose_ports(
    app: &App,
    node: &Arc<dyn NodeApi>,
    row: &InstanceRow,
    migration: Option<&MigrationRow>,
) -> Result<ConsolePorts> {
    let node_id = node.identity().id;
    let with_tls = row.spec.video.vdi != Vdi::Vnc;
    for _ in 0..PORT_ATTEMPTS {
        let used_ports = instances::ports(&*app.store, node_id).await?;
        let free = node.vms().choose_ports(if with_tls { 3 } else { 2 }, &used_ports).await?;
        let (Some(console), Some(vdi)) = (free.first(), free.get(1)) else { break };
        let ports = ConsolePorts { console: *console, vdi: *vdi, vdi_tls: free.get(2).copied() };
        let reserved = transaction!(app.store, |tx| {
            if !instances::lock_placed(tx, row).await? {
                return Err(placed_again(row.id).into());
            }
            let reserved = match migration {
                Some(migration) => instance_migrations::set_ports(tx, migration, ports).await?,
                None => instances::set_ports(tx, row.id, node_id, Some(ports)).await?,
            };
            if !reserved {
                return Err(Error::Unavailable("the ports are in use".into()).into());
            }
            Ok(())
        });
        match reserved {
            Ok(()) => return Ok(ports),
            Err(Error::Unavailable(_) | Error::Contended) => {}
            Err(error) => return Err(error),
        }
    }
    Err(Error::Unavailable("no free console ports found".into()))
}

/// Records the power state of a VM that may have changed.
pub(crate) async fn observe(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) -> Result<()> {
    let _lock = app.instance_locks.lock(id).await;
    write_power_state(app, node, id).await
}

/// Like [`observe`], for a caller that holds the instance lock.
pub(crate) async fn write_power_state(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) -> Result<()> {
    let row = instances::get(&*app.store, id).await?;
    let Some(row) = row.filter(|row| row.state == InstanceState::Created) else { return Ok(()) };
    if row.node != Some(node.identity().id) {
        return Ok(());
    }
    let (power, reason) = match node.vms().power(id).await? {
        Some(VmPower::On) => (PowerState::On, None),
        Some(VmPower::Paused) => (PowerState::Paused, None),
        Some(VmPower::Off { reason }) => (PowerState::Off, Some(reason)),
        Some(VmPower::Crashed { reason }) => (PowerState::Crashed, Some(reason)),
        Some(VmPower::Lost) if row.power_wanted == PowerState::Off => {
            (PowerState::Off, Some("its host went down".to_owned()))
        }
        Some(VmPower::Lost) => return restart_after_host_failure(app, &row).await,
        None => (PowerState::Crashed, Some("the node no longer has the VM".to_owned())),
    };
    if power == row.power_state {
        return agent::observe(app, node, id).await;
    }
    let agent = agent::state_for_power(&row, power);
    let changed = transaction!(app.store, |tx| {
        if !instances::lock_placed(tx, &row).await? || !instances::set_power(tx, id, power).await? {
            return Ok(false);
        }
        if power == PowerState::Off {
            // A VM that was powered off stays off until it is started by request.
            instances::set_power_wanted(tx, id, PowerState::Off).await?;
        }
        instances::set_agent_state(tx, id, agent).await?;
        Ok(true)
    })?;
    if changed {
        let mut event = Event::new(EventType::Mutate, object(id), EventMessage::PowerState(power))
            .with("from", row.power_state.as_str());
        if let Some(reason) = reason {
            event = event.with("reason", reason);
        }
        app.events.record(event);
    }
    // The guest may have reported before the instance was recorded as on.
    agent::observe(app, node, id).await
}

/// Restarts a VM that was running when its host went down. Boxed because the queued operation calls it recursively.
pub(crate) fn restart_after_host_failure<'a>(app: &'a App, row: &'a InstanceRow) -> NodeFuture<'a, ()> {
    Box::pin(enqueue_start(app, row, "restarting the VM after its host went down"))
}

/// Starts a VM that was powered off for its migration.
pub(crate) async fn start_after_migration(app: &App, row: &InstanceRow) -> Result<()> {
    transaction!(app.store, |tx| {
        if instances::lock_placed(tx, row).await? {
            instances::set_power_wanted(tx, row.id, PowerState::On).await?;
        }
        Ok(())
    })?;
    enqueue_start(app, row, "starting the VM after its migration").await
}

async fn enqueue_start(app: &App, row: &InstanceRow, message: &'static str) -> Result<()> {
    let queued = transaction!(app.store, |tx| {
        if !instances::lock_placed(tx, row).await?
            || operations::is_pending(&mut *tx, &object(row.id), StartInstance::KIND.name).await?
        {
            return Ok(false);
        }
        let handle = operation_on(row, StartInstance {}, None).enqueue(tx).await?;
        instances::set_operation(tx, row.id, &handle).await?;
        Ok(true)
    })?;
    if queued {
        app.queue.wake();
        app.events.record(Event::new(EventType::Status, object(row.id), message));
    }
    Ok(())
}
