//! The source of a replica: copies of the disks of a running VM. See docs/decisions/0074.
//!
//! ```text
//! which copy has the replica? ─▶ one transaction: a new bitmap, and a backup job of the changes since that copy, for each disk
//! ─▶ the files are sent ─▶ the replica has committed them ─▶ the bitmap of the earlier copy is removed
//! ```
//!
//! A bitmap has the name of the copy since which it records changes. So the copy that the replica really has decides which bitmap is
//! used, whichever process was killed; without its bitmap, a full copy is sent. The jobs write to files of this host, so that the
//! guest never waits for another one. The disks of a VM that is off are copied completely, once.

use std::fs::File;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_types::replica::{ReplicaCopy, ReplicaDriver};
use muster_types::{Error, Result};
use nix::libc;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use uuid::Uuid;

use super::backup_job::{self, copy_name};
use super::disks;
use super::hypervisor::blocking;
use super::lifecycle::{RunningVm, Vm};
use super::migration_files::versions;
use super::qmp::Qmp;
use super::snapshot::disk_sizes;
use super::vm_dir::{VmDir, file};
use crate::files::io_error;
use crate::image::qcow2_writer;
use crate::replica_messages::{
    CopyHeader, TRANSFER_TIMEOUT, receive_status, send_message, wait_committed, within,
};
use crate::storage::FileStorage;

const BITMAP_PREFIX: &str = "replica-";
const BUFFER_SIZE: usize = 1 << 20;
/// How long the connection may be idle while the disks are copied, before the target closes it.
const MAX_IDLE_TIME: Duration = Duration::from_secs(30);

/// Copies the disks of a VM to its replica.
pub(super) async fn copy(
    storage: &FileStorage,
    vm: &Arc<Vm>,
    driver: &dyn ReplicaDriver,
) -> Result<ReplicaCopy> {
    let (mut stream, status) = receive_status(driver.connect().await?).await?;
    let connected = Instant::now();
    let (header, files) = match vm.running() {
        Some(running) => take(vm, &running, &*running.qmp()?, status.copy, driver).await?,
        None => take_off(storage, vm, driver).await?,
    };
    if connected.elapsed() > MAX_IDLE_TIME {
        let (another, now) = receive_status(driver.connect().await?).await?;
        if now != status {
            return Err(Error::Unavailable("the replica received another copy meanwhile".into()));
        }
        stream = another;
    }
    let bytes = send(&mut stream, &header, files).await?;
    if let Some(Ok(qmp)) = vm.running().map(|running| running.qmp()) {
        // If this fails, the next copy removes the bitmap.
        let _ = remove_bitmaps(&qmp, &header.disks, &[bitmap_name(header.copy)]).await;
    }
    Ok(ReplicaCopy { time: header.time, bytes, incremental: header.base.is_some() })
}

fn bitmap_name(copy: Uuid) -> String {
    format!("{BITMAP_PREFIX}{copy}")
}

/// Copies the disks to files, which have no names any longer: only the changes since `last`, if all disks have its bitmap.
async fn take(
    vm: &Arc<Vm>,
    running: &RunningVm,
    qmp: &Qmp,
    last: Option<Uuid>,
    driver: &dyn ReplicaDriver,
) -> Result<(CopyHeader, Vec<File>)> {
    // The files are named like those of a snapshot.
    let _snapshot = vm.snapshot_lock.lock().await;
    let record = running.record();
    if vm.dir.has_shared_disks() {
        return Err(Error::Conflict("the disks are on shared storage".into()));
    }
    backup_job::cancel_all(qmp, &vm.dir).await?;
    let bitmaps = bitmaps(qmp).await?;
    let has =
        |disk: &String, name: &str| bitmaps.iter().any(|bitmap| bitmap.disk == *disk && bitmap.name == name);
    let base = last.filter(|last| record.disks.iter().all(|disk| has(disk, &bitmap_name(*last))));
    let keep: Vec<String> = base.map(bitmap_name).into_iter().collect();
    remove_bitmaps(qmp, &record.disks, &keep).await?;
    let nvram = vm.dir.file(file::NVRAM).exists();
    let copy = Uuid::new_v4();
    let mut header = CopyHeader {
        copy,
        base,
        time: 0.0,
        generation: record.generation,
        disks: record.disks.clone(),
        nvram,
    };
    let taken = async {
        create_targets(vm, qmp, &header, record.uid).await?;
        header.time = driver.now();
        start_jobs(qmp, &header).await?;
        for disk in &header.disks {
            backup_job::wait(qmp, &copy_name(disk)).await?;
        }
        for disk in &header.disks {
            backup_job::remove_target(qmp, &copy_name(disk)).await?;
        }
        let (dir, of_copy) = (vm.dir.clone(), header.clone());
        let files = blocking(move || open_files(&dir, &of_copy)).await?;
        Ok((header, files))
    };
    let taken = taken.await;
    if taken.is_err() {
        // If this fails, the next copy or snapshot cleans up.
        let _ = backup_job::cancel_all(qmp, &vm.dir).await;
        let _ = remove_bitmaps(qmp, &record.disks, &keep).await;
    }
    taken
}

