//! The rules of the API objects: who may do what to which object, and what follows from it. Contains neither HTTP nor
//! SQL.

pub mod address;
pub mod agent_operation;
pub(crate) mod agent_operation_record;
pub mod artifact;
pub mod audit;
pub mod blob;
pub mod blob_copy;
pub mod claim;
pub mod event_stream;
pub mod exchange;
pub mod import;
pub mod instance;
pub mod interface;
pub mod issuer;
pub mod key;
pub mod label;
pub(crate) mod lookup;
pub mod metadata;
pub mod metrics;
pub mod namespace;
pub mod network;
pub(crate) mod network_handover;
pub mod node;
pub mod node_invitation;
pub mod node_join;
pub mod node_location;
pub mod operation;
pub mod quota;
pub mod rule;
pub mod service_key;
pub mod session;
pub(crate) mod ticket;
pub mod trust;
pub mod upload;
pub mod version;
