//! Schema migrations, run by one daemon at a time while others, also older ones, use the database. See docs/decisions/0072.
//!
//! MariaDB cannot roll back DDL statements, so progress is recorded after each statement and every statement may run
//! twice.

#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::error::StoreError;
use crate::leases::LeaseOwner;
use crate::row::Read;
use crate::store::Store;
use crate::{leases, nodes, params, schema, transaction};

/// A step of the schema.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Migration {
    pub(crate) number: i64,
    pub(crate) text: &'static str,
    /// Whether daemons that do not know it can use the database afterwards.
    pub(crate) is_additive: bool,
}

impl Migration {
    /// Returns the table that records the migration. Daemons do not start if `migrations` has a higher number than they
    /// know, including those that do not know the other table.
    fn table(&self) -> &'static str {
        if self.is_additive { "additive_migrations" } else { "migrations" }
    }
}

/// A migration after which older daemons can use the database: it adds tables, indexes, or columns with a default.
const fn additive(number: i64, text: &'static str) -> Migration {
    Migration { number, text, is_additive: true }
}

/// A migration after which older daemons cannot use the database. It is held back while one may be running.
const fn breaking(number: i64, text: &'static str) -> Migration {
    Migration { number, text, is_additive: false }
}

pub(super) const MIGRATIONS: &[Migration] = &[
    breaking(1, include_str!("../../migrations/0001_base.sql")),
    breaking(2, include_str!("../../migrations/0002_networks.sql")),
    breaking(3, include_str!("../../migrations/0003_images.sql")),
    breaking(4, include_str!("../../migrations/0004_instances.sql")),
    breaking(5, include_str!("../../migrations/0005_agent_operations.sql")),
    breaking(6, include_str!("../../migrations/0006_federation.sql")),
    breaking(7, include_str!("../../migrations/0007_claims.sql")),
    breaking(8, include_str!("../../migrations/0008_tenant_isolation.sql")),
    breaking(9, include_str!("../../migrations/0009_quotas.sql")),
    breaking(10, include_str!("../../migrations/0010_deleted_artifacts.sql")),
    breaking(11, include_str!("../../migrations/0011_blob_metadata.sql")),
    breaking(12, include_str!("../../migrations/0012_membership.sql")),
    breaking(13, include_str!("../../migrations/0013_instance_generations.sql")),
    breaking(14, include_str!("../../migrations/0014_tickets.sql")),
    additive(15, include_str!("../../migrations/0015_instance_migrations.sql")),
    additive(16, include_str!("../../migrations/0016_node_cordons.sql")),
    additive(17, include_str!("../../migrations/0017_daemon_schemas.sql")),
    additive(18, include_str!("../../migrations/0018_idempotency_keys.sql")),
    additive(19, include_str!("../../migrations/0019_instance_replicas.sql")),
    additive(20, include_str!("../../migrations/0020_webhooks.sql")),
    additive(21, include_str!("../../migrations/0021_replica_lag.sql")),
    additive(22, include_str!("../../migrations/0022_operation_traces.sql")),
];

/// The last migration that is applied unconditionally. Nodes record their schema version since a later one.
const LAST_UNCONDITIONAL: i64 = 14;

/// The name of the lease of a running migration.
pub(crate) const MIGRATION_LEASE: &str = "migration";
/// How long other nodes wait for a node that stopped during a migration, in seconds.
const LEASE_SECONDS: f64 = 120.0;

/// The tables that the migration itself needs.
const BOOTSTRAP_SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS leases (
    name VARCHAR(64) NOT NULL PRIMARY KEY,
    holder VARCHAR(64) NOT NULL,
    node VARCHAR(255) NOT NULL,
    pid BIGINT NOT NULL,
    expires DOUBLE NOT NULL,
    version BIGINT NOT NULL
);
CREATE TABLE IF NOT EXISTS migrations (
    number BIGINT NOT NULL PRIMARY KEY,
    statements_done BIGINT NOT NULL
);
CREATE TABLE IF NOT EXISTS additive_migrations (
    number BIGINT NOT NULL PRIMARY KEY,
    statements_done BIGINT NOT NULL
);";

/// Applies the missing migrations when a daemon starts. Returns an error if this program cannot use the database.
pub(super) async fn run(store: &Store) -> Result<(), StoreError> {
    create_bootstrap_tables(store).await?;
    if let Some(reason) = schema::unsupported(store).await? {
        return Err(StoreError::Internal(reason));
    }
    apply_missing(store).await
}

/// Creates the tables that the migration itself needs.
pub(super) async fn create_bootstrap_tables(store: &Store) -> Result<(), StoreError> {
    for statement in statements(BOOTSTRAP_SCHEMA) {
        run_statement(store, statement).await?;
    }
    Ok(())
}

