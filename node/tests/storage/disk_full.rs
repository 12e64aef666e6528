//! Full disks.

use muster_types::Error;
use muster_types::ids::{BlobId, UploadId};
use muster_types::storage::Draft;
use nix::mount::{MsFlags, mount};

use crate::fixture::{MIB, NO_LIMIT, TestNode, bytes, checksums, parts, sh};
use crate::images::compressed;

#[test]
fn full_disk_refuses_writes_and_loses_nothing() {
    if !muster_testing::enter_namespaces("disk_full::full_disk_refuses_writes_and_loses_nothing", &["ip"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    mount(Some("none"), directory.path(), Some("tmpfs"), MsFlags::empty(), Some("size=64m")).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let node = TestNode::at(directory.path());
        let storage = node.storage();
        let (other, large) = (bytes(20 * MIB, 30), bytes(50 * MIB, 31));
        let kept = node.blob(&other).await;
        let draft = node.draft(&large[..5 * MIB]).await;
        let at = 5 * MIB as u64;
        for part in [10_000, MIB, 45 * MIB] {
            let refused = storage.append(draft, Some(at), NO_LIMIT, parts(&large[5 * MIB..], part)).await;
            assert!(matches!(refused, Err(Error::InsufficientCapacity(_))), "{refused:?}");
            assert_eq!(storage.draft_size(draft).await.unwrap(), Some(at));
            // A part of the disk is reserved for other data.
            let free = sh(&format!("df --output=avail -B1 {} | tail -n 1", directory.path().display()));
            assert!(free.trim().parse::<u64>().unwrap() >= 64 * MIB as u64 / 20, "{free}");
        }
        let content = storage.digest(draft).await.unwrap();
        assert_eq!(content.checksums, checksums(&large[..5 * MIB]));
        assert!(node.bytes(kept).await.unwrap() == other);
        // A smaller one fits, and so does the large one once there is space.
        storage.append(draft, Some(at), NO_LIMIT, parts(&large[5 * MIB..9 * MIB], MIB)).await.unwrap();
        storage.remove(kept).await.unwrap();
        storage.append(draft, Some(9 * MIB as u64), NO_LIMIT, parts(&large[9 * MIB..], MIB)).await.unwrap();
        let blob = BlobId::new();
        storage.commit(draft, blob).await.unwrap();
        assert!(node.bytes(blob).await.unwrap() == large);
        // Another process fills the disk.
        let _ = std::process::Command::new("sh")
            .args(["-c", &format!("cat /dev/zero > {}/other", directory.path().display())])
            .output();
        let never = Draft::Upload(UploadId::new());
        let refused = storage.append(never, Some(0), NO_LIMIT, parts(b"x", 1)).await;
        assert!(matches!(refused, Err(Error::InsufficientCapacity(_))), "{refused:?}");
        assert!(node.bytes(blob).await.unwrap() == large);
    });
}

#[test]
fn full_disk_is_not_reported_as_damaged_image() {
    if !muster_testing::enter_namespaces("disk_full::full_disk_is_not_reported_as_damaged_image", &["ip"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    mount(Some("none"), directory.path(), Some("tmpfs"), MsFlags::empty(), Some("size=64m")).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        if TestNode::real(&[]).await.is_none() {
            return;
        }
        let node = TestNode::real_at(directory.path(), &[]);
        let storage = node.storage();
        let raw = bytes(40 * MIB, 32);
        // The output is dense for gzip and mostly sparse for xz.
        for (program, image) in [("gzip", raw.clone()), ("xz", bytes(62 * MIB, 33))] {
            let draft = node.draft(&compressed(program, &image)).await;
            let unpacked = storage.decompress("ci", draft).await;
            assert!(matches!(unpacked, Err(Error::InsufficientCapacity(_))), "{program}: {unpacked:?}");
            let blob = BlobId::new();
            storage.commit(draft, blob).await.unwrap();
            let inspected = storage.inspect("ci", blob).await;
            assert!(matches!(inspected, Err(Error::InsufficientCapacity(_))), "{program}: {inspected:?}");
            storage.remove_draft(draft).await.unwrap();
            storage.remove(blob).await.unwrap();
        }
        let blob = node.blob(&raw).await;
        let facts = storage.inspect("ci", blob).await.unwrap();
        let converted = storage.convert("ci", blob, &facts).await;
        assert!(matches!(converted, Err(Error::InsufficientCapacity(_))), "{converted:?}");
        // So full that a tool could not even write an error message.
        let small = node.blob(&raw[..MIB]).await;
        let facts = storage.inspect("ci", small).await.unwrap();
        let _ = std::process::Command::new("sh")
            .args(["-c", &format!("cat /dev/zero > {}/other", directory.path().display())])
            .output();
        let inspected = storage.inspect("ci", small).await;
        assert!(matches!(inspected, Err(Error::InsufficientCapacity(_))), "{inspected:?}");
        let converted = storage.convert("ci", small, &facts).await;
        assert!(matches!(converted, Err(Error::InsufficientCapacity(_))), "{converted:?}");
        std::fs::remove_file(directory.path().join("other")).unwrap();
        storage.convert("ci", small, &facts).await.unwrap();
    });
}
