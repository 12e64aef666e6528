//! The node that is this machine.

use std::path::{Path, PathBuf};

use muster_types::node::{NodeApi, NodeFuture, NodeIdentity, NodeReport};
use muster_types::settings::Settings;
use serde_json::{Map, Value, json};

use crate::host;

/// This machine.
#[derive(Debug)]
pub struct LocalNode {
    identity: NodeIdentity,
    storage: PathBuf,
    reserved_memory_mb: u64,
    reserved_disk_gb: f64,
    reserved_cpus: u64,
}

impl LocalNode {
    /// `id` was kept from the first start; `storage` is where disks and images will be.
    #[must_use]
    pub fn new(id: muster_types::ids::NodeId, settings: &Settings, storage: &Path) -> Self {
        let or =
            |given: &str, found: fn() -> String| if given.is_empty() { found() } else { given.to_owned() };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a reservation of memory"
        )]
        let reserved_memory_mb = (settings.node_ram_reservation_gb.max(0.0) * 1024.0) as u64;
        Self {
            identity: NodeIdentity {
                id,
                name: or(&settings.node_name, host::name),
                ip: or(&settings.node_mesh_ip, host::address),
                release: format!("muster {}", env!("CARGO_PKG_VERSION")),
                simulated: false,
                is_hypervisor: settings.node_is_hypervisor,
                is_network_node: settings.node_is_network_node,
                is_database_node: settings.node_is_database_node,
            },
            storage: storage.to_owned(),
            reserved_memory_mb,
            reserved_disk_gb: settings.node_disk_reservation_gb,
            reserved_cpus: settings.node_cpu_reservation_threads,
        }
    }

    fn look(&self) -> NodeReport {
        let (cpus, load, memory, disk) =
            (host::cpus(), host::load(), host::memory(), host::disk(&self.storage));
        let (received, sent) = host::network();
        let process = host::process();
        let mut resources = flags(&self.identity);
        let facts = json!({
            "cpu_max": cpus,
            "cpu_available": cpus,
            "cpu_max_per_instance": cpus,
            "cpu_schedulable": (cpus as u64).saturating_sub(self.reserved_cpus).max(1),
            "cpu_load_1": load[0],
            "cpu_load_5": load[1],
            "cpu_load_15": load[2],
            "cpu_total_instance_vcpus": 0,
            "cpu_total_instance_cpu_time": 0,
            "memory_max": memory.total,
            "memory_available": memory.available,
            "memory_reserved_mb": self.reserved_memory_mb,
            "memory_total_instance_max": 0,
            "memory_total_instance_actual": 0,
            "disk_total": disk.total,
            "disk_free": disk.free,
            "disk_used": disk.total.saturating_sub(disk.free),
            "disk_reservation_gb": self.reserved_disk_gb,
            "network_read_bytes": received,
            "network_write_bytes": sent,
            "instances_total": 0,
            "instances_active": 0,
        });
        if let Value::Object(facts) = facts {
            resources.extend(facts);
        }
        NodeReport { resources, process_metrics: metrics(process) }
    }
}

/// What a node is, as the `resources` event repeats it.
pub(crate) fn flags(identity: &NodeIdentity) -> Map<String, Value> {
    let mut flags = Map::new();
    flags.insert("is_hypervisor".into(), identity.is_hypervisor.into());
    flags.insert("is_network_node".into(), identity.is_network_node.into());
    flags.insert("is_database_node".into(), identity.is_database_node.into());
    flags
}

pub(crate) fn metrics(process: host::Process) -> Map<String, Value> {
    let fraction = if process.age_seconds > 0.0 { process.cpu_seconds / process.age_seconds } else { 0.0 };
    let mut metrics = Map::new();
    metrics.insert("process_cpu_time_muster".into(), process.cpu_seconds.into());
    metrics.insert("process_age_muster".into(), process.age_seconds.into());
    metrics.insert("process_cpu_fraction_muster".into(), fraction.into());
    metrics
}

impl NodeApi for LocalNode {
    fn identity(&self) -> &NodeIdentity {
        &self.identity
    }

    fn report(&self) -> NodeFuture<'_, NodeReport> {
        Box::pin(async { Ok(self.look()) })
    }
}
