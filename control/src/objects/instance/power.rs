//! Switching machines on and off, and writing down what was seen of them.
//!
//! What is done to a machine is done by the daemon that speaks for its node, one thing at a time. What a node says of
//! a machine is the truth; the record follows it.

use std::sync::Arc;

use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::ids::InstanceId;
use muster_types::instance::{InstanceState, PowerState, SideChannel};
use muster_types::node::{NodeApi, NodeFuture};
use muster_types::spec::Vdi;
use muster_types::time::now;
use muster_types::vm::{ConsolePorts, VmPower};
use muster_types::{Error, Result};

use super::agent;
use super::{asked, object, operation_on, plan, require_created};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::network::wait::follow_instance;
use crate::queue::{Operation as _, StartInstance};
use muster_store::instances::{self, InstanceRow};
use muster_store::{operations, transaction};

/// How often other ports are tried when somebody else has taken them.
const PORT_ATTEMPTS: usize = 5;

/// What a caller can do to the power of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    On,
    Off,
    Pause,
    Unpause,
    RebootSoft,
    RebootHard,
}

impl Action {
    fn word(self) -> &'static str {
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

/// Does something to the power of an instance. Call it where its node is.
pub async fn act(
    app: &App,
    caller: &Caller,
    node: &Arc<dyn NodeApi>,
    id: InstanceId,
    action: Action,
) -> Result<()> {
    let _lock = app.instance_locks.lock(id).await;
    let row = instances::get(&*app.store, id).await?.ok_or_else(|| Error::not_found("instance"))?;
    require_created(&row)?;
    let machines = node.vms();
    let power = machines.power(id).await?;
    let running = matches!(power, Some(VmPower::On | VmPower::Paused));
    let invalid = |why: &str| Err(Error::Conflict(format!("Invalid lifecycle state: {why}")));
    match action {
        Action::On if running => return Ok(()),
        Action::Off if !running => {}
        Action::Pause | Action::Unpause | Action::RebootSoft | Action::RebootHard if !running => {
            let verb = match action {
                Action::Pause => "pause",
                Action::Unpause => "unpause",
                _ => "reboot",
            };
            return invalid(&format!("you cannot {verb} a powered off instance"));
        }
        Action::Pause if power == Some(VmPower::Paused) => {
            return invalid("pause failed after 1 attempts: the instance is paused");
        }
        Action::Unpause if power == Some(VmPower::On) => {
            return invalid("unpause failed after 1 attempts: the instance is not paused");
        }
        _ => {}
    }
    let event = Event::audit(object(id), format!("{} request from REST API", action.word()));
    app.record(caller, asked(caller, event));
    let wanted = match action {
        Action::On | Action::Unpause => Some(PowerState::On),
        Action::Off => Some(PowerState::Off),
        Action::Pause => Some(PowerState::Paused),
        Action::RebootSoft | Action::RebootHard => None,
    };
    if let Some(wanted) = wanted {
        transaction!(app.store, |tx| { Ok(instances::set_power_wanted(tx, id, wanted).await?) })?;
    }
    match action {
        Action::On => {
            follow_instance(app, id, node.identity().id, now()).await?;
            switch_on(app, node, &row).await?;
        }
        Action::Off => machines.stop(id).await?,
        Action::Pause => machines.pause(id).await?,
        Action::Unpause => machines.resume(id).await?,
        Action::RebootSoft => machines.reboot(id).await?,
        Action::RebootHard => machines.reset(id).await?,
    }
    write_seen(app, node, id).await
}

/// Starts the machine of an instance, with ports that nobody uses. The caller has the turn.
pub(crate) async fn switch_on(app: &App, node: &Arc<dyn NodeApi>, row: &InstanceRow) -> Result<()> {
    let mut ports = row.ports;
    for _ in 0..PORT_ATTEMPTS {
        let now = match ports.take() {
            Some(ports) => ports,
            None => choose_ports(app, node, row).await?,
        };
        let plan = plan::make(app, row, now).await?;
        // The machines of a simulated node go with their daemon; there is nothing on their disks to lose.
        if row.state == InstanceState::Creating || node.identity().simulated {
            node.vms().build(&plan).await?;
        }
        match node.vms().start(&plan).await {
            // The port belongs to a process that is not one of our VMs.
            Err(Error::PortInUse(why)) => {
                tracing::info!(instance = %row.id, why, "retrying VM start with other ports");
            }
            outcome => return outcome,
        }
    }
    Err(Error::Unavailable("no ports for the consoles were found".into()))
}

async fn choose_ports(app: &App, node: &Arc<dyn NodeApi>, row: &InstanceRow) -> Result<ConsolePorts> {
    let here = node.identity().id;
    let secured = row.spec.video.vdi != Vdi::Vnc;
    for _ in 0..PORT_ATTEMPTS {
        let taken = instances::ports(&*app.store, here).await?;
        let free = node.vms().choose_ports(if secured { 3 } else { 2 }, &taken).await?;
        let (Some(console), Some(vdi)) = (free.first(), free.get(1)) else { break };
        let ports = ConsolePorts { console: *console, vdi: *vdi, vdi_tls: free.get(2).copied() };
        let got = transaction!(app.store, |tx| {
            if !instances::set_ports(tx, row.id, here, Some(ports)).await? {
                return Err(Error::Unavailable("somebody else took the ports".into()).into());
            }
            Ok(())
        });
        match got {
            Ok(()) => return Ok(ports),
            Err(Error::Unavailable(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Err(Error::Unavailable("no ports for the consoles were found".into()))
}

/// Looks at a machine whose power may have changed, and writes down what is seen.
pub(crate) async fn observe(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) -> Result<()> {
    let _lock = app.instance_locks.lock(id).await;
    write_seen(app, node, id).await
}

/// The same, by whoever has the turn.
pub(crate) async fn write_seen(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) -> Result<()> {
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
        Some(VmPower::Lost) => return start_again(app, &row).await,
        None => (PowerState::Crashed, Some("the node has nothing of it any more".to_owned())),
    };
    if power == row.power_state {
        return agent::observe(app, node, id).await;
    }
    let agent = agent_state(&row, power);
    let changed = transaction!(app.store, |tx| {
        if !instances::set_power(tx, id, power).await? {
            return Ok(false);
        }
        if power == PowerState::Off {
            // Whoever switched it off, it is not switched on again without being asked.
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
    // Its guest may have spoken before it was written down that it is on.
    agent::observe(app, node, id).await
}

/// What is known of the agent when the power changes.
pub(crate) fn agent_state(row: &InstanceRow, power: PowerState) -> Option<&'static str> {
    if !row.spec.side_channels.contains(&SideChannel::Agent)
        && !row.spec.side_channels.contains(&SideChannel::Agent2)
    {
        return None;
    }
    Some(match power {
        PowerState::On => "not ready (no contact)",
        PowerState::Paused => "not ready (instance paused)",
        PowerState::Initial | PowerState::Off | PowerState::Crashed => "not ready (instance powered off)",
    })
}

/// A machine that was on when its host went down is switched on again, unless its user switched it off.
///
/// The operation that this queues comes back here: hence the box.
fn start_again<'a>(app: &'a App, row: &'a InstanceRow) -> NodeFuture<'a, ()> {
    Box::pin(
        async move { if row.power_wanted == PowerState::Off { Ok(()) } else { queue_start(app, row).await } },
    )
}

async fn queue_start(app: &App, row: &InstanceRow) -> Result<()> {
    let queued = transaction!(app.store, |tx| {
        if operations::is_pending(&mut *tx, &object(row.id), StartInstance::KIND.name).await? {
            return Ok(false);
        }
        let handle = operation_on(row, StartInstance {}, None).enqueue(tx).await?;
        instances::set_operation(tx, row.id, &handle).await?;
        Ok(true)
    })?;
    if queued {
        app.queue.wake();
        let text = "the host went down with it, it is started again";
        app.events.record(Event::new(EventType::Status, object(row.id), text));
    }
    Ok(())
}
