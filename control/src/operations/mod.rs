//! The worker that runs queued operations, and the steps of every operation, one file each.
//!
//! An operation is a row with named steps, run by the worker that owns its lease. A step is idempotent: it may run
//! again after any failure or crash. It has an undo, or says why none is needed. A step that must wait for something
//! else returns [`Error::NotReady`] and is retried without limit; an error that no retry can fix ends the operation.
//! See docs/decisions/0004.
//!
//! [`Error::NotReady`]: muster_types::Error::NotReady

mod clean_namespace;
mod clean_network;
mod convert_image;
mod create_instance;
mod create_network;
mod delete_instance;
mod delete_namespace;
mod delete_network;
mod drain_node;
mod evacuate_instance;
mod fetch_artifact;
mod implementations;
mod lane_slots;
mod migrate_instance;
mod plug_interface;
mod prepare_migration;
mod rebalance_cluster;
mod release_instance;
mod snapshot_instance;
mod start_instance;
mod step;
mod worker;

pub use implementations::IMPLEMENTATIONS;
pub use step::{Implementation, Step, StepFn, StepFuture, Undo};
pub use worker::{Fault, Worker};
