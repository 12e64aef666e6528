//! A made-up node, for demonstrations, fault injection and tests of scale. It says so in its record.

mod guests;
mod screen;
mod vms;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use muster_types::guest::GuestApi;
use muster_types::ids::{InstanceId, NetworkId, NodeId};
use muster_types::network::{NetworkPlan, NetworkReport, NetworkUsage, PingResult};
use muster_types::node::{FoundNetwork, NodeApi, NodeFuture, NodeIdentity, NodeReport};
use muster_types::storage::StorageApi;
use muster_types::vm::{DisplayIdentity, VmApi, VmPlan, VmPower};
use muster_types::{Error, Result};
use serde_json::{Value, json};

use crate::host::ProcessUsage;
use crate::image::Images;
use crate::local::{process_metrics, role_flags};
use crate::storage::FileStorage;

pub use guests::GuestScript;
use guests::SimulatedGuests;
use vms::SimulatedMachines;

/// What a node has.
#[derive(Debug, Clone, Copy)]
struct Size {
    cpus: u64,
    memory_mb: u64,
    /// In bytes.
    disk: u64,
}

const USUAL: Size = Size { cpus: 16, memory_mb: 64 * 1024, disk: 1 << 40 };

/// Stands for the certificate of an authority; nobody is to trust it.
const AUTHORITY: &str = "-----BEGIN CERTIFICATE-----\nc2ltdWxhdGVk\n-----END CERTIFICATE-----\n";

/// What happens to simulated machines, for tests and demonstrations.
#[derive(Debug, Clone, Default)]
pub struct Script {
    /// How long a start takes.
    pub boot: Duration,
    /// Why every start fails.
    pub start_fails: Option<String>,
    /// Why every build fails.
    pub build_fails: Option<String>,
    /// What consoles show after a start, in place of the usual text.
    pub console: Option<String>,
    /// What happens in their guests.
    pub guest: GuestScript,
}

/// A node that exists only in this process.
#[derive(Debug)]
pub struct SimulatedNode {
    identity: NodeIdentity,
    born: std::time::Instant,
    api_url: String,
    size: Size,
    networks: Mutex<Networks>,
    storage: Arc<FileStorage>,
    machines: SimulatedMachines,
    guests: SimulatedGuests,
}

#[derive(Debug, Default)]
struct Networks {
    plans: BTreeMap<NetworkId, NetworkPlan>,
    /// Why every network fails, for tests.
    failure: Option<String>,
    /// How often somebody asked what passed, which is what passes here.
    asked: u64,
}

impl SimulatedNode {
    /// The `number`th simulated node, counted from 1. The first is the network and database node, too. Its disk is
    /// the folder `storage`, which no other node may have.
    #[must_use]
    pub fn new(number: usize, id: NodeId, storage: &Path) -> Self {
        let machines = storage.join("machines");
        let storage = Arc::new(FileStorage::new(storage, Images::simulated()));
        let guests = SimulatedGuests::default();
        Self {
            identity: NodeIdentity {
                id,
                name: format!("sim-{number}"),
                ip: format!("127.1.{}.{}", number / 250, number % 250 + 1),
                release: format!("muster {} (simulated)", env!("CARGO_PKG_VERSION")),
                simulated: true,
                is_hypervisor: true,
                is_network_node: number == 1,
                is_database_node: number == 1,
            },
            born: std::time::Instant::now(),
            api_url: String::new(),
            size: USUAL,
            networks: Mutex::default(),
            machines: SimulatedMachines::new(storage.clone(), machines, guests.clone()),
            guests,
            storage,
        }
    }

    /// Says where the daemon serves the API to the other nodes.
    #[must_use]
    pub fn with_api_url(self, url: String) -> Self {
        Self { api_url: url, ..self }
    }

    /// Says how large the node is.
    #[must_use]
    pub fn with_size(self, cpus: u64, memory_mb: u64, disk_gb: u64) -> Self {
        Self { size: Size { cpus, memory_mb, disk: disk_gb << 30 }, ..self }
    }

