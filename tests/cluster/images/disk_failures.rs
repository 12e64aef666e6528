//! Full disks and damaged files.

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;

use muster_testing::skipped;
use reqwest::Method;
use serde_json::json;

use super::{Client, Content, MIB, blob_file, sha512, text};
use crate::{setup, wait_for};

const KEY: &str = "the first key";

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_rejects_uploads_without_data_loss() {
    let unshare = ["unshare", "--mount", "--propagation=private"];
    let can_unshare = Command::new(unshare[0]).args(&unshare[1..]).arg("true").output();
    if !can_unshare.is_ok_and(|output| output.status.success()) {
        return skipped("root, with the right to mount");
    }
    let directory = tempfile::tempdir().unwrap();
    let small = directory.path().join("small");
    std::fs::create_dir(&small).unwrap();
    // The file system is mounted in the daemon's mount namespace and disappears with it.
    let script = format!("mount -t tmpfs -o size=64m none '{}' && exec \"$@\"", small.display());
    let wrapper = [&unshare[..], &["sh", "-c", &script, "sh"]].concat();
    let daemon = setup(directory.path())
        .arguments(&[])
        .wrapped(&wrapper)
        .set("NODE_NAME", "here")
        .set("SYSTEM_KEY", KEY)
        .set("STORAGE_PATH", small.to_str().unwrap())
        .set("BLOB_DELETION_DELAY", "1")
        .set("CLEANER_DELAY", "1")
        .start();
    let client = Client::new(&daemon, KEY).await;
    let (kept, large) = (Content::new(1, 8 * MIB), Content::new(2, 45 * MIB));
    let filling = client.upload("filling", "other", &Content::new(3, 22 * MIB).bytes()).await;
    let kept_blob = text(&client.upload("kept", "other", &kept.bytes()).await, "blob_uuid");

    let upload = text(&client.post("/upload", json!({})).await, "uuid");
    let path = format!("/upload/{upload}");
    // In chunks, as clients do.
    let mut size = 0;
    let rejection = loop {
        assert!(size < large.size, "the disk is larger than expected");
        let (status, body) =
            client.send(&upload, size, large.part(size, (size + 2 * MIB).min(large.size))).await;
        if status != 200 {
            break (status, body);
        }
        size = body.as_u64().unwrap();
    };
    let full = (507, json!("the node does not have enough disk space"));
    assert!(size >= 20 * MIB, "only {size} bytes were stored");
    assert_eq!((rejection.0, &rejection.1["error"]), (full.0, &full.1), "{}", rejection.1);
    assert_eq!(client.get(&path).await["size"], size);
    // In one request, which is rejected while it is still being sent.
    let (status, body) = client.send(&upload, size, large.part(size, large.size)).await;
    assert_eq!((status, &body["error"]), (full.0, &full.1), "{body}");
    assert_eq!(client.get(&path).await["size"], size, "the size of the upload changed");
    assert_eq!(sha512(&client.data(&kept_blob).await), kept.checksum(), "other blobs cannot be read");
    assert_eq!(daemon.call("", Method::GET, "/readyz", None).await.0, 200);

    client.call(Method::DELETE, &format!("/artifacts/{}", text(&filling, "uuid")), None).await;
    wait_for("free space", async || {
        let (status, body) = client.send(&upload, size, large.part(size, (size + MIB).min(large.size))).await;
        assert!(status == 200 || status == 507, "{status} {body}");
        (status == 200).then(|| size = body.as_u64().unwrap())
    })
    .await;
    let (status, body) = client.send(&upload, size, large.part(size, large.size)).await;
    assert_eq!((status, body), (200, json!(large.size)));
    let body = json!({"upload_uuid": upload, "artifact_type": "other"});
    let blob = text(&client.post("/artifacts/upload/large", body).await, "blob_uuid");
    assert_eq!(client.checksum(&blob).await, large.checksum());
    assert_eq!(client.checksum(&kept_blob).await, kept.checksum());
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
}

/// Flips one bit of a file.
fn damage(file: &Path, at: u64) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_blobs_are_detected_and_never_served() {
    if !nix::unistd::geteuid().is_root() {
        return skipped("root, to write to read-only files");
    }
    const MESSAGE: &str = "a copy of the blob is damaged";
    let directory = tempfile::tempdir().unwrap();
    let setup = setup(directory.path()).arguments(&[]).set("NODE_NAME", "here").set("SYSTEM_KEY", KEY);
    let daemon = setup.start();
    let client = Client::new(&daemon, KEY).await;
    let contents = [1, 2, 3].map(|number| Content::new(number, 3 * MIB + 1000).bytes());
    let mut blobs = Vec::new();
    for (number, content) in contents.iter().enumerate() {
        let made = client.upload(&format!("blob-{number}"), "other", content).await;
        blobs.push(text(&made, "blob_uuid"));
    }
    let file = |blob: &str| blob_file(&directory.path().join("data"), blob);

    // A read ends before the damage, and later reads fail.
    damage(&file(&blobs[0]), 2 * MIB + 7);
    if let Some((status, bytes, complete)) = client.try_data(&blobs[0]).await {
        assert!(status == 200 && !complete, "{status}, {} bytes", bytes.len());
        assert!(contents[0].starts_with(&bytes), "a wrong byte was served");
        assert!(bytes.len() as u64 <= 2 * MIB);
    }
    let (status, bytes, _) = client.try_data(&blobs[0]).await.unwrap();
    assert_eq!(status, 404, "{}", String::from_utf8_lossy(&bytes));
    wait_for("the event", async || {
        client.has_event(&format!("/blobs/{}", blobs[0]), MESSAGE).await.then_some(())
    })
    .await;
    assert_eq!(client.get(&format!("/blobs/{}", blobs[0])).await["locations"], json!([]));
    assert_eq!(client.data(&blobs[1]).await, contents[1], "other blobs cannot be read");
    assert!(daemon.stop().success());

    // Damage to a blob that is not read.
    damage(&file(&blobs[1]), 5);
    let daemon = setup.set("CHECKSUM_VERIFICATION_FREQUENCY", "1").start();
    wait_for("the damage to be detected", async || {
        client.has_event(&format!("/blobs/{}", blobs[1]), MESSAGE).await.then_some(())
    })
    .await;
    assert_eq!(client.try_data(&blobs[1]).await.unwrap().0, 404);
    assert_eq!(client.data(&blobs[2]).await, contents[2]);
    // A repaired file is served again.
    damage(&file(&blobs[1]), 5);
    wait_for("the repaired blob", async || {
        let (status, bytes, complete) = client.try_data(&blobs[1]).await?;
        assert!(status == 404 || contents[1].starts_with(&bytes));
        (status == 200 && complete && bytes == contents[1]).then_some(())
    })
    .await;
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
}
