//! A testbed for networks: hosts on a switch, guests on hosts, and an external network.
//!
//! The test executable runs itself again in new namespaces. However the test ends, the exit of its first process ends
//! all others and removes the namespaces with their devices.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use muster_node::LocalNode;
use muster_types::address::MacAddress;
use muster_types::ids::{InterfaceId, NetworkId, NodeId};
use muster_types::network::{DhcpLease, EgressPlan, InterfacePlan, NetworkPlan, NetworkReport, RouterPlan};
use muster_types::node::{FoundNetwork, NodeApi, RouterGate};
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

const ISOLATED_ENV: &str = "MUSTER_TEST_INSIDE";
const PROGRAMS: [&str; 10] =
    ["ip", "bridge", "nft", "dnsmasq", "ping", "busybox", "unshare", "setpriv", "tcpdump", "python3"];
/// The port of the hosts' API.
pub(crate) const API_PORT: u16 = 13000;
/// The timeout for what should happen immediately.
const WAIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs a test in its own namespaces. Returns `false` in the process that only waits for it.
pub(crate) fn run_isolated(test: &str) -> bool {
    if std::env::var_os(ISOLATED_ENV).is_some() {
        return true;
    }
    if !nix::unistd::geteuid().is_root() {
        muster_testing::skipped("root");
        return false;
    }
    for program in PROGRAMS {
        let found = Command::new("sh")
            .args(["-c", &format!("PATH=$PATH:/usr/sbin:/sbin command -v {program}")])
            .output();
        if !found.unwrap().status.success() {
            muster_testing::skipped(program);
            return false;
        }
    }
    let output = Command::new("unshare")
        .args([
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--propagation",
            "private",
        ])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env(ISOLATED_ENV, "1")
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}\n{stderr}");
    print!("{stdout}");
    eprint!("{stderr}");
    false
}

type Task = Box<dyn FnOnce() + Send>;

/// A thread in its own network and mount namespaces.
pub(crate) struct Namespace {
    pub(crate) name: String,
    tasks: mpsc::Sender<Task>,
    thread: nix::unistd::Pid,
}

impl Namespace {
    pub(crate) fn new(name: &str) -> Self {
        let (sender, tasks) = mpsc::channel::<Task>();
        let (ready, id) = mpsc::channel();
        std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).unwrap();
                let nothing: Option<&str> = None;
                mount(nothing, "/", nothing, MsFlags::MS_PRIVATE | MsFlags::MS_REC, nothing).unwrap();
                mount(Some("none"), "/run", Some("tmpfs"), MsFlags::empty(), nothing).unwrap();
                ready.send(nix::unistd::gettid()).unwrap();
                for task in tasks {
                    task();
                }
            })
            .unwrap();
        let netns = Self { name: name.into(), tasks: sender, thread: id.recv().unwrap() };
        netns.sh("ip link set lo up");
        netns
    }

    /// Runs a closure in the namespaces.
    pub(crate) fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (send, receive) = mpsc::channel();
        self.tasks.send(Box::new(move || drop(send.send(work())))).unwrap();
        receive.recv().unwrap_or_else(|_| panic!("{}: panicked", self.name))
    }

    pub(crate) fn try_sh(&self, script: &str) -> Output {
        let script = script.to_owned();
        self.run(move || Command::new("sh").args(["-c", &script]).output().unwrap())
    }

    /// Runs a script that must succeed, and returns its output.
    pub(crate) fn sh(&self, script: &str) -> String {
        let output = self.try_sh(script);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{}: {script}\n{stdout}{stderr}", self.name);
        stdout
    }

    /// Runs a script repeatedly until it succeeds.
    pub(crate) fn until(&self, script: &str) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !self.try_sh(script).status.success() {
            assert!(Instant::now() < deadline, "{}: timed out: {script}", self.name);
        }
    }

    /// Connects two namespaces by a veth pair.
    pub(crate) fn connect_veth(&self, end: &str, other: &Namespace, other_end: &str) {
        self.sh(&format!("ip link add {end} type veth peer name {other_end} netns {}", other.thread));
    }

    pub(crate) fn can_ping(&self, address: &str) -> bool {
        self.try_sh(&format!("ping -n -c 5 -i 0.2 -W 1 {address} | grep -q 'bytes from'")).status.success()
    }

    pub(crate) fn cannot_ping(&self, address: &str) -> bool {
        !self.try_sh(&format!("ping -n -c 2 -i 0.2 -W 0.6 {address} | grep -q 'bytes from'")).status.success()
    }

    /// Serves the address of the client on this port.
    pub(crate) fn serve_source_address(&self, port: u16) {
        let listener = self.run(move || TcpListener::bind(("0.0.0.0", port)).unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let mut stream = stream;
                let from = stream.peer_addr().unwrap().ip().to_string();
                let _ = stream.write_all(from.as_bytes());
            }
        });
    }

    /// Serves an echo on this port.
    pub(crate) fn serve_echo(&self, port: u16) {
        let listener = self.run(move || TcpListener::bind(("0.0.0.0", port)).unwrap());
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    let mut word = [0; 1];
                    while stream.read_exact(&mut word).is_ok() && stream.write_all(&word).is_ok() {}
                });
            }
        });
    }

    /// Opens a connection.
    pub(crate) fn connect(&self, address: &str, port: u16) -> TcpStream {
        let address: SocketAddr = format!("{address}:{port}").parse().unwrap();
        self.run(move || TcpStream::connect_timeout(&address, Duration::from_secs(2)).unwrap())
    }

    /// Sends a raw frame, given in hexadecimal: destination, source and payload.
    pub(crate) fn send_frame(&self, frame: &str) {
        self.sh(&format!(
            "python3 -c 'import socket; s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); \
             s.bind((\"eth0\", 0)); s.send(bytes.fromhex(\"{}\"))'",
            frame.replace([':', ' '], "")
        ));
    }

    /// Returns the address under which the server sees this namespace; `None` if it cannot be reached.
    pub(crate) fn source_seen_by(&self, address: &str, port: u16) -> Option<String> {
        let address: SocketAddr = format!("{address}:{port}").parse().unwrap();
        self.run(move || {
            let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(2)).ok()?;
            stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).ok()?;
            Some(text)
        })
    }
}

