//! Probes some of the other nodes, to find out whether this daemon reaches its peers. A node that reaches the database but
//! not its peers is degraded: it gets no new instances, because their networks would be cut off from the others, and it
//! hands the role of the network node over. See docs/decisions/0056.

use std::collections::HashSet;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::node_networks;
use muster_store::nodes::NodeRow;
use muster_types::Result;
use muster_types::event::{Event, EventType};
use muster_types::ids::NodeId;
use muster_types::node::NodeState;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::settings::Settings;
use tokio::net::TcpSocket;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval_at};

use super::checkin;
use crate::app::App;

/// The number of peers that a daemon probes.
const MAX_PROBED: usize = 3;
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// The time after which the peers are read again although they were reached.
const PEERS_TTL: Duration = Duration::from_secs(60);
/// The time after which the nodes are read again if no other daemon was up, unless their number changes.
const NO_PEERS_TTL: Duration = Duration::from_secs(30);
/// The maximum interval of passes. Another network node must be able to take over within 25 seconds of a partition.
const MAX_PROBE_INTERVAL: Duration = Duration::from_secs(3);
/// The number of consecutive passes without any reachable peer after which the nodes of this daemon are degraded.
const DEGRADED_AFTER: u32 = 4;
/// The number of these passes after which a peer must check in to count as alive.
const PEERS_ALIVE_AFTER: u32 = 2;
/// The age of a peer's last check-in, in check-in intervals, up to which it must be reachable.
const MAX_CHECKIN_AGE: f64 = 2.0;

/// Returns the time between the starts of two passes.
pub(super) fn probe_interval(settings: &Settings) -> Duration {
    Duration::from_secs_f64(settings.node_checkin_interval).min(MAX_PROBE_INTERVAL)
}