    /// Says what happens to machines from now on.
    pub fn script(&self, script: Script) {
        self.guests.script(script.guest.clone());
        self.machines.script(script);
    }

    /// Starts a guest again as if somebody in it did it.
    pub fn restart_guest(&self, id: InstanceId) {
        self.guests.restart(id);
    }

    /// Starts the agent of a guest again.
    pub fn restart_agent(&self, id: InstanceId) {
        self.guests.restart_agent(id);
    }

    /// How often each command line was started in the guest of a machine, for as long as there is one.
    #[must_use]
    pub fn executions(&self, id: InstanceId) -> BTreeMap<String, u64> {
        self.guests.executions(id)
    }

    /// How many transfers of files and of output were begun with the guest of a machine.
    #[must_use]
    pub fn transfers(&self, id: InstanceId) -> u64 {
        self.guests.transfers(id)
    }

    /// Switches a machine off as if its guest did it.
    pub fn switch_off(&self, id: InstanceId, reason: &str) {
        self.machines.end(|other| other == id, &VmPower::Off { reason: reason.to_owned() });
    }

    /// Ends a machine as if its process died.
    pub fn crash(&self, id: InstanceId, reason: &str) {
        self.machines.end(|other| other == id, &VmPower::Crashed { reason: reason.to_owned() });
    }

    /// Ends all machines that run as if the host had restarted.
    pub fn lose_all(&self) {
        self.machines.end(|_| true, &VmPower::Lost);
    }

    /// What a machine is, but for the contents of its config drive; nothing if there is none.
    #[must_use]
    pub fn machine(&self, id: InstanceId) -> Option<VmPlan> {
        self.machines.plan(id)
    }

    /// The machines that the node has something of.
    #[must_use]
    pub fn machine_ids(&self) -> Vec<InstanceId> {
        self.machines.ids()
    }

    /// Makes every network fail for this reason from now on, or none any more.
    pub fn fail_networks(&self, reason: Option<&str>) {
        self.networks().failure = reason.map(str::to_owned);
    }

    /// What the node has, by the order of the ids.
    #[must_use]
    pub fn plans(&self) -> Vec<NetworkPlan> {
        self.networks().plans.values().cloned().collect()
    }

    fn networks(&self) -> MutexGuard<'_, Networks> {
        self.networks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NodeApi for SimulatedNode {
    fn identity(&self) -> &NodeIdentity {
        &self.identity
    }

    fn report(&self) -> NodeFuture<'_, NodeReport> {
        Box::pin(async {
            let mut resources = role_flags(&self.identity);
            let (Size { cpus, memory_mb, disk }, machines) = (self.size, self.machines.sum());
            let facts = json!({
                "simulated": true,
                "accelerator": "simulated",
                "cpu_max": cpus,
                "cpu_available": cpus,
                "cpu_max_per_instance": cpus,
                "cpu_schedulable": cpus,
                "cpu_load_1": 0.0,
                "cpu_load_5": 0.0,
                "cpu_load_15": 0.0,
                "cpu_total_instance_vcpus": machines.cpus,
                "memory_max": memory_mb,
                "memory_available": memory_mb.saturating_sub(machines.memory_mb),
                "memory_total_instance_max": machines.memory_mb,
                "memory_total_instance_actual": machines.memory_mb,
                "disk_total": disk,
                "disk_free": disk,
                "disk_used": 0,
                "instances_total": machines.total,
                "instances_active": machines.active,
            });
            if let Value::Object(facts) = facts {
                resources.extend(facts);
            }
            let process = ProcessUsage { cpu_seconds: 0.0, age_seconds: self.born.elapsed().as_secs_f64() };
            Ok(NodeReport {
                resources,
                process_metrics: process_metrics(process),
                limits: BTreeMap::new(),
                mesh_mtu: Some(1500),
                api_url: self.api_url.clone(),
                display: Some(DisplayIdentity {
                    authority: AUTHORITY.into(),
                    subject: format!("C=XX,O=Muster,CN={}", self.identity.name),
                }),
            })
        })
    }

