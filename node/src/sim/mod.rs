//! Simulated nodes for demonstrations, fault injection and scale tests. Their node records are marked as simulated. See
//! docs/decisions/0007.

mod guests;
mod migrations;
mod replicas;
mod screen;
mod script;
mod snapshots;
mod vm;
mod vms;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use muster_types::guest::GuestApi;
use muster_types::ids::{ClusterId, InstanceId, NetworkId, NodeId, StorageId};
use muster_types::network::{NetworkPlan, NetworkReport, NetworkUsage, PingResult};
use muster_types::node::{FoundNetwork, NodeApi, NodeFuture, NodeIdentity, NodeReport, RouterGate};
use muster_types::shared_storage::SharedStorageRecord;
use muster_types::storage::StorageApi;
use muster_types::time::BootTime;
use muster_types::vm::{DisplayIdentity, VmApi, VmPlan, VmPower};
use muster_types::{Error, Result};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::host::ProcessUsage;
use crate::image::Images;
use crate::local::{process_metrics, role_flags};
use crate::lost_found::LostFound;
use crate::storage::{FileStorage, SharedStorage};

pub use guests::GuestScript;
use guests::SimulatedGuests;
pub use script::SimulationScript;
use vms::SimulatedVms;

/// The resources of a node.
#[derive(Debug, Clone, Copy)]
struct NodeCapacity {
    cpus: u64,
    memory_mb: u64,
    disk_bytes: u64,
}

const DEFAULT_CAPACITY: NodeCapacity = NodeCapacity { cpus: 16, memory_mb: 64 * 1024, disk_bytes: 1 << 40 };

/// A placeholder for the CA certificate of a node's displays.
const FAKE_CA_CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nc2ltdWxhdGVk\n-----END CERTIFICATE-----\n";

/// A node that exists only in this process.
#[derive(Debug)]
pub struct SimulatedNode {
    identity: NodeIdentity,
    created: std::time::Instant,
    api_url: String,
    capacity: NodeCapacity,
    networks: Mutex<SimulatedNetworks>,
    storage: Arc<FileStorage>,
    vms: SimulatedVms,
    guests: SimulatedGuests,
}

#[derive(Debug, Default)]
struct SimulatedNetworks {
    plans: BTreeMap<NetworkId, NetworkPlan>,
    /// The error with which every change of a network fails.
    failure: Option<String>,
    /// The number of usage queries, from which the simulated traffic is computed.
    usage_queries: u64,
}

/// Returns the loopback address of the `number`th simulated node.
fn address(number: usize) -> Ipv4Addr {
    let offset =
        u32::try_from(number / 250 * 256 + number % 250 + 1).expect("fewer nodes than loopback addresses");
    Ipv4Addr::from_bits(Ipv4Addr::new(127, 1, 0, 0).to_bits() + offset)
}

impl SimulatedNode {
    /// Creates the `number`th simulated node, counted from 1. The first one is also the network and database node. Its
    /// storage is the directory `storage`, which it must not share with another node.
    #[must_use]
    pub fn new(number: usize, id: NodeId, storage: &Path) -> Self {
        let vm_dir = storage.join("machines");
        let name = format!("sim-{number}");
        let lost_found = LostFound::new(storage, &name);
        let storage = Arc::new(FileStorage::new(storage, Images::simulated()));
        let guests = SimulatedGuests::default();
        Self {
            identity: NodeIdentity {
                id,
                name,
                ip: address(number),
                release: format!("muster {} (simulated)", env!("CARGO_PKG_VERSION")),
                simulated: true,
                is_hypervisor: true,
                is_network_node: number == 1,
                is_database_node: number == 1,
            },
            created: std::time::Instant::now(),
            api_url: String::new(),
            capacity: DEFAULT_CAPACITY,
            networks: Mutex::default(),
            vms: SimulatedVms::new(storage.clone(), vm_dir, guests.clone(), lost_found),
            guests,
            storage,
        }
    }

    /// Sets the URL at which the daemon serves the API to other nodes.
    #[must_use]
    pub fn with_api_url(self, url: String) -> Self {
        Self { api_url: url, ..self }
    }

    /// Sets the resources of the node.
    #[must_use]
    pub fn with_size(self, cpus: u64, memory_mb: u64, disk_gb: u64) -> Self {
        Self { capacity: NodeCapacity { cpus, memory_mb, disk_bytes: disk_gb << 30 }, ..self }
    }