/// Copies the disks of a VM that is off: completely, because no QEMU has recorded the changes.
async fn take_off(
    storage: &FileStorage,
    vm: &Arc<Vm>,
    driver: &dyn ReplicaDriver,
) -> Result<(CopyHeader, Vec<File>)> {
    // The files are named like those of a snapshot.
    let _snapshot = vm.snapshot_lock.lock().await;
    let record = vm.dir.record().ok_or_else(|| Error::Conflict("the VM was never started".into()))?;
    if vm.dir.has_shared_disks() {
        return Err(Error::Conflict("the disks are on shared storage".into()));
    }
    backup_job::remove_files(&vm.dir)?;
    let header = CopyHeader {
        copy: Uuid::new_v4(),
        base: None,
        time: driver.now(),
        generation: record.generation,
        disks: record.disks,
        nvram: vm.dir.file(file::NVRAM).exists(),
    };
    let before = versions(&vm.dir)?;
    for disk in &header.disks {
        let to = vm.dir.file(&copy_name(disk));
        disks::copy_offline(storage, vm.dir.path(), disk, (false, false), &to).await?;
    }
    if vm.running().is_some() || versions(&vm.dir)? != before {
        return Err(Error::Conflict("the VM was started while its disks were copied".into()));
    }
    let (dir, of_copy) = (vm.dir.clone(), header.clone());
    let files = blocking(move || open_files(&dir, &of_copy)).await?;
    Ok((header, files))
}

async fn create_targets(vm: &Arc<Vm>, qmp: &Qmp, header: &CopyHeader, uid: Option<u32>) -> Result<()> {
    let sizes = disk_sizes(qmp).await?;
    for disk in &header.disks {
        let name = copy_name(disk);
        let size = sizes.get(disk).copied();
        let size = size.ok_or_else(|| Error::Conflict(format!("QEMU has no disk {disk}")))?;
        let (dir, file_name) = (vm.dir.clone(), name.clone());
        blocking(move || {
            qcow2_writer::create(&dir.file(&file_name), size, None, None)
                .map_err(io_error("failed to create the copy of a disk"))?;
            dir.set_owner(&file_name, uid)
        })
        .await?;
        backup_job::add_target(qmp, &name).await?;
    }
    Ok(())
}

/// Starts the jobs and the bitmaps of a copy in one transaction.
async fn start_jobs(qmp: &Qmp, header: &CopyHeader) -> Result<()> {
    let actions: Vec<Value> = header
        .disks
        .iter()
        .flat_map(|disk| {
            let name = copy_name(disk);
            let bitmap = json!({ "node": disk, "name": bitmap_name(header.copy) });
            let mut job = json!({
                "job-id": name, "device": disk, "target": name, "sync": "full",
                // Otherwise the job is deleted together with its result.
                "auto-dismiss": false,
            });
            if let Some(base) = header.base {
                job["sync"] = "bitmap".into();
                job["bitmap"] = bitmap_name(base).into();
                // It is needed again unless the replica commits the copy.
                job["bitmap-mode"] = "never".into();
            }
            [
                json!({ "type": "block-dirty-bitmap-add", "data": bitmap }),
                json!({ "type": "blockdev-backup", "data": job }),
            ]
        })
        .collect();
    qmp.execute("transaction", json!({ "actions": actions })).await.map(drop)
}

/// Opens the files of a copy in the order in which they are sent, and removes the names of those of the disks.
fn open_files(dir: &VmDir, header: &CopyHeader) -> Result<Vec<File>> {
    let open = |name: &str| {
        let opened = File::options().read(true).custom_flags(libc::O_NOFOLLOW).open(dir.file(name));
        opened.map_err(io_error("failed to open the copy of a disk"))
    };
    let mut files = Vec::new();
    for disk in &header.disks {
        let name = copy_name(disk);
        files.push(open(&name)?);
        dir.remove(&name)?;
    }
    if header.nvram {
        files.push(open(file::NVRAM)?);
    }
    Ok(files)
}

