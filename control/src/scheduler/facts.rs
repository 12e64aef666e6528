//! What is known of a node when an instance is placed.

use muster_types::ids::NodeId;
use muster_types::node::{HostFeature, NodeState};
use serde_json::Value;

use muster_store::nodes::NodeRow;

/// Bytes of a gigabyte, as sizes of disks are counted.
const GB: f64 = (1_u64 << 30) as f64;

/// What a node last said of itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    pub id: NodeId,
    pub name: String,
    pub state: NodeState,
    pub is_hypervisor: bool,
    /// Why it cannot run machines.
    pub refuses: Option<String>,
    /// Threads; 0 if it never reported.
    pub cpu_max: f64,
    pub cpu_max_per_instance: f64,
    /// Threads that are there for instances.
    pub cpu_schedulable: f64,
    pub load_1: f64,
    /// Processors of the machines that it runs.
    pub measured_vcpus: f64,
    pub memory_max_mb: f64,
    pub memory_available_mb: f64,
    pub memory_reserved_mb: f64,
    /// Memory that its machines really use.
    pub memory_actual_mb: f64,
    pub disk_total_gb: f64,
    pub disk_free_gb: f64,
    pub disk_reserved_gb: f64,
    /// Milliseconds of a second, over all disks.
    pub disk_busy_ms: f64,
    /// Jobs that wait for it.
    pub waiting: f64,
    /// Unix time.
    pub lastseen: f64,
}

impl Facts {
    /// Reads the last report of a node. What it did not say is 0, except that limits of an instance are those of the
    /// machine.
    #[must_use]
    pub fn read(row: &NodeRow) -> Self {
        let said = |key: &str| row.report.resources.get(key).and_then(Value::as_f64);
        let number = |key: &str| said(key).unwrap_or(0.0);
        let cpu_max = number("cpu_max");
        Self {
            id: row.identity.id,
            name: row.identity.name.clone(),
            state: row.state,
            is_hypervisor: row.identity.is_hypervisor,
            refuses: row.report.limits.get(&HostFeature::Vms).cloned(),
            cpu_max,
            cpu_max_per_instance: said("cpu_max_per_instance").unwrap_or(cpu_max),
            cpu_schedulable: said("cpu_schedulable").unwrap_or(cpu_max),
            load_1: number("cpu_load_1"),
            measured_vcpus: number("cpu_total_instance_vcpus"),
            memory_max_mb: number("memory_max"),
            memory_available_mb: number("memory_available"),
            memory_reserved_mb: number("memory_reserved_mb"),
            memory_actual_mb: number("memory_total_instance_actual"),
            disk_total_gb: number("disk_total") / GB,
            disk_free_gb: number("disk_free") / GB,
            disk_reserved_gb: number("disk_reservation_gb"),
            disk_busy_ms: number("disk_busy_time_delta_per_second"),
            waiting: number("node_queue_waiting"),
            lastseen: row.lastseen,
        }
    }
}