    /// Sets the directory that the node shares with others, which need not be mounted.
    pub fn set_shared_storage(&self, path: Option<&Path>) {
        let shared = path.map(|path| SharedStorage::new(path.to_owned(), self.identity.id, true));
        self.storage.set_shared(shared);
    }

    /// Sets the behaviour of the VMs from now on.
    pub fn set_script(&self, script: SimulationScript) {
        self.guests.set_script(script.guest.clone());
        self.vms.set_script(script);
    }

    /// Reboots a guest as if from inside.
    pub fn restart_guest(&self, id: InstanceId) {
        self.guests.reboot(id);
    }

    /// Restarts the agent of a guest.
    pub fn restart_agent(&self, id: InstanceId) {
        self.guests.restart_agent(id);
    }

    /// Returns how often each command line was started in a guest.
    #[must_use]
    pub fn executions(&self, id: InstanceId) -> BTreeMap<String, u64> {
        self.guests.executions(id)
    }

    /// Returns the number of file and output transfers with a guest.
    #[must_use]
    pub fn transfers(&self, id: InstanceId) -> u64 {
        self.guests.transfers(id)
    }

    /// Simulates connections to the port of a VM's serial console.
    pub fn connect_console(&self, id: InstanceId, source: SocketAddr, count: usize) {
        self.vms.connect_console(id, source, count);
    }

    /// Powers a VM off as if from inside its guest.
    pub fn power_off(&self, id: InstanceId, reason: &str) {
        self.vms.terminate(|other| other == id, &VmPower::Off { reason: reason.to_owned() });
    }

    /// Terminates a VM as if its process had died.
    pub fn crash(&self, id: InstanceId, reason: &str) {
        self.vms.terminate(|other| other == id, &VmPower::Crashed { reason: reason.to_owned() });
    }

    /// Terminates all running VMs as if the host had rebooted.
    pub fn lose_all_vms(&self) {
        self.vms.terminate(|_| true, &VmPower::Lost);
    }

    /// Returns the plan of a VM without the contents of its config drive.
    #[must_use]
    pub fn vm_plan(&self, id: InstanceId) -> Option<VmPlan> {
        self.vms.plan(id)
    }

    /// Returns the IDs of all VMs of the node.
    #[must_use]
    pub fn vm_ids(&self) -> Vec<InstanceId> {
        self.vms.ids()
    }

    /// Makes every change of a network fail with this error, or succeed again.
    pub fn fail_networks(&self, reason: Option<&str>) {
        self.networks.lock().failure = reason.map(str::to_owned);
    }

    /// Returns the networks of the node, ordered by ID.
    #[must_use]
    pub fn network_plans(&self) -> Vec<NetworkPlan> {
        self.networks.lock().plans.values().cloned().collect()
    }
}

impl NodeApi for SimulatedNode {
    fn identity(&self) -> &NodeIdentity {
        &self.identity
    }

