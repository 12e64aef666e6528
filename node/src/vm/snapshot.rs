//! Copies of a VM's disks and of its display. See docs/decisions/0021.
//!
//! QEMU copies the disks of a VM that is on or paused, all as of the same point in time, while the guest continues.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use muster_types::storage::Draft;
use muster_types::vm::SnapshotDisk;
use muster_types::{Error, Result};
use serde_json::{Value, json};

use super::backup_job::{self, copy_name};
use super::disks;
use super::hypervisor::{Hypervisor, blocking};
use super::lifecycle::{RunningVm, Vm};
use super::qmp::Qmp;
use super::vm_dir::file;
use crate::files::io_error;
use crate::image::qcow2_writer;

/// The device name of the NVRAM.
const NVRAM: &str = "nvram";

const SCREENSHOT: &str = "screen.png";

pub(super) async fn snapshot(
    hypervisor: &Hypervisor,
    vm: &Arc<Vm>,
    disks: &[SnapshotDisk],
    compress: bool,
) -> Result<()> {
    // Copies are named after their disks, so only one snapshot can be taken at a time.
    let _snapshot = vm.snapshot_lock.lock().await;
    let (nvram, disks): (Vec<&SnapshotDisk>, Vec<&SnapshotDisk>) =
        disks.iter().partition(|disk| disk.device == NVRAM);
    let disk_dir = vm.dir.disks();
    hypervisor.require_responsive_disks(&vm.dir)?;
    let path = disk_dir.path().to_owned();
    blocking(move || match path.exists() {
        true => Ok(()),
        false => Err(Error::NotReady(format!("{} with the disks of the VM is not mounted", path.display()))),
    })
    .await?;
    match vm.running() {
        Some(running) if !disks.is_empty() => {
            copy_running(hypervisor, vm, &running, &disks, compress).await?;
        }
        Some(_) => {}
        None => {
            for disk in &disks {
                let to = vm.dir.file(&copy_name(&disk.device));
                let mode = (disk.thin, compress);
                disks::copy_offline(&hypervisor.storage, disk_dir.path(), &disk.device, mode, &to).await?;
                hypervisor.storage.adopt_draft(disk.draft, &to).await?;
            }
        }
    }
    for disk in nvram {
        let (from, to) = (disk_dir.file(file::NVRAM), vm.dir.file(&copy_name(&disk.device)));
        let copy = to.clone();
        blocking(move || {
            if !from.exists() {
                return Err(Error::Conflict("the VM has no NVRAM".into()));
            }
            fs::copy(from, copy).map(drop).map_err(io_error("failed to copy NVRAM"))
        })
        .await?;
        hypervisor.storage.adopt_draft(disk.draft, &to).await?;
    }
    Ok(())
}

/// Copies the disks of a running VM.
async fn copy_running(
    hypervisor: &Hypervisor,
    vm: &Arc<Vm>,
    running: &RunningVm,
    disks: &[&SnapshotDisk],
    compress: bool,
) -> Result<()> {
    let qmp = running.qmp()?;
    let record = running.record();
    if let Some(disk) = disks.iter().find(|disk| !record.disks.contains(&disk.device)) {
        return Err(Error::Conflict(format!("the VM has no disk {}", disk.device)));
    }
    backup_job::cancel_all(&qmp, &vm.dir).await?;
    if let Err(error) = run_backup(&qmp, vm, record.uid, disks, compress).await {
        // If this fails, the next snapshot or start cleans up.
        let _ = backup_job::cancel_all(&qmp, &vm.dir).await;
        return Err(error);
    }
    for disk in disks {
        let name = copy_name(&disk.device);
        backup_job::remove_target(&qmp, &name).await?;
        hypervisor.storage.adopt_draft(disk.draft, &vm.dir.file(&name)).await?;
    }
    Ok(())
}

/// Starts the backup jobs of all disks in one transaction, and waits for them.
async fn run_backup(
    qmp: &Qmp,
    vm: &Arc<Vm>,
    uid: Option<u32>,
    disks: &[&SnapshotDisk],
    compress: bool,
) -> Result<()> {
    let sizes = disk_sizes(qmp).await?;
    for disk in disks {
        let name = copy_name(&disk.device);
        let size = *sizes
            .get(&disk.device)
            .ok_or_else(|| Error::Conflict(format!("QEMU has no disk {}", disk.device)))?;
        let (dir, file_name) = (vm.dir.clone(), name.clone());
        blocking(move || {
            qcow2_writer::create(&dir.file(&file_name), size, None, None)
                .map_err(io_error("failed to create the copy of a disk"))?;
            dir.set_owner(&file_name, uid)
        })
        .await?;
        backup_job::add_target(qmp, &name).await?;
    }
    let action = |disk: &&SnapshotDisk| {
        let name = copy_name(&disk.device);
        json!({ "type": "blockdev-backup", "data": {
            "job-id": name, "device": disk.device, "target": name, "compress": compress,
            "sync": if disk.thin { "top" } else { "full" },
            // Otherwise the job is deleted together with its result.
            "auto-dismiss": false,
        } })
    };
    let actions: Vec<Value> = disks.iter().map(action).collect();
    qmp.execute("transaction", json!({ "actions": actions })).await?;
    for disk in disks {
        backup_job::wait(qmp, &copy_name(&disk.device)).await?;
    }
    Ok(())
}

/// Returns the virtual sizes of the disks, by device.
pub(super) async fn disk_sizes(qmp: &Qmp) -> Result<BTreeMap<String, u64>> {
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true })).await?;
    let nodes = nodes.as_array().map(Vec::as_slice).unwrap_or_default().iter();
    let size = |node: &Value| {
        Some((node["node-name"].as_str()?.to_owned(), node["image"]["virtual-size"].as_u64()?))
    };
    Ok(nodes.filter_map(size).collect())
}

/// Writes the content of the display into a draft.
pub(super) async fn screenshot(hypervisor: &Hypervisor, vm: &Arc<Vm>, draft: Draft) -> Result<()> {
    let running = vm.require_running()?;
    let qmp = running.qmp()?;
    let path = vm.dir.file(SCREENSHOT);
    let (dir, uid) = (vm.dir.clone(), running.record().uid);
    blocking(move || {
        dir.remove(SCREENSHOT)?;
        dir.ensure(SCREENSHOT, uid)
    })
    .await?;
    qmp.execute("screendump", json!({ "filename": SCREENSHOT, "format": "png" })).await?;
    let metadata = fs::symlink_metadata(&path).map_err(io_error("failed to inspect screenshot"))?;
    if metadata.size() == 0 {
        return Err(Error::Unavailable("QEMU wrote an empty screenshot".into()));
    }
    hypervisor.storage.adopt_draft(draft, &path).await
}
