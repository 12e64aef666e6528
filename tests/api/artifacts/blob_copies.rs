//! Unused and damaged blobs.

use axum::response::Response;
use muster_store::{blob_locations, nodes, transaction};
use muster_types::blob::CopyState;
use muster_types::ids::{BlobId, NodeId};
use muster_types::node::{NodeApi as _, NodeIdentity, NodeReport};

use super::*;
use crate::remote::{Received, remote_daemon};

#[tokio::test(flavor = "multi_thread")]
async fn deletes_unused_blob_and_file_after_delay() {
    let settings = [("BLOB_DELETION_DELAY", "0"), ("CLEANER_DELAY", "0"), ("BLOB_REPLICATION_FACTOR", "1")];
    let (cluster, token) = cluster(&settings).await;
    let artifact = upload(&cluster, &token, "a", b"used twice").await;
    let blob = text(&artifact, "blob_uuid").to_owned();
    let body = json!({"blob_uuid": blob});
    assert_eq!(post(&cluster, &token, "/artifacts/upload/b", body).await.status, 200);
    cluster.settle().await;
    let path = format!("/blobs/{blob}");
    let sweep = async || {
        reconcile::artifact_watch::delete_unused(&cluster.app).await.unwrap();
        reconcile::storage::run_once(&cluster.app).await.unwrap();
    };
    delete(&cluster, &token, "/artifacts/a").await;
    sweep().await;
    assert_eq!(get(&cluster, &token, &path).await.body["state"], "created", "b uses it");
    delete(&cluster, &token, "/artifacts/b").await;
    sweep().await;
    assert_eq!(get(&cluster, &token, &path).await.body["state"], "deleted");
    assert_eq!(data(&cluster, &token, &blob, "").await.status, 404);
    assert!(!cluster.has_file(&blob), "the file is deleted");
    let messages = cluster.messages(&ObjectRef::new(ObjectType::Blob, &blob)).await;
    assert!(messages.contains(&"state is now deleted".to_owned()), "{messages:?}");
    reconcile::cleaner::run(&cluster.app).await.unwrap();
    assert_eq!(get(&cluster, &token, &path).await.status, 404);
    // The same content can be uploaded again.
    let again = upload(&cluster, &token, "c", b"used twice").await;
    assert_ne!(text(&again, "blob_uuid"), blob);
}

