//! Copies of a machine's disks and of its screen.
//!
//! While a machine is on or paused, QEMU copies all of its disks as they are at one moment, and goes on. Jobs, layers
//! and files of a copy are called `copy-…`, so that those of a daemon that went meanwhile are found and cleared away.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use muster_types::storage::Draft;
use muster_types::vm::SnapshotDisk;
use muster_types::{Error, Result};
use serde_json::{Value, json};

use super::folder::Folder;
use super::hardware::file;
use super::life::{Live, Machine};
use super::qmp::Qmp;
use super::{Inner, blocking, disks};
use crate::image::qcow2_writer;
use crate::storage::failed;

/// The name of the firmware's memory among the disks.
const NVRAM: &str = "nvram";

const PICTURE: &str = "screen.png";

const PREFIX: &str = "copy-";

/// How often a job is looked at of whose end nobody heard.
const LOOK: Duration = Duration::from_secs(5);

pub(super) async fn snapshot(
    inner: &Inner,
    machine: &Arc<Machine>,
    disks: &[SnapshotDisk],
    compress: bool,
) -> Result<()> {
    // Copies have the names of their disks, so there is one at a time.
    let _alone = machine.copying.lock().await;
    let (nvram, disks): (Vec<&SnapshotDisk>, Vec<&SnapshotDisk>) =
        disks.iter().partition(|disk| disk.device == NVRAM);
    match machine.live() {
        Some(live) if !disks.is_empty() => running(inner, machine, &live, &disks, compress).await?,
        Some(_) => {}
        None => {
            for disk in &disks {
                let to = machine.folder.file(&copy_of(disk));
                let how = (disk.thin, compress);
                disks::snapshot_off(&inner.storage, machine.folder.path(), &disk.device, how, &to).await?;
                inner.storage.adopt_draft(disk.draft, &to).await?;
            }
        }
    }
    for memory in nvram {
        let (from, to) = (machine.folder.file(file::NVRAM), machine.folder.file(&copy_of(memory)));
        let copy = to.clone();
        blocking(move || {
            if !from.exists() {
                return Err(Error::Conflict("the machine has no memory of a firmware".into()));
            }
            fs::copy(from, copy).map(drop).map_err(failed("the memory of the firmware cannot be copied"))
        })
        .await?;
        inner.storage.adopt_draft(memory.draft, &to).await?;
    }
    Ok(())
}

fn copy_of(disk: &SnapshotDisk) -> String {
    format!("{PREFIX}{}", disk.device)
}

fn layer_of(name: &str) -> String {
    format!("{name}-file")
}

/// Copies the disks of a machine that QEMU holds.
async fn running(
    inner: &Inner,
    machine: &Arc<Machine>,
    live: &Live,
    disks: &[&SnapshotDisk],
    compress: bool,
) -> Result<()> {
    let qmp = live.qmp()?;
    let record = live.record();
    if let Some(disk) = disks.iter().find(|disk| !record.disks.contains(&disk.device)) {
        return Err(Error::Conflict(format!("the machine has no disk {}", disk.device)));
    }
    clear(&qmp, machine).await?;
    let copied = async {
        let sizes = sizes(&qmp).await?;
        for disk in disks {
            let name = copy_of(disk);
            let size = *sizes
                .get(&disk.device)
                .ok_or_else(|| Error::Conflict(format!("QEMU has no disk {}", disk.device)))?;
            let (target, target_name, user) = (machine.clone(), name.clone(), record.uid);
            blocking(move || {
                qcow2_writer::write(&target.folder.file(&target_name), size, None, None)
                    .map_err(failed("a copy cannot be made"))?;
                target.folder.give(&target_name, user)
            })
            .await?;
            let layer = json!({ "driver": "file", "filename": name, "node-name": layer_of(&name) });
            qmp.execute("blockdev-add", layer).await?;
            let image =
                json!({ "driver": "qcow2", "file": layer_of(&name), "node-name": name, "discard": "unmap" });
            qmp.execute("blockdev-add", image).await?;
        }
        let action = |disk: &&SnapshotDisk| {
            let name = copy_of(disk);
            json!({ "type": "blockdev-backup", "data": {
                "job-id": name, "device": disk.device, "target": name, "compress": compress,
                "sync": if disk.thin { "top" } else { "full" },
                // Otherwise it takes with it how it ended.
                "auto-dismiss": false,
            } })
        };
        let actions: Vec<Value> = disks.iter().map(action).collect();
        qmp.execute("transaction", json!({ "actions": actions })).await?;
        for disk in disks {
            finish(&qmp, &copy_of(disk)).await?;
        }
        Ok(())
    };
    let result: Result<()> = copied.await;
    if let Err(error) = result {
        // What is left is cleared away by the next one, too.
        let _ = clear(&qmp, machine).await;
        return Err(error);
    }
    for disk in disks {
        let name = copy_of(disk);
        for layer in [name.clone(), layer_of(&name)] {
            qmp.execute("blockdev-del", json!({ "node-name": layer })).await?;
        }
        inner.storage.adopt_draft(disk.draft, &machine.folder.file(&name)).await?;
    }
    Ok(())
}

