//! The jobs of migrations in QEMU: finding, awaiting and cancelling them. See docs/decisions/0070.

use std::time::{Duration, Instant};

use muster_types::{Error, Result};
use serde_json::{Value, json};

use super::qmp::Qmp;
use super::vm_dir::VmDir;

/// The prefix of the names of mirror jobs, and of their block nodes and sockets.
pub(super) const MIRROR_PREFIX: &str = "mirror-";

/// The interval at which jobs are polled.
pub(super) const JOB_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The interval at which the copy of the memory is polled. The guest is stopped for as long at its end.
pub(super) const MEMORY_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long a cancelled migration or job may take to end.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(20);

/// Returns whether a VM has received a migration completely, and may continue.
pub(super) async fn is_loaded(qmp: &Qmp, dir: &VmDir) -> bool {
    let status = qmp.execute("query-migrate", json!({})).await;
    dir.is_incoming() && status.is_ok_and(|status| status["status"] == json!("completed"))
}

pub(super) fn find_job<'a>(jobs: &'a Value, name: &str) -> Result<&'a Value> {
    let job = jobs.as_array().and_then(|jobs| jobs.iter().find(|job| job["id"] == json!(name)));
    job.ok_or_else(|| Error::Unavailable(format!("QEMU has no job {name}")))
}

/// Waits until a job has ended, and returns it.
pub(super) async fn wait_concluded(qmp: &Qmp, name: &str, interval: Duration) -> Result<Value> {
    let deadline = Instant::now() + CANCEL_TIMEOUT;
    loop {
        let jobs = qmp.execute("query-jobs", json!({})).await?;
        let job = find_job(&jobs, name)?;
        if job["status"] == json!("concluded") {
            return Ok(job.clone());
        }
        if Instant::now() > deadline {
            return Err(Error::Unavailable(format!("the job {name} of QEMU does not end")));
        }
        tokio::time::sleep(interval).await;
    }
}

/// Cancels a migration, ends its jobs, and removes its block nodes and sockets. QEMU resumes the guest, unless the target has
/// received everything: then `resume` does.
pub(super) async fn cancel(qmp: &Qmp, dir: &VmDir, resume: bool) -> Result<()> {
    let deadline = Instant::now() + CANCEL_TIMEOUT;
    loop {
        let status = qmp.execute("query-migrate", json!({})).await?;
        match status["status"].as_str() {
            None | Some("none" | "completed" | "failed" | "cancelled") => break,
            Some("cancelling") => {}
            Some(_) => drop(qmp.execute("migrate_cancel", json!({})).await?),
        }
        if Instant::now() > deadline {
            return Err(Error::Unavailable("QEMU does not cancel the migration".into()));
        }
        tokio::time::sleep(MEMORY_POLL_INTERVAL).await;
    }
    let is_mirror = |value: &Value| value.as_str().is_some_and(|name| name.starts_with(MIRROR_PREFIX));
    let jobs = qmp.execute("query-jobs", json!({})).await?;
    for job in jobs.as_array().into_iter().flatten().filter(|job| is_mirror(&job["id"])) {
        let Some(name) = job["id"].as_str() else { continue };
        if job["status"] != json!("concluded") {
            // It may end at the same time.
            let _ = qmp.execute("block-job-cancel", json!({ "device": name, "force": true })).await;
        }
        wait_concluded(qmp, name, JOB_POLL_INTERVAL).await?;
        qmp.execute("job-dismiss", json!({ "id": name })).await?;
    }
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true })).await?;
    for node in nodes.as_array().into_iter().flatten().filter(|node| is_mirror(&node["node-name"])) {
        qmp.execute("blockdev-del", json!({ "node-name": node["node-name"] })).await?;
    }
    for name in dir.file_names()?.iter().filter(|name| name.starts_with(MIRROR_PREFIX)) {
        dir.remove(name)?;
    }
    let status = qmp.execute("query-status", json!({})).await?;
    if resume && status["status"] == json!("postmigrate") {
        qmp.execute("cont", json!({})).await?;
    }
    Ok(())
}