/// A host with a node.
pub(crate) struct Host {
    pub(crate) netns: Namespace,
    pub(crate) address: Ipv4Addr,
    pub(crate) node: std::sync::Arc<LocalNode>,
    /// The number of commands that opened the gate after a restart.
    commands_at_start: u64,
}

impl Host {
    fn new(number: usize, switch: &Namespace) -> Self {
        let netns = Namespace::new(&format!("host{number}"));
        let address = Ipv4Addr::new(10, 99, 0, u8::try_from(number).unwrap());
        switch.connect_veth(&format!("port{number}"), &netns, "mesh0");
        switch.sh(&format!("ip link set port{number} master switch mtu 1600 up"));
        netns.sh(&format!("ip link set mesh0 mtu 1600 up && ip addr add {address}/24 dev mesh0"));
        let node = start(&netns, address);
        Self { netns, address, node, commands_at_start: 0 }
    }

    /// Replaces the node by a new one, as a restart of the program does.
    pub(crate) fn restart(&mut self) {
        self.node = start(&self.netns, self.address);
        self.commands_at_start = self.node.commands_run();
    }

    /// Replaces the node by one with other settings, which has not opened or closed its gate.
    pub(crate) fn restart_with(&mut self, settings: &'static [(&'static str, &'static str)]) {
        let address = self.address;
        self.node = self.netns.run(move || std::sync::Arc::new(node(address, settings)));
    }

    pub(crate) fn set_gate(&self, gate: RouterGate) {
        self.call(async move |node| node.set_router_gate(gate).await).unwrap();
    }

    /// Calls the node in its namespaces.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        request: impl AsyncFnOnce(&LocalNode) -> T + Send + 'static,
    ) -> T {
        let node = self.node.clone();
        self.netns.run(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(request(&node))
        })
    }

    pub(crate) fn try_ensure(&self, plans: Vec<NetworkPlan>) -> Vec<Result<NetworkReport>> {
        self.call(async move |node| node.ensure_networks(&plans).await.unwrap())
    }

    pub(crate) fn ensure(&self, plan: &NetworkPlan) -> NetworkReport {
        let mut reports = self.try_ensure(vec![plan.clone()]);
        reports.remove(0).unwrap_or_else(|error| panic!("{}: {error}", self.netns.name))
    }

    pub(crate) fn remove(&self, network: FoundNetwork) {
        self.call(async move |node| node.remove_network(network).await).unwrap();
    }

    pub(crate) fn find(&self) -> Vec<FoundNetwork> {
        self.call(async |node| node.list_networks().await).unwrap()
    }

    pub(crate) fn commands_run(&self) -> u64 {
        self.node.commands_run() - self.commands_at_start
    }

    /// Returns a list of all devices, addresses, rule sets, namespaces, directories and servers.
    pub(crate) fn inventory(&self) -> String {
        self.netns.sh(
            "ip -o link | sed 's/^[0-9]*: //; s/[@:].*//' | grep -v '^tap' | sort; ip -4 -o addr | awk '{print $2, $4}'; \
             nft list tables | sort; ls /run/netns 2>/dev/null; ls /run/muster/networks 2>/dev/null; \
             cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c '^--conf-file=/run/[m]uster'; true",
        )
    }
}

