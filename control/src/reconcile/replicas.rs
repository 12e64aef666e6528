//! Copies the disks of instances with replicas to other nodes, and removes replicas that are not needed any longer. See
//! docs/decisions/0074.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::instance_replicas::{self, ReplicaRow};
use muster_store::instances::InstanceRow;
use muster_store::nodes::{self, NodeRow};
use muster_types::Result;
use muster_types::ids::{InstanceId, NodeId};
use muster_types::instance::PowerState;
use muster_types::node::NodeApi;
use muster_types::replica::ReplicaState;
use muster_types::settings::Settings;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::app::App;
use crate::objects::instance::{object, replica};
use muster_types::event::{Event, EventType};

/// The maximum interval between passes while an instance of this daemon has replicas.
const MAX_INTERVAL: Duration = Duration::from_secs(5);
/// The interval while no instance of this daemon has replicas. Few statements, because this is the case of most daemons.
const IDLE_INTERVAL: Duration = Duration::from_secs(20);
/// How often is measured how much a replica is behind.
const MEASURE_INTERVAL: Duration = Duration::from_secs(10);
/// The maximum number of copies at the same time.
const MAX_COPIES: usize = 4;
/// The maximum time after a failure until the next attempt.
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Returns a tenth of `REPLICA_INTERVAL`, between one second and [`MAX_INTERVAL`].
pub(super) fn interval(settings: &Settings) -> Duration {
    Duration::from_secs(settings.replica_interval).div_f64(10.0).clamp(Duration::from_secs(1), MAX_INTERVAL)
}

/// In-memory state kept between passes.
#[derive(Debug, Default)]
struct ReplicaReconcileState {
    copies: JoinSet<(InstanceId, bool)>,
    /// The instances that are being copied.
    copying: Vec<InstanceId>,
    /// The time of the next attempt, after a failure.
    retries: HashMap<InstanceId, Instant>,
    /// The time of the last measurement of each instance.
    measured: HashMap<InstanceId, Instant>,
    /// The instances without a node for their replica, with the reason, which is recorded once.
    unplaced: HashMap<InstanceId, String>,
}

/// Runs until `stop` is set. Copies in progress are abandoned then: replicas keep the copies that they have.
pub(super) async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let mut state = ReplicaReconcileState::default();
    while !*stop.borrow() {
        let started = Instant::now();
        let outcome = reconcile(&app, &mut state).await;
        app.metrics.passed("replicas", started, outcome.is_ok());
        let interval = match outcome {
            Ok(interval) => interval,
            Err(error) => {
                tracing::warn!(%error, "failed to reconcile replicas");
                IDLE_INTERVAL
            }
        };
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            Some(copied) = state.copies.join_next() => state.end_copy(&app, copied.ok()),
            _ = stop.changed() => {}
        }
    }
    state.copies.shutdown().await;
}

/// Makes one pass, and waits for the copies that it starts.
pub async fn run_once(app: &Arc<App>) -> Result<()> {
    let mut state = ReplicaReconcileState::default();
    reconcile(app, &mut state).await?;
    while state.copies.join_next().await.is_some() {}
    Ok(())
}

impl ReplicaReconcileState {
    fn end_copy(&mut self, app: &App, copied: Option<(InstanceId, bool)>) {
        match copied {
            Some((id, is_complete)) => {
                self.copying.retain(|copying| *copying != id);
                self.retries.remove(&id);
                if !is_complete {
                    let interval = Duration::from_secs(app.settings.replica_interval).min(MAX_RETRY_INTERVAL);
                    self.retries.insert(id, Instant::now() + interval);
                }
            }
            // A copy panicked. Which one is not known; the others are not started twice, because they end first.
            None if self.copies.is_empty() => self.copying.clear(),
            None => {}
        }
    }
}

fn local_node(app: &App, id: Option<NodeId>) -> Option<&Arc<dyn NodeApi>> {
    app.nodes.iter().find(|node| Some(node.identity().id) == id)
}

