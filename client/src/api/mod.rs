//! The REST API as methods of [`Client`], one file per resource.

mod agent_operations;
mod artifacts;
mod blobs;
mod body_stream;
mod claims;
mod client;
mod cluster;
mod cluster_upgrades;
mod console_tickets;
mod error;
mod event_streams;
mod events;
mod exchanges;
mod instances;
mod interfaces;
mod issuers;
mod keys;
mod labels;
mod lists;
mod metadata;
mod namespaces;
mod networks;
mod nodes;
mod object_path;
mod operations;
mod quotas;
mod rebalance;
mod requests;
mod response;
mod rules;
mod sessions;
mod trusts;
mod uploads;
mod uri;
mod webhooks;

pub use agent_operations::AgentTimeouts;
pub use artifacts::{ArtifactRef, NewVersion, VersionSource};
pub use body_stream::BodyStream;
pub use claims::ClaimLimits;
pub use client::Client;
pub use cluster::{ClusterResources, LeaseOwner, NodeResources};
pub use error::{Error, Result};
pub use event_streams::{EventStream, StreamMessage, StreamQuery};
pub use events::EventQuery;
pub use exchanges::ExchangedKey;
pub use instances::{
    NewInstance, NewInterface, NewMigration, NewSnapshot, PowerAction, ScreenLink, SnapshotHandle,
    SnapshotRecord,
};
pub use keys::AddedKey;
pub use lists::ListQuery;
pub use networks::{NetworkDeletion, NewNetwork};
pub use object_path::ObjectPath;
pub use requests::AnyResponse;
pub use response::ApiResponse;
