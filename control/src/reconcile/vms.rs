//! Reconciles the VMs of this daemon's nodes with the instances of the database, and records power changes.
//!
//! Nodes report changes immediately; periodic passes find missed ones. A VM is removed only if two consecutive passes
//! find its instance deleted, and never from a deleted node. A stale VM is moved to `lost+found`. A VM without a record may
//! belong to another database and is ignored.
//! See docs/decisions/0018 and 0052.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

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

use super::agents;
use crate::app::App;
use crate::objects::instance::{console, object, power, stale_vms};
use muster_store::instances::InstanceRow;

/// The interval between passes over the nodes.
pub(super) const RECONCILE_INTERVAL: Duration = Duration::from_secs(10);
/// The maximum number of nodes per pass.
const NODES_PER_PASS: usize = 100;

/// In-memory state kept per node between passes.
#[derive(Debug, Default)]
struct VmReconcileState {
    /// VMs that should not exist; removed if the next pass finds them again.
    suspects: HashSet<InstanceId>,
    /// VMs without a record that were already reported.
    reported: HashSet<InstanceId>,
}

/// Reconciles VMs until `stop` is set.
pub async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let mut listeners = JoinSet::new();
    for node in &app.nodes {
        listeners.spawn(listen(Arc::clone(&app), Arc::clone(node)));
        listeners.spawn(record_console_connections(Arc::clone(&app), Arc::clone(node)));
    }
    let mut states: HashMap<NodeId, VmReconcileState> = HashMap::new();
    let mut next = 0;
    while !*stop.borrow() {
        for _ in 0..NODES_PER_PASS.min(app.nodes.len()) {
            let node = &app.nodes[next % app.nodes.len()];
            next = (next + 1) % app.nodes.len();
            let state = states.entry(node.identity().id).or_default();
            let started = Instant::now();
            let outcome = reconcile_node(&app, node, state).await;
            app.metrics.passed("vms", started, outcome.is_ok());
            if let Err(error) = outcome {
                tracing::warn!(node = node.identity().name, %error, "failed to reconcile VMs");
            }
        }
        tokio::select! {
            () = tokio::time::sleep(RECONCILE_INTERVAL) => {}
            _ = stop.changed() => {}
        }
    }
    listeners.abort_all();
}

/// Reconciles the VMs of all nodes twice, which also removes orphans.
pub async fn run_once(app: &App) -> Result<()> {
    for node in &app.nodes {
        let mut state = VmReconcileState::default();
        reconcile_node(app, node, &mut state).await?;
        reconcile_node(app, node, &mut state).await?;
    }
    Ok(())
}

async fn listen(app: Arc<App>, node: Arc<dyn NodeApi>) {
    let mut changes = node.vms().changes();
    while let Some(id) = changes.next().await {
        // Concurrently: the lock of an instance may be owned for long.
        let (app, node) = (Arc::clone(&app), Arc::clone(&node));
        tokio::spawn(async move { observe(&app, &node, id).await });
    }
}

async fn record_console_connections(app: Arc<App>, node: Arc<dyn NodeApi>) {
    let mut connections = node.vms().console_connections();
    while let Some(connection) = connections.next().await {
        console::record_connection(&app, connection);
    }
}

async fn observe(app: &App, node: &Arc<dyn NodeApi>, id: InstanceId) {
    if let Err(error) = power::observe(app, node, id).await {
        tracing::warn!(instance = %id, %error, "failed to record a power change");
    }
}

async fn reconcile_node(app: &App, node: &Arc<dyn NodeApi>, state: &mut VmReconcileState) -> Result<()> {
    let node_id = node.identity().id;
    let vms = stale_vms::remove_stale(app, node).await?;
    if !vms.is_active {
        // The next check-in makes it active. Until then its instances may be placed on other nodes.
        return Ok(());
    }
    let rows = vms.found.iter().filter_map(|(_, row)| row.as_ref()).chain(&vms.without_vm);
    for row in rows {
        agents::reconcile_guest(app, node, row).await;
    }
    let mut suspects = HashSet::new();
    for (vm, row) in vms.found {
        let Some(row) = row else {
            report_unknown(app, node_id, state, &vm);
            continue;
        };
        match row.state {
            InstanceState::Created if !is_recorded(&row, &vm.power) => {
                observe(app, node, row.id).await;
            }
            InstanceState::Deleted | InstanceState::Error => {
                if state.suspects.contains(&row.id) {
                    remove(app, node, &row).await?;
                } else {
                    suspects.insert(row.id);
                }
            }
            // An operation is working on it.
            _ => {}
        }
    }
    state.suspects = suspects;
    for row in vms.without_vm.into_iter().filter(|row| row.state == InstanceState::Created) {
        if row.power_state != PowerState::Crashed {
            observe(app, node, row.id).await;
        }
    }
    Ok(())
}

/// Returns whether an instance has the power state that its node reports.
fn is_recorded(row: &InstanceRow, power: &VmPower) -> bool {
    match power {
        VmPower::On => row.power_state == PowerState::On,
        VmPower::Paused => row.power_state == PowerState::Paused,
        VmPower::Off { .. } => row.power_state == PowerState::Off,
        VmPower::Crashed { .. } => row.power_state == PowerState::Crashed,
        // It is restarted unless the user switched it off.
        VmPower::Lost => row.power_wanted == PowerState::Off && row.power_state == PowerState::Off,
    }
}

/// Removes the VM of a deleted instance from its node.
async fn remove(app: &App, node: &Arc<dyn NodeApi>, row: &InstanceRow) -> Result<()> {
    let _lock = app.instance_locks.lock(row.id).await;
    node.vms().remove(row.id).await?;
    tracing::info!(instance = %row.id, node = node.identity().name, "removed an orphaned VM");
    let event = Event::new(EventType::Health, object(row.id), "orphaned VM removed from a node");
    app.events.record(event.with("node", node.identity().name.clone()));
    Ok(())
}

/// Reports a VM without a record, once.
fn report_unknown(app: &App, node: NodeId, state: &mut VmReconcileState, vm: &FoundVm) {
    if !state.reported.insert(vm.id) {
        return;
    }
    tracing::warn!(instance = %vm.id, power = ?vm.power, "ignored a VM without a record");
    let node = ObjectRef::new(ObjectType::Node, node);
    let event = Event::new(EventType::Health, node, "ignored a VM without a record");
    app.events.record(event.with("instance_uuid", vm.id.to_string()));
}