/// Creates a node whose routers may send and receive packets.
fn start(netns: &Namespace, address: Ipv4Addr) -> std::sync::Arc<LocalNode> {
    netns.run(move || std::sync::Arc::new(open_node(address)))
}

fn open_node(address: Ipv4Addr) -> LocalNode {
    let node = node(address, &[]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // A host without privileges refuses it.
    let _ = runtime.block_on(node.set_router_gate(RouterGate::Open));
    node
}

fn node(address: Ipv4Addr, settings: &[(&str, &str)]) -> LocalNode {
    let address_text = address.to_string();
    let common = [("NODE_MESH_IP", address_text.as_str()), ("NODE_EGRESS_NIC", "uplink0")];
    let settings = common.iter().chain(settings).map(|(name, value)| ((*name).into(), (*value).into()));
    let settings = Settings::new(&std::collections::BTreeMap::new(), &settings.collect()).unwrap();
    LocalNode::new(NodeId::new(), &settings, Path::new("/tmp"), address.into())
        .with_api_url(format!("http://{address}:{API_PORT}"))
}

/// Creates a network that two processes share.
pub(crate) fn kill_target_network(id: &str) -> TestNetwork {
    let mut net = TestNetwork::new(0xdead, "10.0.0.0/24", "192.168.20.5");
    net.plan.id = id.parse().unwrap();
    net.router.egress.masquerade = true;
    net
}

/// Returns its plan for the third host.
pub(crate) fn kill_target_plan(net: &TestNetwork) -> NetworkPlan {
    NetworkPlan {
        mesh_address: Ipv4Addr::new(10, 99, 0, 3),
        peers: vec![Ipv4Addr::new(10, 99, 0, 1)],
        cluster_nodes: [1, 3].map(|number| Ipv4Addr::new(10, 99, 0, number)).to_vec(),
        router: Some(net.router.clone()),
        ..net.plan.clone()
    }
}

/// Creates a node on the third host, whose namespaces this process must be in.
pub(crate) fn kill_target_node() -> LocalNode {
    open_node(Ipv4Addr::new(10, 99, 0, 3))
}

/// Three hosts and an external network, which is connected to the third.
pub(crate) struct Testbed {
    pub(crate) hosts: Vec<Host>,
    pub(crate) external: Namespace,
    _switch: Namespace,
}

impl Testbed {
    pub(crate) fn new() -> Self {
        let switch = Namespace::new("switch");
        switch.sh("ip link add switch mtu 1600 type bridge && ip link set switch up");
        let hosts: Vec<Host> = (1..=3).map(|number| Host::new(number, &switch)).collect();
        let external = Namespace::new("external");
        let nn = &hosts[2].netns;
        nn.connect_veth("uplink0", &external, "eth0");
        nn.sh("ip addr add 198.51.100.2/24 dev uplink0 && ip link set uplink0 up");
        external.sh("ip addr add 198.51.100.1/24 dev eth0 && ip link set eth0 up");
        external.sh("ip route add 192.168.20.0/24 via 198.51.100.2");
        Self { hosts, external, _switch: switch }
    }

    pub(crate) fn host(&self, number: usize) -> &Host {
        &self.hosts[number - 1]
    }
}

/// A guest on a host.
pub(crate) struct Guest {
    pub(crate) netns: Namespace,
    pub(crate) host: usize,
    pub(crate) interface: InterfaceId,
    pub(crate) mac: MacAddress,
    pub(crate) address: Ipv4Addr,
    pub(crate) name: String,
}

impl Guest {
    pub(crate) fn new(testbed: &Testbed, host: usize, name: &str, address: &str) -> Self {
        let (netns, interface, mac) = (Namespace::new(name), InterfaceId::new(), MacAddress::random());
        let host_ns = &testbed.host(host).netns;
        host_ns.connect_veth(&interface.device(), &netns, "eth0");
        netns.sh(&format!("ip link set eth0 address {mac} up"));
        netns.sh("sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1");
        Self { netns, host, interface, mac, address: address.parse().unwrap(), name: name.into() }
    }

    /// Gets an address by DHCP.
    pub(crate) fn dhcp(&self) -> String {
        let script = "#!/bin/sh\n[ \"$1\" = bound ] || exit 0\nip addr add $ip/$mask dev $interface\n\
            ip link set $interface mtu $mtu\n[ -z \"$router\" ] || ip route replace default via $router\n\
            echo \"$ip/$mask mtu=$mtu dns=$dns domain=$domain router=$router\" > /run/lease\n";
        self.netns.run(move || std::fs::write("/run/script", script).unwrap());
        self.netns.sh(
            "chmod +x /run/script && busybox udhcpc -i eth0 -f -n -q -t 10 -T 1 -O mtu -s /run/script >&2 && cat /run/lease",
        )
    }

    /// Configures the address statically.
    pub(crate) fn configure_address(&self) {
        let address = self.address;
        let [a, b, c, _] = address.octets();
        self.netns.sh(&format!("ip addr add {address}/24 dev eth0; ip route replace default via {a}.{b}.{c}.1; ip link set eth0 mtu 1450"));
    }
}

/// A network, from which the plans of the hosts are derived.
#[derive(Clone)]
pub(crate) struct TestNetwork {
    pub(crate) plan: NetworkPlan,
    pub(crate) router: RouterPlan,
    pub(crate) router_on: usize,
}

impl TestNetwork {
    pub(crate) fn new(vxid: u32, netblock: &str, gateway: &str) -> Self {
        let plan = NetworkPlan {
            id: NetworkId::new(),
            vxid,
            generation: 1,
            netblock: netblock.parse().unwrap(),
            mtu: 1450,
            mesh_address: Ipv4Addr::UNSPECIFIED,
            peers: Vec::new(),
            cluster_nodes: Vec::new(),
            ports: Vec::new(),
            routed: Vec::new(),
            check_senders: true,
            router: None,
        };
        let egress = EgressPlan {
            netblock: "192.168.20.0/24".parse().unwrap(),
            gateway: Some(gateway.parse().unwrap()),
            floating: Vec::new(),
            masquerade: false,
            nodes: vec![],
        };
        let router = RouterPlan {
            dhcp: true,
            dns: true,
            nat: true,
            domain: "one.example".into(),
            dns_server: Ipv4Addr::new(198, 51, 100, 1),
            leases: Vec::new(),
            names: Vec::new(),
            egress,
        };
        Self { plan, router, router_on: 3 }
    }

    pub(crate) fn with(mut self, guests: &[&Guest]) -> Self {
        let lease =
            |guest: &&Guest| DhcpLease { mac: guest.mac, address: guest.address, name: guest.name.clone() };
        self.router.leases = guests.iter().map(lease).collect();
        self
    }

    pub(crate) fn found(&self) -> FoundNetwork {
        FoundNetwork { id: self.plan.id, vxid: self.plan.vxid }
    }

    /// Returns the plan for one host.
    pub(crate) fn plan(&self, testbed: &Testbed, host: usize, guests: &[&Guest]) -> NetworkPlan {
        let port = |guest: &&&Guest| InterfacePlan {
            interface: guest.interface,
            mac: guest.mac,
            address: Some(guest.address),
        };
        let others = testbed.hosts.iter().enumerate().filter(|(at, _)| at + 1 != host);
        NetworkPlan {
            mesh_address: testbed.host(host).address,
            peers: others.map(|(_, host)| host.address).collect(),
            cluster_nodes: testbed.hosts.iter().map(|host| host.address).collect(),
            ports: guests.iter().filter(|guest| guest.host == host).map(|guest| port(&guest)).collect(),
            router: (host == self.router_on).then(|| self.router.clone()),
            ..self.plan.clone()
        }
    }

    /// Reconciles the network on all hosts.
    pub(crate) fn ensure(&self, testbed: &Testbed, guests: &[&Guest]) {
        for host in 1..=3 {
            testbed.host(host).ensure(&self.plan(testbed, host, guests));
        }
    }
}

/// Returns whether the echo server still responds.
pub(crate) fn is_alive(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_millis(1500))).unwrap();
    stream.write_all(b"x").unwrap();
    stream.read_exact(&mut [0; 1]).is_ok()
}

pub(crate) fn is_conflict(result: &Result<NetworkReport>) -> bool {
    matches!(result, Err(Error::Conflict(_)))
}
