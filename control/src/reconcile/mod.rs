//! Reconcilers: they take no input, may run at any time and any number of times, and bring the cluster a
//! step nearer to what the database says it should be.

pub mod address_rest;
pub mod agent_operations;
pub mod agents;
pub mod artifact_watch;
pub(crate) mod blob_copies;
pub mod checkin;
pub mod cleaner;
pub mod instance_watch;
pub mod key_sweep;
pub mod maintainer;
pub(crate) mod network_plan;
pub mod network_usage;
pub mod network_watch;
pub mod networks;
pub mod node_watch;
pub mod storage;
pub mod vm_usage;
pub mod vms;
