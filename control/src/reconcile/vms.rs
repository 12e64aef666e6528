//! Looks after the machines of this daemon's nodes: writes down what happens to them, and brings what the nodes have
//! and what the database says together.
//!
//! What happens is heard at once; a look from time to time finds what nobody heard. Nothing is removed unless its row
//! says that it is gone, twice in a row. A machine without a row may belong to another database, and is left alone.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use muster_types::Result;
use muster_types::event::{Event, EventType};
use muster_types::ids::{InstanceId, NodeId};
use muster_types::instance::{InstanceState, PowerState};
use muster_types::node::NodeApi;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::vm::{FoundVm, VmPower};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::app::App;
use crate::objects::instance::{object, power};
use muster_store::instances::{self, InstanceRow};

/// How often nodes are looked at.
pub(super) const RECONCILE_INTERVAL: Duration = Duration::from_secs(10);
/// Nodes that are looked at in one tick.
const NODES_AT_ONCE: usize = 100;

/// What is remembered from one look to the next.
#[derive(Debug, Default)]
struct Memory {
    /// VMs that should have been removed.
    suspects: HashSet<InstanceId>,
    /// VMs without a record that were reported already.
    told: HashSet<InstanceId>,
}

/// Looks after the machines until told to stop.
pub async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let mut listeners = JoinSet::new();
    for node in &app.nodes {
        listeners.spawn(listen(Arc::clone(&app), Arc::clone(node)));
    }
    let mut memories: HashMap<NodeId, Memory> = HashMap::new();
    let mut next = 0;
    while !*stop.borrow() {
        for _ in 0..NODES_AT_ONCE.min(app.nodes.len()) {
            let node = &app.nodes[next % app.nodes.len()];
            next = (next + 1) % app.nodes.len();
            let memory = memories.entry(node.identity().id).or_default();
            if let Err(error) = look(&app, node, memory).await {
                tracing::warn!(node = node.identity().name, %error, "machines were not looked after");
            }
        }
        tokio::select! {
            () = tokio::time::sleep(RECONCILE_INTERVAL) => {}
            _ = stop.changed() => {}
        }
    }
    listeners.abort_all();
}

/// One look at the machines of all nodes, which also removes what should not be there.
pub async fn run_once(app: &App) -> Result<()> {
    for node in &app.nodes {
        let mut memory = Memory::default();
        look(app, node, &mut memory).await?;
        look(app, node, &mut memory).await?;
    }
    Ok(())
}

async fn listen(app: Arc<App>, node: Arc<dyn NodeApi>) {
    let mut changes = node.vms().changes();
    while let Some(id) = changes.next().await {
        // Each on its own: somebody may be at one of them for long.
        let (app, node) = (Arc::clone(&app), Arc::clone(&node));
        tokio::spawn(async move { observe(&app, &node, id).await });
    }
}

async fn observe(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) {
    if let Err(error) = power::observe(app, node, id).await {
        tracing::warn!(instance = %id, %error, "what happened to a machine was not written down");
    }
}

async fn look(app: &App, node: &Arc<dyn NodeApi>, memory: &mut Memory) -> Result<()> {
    // The machines first: what has one has had a row for longer.
    let found = node.vms().list().await?;
    let here = node.identity().id;
    let mut rows: HashMap<InstanceId, InstanceRow> =
        instances::of_node(&*app.store, here).await?.into_iter().map(|row| (row.id, row)).collect();
    let mut suspects = HashSet::new();
    for machine in found {
        let row = match rows.remove(&machine.id) {
            Some(row) => Some(row),
            None => instances::get(&*app.store, machine.id).await?,
        };
        match row {
            Some(row) if row.node != Some(here) && row.state.is_active() => tell(app, here, memory, &machine),
            Some(row) => match row.state {
                InstanceState::Created if !is_seen(&row, &machine.power) => {
                    observe(app, node, row.id).await;
                }
                InstanceState::Deleted | InstanceState::Error => {
                    if memory.suspects.contains(&row.id) {
                        remove(app, node, &row).await?;
                    } else {
                        suspects.insert(row.id);
                    }
                }
                // An operation is at it.
                _ => {}
            },
            None => tell(app, here, memory, &machine),
        }
    }
    memory.suspects = suspects;
    for row in rows.into_values().filter(|row| row.state == InstanceState::Created) {
        if row.power_state != PowerState::Crashed {
            observe(app, node, row.id).await;
        }
    }
    Ok(())
}

/// Whether the record says what the node says.
fn is_seen(row: &InstanceRow, machine: &VmPower) -> bool {
    match machine {
        VmPower::On => row.power_state == PowerState::On,
        VmPower::Paused => row.power_state == PowerState::Paused,
        VmPower::Off { .. } => row.power_state == PowerState::Off,
        VmPower::Crashed { .. } => row.power_state == PowerState::Crashed,
        // It is to be started again, unless its user switched it off.
        VmPower::Lost => row.power_wanted == PowerState::Off,
    }
}

/// Removes what an instance that is gone left on its node.
async fn remove(app: &App, node: &Arc<dyn NodeApi>, row: &InstanceRow) -> Result<()> {
    let _lock = app.instance_locks.lock(row.id).await;
    node.vms().remove(row.id).await?;
    tracing::info!(instance = %row.id, node = node.identity().name, "what was left of a machine was removed");
    let event = Event::new(EventType::Health, object(row.id), "leftovers removed from a node");
    app.events.record(event.with("node", node.identity().name.clone()));
    Ok(())
}

/// Tells of a machine that no row explains, once.
fn tell(app: &App, here: NodeId, memory: &mut Memory, machine: &FoundVm) {
    if !memory.told.insert(machine.id) {
        return;
    }
    tracing::warn!(instance = %machine.id, power = ?machine.power, "no record explains a machine; it is left alone");
    let node = ObjectRef::new(ObjectType::Node, here);
    let event = Event::new(EventType::Health, node, "no record explains a machine, it is left alone");
    app.events.record(event.with("instance_uuid", machine.id.to_string()));
}
