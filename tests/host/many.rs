//! Many networks come and go while the daemon is killed again and again: nothing is left, and nothing foreign is hurt.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use muster_control::objects::interface::WantedAddress;
use muster_test_cluster::{ClusterDatabase, HostCluster, network_id, wait_until_same};
use muster_testing::{Daemon, DaemonSetup, wait_for};
use muster_types::ids::{InterfaceId, NetworkId};
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};

use crate::{PATIENCE, enter_alone};

const NETWORKS: usize = 500;
const KILLS: usize = 10;
const CALLERS: usize = 16;
/// How long one step of one network may take while everything else goes on, too.
const LONGEST: Duration = Duration::from_secs(120);

/// What there must be none of in the end. Addresses towards the world may rest.
const LEFTOVERS: [(&str, &str); 6] = [
    ("networks", "SELECT name FROM networks WHERE state <> 'deleted' AND name <> 'floating'"),
    ("interfaces", "SELECT uuid FROM interfaces WHERE state <> 'deleted'"),
    ("hardware addresses", "SELECT macaddr FROM hardware_addresses"),
    ("parts on nodes", "SELECT network_uuid FROM node_networks"),
    (
        "addresses",
        "SELECT n.name FROM addresses a JOIN networks n ON n.uuid = a.network_uuid WHERE n.name <> 'floating'",
    ),
    (
        "addresses towards the world",
        "SELECT a.kind FROM addresses a JOIN networks n ON n.uuid = a.network_uuid \
         WHERE a.kind <> 'halo' AND a.user_id <> n.uuid",
    ),
];
/// What there must never be any of.
const MISCOUNTS: [(&str, &str); 2] = [
    (
        "counted addresses",
        "SELECT n.name FROM address_blocks b JOIN networks n ON n.uuid = b.network_uuid WHERE n.name <> 'floating'",
    ),
    (
        "miscounted addresses",
        "SELECT b.bits FROM address_blocks b GROUP BY b.network_uuid, b.bits \
         HAVING SUM(b.taken) <> (SELECT COUNT(*) FROM addresses a WHERE a.network_uuid = b.network_uuid)",
    ),
];

/// Somebody who makes networks and removes them, whatever becomes of the daemon meanwhile.
#[derive(Debug, Clone)]
struct Caller {
    url: String,
    token: String,
    client: reqwest::Client,
}

