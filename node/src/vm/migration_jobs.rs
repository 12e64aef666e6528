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

pub(super) async fn is_kvm_enabled(qmp: &Qmp) -> Result<bool> {
    Ok(qmp.execute("query-kvm", json!({})).await?["enabled"] == json!(true))
}

/// Rejects to resume a guest while its memory is copied and it must not change, see `stop_emulated` in `migration_outgoing.rs`.
pub(super) async fn require_resumable(qmp: &Qmp) -> Result<()> {
    let migration = qmp.execute("query-migrate", json!({})).await?;
    let is_copying = match migration["status"].as_str() {
        None | Some("none" | "completed" | "failed" | "cancelled") => false,
        Some(_) => !is_kvm_enabled(qmp).await?,
    };
    if is_copying {
        return Err(Error::Conflict(
            "the memory of the instance is being copied: wait for its migration, or cancel it with `muster instance \
             cancel-migration`"
                .into(),
        ));
    }
    Ok(())
}

/// What QEMU reports about a migration that has ended, or has not begun.
#[derive(Debug, Clone, Copy)]
struct EndedMigration<'a> {
    /// The status of the guest.
    guest: &'a str,
    /// Whether the last migration of this QEMU is complete, in whichever direction.
    is_complete: bool,
}

impl EndedMigration<'_> {
    /// Returns whether the target may have received everything, and may run the guest.
    fn may_have_moved(self) -> bool {
        self.is_complete && self.guest == "postmigrate"
    }

    /// Returns whether the guest is to be resumed, because QEMU does not do so. `stopped` says whether it was stopped for the
    /// migration, and `resume` that it does not run on the target.
    fn must_resume(self, stopped: bool, resume: bool) -> bool {
        match self.may_have_moved() {
            true => resume,
            false => stopped || (resume && self.guest == "postmigrate"),
        }
    }
}

/// Cancels a migration, ends its jobs, and removes its block nodes and sockets. The guest is resumed, unless the target has
/// received everything: then only with `resume`.
pub(super) async fn cancel(qmp: &Qmp, dir: &VmDir, resume: bool) -> Result<()> {
    let deadline = Instant::now() + CANCEL_TIMEOUT;
    let (guest, is_complete) = loop {
        let migration = qmp.execute("query-migrate", json!({})).await?;
        match migration["status"].as_str() {
            None | Some("none" | "completed" | "failed" | "cancelled") => {
                let guest = qmp.execute("query-status", json!({})).await?;
                // Right after a failure QEMU has not left this status.
                if guest["status"] != json!("finish-migrate") {
                    break (guest, migration["status"] == json!("completed"));
                }
            }
            Some("cancelling") => {}
            Some(_) => drop(qmp.execute("migrate_cancel", json!({})).await?),
        }
        if Instant::now() > deadline {
            return Err(Error::Unavailable("QEMU does not cancel the migration".into()));
        }
        tokio::time::sleep(MEMORY_POLL_INTERVAL).await;
    };
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
    let ended = EndedMigration { guest: guest["status"].as_str().unwrap_or_default(), is_complete };
    if ended.must_resume(dir.is_stopped_for_migration(), resume) {
        qmp.execute("cont", json!({})).await?;
        // It continues to mark a VM that may run on the target.
        dir.clear_stopped_for_migration()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_that_may_run_on_the_target_is_resumed_only_on_request() {
        let ended = |guest, is_complete| EndedMigration { guest, is_complete };
        // It was stopped for a migration that did not start, failed, or was cancelled.
        for ended in [ended("paused", false), ended("paused", true), ended("postmigrate", false)] {
            assert!(ended.must_resume(true, false), "{ended:?}");
        }
        // The target has everything.
        assert!(!ended("postmigrate", true).must_resume(true, false));
        for stopped in [false, true] {
            assert!(ended("postmigrate", true).must_resume(stopped, true));
        }
        // QEMU has resumed it, or it was paused before.
        for guest in ["running", "paused"] {
            assert!(!ended(guest, false).must_resume(false, true), "{guest}");
        }
    }
}
