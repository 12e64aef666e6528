//! What the scheduler knows of a node.

use muster_types::ids::NodeId;
use muster_types::node::{CordonReason, HostFeature, NodeState};
use muster_types::shared_storage::SharedStorageRecord;
use serde_json::Value;

use muster_store::nodes::NodeRow;

pub(super) const BYTES_PER_GB: f64 = (1_u64 << 30) as f64;

/// The state and the last report of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeFacts {
    pub id: NodeId,
    pub name: String,
    pub state: NodeState,
    pub is_hypervisor: bool,
    /// Why the node cannot run VMs.
    pub vms_unavailable: Option<String>,
    /// Why the node gets no new instances although it is alive.
    pub degraded: Option<String>,
    pub shared_storage: Option<SharedStorageRecord>,
    /// Why the node gets no new instances by request.
    pub cordon: Option<CordonReason>,
    /// The number of threads; 0 if the node never reported.
    pub cpu_max: f64,
    pub cpu_max_per_instance: f64,
    /// The number of threads that are available to instances.
    pub cpu_schedulable: f64,
    pub load_1: f64,
    /// The number of vCPUs of the VMs that run on the node.
    pub measured_vcpus: f64,
    pub memory_max_mb: f64,
    pub memory_available_mb: f64,
    pub memory_reserved_mb: f64,
    /// The memory that VMs actually use.
    pub memory_actual_mb: f64,
    pub disk_total_gb: f64,
    pub disk_free_gb: f64,
    pub disk_reserved_gb: f64,
    /// Milliseconds per second, summed over all disks.
    pub disk_busy_ms: f64,
    pub queued_operations: f64,
    /// The seconds between the last check-in and the time when the facts were read.
    pub silence: f64,
}

impl NodeFacts {
    /// Reads the last report of a node. Missing values are 0, and missing limits are the number of threads.
    #[must_use]
    pub fn from_row(row: &NodeRow, silence: f64) -> Self {
        let reported = |key: &str| row.report.resources.get(key).and_then(Value::as_f64);
        let number = |key: &str| reported(key).unwrap_or(0.0);
        let cpu_max = number("cpu_max");
        Self {
            id: row.identity.id,
            name: row.identity.name.clone(),
            state: row.state,
            is_hypervisor: row.identity.is_hypervisor,
            vms_unavailable: row.report.limits.get(&HostFeature::Vms).cloned(),
            degraded: row.report.degraded.as_ref().map(|degraded| degraded.reason.clone()),
            shared_storage: row.report.shared_storage.clone(),
            cordon: row.cordon.as_ref().map(|cordon| cordon.reason),
            cpu_max,
            cpu_max_per_instance: reported("cpu_max_per_instance").unwrap_or(cpu_max),
            cpu_schedulable: reported("cpu_schedulable").unwrap_or(cpu_max),
            load_1: number("cpu_load_1"),
            measured_vcpus: number("cpu_total_instance_vcpus"),
            memory_max_mb: number("memory_max"),
            memory_available_mb: number("memory_available"),
            memory_reserved_mb: number("memory_reserved_mb"),
            memory_actual_mb: number("memory_total_instance_actual"),
            disk_total_gb: number("disk_total") / BYTES_PER_GB,
            disk_free_gb: number("disk_free") / BYTES_PER_GB,
            disk_reserved_gb: number("disk_reservation_gb"),
            disk_busy_ms: number("disk_busy_time_delta_per_second"),
            queued_operations: number("node_queue_waiting"),
            silence,
        }
    }
}
