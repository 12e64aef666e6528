//! Unused and damaged blobs.

use axum::response::Response;
use muster_control::exposition::ExpositionFormat;
use muster_store::{blob_locations, nodes, transaction};
use muster_types::blob::CopyState;
use muster_types::ids::{BlobId, NodeId};
use muster_types::node::{NodeApi as _, NodeDegradation, NodeIdentity, NodeReport};

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
    let metrics =
        objects::metrics::cluster_metrics(&cluster.app, ExpositionFormat::Prometheus).await.unwrap();
    assert!(metrics.contains("\ncluster_blob_copies{state=\"damaged\"} 1\n"), "{metrics}");
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

/// A node of another daemon that has a copy of a blob.
struct Holder {
    id: NodeId,
    report: NodeReport,
    received: Received,
}

impl Holder {
    async fn add(
        cluster: &Cluster,
        name: &str,
        blob: BlobId,
        respond: impl Fn() -> Body + Send + Sync + 'static,
    ) -> Self {
        let identity =
            NodeIdentity { id: NodeId::new(), name: name.into(), ..cluster.node.identity().clone() };
        let id = identity.id;
        let (address, received) = remote_daemon(cluster, id, move |_| Response::new(respond())).await;
        let report = NodeReport { node_address: Some(address), ..NodeReport::default() };
        transaction!(cluster.app.store, |tx| {
            nodes::insert(tx, &identity).await?;
            nodes::set_report(tx, id, &report).await?;
            Ok(blob_locations::set(tx, blob, id, CopyState::Complete).await?)
        })
        .unwrap();
        Self { id, report, received }
    }

    async fn set_degraded(&self, cluster: &Cluster, is_degraded: bool) {
        let degradation = NodeDegradation { reason: "a test".into(), since: 0.0 };
        let report = NodeReport { degraded: is_degraded.then_some(degradation), ..self.report.clone() };
        let written =
            transaction!(cluster.app.store, |tx| { Ok(nodes::set_report(tx, self.id, &report).await?) });
        written.unwrap();
    }

    /// Returns the queries of the requests for a blob.
    fn queries(&self) -> Vec<String> {
        let requests = self.received.lock();
        requests.iter().filter_map(|parts| parts.uri.query().map(str::to_owned)).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn continues_reading_from_another_node_when_one_fails() {
    let (cluster, token) = cluster(&[("BLOB_REPLICATION_FACTOR", "1")]).await;
    let artifact = upload(&cluster, &token, "a", b"0123456789").await;
    let id: BlobId = text(&artifact, "blob_uuid").parse().unwrap();
    cluster.settle().await;
    let local = cluster.node.identity().id;
    let intact = Holder::add(&cluster, "remote-1", id, || Body::from("456789")).await;
    // It sends less than was requested.
    let failing = Holder::add(&cluster, "remote-2", id, || Body::from("0123")).await;
    // A degraded node is the last choice.
    intact.set_degraded(&cluster, true).await;
    transaction!(cluster.app.store, |tx| { Ok(blob_locations::remove(tx, id, local).await?) }).unwrap();

    let response = data(&cluster, &token, &id.to_string(), "").await;
    assert_eq!((response.status.as_u16(), response.text.as_str()), (200, "0123456789"));
    assert_eq!(failing.queries(), ["offset=0&limit=10"]);
    assert_eq!(intact.queries(), ["offset=4&limit=6"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn surplus_copies_are_removed_while_enough_verified_ones_remain() {
    let (cluster, token) = cluster(&[("BLOB_REPLICATION_FACTOR", "2")]).await;
    let artifact = upload(&cluster, &token, "a", b"content").await;
    let blob = text(&artifact, "blob_uuid").to_owned();
    let id: BlobId = blob.parse().unwrap();
    let locations = async || {
        reconcile::storage::run_once(&cluster.app).await.unwrap();
        get(&cluster, &token, &format!("/blobs/{blob}")).await.body["locations"].clone()
    };
    wait_for("a second copy", async || (locations().await == json!(["sim-1", "sim-2"])).then_some(())).await;
    let remote = Holder::add(&cluster, "remote", id, Body::empty).await;
    let all = json!(["remote", "sim-1", "sim-2"]);
    assert_eq!(locations().await, all, "the local copies are new");
    let set_verified = async |seconds_ago: f64, condition: &str| {
        let verified = muster_types::time::now() - seconds_ago;
        let sql = format!("UPDATE blob_locations SET verified = {verified} WHERE {condition}");
        transaction!(cluster.app.store, |tx| { Ok(tx.execute(&sql, &[]).await?) }).unwrap();
    };
    let of_remote = format!("node_uuid = '{}'", remote.id);
    set_verified(4000.0, "1 = 1").await;
    remote.set_degraded(&cluster, true).await;
    assert_eq!(locations().await, all, "a degraded node does not count");
    remote.set_degraded(&cluster, false).await;
    set_verified(1e6, &of_remote).await;
    assert_eq!(locations().await, all, "a copy that was not verified lately does not count");
    set_verified(0.0, &of_remote).await;
    // Each in turn: the first one is removed, and then there is no surplus.
    assert_eq!(locations().await, json!(["remote", "sim-2"]));
    assert_eq!(locations().await, json!(["remote", "sim-2"]));
    assert!(cluster.has_file(&blob));
    let messages = cluster.messages(&ObjectRef::new(ObjectType::Blob, &blob)).await;
    let removals = messages.iter().filter(|message| *message == "surplus copy removed from a node");
    assert_eq!(removals.count(), 1, "{messages:?}");
    assert_eq!(cluster.download_until_error(&token, &blob).await, b"content");
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_that_instances_use_are_not_surplus() {
    let (cluster, token) = cluster(&[("BLOB_REPLICATION_FACTOR", "1")]).await;
    let artifact = upload(&cluster, &token, "a", b"content").await;
    let blob = text(&artifact, "blob_uuid").to_owned();
    let id: BlobId = blob.parse().unwrap();
    let disk = json!([{"size": 1, "base": format!("sf://blob/{blob}")}]);
    let web = crate::instances::create(&cluster, &token, "web", &json!({"disk": disk})).await;
    let node = text(&web, "node").to_owned();
    for simulated in &cluster.app.nodes {
        // Only the instance protects the copy.
        simulated.storage().remove_conversion(id).await.unwrap();
    }
    let _remote = Holder::add(&cluster, "remote", id, Body::empty).await;
    let locations = async || {
        let sql = "UPDATE blob_locations SET verified = verified - 4000";
        transaction!(cluster.app.store, |tx| { Ok(tx.execute(sql, &[]).await?) }).unwrap();
        reconcile::storage::run_once(&cluster.app).await.unwrap();
        let record = get(&cluster, &token, &format!("/blobs/{blob}")).await.body;
        serde_json::from_value::<Vec<String>>(record["locations"].clone()).unwrap()
    };
    let used = locations().await;
    assert!(used.contains(&"remote".to_owned()) && used.contains(&node), "{used:?}");
    delete(&cluster, &token, &format!("/instances/{}", text(&web, "uuid"))).await;
    cluster.settle().await;
    assert_eq!(locations().await, ["remote"]);
}
