//! The rules: what may be done to which object, and what follows from it. No HTTP and no SQL text here.

pub mod address;
pub mod agent_operation;
pub mod artifact;
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
pub mod namespace;
pub mod network;
pub mod node;
pub mod operation;
pub mod rule;
pub mod trust;
pub mod upload;
pub mod version;