    fn report(&self) -> NodeFuture<'_, NodeReport> {
        Box::pin(async {
            let mut resources = role_flags(&self.identity);
            let NodeCapacity { cpus, memory_mb, disk_bytes } = self.capacity;
            let vms = self.vms.totals();
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
                "cpu_total_instance_vcpus": vms.cpus,
                "memory_max": memory_mb,
                "memory_available": memory_mb.saturating_sub(vms.memory_mb),
                "memory_total_instance_max": vms.memory_mb,
                "memory_total_instance_actual": vms.memory_mb,
                "disk_total": disk_bytes,
                "disk_free": disk_bytes,
                "disk_used": 0,
                "instances_total": vms.total,
                "instances_active": vms.active,
            });
            let Value::Object(facts) = facts else { unreachable!("the literal is an object") };
            resources.extend(facts);
            let process =
                ProcessUsage { cpu_seconds: 0.0, age_seconds: self.created.elapsed().as_secs_f64() };
            Ok(NodeReport {
                resources,
                process_metrics: process_metrics(process),
                limits: BTreeMap::new(),
                mesh_mtu: Some(1500),
                api_url: self.api_url.clone(),
                display: Some(DisplayIdentity {
                    authority: FAKE_CA_CERTIFICATE.into(),
                    subject: format!("C=XX,O=Muster,CN={}", self.identity.name),
                }),
                console_address: None,
                ..NodeReport::default()
            })
        })
    }

    fn inspect_shared_storage(
        &self,
        cluster: ClusterId,
        registered: Option<StorageId>,
    ) -> NodeFuture<'_, Option<SharedStorageRecord>> {
        Box::pin(self.storage.inspect_shared(cluster, registered))
    }

    fn renew_fencing_lease(&self, _: BootTime) -> Result<()> {
        Ok(())
    }

    fn end_fencing_lease(&self) -> Result<()> {
        Ok(())
    }

    fn ensure_networks<'a>(&'a self, plans: &'a [NetworkPlan]) -> NodeFuture<'a, Vec<Result<NetworkReport>>> {
        let mut networks = self.networks.lock();
        let results = plans.iter().map(|plan| networks.ensure(plan)).collect();
        Box::pin(async { Ok(results) })
    }

    fn set_router_gate(&self, _: RouterGate) -> NodeFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn remove_network(&self, network: FoundNetwork) -> NodeFuture<'_, ()> {
        let mut networks = self.networks.lock();
        let result = networks.check_failure();
        if result.is_ok() {
            networks.plans.remove(&network.id);
        }
        Box::pin(async { result })
    }

    fn list_networks(&self) -> NodeFuture<'_, Vec<FoundNetwork>> {
        let found = self
            .networks
            .lock()
            .plans
            .values()
            .map(|plan| FoundNetwork { id: plan.id, vxid: plan.vxid })
            .collect();
        Box::pin(async { Ok(found) })
    }

    fn ping(&self, network: NetworkId, address: Ipv4Addr) -> NodeFuture<'_, PingResult> {
        let networks = self.networks.lock();
        let plan = networks.plans.get(&network);
        let router = plan.and_then(|plan| Some((plan.netblock.router(), plan.router.as_ref()?)));
        let result = match router {
            Some((gateway, router)) => {
                let responds =
                    address == gateway || router.leases.iter().any(|lease| lease.address == address);
                Ok(PingResult { stdout: ping_output(address, responds), stderr: vec![String::new()] })
            }
            None => Err(Error::Unavailable(format!("the router of network {network} is not on this node"))),
        };
        Box::pin(async { result })
    }

    fn storage(&self) -> &dyn StorageApi {
        &*self.storage
    }

    fn vms(&self) -> &dyn VmApi {
        &self.vms
    }

    fn guests(&self) -> &dyn GuestApi {
        &self.guests
    }

    fn network_usage(&self, network: FoundNetwork) -> NodeFuture<'_, Option<NetworkUsage>> {
        let mut networks = self.networks.lock();
        networks.usage_queries += 1;
        let queries = networks.usage_queries;
        let is_routed = networks.plans.get(&network.id).is_some_and(|plan| plan.router.is_some());
        let counters = |names: [&'static str; 4]| {
            let zeroes = names.into_iter().map(|name| (name, 0));
            zeroes.chain([("packets", 10 * queries), ("bytes", 8400 * queries)]).collect()
        };
        let usage = is_routed.then(|| NetworkUsage {
            rx: counters(["dropped", "errors", "multicast", "over_errors"]),
            tx: counters(["carrier_errors", "collisions", "dropped", "errors"]),
        });
        Box::pin(async { Ok(usage) })
    }
}

impl SimulatedNetworks {
    fn check_failure(&self) -> Result<()> {
        self.failure.as_ref().map_or(Ok(()), |reason| Err(Error::Unavailable(reason.clone())))
    }

    fn ensure(&mut self, plan: &NetworkPlan) -> Result<NetworkReport> {
        self.check_failure()?;
        if let Some(newer) = self.plans.get(&plan.id).filter(|current| current.generation > plan.generation) {
            return Err(Error::Conflict(format!(
                "generation {} of network {} is older than {}, which is in force",
                plan.generation, plan.id, newer.generation
            )));
        }
        self.plans.insert(plan.id, plan.clone());
        Ok(NetworkReport::default())
    }
}

/// Returns the output of `ping` for ten packets.
fn ping_output(address: Ipv4Addr, responds: bool) -> Vec<String> {
    let mut lines = vec![format!("PING {address} ({address}) 56(84) bytes of data.")];
    if responds {
        let line = |number| format!("64 bytes from {address}: icmp_seq={number} ttl=64 time=0.050 ms");
        lines.extend((1..=10).map(line));
    }
    lines.push(String::new());
    lines.push(format!("--- {address} ping statistics ---"));
    lines.push(match responds {
        true => "10 packets transmitted, 10 received, 0% packet loss, time 1800ms".into(),
        false => "10 packets transmitted, 0 received, 100% packet loss, time 1800ms".into(),
    });
    if responds {
        lines.push("rtt min/avg/max/mdev = 0.050/0.050/0.050/0.000 ms".into());
    }
    // The output ends with a newline.
    lines.push(String::new());
    lines
}

#[cfg(test)]
mod tests;
