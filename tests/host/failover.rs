//! The role of the network node moves to another host.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use muster_test_cluster::{ClusterDatabase, Host, HostCluster, VIRTUAL_IP, network_id};
use muster_testing::{ArpAnswer, ArpObserver, Mac, mac_address, wait_for};
use muster_types::ids::NetworkId;
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::json;

use crate::guest::Guest;
use crate::{TIMEOUT, enter};

/// Asks for the virtual address from outside.
fn start_observer(cluster: &HostCluster) -> ArpObserver {
    let source = Ipv4Addr::new(198, 51, 100, 1);
    ArpObserver::start(&cluster.external_peer, source, vec![VIRTUAL_IP.parse().unwrap()])
}

/// Describes the answers before and after a fault, and returns the time between the last one of the old owner and the
/// first one of the new.
fn require_one_change(fault: &str, at: Instant, answers: &[ArpAnswer], [old, new]: [Mac; 2]) -> Duration {
    let mut macs: Vec<_> = answers.iter().map(|answer| answer.mac).collect();
    macs.dedup();
    assert_eq!(macs, [old, new], "{fault}: owners of the virtual address in the order of their answers");
    let last = answers.iter().rfind(|answer| answer.mac == old).unwrap().at;
    let first = answers.iter().find(|answer| answer.mac == new).unwrap().at;
    println!(
        "{fault}: silent after {:?}, gateway back after {:?}, gap {:?}",
        last - at,
        first - at,
        first - last
    );
    first - last
}

fn mac(host: &Host) -> Mac {
    host.namespace.run(|| mac_address("ext0").unwrap())
}

/// Returns how often a host became the network node.
fn acquisitions(host: &Host) -> usize {
    host.log().matches("this node is the active network node").count()
}

/// Requires that the last event of a network about its gateway names the nodes between which it moved.
fn require_moved(host: &Host, network: NetworkId, from: &str, to: &str) {
    // Events are written asynchronously.
    wait_for("the event of the move", TIMEOUT, || {
        let events = host.events(network, "gateway moved to another node");
        (events.first()?["extra"] == json!({ "from": from, "to": to })).then_some(())
    });
}

/// Two hosts that may be the network node, a guest on another host, and an external peer.
struct Scene {
    network: NetworkId,
    // Dropped before the cluster, whose hosts have its device.
    guest: Guest,
    floating: String,
    cluster: HostCluster,
}

impl Scene {
    fn new() -> Option<Self> {
        let cluster = HostCluster::with_network_standby(3, &[("NETWORK_NODE_LEASE", "3")])?;
        let database = ClusterDatabase::open(&cluster.database_url, &cluster.directory);
        let network =
            network_id(&cluster.host(1).create_network(json!({ "name": "one", "provide_dns": true })));
        let guest = Guest::new(&database, cluster.host(1), network, "guest", "10.0.0.9");
        guest.dhcp();
        let interface = format!("/interfaces/{}", guest.interface.id);
        cluster.host(1).post(&format!("{interface}/float"), None);
        let floating = cluster.host(1).get(&interface)["floating"].as_str().unwrap().to_owned();
        Some(Self { network, guest, floating, cluster })
    }

    /// Waits until a host has the router of the network.
    fn wait_for_router(&self, number: usize) {
        let script = format!(
            "ip netns exec {} ip -o addr | grep -q '10.0.0.1/24.*veth' && \
             ip netns exec {0} ip -o addr | grep -q '{}/32'",
            self.network, self.floating
        );
        wait_for("the standby to have the router", TIMEOUT, || {
            self.cluster.host(number).namespace.succeeds(&script).then_some(())
        });
    }

    /// Causes a fault of a host, waits until the other answers, and returns the gap.
    fn fail_over(&mut self, what: &str, from: usize, to: usize, fault: impl FnOnce(&mut Host)) -> Duration {
        self.wait_for_router(to);
        let macs = [mac(self.cluster.host(from)), mac(self.cluster.host(to))];
        assert!(self.cluster.external_peer.pings(&self.floating), "{what}: not reachable before");
        // Two routers that answer the guest would be reported as duplicates.
        self.guest.namespace.sh("ping -n -i 0.02 10.0.0.1 > /run/ping 2>&1 & echo $! > /run/pid");
        let observer = start_observer(&self.cluster);
        wait_for("the first answer", TIMEOUT, || {
            self.cluster
                .external_peer
                .succeeds(&format!("ip neigh show {VIRTUAL_IP} | grep -q lladdr"))
                .then_some(())
        });
        let acquired = acquisitions(self.cluster.host(to));
        let at = Instant::now();
        fault(&mut self.cluster.hosts[from - 1]);
        wait_for("the other host to be the network node", TIMEOUT, || {
            (acquisitions(self.cluster.host(to)) > acquired).then_some(())
        });
        wait_for("the floating address", TIMEOUT, || {
            self.cluster
                .external_peer
                .succeeds(&format!("ping -n -c 1 -W 0.2 {}", self.floating))
                .then_some(())
        });
        println!("{what}: floating address reachable after {:?}", at.elapsed());
        assert!(self.guest.namespace.pings("10.0.0.1"), "{what}: no gateway");
        let gap = require_one_change(what, at, &observer.finish(), macs);
        self.guest.namespace.sh("kill -INT $(cat /run/pid)");
        let pings = self.guest.namespace.sh("cat /run/ping");
        assert!(!pings.contains("DUP"), "{what}: two routers answered: {pings}");
        gap
    }
}

