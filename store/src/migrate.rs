//! Brings the tables up to date, one node at a time.
//!
//! MariaDB cannot roll back a change of tables, so progress is recorded after each statement and every
//! statement may run twice.

use std::time::Duration;

use super::{Store, StoreError, params, transaction};
use crate::leases;

const MIGRATIONS: &[(i64, &str)] = &[
    (1, include_str!("../../migrations/0001_base.sql")),
    (2, include_str!("../../migrations/0002_networks.sql")),
    (3, include_str!("../../migrations/0003_images.sql")),
    (4, include_str!("../../migrations/0004_instances.sql")),
    (5, include_str!("../../migrations/0005_agent_operations.sql")),
    (6, include_str!("../../migrations/0006_federation.sql")),
    (7, include_str!("../../migrations/0007_claims.sql")),
];

/// How long another node waits for one that died while it migrated, in seconds.
const LEASE: f64 = 120.0;

/// What must exist before a lease can be taken.
const GROUND: &str = "
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

pub(super) async fn run(store: &Store) -> Result<(), StoreError> {
    for statement in statements(GROUND) {
        run_statement(store, statement).await?;
    }
    let newest = MIGRATIONS.iter().map(|(number, _)| *number).max().unwrap_or(0);
    let found = store.query_one("SELECT COALESCE(MAX(number), 0) FROM migrations", &[]).await?;
    let found: i64 = found.map_or(Ok(0), |row| row.get(0))?;
    if found > newest {
        return Err(StoreError::Broken(format!(
            "the database is at migration {found} and this muster knows only {newest}: it needs a newer muster"
        )));
    }
    let holder = leases::Holder::new("migration");
    while !leases::take(store, "migration", &holder, LEASE).await.map_err(plain)? {
        tracing::info!("waiting for another node to migrate the database");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let outcome = apply(store, &holder).await;
    leases::release(store, "migration", &holder).await.map_err(plain)?;
    outcome
}

async fn apply(store: &Store, holder: &leases::Holder) -> Result<(), StoreError> {
    for (number, text) in MIGRATIONS {
        let row = store
            .query_one("SELECT statements_done FROM migrations WHERE number = ?", params![*number])
            .await?;
        let done: i64 = row.map_or(Ok(0), |row| row.get(0))?;
        for (at, statement) in (0i64..).zip(statements(text)).skip(usize::try_from(done).unwrap_or(0)) {
            if !leases::take(store, "migration", holder, LEASE).await.map_err(plain)? {
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
            .map_err(plain)?;
        }
    }
    Ok(())
}

async fn run_statement(store: &Store, statement: &str) -> Result<(), StoreError> {
    let mut tx = store.begin().await?;
    match tx.define(statement).await {
        // A column that is there was added by a start that was killed before it could write that down.
        Err(StoreError::Broken(why)) if why.to_lowercase().contains("duplicate column") => {}
        outcome => outcome?,
    }
    match tx.finish(Ok(()), &mut super::Retry::default()).await {
        Some(Ok(())) => Ok(()),
        Some(Err(error)) => Err(plain(error)),
        None => Err(StoreError::Unavailable("another node changed the tables".into())),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "used as the argument of map_err")]
fn plain(error: muster_types::Error) -> StoreError {
    StoreError::Unavailable(error.to_string())
}

/// The statements of a migration: comments dropped, split at semicolons.
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

/// The tables that hold a cluster, in the order in which they may be filled.
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
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_of_the_migrations_is_copied_to_another_database() {
        let created: Vec<&str> = MIGRATIONS
            .iter()
            .flat_map(|(_, text)| statements(text))
            .filter_map(|s| s.strip_prefix("CREATE TABLE IF NOT EXISTS "))
            .filter_map(|s| s.split_whitespace().next())
            .collect();
        assert_eq!(created, TABLES);
    }
}
