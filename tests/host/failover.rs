//! The role of the network node moves to another host.

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muster_test_cluster::{ClusterDatabase, Host, HostCluster, VIRTUAL_IP, network_id};
use muster_testing::{NetworkNamespace, wait_for};
use muster_types::ids::NetworkId;
use nix::ifaddrs::getifaddrs;
use nix::sys::signal::Signal;
use nix::sys::socket::{
    AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, recv, sendto,
    socket,
};
use serde_json::json;

use crate::guest::Guest;
use crate::{TIMEOUT, enter};

/// The interval at which the referee asks for the owner of the virtual address.
const ASK_INTERVAL: Duration = Duration::from_millis(10);

type Answer = (Instant, [u8; 6]);

/// Asks continuously by ARP who has the virtual address, and records every answer.
struct Referee {
    stop: mpsc::Sender<()>,
    thread: JoinHandle<Vec<Answer>>,
}

impl Referee {
    fn start(namespace: &NetworkNamespace) -> Self {
        let (socket, link) = namespace.run(|| {
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            let socket = socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).unwrap();
            let mut entries = getifaddrs().unwrap().filter(|entry| entry.interface_name == "eth0");
            let link = entries.find_map(|entry| entry.address.as_ref()?.as_link_addr().copied()).unwrap();
            (socket, link)
        });
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::spawn(move || observe(&socket, link, &stopped));
        Self { stop, thread }
    }

    /// Returns the answers.
    fn finish(self) -> Vec<Answer> {
        self.stop.send(()).unwrap();
        self.thread.join().unwrap()
    }
}

fn observe(socket: &OwnedFd, link: LinkAddr, stopped: &mpsc::Receiver<()>) -> Vec<Answer> {
    let (virtual_ip, mac) = (VIRTUAL_IP.parse::<Ipv4Addr>().unwrap().octets(), link.addr().unwrap());
    let mut request = vec![0xff; 6];
    request.extend(mac);
    request.extend([0x08, 0x06, 0x00, 0x01, 0x08, 0x00, 6, 4, 0x00, 0x01]);
    request.extend(mac);
    request.extend([198, 51, 100, 1, 0, 0, 0, 0, 0, 0]);
    request.extend(virtual_ip);
    let mut answers = Vec::new();
    while stopped.recv_timeout(ASK_INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
        sendto(socket.as_raw_fd(), &request, &link, MsgFlags::empty()).unwrap();
        let mut frame = [0; 2048];
        while let Ok(length) = recv(socket.as_raw_fd(), &mut frame, MsgFlags::empty()) {
            let is_reply = length >= 42 && frame[12..14] == [0x08, 0x06] && frame[20..22] == [0, 2];
            if is_reply && frame[28..32] == virtual_ip {
                answers.push((Instant::now(), frame[22..28].try_into().unwrap()));
            }
        }
    }
    answers
}

/// Describes the answers before and after a fault, and returns the time between the last one of the old owner and the
/// first one of the new.
fn require_one_change(fault: &str, at: Instant, answers: &[Answer], [old, new]: [[u8; 6]; 2]) -> Duration {
    let mut macs: Vec<_> = answers.iter().map(|(_, mac)| *mac).collect();
    macs.dedup();
    assert_eq!(macs, [old, new], "{fault}: owners of the virtual address in the order of their answers");
    let last = answers.iter().rfind(|(_, mac)| *mac == old).unwrap().0;
    let first = answers.iter().find(|(_, mac)| *mac == new).unwrap().0;
    println!(
        "{fault}: silent after {:?}, gateway back after {:?}, gap {:?}",
        last - at,
        first - at,
        first - last
    );
    first - last
}

fn mac(host: &Host) -> [u8; 6] {
    host.namespace.run(|| {
        let mut entries = getifaddrs().unwrap().filter(|entry| entry.interface_name == "ext0");
        let link = |address: SockaddrStorage| address.as_link_addr().and_then(LinkAddr::addr);
        entries.find_map(|entry| link(entry.address?)).unwrap()
    })
}

/// Returns how often a host became the network node.
fn acquisitions(host: &Host) -> usize {
    host.log().matches("this node is the active network node").count()
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
        let referee = Referee::start(&self.cluster.external_peer);
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
        let gap = require_one_change(what, at, &referee.finish(), macs);
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
    // DHCP and DNS moved, too.
    scene.guest.namespace.sh("ip addr flush dev eth0");
    assert!(scene.guest.dhcp().starts_with("10.0.0.9/24 "));
    scene.guest.wait_until_resolved("guest", scene.guest.address());

    // The daemon hangs while its kernel still runs the router. It is the standby after it continued.
    scene.cluster.hosts[2].start();
    scene.fail_over("SIGSTOP", 2, 3, |host| host.signal(Signal::SIGSTOP));
    let referee = Referee::start(&scene.cluster.external_peer);
    scene.cluster.host(2).signal(Signal::SIGCONT);
    wait_for("the former owner to read the database", TIMEOUT, || {
        scene.cluster.host(2).log().contains("lost the role of the active network node").then_some(())
    });
    let owner = mac(scene.cluster.host(3));
    assert!(referee.finish().iter().all(|(_, mac)| *mac == owner), "the former owner answered");

    for (from, to) in [(3, 2), (2, 3)] {
        let gap = scene.fail_over("planned move", from, to, Host::stop);
        assert!(gap < Duration::from_secs(1), "{gap:?}");
        scene.cluster.hosts[from - 1].start();
    }
}
