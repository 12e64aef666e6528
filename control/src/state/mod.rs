//! In-memory state of one daemon, shared through [`App`](crate::App). A restart loses it without harm.

mod agent_notifier;
mod blob_uses;
mod blobs_in_progress;
mod cluster_changes;
mod console_sessions;
mod event_follower;
mod event_streams;
mod lease_observations;
mod network_notifier;
mod node_cache;
mod node_silences;
mod object_locks;
mod owned_leases;
mod placement_cache;
mod state_counts_cache;
mod terminal_sessions;

pub use agent_notifier::AgentNotifier;
pub use blob_uses::BlobUses;
pub use blobs_in_progress::{BlobInProgress, BlobsInProgress};
pub use cluster_changes::ClusterChanges;
pub use console_sessions::{ConsoleSession, ConsoleSessions};
pub(crate) use event_follower::{EventFollower, MAX_COMMIT_DELAY, PAGE as EVENT_PAGE};
pub use event_streams::{
    EventStreams, EventSubscription, MessageFilter, StreamItem, StreamKey, StreamMessage,
};
pub use lease_observations::LeaseObservations;
pub use network_notifier::NetworkNotifier;
pub use node_cache::NodeCache;
pub use node_silences::NodeSilences;
pub use object_locks::{InstanceLocks, ObjectLocks, UploadLocks};
pub use owned_leases::OwnedLeases;
pub use placement_cache::{NodeCapacity, PlacementCache};
pub use state_counts_cache::{ClusterFacts, StateCountsCache};
pub use terminal_sessions::{SessionPermit, TerminalSessions};
