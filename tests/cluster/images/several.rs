//! Images in a cluster of several daemons: handed on, copied, and there when one of them is not.

use std::time::Duration;

use muster_testing::web_server::{ReceivedRequest, Reply, WebServer};
use muster_testing::{Daemon, DaemonSetup};
use reqwest::Method;
use serde_json::{Value, json};

use super::{Caller, Content, MIB, blob_file, text};
use crate::wait_for;

const KEY: &str = "the first key";
const NAMES: [&str; 3] = ["n1", "n2", "n3"];

fn member(folder: &std::path::Path, name: &str, url: &str) -> DaemonSetup {
    crate::several::member(folder, name, url)
        .set("BLOB_DELETION_DELAY", "1")
        .set("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.0/8")
}

fn locations(record: &Value) -> Vec<&str> {
    record["locations"].as_array().unwrap().iter().filter_map(Value::as_str).collect()
}

/// Waits until a blob is on two nodes; those.
async fn copied(caller: &Caller, blob: &str) -> Vec<String> {
    wait_for("a second copy", async || {
        let record = caller.get(&format!("/blobs/{blob}")).await;
        let found = locations(&record);
        assert!(found.len() <= 2, "{found:?}");
        (found.len() == 2).then(|| found.iter().map(|name| (*name).to_owned()).collect())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_received_an_image_may_go_for_good() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let folder = tempfile::tempdir().unwrap();
    let [a, b, c] = NAMES.map(|name| member(folder.path(), name, &url).start());
    let at_a = Caller::new(&a, KEY).await;
    let (at_b, at_c) = (at_a.at(&b), at_a.at(&c));

    // Begun at one daemon, sent to the others, made an artifact through the third.
    let content = Content::new(1, 7 * MIB + 77);
    let begun = at_a.post("/upload", json!({})).await;
    assert_eq!(begun["node"], "n1");
    let upload = text(&begun, "uuid");
    let mut have = 0;
    for (to, caller) in [(2 * MIB + 1, &at_b), (3 * MIB, &at_c), (4 * MIB, &at_a), (content.size, &at_b)] {
        let (status, size) = caller.send(&upload, have, content.part(have, to)).await;
        assert_eq!((status, size), (200, json!(to)));
        have = to;
        assert_eq!(at_c.get(&format!("/upload/{upload}")).await["size"], have);
    }
    let (status, _) = at_b.call(Method::POST, &format!("/upload/{upload}/truncate/{MIB}"), None).await;
    assert_eq!(status, 200);
    let (status, body) = at_c.send(&upload, 0, vec![1]).await;
    assert_eq!(status, 409, "{body}");
    let (status, size) = at_c.send(&upload, MIB, content.part(MIB, content.size)).await;
    assert_eq!((status, size), (200, json!(content.size)));
    let body = json!({"upload_uuid": upload, "artifact_type": "other"});
    let made = at_c.post("/artifacts/upload/picture", body).await;
    let blob = text(&made, "blob_uuid");
    for caller in [&at_a, &at_b, &at_c] {
        assert_eq!(caller.sum(&blob).await, content.sum());
    }

    let holders = copied(&at_a, &blob).await;
    assert_eq!(holders[0], "n1", "where it was received");
    let file = blob_file(&folder.path().join(&holders[1]).join("data"), &blob);
    assert_eq!(std::fs::metadata(file).unwrap().len(), content.size);
    a.kill();
    std::fs::remove_dir_all(folder.path().join("n1/data")).unwrap();
    for caller in [&at_b, &at_c] {
        wait_for("the content from the copy", async || {
            let (status, bytes, whole) = caller.try_data(&blob).await.unwrap();
            assert!(status != 200 || content.bytes().starts_with(&bytes), "a wrong byte was served");
            (status == 200 && whole && bytes.len() as u64 == content.size).then_some(())
        })
        .await;
    }
    // Uploads that it kept are gone with it, and that is said.
    let lost = text(&at_b.post("/upload", json!({})).await, "uuid");
    assert_eq!(at_c.send(&lost, 0, vec![1; 1000]).await, (200, json!(1000)));
    b.kill();
    let (status, body) = at_c.send(&lost, 1000, vec![1; 1000]).await;
    assert_eq!(status, 503, "{body}");
    assert!(text(&body, "error").contains("please retry"), "{body}");
    // It is only away: with it come back the upload and the copy.
    let _b = member(folder.path(), "n2", &url).start();
    let size = wait_for("the upload", async || {
        let (status, body) = at_c.call(Method::GET, &format!("/upload/{lost}"), None).await;
        (status == 200).then(|| body["size"].clone())
    })
    .await;
    assert_eq!(size, 1000);
    assert!(!c.log().contains("panicked"), "{}", c.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_on_a_node_that_was_removed_is_made_again() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let folder = tempfile::tempdir().unwrap();
    let mut members: Vec<(&str, Daemon)> =
        NAMES.iter().map(|name| (*name, member(folder.path(), name, &url).start())).collect();
    let caller = Caller::new(&members[0].1, KEY).await;
    let content = Content::new(1, 2 * MIB + 3);
    let blob = text(&caller.upload("picture", "other", &content.bytes()).await, "blob_uuid");
    let holders = copied(&caller, &blob).await;
    let at = members.iter().position(|(name, _)| *name == holders[1]).unwrap();
    members.remove(at).1.kill();
    let dead = &holders[1];
    wait_for("the dead node to be missed", async || {
        (caller.get(&format!("/nodes/{dead}")).await["state"] == "missing").then_some(())
    })
    .await;
    let (status, body) = caller.call(Method::DELETE, &format!("/nodes/{dead}"), None).await;
    assert_eq!(status, 200, "{body}");
    let again = wait_for("a copy elsewhere", async || {
        let record = caller.get(&format!("/blobs/{blob}")).await;
        let found = locations(&record);
        (found.len() == 2 && !found.contains(&dead.as_str())).then(|| found.join(" "))
    })
    .await;
    for (name, daemon) in &members {
        assert!(again.contains(name), "{again}");
        assert_eq!(caller.at(daemon).sum(&blob).await, content.sum());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_whose_daemon_is_killed_is_finished_by_another() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let folder = tempfile::tempdir().unwrap();
    let mut members: Vec<(&str, Daemon)> =
        NAMES.iter().map(|name| (*name, member(folder.path(), name, &url).start())).collect();
    let caller = Caller::new(&members[0].1, KEY).await;
    let content = Content::new(1, 4 * MIB + 44).bytes();
    let served = content.clone();
    // The first one that asks would have to wait for longer than anyone does.
    let web = WebServer::new(move |asked: &ReceivedRequest, number| {
        let reply = match asked.range_start() {
            Some(start) => Reply::part(&served, start),
            None => Reply::ok(&served),
        };
        let reply = reply.with("ETag", "\"one\"");
        if number == 0 { reply.slow(Duration::from_secs(600)) } else { reply }
    })
    .await;
    let made = caller.post("/artifacts", json!({"url": web.url("/picture.img")})).await;
    let path = format!("/artifacts/{}", text(&made, "uuid"));
    let fetching = wait_for("a fetch", async || {
        members.iter().position(|(_, daemon)| {
            let drafts = std::fs::read_dir(daemon.data.join("drafts")).into_iter().flatten().flatten();
            drafts.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with("fetch-"))
        })
    })
    .await;
    members.remove(fetching).1.kill();
    let caller = caller.at(&members[0].1);
    let record = wait_for("another to finish it", async || {
        let record = caller.get(&path).await;
        assert_ne!(record["state"], "error", "{record}");
        (record["state"] == "created").then_some(record)
    })
    .await;
    assert!(caller.data(&text(&record, "blob_uuid")).await == content);
    assert_eq!(record["index"], 1);
}
