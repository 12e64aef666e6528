//! Blobs: created, read in ranges, damaged, verified.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::Command;

use muster_types::Error;
use muster_types::blob::ContentDigest;
use muster_types::ids::BlobId;
use muster_types::storage::StoredFileKind;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::fixture::{MIB, TestNode, bytes, checksums, collect, next};

fn content(data: &[u8]) -> ContentDigest {
    ContentDigest { size: data.len() as u64, checksums: checksums(data) }
}

fn flip(path: &std::path::Path, at: u64) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_any_range_of_a_blob() {
    let node = TestNode::new();
    let data = bytes(4 * MIB + 321, 20);
    let blob = node.blob(&data).await;
    let (size, mib) = (data.len() as u64, MIB as u64);
    for range in [0..size, 0..0, size..size, 0..1, size - 1..size, mib - 1..mib + 1, mib..2 * mib, 5..3 * mib]
    {
        let part = collect(node.storage().read(blob, range.clone()).await.unwrap()).await.unwrap();
        let (start, end) = (usize::try_from(range.start).unwrap(), usize::try_from(range.end).unwrap());
        assert!(part == data[start..end], "{range:?}");
    }
    let beyond = node.storage().read(blob, 0..size + 1).await.map(drop);
    assert!(matches!(beyond, Err(Error::Invalid(_))), "{beyond:?}");
    let absent = node.storage().read(BlobId::new(), 0..1).await.map(drop);
    assert!(matches!(absent, Err(Error::NotFound(_))), "{absent:?}");
    let empty = node.blob(b"").await;
    assert_eq!(node.bytes(empty).await.unwrap(), b"");
    assert_eq!(node.storage().verify(empty, &content(b"")).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn never_returns_damaged_bytes_and_verify_detects_them() {
    let node = TestNode::new();
    let data = bytes(3 * MIB + 999, 21);
    let content = content(&data);
    let (size, mib) = (data.len() as u64, MIB as u64);
    for at in [0, 1, mib - 1, mib, mib + 4711, 2 * mib, 3 * mib - 1, 3 * mib, size - 1] {
        let blob = node.blob(&data).await;
        assert_eq!(node.storage().verify(blob, &content).await.unwrap(), None);
        flip(&node.blob_path(blob), at);
        let mut stream = node.storage().read(blob, 0..size).await.unwrap();
        let mut good = 0;
        let failure = loop {
            match next(&mut stream).await {
                Some(Ok(part)) => {
                    assert!(part[..] == data[good..good + part.len()]);
                    good += part.len();
                }
                Some(Err(error)) => break error,
                None => panic!("the damage at {at} was not noticed"),
            }
        };
        let piece = at / mib * mib;
        assert!(good as u64 == piece, "{good} bytes before {at}");
        let text = failure.to_string();
        assert!(matches!(failure, Error::Internal(_)), "{text}");
        assert!(text.contains(&blob.to_string()) && text.contains(&format!("byte {piece}")), "{text}");
        assert!(next(&mut stream).await.is_none());
        // The other chunks can still be read.
        let elsewhere = if piece == 0 { mib..2 * mib } else { 0..mib };
        collect(node.storage().read(blob, elsewhere).await.unwrap()).await.unwrap();
        let wrong = node.storage().verify(blob, &content).await.unwrap().unwrap();
        assert!(wrong.contains("differs") && wrong.contains(&format!("byte {piece}")), "{wrong}");
        node.storage().remove(blob).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_reports_missing_blobs_and_wrong_sizes() {
    let node = TestNode::new();
    let data = bytes(2 * MIB, 22);
    let (storage, content) = (node.storage(), content(&data));
    let missing = storage.verify(BlobId::new(), &content).await.unwrap();
    assert_eq!(missing.as_deref(), Some("the file is missing"));
    let blob = node.blob(&data).await;
    fs::set_permissions(node.blob_path(blob), fs::Permissions::from_mode(0o644)).unwrap();
    fs::File::options().write(true).open(node.blob_path(blob)).unwrap().set_len(MIB as u64).unwrap();
    let wrong = storage.verify(blob, &content).await.unwrap().unwrap();
    assert_eq!(wrong, "1048576 bytes instead of 2097152");
    assert!(matches!(node.bytes(blob).await, Err(Error::Internal(_))));
    let other = node.blob(&bytes(2 * MIB, 23)).await;
    assert!(storage.verify(other, &content).await.unwrap().unwrap().contains("differs"));
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_checksum_file_blocks_reads_until_verified() {
    let node = TestNode::new();
    let data = bytes(2 * MIB + 5, 24);
    let content = content(&data);
    let blob = node.blob(&data).await;
    let sums = node.blob_path(blob).with_extension("sums");
    for damage in ["missing", "flipped"] {
        match damage {
            "missing" => fs::remove_file(&sums).unwrap(),
            _ => flip(&sums, 20),
        }
        let refused = node.bytes(blob).await;
        assert!(matches!(&refused, Err(Error::Internal(text)) if text.contains("sums")), "{damage}");
        assert_eq!(node.storage().verify(blob, &content).await.unwrap(), None);
        assert!(node.bytes(blob).await.unwrap() == data);
    }
    // The checksum file is not recreated from damaged bytes.
    fs::remove_file(&sums).unwrap();
    flip(&node.blob_path(blob), 7);
    assert!(node.storage().verify(blob, &content).await.unwrap().is_some());
    assert!(!sums.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn running_reads_survive_removal_and_replacement() {
    let node = TestNode::new();
    let data = bytes(8 * MIB, 25);
    let blob = node.blob(&data).await;
    let size = data.len() as u64;
    let mut stream = node.storage().read(blob, 0..size).await.unwrap();
    let first = next(&mut stream).await.unwrap().unwrap();
    let draft = node.draft(b"another").await;
    node.storage().commit(draft, blob).await.unwrap();
    assert_eq!(node.bytes(blob).await.unwrap(), b"another");
    node.storage().remove(blob).await.unwrap();
    node.storage().remove(blob).await.unwrap();
    let rest = collect(stream).await.unwrap();
    assert!([&first[..], &rest].concat() == data);
    node.storage().remove_draft(draft).await.unwrap();
    assert_eq!(node.files(), [] as [std::path::PathBuf; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn finds_all_files_and_keeps_directories_private() {
    let node = TestNode::new();
    assert_eq!(node.storage().list_files().await.unwrap(), []);
    assert_eq!(
        fs::read_dir(&node.directory).unwrap().count(),
        0,
        "directories exist before anything is stored"
    );
    let blob = node.blob(b"12345").await;
    let found = node.storage().list_files().await.unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].kind, found[0].size), (StoredFileKind::Blob(blob), 5));
    let age = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64()
        - found[0].modified_at;
    assert!((0.0..60.0).contains(&age), "{age}");
    for directory in fs::read_dir(&node.directory).unwrap().flatten() {
        assert_eq!(directory.metadata().unwrap().permissions().mode() & 0o777, 0o700, "{directory:?}");
    }
    assert_eq!(node.blob_path(blob).metadata().unwrap().permissions().mode() & 0o777, 0o444);
}

/// Not a test by itself: the limit of open files applies to the whole process.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by another test"]
async fn without_file_descriptors() {
    if std::env::var_os("MUSTER_TEST_STARVED").is_none() {
        return;
    }
    let node = TestNode::new();
    let data = bytes(2 * MIB, 26);
    let (blob, content, size) = (node.blob(&data).await, content(&data), data.len() as u64);
    let (before, max) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let free = fs::File::open("/dev/null").unwrap().as_raw_fd();
    let free = u64::try_from(free).unwrap();
    // With none left, and with one, which is enough for the blob but not for its checksums.
    for files in [free, free + 1] {
        setrlimit(Resource::RLIMIT_NOFILE, files, max).unwrap();
        let refused = node.storage().read(blob, 0..size).await.map(drop);
        let unverified = if files == free { Some(node.storage().verify(blob, &content).await) } else { None };
        setrlimit(Resource::RLIMIT_NOFILE, before, max).unwrap();
        assert!(matches!(refused, Err(Error::Unavailable(_))), "{refused:?}");
        assert!(matches!(unverified, None | Some(Err(Error::Unavailable(_)))), "{unverified:?}");
    }
    assert!(node.bytes(blob).await.unwrap() == data);
    assert_eq!(node.storage().verify(blob, &content).await.unwrap(), None);
}

#[test]
fn exhausted_file_descriptors_are_not_reported_as_damage() {
    let mut alone = Command::new(std::env::current_exe().unwrap());
    alone.args(["--exact", "blobs::without_file_descriptors", "--ignored"]).env("MUSTER_TEST_STARVED", "1");
    let output = alone.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
}
