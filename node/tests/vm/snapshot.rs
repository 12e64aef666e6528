//! Copies of disks and of the display.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use muster_types::ids::BlobId;
use muster_types::spec::DiskBus;
use muster_types::storage::Draft;
use muster_types::vm::{DiskKind, DiskPlan, SnapshotDisk, VmPlan, VmPower};
use serde_json::{Value, json};

use crate::fixture::{Fixture, sh};

fn draft(fixture: &Fixture) -> (Draft, PathBuf) {
    let blob = BlobId::new();
    (Draft::Vm(blob), fixture.storage.path().join(format!("drafts/machine-{blob}")))
}

/// Returns the content of a disk image as the guest sees it.
fn raw(image: &std::path::Path, name: &str) -> Vec<u8> {
    let raw = image.with_file_name(format!("{name}.raw"));
    sh(&format!("qemu-img convert -f qcow2 -O raw {} {}", image.display(), raw.display()));
    std::fs::read(raw).unwrap()
}

fn contains(data: &[u8], text: &str) -> bool {
    data.windows(text.len()).any(|part| part == text.as_bytes())
}

#[tokio::test]
async fn copies_disks_of_running_and_stopped_vm() {
    let Some(fixture) = Fixture::new().await else { return };
    let vms = fixture.vms();
    let mut plan = fixture.plan("copied").await;
    plan.disks.push(DiskPlan {
        device: "vdc".into(),
        bus: DiskBus::Virtio,
        kind: DiskKind::Disk,
        size: Some(64 << 20),
        base: None,
    });
    let mut console = fixture.boot(&plan).await;
    console.log_in().await;
    console
        .run("echo written-to-first > /root/data; sync; echo written-to-second | dd of=/dev/vdc conv=fsync")
        .await;

    let (whole, whole_file) = draft(&fixture);
    let (second, second_file) = draft(&fixture);
    let disk = |device: &str, draft, thin| SnapshotDisk { device: device.into(), draft, thin };
    vms.snapshot(plan.id, &[disk("vda", whole, false), disk("vdc", second, false)], false).await.unwrap();
    let info = |file: &PathBuf| sh(&format!("qemu-img info --output=json {}", file.display()));
    for file in [&whole_file, &second_file] {
        assert!(!info(file).contains("backing-filename"), "{}", info(file));
        sh(&format!("qemu-img check -q {}", file.display()));
    }
    assert!(contains(&raw(&whole_file, "whole"), "written-to-first"));
    assert!(raw(&second_file, "second").starts_with(b"written-to-second"));

    // Only the data that the guest wrote, compressed.
    let (thin, thin_file) = draft(&fixture);
    vms.snapshot(plan.id, &[disk("vda", thin, true)], true).await.unwrap();
    assert!(!info(&thin_file).contains("backing-filename"));
    assert!(contains(&raw(&thin_file, "thin"), "written-to-first"));
    let size = |file: &PathBuf| std::fs::metadata(file).unwrap().len();
    assert!(size(&thin_file) * 2 < size(&whole_file), "{} {}", size(&thin_file), size(&whole_file));
    assert_eq!(console.run("cat /root/data").await, "written-to-first\n");

    let (picture, picture_file) = draft(&fixture);
    vms.screenshot(plan.id, picture).await.unwrap();
    assert!(std::fs::read(picture_file).unwrap().starts_with(b"\x89PNG\r\n\x1a\n"));

    let wrong = vms.snapshot(plan.id, &[disk("vdb", thin, true)], false).await;
    assert!(matches!(wrong, Err(muster_types::Error::Conflict(_))), "{wrong:?}");
    vms.stop(plan.id).await.unwrap();
    let (off, off_file) = draft(&fixture);
    vms.snapshot(plan.id, &[disk("vda", off, true)], false).await.unwrap();
    assert!(contains(&raw(&off_file, "off"), "written-to-first"));
    // No files of the copies remain, and the VM still starts.
    let orphan = std::fs::read_dir(fixture.vm_dir(&plan)).unwrap().flatten();
    assert!(orphan.into_iter().all(|entry| !entry.file_name().to_string_lossy().starts_with("copy-")));
    vms.start(&plan).await.unwrap();
    vms.remove(plan.id).await.unwrap();
}

/// Executes QMP commands like a daemon that ends right afterwards.
fn execute_qmp(fixture: &Fixture, plan: &VmPlan, commands: &[Value]) {
    let socket = UnixStream::connect(fixture.vm_dir(plan).join("qmp")).unwrap();
    socket.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
    let mut lines = BufReader::new(socket.try_clone().unwrap()).lines();
    let mut socket = socket;
    for command in [&json!({ "execute": "qmp_capabilities" })].into_iter().chain(commands) {
        writeln!(socket, "{command}").unwrap();
        let response =
            lines.find(|line| !["QMP", "event"].iter().any(|word| line.as_ref().unwrap().contains(word)));
        assert!(response.unwrap().unwrap().contains("return"), "{command}");
    }
}

#[tokio::test]
async fn removes_orphaned_copy_of_earlier_daemon() {
    let Some(mut fixture) = Fixture::new().await else { return };
    let plan = fixture.plan("orphan").await;
    fixture.boot(&plan).await;
    fixture.stop_daemon();
    let orphan = fixture.vm_dir(&plan).join("copy-vda");
    let size = sh(&format!(
        "qemu-img info -U --output=json {} | grep -m 1 virtual-size | tr -cd 0-9",
        fixture.vm_dir(&plan).join("vda.qcow2").display()
    ));
    sh(&format!("qemu-img create -q -f qcow2 {0} {size}; chmod 666 {0}", orphan.display()));
    let execute = |command: &str, arguments: Value| json!({ "execute": command, "arguments": arguments });
    let commands = [
        execute(
            "blockdev-add",
            json!({ "driver": "file", "filename": "copy-vda", "node-name": "copy-vda-file" }),
        ),
        execute(
            "blockdev-add",
            json!({ "driver": "qcow2", "file": "copy-vda-file", "node-name": "copy-vda" }),
        ),
        // It would take hours.
        execute(
            "blockdev-backup",
            json!({
                "job-id": "copy-vda", "device": "vda", "target": "copy-vda", "sync": "full", "speed": 1,
                "auto-dismiss": false,
            }),
        ),
    ];
    execute_qmp(&fixture, &plan, &commands);
    fixture.restart_daemon();
    assert_eq!(fixture.power(&plan).await, VmPower::On);
    assert!(!orphan.exists());
    let (draft, file) = draft(&fixture);
    let disk = SnapshotDisk { device: "vda".into(), draft, thin: true };
    fixture.vms().snapshot(plan.id, &[disk], false).await.unwrap();
    assert!(file.exists());
}