/// A bitmap of a block node.
#[derive(Debug, Clone, PartialEq)]
struct Bitmap {
    disk: String,
    name: String,
    /// The size of the changes that it records.
    bytes: u64,
}

/// Returns the bitmaps of all block nodes.
async fn bitmaps(qmp: &Qmp) -> Result<Vec<Bitmap>> {
    Ok(parse_bitmaps(&qmp.execute("query-named-block-nodes", json!({ "flat": true })).await?))
}

fn parse_bitmaps(nodes: &Value) -> Vec<Bitmap> {
    let mut found = Vec::new();
    for node in nodes.as_array().into_iter().flatten() {
        let disk = node["node-name"].as_str().unwrap_or_default();
        let bitmaps = node["dirty-bitmaps"].as_array().into_iter().flatten();
        found.extend(bitmaps.filter_map(|bitmap| {
            let (name, bytes) = (bitmap["name"].as_str()?.to_owned(), bitmap["count"].as_u64()?);
            Some(Bitmap { disk: disk.to_owned(), name, bytes })
        }));
    }
    found
}

/// Returns how many bytes of disks have changed since the copy that the replica has, if all disks have a bitmap.
pub(super) async fn lag(qmp: &Qmp, disks: &[String]) -> Result<Option<u64>> {
    Ok(sum_changes(&bitmaps(qmp).await?, disks))
}

fn sum_changes(bitmaps: &[Bitmap], disks: &[String]) -> Option<u64> {
    let changes = |disk: &String| {
        let own =
            bitmaps.iter().filter(|bitmap| bitmap.disk == *disk && bitmap.name.starts_with(BITMAP_PREFIX));
        // While the next copy is sent, its bitmap records only the changes since it began.
        own.map(|bitmap| bitmap.bytes).max()
    };
    disks.iter().map(changes).sum()
}

/// Removes the bitmaps of copies from disks, except those in `keep`.
async fn remove_bitmaps(qmp: &Qmp, disks: &[String], keep: &[String]) -> Result<()> {
    for Bitmap { disk, name, .. } in bitmaps(qmp).await? {
        if disks.contains(&disk) && name.starts_with(BITMAP_PREFIX) && !keep.contains(&name) {
            qmp.execute("block-dirty-bitmap-remove", json!({ "node": disk, "name": name })).await?;
        }
    }
    Ok(())
}

/// Sends a copy, and returns the number of bytes when the replica has committed it.
async fn send(stream: &mut UnixStream, header: &CopyHeader, files: Vec<File>) -> Result<u64> {
    send_message(stream, header).await?;
    let mut sent = 0;
    let mut buffer = vec![0; BUFFER_SIZE];
    for file in files {
        let size = file.metadata().map_err(io_error("failed to inspect the copy of a disk"))?.size();
        let mut file = tokio::fs::File::from_std(file);
        within(TRANSFER_TIMEOUT, stream.write_u64(size)).await?;
        let mut left = size;
        while left > 0 {
            let chunk = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            file.read_exact(&mut buffer[..chunk])
                .await
                .map_err(io_error("failed to read the copy of a disk"))?;
            within(TRANSFER_TIMEOUT, stream.write_all(&buffer[..chunk])).await?;
            left -= chunk as u64;
        }
        sent += size;
    }
    wait_committed(stream).await?;
    Ok(sent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lag_is_the_sum_of_the_changes_since_the_committed_copy() {
        let nodes = json!([
            { "node-name": "vda", "dirty-bitmaps": [
                { "name": "replica-old", "count": 3 << 16 }, { "name": "replica-new", "count": 1 << 16 },
                { "name": "another", "count": 9 << 16 },
            ] },
            { "node-name": "vdb", "dirty-bitmaps": [{ "name": "replica-old", "count": 0 }] },
            { "node-name": "vdc" },
        ]);
        let bitmaps = parse_bitmaps(&nodes);
        let disks = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(sum_changes(&bitmaps, &disks(&["vda", "vdb"])), Some(3 << 16));
        assert_eq!(sum_changes(&bitmaps, &disks(&["vda", "vdc"])), None, "the next copy is full");
    }
}
