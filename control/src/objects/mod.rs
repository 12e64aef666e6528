//! The rules of the API objects: who may do what to which object, and what follows from it. Contains neither HTTP nor
//! SQL.

pub mod address;
pub mod agent_operation;
pub(crate) mod agent_operation_record;
pub mod artifact;
pub mod audit;
pub mod blob;
pub(crate) mod blob_copy;
pub mod claim;
pub mod exchange;
pub mod import;
pub mod instance;
pub mod interface;
pub mod issuer;
pub mod key;
pub mod label;
pub mod metadata;
pub mod metrics;
pub mod namespace;
pub mod network;
pub mod node;
pub mod node_location;
pub mod operation;
pub mod rule;
pub mod trust;
pub mod upload;
pub mod version;