impl Caller {
    /// Asks until somebody answers.
    async fn call(&self, method: Method, path: &str) -> (u16, Value) {
        let began = Instant::now();
        loop {
            let request = self.client.request(method.clone(), format!("{}{path}", self.url));
            if let Ok(answer) = request.bearer_auth(&self.token).send().await {
                let status = answer.status().as_u16();
                if let Ok(body) = answer.json().await
                    && status != 503
                {
                    return (status, body);
                }
            }
            assert!(began.elapsed() < LONGEST, "{method} {path}: nobody answers");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Makes a network once, though an answer may get lost.
    async fn create(&self, number: usize) -> NetworkId {
        let name = format!("n{number}");
        let began = Instant::now();
        loop {
            let (status, found) = self.call(Method::GET, &format!("/networks/{name}")).await;
            if status == 200 {
                return network_id(&found);
            }
            // In all combinations, of which some need an address towards the world.
            let request = json!({
                "name": name, "netblock": "10.0.0.0/24", "provide_dhcp": number & 1 == 0,
                "provide_nat": number & 2 == 0, "provide_dns": number & 4 == 0,
            });
            let url = format!("{}/networks", self.url);
            let answer = self.client.post(url).bearer_auth(&self.token).json(&request).send().await;
            if let Ok(answer) = answer {
                assert!([200, 503].contains(&answer.status().as_u16()), "{answer:?}");
            }
            assert!(began.elapsed() < LONGEST, "network {number} is not made");
        }
    }

    async fn wait_for_state(&self, network: NetworkId, state: &str) {
        let began = Instant::now();
        loop {
            let (status, record) = self.call(Method::GET, &format!("/networks/{network}")).await;
            assert!(status == 200 && record["state"] != "error", "{record}");
            if record["state"] == state {
                return;
            }
            assert!(began.elapsed() < LONGEST, "not {state}: {record}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The whole life of a network. Every tenth has an interface for some of it.
    async fn live(&self, number: usize, backdoor: &Interfaces) {
        let network = self.create(number).await;
        self.wait_for_state(network, "created").await;
        let interface = if number.is_multiple_of(10) { Some(backdoor.add(network).await) } else { None };
        let (status, answer) = self.call(Method::DELETE, &format!("/networks/{network}")).await;
        // An answer that got lost may have done it.
        assert!(status == 202 || (status == 404 && interface.is_none()), "{status}: {answer}");
        if let Some(interface) = interface {
            backdoor.remove(interface).await;
        }
        self.wait_for_state(network, "deleted").await;
    }
}

/// The way to interfaces from asynchronous code.
struct Interfaces {
    backdoor: Arc<ClusterDatabase>,
    node: muster_types::ids::NodeId,
}

impl Interfaces {
    async fn add(&self, network: NetworkId) -> InterfaceId {
        let (backdoor, node) = (Arc::clone(&self.backdoor), self.node);
        let add = move || backdoor.create_interface(network, node, "guest", WantedAddress::Any).id;
        tokio::task::spawn_blocking(add).await.unwrap()
    }

    async fn remove(&self, interface: InterfaceId) {
        let backdoor = Arc::clone(&self.backdoor);
        tokio::task::spawn_blocking(move || backdoor.delete_interface(interface)).await.unwrap();
    }
}

/// Kills the daemon whenever a part of the work is done, at some moment of the next.
async fn kill_again_and_again(setup: &DaemonSetup, mut daemon: Daemon, done: &AtomicUsize) -> Daemon {
    for kill in 1..=KILLS {
        while done.load(Ordering::Relaxed) < kill * NETWORKS / (KILLS + 1) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let moment = u64::from(NetworkId::new().0.as_bytes()[15]);
        tokio::time::sleep(Duration::from_millis(moment)).await;
        daemon.signal(Signal::SIGKILL);
        drop(daemon);
        daemon = setup.start();
    }
    daemon
}

#[test]
fn five_hundred_networks_and_ten_kills_leave_nothing_behind() {
    if !enter_alone("many::five_hundred_networks_and_ten_kills_leave_nothing_behind") {
        return;
    }
    let mut world = HostCluster::single_host(&[
        ("IP_DELETION_HALO_DURATION", "1"),
        ("FLOATING_NETWORK", "172.29.0.0/16"),
        ("CLUSTER_OP_MAX_ATTEMPTS", "20"),
    ]);
    let backdoor = Arc::new(ClusterDatabase::open(&world.database_url, &world.directory));
    let machine = &mut world.hosts[0];
    // What only looks similar.
    let foreign = NetworkId::new();
    machine.namespace.sh(&format!(
        "ip link add br-vxlan-abcdef type bridge; ip link add vxlan-abcdee type vxlan id 77 dstport 4790; \
         ip link add veth-abcdef-o type veth peer name veth-abcdef-i; nft add table bridge muster-abcdef; \
         ip netns add {foreign}; ip netns add mine"
    ));
    machine.record_initial_inventory();
    let before = machine.inventory();
    // The questions find something while there is something.
    let first = network_id(&machine.create_network(json!({ "name": "first" })));
    let interface = backdoor.create_interface(first, machine.node(), "guest", WantedAddress::Any).id;
    for (what, sql) in LEFTOVERS {
        assert!(!backdoor.first_column(sql).is_empty(), "no {what}");
    }
    machine.request_network_deletion(first);
    backdoor.delete_interface(interface);
    let caller = Caller {
        url: machine.url(),
        token: machine.token(),
        client: reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap(),
    };
    let interfaces = Interfaces { backdoor: Arc::clone(&backdoor), node: machine.node() };
    let (setup, daemon) = (machine.setup.clone(), machine.take_daemon());
    let began = Instant::now();
    let daemon = machine.namespace.run(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (next, done) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
        let (next, interfaces) = (Arc::new(next), Arc::new(interfaces));
        runtime.block_on(async {
            let callers: Vec<_> = (0..CALLERS)
                .map(|_| {
                    let (caller, interfaces) = (caller.clone(), Arc::clone(&interfaces));
                    let (next, done) = (Arc::clone(&next), Arc::clone(&done));
                    tokio::spawn(async move {
                        loop {
                            let number = next.fetch_add(1, Ordering::Relaxed);
                            if number >= NETWORKS {
                                return;
                            }
                            caller.live(number, &interfaces).await;
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            let killer = kill_again_and_again(&setup, daemon, &done);
            let work = async {
                for caller in callers {
                    caller.await.unwrap();
                }
            };
            tokio::join!(killer, work).0
        })
    });
    println!("{NETWORKS} networks and {KILLS} kills: {:?}", began.elapsed());
    machine.set_daemon(daemon);
    wait_until_same("nothing to be left", PATIENCE, &before, || machine.inventory());
    for (what, sql) in LEFTOVERS.into_iter().chain(MISCOUNTS) {
        wait_for(&format!("no {what} to be left: {:?}", backdoor.first_column(sql)), PATIENCE, || {
            backdoor.first_column(sql).is_empty().then_some(())
        });
    }
    let made = backdoor.first_column("SELECT name FROM networks WHERE name NOT IN ('floating', 'first')");
    assert_eq!(made.len(), NETWORKS, "{made:?}");
    let log = machine.log();
    assert_eq!(log.lines().filter(|line| line.contains(" serving ")).count(), KILLS + 1, "{log}");
    assert!(!log.contains("panicked") && !log.contains("ERROR"), "{log}");
}