#[test]
fn standby_takes_over_and_former_owner_stays_silent() {
    if !enter("failover::standby_takes_over_and_former_owner_stays_silent") {
        return;
    }
    let Some(mut scene) = Scene::new() else { return };
    scene.fail_over("kill -9", 3, 2, Host::kill);
    require_moved(scene.cluster.host(2), scene.network, "m3", "m2");
    // DHCP and DNS moved, too.
    scene.guest.namespace.sh("ip addr flush dev eth0");
    assert!(scene.guest.dhcp().starts_with("10.0.0.9/24 "));
    scene.guest.wait_until_resolved("guest", scene.guest.address());

    // The daemon hangs while its kernel still runs the router. It is the standby after it continued.
    scene.cluster.hosts[2].start();
    scene.fail_over("SIGSTOP", 2, 3, |host| host.signal(Signal::SIGSTOP));
    let observer = start_observer(&scene.cluster);
    scene.cluster.host(2).signal(Signal::SIGCONT);
    wait_for("the former owner to read the database", TIMEOUT, || {
        scene.cluster.host(2).log().contains("lost the role of the active network node").then_some(())
    });
    let owner = mac(scene.cluster.host(3));
    assert!(observer.finish().iter().all(|answer| answer.mac == owner), "the former owner answered");

    for (from, to) in [(3, 2), (2, 3)] {
        let gap = scene.fail_over("planned move", from, to, Host::stop);
        assert!(gap < Duration::from_secs(1), "{gap:?}");
        scene.cluster.hosts[from - 1].start();
    }
}

#[test]
fn standby_takes_over_before_the_owner_is_deleted() {
    if !enter("failover::standby_takes_over_before_the_owner_is_deleted") {
        return;
    }
    let Some(mut scene) = Scene::new() else { return };
    let gap = scene.fail_over("deletion", 3, 2, |host| {
        host.post("/nodes/m3/drain", None);
        let (status, node) = host.call(Method::DELETE, "/nodes/m3", None);
        assert_eq!((status, &node["state"]), (200, &json!("deleted")), "{node}");
    });
    assert!(gap < Duration::from_secs(1), "{gap:?}");
    require_moved(scene.cluster.host(2), scene.network, "m3", "m2");
    scene.cluster.hosts.pop().unwrap().kill();
}

#[test]
fn standby_takes_over_from_owner_that_does_not_reach_its_peers() {
    if !enter("failover::standby_takes_over_from_owner_that_does_not_reach_its_peers") {
        return;
    }
    let Some(mut scene) = Scene::new() else { return };
    // The host still reaches the database and the external network.
    scene.fail_over("mesh cut", 3, 2, |host| {
        host.namespace
            .sh("nft 'add table inet cut; add chain inet cut in { type filter hook input priority -300; }; \
             add rule inet cut in iifname mesh0 drop'");
    });
    scene.cluster.host(3).namespace.sh("nft delete table inet cut");
    wait_for("the former owner to reach its peers", TIMEOUT, || {
        scene.cluster.host(3).log().contains("this node reaches its peers again").then_some(())
    });
}

#[test]
fn candidate_takes_over_after_the_only_other_one_was_deleted() {
    if !enter("failover::candidate_takes_over_after_the_only_other_one_was_deleted") {
        return;
    }
    let settings =
        [("NODE_IS_NETWORK_NODE", "false"), ("NETWORK_NODE_LEASE", "3"), ("NODE_CHECKIN_MAXIMUM", "3")];
    let Some(mut cluster) = HostCluster::with_network_standby(2, &settings) else { return };
    cluster.hosts[1].restart_with("NODE_IS_NETWORK_NODE", "true");
    let database = ClusterDatabase::open(&cluster.database_url, &cluster.directory);
    let network = network_id(&cluster.host(1).create_network(json!({ "name": "one" })));
    let guest = Guest::new(&database, cluster.host(1), network, "guest", "10.0.0.9");
    guest.dhcp();

    // The lease of the only candidate does not expire, so no other node takes over from its host, which is frozen and cut off.
    let mut lost = cluster.hosts.pop().unwrap();
    let mut frozen = lost.take_daemon();
    frozen.freeze();
    lost.namespace.sh("ip link set mesh0 down && ip link set ext0 down");
    cluster.hosts[0].restart_with("NODE_IS_NETWORK_NODE", "true");
    let host = cluster.host(1);
    wait_for("the lost node to be missing", TIMEOUT, || {
        (host.get("/nodes/m2")["state"] == "missing").then_some(())
    });
    let router = format!("ip netns exec {network} ip -o addr | grep -q '10.0.0.1/24.*veth'");
    wait_for("the candidate to have the router", TIMEOUT, || host.namespace.succeeds(&router).then_some(()));
    assert_eq!(acquisitions(host), 0, "{}", host.log());
    assert!(guest.namespace.cannot_ping("10.0.0.1"));

    let (status, response) = host.call(Method::DELETE, "/nodes/m2?dead=true", None);
    assert_eq!(status, 200, "{response}");
    wait_for("the candidate to be the network node", TIMEOUT, || (acquisitions(host) == 1).then_some(()));
    assert!(guest.namespace.pings("10.0.0.1"), "no gateway");
    require_moved(host, network, "m2", "m1");

    // The gate of the deleted node has no timeout, so its daemon must close it.
    let is_open = "nft list set ip muster-gate open | grep -q elements";
    assert!(lost.namespace.succeeds(is_open));
    lost.namespace.sh("ip link set mesh0 up");
    frozen.signal(Signal::SIGCONT);
    assert_eq!(frozen.wait_for_exit().code(), Some(9), "{}", frozen.log());
    assert!(!lost.namespace.succeeds(is_open), "{}", frozen.log());
}
