//! Images in a cluster of several daemons: forwarding, replication and the loss of a node.

use std::time::Duration;

use muster_testing::web_server::{ReceivedRequest, Reply, WebServer};
use muster_testing::{Daemon, DaemonSetup};
use reqwest::Method;
use serde_json::{Value, json};

use super::{Client, Content, MIB, blob_file, text};
use crate::wait_for;

const KEY: &str = "the first key";
const NAMES: [&str; 3] = ["n1", "n2", "n3"];

fn member(directory: &std::path::Path, name: &str, url: &str) -> DaemonSetup {
    crate::multi_node::member(directory, name, url)
        .set("BLOB_DELETION_DELAY", "1")
        .set("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.0/8")
}

fn locations(record: &Value) -> Vec<&str> {
    record["locations"].as_array().unwrap().iter().filter_map(Value::as_str).collect()
}

/// Waits until a blob is on two nodes and returns their names.
async fn wait_for_replica(client: &Client, blob: &str) -> Vec<String> {
    wait_for("a second replica", async || {
        let record = client.get(&format!("/blobs/{blob}")).await;
        let found = locations(&record);
        assert!(found.len() <= 2, "{found:?}");
        (found.len() == 2).then(|| found.iter().map(|name| (*name).to_owned()).collect())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn image_survives_loss_of_receiving_node() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let [a, b, c] = NAMES.map(|name| member(directory.path(), name, &url).start());
    let client_a = Client::new(&a, KEY).await;
    let (client_b, client_c) = (client_a.at(&b), client_a.at(&c));

    // An upload is created on one daemon, sent through all, and becomes an artifact on the third.
    let content = Content::new(1, 7 * MIB + 77);
    let created = client_a.post("/upload", json!({})).await;
    assert_eq!(created["node"], "n1");
    let upload = text(&created, "uuid");
    let mut size_sent = 0;
    for (to, client) in
        [(2 * MIB + 1, &client_b), (3 * MIB, &client_c), (4 * MIB, &client_a), (content.size, &client_b)]
    {
        let (status, size) = client.send(&upload, size_sent, content.part(size_sent, to)).await;
        assert_eq!((status, size), (200, json!(to)));
        size_sent = to;
        assert_eq!(client_c.get(&format!("/upload/{upload}")).await["size"], size_sent);
    }
    let (status, _) = client_b.call(Method::POST, &format!("/upload/{upload}/truncate/{MIB}"), None).await;
    assert_eq!(status, 200);
    let (status, body) = client_c.send(&upload, 0, vec![1]).await;
    assert_eq!(status, 409, "{body}");
    let (status, size) = client_c.send(&upload, MIB, content.part(MIB, content.size)).await;
    assert_eq!((status, size), (200, json!(content.size)));
    let body = json!({"upload_uuid": upload, "artifact_type": "other"});
    let created = client_c.post("/artifacts/upload/picture", body).await;
    let blob = text(&created, "blob_uuid");
    for client in [&client_a, &client_b, &client_c] {
        assert_eq!(client.checksum(&blob).await, content.checksum());
    }

    let nodes = wait_for_replica(&client_a, &blob).await;
    assert_eq!(nodes[0], "n1", "the receiving node has no replica");
    let file = blob_file(&directory.path().join(&nodes[1]).join("data"), &blob);
    assert_eq!(std::fs::metadata(file).unwrap().len(), content.size);
    a.kill();
    std::fs::remove_dir_all(directory.path().join("n1/data")).unwrap();
    for client in [&client_b, &client_c] {
        wait_for("the content from the replica", async || {
            let (status, bytes, complete) = client.try_data(&blob).await.unwrap();
            assert!(status != 200 || content.bytes().starts_with(&bytes), "a wrong byte was served");
            (status == 200 && complete && bytes.len() as u64 == content.size).then_some(())
        })
        .await;
    }
    // Uploads on an unreachable node fail with 503.
    let lost = text(&client_b.post("/upload", json!({})).await, "uuid");
    assert_eq!(client_c.send(&lost, 0, vec![1; 1000]).await, (200, json!(1000)));
    b.kill();
    let (status, body) = client_c.send(&lost, 1000, vec![1; 1000]).await;
    assert_eq!(status, 503, "{body}");
    assert!(text(&body, "error").contains("please retry"), "{body}");
    // They are available again once the node is back.
    let _b = member(directory.path(), "n2", &url).start();
    let size = wait_for("the upload", async || {
        let (status, body) = client_c.call(Method::GET, &format!("/upload/{lost}"), None).await;
        (status == 200).then(|| body["size"].clone())
    })
    .await;
    assert_eq!(size, 1000);
    assert!(!c.log().contains("panicked"), "{}", c.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn replicates_blob_again_after_node_removal() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let mut members: Vec<(&str, Daemon)> =
        NAMES.iter().map(|name| (*name, member(directory.path(), name, &url).start())).collect();
    let client = Client::new(&members[0].1, KEY).await;
    let content = Content::new(1, 2 * MIB + 3);
    let blob = text(&client.upload("picture", "other", &content.bytes()).await, "blob_uuid");
    let nodes = wait_for_replica(&client, &blob).await;
    let at = members.iter().position(|(name, _)| *name == nodes[1]).unwrap();
    members.remove(at).1.kill();
    let killed = &nodes[1];
    wait_for("the killed node to be missing", async || {
        (client.get(&format!("/nodes/{killed}")).await["state"] == "missing").then_some(())
    })
    .await;
    let (status, body) =
        client.call(Method::DELETE, &format!("/nodes/{killed}"), Some(json!({"dead": true}))).await;
    assert_eq!(status, 200, "{body}");
    let replicas = wait_for("a replica on another node", async || {
        let record = client.get(&format!("/blobs/{blob}")).await;
        let found = locations(&record);
        (found.len() == 2 && !found.contains(&killed.as_str())).then(|| found.join(" "))
    })
    .await;
    for (name, daemon) in &members {
        assert!(replicas.contains(name), "{replicas}");
        assert_eq!(client.at(daemon).checksum(&blob).await, content.checksum());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_node_finishes_fetch_of_killed_daemon() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let mut members: Vec<(&str, Daemon)> =
        NAMES.iter().map(|name| (*name, member(directory.path(), name, &url).start())).collect();
    let client = Client::new(&members[0].1, KEY).await;
    let content = Content::new(1, 4 * MIB + 44).bytes();
    let served = content.clone();
    // The first request never completes within the test.
    let web = WebServer::new(move |request: &ReceivedRequest, number| {
        let reply = match request.range_start() {
            Some(start) => Reply::part(&served, start),
            None => Reply::ok(&served),
        };
        let reply = reply.with("ETag", "\"one\"");
        if number == 0 { reply.slow(Duration::from_secs(600)) } else { reply }
    })
    .await;
    let created = client.post("/artifacts", json!({"url": web.url("/picture.img")})).await;
    let path = format!("/artifacts/{}", text(&created, "uuid"));
    let fetching = wait_for("a fetch", async || {
        members.iter().position(|(_, daemon)| {
            let drafts = std::fs::read_dir(daemon.data.join("drafts")).into_iter().flatten().flatten();
            drafts.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with("fetch-"))
        })
    })
    .await;
    members.remove(fetching).1.kill();
    let client = client.at(&members[0].1);
    let record = wait_for("another node to finish it", async || {
        let record = client.get(&path).await;
        assert_ne!(record["state"], "error", "{record}");
        (record["state"] == "created").then_some(record)
    })
    .await;
    assert!(client.data(&text(&record, "blob_uuid")).await == content);
    assert_eq!(record["index"], 1);
}
