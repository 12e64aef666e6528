//! The store: SQL statements, and nothing else. Every statement runs on both engines, SQLite and MariaDB. See
//! docs/decisions/0001.
//!
//! Business rules live in `control/src/objects/`. Every modification runs in [`transaction!`], the only place that
//! retries: on MariaDB (and on Galera in particular) any statement or commit may fail with a conflict, so the body of
//! a transaction must have no effects except through its [`Tx`].

pub mod addresses;
pub mod agent_operations;
pub mod artifacts;
pub mod attributes;
pub mod backup;
pub mod blob_locations;
pub mod blob_metadata;
pub mod blob_namespaces;
pub mod blobs;
mod change;
pub mod changes;
pub mod claims;
pub mod cluster_values;
pub mod copy;
pub mod dns_entries;
mod error;
pub mod event_streams;
pub mod events;
pub mod exchanges;
pub mod explanations;
pub mod idempotency_keys;
pub mod instance_migrations;
pub mod instance_replicas;
pub mod instances;
pub mod interfaces;
pub mod issuers;
pub mod keys;
pub mod leases;
mod mariadb;
pub mod membership;
pub mod metadata;
mod migrate;
pub mod namespaces;
pub mod networks;
pub mod node_ledgers;
pub mod node_networks;
pub mod nodes;
pub mod operations;
mod precondition;
pub mod quotas;
pub mod references;
mod row;
pub mod rules;
pub mod schema;
pub mod seed;
mod sqlite;
pub mod state_counts;
mod store;
pub mod store_metrics;
#[cfg(test)]
mod testing;
pub mod tickets;
mod time;
mod transaction;
pub mod trusts;
mod union;
pub mod uploads;
mod value;
pub mod webhook_deliveries;
pub mod webhooks;

use aws_lc_rs::digest;

/// The maximum number of objects that a search by name returns. Those that could not be created come last.
pub const MAX_NAMESAKES: usize = 11;
/// The order and limit of a search by name.
pub(crate) const FAILED_LAST: &str = "CASE state WHEN 'error' THEN 1 ELSE 0 END, uuid LIMIT 11";

pub use change::{
    beside_change, current_lease, dry_run, is_dry_run, require_precondition, run_change, run_keyed_change,
    run_or_check,
};
pub use error::{StoreError, TxError};
pub use precondition::{ObjectRow, Precondition};
pub(crate) use row::columns;
pub use row::{Columns, FromRow, Read, Row, Select};
pub use store::{DatabaseFacts, Snapshot, Store, Unfenced};
pub use time::database_time;
pub use transaction::{Retry, Tx};
pub(crate) use union::{Union, UnionRows};
pub use value::{FromValue, Json, Value};
pub(crate) use value::{placeholders, to_json};

/// Returns the SHA-256 hash of a text that may be too long for a key, in hexadecimal.
pub fn sha256(text: &str) -> String {
    hex::encode(digest::digest(&digest::SHA256, text.as_bytes()))
}