#[tokio::test(flavor = "multi_thread")]
async fn keeps_unused_blob_until_delay_expires() {
    let (cluster, token) = cluster(&[("BLOB_DELETION_DELAY", "3600")]).await;
    let artifact = upload(&cluster, &token, "a", b"x").await;
    delete(&cluster, &token, "/artifacts/a").await;
    reconcile::artifact_watch::delete_unused(&cluster.app).await.unwrap();
    let blob = text(&artifact, "blob_uuid");
    assert_eq!(get(&cluster, &token, &format!("/blobs/{blob}")).await.body["state"], "created");
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_and_replaces_damaged_replica_without_serving_it() {
    let settings = [("CHECKSUM_VERIFICATION_FREQUENCY", "1"), ("BLOB_REPLICATION_FACTOR", "2")];
    let (cluster, token) = cluster(&settings).await;
    let content: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    let artifact = upload(&cluster, &token, "a", &content).await;
    let blob = text(&artifact, "blob_uuid").to_owned();
    let record = async || get(&cluster, &token, &format!("/blobs/{blob}")).await.body;
    wait_for("a second replica", async || {
        reconcile::storage::run_once(&cluster.app).await.unwrap();
        (record().await["locations"] == json!(["sim-1", "sim-2"])).then_some(())
    })
    .await;
    // A flipped bit in the first replica: readers never receive a corrupted byte.
    cluster.corrupt_blob(1, &blob, 2_500_000);
    let read = cluster.download_until_error(&token, &blob).await;
    assert!(content.starts_with(&read) && read.len() <= 2_500_000, "{} bytes", read.len());
    assert_eq!(record().await["locations"], json!(["sim-2"]));
    let object = ObjectRef::new(ObjectType::Blob, &blob);
    let messages = cluster.messages(&object).await;
    assert!(messages.contains(&"a copy of the blob is damaged".to_owned()), "{messages:?}");
    assert_eq!(cluster.download_until_error(&token, &blob).await, content, "read from the other replica");
    wait_for("the replica to be replaced", async || {
        reconcile::storage::run_once(&cluster.app).await.unwrap();
        (record().await["locations"] == json!(["sim-1", "sim-2"])).then_some(())
    })
    .await;
    assert_eq!(cluster.download_until_error(&token, &blob).await, content);
    // Scheduled verification detects damage without reads.
    cluster.corrupt_blob(2, &blob, 7);
    wait_for("the damage to be found", async || {
        reconcile::storage::run_once(&cluster.app).await.unwrap();
        let messages = cluster.messages(&object).await;
        (messages.iter().filter(|m| *m == "a copy of the blob is damaged").count() == 2).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keeps_last_replica_even_if_damaged() {
    let settings = [("CHECKSUM_VERIFICATION_FREQUENCY", "1"), ("BLOB_REPLICATION_FACTOR", "1")];
    let (cluster, token) = cluster(&settings).await;
    let artifact = upload(&cluster, &token, "a", b"the only one").await;
    let blob = text(&artifact, "blob_uuid").to_owned();
    cluster.corrupt_blob(1, &blob, 0);
    assert!(cluster.download_until_error(&token, &blob).await.is_empty());
    let missing = data(&cluster, &token, &blob, "").await;
    assert_eq!((missing.status.as_u16(), text(&missing.body, "error")), (404, "blob missing"));
    reconcile::storage::run_once(&cluster.app).await.unwrap();
    assert!(cluster.has_file(&blob));
    // Uploading the same content repairs the replica.
    let again = upload(&cluster, &token, "b", b"the only one").await;
    assert_eq!(text(&again, "blob_uuid"), blob);
    assert_eq!(data(&cluster, &token, &blob, "").await.text, "the only one");
    // A replica whose damage was transient is used again.
    cluster.corrupt_blob(1, &blob, 0);
    assert!(cluster.download_until_error(&token, &blob).await.is_empty());
    cluster.corrupt_blob(1, &blob, 0);
    wait_for("the replica to be usable again", async || {
        reconcile::storage::run_once(&cluster.app).await.unwrap();
        (data(&cluster, &token, &blob, "").await.text == "the only one").then_some(())
    })
    .await;
}

/// Adds a node of another daemon that has a copy of a blob.
async fn add_holder(
    cluster: &Cluster,
    name: &str,
    blob: BlobId,
    respond: impl Fn() -> Body + Send + Sync + 'static,
) -> Received {
    let identity = NodeIdentity { id: NodeId::new(), name: name.into(), ..cluster.node.identity().clone() };
    let (address, received) = remote_daemon(cluster, identity.id, move |_| Response::new(respond())).await;
    let report = NodeReport { node_address: Some(address), ..NodeReport::default() };
    transaction!(cluster.app.store, |tx| {
        nodes::insert(tx, &identity).await?;
        nodes::set_report(tx, identity.id, &report).await?;
        Ok(blob_locations::set(tx, blob, identity.id, CopyState::Complete).await?)
    })
    .unwrap();
    received
}

#[tokio::test(flavor = "multi_thread")]
async fn continues_reading_from_another_node_when_one_fails() {
    let (cluster, token) = cluster(&[("BLOB_REPLICATION_FACTOR", "1")]).await;
    let artifact = upload(&cluster, &token, "a", b"0123456789").await;
    let id: BlobId = text(&artifact, "blob_uuid").parse().unwrap();
    cluster.settle().await;
    let local = cluster.node.identity().id;
    // It sends less than was requested.
    let failing = add_holder(&cluster, "remote-1", id, || Body::from("0123")).await;
    let intact = add_holder(&cluster, "remote-2", id, || Body::from("456789")).await;
    transaction!(cluster.app.store, |tx| { Ok(blob_locations::remove(tx, id, local).await?) }).unwrap();

    let response = data(&cluster, &token, &id.to_string(), "").await;
    assert_eq!((response.status.as_u16(), response.text.as_str()), (200, "0123456789"));
    let query = |received: &Received| received.lock()[0].uri.query().unwrap().to_owned();
    assert_eq!((query(&failing), query(&intact)), ("offset=0&limit=10".into(), "offset=4&limit=6".into()));
}
