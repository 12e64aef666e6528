//! The source of a live migration. See docs/decisions/0070.
//!
//! ```text
//! disks: mirror jobs over NBD ─▶ ready      memory: pre-copy ─▶ pre-switchover, the guest is stopped
//! mirror jobs end ─▶ devices are sent ─▶ completed: the target has loaded everything ─▶ the instance is moved
//! ```
//!
//! Up to `completed` QEMU resumes the guest itself if anything fails. From then on only this daemon does, and only if the
//! instance was not moved. Jobs, block nodes and sockets are named `mirror-…`, so that those of an earlier daemon can be
//! found and removed.
//!
//! A guest without KVM is stopped before its memory is copied, and only this daemon or the next one resumes it: a file marks
//! such a VM.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_types::migration::{
    DEFAULT_DOWNTIME_LIMIT, MigrationChannel, MigrationConnection, MigrationDriver, MigrationProgress,
    MigrationSettings, SwitchOver,
};
use muster_types::vm::VmPower;
use muster_types::{Error, Result};
use serde_json::{Value, json};
use tokio::net::{UnixListener, UnixStream};

use super::hypervisor::blocking;
use super::lifecycle::{RunningVm, Vm};
use super::migration_files;
use super::migration_jobs::{
    JOB_POLL_INTERVAL, MEMORY_POLL_INTERVAL, MIRROR_PREFIX, cancel, find_job, is_kvm_enabled, wait_concluded,
};
use super::qmp::Qmp;
use crate::files::io_error;
use crate::vm_socket;

/// The name of the file descriptor that carries the memory.
pub(super) const MEMORY_FD: &str = "migration";

/// How often progress is reported.
pub(super) const REPORT_INTERVAL: Duration = Duration::from_millis(250);
/// How long the target may take to load the state of the devices.
const SWITCH_OVER_TIMEOUT: Duration = Duration::from_secs(60);
/// The bandwidth in bytes per second that stands for "unlimited".
const UNLIMITED_BANDWIDTH: u64 = 1 << 40;

const BUFFER_SIZE: usize = 256 << 10;

/// Cancels the migration when it is dropped.
struct CancelOnDrop(Option<Arc<Vm>>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        let Some(vm) = self.0.take() else { return };
        tokio::spawn(async move { cancel_failed(&vm).await });
    }
}

/// Cancels a migration that has failed, after which the guest continues.
async fn cancel_failed(vm: &Vm) {
    let cancelled = match vm.running().map(|running| running.qmp()) {
        Some(Ok(qmp)) => cancel(&qmp, &vm.dir, false).await,
        Some(Err(error)) => Err(error),
        None => Ok(()),
    };
    if let Err(error) = cancelled {
        tracing::warn!(vm = %vm.id, %error, "failed to cancel migration");
    }
}

/// Migrates a VM, and returns for how many milliseconds its guest was stopped.
pub(super) async fn migrate(
    vm: &Arc<Vm>,
    settings: &MigrationSettings,
    driver: &dyn MigrationDriver,
) -> Result<u64> {
    // A snapshot would not find its disks at the target.
    let _snapshot = vm.snapshot_lock.lock().await;
    let running = vm.require_running()?;
    let qmp = running.qmp()?;
    if running.record().hotplugged {
        return Err(Error::Conflict(
            "interfaces were attached since the instance was started: power it off and on before you migrate it".into(),
        ));
    }
    cancel(&qmp, &vm.dir, false).await?;
    let is_on = vm.power() == VmPower::On;
    let mut guard = CancelOnDrop(Some(vm.clone()));
    let copied = async {
        let disk_bytes = copy_disks(vm, &running, &qmp, settings, driver).await?;
        let files = migration_files::connect(driver).await?;
        let stopped_early = stop_emulated(vm, &qmp).await?;
        copy_memory(vm, &qmp, settings, disk_bytes, driver).await?;
        let is_emulated = stopped_early.is_some();
        let stopped = stopped_early.unwrap_or_else(Instant::now);
        driver.prepare_switch_over().await?;
        end_mirrors(&qmp, &running.record().disks).await?;
        complete(&qmp).await?;
        Ok((stopped, files, is_emulated))
    };
    let (stopped, files, is_emulated) = match copied.await {
        Ok(copied) => copied,
        Err(error) => {
            guard.0 = None;
            cancel_failed(vm).await;
            let _ = vm.refresh_power(&running).await;
            return Err(error);
        }
    };
    // The guest stays stopped unless it certainly does not run on the target.
    guard.0 = None;
    match driver.switch_over().await? {
        SwitchOver::Moved => {
            let downtime = u64::try_from(stopped.elapsed().as_millis()).unwrap_or(u64::MAX);
            migration_files::send_console(vm, files).await;
            Ok(downtime)
        }
        SwitchOver::Refused(reason) => {
            // One that was stopped may have been paused by request meanwhile.
            if is_on && (!is_emulated || vm.dir.is_stopped_for_migration()) {
                qmp.execute("cont", json!({})).await?;
            }
            vm.dir.clear_stopped_for_migration()?;
            let _ = vm.refresh_power(&running).await;
            Err(Error::Conflict(reason))
        }
    }
}