/// Makes one pass, and returns the time until the next one.
async fn reconcile(app: &Arc<App>, state: &mut ReplicaReconcileState) -> Result<Duration> {
    let own: Vec<NodeId> = app.nodes.iter().map(|node| node.identity().id).collect();
    if own.is_empty() {
        return Ok(IDLE_INTERVAL);
    }
    let (mut instances, replicas) = instance_replicas::of_nodes(&*app.store, &own).await?;
    instances.retain(|row| row.spec.replicas > 0);
    state.retries.retain(|id, _| instances.iter().any(|row| row.id == *id));
    state.unplaced.retain(|id, _| instances.iter().any(|row| row.id == *id));
    state.measured.retain(|id, _| instances.iter().any(|row| row.id == *id));
    if instances.is_empty() && replicas.is_empty() {
        return Ok(IDLE_INTERVAL);
    }
    for replica in replicas.iter().filter(|replica| replica.state == ReplicaState::Deleting) {
        let Some(node) = local_node(app, Some(replica.node)) else { continue };
        if let Err(error) = replica::remove(app, node, replica).await {
            tracing::warn!(instance = %replica.instance, %error, "failed to remove a replica");
        }
    }
    let nodes = nodes::list(&*app.store).await?;
    // The most outdated ones first, so that all get their turn.
    let last_complete = |row: &InstanceRow| {
        let last = replica::target(row, &replicas, &nodes).and_then(|replica| replica.last_complete);
        last.unwrap_or(f64::MIN)
    };
    instances.sort_by(|a, b| last_complete(a).total_cmp(&last_complete(b)));
    for row in &instances {
        if let Err(error) = measure(app, state, row, &replicas, &nodes).await {
            tracing::warn!(instance = %row.id, %error, "failed to record how much a replica is behind");
        }
    }
    for row in instances {
        if state.copies.len() >= MAX_COPIES {
            break;
        }
        if let Err(error) = start_copy(app, state, row, &replicas, &nodes).await {
            tracing::warn!(%error, "failed to start a copy to a replica");
        }
    }
    Ok(interval(&app.settings))
}

/// Measures how much the replica of an instance is behind, if that is due.
async fn measure(
    app: &App,
    state: &mut ReplicaReconcileState,
    row: &InstanceRow,
    replicas: &[ReplicaRow],
    nodes: &[NodeRow],
) -> Result<()> {
    let is_due = state.measured.get(&row.id).is_none_or(|last| last.elapsed() >= MEASURE_INTERVAL);
    // The end of a copy measures as well.
    if !is_due || state.copying.contains(&row.id) {
        return Ok(());
    }
    let complete = replica::target(row, replicas, nodes).filter(|replica| replica.last_complete.is_some());
    let (Some(replica), Some(node)) = (complete, local_node(app, row.node)) else { return Ok(()) };
    if replica::is_final(row, replica) {
        return Ok(());
    }
    state.measured.insert(row.id, Instant::now());
    replica::update_lag(app, node, row, replica).await
}

/// Starts a copy of the disks of an instance, if it is due.
async fn start_copy(
    app: &Arc<App>,
    state: &mut ReplicaReconcileState,
    row: InstanceRow,
    replicas: &[ReplicaRow],
    nodes: &[NodeRow],
) -> Result<()> {
    let id = row.id;
    let Some(node) = local_node(app, row.node) else { return Ok(()) };
    let existing = replica::target(&row, replicas, nodes);
    // Of a VM that was powered off, the last changes are copied once.
    let is_changing = match row.power_state {
        PowerState::On | PowerState::Paused => true,
        PowerState::Off | PowerState::Crashed => existing
            .is_some_and(|replica| replica.last_complete.is_some() && !replica::is_final(&row, replica)),
        PowerState::Initial | PowerState::Unknown => false,
    };
    let is_waiting = state.retries.get(&id).is_some_and(|retry| Instant::now() < *retry);
    if !is_changing || is_waiting || state.copying.contains(&id) {
        return Ok(());
    }
    let target = match existing {
        Some(target) => target.clone(),
        None => match replica::place(app, &row, replicas, nodes).await {
            Ok(target) => {
                state.unplaced.remove(&id);
                target
            }
            Err(error) => {
                state.retries.insert(id, Instant::now() + MAX_RETRY_INTERVAL);
                let reason = error.to_string();
                if state.unplaced.get(&id) != Some(&reason) {
                    let event = Event::new(EventType::Status, object(id), "no node for the replica");
                    app.events.record(event.with("reason", reason.clone()));
                    state.unplaced.insert(id, reason);
                }
                return Ok(());
            }
        },
    };
    #[expect(clippy::cast_precision_loss, reason = "a number of seconds")]
    let interval = app.settings.replica_interval as f64;
    let due = match row.power_state {
        PowerState::Off | PowerState::Crashed => f64::MIN,
        _ => target.last_complete.map_or(f64::MIN, |time| time + interval),
    };
    if app.store.membership.database_time() < due {
        return Ok(());
    }
    let Some(target_node) = nodes.iter().find(|node| node.identity.id == target.node).cloned() else {
        return Ok(());
    };
    let (app, node) = (Arc::clone(app), Arc::clone(node));
    state.copying.push(id);
    state.copies.spawn(async move {
        let copied = replica::copy(&app, &node, &row, &target, &target_node).await;
        if let Err(error) = &copied {
            tracing::warn!(instance = %id, %error, "failed to copy disks to a replica");
        }
        (id, copied.is_ok())
    });
    Ok(())
}
