//! The source of a replica: copies of the disks of a running VM. See docs/decisions/0074.
//!
//! ```text
//! which copy has the replica? ─▶ one transaction: a new bitmap, and a backup job of the changes since that copy, for each disk
//! ─▶ the files are sent ─▶ the replica has committed them ─▶ the bitmap of the earlier copy is removed
//! ```
//!
//! A bitmap has the name of the copy since which it records changes. So the copy that the replica really has decides which bitmap is
//! used, whichever process was killed; without its bitmap, a full copy is sent. The jobs write to files of this host, so that the
//! guest never waits for another one.

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
use super::hypervisor::blocking;
use super::lifecycle::{RunningVm, Vm};
use super::qmp::Qmp;
use super::snapshot::disk_sizes;
use super::vm_dir::{VmDir, file};
use crate::files::io_error;
use crate::image::qcow2_writer;
use crate::replica_messages::{
    CopyHeader, TRANSFER_TIMEOUT, receive_status, send_message, wait_committed, within,
};

const BITMAP_PREFIX: &str = "replica-";
const BUFFER_SIZE: usize = 1 << 20;
/// How long the connection may be idle while the disks are copied, before the target closes it.
const MAX_IDLE_TIME: Duration = Duration::from_secs(30);

/// Copies the disks of a VM to its replica.
pub(super) async fn copy(vm: &Arc<Vm>, driver: &dyn ReplicaDriver) -> Result<ReplicaCopy> {
    let (mut stream, status) = receive_status(driver.connect().await?).await?;
    let connected = Instant::now();
    let running = vm.require_running()?;
    let qmp = running.qmp()?;
    let (header, files) = take(vm, &running, &qmp, status.copy, driver).await?;
    if connected.elapsed() > MAX_IDLE_TIME {
        let (another, now) = receive_status(driver.connect().await?).await?;
        if now != status {
            return Err(Error::Unavailable("the replica received another copy meanwhile".into()));
        }
        stream = another;
    }
    let bytes = send(&mut stream, &header, files).await?;
    // If this fails, the next copy removes the bitmap.
    let _ = remove_bitmaps(&qmp, &header.disks, &[bitmap_name(header.copy)]).await;
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
    let has = |disk: &String, name: &str| bitmaps.contains(&(disk.clone(), name.to_owned()));
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

/// Returns the bitmaps of all block nodes.
async fn bitmaps(qmp: &Qmp) -> Result<Vec<(String, String)>> {
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true })).await?;
    let mut found = Vec::new();
    for node in nodes.as_array().into_iter().flatten() {
        let bitmaps = node["dirty-bitmaps"].as_array().into_iter().flatten();
        let names = bitmaps.filter_map(|bitmap| bitmap["name"].as_str());
        let name = node["node-name"].as_str().unwrap_or_default();
        found.extend(names.map(|bitmap| (name.to_owned(), bitmap.to_owned())));
    }
    Ok(found)
}

/// Removes the bitmaps of copies from disks, except those in `keep`.
async fn remove_bitmaps(qmp: &Qmp, disks: &[String], keep: &[String]) -> Result<()> {
    for (disk, bitmap) in bitmaps(qmp).await? {
        if disks.contains(&disk) && bitmap.starts_with(BITMAP_PREFIX) && !keep.contains(&bitmap) {
            qmp.execute("block-dirty-bitmap-remove", json!({ "node": disk, "name": bitmap })).await?;
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
