//! A small world to try networks in: machines on a switch, guests on machines, and somebody outside.
//!
//! The test runs itself again in namespaces of its own, so that nothing of it can be left behind however it ends:
//! with its first process end all others, with those the namespaces, with those the devices.

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
use muster_types::node::{FoundNetwork, NodeApi};
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

const INSIDE: &str = "MUSTER_TEST_INSIDE";
const PROGRAMS: [&str; 10] =
    ["ip", "bridge", "nft", "dnsmasq", "ping", "busybox", "unshare", "setpriv", "tcpdump", "python3"];
/// Where the daemons of the machines would serve their API.
pub(crate) const API_PORT: u16 = 13000;
/// How long something may take that should happen at once.
const SOON: Duration = Duration::from_secs(10);

/// Runs a test in a world of its own. False in the process that only waits for it.
pub(crate) fn enter(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
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
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}\n{stderr}");
    print!("{stdout}");
    eprint!("{stderr}");
    false
}

type Work = Box<dyn FnOnce() + Send>;

/// A thread in a network and a file system of its own.
pub(crate) struct Place {
    pub(crate) name: String,
    work: mpsc::Sender<Work>,
    thread: nix::unistd::Pid,
}

impl Place {
    pub(crate) fn new(name: &str) -> Self {
        let (work, todo) = mpsc::channel::<Work>();
        let (ready, told) = mpsc::channel();
        std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).unwrap();
                let nothing: Option<&str> = None;
                mount(nothing, "/", nothing, MsFlags::MS_PRIVATE | MsFlags::MS_REC, nothing).unwrap();
                mount(Some("none"), "/run", Some("tmpfs"), MsFlags::empty(), nothing).unwrap();
                ready.send(nix::unistd::gettid()).unwrap();
                for work in todo {
                    work();
                }
            })
            .unwrap();
        let place = Self { name: name.into(), work, thread: told.recv().unwrap() };
        place.sh("ip link set lo up");
        place
    }

    /// Does something there.
    pub(crate) fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (send, receive) = mpsc::channel();
        self.work.send(Box::new(move || drop(send.send(work())))).unwrap();
        receive.recv().unwrap_or_else(|_| panic!("{}: panicked", self.name))
    }

    pub(crate) fn try_sh(&self, script: &str) -> Output {
        let script = script.to_owned();
        self.run(move || Command::new("sh").args(["-c", &script]).output().unwrap())
    }

    /// Runs a script that must succeed, and answers what it printed.
    pub(crate) fn sh(&self, script: &str) -> String {
        let output = self.try_sh(script);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{}: {script}\n{stdout}{stderr}", self.name);
        stdout
    }

    /// Runs a script until it succeeds.
    pub(crate) fn until(&self, script: &str) {
        let deadline = Instant::now() + SOON;
        while !self.try_sh(script).status.success() {
            assert!(Instant::now() < deadline, "{}: never: {script}", self.name);
        }
    }

    /// A cable between two places.
    pub(crate) fn cable(&self, end: &str, other: &Place, other_end: &str) {
        self.sh(&format!("ip link add {end} type veth peer name {other_end} netns {}", other.thread));
    }

    pub(crate) fn pings(&self, address: &str) -> bool {
        self.try_sh(&format!("ping -n -c 5 -i 0.2 -W 1 {address} | grep -q 'bytes from'")).status.success()
    }

    pub(crate) fn pings_not(&self, address: &str) -> bool {
        !self.try_sh(&format!("ping -n -c 2 -i 0.2 -W 0.6 {address} | grep -q 'bytes from'")).status.success()
    }

    /// Answers everybody on this port with the address that they came from.
    pub(crate) fn answer(&self, port: u16) {
        let listener = self.run(move || TcpListener::bind(("0.0.0.0", port)).unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let mut stream = stream;
                let from = stream.peer_addr().unwrap().ip().to_string();
                let _ = stream.write_all(from.as_bytes());
            }
        });
    }

    /// Says everything again on this port, for as long as anybody speaks.
    pub(crate) fn echo(&self, port: u16) {
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

    /// A connection that stays.
    pub(crate) fn connect(&self, address: &str, port: u16) -> TcpStream {
        let address: SocketAddr = format!("{address}:{port}").parse().unwrap();
        self.run(move || TcpStream::connect_timeout(&address, Duration::from_secs(2)).unwrap())
    }

    /// Sends a frame as it is: receiver, sender and the rest, in hexadecimal.
    pub(crate) fn send(&self, frame: &str) {
        self.sh(&format!(
            "python3 -c 'import socket; s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); \
             s.bind((\"eth0\", 0)); s.send(bytes.fromhex(\"{}\"))'",
            frame.replace([':', ' '], "")
        ));
    }

    /// As whom an answering place sees this one; nothing if it cannot be reached.
    pub(crate) fn seen_by(&self, address: &str, port: u16) -> Option<String> {
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

/// A machine with a node on it.
pub(crate) struct Machine {
    pub(crate) place: Place,
    pub(crate) address: Ipv4Addr,
    pub(crate) node: std::sync::Arc<LocalNode>,
}

impl Machine {
    fn new(number: usize, switch: &Place) -> Self {
        let place = Place::new(&format!("machine{number}"));
        let address = Ipv4Addr::new(10, 99, 0, u8::try_from(number).unwrap());
        switch.cable(&format!("port{number}"), &place, "mesh0");
        switch.sh(&format!("ip link set port{number} master switch mtu 1600 up"));
        place.sh(&format!("ip link set mesh0 mtu 1600 up && ip addr add {address}/24 dev mesh0"));
        let node = start(&place, address);
        Self { place, address, node }
    }

    /// Another run of the program on this machine.
    pub(crate) fn restart(&mut self) {
        self.node = start(&self.place, self.address);
    }

    /// Asks the node something, in its place.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        question: impl AsyncFnOnce(&LocalNode) -> T + Send + 'static,
    ) -> T {
        let node = self.node.clone();
        self.place.run(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(question(&node))
        })
    }

    pub(crate) fn try_ensure(&self, plans: Vec<NetworkPlan>) -> Vec<Result<NetworkReport>> {
        self.ask(async move |node| node.ensure_networks(&plans).await.unwrap())
    }

    pub(crate) fn ensure(&self, plan: &NetworkPlan) -> NetworkReport {
        let mut cares = self.try_ensure(vec![plan.clone()]);
        cares.remove(0).unwrap_or_else(|error| panic!("{}: {error}", self.place.name))
    }

    pub(crate) fn remove(&self, network: FoundNetwork) {
        self.ask(async move |node| node.remove_network(network).await).unwrap();
    }

    pub(crate) fn find(&self) -> Vec<FoundNetwork> {
        self.ask(async |node| node.find_networks().await).unwrap()
    }

    pub(crate) fn programs_run(&self) -> u64 {
        self.node.programs_run()
    }

    /// Everything of networks that there is on this machine.
    pub(crate) fn inventory(&self) -> String {
        self.place.sh(
            "ip -o link | sed 's/^[0-9]*: //; s/[@:].*//' | grep -v '^tap' | sort; ip -4 -o addr | awk '{print $2, $4}'; \
             nft list tables | sort; ls /run/netns 2>/dev/null; ls /run/muster/networks 2>/dev/null; \
             cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c '^--conf-file=/run/[m]uster'; true",
        )
    }
}

