//! Schema migrations, run by one node at a time.
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
use crate::{leases, params, transaction};

const MIGRATIONS: &[(i64, &str)] = &[
    (1, include_str!("../../migrations/0001_base.sql")),
    (2, include_str!("../../migrations/0002_networks.sql")),
    (3, include_str!("../../migrations/0003_images.sql")),
    (4, include_str!("../../migrations/0004_instances.sql")),
    (5, include_str!("../../migrations/0005_agent_operations.sql")),
    (6, include_str!("../../migrations/0006_federation.sql")),
    (7, include_str!("../../migrations/0007_claims.sql")),
    (8, include_str!("../../migrations/0008_tenant_isolation.sql")),
    (9, include_str!("../../migrations/0009_quotas.sql")),
    (10, include_str!("../../migrations/0010_deleted_artifacts.sql")),
    (11, include_str!("../../migrations/0011_blob_metadata.sql")),
    (12, include_str!("../../migrations/0012_membership.sql")),
    (13, include_str!("../../migrations/0013_instance_generations.sql")),
    (14, include_str!("../../migrations/0014_tickets.sql")),
];

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
);";

pub(super) async fn run(mut store: &Store) -> Result<(), StoreError> {
    for statement in statements(BOOTSTRAP_SCHEMA) {
        run_statement(store, statement).await?;
    }
    let (newest, _) = MIGRATIONS[MIGRATIONS.len() - 1];
    let found: i64 = store.fetch_one("SELECT COALESCE(MAX(number), 0) FROM migrations", &[]).await?;
    if found > newest {
        return Err(StoreError::Internal(format!(
            "the database is at migration {found} and this muster knows only {newest}: it needs a newer muster"
        )));
    }
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
    for (number, text) in MIGRATIONS {
        let sql = "SELECT statements_done FROM migrations WHERE number = ?";
        let done: usize = store.fetch_optional(sql, params![*number]).await?.unwrap_or(0);
        for (at, statement) in (0i64..).zip(statements(text)).skip(done) {
            if !leases::acquire(store, MIGRATION_LEASE, owner, LEASE_SECONDS).await.map_err(unavailable)? {
                return Err(StoreError::Unavailable("lost the migration lease".into()));
            }
            run_statement(store, statement).await?;
            transaction!(store, |tx| {
                tx.execute(
                    "REPLACE INTO migrations (number, statements_done) VALUES (?, ?)",
                    params![*number, at + 1],
                )
                .await?;
                Ok(())
            })
            .map_err(unavailable)?;
        }
    }
    Ok(())
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
];