/// Probes periodically until `stop` is set.
pub(super) async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let period = probe_interval(&app.settings);
    let mut interval = interval_at(tokio::time::Instant::now() + period, period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut probes = MeshProbes::default();
    while !*stop.borrow() {
        tokio::select! {
            _ = interval.tick() => {}
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
    /// Whether the last pass found no peers.
    is_alone: bool,
    /// Peers that the last pass reached, and when they were read from the database.
    reached: Option<(Instant, Vec<NodeRow>)>,
    /// The time of the last check-in of any node at the pass [`PEERS_ALIVE_AFTER`]. A peer that has died does not check in
    /// later.
    last_checkin: f64,
}

impl MeshProbes {
    /// Probes some peers once, and records when the nodes of this daemon become degraded or recover.
    pub async fn pass(&mut self, app: &App) -> Result<()> {
        let cached = self.reached.take().filter(|(read_at, _)| read_at.elapsed() < PEERS_TTL);
        let mut unreached = Vec::new();
        if let Some((read_at, peers)) = cached {
            if reaches_any(app, &peers).await {
                self.reached = Some((read_at, peers));
                return Ok(());
            }
            unreached = peers.iter().map(|peer| peer.identity.id).collect();
        }
        let read_at = Instant::now();
        let own: Vec<NodeId> = app.nodes.iter().map(|node| node.identity().id).collect();
        let max_checkin_age = MAX_CHECKIN_AGE * app.settings.node_checkin_interval;
        // The check-ins of peers must be current.
        let max_age = if self.is_alone { NO_PEERS_TTL } else { Duration::ZERO };
        let rows = app.node_cache.get(&app.store, max_age).await?;
        let last_checkin = rows.iter().map(|row| row.lastseen).fold(0.0, f64::max);
        let probed = peers_to_probe(&own, &rows, max_checkin_age);
        self.is_alone = probed.is_empty();
        let is_new = |peer: &NodeRow| !unreached.contains(&peer.identity.id);
        if probed.is_empty() || (probed.iter().any(is_new) && reaches_any(app, &probed).await) {
            self.failed_passes = 0;
            self.reached = Some((read_at, probed.clone())).filter(|(_, peers)| !peers.is_empty());
        } else {
            self.failed_passes = self.failed_passes.saturating_add(1);
            if self.failed_passes <= PEERS_ALIVE_AFTER {
                self.last_checkin = last_checkin;
            }
        }
        let is_alive = |peer: &NodeRow| peer.lastseen > self.last_checkin;
        let is_degraded = self.failed_passes >= DEGRADED_AFTER && probed.iter().any(is_alive);
        let names: Vec<&str> = probed.iter().map(|peer| peer.identity.name.as_str()).collect();
        let reason = is_degraded.then(|| {
            format!(
                "it reaches the database but none of the nodes {}: check its network, NODE_PORT and the mesh addresses",
                names.join(", ")
            )
        });
        if app.peers.set_degraded(reason.clone()) {
            // Another network node takes over as soon as it is known.
            let reported = checkin::report(app, false).await;
            app.node_cache.clear();
            record_change(app, &own, reason).await?;
            reported?;
        }
        Ok(())
    }
}

/// Returns whether one of some peers is reached.
async fn reaches_any(app: &App, peers: &[NodeRow]) -> bool {
    let probes = peers.iter().map(|peer| async move {
        let probed = probe(app, peer).await;
        probed.inspect_err(|error| tracing::debug!(node = peer.identity.name, error, "failed to probe peer"))
    });
    futures_util::future::join_all(probes).await.iter().any(std::result::Result::is_ok)
}

/// Checks that the daemon of a peer responds, and that the mesh between the hosts works.
async fn probe(app: &App, peer: &NodeRow) -> Result<(), String> {
    let daemon = async {
        let responded = app.peers.probe(peer, PROBE_TIMEOUT).await;
        responded.map_err(|error| error.to_string())
    };
    let mesh = async {
        let Some(address) = peer.report.node_address.filter(|_| !peer.identity.simulated) else {
            return Ok(());
        };
        // Simulated nodes have no address on the mesh.
        let source = app.nodes.first().map(|node| node.identity()).filter(|identity| !identity.simulated);
        let address = SocketAddrV4::new(peer.identity.ip, address.port());
        let probed = probe_mesh(source.map(|identity| identity.ip), address).await;
        probed.map_err(|error| format!("mesh address {address}: {error}"))
    };
    tokio::try_join!(daemon, mesh).map(|_| ())
}

/// Checks that packets from the address `source` of this host reach `address`, and that the replies arrive. The API of the
/// peer may have another address, so that a refused connection is a reply, too.
async fn probe_mesh(source: Option<Ipv4Addr>, address: SocketAddrV4) -> io::Result<()> {
    let socket = TcpSocket::new_v4()?;
    if let Some(source) = source {
        socket.bind((source, 0).into())?;
    }
    match tokio::time::timeout(PROBE_TIMEOUT, socket.connect(address.into())).await {
        Ok(Err(error)) if error.kind() != ErrorKind::ConnectionRefused => Err(error),
        Ok(_) => Ok(()),
        Err(_) => Err(ErrorKind::TimedOut.into()),
    }
}

/// Returns the peers to probe: the next ones by id that have checked in as recently as this daemon. Each daemon is
/// probed by others, whatever their number.
fn peers_to_probe(own: &[NodeId], rows: &[NodeRow], max_age: f64) -> Vec<NodeRow> {
    let own_rows = rows.iter().filter(|row| own.contains(&row.identity.id));
    let last_checkin = own_rows.map(|row| row.lastseen).fold(0.0, f64::max);
    let mut peers: Vec<NodeRow> = rows
        .iter()
        .filter(|row| !own.contains(&row.identity.id) && row.state == NodeState::Created)
        .filter(|row| row.report.node_address.is_some() && row.lastseen >= last_checkin - max_age)
        .cloned()
        .collect();
    let first = own.iter().min().copied();
    peers.sort_by_key(|row| (Some(row.identity.id) < first, row.identity.id));
    // The nodes of one daemon have the same address.
    let mut addresses = HashSet::new();
    peers.retain(|row| addresses.insert(row.report.node_address));
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

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener};

    use muster_types::node::{NodeIdentity, NodeReport};
    use uuid::Uuid;

    use super::*;
    use crate::reconcile::network_role;

    #[test]
    fn partition_is_noticed_in_time_for_another_network_node_to_take_over() {
        let settings = Settings::defaults();
        let noticed = probe_interval(&settings) * DEGRADED_AFTER + PROBE_TIMEOUT;
        // The owner reads its row when it renews its lease, and waits for its successor.
        let handed_over = network_role::renew_interval(&settings) + network_role::HANDOVER_TIMEOUT;
        let promised = Duration::from_secs(25);
        assert!(noticed + handed_over + Duration::from_secs(2) <= promised, "{noticed:?} + {handed_over:?}");
    }

    #[test]
    fn each_daemon_is_probed_once_however_many_nodes_it_has() {
        let node = |id: u128, port: u16| NodeRow {
            identity: NodeIdentity {
                id: NodeId(Uuid::from_u128(id)),
                name: id.to_string(),
                ip: Ipv4Addr::LOCALHOST,
                release: String::new(),
                simulated: false,
                is_hypervisor: true,
                is_network_node: false,
                is_database_node: false,
            },
            state: NodeState::Created,
            lastseen: 1.0,
            report: NodeReport {
                node_address: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
                ..NodeReport::default()
            },
            created: 0.0,
            version: 1,
            epoch: 1,
            started: 0.0,
            lock_file: String::new(),
            clock_skew: 0.0,
            cordon: None,
        };
        let own = [NodeId(Uuid::from_u128(1))];
        let rows = vec![node(1, 1), node(2, 2), node(3, 3), node(4, 2), node(5, 3)];
        let ports = peers_to_probe(&own, &rows, 10.0);
        let ports: Vec<u16> =
            ports.iter().filter_map(|row| row.report.node_address).map(|address| address.port()).collect();
        assert_eq!(ports, [2, 3]);
    }

    #[tokio::test]
    async fn refused_connection_proves_that_the_mesh_works() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let source = Some(Ipv4Addr::new(127, 0, 0, 7));
        let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
        probe_mesh(source, address).await.unwrap();
        drop(listener);
        probe_mesh(source, address).await.unwrap();
        // No host has this address, and packets to it are not sent.
        probe_mesh(None, SocketAddrV4::new(Ipv4Addr::BROADCAST, port)).await.unwrap_err();
        // This host does not have the address.
        probe_mesh(Some(Ipv4Addr::new(192, 0, 2, 1)), address).await.unwrap_err();
    }
}
