//! Hosts on a switch, each with a daemon, and an external peer behind the last of them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_testing::{Daemon, DaemonSetup, NetworkNamespace, daemon_program, wait_for};
use muster_types::ids::{NetworkId, NodeId};
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};

/// The maximum time to wait for something in a busy cluster, with emulated guests.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(240);

/// The key of the system namespace.
pub const SYSTEM_KEY: &str = "the first key";
pub(crate) const SECRET_SEED: &str = "the seed of the whole cluster";

/// The virtual address of a cluster with two network nodes.
pub const VIRTUAL_IP: &str = "198.51.100.9";

/// A host in its own network namespace, and its daemon.
#[derive(Debug)]
pub struct Host {
    pub namespace: NetworkNamespace,
    pub address: String,
    pub setup: DaemonSetup,
    daemon: Option<Arc<Daemon>>,
    token: String,
    /// The inventory that the host must have at the end of the test.
    pub(crate) initial_inventory: String,
}

impl Host {
    fn new(number: usize, switch: &NetworkNamespace, setup: DaemonSetup) -> Self {
        let namespace = NetworkNamespace::new(&format!("m{number}"));
        let address = format!("10.99.0.{number}");
        switch.connect(&format!("port{number}"), &namespace, "mesh0");
        switch.sh(&format!("ip link set port{number} master switch up"));
        namespace.sh(&format!("ip link set mesh0 up && ip addr add {address}/24 dev mesh0"));
        let setup = setup.set("NODE_NAME", &format!("m{number}")).set("NODE_MESH_IP", &address);
        Self {
            namespace,
            address,
            setup,
            daemon: None,
            token: String::new(),
            initial_inventory: String::new(),
        }
    }

    /// Starts the daemon, and logs in once.
    pub fn start(&mut self) {
        let setup = self.setup.clone();
        self.daemon = Some(Arc::new(self.namespace.run(move || setup.start())));
        if self.token.is_empty() {
            let body = json!({ "namespace": "system", "key": SYSTEM_KEY });
            let (status, answer) = self.call(Method::POST, "/auth", Some(body));
            assert_eq!(status, 200, "{answer}");
            self.token = answer["access_token"].as_str().unwrap().to_owned();
        }
    }

    pub(crate) fn start_if_stopped(&mut self) {
        if self.daemon.is_none() {
            self.start();
        }
    }

    /// Records the current inventory as the one that the host must have at the end of the test.
    pub fn record_initial_inventory(&mut self) {
        self.initial_inventory = self.inventory();
    }

    /// Kills the daemon with SIGKILL.
    pub fn kill(&mut self) {
        let daemon = self.daemon.take().unwrap();
        daemon.signal(Signal::SIGKILL);
        drop(Arc::into_inner(daemon));
    }

    /// Stops the daemon with SIGTERM.
    pub fn stop(&mut self) {
        let daemon = Arc::into_inner(self.daemon.take().unwrap()).unwrap();
        let log = daemon.data.with_extension("log");
        let status = daemon.stop();
        assert!(status.success(), "{status}: {}", std::fs::read_to_string(log).unwrap_or_default());
    }

    /// Sends a signal to the daemon.
    pub fn signal(&self, signal: Signal) {
        self.daemon.as_ref().unwrap().signal(signal);
    }

    /// Stops the daemon with SIGSTOP until [`unfreeze`](Self::unfreeze).
    pub fn freeze(&self) {
        self.daemon.as_ref().unwrap().freeze();
    }

    /// Lets the daemon continue, if it runs.
    pub fn unfreeze(&self) {
        if let Some(daemon) = &self.daemon {
            daemon.signal(Signal::SIGCONT);
        }
    }

    /// Restarts the daemon with a changed setting.
    pub fn restart_with(&mut self, name: &str, value: &str) {
        self.stop();
        self.setup = self.setup.clone().set(name, value);
        self.start();
    }

    /// Starts another program from now on.
    pub fn set_program(&mut self, program: &str) {
        self.setup = self.setup.clone().program(program);
    }

    /// Hands the daemon over to the caller; [`set_daemon`](Self::set_daemon) returns it.
    pub fn take_daemon(&mut self) -> Daemon {
        Arc::into_inner(self.daemon.take().unwrap()).unwrap()
    }

    pub fn set_daemon(&mut self, daemon: Daemon) {
        self.daemon = Some(Arc::new(daemon));
    }

    pub fn log(&self) -> String {
        self.daemon.as_ref().map(|daemon| daemon.log()).unwrap_or_default()
    }

    pub fn url(&self) -> String {
        self.daemon.as_ref().unwrap().url.clone()
    }

    pub fn token(&self) -> String {
        self.token.clone()
    }

