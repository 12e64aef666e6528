//! Test clusters: one in the test's process with simulated nodes, and real daemons on hosts in network namespaces.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod api_document;
mod database;
mod host_leaks;
mod hosts;
mod in_process;
mod vms;

pub use api_document::{ApiDocument, Exchange};
pub use database::{ClusterDatabase, LockedRows};
pub use hosts::{
    Host, HostCluster, SYSTEM_KEY, VIRTUAL_IP, inventories, inventory, network_id, wait_until_same,
};
pub use in_process::{ApiResponse, Cluster, ORIGIN, caller, seed, wait_for};
pub use vms::{
    cgroups, enter_vm_namespaces, list_resources, publish_image, qemu_processes, single_vm_host, tiny_image,
    vm_hosts, vm_hosts_with_program, vm_settings, wait_until_no_operations, wait_until_released,
};
