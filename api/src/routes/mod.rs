//! Handlers, one file per noun. They contain neither business rules nor SQL.

pub(crate) mod admin;
pub(crate) mod agent_operations;
pub(crate) mod agent_program;
pub(crate) mod artifacts;
pub(crate) mod blobs;
pub(crate) mod claims;
pub(crate) mod docs;
mod events;
pub(crate) mod exchanges;
pub(crate) mod health;
pub(crate) mod instance_console;
pub(crate) mod instance_power;
pub(crate) mod instances;
pub(crate) mod interfaces;
pub(crate) mod issuers;
pub(crate) mod keys;
pub(crate) mod labels;
pub(crate) mod login;
mod metadata;
pub(crate) mod namespaces;
pub(crate) mod networks;
pub(crate) mod nodes;
pub(crate) mod operations;
pub(crate) mod root;
pub(crate) mod rules;
pub(crate) mod trusts;
pub(crate) mod uploads;
