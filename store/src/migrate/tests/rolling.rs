//! Daemons of different schema versions on one database.

use muster_types::Error;
use muster_types::node::{NodeIdentity, NodeState};
use muster_types::object::NameOrId;

use super::*;
use crate::membership::Member;
use crate::migrate::{LAST_UNCONDITIONAL, Migration, additive, breaking};
use crate::nodes::tests::{identity, join};
use crate::schema::{Schema, apply_held, held_migrations};

/// The schema version of this program.
fn current() -> i64 {
    MIGRATIONS[MIGRATIONS.len() - 1].number
}

/// Returns the migrations of a later release: a new table and a new column, then the removal of a table.
fn later_release(count: usize) -> &'static [Migration] {
    let added = "CREATE TABLE IF NOT EXISTS shades (name VARCHAR(8) NOT NULL PRIMARY KEY);
                 ALTER TABLE nodes ADD COLUMN colour VARCHAR(8) NOT NULL DEFAULT 'red';";
    let later = [additive(current() + 1, added), breaking(current() + 2, "DROP TABLE IF EXISTS shades;")];
    MIGRATIONS.iter().chain(&later[..count]).copied().collect::<Vec<_>>().leak()
}

/// Runs a test with the URL of an empty database of each engine.
async fn on_both_engines(test: impl AsyncFn(&str)) {
    let folder = tempfile::tempdir().unwrap();
    test(&format!("sqlite:{}", folder.path().join("muster.db").display())).await;
    match muster_testing::database_url() {
        Some(url) => test(&url).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}

async fn stop(store: &Store, node: &NodeIdentity) {
    for state in [NodeState::Stopping, NodeState::Stopped] {
        transaction!(store, |tx| {
            let row = nodes::get(&mut *tx, &NameOrId::Id(node.id)).await?.unwrap();
            assert!(nodes::set_state(tx, &row, state).await?);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn additive_migrations_only_add() {
    for migration in MIGRATIONS.iter().filter(|migration| migration.is_additive) {
        for statement in statements(migration.text) {
            let adds_column = statement.starts_with("ALTER TABLE ")
                && statement.contains(" ADD COLUMN ")
                && (statement.contains(" DEFAULT ") || !statement.contains(" NOT NULL"));
            let adds = ["CREATE TABLE IF NOT EXISTS ", "CREATE INDEX IF NOT EXISTS "];
            assert!(
                adds_column || adds.iter().any(|start| statement.starts_with(start)),
                "migration {} is not additive: {statement}",
                migration.number
            );
        }
    }
}

#[test]
fn numbers_of_migrations_increase_and_nodes_record_their_schema_before_one_is_held_back() {
    assert!(MIGRATIONS.windows(2).all(|pair| pair[0].number < pair[1].number));
    let records = |migration: &&Migration| migration.text.contains("ADD COLUMN schema_version");
    let recorded_since = MIGRATIONS.iter().find(records).unwrap().number;
    let held =
        MIGRATIONS.iter().filter(|migration| !migration.is_additive && migration.number > LAST_UNCONDITIONAL);
    for migration in held {
        assert!(migration.number > recorded_since, "migration {}", migration.number);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn older_daemon_works_and_restarts_while_a_newer_one_migrates() {
    on_both_engines(async |url| {
        let old = Store::open(url).await.unwrap();
        let first = identity("a");
        let member = join(&old, &first).await;
        let new = Store::open_with(url, later_release(1)).await.unwrap();
        let expected = Schema { version: current() + 1, minimum: LAST_UNCONDITIONAL };
        assert_eq!(schema::get(&new).await.unwrap(), expected);
        assert!(held_migrations(&new, expected).is_empty());

        // Both daemons write the same tables.
        let second = identity("b");
        join(&new, &second).await;
        let check_in = nodes::check_in(&old, &[member], 0.0).await.unwrap();
        assert_eq!(check_in.states[&first.id], NodeState::Created);
        transaction!(old, |tx| { Ok(nodes::insert(tx, &identity("c")).await?) }).unwrap();
        assert_eq!(nodes::list(&new).await.unwrap().len(), 3);
        let colours: Vec<String> = (&new).fetch("SELECT colour FROM nodes", &[]).await.unwrap();
        assert_eq!(colours, ["red"; 3]);
        let versions: Vec<_> =
            nodes::releases(&new).await.unwrap().into_iter().map(|node| node.schema_version).collect();
        assert_eq!(versions, [Some(current()), Some(current() + 1), None], "the last one never started");

        old.close().await;
        let old = Store::open(url).await.unwrap();
        assert_eq!(schema::unsupported(&old).await.unwrap(), None);
        // A release that does not know additive migrations compares this number with its own.
        let known: i64 = (&old).fetch_one("SELECT MAX(number) FROM migrations", &[]).await.unwrap();
        assert_eq!(known, LAST_UNCONDITIONAL);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn breaking_migration_waits_until_no_older_daemon_runs() {
    on_both_engines(async |url| {
        let number = current() + 2;
        let old = Store::open(url).await.unwrap();
        let (first, second) = (identity("a"), identity("b"));
        join(&old, &first).await;
        let stopped = join(&old, &second).await;
        stop(&old, &second).await;
        let has_table = async |store: &Store| store.query("SELECT name FROM shades", &[]).await.is_ok();

        let new = Store::open_with(url, later_release(2)).await.unwrap();
        let found = schema::get(&new).await.unwrap();
        assert_eq!(found, Schema { version: current() + 1, minimum: LAST_UNCONDITIONAL });
        assert_eq!(held_migrations(&new, found), [number]);
        assert!(new.has_held_migrations() && has_table(&new).await);
        assert_eq!(nodes::with_older_schema(&new, number).await.unwrap(), ["a"], "b is stopped");
        apply_held(&new).await.unwrap();
        assert!(has_table(&new).await, "a still runs");
        // Announced by a daemon that was killed before it checked the nodes.
        transaction!(new, |tx| {
            let sql = "INSERT INTO migrations (number, statements_done) VALUES (?, 0)";
            Ok(tx.execute(sql, params![number]).await?)
        })
        .unwrap();
        apply_held(&new).await.unwrap();
        assert_eq!(schema::get(&new).await.unwrap(), found);

        // The daemon of a is upgraded.
        let upgraded = Store::open_with(url, later_release(2)).await.unwrap();
        let epoch = transaction!(upgraded, |tx| {
            Ok(nodes::begin_epoch(tx, first.id, "lock file", upgraded.schema_version()).await?)
        });
        upgraded.membership.join(Member { node: first.id, epoch: epoch.unwrap() });
        apply_held(&new).await.unwrap();
        assert!(!new.has_held_migrations() && !has_table(&new).await);
        assert_eq!(schema::get(&new).await.unwrap(), Schema { version: number, minimum: number });

        // The older daemon of b neither starts nor continues, if it was only partitioned.
        let error = Store::open(url).await.unwrap_err().to_string();
        for part in
            [format!("version {number} or newer"), format!("has {}", current()), "Install the release".into()]
        {
            assert!(error.contains(&part), "{error}");
        }
        assert!(schema::unsupported(&old).await.unwrap().is_some());
        let check_in = nodes::check_in(&old, &[stopped], 0.0).await.unwrap();
        assert_eq!(check_in.lost, [stopped]);
        let write = transaction!(old, |tx| { Ok(cluster_values::set(tx, "a", "b").await?) });
        assert!(matches!(write.unwrap_err(), Error::StaleEpoch(_)));
        let write = transaction!(upgraded, |tx| { Ok(cluster_values::set(tx, "a", "b").await?) });
        write.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn schema_version_of_a_node_is_unknown_after_an_older_daemon_starts_there() {
    on_both_engines(async |url| {
        let store = Store::open(url).await.unwrap();
        let node = identity("a");
        join(&store, &node).await;
        let version = async || nodes::releases(&store).await.unwrap()[0].schema_version;
        assert_eq!(version().await, Some(current()));
        // The statement of a release that does not record its schema.
        transaction!(store.unfenced(), |tx| {
            Ok(tx.execute("UPDATE nodes SET epoch = epoch + 1 WHERE uuid = ?", params![node.id]).await?)
        })
        .unwrap();
        assert_eq!(version().await, None);
        assert_eq!(nodes::with_older_schema(&store, 1).await.unwrap(), ["a"]);
    })
    .await;
}
