//! Hosts on a switch, each with a daemon, and an external peer behind the last of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_testing::{Daemon, Place, Setup, wait_for};
use muster_types::ids::{NetworkId, NodeId};
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};

use crate::PATIENCE;

pub(crate) const KEY: &str = "the first key";
pub(crate) const SEED: &str = "the seed of the whole cluster";

/// A machine and its daemon.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) place: Place,
    pub(crate) address: String,
    pub(crate) setup: Setup,
    daemon: Option<Arc<Daemon>>,
    token: String,
}

impl Machine {
    fn new(number: usize, switch: &Place, setup: Setup) -> Self {
        let place = Place::new(&format!("m{number}"));
        let address = format!("10.99.0.{number}");
        switch.cable(&format!("port{number}"), &place, "mesh0");
        switch.sh(&format!("ip link set port{number} master switch up"));
        place.sh(&format!("ip link set mesh0 up && ip addr add {address}/24 dev mesh0"));
        let setup = setup.set("NODE_NAME", &format!("m{number}")).set("NODE_MESH_IP", &address);
        Self { place, address, setup, daemon: None, token: String::new() }
    }

    /// Starts the daemon, and logs in once.
    pub(crate) fn start(&mut self) {
        let setup = self.setup.clone();
        self.daemon = Some(Arc::new(self.place.run(move || setup.start())));
        if self.token.is_empty() {
            let body = json!({ "namespace": "system", "key": KEY });
            let (status, answer) = self.call(Method::POST, "/auth", Some(body));
            assert_eq!(status, 200, "{answer}");
            self.token = answer["access_token"].as_str().unwrap().to_owned();
        }
    }

    /// Ends the daemon without warning.
    pub(crate) fn kill(&mut self) {
        let daemon = self.daemon.take().unwrap();
        daemon.signal(Signal::SIGKILL);
        drop(Arc::into_inner(daemon));
    }

    /// Ends the daemon as an operator does.
    pub(crate) fn stop(&mut self) {
        let daemon = Arc::into_inner(self.daemon.take().unwrap()).unwrap();
        assert!(daemon.stop().success());
    }

    /// Starts the daemon again, with a setting changed.
    pub(crate) fn restart_with(&mut self, name: &str, value: &str) {
        self.stop();
        self.setup = self.setup.clone().set(name, value);
        self.start();
    }

    /// Leaves the daemon to somebody else.
    pub(crate) fn give_daemon(&mut self) -> Daemon {
        Arc::into_inner(self.daemon.take().unwrap()).unwrap()
    }

    pub(crate) fn take_daemon(&mut self, daemon: Daemon) {
        self.daemon = Some(Arc::new(daemon));
    }

    pub(crate) fn log(&self) -> String {
        self.daemon.as_ref().map(|daemon| daemon.log()).unwrap_or_default()
    }

    pub(crate) fn url(&self) -> String {
        self.daemon.as_ref().unwrap().url.clone()
    }

    pub(crate) fn token(&self) -> String {
        self.token.clone()
    }