/// Stops a guest that runs without KVM, and returns when: QEMU before 9.0 misses changes of its memory that translated code makes
/// while the memory is copied, and the target would run with stale pages.
async fn stop_emulated(vm: &Vm, qmp: &Qmp) -> Result<Option<Instant>> {
    if is_kvm_enabled(qmp).await? || vm.power() != VmPower::On {
        return Ok(None);
    }
    // Before it is stopped, so that a daemon that finds it stopped knows why.
    vm.dir.mark_stopped_for_migration()?;
    let stopped = Instant::now();
    qmp.execute("stop", json!({})).await?;
    Ok(Some(stopped))
}

fn mirror_name(disk: &str) -> String {
    format!("{MIRROR_PREFIX}{disk}")
}

/// Starts to mirror all disks, and returns their size in bytes when they are in sync. From then on every write goes to both.
async fn copy_disks(
    vm: &Vm,
    running: &RunningVm,
    qmp: &Qmp,
    settings: &MigrationSettings,
    driver: &dyn MigrationDriver,
) -> Result<u64> {
    let record = running.record();
    for disk in &record.disks {
        let name = mirror_name(disk);
        add_mirror_target(vm, qmp, disk, record.uid, driver).await?;
        let job = json!({
            "job-id": name, "device": disk, "target": name, "sync": "top", "copy-mode": "write-blocking",
            // 0 is unlimited. The disks are copied at the same time.
            "speed": bandwidth(settings).map_or(0, |limit| (limit / record.disks.len() as u64).max(1)),
            // Otherwise the job is deleted together with its result.
            "auto-dismiss": false,
        });
        qmp.execute("blockdev-mirror", job).await?;
    }
    let mut report = Instant::now();
    loop {
        let jobs = qmp.execute("query-jobs", json!({})).await?;
        let mut progress = MigrationProgress::default();
        let mut is_ready = true;
        for disk in &record.disks {
            let job = find_job(&jobs, &mirror_name(disk))?;
            match job["status"].as_str() {
                Some("ready") => {}
                Some("concluded") => return Err(mirror_error(disk, job)),
                _ => is_ready = false,
            }
            progress.done += job["current-progress"].as_u64().unwrap_or_default();
            progress.total += job["total-progress"].as_u64().unwrap_or_default();
        }
        if is_ready {
            return Ok(progress.total);
        }
        if report.elapsed() >= REPORT_INTERVAL {
            report = Instant::now();
            driver.report_progress(progress).await?;
        }
        tokio::time::sleep(JOB_POLL_INTERVAL).await;
    }
}

fn mirror_error(disk: &str, job: &Value) -> Error {
    let reason = job["error"].as_str().unwrap_or("the job ended");
    Error::Unavailable(format!("failed to copy disk {disk} to the target: {reason}"))
}

/// Adds the disk of the target as a block node. QEMU has no network: it connects to a socket of this daemon.
async fn add_mirror_target(
    vm: &Vm,
    qmp: &Qmp,
    disk: &str,
    uid: Option<u32>,
    driver: &dyn MigrationDriver,
) -> Result<()> {
    let connection = MigrationConnection { channel: MigrationChannel::Disk, display_password: None };
    let target = driver.connect(connection).await?;
    let socket_error = || io_error("failed to create VM socket");
    let mut target = UnixStream::from_std(target).map_err(socket_error())?;
    let (dir, name) = (vm.dir.clone(), mirror_name(disk));
    let socket = name.clone();
    let listener = blocking(move || {
        let listener = vm_socket::listen(dir.path(), &socket).map_err(socket_error())?;
        dir.set_owner(&socket, uid)?;
        listener.set_nonblocking(true).map_err(socket_error())?;
        Ok(listener)
    })
    .await?;
    let listener = UnixListener::from_std(listener).map_err(socket_error())?;
    let node = json!({
        "driver": "nbd", "node-name": name, "server": { "type": "unix", "path": name }, "export": disk,
        "discard": "unmap",
    });
    let accept = async move {
        let (mut qemu, _) = listener.accept().await.map_err(io_error("QEMU does not connect"))?;
        tokio::spawn(async move {
            // It ends when QEMU closes the node, or with the connection to the target, which ends the job.
            let _ =
                tokio::io::copy_bidirectional_with_sizes(&mut qemu, &mut target, BUFFER_SIZE, BUFFER_SIZE)
                    .await;
        });
        Ok(())
    };
    let ((), _) = tokio::try_join!(accept, qmp.execute("blockdev-add", node))?;
    vm.dir.remove(&mirror_name(disk))
}

/// Sets the capabilities of a migration, which both sides must have.
pub(super) async fn set_capabilities(qmp: &Qmp, auto_converge: bool) -> Result<()> {
    let capabilities: Vec<Value> = [
        // The source completes only after the target has loaded everything.
        ("return-path", true),
        ("pause-before-switchover", true),
        ("auto-converge", auto_converge),
    ]
    .into_iter()
    .map(|(capability, state)| json!({ "capability": capability, "state": state }))
    .collect();
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": capabilities })).await.map(drop)
}

