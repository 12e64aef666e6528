//! A replica changes only when a copy is complete, and always has the content of one copy.

use std::process::Command;

use muster_types::settings::Settings;

use super::*;
use crate::command::Commands;
use crate::image::Images;
use crate::replica_messages::{receive_status, wait_committed};

const SIZE: u64 = 4 << 20;

struct Fixture {
    root: tempfile::TempDir,
    store: Arc<ReplicaStore>,
    id: InstanceId,
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !text.contains("failed"), "{arguments:?}: {text}");
}

impl Fixture {
    /// Returns `None` if this host cannot merge images.
    fn new() -> Option<Self> {
        let root = tempfile::tempdir().unwrap();
        let images = Images::new(&Commands::find(), &Settings::defaults());
        if let Some(reason) = images.missing_requirement() {
            muster_testing::skipped(&reason.to_string());
            return None;
        }
        let storage = Arc::new(FileStorage::new(root.path(), images));
        let store = Arc::new(ReplicaStore::new(root.path(), storage));
        Some(Self { root, store, id: InstanceId::new() })
    }

    /// Creates an image with these writes.
    fn image(&self, writes: &[&str]) -> Vec<u8> {
        let path = self.root.path().join(format!("image-{}", Uuid::new_v4()));
        qcow2_writer::create(&path, SIZE, None, None).unwrap();
        let mut arguments = vec!["-f", "qcow2"];
        writes.iter().for_each(|write| arguments.extend(["-c", write]));
        let text = path.to_string_lossy().into_owned();
        arguments.push(&text);
        run("qemu-io", &arguments);
        fs::read(path).unwrap()
    }

    fn header(base: Option<Uuid>, time: f64, disks: &[&str]) -> CopyHeader {
        let disks = disks.iter().map(|disk| (*disk).to_owned()).collect();
        CopyHeader { copy: Uuid::new_v4(), base, time, generation: 1, disks, nvram: false }
    }

    /// Sends the files of a copy, and returns whether it was committed.
    async fn send(&self, header: &CopyHeader, files: &[Vec<u8>]) -> bool {
        let stream = self.store.receive(self.id, 1).unwrap();
        let (mut stream, _) = receive_status(stream).await.unwrap();
        send_message(&mut stream, header).await.unwrap();
        for file in files {
            // The replica may reject it before.
            let _ = stream.write_u64(file.len() as u64).await;
            let _ = stream.write_all(file).await;
        }
        let _ = stream.shutdown().await;
        wait_committed(&mut stream).await.is_ok()
    }

    async fn copy(&self) -> Option<Uuid> {
        let stream = self.store.receive(self.id, 1).unwrap();
        receive_status(stream).await.unwrap().1.copy
    }

    fn manifest(&self) -> ReplicaManifest {
        load(&self.store.replica_dir(self.id)).unwrap().unwrap()
    }

    async fn restore(&self, disks: &[&str]) -> Result<(f64, PathBuf)> {
        let disks: Vec<String> = disks.iter().map(|disk| (*disk).to_owned()).collect();
        let vm = VmDir::new(self.root.path().join("machines/one"));
        let time = self.store.restore(self.id, &disks, vm.clone()).await?;
        Ok((time, vm.file("vda.qcow2")))
    }
}

/// Checks the content of a disk.
fn check(disk: &Path, reads: &[&str]) {
    let mut arguments = vec!["-r", "-f", "qcow2"];
    reads.iter().for_each(|read| arguments.extend(["-c", read]));
    let text = disk.to_string_lossy().into_owned();
    arguments.push(&text);
    run("qemu-io", &arguments);
}

#[tokio::test]
async fn changes_are_merged_and_restored() {
    let Some(fixture) = Fixture::new() else { return };
    let full = Fixture::header(None, 1.0, &["vda"]);
    assert!(fixture.send(&full, &[fixture.image(&["write -P 1 0 2M"])]).await);
    let mut base = full.copy;
    for (time, writes) in [(2.0, ["write -P 2 0 64k", "write -z 1M 64k"]), (3.0, ["write -P 3 64k 4k"; 2])] {
        assert_eq!(fixture.copy().await, Some(base));
        let changes = Fixture::header(Some(base), time, &["vda"]);
        assert!(fixture.send(&changes, &[fixture.image(&writes)]).await);
        base = changes.copy;
    }
    let (time, disk) = fixture.restore(&["vda"]).await.unwrap();
    assert!((time - 3.0).abs() < f64::EPSILON, "{time}");
    check(
        &disk,
        &[
            "read -P 2 0 64k",
            "read -P 3 64k 4k",
            "read -P 1 68k 956k",
            "read -P 0 1M 64k",
            "read -P 1 1088k 960k",
            "read -P 0 2M 2M",
        ],
    );
    let names: Vec<_> = fs::read_dir(fixture.store.replica_dir(fixture.id)).unwrap().collect();
    assert_eq!(names.len(), 2, "{names:?}");
    fixture.store.remove(fixture.id).await.unwrap();
    assert_eq!(fs::read_dir(&fixture.store.dir).unwrap().count(), 0);
    check(&disk, &["read -P 2 0 64k"]);
}

