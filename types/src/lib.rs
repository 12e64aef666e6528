//! The types that every part of Muster shares: ids, states, records, settings, errors and the interface
//! between the control plane and a node. This crate does no I/O.

pub mod address;
pub mod agent_operation;
pub mod artifact;
pub mod blob;
pub mod capacity;
pub mod claim;
pub mod cluster_upgrade;
pub mod error;
pub mod event;
pub mod event_message;
pub mod explanation;
pub mod fair_share;
pub mod guest;
pub mod host_check;
pub mod idempotency;
pub mod ids;
pub mod instance;
pub mod interface;
pub mod invitation;
pub mod issuer;
pub mod key;
pub mod lock_file;
pub mod migration;
pub mod namespace;
pub mod network;
pub mod node;
pub mod object;
pub mod operation;
pub mod quota;
pub mod rebalance;
pub mod replica;
pub mod rule;
pub mod scheduling;
pub mod server_trust;
pub mod session;
pub mod settings;
pub mod shared_storage;
pub mod spec;
pub mod storage;
pub mod terminal;
pub mod time;
pub mod upload;
pub mod vm;
pub mod webhook;

pub use error::{Error, Result};