/// Returns the maximum bandwidth in bytes per second.
pub(super) fn bandwidth(settings: &MigrationSettings) -> Option<u64> {
    settings.bandwidth_limit_mbps.map(|limit| limit.saturating_mul(1_000_000 / 8))
}

/// Returns the parameters of QEMU for a migration.
fn parameters(settings: &MigrationSettings) -> Value {
    json!({
        "downtime-limit": settings.downtime_limit_ms.unwrap_or(DEFAULT_DOWNTIME_LIMIT),
        "max-bandwidth": bandwidth(settings).unwrap_or(UNLIMITED_BANDWIDTH).min(UNLIMITED_BANDWIDTH),
    })
}

/// Copies the memory until so little is left that the guest is stopped.
async fn copy_memory(
    vm: &Vm,
    qmp: &Qmp,
    settings: &MigrationSettings,
    disk_bytes: u64,
    driver: &dyn MigrationDriver,
) -> Result<()> {
    set_capabilities(qmp, settings.auto_converge).await?;
    qmp.execute("migrate-set-parameters", parameters(settings)).await?;
    let dir = vm.dir.clone();
    let display_password = blocking(move || Ok(dir.display_password())).await?;
    let connection = MigrationConnection { channel: MigrationChannel::Memory, display_password };
    let target = driver.connect(connection).await?;
    qmp.send_fd(MEMORY_FD, target.as_fd()).await?;
    drop(target);
    qmp.execute("migrate", json!({ "uri": format!("fd:{MEMORY_FD}") })).await?;
    let mut report = Instant::now();
    loop {
        let status = qmp.execute("query-migrate", json!({})).await?;
        match status["status"].as_str() {
            Some("pre-switchover") => return Ok(()),
            Some("failed" | "cancelled" | "completed") => return Err(memory_error(&status)),
            _ => {}
        }
        if report.elapsed() >= REPORT_INTERVAL {
            report = Instant::now();
            let bytes = |name: &str| status["ram"][name].as_u64().unwrap_or_default();
            let copied = bytes("total").saturating_sub(bytes("remaining"));
            let progress =
                MigrationProgress { done: disk_bytes + copied, total: disk_bytes + bytes("total") };
            driver.report_progress(progress).await?;
        }
        tokio::time::sleep(MEMORY_POLL_INTERVAL).await;
    }
}

fn memory_error(status: &Value) -> Error {
    let reason = status["error-desc"].as_str().unwrap_or("the target could not load it");
    Error::Unavailable(format!("failed to copy the memory to the target: {reason}"))
}

/// Ends the mirror jobs when the target has every write. The guest is stopped.
async fn end_mirrors(qmp: &Qmp, disks: &[String]) -> Result<()> {
    for disk in disks {
        // A job that is ready is not cancelled by this, but completes without switching to its target.
        qmp.execute("block-job-cancel", json!({ "device": mirror_name(disk) })).await?;
    }
    for disk in disks {
        let name = mirror_name(disk);
        let job = wait_concluded(qmp, &name, MEMORY_POLL_INTERVAL).await?;
        if job["error"].is_string() {
            return Err(mirror_error(disk, &job));
        }
        qmp.execute("job-dismiss", json!({ "id": name })).await?;
        qmp.execute("blockdev-del", json!({ "node-name": name })).await?;
    }
    Ok(())
}

/// Sends the state of the devices, and returns when the target has loaded it.
async fn complete(qmp: &Qmp) -> Result<()> {
    qmp.execute("migrate-continue", json!({ "state": "pre-switchover" })).await?;
    let deadline = Instant::now() + SWITCH_OVER_TIMEOUT;
    loop {
        let status = qmp.execute("query-migrate", json!({})).await?;
        match status["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => return Err(memory_error(&status)),
            _ if Instant::now() > deadline => {
                return Err(Error::Unavailable("the target does not confirm that it has the devices".into()));
            }
            _ => tokio::time::sleep(MEMORY_POLL_INTERVAL).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_migration_are_in_the_units_of_qemu() {
        let unlimited = parameters(&MigrationSettings::default());
        assert_eq!(unlimited, json!({ "downtime-limit": 300, "max-bandwidth": UNLIMITED_BANDWIDTH }));
        let settings = MigrationSettings {
            downtime_limit_ms: Some(50),
            bandwidth_limit_mbps: Some(80),
            auto_converge: true,
        };
        assert_eq!(parameters(&settings), json!({ "downtime-limit": 50, "max-bandwidth": 10_000_000 }));
    }

    #[test]
    fn failed_job_names_the_disk_and_the_reason() {
        let jobs = json!([{ "id": "mirror-vda", "status": "concluded", "error": "No space left on device" }]);
        let error = mirror_error("vda", find_job(&jobs, "mirror-vda").unwrap()).to_string();
        assert!(error.contains("disk vda") && error.contains("No space left"), "{error}");
        assert!(find_job(&jobs, "mirror-vdb").is_err());
    }
}
