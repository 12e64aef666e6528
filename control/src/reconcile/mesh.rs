//! Probes some of the other nodes, to find out whether this daemon reaches its peers. A node that reaches the database but
//! not its peers is degraded: it gets no new instances, because their networks would be cut off from the others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::nodes::NodeRow;
use muster_store::{node_networks, nodes};
use muster_types::Result;
use muster_types::event::{Event, EventType};
use muster_types::ids::NodeId;
use muster_types::node::NodeState;
use muster_types::object::{ObjectRef, ObjectType};
use tokio::sync::watch;

use crate::app::App;

/// The number of peers that a daemon probes.
const MAX_PROBED: usize = 3;
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// The time after which the peers are read again although they were reached.
const PEERS_TTL: Duration = Duration::from_secs(60);
/// The number of consecutive passes without any reachable peer after which the nodes of this daemon are degraded. A peer that
/// dies is probed less often before its check-ins are too old.
const DEGRADED_AFTER: u32 = 5;
/// The age of a peer's last check-in, in check-in intervals, up to which it must be reachable.
const MAX_CHECKIN_AGE: f64 = 2.0;

/// Probes periodically until `stop` is set.
pub(super) async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let interval = Duration::from_secs_f64(app.settings.node_checkin_interval);
    let mut probes = MeshProbes::default();
    while !*stop.borrow() {
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            _ = stop.changed() => continue,
        }
        // A daemon without a port for other daemons is the only one of its cluster.
        if app.peers.is_listening()
            && let Err(error) = probes.pass(&app).await
        {
            tracing::warn!(%error, "failed to probe the other nodes");
        }
    }
}

/// The results of the last probes.
#[derive(Debug, Default)]
pub struct MeshProbes {
    failed_passes: u32,
    /// Peers that the last pass reached, and when they were read from the database.
    reached: Option<(Instant, Vec<NodeRow>)>,
}

impl MeshProbes {
    /// Probes some peers once, and records when the nodes of this daemon become degraded or recover.
    pub async fn pass(&mut self, app: &App) -> Result<()> {
        let cached = self.reached.take().filter(|(read_at, _)| read_at.elapsed() < PEERS_TTL);
        let mut unreached = Vec::new();
        if let Some((read_at, peers)) = cached {
            if probe(app, &peers).await {
                self.reached = Some((read_at, peers));
                return Ok(());
            }
            unreached = peers.iter().map(|peer| peer.identity.id).collect();
        }
        let read_at = Instant::now();
        let own: Vec<NodeId> = app.nodes.iter().map(|node| node.identity().id).collect();
        let max_age = MAX_CHECKIN_AGE * app.settings.node_checkin_interval;
        let probed = peers_to_probe(&own, nodes::list(&*app.store).await?, max_age);
        let is_new = |peer: &NodeRow| !unreached.contains(&peer.identity.id);
        if probed.is_empty() || (probed.iter().any(is_new) && probe(app, &probed).await) {
            self.failed_passes = 0;
            self.reached = Some((read_at, probed.clone())).filter(|(_, peers)| !peers.is_empty());
        } else {
            self.failed_passes = self.failed_passes.saturating_add(1);
        }
        let is_degraded = self.failed_passes >= DEGRADED_AFTER;
        let names: Vec<&str> = probed.iter().map(|peer| peer.identity.name.as_str()).collect();
        let reason = is_degraded.then(|| {
            format!("it reaches the database but none of the nodes {}: check its network", names.join(", "))
        });
        if app.peers.set_degraded(reason.clone()) {
            record_change(app, &own, reason).await?;
        }
        Ok(())
    }
}

/// Returns whether one of some peers is reached.
async fn probe(app: &App, peers: &[NodeRow]) -> bool {
    let probes = peers.iter().map(|peer| async move {
        let probed = app.peers.probe(peer, PROBE_TIMEOUT).await;
        probed.inspect_err(|error| tracing::debug!(node = peer.identity.name, %error, "failed to probe peer"))
    });
    futures_util::future::join_all(probes).await.iter().any(std::result::Result::is_ok)
}

/// Returns the peers to probe: the next ones by id that have checked in as recently as this daemon. Each daemon is
/// probed by others, whatever their number.
fn peers_to_probe(own: &[NodeId], rows: Vec<NodeRow>, max_age: f64) -> Vec<NodeRow> {
    let own_rows = rows.iter().filter(|row| own.contains(&row.identity.id));
    let last_checkin = own_rows.map(|row| row.lastseen).fold(0.0, f64::max);
    let mut peers: Vec<NodeRow> = rows
        .into_iter()
        .filter(|row| !own.contains(&row.identity.id) && row.state == NodeState::Created)
        .filter(|row| row.report.node_address.is_some() && row.lastseen >= last_checkin - max_age)
        .collect();
    let first = own.iter().min().copied();
    peers.sort_by_key(|row| (Some(row.identity.id) < first, row.identity.id));
    // The nodes of one daemon have the same address.
    peers.dedup_by_key(|row| row.report.node_address);
    peers.truncate(MAX_PROBED);
    peers
}

/// Records on the nodes of this daemon, and on the networks that they have, that they became degraded or recovered.
async fn record_change(app: &App, own: &[NodeId], reason: Option<String>) -> Result<()> {
    let message =
        if reason.is_some() { "node became degraded" } else { "node recovered from its degradation" };
    let networks = node_networks::of_nodes(&*app.store, own).await?;
    for node in &app.nodes {
        let identity = node.identity();
        let objects = networks.iter().filter(|row| row.node == identity.id);
        let objects = objects.map(|row| ObjectRef::new(ObjectType::Network, row.network));
        for object in objects.chain([ObjectRef::new(ObjectType::Node, identity.id)]) {
            let event = Event::new(EventType::Status, object, message).with("node", identity.name.clone());
            app.events.record(event.with("reason", reason.clone()));
        }
    }
    match reason {
        Some(reason) => tracing::warn!(reason, "this node is degraded and gets no new instances"),
        None => tracing::info!("this node reaches its peers again"),
    }
    Ok(())
}