    /// Calls the API of this host.
    pub fn call(&self, method: Method, path: &str, body: Option<Value>) -> (u16, Value) {
        let (daemon, token, path) = (self.daemon.clone().unwrap(), self.token.clone(), path.to_owned());
        self.namespace.run(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let (status, answer) = runtime.block_on(daemon.call(&token, method, &path, body));
            (status.as_u16(), answer)
        })
    }

    /// Calls the API with GET; it must succeed.
    pub fn get(&self, path: &str) -> Value {
        let (status, answer) = self.call(Method::GET, path, None);
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    /// Calls the API with POST; it must succeed.
    pub fn post(&self, path: &str, body: Option<Value>) -> Value {
        let (status, answer) = self.call(Method::POST, path, body);
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    /// Requests a network.
    pub fn request_network(&self, mut request: Value) -> Value {
        if request.get("netblock").is_none() {
            request["netblock"] = "10.0.0.0/24".into();
        }
        self.post("/networks", Some(request))
    }

    /// Creates a network and waits until it is ready.
    pub fn create_network(&self, request: Value) -> Value {
        let record = self.request_network(request);
        self.wait_for_network_state(network_id(&record), "created")
    }

    /// Waits until a network is in a state.
    pub fn wait_for_network_state(&self, network: NetworkId, state: &str) -> Value {
        let other = match state {
            "created" | "deleted" => "error",
            _ => "created",
        };
        wait_for(&format!("network {network} to be {state}"), WAIT_TIMEOUT, || {
            let record = self.get(&format!("/networks/{network}"));
            assert_ne!(record["state"], other, "{record}\n{}", self.log());
            (record["state"] == state).then_some(record)
        })
    }

    /// Requests the deletion of a network.
    pub fn request_network_deletion(&self, network: NetworkId) {
        let (status, answer) = self.call(Method::DELETE, &format!("/networks/{network}"), None);
        assert_eq!(status, 202, "{answer}");
    }

    /// Returns the events of a network with this message, newest first.
    pub fn events(&self, network: NetworkId, message: &str) -> Vec<Value> {
        let events = self.get(&format!("/networks/{network}/events?limit=1000"));
        events.as_array().unwrap().iter().filter(|event| event["message"] == message).cloned().collect()
    }

    /// Returns the ID of this host's node.
    pub fn node(&self) -> NodeId {
        let nodes = self.get("/nodes");
        let own = nodes.as_array().unwrap().iter().find(|node| node["ip"] == self.address.as_str());
        own.unwrap()["uuid"].as_str().unwrap().parse().unwrap()
    }

    /// Lists the devices, rules, processes and files of networks on this host.
    pub fn inventory(&self) -> String {
        inventory(&self.namespace)
    }
}

/// Lists the devices, rules, processes and files of networks on a host.
pub fn inventory(host: &NetworkNamespace) -> String {
    host.sh(INVENTORY)
}

/// Lists devices with their masters and aliases, addresses, routes, flood entries and rules, also of each router, and the
/// files and processes of dnsmasq. Omits indexes, counters and learned entries, which change by themselves, and the virtual
/// address with the rule sets that guard it, which move between hosts.
const INVENTORY: &str = r#"
list='
    ip -o link | sed "s/^[0-9]*: //; s/@[^:]*//; s/ *link\/.*\(alias .*\)/\1/; s/ *link\/.*//; s/[\\]//g" | sort
    ip -4 -o addr | grep -v 198.51.100.9/ | sed "s/^[0-9]*: //; s/ scope.*//" | sort
    ip route | sort
    ip neigh show proxy | sort
    bridge fdb | grep ^00:00:00:00:00:00 | sort
    nft list tables | grep -v muster-gate | sort | while read table; do nft list $table; done
'
sh -c "$list"
for router in $(ls /run/netns 2>/dev/null); do
    echo router $router
    ip netns exec $router sh -c "$list"
done
ls /run/muster/networks 2>/dev/null
for line in /proc/[0-9]*/cmdline; do
    tr '\0' ' ' < $line 2>/dev/null | grep -o 'conf-file=/run/muster/networks/[^/]*'
done | sort
true"#;

/// Returns the inventories of hosts.
pub fn inventories(hosts: &[Host]) -> String {
    hosts.iter().map(Host::inventory).collect::<Vec<_>>().join("\n")
}

/// Waits until `list` returns the expected set of lines, in any order, and panics with the difference on a timeout.
pub fn wait_until_same(what: &str, timeout: Duration, expected: &str, list: impl Fn() -> String) {
    let started = Instant::now();
    loop {
        let found = list();
        let as_set = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
        if as_set(&found) == as_set(expected) {
            return;
        }
        if started.elapsed() > timeout {
            let lines = |text: &str, other: &str, sign: &str| -> String {
                let missing = text.lines().filter(|line| !other.lines().any(|found| found == *line));
                missing.map(|line| format!("{sign} {line}\n")).collect()
            };
            let (missing, extra) = (lines(expected, &found, "-"), lines(&found, expected, "+"));
            panic!("timed out after {} s waiting for {what}:\n{missing}{extra}", timeout.as_secs());
        }
        muster_testing::wait(Duration::from_millis(50));
    }
}

/// Returns the ID in the record of a network.
pub fn network_id(network: &Value) -> NetworkId {
    network["uuid"].as_str().unwrap().parse().unwrap()
}

/// Hosts on a switch, and an external peer behind the last of them, which is the network node.
#[derive(Debug)]
pub struct HostCluster {
    pub hosts: Vec<Host>,
    pub external_peer: NetworkNamespace,
    pub directory: PathBuf,
    pub database_url: String,
    _switch: NetworkNamespace,
}

impl HostCluster {
    /// Creates a cluster of one host, with SQLite.
    pub fn single_host(settings: &[(&str, &str)]) -> Self {
        let directory = create_directory();
        let database_url = format!("sqlite:{}", directory.join("m1/data/muster.db").display());
        Self::new(&daemon_program(), &[], (1, 1), directory, database_url, settings)
    }

    /// Creates a cluster of hosts that share a MariaDB, or `None` when that is not installed.
    pub fn with_hosts(count: usize, settings: &[(&str, &str)]) -> Option<Self> {
        Self::with_program(&daemon_program(), &[], count, settings)
    }

    /// Like [`with_hosts`](Self::with_hosts), with another program than the one under test, and arguments for the first host.
    pub(crate) fn with_program(
        program: &str,
        arguments: &[&str],
        count: usize,
        settings: &[(&str, &str)],
    ) -> Option<Self> {
        let Some(database_url) = muster_testing::socket_url() else {
            muster_testing::skipped("mariadb-server");
            return None;
        };
        Some(Self::new(program, arguments, (count, 1), create_directory(), database_url, settings))
    }

    /// Like [`with_hosts`](Self::with_hosts), but the last two hosts may be the network node. The external peer reaches
    /// the floating network by way of [`VIRTUAL_IP`].
    pub fn with_network_standby(count: usize, settings: &[(&str, &str)]) -> Option<Self> {
        let Some(database_url) = muster_testing::socket_url() else {
            muster_testing::skipped("mariadb-server");
            return None;
        };
        let virtual_ip = format!("{VIRTUAL_IP}/24");
        let settings: Vec<_> =
            settings.iter().copied().chain([("NETWORK_VIRTUAL_IP", virtual_ip.as_str())]).collect();
        let cluster =
            Self::new(&daemon_program(), &[], (count, 2), create_directory(), database_url, &settings);
        cluster.external_peer.sh(&format!("ip route replace 192.168.20.0/24 via {VIRTUAL_IP}"));
        Some(cluster)
    }

    /// Creates a cluster of `count` hosts in which the last `candidates` may be the network node. The last one joins first.
    fn new(
        program: &str,
        arguments: &[&str],
        (count, candidates): (usize, usize),
        directory: PathBuf,
        database_url: String,
        settings: &[(&str, &str)],
    ) -> Self {
        let switch = NetworkNamespace::new("switch");
        switch.sh("ip link add switch type bridge && ip link set switch up");
        let mut hosts: Vec<Host> = (1..=count)
            .map(|number| {
                let setup = setup(program, &directory.join(format!("m{number}")))
                    .arguments(if number == 1 { arguments } else { &[] })
                    .set("DATABASE_URL", &database_url)
                    .set("NODE_IS_NETWORK_NODE", if number + candidates > count { "true" } else { "false" });
                let setup = settings.iter().fold(setup, |setup, (name, value)| setup.set(name, value));
                Host::new(number, &switch, setup)
            })
            .collect();
        let external_peer = NetworkNamespace::new("external");
        external_peer.sh("ip link add eth0 type bridge && ip link set eth0 up");
        for (index, host) in hosts.iter().rev().take(candidates).enumerate() {
            let (port, address) = (format!("port{index}"), format!("198.51.100.{}", 2 + index));
            host.namespace.connect("ext0", &external_peer, &port);
            host.namespace.sh(&format!("ip addr add {address}/24 dev ext0 && ip link set ext0 up"));
            external_peer.sh(&format!("ip link set {port} master eth0 up"));
        }
        external_peer.sh("ip addr add 198.51.100.1/24 dev eth0");
        external_peer.sh("ip route add 192.168.20.0/24 via 198.51.100.2");
        for host in hosts.iter_mut().rev() {
            host.start();
        }
        for host in &mut hosts {
            host.record_initial_inventory();
        }
        Self { hosts, external_peer, directory, database_url, _switch: switch }
    }

    /// Returns the host with this number, from 1 on.
    pub fn host(&self, number: usize) -> &Host {
        &self.hosts[number - 1]
    }
}

/// Creates a directory below the temporary directory of the namespaces, which is removed after the test.
fn create_directory() -> PathBuf {
    tempfile::tempdir().unwrap().keep()
}

fn setup(program: &str, directory: &Path) -> DaemonSetup {
    std::fs::create_dir_all(directory).unwrap();
    DaemonSetup::new(program, &directory.join("data"))
        .listen_on_all_addresses()
        .set("AUTH_SECRET_SEED", SECRET_SEED)
        .set("SYSTEM_KEY", SYSTEM_KEY)
        .set("CLUSTER_OP_LEASE", "1")
        .set("NODE_CHECKIN_INTERVAL", "1")
        .set("NODE_EGRESS_NIC", "ext0")
        .set("NODE_MESH_NIC", "mesh0")
        .set("DNS_SERVER", "198.51.100.1")
}
