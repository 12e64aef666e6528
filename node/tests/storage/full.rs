//! A disk that is full.

use muster_types::Error;
use muster_types::ids::{BlobId, UploadId};
use muster_types::storage::Draft;
use nix::mount::{MsFlags, mount};

use crate::images::packed;
use crate::world::{ANY, Disk, MIB, bytes, checksums, parts, sh};

#[test]
fn a_full_disk_refuses_and_harms_nothing() {
    if !muster_testing::enter("full::a_full_disk_refuses_and_harms_nothing", &["ip"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    mount(Some("none"), folder.path(), Some("tmpfs"), MsFlags::empty(), Some("size=64m")).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let disk = Disk::at(folder.path());
        let storage = disk.storage();
        let (other, large) = (bytes(20 * MIB, 30), bytes(50 * MIB, 31));
        let kept = disk.blob(&other).await;
        let draft = disk.draft(&large[..5 * MIB]).await;
        let at = 5 * MIB as u64;
        for part in [10_000, MIB, 45 * MIB] {
            let refused = storage.append(draft, Some(at), ANY, parts(&large[5 * MIB..], part)).await;
            assert!(matches!(refused, Err(Error::Insufficient(_))), "{refused:?}");
            assert_eq!(storage.draft_size(draft).await.unwrap(), Some(at));
            // A little of the disk is never used: others live there, too.
            let free = sh(&format!("df --output=avail -B1 {} | tail -n 1", folder.path().display()));
            assert!(free.trim().parse::<u64>().unwrap() >= 64 * MIB as u64 / 20, "{free}");
        }
        let content = storage.content(draft).await.unwrap();
        assert_eq!(content.checksums, checksums(&large[..5 * MIB]));
        assert!(disk.bytes(kept).await.unwrap() == other);
        // A smaller one fits, and so does the large one when there is room.
        storage.append(draft, Some(at), ANY, parts(&large[5 * MIB..9 * MIB], MIB)).await.unwrap();
        storage.remove(kept).await.unwrap();
        storage.append(draft, Some(9 * MIB as u64), ANY, parts(&large[9 * MIB..], MIB)).await.unwrap();
        let blob = BlobId::new();
        storage.keep(draft, blob).await.unwrap();
        assert!(disk.bytes(blob).await.unwrap() == large);
        // Full beneath us, by somebody else.
        let _ = std::process::Command::new("sh")
            .args(["-c", &format!("cat /dev/zero > {}/other", folder.path().display())])
            .output();
        let never = Draft::Upload(UploadId::new());
        let refused = storage.append(never, Some(0), ANY, parts(b"x", 1)).await;
        assert!(matches!(refused, Err(Error::Insufficient(_))), "{refused:?}");
        assert!(disk.bytes(blob).await.unwrap() == large);
    });
}

#[test]
fn a_full_disk_is_not_taken_for_a_damaged_image() {
    if !muster_testing::enter("full::a_full_disk_is_not_taken_for_a_damaged_image", &["ip"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    mount(Some("none"), folder.path(), Some("tmpfs"), MsFlags::empty(), Some("size=64m")).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        if Disk::real(&[]).await.is_none() {
            return;
        }
        let disk = Disk::real_at(folder.path(), &[]);
        let storage = disk.storage();
        let raw = bytes(40 * MIB, 32);
        // The one finds nothing to leave out, the other nearly everything.
        for (program, image) in [("gzip", raw.clone()), ("xz", bytes(62 * MIB, 33))] {
            let draft = disk.draft(&packed(program, &image)).await;
            let unpacked = storage.unpack(draft).await;
            assert!(matches!(unpacked, Err(Error::Insufficient(_))), "{program}: {unpacked:?}");
            let blob = BlobId::new();
            storage.keep(draft, blob).await.unwrap();
            let inspected = storage.inspect(blob).await;
            assert!(matches!(inspected, Err(Error::Insufficient(_))), "{program}: {inspected:?}");
            storage.remove_draft(draft).await.unwrap();
            storage.remove(blob).await.unwrap();
        }
        let blob = disk.blob(&raw).await;
        let facts = storage.inspect(blob).await.unwrap();
        let converted = storage.convert(blob, &facts).await;
        assert!(matches!(converted, Err(Error::Insufficient(_))), "{converted:?}");
        // So full that no tool could say a word.
        let small = disk.blob(&raw[..MIB]).await;
        let facts = storage.inspect(small).await.unwrap();
        let _ = std::process::Command::new("sh")
            .args(["-c", &format!("cat /dev/zero > {}/other", folder.path().display())])
            .output();
        let inspected = storage.inspect(small).await;
        assert!(matches!(inspected, Err(Error::Insufficient(_))), "{inspected:?}");
        let converted = storage.convert(small, &facts).await;
        assert!(matches!(converted, Err(Error::Insufficient(_))), "{converted:?}");
        std::fs::remove_file(folder.path().join("other")).unwrap();
        storage.convert(small, &facts).await.unwrap();
    });
}