    fn ensure_networks<'a>(&'a self, plans: &'a [NetworkPlan]) -> NodeFuture<'a, Vec<Result<NetworkReport>>> {
        let mut networks = self.networks();
        let results = plans.iter().map(|plan| networks.ensure(plan)).collect();
        Box::pin(async { Ok(results) })
    }

    fn remove_network(&self, network: FoundNetwork) -> NodeFuture<'_, ()> {
        let mut networks = self.networks();
        let result = networks.refuse();
        if result.is_ok() {
            networks.plans.remove(&network.id);
        }
        Box::pin(async { result })
    }

    fn find_networks(&self) -> NodeFuture<'_, Vec<FoundNetwork>> {
        let found = self
            .networks()
            .plans
            .values()
            .map(|plan| FoundNetwork { id: plan.id, vxid: plan.vxid })
            .collect();
        Box::pin(async { Ok(found) })
    }

    fn ping(&self, network: NetworkId, address: Ipv4Addr) -> NodeFuture<'_, PingResult> {
        let networks = self.networks();
        let plan = networks.plans.get(&network);
        let router = plan.and_then(|plan| Some((plan.netblock.router(), plan.router.as_ref()?)));
        let result = match router {
            Some((own, router)) => {
                let answers = address == own || router.leases.iter().any(|lease| lease.address == address);
                Ok(PingResult { stdout: pings(address, answers), stderr: vec![String::new()] })
            }
            None => Err(Error::Unavailable(format!("the router of network {network} is not on this node"))),
        };
        Box::pin(async { result })
    }

    fn storage(&self) -> &dyn StorageApi {
        &*self.storage
    }

    fn vms(&self) -> &dyn VmApi {
        &self.machines
    }

    fn guests(&self) -> &dyn GuestApi {
        &self.guests
    }

    fn network_usage(&self, network: FoundNetwork) -> NodeFuture<'_, Option<NetworkUsage>> {
        let mut networks = self.networks();
        networks.asked += 1;
        let asked = networks.asked;
        let here = networks.plans.get(&network.id).is_some_and(|plan| plan.router.is_some());
        let counters = |names: [&'static str; 4]| {
            let zeroes = names.into_iter().map(|name| (name, 0));
            zeroes.chain([("packets", 10 * asked), ("bytes", 8400 * asked)]).collect()
        };
        let usage = here.then(|| NetworkUsage {
            rx: counters(["dropped", "errors", "multicast", "over_errors"]),
            tx: counters(["carrier_errors", "collisions", "dropped", "errors"]),
        });
        Box::pin(async { Ok(usage) })
    }
}

impl Networks {
    fn refuse(&self) -> Result<()> {
        self.failure.as_ref().map_or(Ok(()), |reason| Err(Error::Unavailable(reason.clone())))
    }

    fn ensure(&mut self, plan: &NetworkPlan) -> Result<NetworkReport> {
        self.refuse()?;
        if let Some(newer) = self.plans.get(&plan.id).filter(|known| known.generation > plan.generation) {
            return Err(Error::Conflict(format!(
                "generation {} of network {} is older than {}, which is in force",
                plan.generation, plan.id, newer.generation
            )));
        }
        self.plans.insert(plan.id, plan.clone());
        Ok(NetworkReport::default())
    }
}

/// What `ping` prints after ten packets.
fn pings(address: Ipv4Addr, answers: bool) -> Vec<String> {
    let mut lines = vec![format!("PING {address} ({address}) 56(84) bytes of data.")];
    if answers {
        let line = |number| format!("64 bytes from {address}: icmp_seq={number} ttl=64 time=0.050 ms");
        lines.extend((1..=10).map(line));
    }
    lines.push(String::new());
    lines.push(format!("--- {address} ping statistics ---"));
    lines.push(match answers {
        true => "10 packets transmitted, 10 received, 0% packet loss, time 1800ms".into(),
        false => "10 packets transmitted, 0 received, 100% packet loss, time 1800ms".into(),
    });
    if answers {
        lines.push("rtt min/avg/max/mdev = 0.050/0.050/0.050/0.000 ms".into());
    }
    // What follows the last line end.
    lines.push(String::new());
    lines
}

#[cfg(test)]
mod tests;
