//! Self-fencing: VMs stop when the daemon of their node has not checked in for the time of a lease, so that they can be
//! restarted on another node. A separate process enforces it, because the daemon may be frozen or dead. See
//! docs/decisions/0052.
//!
//! ```text
//! daemon ──check-in──▶ database
//!    └─ deadline ─▶ fencing-lease ◀─ reads twice a second ─ watchdog ──deadline passed──▶ kills the QEMU processes
//! ```
//!
//! The directory of a VM tells whether the watchdog stops it. The watchdog ends when the lease is removed: the daemon was
//! stopped on purpose, or no VM needs it. A VM that needs it starts only when a watchdog holds the lock.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use muster_types::{Error, Result};
use nix::fcntl::{Flock, FlockArg};
use parking_lot::Mutex;

use crate::files::io_error;
use crate::vm;

const LEASE_FILE: &str = "fencing-lease";
const LOCK_FILE: &str = "fencing-watchdog.lock";
/// How often the watchdog reads the lease.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How long a daemon waits for a watchdog that it has started, and a watchdog for its lock.
const START_TIMEOUT: Duration = Duration::from_secs(10);
const START_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The fencing lease of a node.
#[derive(Debug)]
pub(crate) struct FencingLease {
    storage_dir: PathBuf,
    duration: Duration,
    /// The end of the lease of the last check-in, in time since boot.
    deadline: Mutex<Option<Duration>>,
    /// Held while the watchdog is started, or ended by removing the lease.
    watchdog: tokio::sync::Mutex<()>,
}

impl FencingLease {
    pub(crate) fn new(storage_dir: &Path, duration: Duration) -> Self {
        Self {
            storage_dir: storage_dir.to_owned(),
            duration,
            deadline: Mutex::default(),
            watchdog: tokio::sync::Mutex::default(),
        }
    }

    /// Ensures that a watchdog runs if a VM, or each VM (`is_default`), needs one, and ends it otherwise. Returns the duration
    /// of the lease in seconds if one runs.
    pub(crate) async fn check(&self, is_default: bool) -> Option<f64> {
        let _watchdog = self.watchdog.lock().await;
        let checked = if is_default || vm::has_self_fencing(&self.storage_dir) {
            self.start_watchdog().await.map(|()| Some(self.duration.as_secs_f64()))
        } else {
            self.remove().map(|()| None)
        };
        checked.inspect_err(|error| tracing::warn!(%error, "VMs are not fenced")).ok().flatten()
    }

    /// Starts a watchdog unless one runs, and waits for it.
    pub(crate) async fn ensure_watchdog(&self) -> Result<()> {
        let _watchdog = self.watchdog.lock().await;
        self.start_watchdog().await
    }

    async fn start_watchdog(&self) -> Result<()> {
        let failed = io_error("failed to start the fencing watchdog");
        let deadline = *self.deadline.lock();
        let deadline = deadline.filter(|deadline| boot_time().is_ok_and(|now| now < *deadline));
        let deadline = deadline.ok_or_else(|| {
            Error::Unavailable("the fencing lease of the node has expired: it cannot check in".into())
        })?;
        // The watchdog ends without a lease.
        write_deadline(&self.storage_dir, deadline, true)
            .map_err(io_error("failed to create the fencing lease"))?;
        if is_watched(&self.storage_dir) {
            return Ok(());
        }
        spawn_watchdog(&self.storage_dir).map_err(failed)?;
        let started = tokio::time::timeout(START_TIMEOUT, async {
            while !is_watched(&self.storage_dir) {
                tokio::time::sleep(START_POLL_INTERVAL).await;
            }
        });
        started.await.map_err(|_| Error::Unavailable("the fencing watchdog does not start".into()))
    }

    /// Extends the lease by a check-in that began at `began`.
    pub(crate) fn renew(&self, began: Instant) -> Result<()> {
        let failed = io_error("failed to renew the fencing lease");
        let remaining = self.duration.saturating_sub(began.elapsed());
        let deadline = match boot_time() {
            Ok(now) => now + remaining,
            Err(error) => return Err(failed(error)),
        };
        *self.deadline.lock() = Some(deadline);
        match write_deadline(&self.storage_dir, deadline, false) {
            // No VM needs it.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            written => written.map_err(failed),
        }
    }

