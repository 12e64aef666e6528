use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use muster_types::instance::PowerState;
use muster_types::node::NodeState;
use muster_types::object::NameOrId;
use muster_types::operation::OperationState;
use muster_types::time::now;

use super::*;
use crate::nodes::tests::{identity, join};
use crate::testing::{create_blob, created_instance, key, new_blob, on_both_engines, operation};
use crate::*;

/// Copies all rows of a snapshot to a new SQLite database, through their encoding.
async fn restored(store: &Store, folder: &tempfile::TempDir) -> RestoredStore {
    let url = format!("sqlite:{}", folder.path().join("restored.db").display());
    let mut snapshot = BackupSnapshot::begin(store).await.unwrap();
    let mut restoration = Restoration::begin(&url, snapshot.schema_version).await.unwrap();
    for table in snapshot.tables() {
        restoration.begin_table(table).await.unwrap();
        let mut after = None;
        loop {
            let rows = snapshot.page(table, after.as_ref()).await.unwrap();
            let Some(last) = rows.last() else { break };
            after = Some(last.clone());
            for row in rows {
                let bytes = encode(&row);
                restoration.add(decode(&bytes).unwrap(), bytes.len()).await.unwrap();
            }
        }
    }
    snapshot.end().await;
    restoration.migrate().await.unwrap()
}

on_both_engines! {
    async fn snapshot_is_consistent_while_others_write(store: Arc<Store>) {
        let is_stopped = Arc::new(AtomicBool::new(false));
        let writers: Vec<_> = (0..3)
            .map(|writer| {
                let (store, is_stopped) = (Arc::clone(&store), Arc::clone(&is_stopped));
                tokio::spawn(async move {
                    for number in 0.. {
                        if is_stopped.load(Ordering::Relaxed) {
                            return;
                        }
                        let name = format!("ns-{writer}-{number}");
                        // Always both or none.
                        transaction!(store, |tx| {
                            namespaces::insert(tx, &name).await?;
                            keys::put(tx, &name, "k", &key(7, None)).await?;
                            Ok(())
                        })
                        .unwrap();
                    }
                })
            })
            .collect();
        let mut previous = 0;
        for _ in 0..5 {
            let mut snapshot = BackupSnapshot::begin(&store).await.unwrap();
            let mut counts = [0, 0];
            for (count, table) in counts.iter_mut().zip(["namespaces", "namespace_keys"]) {
                let mut after: Option<Row> = None;
                loop {
                    let rows = snapshot.page(table, after.as_ref()).await.unwrap();
                    let Some(last) = rows.last() else { break };
                    after = Some(last.clone());
                    *count += rows.len();
                }
                // The next table is read when there are more rows.
                let seen = store.query("SELECT COUNT(*) FROM namespaces", &[]).await.unwrap();
                while store.query("SELECT COUNT(*) FROM namespaces", &[]).await.unwrap() == seen {
                    tokio::task::yield_now().await;
                }
            }
            assert_eq!(counts[0], counts[1]);
            assert!(counts[0] > previous || previous == 0);
            previous = counts[0];
            snapshot.end().await;
        }
        is_stopped.store(true, Ordering::Relaxed);
        for writer in writers {
            writer.await.unwrap();
        }
    }

    async fn nothing_of_the_former_cluster_continues(store: Arc<Store>) {
        let folder = tempfile::tempdir().unwrap();
        let member = join(&store, &identity("host")).await;
        transaction!(store, |tx| { Ok(nodes::insert(tx, &identity("host-lost")).await?) }).unwrap();
        let instance = created_instance(&store, member.node).await;
        let blob = new_blob('a');
        create_blob(&store, &blob, member.node).await;
        let handle = transaction!(store, |tx| {
            namespaces::insert(tx, "ci").await?;
            namespaces::insert(tx, "alpha").await?;
            keys::put(tx, "ci", "k", &key(7, Some(1e10 + 0.1))).await?;
            Ok(operations::insert(tx, &operation("ci", vec![])).await?)
        })
        .unwrap();
        let before = instances::get(&*store, instance).await.unwrap().unwrap();
        let nonce = "SELECT nonce FROM namespace_keys";
        let old_nonce = store.query(nonce, &[]).await.unwrap();

        let new = restored(&store, &folder).await;
        assert_eq!(blobs(&new.store).await.unwrap().len(), 1);
        let started = now();
        let lost = restart(&new).await.unwrap();
        assert_eq!(lost, ["host-lost-2", "host-lost-lost"]);
        let row = nodes::get(&new.store, &NameOrId::Id(member.node)).await.unwrap().unwrap();
        assert_eq!((row.state, row.epoch), (NodeState::Error, member.epoch + 1));
        assert!(row.report.fencing_lease.is_none());
        let after = instances::get(&new.store, instance).await.unwrap().unwrap();
        #[expect(clippy::cast_precision_loss, reason = "a time")]
        let generation = after.generation as f64;
        assert!(after.generation > before.generation && generation >= started.floor());
        assert_eq!((after.node, after.power_state), (Some(member.node), PowerState::Unknown));
        let ended = operations::get(&new.store, handle.op_uuid).await.unwrap().unwrap();
        assert_eq!(ended.state, OperationState::Abort);
        assert!(ended.error_report.unwrap().message.contains("restored"));
        assert!(blob_locations::of_blob(&new.store, blob.id).await.unwrap().is_empty());
        assert_ne!(new.store.query(nonce, &[]).await.unwrap(), old_nonce);
        assert_eq!(super::super::check(&new.store).await.unwrap(), Vec::<String>::new());

        // No daemon starts before the end.
        let url = format!("sqlite:{}", folder.path().join("restored.db").display());
        let refused = Store::open(&url).await.unwrap_err().to_string();
        assert!(refused.contains("muster restore"), "{refused}");
        // An interrupted restoration begins again, and an existing cluster is not touched.
        drop(new);
        let new = restored(&store, &folder).await;
        restart(&new).await.unwrap();
        new.finish().await.unwrap();
        Store::open(&url).await.unwrap().close().await;
        let refused = Restoration::begin(&url, store.schema_version()).await.unwrap_err().to_string();
        assert!(refused.contains("is not empty"), "{refused}");
        Store::open(&url).await.unwrap();
        let refused = Restoration::begin(&url, store.schema_version() + 1).await.unwrap_err().to_string();
        assert!(refused.contains("use the release that created the backup"), "{refused}");
    }
}

#[test]
fn rows_of_all_types_survive_their_encoding() {
    let row = Row(vec![
        Value::Null,
        Value::Int(i64::MIN),
        Value::Real(0.1 + 0.2),
        Value::Real(-0.0),
        Value::Text("\u{1f600}\0".into()),
        Value::Bytes(vec![0, 255]),
        Value::Text(String::new()),
    ]);
    let bytes = encode(&row);
    assert_eq!(decode(&bytes), Some(row));
    for length in 1..bytes.len() {
        // A shorter row is valid only between two values.
        if let Some(shorter) = decode(&bytes[..length]) {
            assert!(shorter.0.len() < 7);
        }
    }
    for wrong in [&[9, 0, 0, 0, 0][..], &[1, 0, 0, 0, 1, 7], &[3, 0, 0, 0, 1, 255], &[3, 255, 255, 255, 255]]
    {
        assert_eq!(decode(wrong), None);
    }
}