    /// Makes a call on this machine.
    pub(crate) fn call(&self, method: Method, path: &str, body: Option<Value>) -> (u16, Value) {
        let (daemon, token, path) = (self.daemon.clone().unwrap(), self.token.clone(), path.to_owned());
        self.place.run(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let (status, answer) = runtime.block_on(daemon.call(&token, method, &path, body));
            (status.as_u16(), answer)
        })
    }

    /// Reads something that is there.
    pub(crate) fn get(&self, path: &str) -> Value {
        let (status, answer) = self.call(Method::GET, path, None);
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    /// Does something that must work.
    pub(crate) fn post(&self, path: &str, body: Option<Value>) -> Value {
        let (status, answer) = self.call(Method::POST, path, body);
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    /// Asks for a network.
    pub(crate) fn ask_for(&self, mut request: Value) -> Value {
        if request.get("netblock").is_none() {
            request["netblock"] = "10.0.0.0/24".into();
        }
        self.post("/networks", Some(request))
    }

    /// Makes a network and waits until it can be used.
    pub(crate) fn create(&self, request: Value) -> Value {
        let record = self.ask_for(request);
        self.wait_for_state(id(&record), "created")
    }

    /// Waits until a network is in a state.
    pub(crate) fn wait_for_state(&self, network: NetworkId, state: &str) -> Value {
        let other = match state {
            "created" | "deleted" => "error",
            _ => "created",
        };
        wait_for(&format!("network {network} to be {state}"), PATIENCE, || {
            let record = self.get(&format!("/networks/{network}"));
            assert_ne!(record["state"], other, "{record}\n{}", self.log());
            (record["state"] == state).then_some(record)
        })
    }

    /// Asks for the end of a network.
    pub(crate) fn ask_to_delete(&self, network: NetworkId) {
        let (status, answer) = self.call(Method::DELETE, &format!("/networks/{network}"), None);
        assert_eq!(status, 202, "{answer}");
    }

    /// Events of a network with this message, newest first.
    pub(crate) fn events(&self, network: NetworkId, message: &str) -> Vec<Value> {
        let events = self.get(&format!("/networks/{network}/events?limit=1000"));
        events.as_array().unwrap().iter().filter(|event| event["message"] == message).cloned().collect()
    }

    /// This machine's node.
    pub(crate) fn node(&self) -> NodeId {
        let nodes = self.get("/nodes");
        let own = nodes.as_array().unwrap().iter().find(|node| node["ip"] == self.address.as_str());
        own.unwrap()["uuid"].as_str().unwrap().parse().unwrap()
    }

    /// Everything of networks that there is on this machine.
    pub(crate) fn inventory(&self) -> String {
        self.place.sh(INVENTORY)
    }
}

/// Devices with their masters and markers, addresses, flood entries, rules, and the same in each router; files and
/// servers. What changes by itself is left out: numbers, counters, and what bridges learn.
const INVENTORY: &str = r#"
look='
    ip -o link | sed "s/^[0-9]*: //; s/@[^:]*//; s/ *link\/.*\(alias .*\)/\1/; s/ *link\/.*//; s/[\\]//g" | sort
    ip -4 -o addr | sed "s/^[0-9]*: //; s/ scope.*//" | sort
    ip route | sort
    ip neigh show proxy | sort
    bridge fdb | grep ^00:00:00:00:00:00 | sort
    nft list tables | sort | while read table; do nft list $table; done
'
sh -c "$look"
for router in $(ls /run/netns 2>/dev/null); do
    echo router $router
    ip netns exec $router sh -c "$look"
done
ls /run/muster/networks 2>/dev/null
for line in /proc/[0-9]*/cmdline; do
    tr '\0' ' ' < $line 2>/dev/null | grep -o 'conf-file=/run/muster/networks/[^/]*'
done | sort
true"#;

/// What is on machines, one after the other.
pub(crate) fn inventories(machines: &[Machine]) -> String {
    machines.iter().map(Machine::inventory).collect::<Vec<_>>().join("\n")
}

/// Waits until everything is as it was, and says what is not.
pub(crate) fn wait_until_same(what: &str, limit: Duration, whole: &str, look: impl Fn() -> String) {
    let began = Instant::now();
    loop {
        let found = look();
        if found == whole {
            return;
        }
        if began.elapsed() > limit {
            let lines = |text: &str, other: &str, sign: &str| -> String {
                let missing = text.lines().filter(|line| !other.lines().any(|found| found == *line));
                missing.map(|line| format!("{sign} {line}\n")).collect()
            };
            let (gone, new) = (lines(whole, &found, "-"), lines(&found, whole, "+"));
            panic!("waited {} s in vain for {what}:\n{gone}{new}", limit.as_secs());
        }
        muster_testing::wait(Duration::from_millis(50));
    }
}

pub(crate) fn id(network: &Value) -> NetworkId {
    network["uuid"].as_str().unwrap().parse().unwrap()
}

/// The hosts and the external peer. The last host is the network node.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) machines: Vec<Machine>,
    pub(crate) outside: Place,
    pub(crate) folder: PathBuf,
    pub(crate) database: String,
    _switch: Place,
}

impl World {
    /// One machine, with SQLite.
    pub(crate) fn of_one(settings: &[(&str, &str)]) -> Self {
        let folder = folder();
        let database = format!("sqlite:{}", folder.join("m1/data/muster.db").display());
        Self::new(1, folder, database, settings)
    }

    /// Several machines on one MariaDB; nothing if that is not installed.
    pub(crate) fn of(count: usize, settings: &[(&str, &str)]) -> Option<Self> {
        let Some(database) = muster_testing::socket_url() else {
            muster_testing::skipped("mariadb-server");
            return None;
        };
        Some(Self::new(count, folder(), database, settings))
    }

    fn new(count: usize, folder: PathBuf, database: String, settings: &[(&str, &str)]) -> Self {
        let switch = Place::new("switch");
        switch.sh("ip link add switch type bridge && ip link set switch up");
        let mut machines: Vec<Machine> = (1..=count)
            .map(|number| {
                let setup = setup(&folder.join(format!("m{number}")))
                    .set("DATABASE_URL", &database)
                    .set("NODE_IS_NETWORK_NODE", if number == count { "true" } else { "false" });
                let setup = settings.iter().fold(setup, |setup, (name, value)| setup.set(name, value));
                Machine::new(number, &switch, setup)
            })
            .collect();
        let outside = Place::new("outside");
        let last = &machines[count - 1].place;
        last.cable("world0", &outside, "eth0");
        last.sh("ip addr add 198.51.100.2/24 dev world0 && ip link set world0 up");
        outside.sh("ip addr add 198.51.100.1/24 dev eth0 && ip link set eth0 up");
        outside.sh("ip route add 192.168.20.0/24 via 198.51.100.2");
        for machine in machines.iter_mut().rev() {
            machine.start();
        }
        Self { machines, outside, folder, database, _switch: switch }
    }

    pub(crate) fn machine(&self, number: usize) -> &Machine {
        &self.machines[number - 1]
    }
}

/// A folder that goes with the world.
fn folder() -> PathBuf {
    tempfile::tempdir().unwrap().keep()
}

fn setup(folder: &Path) -> Setup {
    std::fs::create_dir_all(folder).unwrap();
    Setup::new(env!("CARGO_BIN_EXE_muster"), &folder.join("data"))
        .arguments(&[])
        .everywhere()
        .set("AUTH_SECRET_SEED", SEED)
        .set("SYSTEM_KEY", KEY)
        .set("CLUSTER_OP_LEASE", "1")
        .set("NODE_CHECKIN_INTERVAL", "1")
        .set("NODE_EGRESS_NIC", "world0")
        .set("NODE_MESH_NIC", "mesh0")
        .set("DNS_SERVER", "198.51.100.1")
}
