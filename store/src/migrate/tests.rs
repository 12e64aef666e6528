use super::{MIGRATIONS, TABLES, statements};
use crate::*;

#[test]
fn copies_all_tables_of_the_migrations() {
    let created: Vec<&str> = MIGRATIONS
        .iter()
        .flat_map(|(_, text)| statements(text))
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

#[tokio::test(flavor = "multi_thread")]
async fn rejects_database_of_a_newer_release() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("muster.db").display());
    let store = Store::open(&url).await.unwrap();
    transaction!(store, |tx| {
        Ok(tx.execute("INSERT INTO migrations (number, statements_done) VALUES (999, 1)", &[]).await?)
    })
    .unwrap();
    assert!(Store::open(&url).await.unwrap_err().to_string().contains("newer muster"));
}