fn start(place: &Place, address: Ipv4Addr) -> std::sync::Arc<LocalNode> {
    place.run(move || std::sync::Arc::new(node(address)))
}

fn node(address: Ipv4Addr) -> LocalNode {
    let settings = [("NODE_MESH_IP", address.to_string()), ("NODE_EGRESS_NIC", "world0".into())];
    let settings = settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let settings = Settings::new(&std::collections::BTreeMap::new(), &settings).unwrap();
    LocalNode::new(NodeId::new(), &settings, Path::new("/tmp"))
        .with_api_url(format!("http://{address}:{API_PORT}"))
}

/// A network that two processes know.
pub(crate) fn victim(id: &str) -> Net {
    let mut net = Net::new(0xdead, "10.0.0.0/24", "192.168.20.5");
    net.plan.id = id.parse().unwrap();
    net.router.egress.masquerade = true;
    net
}

/// Its plan for the third machine.
pub(crate) fn victims_plan(net: &Net) -> NetworkPlan {
    NetworkPlan {
        mesh_address: Ipv4Addr::new(10, 99, 0, 3),
        peers: vec![Ipv4Addr::new(10, 99, 0, 1)],
        router: Some(net.router.clone()),
        ..net.plan.clone()
    }
}

/// A node on the third machine, in which this process must be.
pub(crate) fn victims_node() -> LocalNode {
    node(Ipv4Addr::new(10, 99, 0, 3))
}

/// Three machines and the outside, which hangs on the third and the first.
pub(crate) struct World {
    pub(crate) machines: Vec<Machine>,
    pub(crate) outside: Place,
    _switch: Place,
}