/// Applies the missing migrations, except those that are held back.
pub(super) async fn apply_missing(store: &Store) -> Result<(), StoreError> {
    let owner = LeaseOwner::new(MIGRATION_LEASE);
    let mut is_waiting = false;
    while !leases::acquire(store, MIGRATION_LEASE, &owner, LEASE_SECONDS).await.map_err(unavailable)? {
        if !std::mem::replace(&mut is_waiting, true) {
            tracing::info!("waiting for another node to migrate the database");
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let outcome = apply(store, &owner).await;
    leases::release(store, MIGRATION_LEASE, &owner).await.map_err(unavailable)?;
    outcome
}

async fn apply(mut store: &Store, owner: &LeaseOwner) -> Result<(), StoreError> {
    let mut has_held = false;
    for migration in store.migrations {
        let sql = format!("SELECT statements_done FROM {} WHERE number = ?", migration.table());
        let done: usize = store.fetch_optional(&sql, params![migration.number]).await?.unwrap_or(0);
        if done == 0 && !may_begin(store, migration).await? {
            has_held = true;
            continue;
        }
        for (at, statement) in (0i64..).zip(statements(migration.text)).skip(done) {
            if !leases::acquire(store, MIGRATION_LEASE, owner, LEASE_SECONDS).await.map_err(unavailable)? {
                return Err(StoreError::Unavailable("lost the migration lease".into()));
            }
            run_statement(store, statement).await?;
            record(store, migration, at + 1).await?;
        }
    }
    store.set_held_migrations(has_held);
    Ok(())
}

/// Records the number of completed statements of a migration.
async fn record(store: &Store, migration: &Migration, statements_done: i64) -> Result<(), StoreError> {
    let sql = format!("REPLACE INTO {} (number, statements_done) VALUES (?, ?)", migration.table());
    transaction!(store, |tx| {
        tx.execute(&sql, params![migration.number, statements_done]).await?;
        Ok(())
    })
    .map_err(unavailable)
}

/// Returns whether a migration may begin: not while a daemon may be running that cannot use the database afterwards.
async fn may_begin(store: &Store, migration: &Migration) -> Result<bool, StoreError> {
    if migration.is_additive || migration.number <= LAST_UNCONDITIONAL {
        return Ok(true);
    }
    let older = nodes::with_older_schema(store, migration.number).await?;
    if older.is_empty() {
        // From here on no older daemon starts; one that joined before is found, or fenced if it is down.
        record(store, migration, 0).await?;
        if exclude_older(store, migration).await? {
            return Ok(true);
        }
    }
    transaction!(store, |tx| {
        tx.execute("DELETE FROM migrations WHERE number = ?", params![migration.number]).await?;
        Ok(())
    })
    .map_err(unavailable)?;
    if !store.has_held_migrations() {
        tracing::warn!(
            migration = migration.number,
            nodes = older.join(", "),
            "holding a migration back until these nodes are upgraded"
        );
    }
    Ok(false)
}

/// Fences the nodes with an older schema that are down. Returns `false` if one may be up.
async fn exclude_older(store: &Store, migration: &Migration) -> Result<bool, StoreError> {
    transaction!(store, |tx| {
        let is_unused = nodes::with_older_schema(&mut *tx, migration.number).await?.is_empty();
        if is_unused {
            nodes::fence_older_schema(tx, migration.number).await?;
        }
        Ok(is_unused)
    })
    .map_err(unavailable)
}

async fn run_statement(store: &Store, statement: &str) -> Result<(), StoreError> {
    let mut tx = store.begin().await?;
    match tx.execute_ddl(statement).await {
        // A daemon added the column and was killed before it recorded its progress.
        Err(StoreError::DuplicateColumn(_)) => {}
        outcome => outcome?,
    }
    match tx.finish(Ok(()), &mut crate::transaction::Retry::default()).await {
        Some(Ok(())) => Ok(()),
        Some(Err(error)) => Err(unavailable(error)),
        None => Err(StoreError::Unavailable("another node changed the schema".into())),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "used as the argument of map_err")]
fn unavailable(error: muster_types::Error) -> StoreError {
    StoreError::Unavailable(error.to_string())
}

/// Returns the statements of a migration: the text between semicolons, without leading comments.
fn statements(text: &str) -> impl Iterator<Item = &str> {
    text.split(';').map(strip_comments).filter(|statement| !statement.is_empty())
}

fn strip_comments(statement: &str) -> &str {
    let mut rest = statement.trim();
    while rest.starts_with("--") {
        rest = rest.split_once('\n').map_or("", |(_, after)| after.trim_start());
    }
    rest
}

/// All tables except the bootstrap schema, in the order in which they are copied.
pub(super) const TABLES: &[&str] = &[
    "cluster_values",
    "namespaces",
    "namespace_keys",
    "trusts",
    "metadata",
    "object_references",
    "nodes",
    "operations",
    "events",
    "event_links",
    "networks",
    "addresses",
    "address_halos",
    "address_blocks",
    "interfaces",
    "hardware_addresses",
    "dns_entries",
    "node_networks",
    "blobs",
    "blob_contents",
    "blob_locations",
    "artifacts",
    "uploads",
    "instances",
    "node_claims",
    "instance_ports",
    "agent_operations",
    "issuers",
    "rules",
    "exchange_attempts",
    "exchanged_tokens",
    "namespace_claims",
    "blob_metadata",
    "blob_namespaces",
    "namespace_quotas",
    "tickets",
    "instance_migrations",
    "idempotency_keys",
    "instance_replicas",
    "webhooks",
    "webhook_deliveries",
];
