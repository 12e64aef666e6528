//! Many networks are created and deleted while the daemon is killed repeatedly: no orphans remain, and devices of the
//! operator are not changed.

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

use crate::{TIMEOUT, enter_exclusively};

const NETWORKS: usize = 500;
const KILLS: usize = 10;
const CLIENTS: usize = 16;
/// The timeout of one step of one network while all others are in progress.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);

/// Queries that find orphans. Floating addresses may be in quarantine.
const ORPHAN_QUERIES: [(&str, &str); 6] = [
    ("networks", "SELECT name FROM networks WHERE state <> 'deleted' AND name <> 'floating'"),
    ("interfaces", "SELECT uuid FROM interfaces WHERE state <> 'deleted'"),
    ("hardware addresses", "SELECT macaddr FROM hardware_addresses"),
    ("networks on nodes", "SELECT network_uuid FROM node_networks"),
    (
        "addresses",
        "SELECT n.name FROM addresses a JOIN networks n ON n.uuid = a.network_uuid WHERE n.name <> 'floating'",
    ),
    (
        "floating addresses",
        "SELECT a.kind FROM addresses a JOIN networks n ON n.uuid = a.network_uuid \
         WHERE a.kind <> 'halo' AND a.user_id <> n.uuid",
    ),
];
/// Queries that find wrong address counts.
const MISCOUNT_QUERIES: [(&str, &str); 2] = [
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

/// A client that creates and deletes networks and retries while the daemon is down.
#[derive(Debug, Clone)]
struct Client {
    url: String,
    token: String,
    http: reqwest::Client,
}

impl Client {
    /// Repeats a call until there is a response other than 503.
    async fn call(&self, method: Method, path: &str) -> (u16, Value) {
        let began = Instant::now();
        loop {
            let request = self.http.request(method.clone(), format!("{}{path}", self.url));
            if let Ok(response) = request.bearer_auth(&self.token).send().await {
                let status = response.status().as_u16();
                if let Ok(body) = response.json().await
                    && status != 503
                {
                    return (status, body);
                }
            }
            assert!(began.elapsed() < STEP_TIMEOUT, "{method} {path}: no response");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Creates a network once, although responses may get lost.
    async fn create(&self, number: usize) -> NetworkId {
        let name = format!("n{number}");
        let began = Instant::now();
        loop {
            let (status, found) = self.call(Method::GET, &format!("/networks/{name}")).await;
            if status == 200 {
                return network_id(&found);
            }
            // All combinations, of which some need a floating address.
            let request = json!({
                "name": name, "netblock": "10.0.0.0/24", "provide_dhcp": number & 1 == 0,
                "provide_nat": number & 2 == 0, "provide_dns": number & 4 == 0,
            });
            let url = format!("{}/networks", self.url);
            let response = self.http.post(url).bearer_auth(&self.token).json(&request).send().await;
            if let Ok(response) = response {
                assert!([200, 503].contains(&response.status().as_u16()), "{response:?}");
            }
            assert!(began.elapsed() < STEP_TIMEOUT, "timed out creating network {number}");
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
            assert!(began.elapsed() < STEP_TIMEOUT, "not {state}: {record}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Creates and deletes a network. Every tenth has an interface for some time.
    async fn create_and_delete(&self, number: usize, interfaces: &Interfaces) {
        let network = self.create(number).await;
        self.wait_for_state(network, "created").await;
        let interface = if number.is_multiple_of(10) { Some(interfaces.add(network).await) } else { None };
        let (status, response) = self.call(Method::DELETE, &format!("/networks/{network}")).await;
        // An earlier request whose response got lost may have deleted it.
        assert!(status == 202 || (status == 404 && interface.is_none()), "{status}: {response}");
        if let Some(interface) = interface {
            interfaces.remove(interface).await;
        }
        self.wait_for_state(network, "deleted").await;
    }
}

/// Creates and deletes interfaces from asynchronous code.
struct Interfaces {
    database: Arc<ClusterDatabase>,
    node: muster_types::ids::NodeId,
}

impl Interfaces {
    async fn add(&self, network: NetworkId) -> InterfaceId {
        let (database, node) = (Arc::clone(&self.database), self.node);
        let add = move || database.create_interface(network, node, "guest", WantedAddress::Any).id;
        tokio::task::spawn_blocking(add).await.unwrap()
    }

    async fn remove(&self, interface: InterfaceId) {
        let database = Arc::clone(&self.database);
        tokio::task::spawn_blocking(move || database.delete_interface(interface)).await.unwrap();
    }
}

/// Kills and restarts the daemon whenever another part of the work is done, after a random delay.
async fn kill_repeatedly(setup: &DaemonSetup, mut daemon: Daemon, done: &AtomicUsize) -> Daemon {
    for kill in 1..=KILLS {
        while done.load(Ordering::Relaxed) < kill * NETWORKS / (KILLS + 1) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let delay = u64::from(NetworkId::new().0.as_bytes()[15]);
        tokio::time::sleep(Duration::from_millis(delay)).await;
        daemon.signal(Signal::SIGKILL);
        drop(daemon);
        daemon = setup.start();
    }
    daemon
}

#[test]
fn network_churn_with_kills_leaves_no_orphans() {
    if !enter_exclusively("network_churn::network_churn_with_kills_leaves_no_orphans") {
        return;
    }
    let mut cluster = HostCluster::single_host(&[
        ("IP_DELETION_HALO_DURATION", "1"),
        ("FLOATING_NETWORK", "172.29.0.0/16"),
        ("CLUSTER_OP_MAX_ATTEMPTS", "20"),
    ]);
    let database = Arc::new(ClusterDatabase::open(&cluster.database_url, &cluster.directory));
    let host = &mut cluster.hosts[0];
    // Devices of the operator with similar names.
    let foreign = NetworkId::new();
    host.namespace.sh(&format!(
        "ip link add br-vxlan-abcdef type bridge; ip link add vxlan-abcdee type vxlan id 77 dstport 4790; \
         ip link add veth-abcdef-o type veth peer name veth-abcdef-i; nft add table bridge muster-abcdef; \
         ip netns add {foreign}; ip netns add mine"
    ));
    host.record_initial_inventory();
    let before = host.inventory();
    // The queries find the objects while they exist.
    let first = network_id(&host.create_network(json!({ "name": "first" })));
    let interface = database.create_interface(first, host.node(), "guest", WantedAddress::Any).id;
    for (what, sql) in ORPHAN_QUERIES {
        assert!(!database.first_column(sql).is_empty(), "no {what}");
    }
    host.request_network_deletion(first);
    database.delete_interface(interface);
    let client = Client {
        url: host.url(),
        token: host.token(),
        http: reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap(),
    };
    let interfaces = Interfaces { database: Arc::clone(&database), node: host.node() };
    let (setup, daemon) = (host.setup.clone(), host.take_daemon());
    let began = Instant::now();
    let daemon = host.namespace.run(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (next, done) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
        let (next, interfaces) = (Arc::new(next), Arc::new(interfaces));
        runtime.block_on(async {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|_| {
                    let (client, interfaces) = (client.clone(), Arc::clone(&interfaces));
                    let (next, done) = (Arc::clone(&next), Arc::clone(&done));
                    tokio::spawn(async move {
                        loop {
                            let number = next.fetch_add(1, Ordering::Relaxed);
                            if number >= NETWORKS {
                                return;
                            }
                            client.create_and_delete(number, &interfaces).await;
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            let killer = kill_repeatedly(&setup, daemon, &done);
            let work = async {
                for client in clients {
                    client.await.unwrap();
                }
            };
            tokio::join!(killer, work).0
        })
    });
    println!("{NETWORKS} networks and {KILLS} kills: {:?}", began.elapsed());
    host.set_daemon(daemon);
    wait_until_same("no orphans to be left", TIMEOUT, &before, || host.inventory());
    for (what, sql) in ORPHAN_QUERIES.into_iter().chain(MISCOUNT_QUERIES) {
        wait_for(&format!("no {what} to be left: {:?}", database.first_column(sql)), TIMEOUT, || {
            database.first_column(sql).is_empty().then_some(())
        });
    }
    let created = database.first_column("SELECT name FROM networks WHERE name NOT IN ('floating', 'first')");
    assert_eq!(created.len(), NETWORKS, "{created:?}");
    let log = host.log();
    assert_eq!(log.lines().filter(|line| line.contains(" serving ")).count(), KILLS + 1, "{log}");
    assert!(!log.contains("panicked") && !log.contains("ERROR"), "{log}");
}