impl World {
    pub(crate) fn new() -> Self {
        let switch = Place::new("switch");
        switch.sh("ip link add switch mtu 1600 type bridge && ip link set switch up");
        let machines: Vec<Machine> = (1..=3).map(|number| Machine::new(number, &switch)).collect();
        let outside = Place::new("outside");
        let nn = &machines[2].place;
        nn.cable("world0", &outside, "eth0");
        nn.sh("ip addr add 198.51.100.2/24 dev world0 && ip link set world0 up");
        outside.sh("ip addr add 198.51.100.1/24 dev eth0 && ip link set eth0 up");
        outside.sh("ip route add 192.168.20.0/24 via 198.51.100.2");
        Self { machines, outside, _switch: switch }
    }

    pub(crate) fn machine(&self, number: usize) -> &Machine {
        &self.machines[number - 1]
    }
}

/// A guest on a machine.
pub(crate) struct Guest {
    pub(crate) place: Place,
    pub(crate) machine: usize,
    pub(crate) interface: InterfaceId,
    pub(crate) mac: MacAddress,
    pub(crate) address: Ipv4Addr,
    pub(crate) name: String,
}

impl Guest {
    pub(crate) fn new(world: &World, machine: usize, name: &str, address: &str) -> Self {
        let (place, interface, mac) = (Place::new(name), InterfaceId::new(), MacAddress::random());
        let host = &world.machine(machine).place;
        host.cable(&interface.device(), &place, "eth0");
        place.sh(&format!("ip link set eth0 address {mac} up"));
        place.sh("sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1");
        Self { place, machine, interface, mac, address: address.parse().unwrap(), name: name.into() }
    }

    /// Gets an address as a guest does.
    pub(crate) fn dhcp(&self) -> String {
        let script = "#!/bin/sh\n[ \"$1\" = bound ] || exit 0\nip addr add $ip/$mask dev $interface\n\
            ip link set $interface mtu $mtu\n[ -z \"$router\" ] || ip route replace default via $router\n\
            echo \"$ip/$mask mtu=$mtu dns=$dns domain=$domain router=$router\" > /run/lease\n";
        self.place.run(move || std::fs::write("/run/script", script).unwrap());
        self.place.sh(
            "chmod +x /run/script && busybox udhcpc -i eth0 -f -n -q -t 10 -T 1 -O mtu -s /run/script >&2 && cat /run/lease",
        )
    }

    /// Sets the address by hand.
    pub(crate) fn settle(&self) {
        let address = self.address;
        let [a, b, c, _] = address.octets();
        self.place.sh(&format!("ip addr add {address}/24 dev eth0; ip route replace default via {a}.{b}.{c}.1; ip link set eth0 mtu 1450"));
    }
}

/// A network to be; its plans are made from it.
#[derive(Clone)]
pub(crate) struct Net {
    pub(crate) plan: NetworkPlan,
    pub(crate) router: RouterPlan,
    pub(crate) router_on: usize,
}

impl Net {
    pub(crate) fn new(vxid: u32, netblock: &str, gateway: &str) -> Self {
        let plan = NetworkPlan {
            id: NetworkId::new(),
            vxid,
            generation: 1,
            netblock: netblock.parse().unwrap(),
            mtu: 1450,
            mesh_address: Ipv4Addr::UNSPECIFIED,
            peers: Vec::new(),
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
            dns_server: "198.51.100.1".into(),
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

    /// The plan for one machine.
    pub(crate) fn plan(&self, world: &World, machine: usize, guests: &[&Guest]) -> NetworkPlan {
        let port = |guest: &&&Guest| InterfacePlan {
            interface: guest.interface,
            mac: guest.mac,
            address: Some(guest.address),
        };
        let others = world.machines.iter().enumerate().filter(|(at, _)| at + 1 != machine);
        NetworkPlan {
            mesh_address: world.machine(machine).address,
            peers: others.map(|(_, machine)| machine.address).collect(),
            ports: guests.iter().filter(|guest| guest.machine == machine).map(|guest| port(&guest)).collect(),
            router: (machine == self.router_on).then(|| self.router.clone()),
            ..self.plan.clone()
        }
    }

    /// Makes all machines carry it.
    pub(crate) fn ensure(&self, world: &World, guests: &[&Guest]) {
        for machine in 1..=3 {
            world.machine(machine).ensure(&self.plan(world, machine, guests));
        }
    }
}

/// Whether the other end still says everything again.
pub(crate) fn is_alive(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_millis(1500))).unwrap();
    stream.write_all(b"x").unwrap();
    stream.read_exact(&mut [0; 1]).is_ok()
}

pub(crate) fn is_conflict(result: &Result<NetworkReport>) -> bool {
    matches!(result, Err(Error::Conflict(_)))
}
