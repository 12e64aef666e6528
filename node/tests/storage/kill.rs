//! Files that a killed process left behind.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use muster_types::ids::{BlobId, UploadId};
use muster_types::storage::{Draft, StorageApi, StoredFileKind};

use crate::fixture::{MIB, NO_LIMIT, TestNode, bytes, parts, sh};

/// Returns the content of the target's `number`th blob: a raw disk.
fn data(number: u64) -> Vec<u8> {
    bytes(3 * MIB + 512, 1000 + number)
}

fn blob(number: u64) -> BlobId {
    BlobId(uuid::Uuid::from_u128(u128::from(number)))
}

async fn write_blobs(storage: &dyn StorageApi, convert: bool) {
    for number in 0.. {
        let (data, draft) = (data(number), Draft::Upload(UploadId(uuid::Uuid::from_u128(number.into()))));
        let size = storage.draft_size(draft).await.unwrap().unwrap_or(0);
        let rest = parts(&data[usize::try_from(size).unwrap()..], 200_000);
        let kept = storage.append(draft, Some(size), NO_LIMIT, rest).await;
        // It may have become a blob before the last kill.
        assert!(matches!(kept, Ok(_) | Err(muster_types::Error::Conflict(_))), "{kept:?}");
        storage.commit(draft, blob(number)).await.unwrap();
        if convert {
            let facts = storage.inspect("ci", blob(number)).await.unwrap();
            storage.convert("ci", blob(number), &facts).await.unwrap();
        }
        storage.remove_draft(draft).await.unwrap();
    }
}

/// Not a test by itself: the process that the tests kill.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by another test"]
async fn kill_target() {
    let Ok(directory) = std::env::var("MUSTER_TEST_VICTIM") else { return };
    let real = std::env::var_os("MUSTER_TEST_REAL").is_some();
    let directory = Path::new(&directory);
    let node = if real { TestNode::real_at(directory, &[]) } else { TestNode::at(directory) };
    fs::write(directory.join("ready"), "").unwrap();
    write_blobs(node.storage(), real).await;
}

async fn kill_repeatedly(directory: &Path, real: bool, times: u64) -> (usize, usize) {
    let mut seen = (0, 0);
    let (_never, clock) = std::sync::mpsc::channel::<()>();
    for attempt in 0..times {
        let _ = fs::remove_file(directory.join("ready"));
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "kill::kill_target", "--ignored"]).env("MUSTER_TEST_VICTIM", directory);
        if real {
            command.env("MUSTER_TEST_REAL", "1");
        }
        let mut child = command.stdout(Stdio::null()).process_group(0).spawn().unwrap();
        muster_testing::wait_for("the process to kill", Duration::from_secs(20), || {
            directory.join("ready").exists().then_some(())
        });
        let _ = clock.recv_timeout(Duration::from_millis(3 + 37 * (attempt * 7 % times)));
        if attempt + 1 == times {
            // At least once, wait until something has been created, however slow the host is.
            let output_dir = directory.join(if real { "conversions" } else { "blobs" });
            muster_testing::wait_for("the first file", Duration::from_secs(30), || {
                fs::read_dir(&output_dir).is_ok_and(|mut entries| entries.next().is_some()).then_some(())
            });
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // Its tools are killed with it.
        muster_testing::wait_for("its tools to exit", Duration::from_secs(5), || {
            sh(&format!("pgrep -g {} || true", child.id())).trim().is_empty().then_some(())
        });
        let node = TestNode::at(directory);
        let jobs = fs::read_dir(directory.join("work")).map_or(0, Iterator::count);
        assert_eq!(jobs, 0, "job directories remain after a start");
        let all = node.storage().list_files().await.unwrap();
        for found in &all {
            match found.kind {
                StoredFileKind::Blob(id) => {
                    let number = u64::try_from(id.0.as_u128()).unwrap();
                    assert!(node.bytes(id).await.unwrap() == data(number), "blob {number}");
                    seen.0 += 1;
                }
                StoredFileKind::Conversion(id) => {
                    let number = u64::try_from(id.0.as_u128()).unwrap();
                    let (raw, conversion) = (directory.join("raw"), node.conversion_path(id, "qcow2"));
                    fs::write(&raw, data(number)).unwrap();
                    sh(&format!(
                        "qemu-img compare -q -f qcow2 -F raw {} {}",
                        conversion.display(),
                        raw.display()
                    ));
                    seen.1 += 1;
                }
                StoredFileKind::Draft(Draft::Upload(id)) => {
                    let draft = fs::read(directory.join(format!("drafts/upload-{id}"))).unwrap();
                    let number = u64::try_from(id.0.as_u128()).unwrap();
                    assert!(data(number).starts_with(&draft), "draft {number}");
                }
                StoredFileKind::Draft(other) => panic!("{other:?}"),
            }
        }
        // The next process starts from an empty storage, except for the drafts.
        for found in all {
            if let StoredFileKind::Blob(id) | StoredFileKind::Conversion(id) = found.kind {
                node.storage().remove(id).await.unwrap();
            }
        }
    }
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_process_leaves_complete_blobs_or_none() {
    let directory = tempfile::tempdir().unwrap();
    let (blobs, _) = kill_repeatedly(directory.path(), false, 12).await;
    assert!(blobs > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_process_leaves_complete_conversions_or_none() {
    if TestNode::real(&[]).await.is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (_, conversions) = kill_repeatedly(directory.path(), true, 8).await;
    assert!(conversions > 0);
}
