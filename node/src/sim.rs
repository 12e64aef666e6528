//! A made-up node, for demonstrations, fault injection and tests of scale. It says so in its record.

use muster_types::ids::NodeId;
use muster_types::node::{NodeApi, NodeFuture, NodeIdentity, NodeReport};
use serde_json::{Value, json};

use crate::host::Process;
use crate::local::{flags, metrics};

const CPUS: u64 = 16;
const MEMORY_MB: u64 = 64 * 1024;
const DISK: u64 = 1 << 40;

/// A node that exists only in this process.
#[derive(Debug)]
pub struct SimulatedNode {
    identity: NodeIdentity,
    born: std::time::Instant,
}

impl SimulatedNode {
    /// The `number`th simulated node, counted from 1. The first is the network and database node, too.
    #[must_use]
    pub fn new(number: usize, id: NodeId) -> Self {
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
        }
    }
}

impl NodeApi for SimulatedNode {
    fn identity(&self) -> &NodeIdentity {
        &self.identity
    }

    fn report(&self) -> NodeFuture<'_, NodeReport> {
        Box::pin(async {
            let mut resources = flags(&self.identity);
            let facts = json!({
                "simulated": true,
                "cpu_max": CPUS,
                "cpu_available": CPUS,
                "cpu_max_per_instance": CPUS,
                "cpu_schedulable": CPUS,
                "cpu_load_1": 0.0,
                "cpu_load_5": 0.0,
                "cpu_load_15": 0.0,
                "cpu_total_instance_vcpus": 0,
                "memory_max": MEMORY_MB,
                "memory_available": MEMORY_MB,
                "disk_total": DISK,
                "disk_free": DISK,
                "disk_used": 0,
                "instances_total": 0,
                "instances_active": 0,
            });
            if let Value::Object(facts) = facts {
                resources.extend(facts);
            }
            let process = Process { cpu_seconds: 0.0, age_seconds: self.born.elapsed().as_secs_f64() };
            Ok(NodeReport { resources, process_metrics: metrics(process) })
        })
    }
}
