//! Self-fencing: the VMs of a node stop when its daemon has not checked in for the time of a lease, so that they can be
//! restarted on another node. A separate process enforces it, because the daemon may be frozen or dead. See
//! docs/decisions/0052.
//!
//! ```text
//! daemon ──check-in──▶ database
//!    └─ deadline ─▶ fencing-lease ◀─ reads twice a second ─ watchdog ──deadline passed──▶ kills the QEMU processes
//! ```
//!
//! The watchdog ends when the file is removed: the daemon was stopped on purpose, or fencing is off. A daemon starts a
//! watchdog if none holds the lock.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use muster_types::Result;
use nix::fcntl::{Flock, FlockArg};

use crate::files::io_error;
use crate::vm;

const LEASE_FILE: &str = "fencing-lease";
const LOCK_FILE: &str = "fencing-watchdog.lock";
/// How often the watchdog reads the lease.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The fencing lease of a node.
#[derive(Debug)]
pub(crate) struct FencingLease {
    storage_dir: PathBuf,
    duration: Duration,
}

impl FencingLease {
    pub(crate) fn new(storage_dir: &Path, duration: Duration) -> Self {
        Self { storage_dir: storage_dir.to_owned(), duration }
    }

    /// Starts a watchdog unless one runs. Returns the duration of the lease if one runs.
    pub(crate) fn ensure_watchdog(&self) -> Option<f64> {
        if is_watched(&self.storage_dir) {
            return Some(self.duration.as_secs_f64());
        }
        // The watchdog ends without a lease.
        let started = self.renew(Instant::now()).and_then(|()| {
            spawn_watchdog(&self.storage_dir).map_err(io_error("failed to start the fencing watchdog"))
        });
        if let Err(error) = started {
            tracing::warn!(%error, "VMs are not fenced");
        }
        None
    }

    /// Extends the lease of a check-in that began at `began`.
    pub(crate) fn renew(&self, began: Instant) -> Result<()> {
        let remaining = self.duration.saturating_sub(began.elapsed());
        let renewed = boot_time().and_then(|now| write_deadline(&self.storage_dir, now + remaining));
        renewed.map_err(io_error("failed to renew the fencing lease"))
    }
}

/// Removes the lease of a node, so that its watchdog ends.
pub(crate) fn end_lease(storage_dir: &Path) -> Result<()> {
    match fs::remove_file(storage_dir.join(LEASE_FILE)) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(io_error("failed to end the fencing lease")(error))
        }
        _ => Ok(()),
    }
}

/// Returns the time since the host booted, including suspension.
fn boot_time() -> io::Result<Duration> {
    let text = fs::read_to_string("/proc/uptime")?;
    let seconds = text.split_whitespace().next().and_then(|text| text.parse().ok());
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.ok_or_else(|| io::Error::other("/proc/uptime is malformed"))
}

/// Writes the deadline in place, with a constant length: a full disk must not end the lease.
fn write_deadline(storage_dir: &Path, deadline: Duration) -> io::Result<()> {
    let path = storage_dir.join(LEASE_FILE);
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    file.write_all_at(format!("{:020}\n", deadline.as_millis()).as_bytes(), 0)
}

/// Returns the deadline, or `None` without a lease.
fn read_deadline(storage_dir: &Path) -> io::Result<Option<Duration>> {
    match fs::read_to_string(storage_dir.join(LEASE_FILE)) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        // A damaged file counts as expired.
        text => Ok(Some(Duration::from_millis(text?.trim().parse().unwrap_or(0)))),
    }
}

fn open_lock(storage_dir: &Path) -> io::Result<File> {
    let path = storage_dir.join(LOCK_FILE);
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)
}

fn is_watched(storage_dir: &Path) -> bool {
    let lock = open_lock(storage_dir).map(|file| Flock::lock(file, FlockArg::LockExclusiveNonblock));
    matches!(lock, Ok(Err(_)))
}

/// Starts a watchdog in its own session, which survives the daemon.
fn spawn_watchdog(storage_dir: &Path) -> io::Result<()> {
    let mut command = Command::new("/proc/self/exe");
    command.arg("watchdog").arg(storage_dir).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let mut watchdog = command.process_group(0).spawn()?;
    // Collects its exit status.
    std::thread::Builder::new().name("watchdog".into()).spawn(move || watchdog.wait()).map(drop)
}

/// Runs the watchdog of a node until its lease is removed. Returns immediately if another one runs.
pub async fn run_watchdog(storage_dir: &Path) -> io::Result<()> {
    let Ok(_lock) = Flock::lock(open_lock(storage_dir)?, FlockArg::LockExclusiveNonblock) else {
        return Ok(());
    };
    while let Some(deadline) = read_deadline(storage_dir)? {
        if boot_time()? > deadline {
            for id in vm::kill_all(storage_dir) {
                tracing::error!(instance = %id, "the fencing lease expired: stopped the VM");
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewed_lease_ends_after_its_duration() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read_deadline(dir.path()).unwrap(), None);
        let lease = FencingLease::new(dir.path(), Duration::from_secs(30));
        let before = boot_time().unwrap();
        lease.renew(Instant::now()).unwrap();
        let deadline = read_deadline(dir.path()).unwrap().unwrap();
        assert!(deadline > before + Duration::from_secs(29) && deadline < before + Duration::from_secs(60));
        fs::write(dir.path().join(LEASE_FILE), "damaged").unwrap();
        assert_eq!(read_deadline(dir.path()).unwrap(), Some(Duration::ZERO));
        end_lease(dir.path()).unwrap();
        end_lease(dir.path()).unwrap();
        assert_eq!(read_deadline(dir.path()).unwrap(), None);
    }

    #[tokio::test]
    async fn watchdog_ends_without_lease_and_runs_once() {
        let dir = tempfile::tempdir().unwrap();
        run_watchdog(dir.path()).await.unwrap();
        write_deadline(dir.path(), Duration::from_secs(u64::MAX / 2000)).unwrap();
        let path = dir.path().to_owned();
        let watchdog = tokio::spawn(async move { run_watchdog(&path).await });
        while !is_watched(dir.path()) {
            tokio::task::yield_now().await;
        }
        run_watchdog(dir.path()).await.unwrap();
        end_lease(dir.path()).unwrap();
        watchdog.await.unwrap().unwrap();
        assert!(!is_watched(dir.path()));
    }
}
