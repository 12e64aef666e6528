//! Reconcilers make the cluster match the database. They take no input and may run at any time, any number of times.
//! `tasks.rs` lists all of them.

pub mod agent_operations;
pub mod agents;
pub mod artifact_watch;
pub mod backups;
pub(crate) mod blob_copies;
mod changes;
pub mod checkin;
pub mod cleaner;
mod console_sessions;
mod event_prune;
mod event_rows;
mod event_streams;
pub mod instance_watch;
pub mod key_sweep;
mod maintainer;
pub mod mesh;
mod network_role;
pub mod network_usage;
pub mod network_watch;
pub mod networks;
pub mod node_watch;
pub mod quarantine;
pub mod replicas;
pub mod storage;
pub mod task;
pub mod tasks;
pub mod vm_usage;
pub mod vms;
pub mod webhooks;
