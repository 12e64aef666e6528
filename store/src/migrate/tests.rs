mod rolling;

use super::{MIGRATIONS, TABLES, statements};
use crate::*;

#[test]
fn copies_all_tables_of_the_migrations() {
    let created: Vec<&str> = MIGRATIONS
        .iter()
        .flat_map(|migration| statements(migration.text))
        .filter_map(|s| s.strip_prefix("CREATE TABLE IF NOT EXISTS "))
        .filter_map(|s| s.split_whitespace().next())
        .collect();
    assert_eq!(created, TABLES);
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_can_migrate_a_new_database_concurrently() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move { Store::open(&url).await })
        })
        .collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
}

/// Runs the last migrations again on data of the release before them.
async fn assigns_existing_blob_metadata(url: &str) {
    let store = Store::open(url).await.unwrap();
    let statements = [
        "DELETE FROM migrations WHERE number >= 8",
        "INSERT INTO metadata (object_type, object_id, name, value) VALUES ('blob', 'one', 'k', '1')",
        "INSERT INTO metadata (object_type, object_id, name, value) VALUES ('blob', 'both', 'k', '2')",
        "INSERT INTO metadata (object_type, object_id, name, value) VALUES ('blob', 'none', 'k', '3')",
        "INSERT INTO metadata (object_type, object_id, name, value) VALUES ('artifact', 'a', 'k', '4')",
        "INSERT INTO artifacts (uuid, name, namespace, artifact_type, source_url, shared, max_versions, newest, state, \
         length, created, updated, version) VALUES ('a', 'a', 'alpha', 'image', 'u', 0, 3, 1, 'created', 7, 1, 1, 1)",
        "INSERT INTO artifacts (uuid, name, namespace, artifact_type, source_url, shared, max_versions, newest, state, \
         created, updated, version) VALUES ('b', 'b', 'beta', 'image', 'u', 0, 3, 1, 'created', 1, 1, 1)",
    ];
    let references = [("r1", "a", "one"), ("r2", "a", "one"), ("r3", "a", "both"), ("r4", "b", "both")];
    transaction!(store, |tx| {
        for sql in statements {
            tx.execute(sql, &[]).await?;
        }
        for (id, artifact, blob) in references {
            let sql = "INSERT INTO object_references (uuid, source_type, source_id, relationship, target_type, target_id, \
                       created, last_active) VALUES (?, 'artifact', ?, 'version', 'blob', ?, 5, 5)";
            tx.execute(sql, params![id, artifact, blob]).await?;
        }
        Ok(())
    })
    .unwrap();
    store.close().await;
    let store = Store::open(url).await.unwrap();
    let sql = "SELECT blob_uuid, namespace, value FROM blob_metadata ORDER BY value";
    let rows: Vec<(String, String, String)> = (&store).fetch(sql, &[]).await.unwrap();
    let rows: Vec<(&str, &str, &str)> =
        rows.iter().map(|(blob, name, value)| (&**blob, &**name, &**value)).collect();
    assert_eq!(rows, [("one", "alpha", "1"), ("both", "system", "2"), ("none", "system", "3")]);
    let rows: Vec<String> = (&store).fetch("SELECT object_type FROM metadata", &[]).await.unwrap();
    assert_eq!(rows, ["artifact"], "the copied rows are removed");
    let sql = "SELECT blob_uuid, namespace FROM blob_namespaces ORDER BY blob_uuid, namespace";
    let rows: Vec<(String, String)> = (&store).fetch(sql, &[]).await.unwrap();
    let rows: Vec<(&str, &str)> = rows.iter().map(|(blob, name)| (&**blob, &**name)).collect();
    assert_eq!(rows, [("both", "alpha"), ("both", "beta"), ("one", "alpha")]);
    let fetched: Vec<String> =
        (&store).fetch("SELECT uuid FROM artifacts WHERE fetched = 1", &[]).await.unwrap();
    assert_eq!(fetched, ["a"], "only a fetch sets validators");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn assigns_existing_blob_metadata_to_its_only_user_or_to_system() {
    let folder = tempfile::tempdir().unwrap();
    assigns_existing_blob_metadata(&format!("sqlite:{}", folder.path().join("muster.db").display())).await;
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    assigns_existing_blob_metadata(&url).await;
}