    /// Ends the lease because the daemon stops: the watchdog ends, and none is started.
    pub(crate) fn end(&self) -> Result<()> {
        *self.deadline.lock() = None;
        self.remove()
    }

    /// Removes the lease, so that the watchdog ends.
    fn remove(&self) -> Result<()> {
        match fs::remove_file(self.storage_dir.join(LEASE_FILE)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(io_error("failed to end the fencing lease")(error))
            }
            _ => Ok(()),
        }
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
fn write_deadline(storage_dir: &Path, deadline: Duration, create: bool) -> io::Result<()> {
    let path = storage_dir.join(LEASE_FILE);
    let file = OpenOptions::new().write(true).create(create).truncate(false).mode(0o600).open(path)?;
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

/// Runs the watchdog of a node until its lease is removed. Returns if another one runs.
pub async fn run_watchdog(storage_dir: &Path) -> io::Result<()> {
    // A lease that is created while this watchdog ends keeps it: the daemon has found the lock held.
    while read_deadline(storage_dir)?.is_some() {
        let Some(_lock) = acquire_lock(storage_dir).await? else { return Ok(()) };
        while let Some(deadline) = read_deadline(storage_dir)? {
            if boot_time()? > deadline {
                for id in vm::fence_all(storage_dir) {
                    tracing::error!(instance = %id, "the fencing lease expired: stopped the VM");
                }
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
    Ok(())
}

/// Acquires the lock of the watchdog. Returns `None` if another watchdog holds it. A daemon that checks whether a watchdog runs
/// holds it only for a moment.
async fn acquire_lock(storage_dir: &Path) -> io::Result<Option<Flock<File>>> {
    let began = Instant::now();
    while began.elapsed() < START_TIMEOUT / 2 {
        if let Ok(lock) = Flock::lock(open_lock(storage_dir)?, FlockArg::LockExclusiveNonblock) {
            return Ok(Some(lock));
        }
        tokio::time::sleep(START_POLL_INTERVAL).await;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewed_lease_ends_after_its_duration() {
        let dir = tempfile::tempdir().unwrap();
        let lease = FencingLease::new(dir.path(), Duration::from_secs(30));
        lease.renew(Instant::now()).unwrap();
        assert_eq!(read_deadline(dir.path()).unwrap(), None, "no VM needs it");
        let before = boot_time().unwrap();
        write_deadline(dir.path(), before, true).unwrap();
        lease.renew(Instant::now()).unwrap();
        let deadline = read_deadline(dir.path()).unwrap().unwrap();
        assert!(deadline > before + Duration::from_secs(29) && deadline < before + Duration::from_secs(60));
        fs::write(dir.path().join(LEASE_FILE), "damaged").unwrap();
        assert_eq!(read_deadline(dir.path()).unwrap(), Some(Duration::ZERO));
        lease.end().unwrap();
        lease.end().unwrap();
        assert_eq!(read_deadline(dir.path()).unwrap(), None);
    }

    #[tokio::test]
    async fn no_watchdog_starts_before_the_node_has_checked_in() {
        let dir = tempfile::tempdir().unwrap();
        let lease = FencingLease::new(dir.path(), Duration::from_secs(30));
        assert!(matches!(lease.ensure_watchdog().await, Err(Error::Unavailable(_))));
        assert_eq!(lease.check(true).await, None);
        assert_eq!(read_deadline(dir.path()).unwrap(), None);
        assert_eq!(lease.check(false).await, None);
    }

    #[tokio::test]
    async fn watchdog_ends_without_lease_and_runs_once() {
        let dir = tempfile::tempdir().unwrap();
        run_watchdog(dir.path()).await.unwrap();
        let lease = FencingLease::new(dir.path(), Duration::from_secs(3600));
        lease.renew(Instant::now()).unwrap();
        write_deadline(dir.path(), Duration::from_secs(u64::MAX / 2000), true).unwrap();
        let path = dir.path().to_owned();
        let watchdog = tokio::spawn(async move { run_watchdog(&path).await });
        while !is_watched(dir.path()) {
            tokio::time::sleep(START_POLL_INTERVAL).await;
        }
        assert_eq!(lease.check(true).await, Some(3600.0));
        run_watchdog(dir.path()).await.unwrap();
        assert!(is_watched(dir.path()), "the first one continues");
        lease.end().unwrap();
        watchdog.await.unwrap().unwrap();
        assert!(!is_watched(dir.path()));
    }
}
