//! In-memory state of one daemon, shared through [`App`](crate::App). A restart loses it without harm.

mod agent_notifier;
mod blobs_in_progress;
mod instance_locks;
mod network_notifier;
mod placement_cache;

pub use agent_notifier::AgentNotifier;
pub use blobs_in_progress::{BlobInProgress, BlobsInProgress};
pub use instance_locks::InstanceLocks;
pub use network_notifier::NetworkNotifier;
pub use placement_cache::{NodeCapacity, PlacementCache};
