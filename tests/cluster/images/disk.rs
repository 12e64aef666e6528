//! Disks that are full, and disks that forget.

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;

use muster_testing::skipped;
use reqwest::Method;
use serde_json::json;

use super::{Caller, Content, MIB, blob_file, sha512, text};
use crate::{setup, wait_for};

const KEY: &str = "the first key";

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_told_and_loses_nothing() {
    let unshare = ["unshare", "--mount", "--propagation=private"];
    let can = Command::new(unshare[0]).args(&unshare[1..]).arg("true").output();
    if !can.is_ok_and(|output| output.status.success()) {
        return skipped("root, with the right to mount");
    }
    let folder = tempfile::tempdir().unwrap();
    let small = folder.path().join("small");
    std::fs::create_dir(&small).unwrap();
    // The disk is the daemon's alone, and goes with it.
    let script = format!("mount -t tmpfs -o size=64m none '{}' && exec \"$@\"", small.display());
    let wrapper = [&unshare[..], &["sh", "-c", &script, "sh"]].concat();
    let daemon = setup(folder.path())
        .arguments(&[])
        .wrapped(&wrapper)
        .set("NODE_NAME", "here")
        .set("SYSTEM_KEY", KEY)
        .set("STORAGE_PATH", small.to_str().unwrap())
        .set("BLOB_DELETION_DELAY", "1")
        .set("CLEANER_DELAY", "1")
        .start();
    let caller = Caller::new(&daemon, KEY).await;
    let (kept, large) = (Content::new(1, 8 * MIB), Content::new(2, 45 * MIB));
    let filling = caller.upload("filling", "other", &Content::new(3, 22 * MIB).bytes()).await;
    let kept_blob = text(&caller.upload("kept", "other", &kept.bytes()).await, "blob_uuid");

    let upload = text(&caller.post("/upload", json!({})).await, "uuid");
    let path = format!("/upload/{upload}");
    // In pieces, as clients do.
    let mut have = 0;
    let refusal = loop {
        assert!(have < large.size, "the disk is larger than it should be");
        let (status, body) =
            caller.send(&upload, have, large.part(have, (have + 2 * MIB).min(large.size))).await;
        if status != 200 {
            break (status, body);
        }
        have = body.as_u64().unwrap();
    };
    let full = (507, json!("the node does not have enough disk space"));
    assert!(have >= 20 * MIB, "{have} bytes had room");
    assert_eq!((refusal.0, &refusal.1["error"]), (full.0, &full.1), "{}", refusal.1);
    assert_eq!(caller.get(&path).await["size"], have);
    // All at once, which is refused while it is still being sent.
    let (status, body) = caller.send(&upload, have, large.part(have, large.size)).await;
    assert_eq!((status, &body["error"]), (full.0, &full.1), "{body}");
    assert_eq!(caller.get(&path).await["size"], have, "the upload is as long as before");
    assert_eq!(sha512(&caller.data(&kept_blob).await), kept.sum(), "others still read");
    assert_eq!(daemon.call("", Method::GET, "/readyz", None).await.0, 200);

    caller.call(Method::DELETE, &format!("/artifacts/{}", text(&filling, "uuid")), None).await;
    wait_for("room", async || {
        let (status, body) = caller.send(&upload, have, large.part(have, (have + MIB).min(large.size))).await;
        assert!(status == 200 || status == 507, "{status} {body}");
        (status == 200).then(|| have = body.as_u64().unwrap())
    })
    .await;
    let (status, body) = caller.send(&upload, have, large.part(have, large.size)).await;
    assert_eq!((status, body), (200, json!(large.size)));
    let body = json!({"upload_uuid": upload, "artifact_type": "other"});
    let blob = text(&caller.post("/artifacts/upload/large", body).await, "blob_uuid");
    assert_eq!(caller.sum(&blob).await, large.sum());
    assert_eq!(caller.sum(&kept_blob).await, kept.sum());
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
}

/// Turns one byte into another.
fn damage(file: &Path, at: u64) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_blob_is_never_served_and_is_found_without_being_read() {
    if !nix::unistd::geteuid().is_root() {
        return skipped("root, who may write to what is read-only");
    }
    const MESSAGE: &str = "a copy of the blob is damaged";
    let folder = tempfile::tempdir().unwrap();
    let setup = setup(folder.path()).arguments(&[]).set("NODE_NAME", "here").set("SYSTEM_KEY", KEY);
    let daemon = setup.start();
    let caller = Caller::new(&daemon, KEY).await;
    let contents = [1, 2, 3].map(|number| Content::new(number, 3 * MIB + 1000).bytes());
    let mut blobs = Vec::new();
    for (number, content) in contents.iter().enumerate() {
        let made = caller.upload(&format!("blob-{number}"), "other", content).await;
        blobs.push(text(&made, "blob_uuid"));
    }
    let file = |blob: &str| blob_file(&folder.path().join("data"), blob);

    // While it is read, nothing wrong gets out, and from then on nothing at all.
    damage(&file(&blobs[0]), 2 * MIB + 7);
    if let Some((status, bytes, whole)) = caller.try_data(&blobs[0]).await {
        assert!(status == 200 && !whole, "{status}, {} bytes", bytes.len());
        assert!(contents[0].starts_with(&bytes), "a wrong byte was served");
        assert!(bytes.len() as u64 <= 2 * MIB);
    }
    let (status, bytes, _) = caller.try_data(&blobs[0]).await.unwrap();
    assert_eq!(status, 404, "{}", String::from_utf8_lossy(&bytes));
    wait_for("the event", async || {
        caller.has_event(&format!("/blobs/{}", blobs[0]), MESSAGE).await.then_some(())
    })
    .await;
    assert_eq!(caller.get(&format!("/blobs/{}", blobs[0])).await["locations"], json!([]));
    assert_eq!(caller.data(&blobs[1]).await, contents[1], "others still read");
    assert!(daemon.stop().success());

    // Nobody reads this one.
    damage(&file(&blobs[1]), 5);
    let daemon = setup.set("CHECKSUM_VERIFICATION_FREQUENCY", "1").start();
    wait_for("the damage to be found", async || {
        caller.has_event(&format!("/blobs/{}", blobs[1]), MESSAGE).await.then_some(())
    })
    .await;
    assert_eq!(caller.try_data(&blobs[1]).await.unwrap().0, 404);
    assert_eq!(caller.data(&blobs[2]).await, contents[2]);
    // What is as it was is served again.
    damage(&file(&blobs[1]), 5);
    wait_for("the disk's mood to change", async || {
        let (status, bytes, whole) = caller.try_data(&blobs[1]).await?;
        assert!(status == 404 || contents[1].starts_with(&bytes));
        (status == 200 && whole && bytes == contents[1]).then_some(())
    })
    .await;
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
}