#[tokio::test]
async fn incomplete_copy_leaves_the_last_one() {
    let Some(fixture) = Fixture::new() else { return };
    let full = Fixture::header(None, 1.0, &["vda", "vdc"]);
    let image = fixture.image(&["write -P 1 0 1M"]);
    assert!(!fixture.send(&full, std::slice::from_ref(&image)).await, "a disk is missing");
    assert_eq!(fixture.copy().await, None);
    assert!(fixture.restore(&["vda"]).await.is_err());
    let full = Fixture::header(None, 2.0, &["vda", "vdc"]);
    assert!(fixture.send(&full, &[image.clone(), image.clone()]).await);
    let changes = Fixture::header(Some(full.copy), 3.0, &["vda", "vdc"]);
    let changed = fixture.image(&["write -P 2 0 1M"]);
    assert!(!fixture.send(&changes, std::slice::from_ref(&changed)).await);
    let other = Fixture::header(Some(Uuid::new_v4()), 4.0, &["vda", "vdc"]);
    assert!(!fixture.send(&other, &[changed.clone(), changed.clone()]).await, "the changes of another copy");
    let fewer = Fixture::header(Some(full.copy), 5.0, &["vda"]);
    assert!(!fixture.send(&fewer, &[changed]).await);
    assert_eq!(fixture.copy().await, Some(full.copy));
    let missing = fixture.restore(&["vda", "vdd"]).await.unwrap_err();
    assert!(missing.to_string().contains("disk vdd"), "{missing}");
    let (time, disk) = fixture.restore(&["vda", "vdc"]).await.unwrap();
    assert!((time - 2.0).abs() < f64::EPSILON, "{time}");
    check(&disk, &["read -P 1 0 1M"]);
    // From now on, the replica does not change.
    let late = Fixture::header(None, 6.0, &["vda", "vdc"]);
    assert!(!fixture.send(&late, &[image.clone(), image]).await);
}

#[tokio::test]
async fn commits_changes_although_the_daemon_was_killed_before_they_were_merged() {
    let Some(fixture) = Fixture::new() else { return };
    let full = Fixture::header(None, 1.0, &["vda"]);
    assert!(fixture.send(&full, &[fixture.image(&["write -P 1 0 2M"])]).await);
    let (dir, copy) = (fixture.store.replica_dir(fixture.id), Uuid::new_v4());
    fs::write(dir.join(disk_name("vda", copy)), fixture.image(&["write -P 2 0 1M"])).unwrap();
    save(&dir, &ReplicaManifest { copy, time: 2.0, is_unmerged: true, ..fixture.manifest() }).unwrap();
    let next = Fixture::header(Some(copy), 3.0, &["vda"]);
    assert!(fixture.send(&next, &[fixture.image(&["write -P 3 0 4k"])]).await);
    let (time, disk) = fixture.restore(&["vda"]).await.unwrap();
    assert!((time - 3.0).abs() < f64::EPSILON, "{time}");
    check(&disk, &["read -P 3 0 4k", "read -P 2 4k 1020k", "read -P 1 1M 1M"]);
}

#[tokio::test]
async fn rejects_images_that_refer_to_other_files() {
    let Some(fixture) = Fixture::new() else { return };
    let path = fixture.root.path().join("bad");
    let backing = qcow2_writer::BackingFile { name: "/etc/shadow", format: "raw" };
    qcow2_writer::create(&path, SIZE, Some(backing), None).unwrap();
    let full = Fixture::header(None, 1.0, &["vda"]);
    assert!(!fixture.send(&full, &[fs::read(&path).unwrap()]).await);
    let named = Fixture::header(None, 1.0, &["../vda"]);
    assert!(!fixture.send(&named, &[fixture.image(&["write -P 1 0 4k"])]).await);
    assert_eq!(fixture.copy().await, None);
}