/// The sizes of the disks, by their names.
async fn sizes(qmp: &Qmp) -> Result<std::collections::BTreeMap<String, u64>> {
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true })).await?;
    let nodes = nodes.as_array().map(Vec::as_slice).unwrap_or_default().iter();
    let size = |node: &Value| {
        Some((node["node-name"].as_str()?.to_owned(), node["image"]["virtual-size"].as_u64()?))
    };
    Ok(nodes.filter_map(size).collect())
}

/// Waits for a job.
async fn finish(qmp: &Qmp, job: &str) -> Result<()> {
    loop {
        let jobs = qmp.execute("query-jobs", json!({})).await?;
        let found = jobs.as_array().and_then(|jobs| jobs.iter().find(|found| found["id"] == json!(job)));
        let found = found.ok_or_else(|| Error::Unavailable(format!("QEMU forgot the copy {job}")))?;
        if found["status"] == json!("concluded") {
            let error = found["error"].as_str().map(str::to_owned);
            qmp.execute("job-dismiss", json!({ "id": job })).await?;
            return match error {
                None => Ok(()),
                Some(error) if error.contains("No space left") => {
                    Err(Error::Insufficient("the disk of the node has no room for the copy".into()))
                }
                Some(error) => Err(Error::Unavailable(format!("a disk is not copied: {error}"))),
            };
        }
        let _ = tokio::time::timeout(LOOK, qmp.job_moved()).await;
    }
}

/// Removes what an earlier copy left: jobs, layers, files.
pub(super) async fn clear(qmp: &Qmp, machine: &Machine) -> Result<()> {
    let ours = |value: &Value| value.as_str().is_some_and(|name| name.starts_with(PREFIX));
    let jobs = qmp.execute("query-jobs", json!({})).await?;
    for job in jobs.as_array().into_iter().flatten().filter(|job| ours(&job["id"])) {
        if job["status"] != json!("concluded") {
            qmp.execute("job-cancel", json!({ "id": job["id"] })).await?;
        }
        let _ = finish(qmp, job["id"].as_str().unwrap_or_default()).await;
    }
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true })).await?;
    let nodes = nodes.as_array().into_iter().flatten().map(|node| &node["node-name"]);
    let mut nodes: Vec<&Value> = nodes.filter(|name| ours(name)).collect();
    // The upper layers first, whose names are shorter.
    nodes.sort_by_key(|name| name.as_str().map(|name| name.ends_with("-file")));
    for node in nodes {
        qmp.execute("blockdev-del", json!({ "node-name": node })).await?;
    }
    sweep(&machine.folder)
}

/// Removes the files that an earlier copy left.
pub(super) fn sweep(folder: &Folder) -> Result<()> {
    let names = folder.names();
    names.iter().filter(|name| name.starts_with(PREFIX)).try_for_each(|name| folder.remove(name))
}

/// Puts a picture of the screen into a draft.
pub(super) async fn screenshot(inner: &Inner, machine: &Arc<Machine>, draft: Draft) -> Result<()> {
    let live = machine.require_live()?;
    let qmp = live.qmp()?;
    let path = machine.folder.file(PICTURE);
    let (target, user) = (machine.clone(), live.record().uid);
    blocking(move || {
        target.folder.remove(PICTURE)?;
        target.folder.ensure(PICTURE, user)
    })
    .await?;
    qmp.execute("screendump", json!({ "filename": PICTURE, "format": "png" })).await?;
    let size = fs::symlink_metadata(&path).map(|found| found.size()).unwrap_or(0);
    if size == 0 {
        return Err(Error::Unavailable("QEMU drew nothing".into()));
    }
    inner.storage.adopt_draft(draft, &path).await
}
