//! QEMU's backup jobs, which copy the disks of a running VM.
//!
//! Jobs, block nodes and files of a copy are named `copy-…`, so that those of an earlier daemon can be found and removed.

use std::time::Duration;

use muster_types::{Error, Result};
use serde_json::{Value, json};

use super::qemu_log;
use super::qmp::Qmp;
use super::vm_dir::VmDir;

const COPY_PREFIX: &str = "copy-";

/// The interval at which a job is polled in case its event was missed.
const JOB_POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Returns the name of the copy of a disk: of its file, its block node and its job.
pub(super) fn copy_name(device: &str) -> String {
    format!("{COPY_PREFIX}{device}")
}

/// Returns the name of the lower block node of a copy.
fn file_node(name: &str) -> String {
    format!("{name}-file")
}

/// Adds the block nodes of a copy, whose file must exist.
pub(super) async fn add_target(qmp: &Qmp, name: &str) -> Result<()> {
    let file = json!({ "driver": "file", "filename": name, "node-name": file_node(name) });
    qmp.execute("blockdev-add", file).await?;
    let image = json!({ "driver": "qcow2", "file": file_node(name), "node-name": name, "discard": "unmap" });
    qmp.execute("blockdev-add", image).await?;
    Ok(())
}

/// Removes the block nodes of a copy.
pub(super) async fn remove_target(qmp: &Qmp, name: &str) -> Result<()> {
    for node in [name.to_owned(), file_node(name)] {
        qmp.execute("blockdev-del", json!({ "node-name": node })).await?;
    }
    Ok(())
}

/// Waits until a job has completed.
pub(super) async fn wait(qmp: &Qmp, job: &str) -> Result<()> {
    loop {
        let jobs = qmp.execute("query-jobs", json!({})).await?;
        let status = jobs.as_array().and_then(|jobs| jobs.iter().find(|found| found["id"] == json!(job)));
        let status = status.ok_or_else(|| Error::Unavailable(format!("QEMU has no job {job}")))?;
        if status["status"] == json!("concluded") {
            let error = status["error"].as_str().map(str::to_owned);
            qmp.execute("job-dismiss", json!({ "id": job })).await?;
            return match error {
                None => Ok(()),
                Some(error) if qemu_log::is_disk_full(&error) => Err(Error::InsufficientCapacity(
                    "the node does not have enough disk space for the copy".into(),
                )),
                Some(error) => Err(Error::Unavailable(format!("failed to copy a disk: {error}"))),
            };
        }
        let _ = tokio::time::timeout(JOB_POLL_INTERVAL, qmp.job_changed()).await;
    }
}

/// Cancels all copies of a VM, and removes their block nodes and files.
pub(super) async fn cancel_all(qmp: &Qmp, dir: &VmDir) -> Result<()> {
    let copy_name_in =
        |value: &Value| value.as_str().filter(|name| name.starts_with(COPY_PREFIX)).map(str::to_owned);
    let jobs = qmp.execute("query-jobs", json!({})).await?;
    for job in jobs.as_array().into_iter().flatten() {
        let Some(id) = copy_name_in(&job["id"]) else { continue };
        if job["status"] != json!("concluded") {
            qmp.execute("job-cancel", json!({ "id": id })).await?;
        }
        // A cancelled job ends with an error.
        let _ = wait(qmp, &id).await;
    }
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true })).await?;
    let nodes = nodes.as_array().into_iter().flatten();
    let mut nodes: Vec<String> = nodes.filter_map(|node| copy_name_in(&node["node-name"])).collect();
    // The upper nodes first, because they use the lower ones.
    nodes.sort_by_key(|name| name.ends_with("-file"));
    for node in nodes {
        qmp.execute("blockdev-del", json!({ "node-name": node })).await?;
    }
    remove_files(dir)
}

/// Removes the files of incomplete copies.
pub(super) fn remove_files(dir: &VmDir) -> Result<()> {
    dir.file_names()?
        .iter()
        .filter(|name| name.starts_with(COPY_PREFIX))
        .try_for_each(|name| dir.remove(name))
}
