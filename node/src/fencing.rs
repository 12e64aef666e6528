//! The fencing lease of a node: VMs with self-fencing stop when the daemon of their node has not checked in for the time of the
//! lease, so that they can be restarted on another node. Their watchdogs enforce it, because the daemon may be frozen or dead.
//! See docs/decisions/0052.
//!
//! ```text
//! daemon ──check-in──▶ database
//!    └─ deadline ─▶ fencing-lease ◀─ reads twice a second ─ watchdog of a VM ──deadline passed──▶ kills its QEMU
//! ```
//!
//! The lease is removed when the daemon was stopped on purpose, or no VM needs it.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use muster_types::time::BootTime;
use muster_types::{Error, Result};
use parking_lot::Mutex;

use crate::files::io_error;
use crate::vm;

const LEASE_FILE: &str = "fencing-lease";

/// The fencing lease of a node.
#[derive(Debug)]
pub(crate) struct FencingLease {
    storage_dir: PathBuf,
    duration: Duration,
    /// The end of the lease of the last check-in, in time since boot.
    deadline: Mutex<Option<Duration>>,
    /// Held while the file of the lease is created or removed.
    file_lock: tokio::sync::Mutex<()>,
}

impl FencingLease {
    pub(crate) fn new(storage_dir: &Path, duration: Duration) -> Self {
        let (deadline, file_lock) = Default::default();
        Self { storage_dir: storage_dir.to_owned(), duration, deadline, file_lock }
    }

    /// Ensures that the node has a lease if a VM, or each VM (`is_default`), needs one, and that these VMs have watchdogs.
    /// Returns the duration of the lease in seconds if it is certain that they stop.
    pub(crate) async fn check(&self, is_default: bool) -> Option<f64> {
        let _lock = self.file_lock.lock().await;
        let checked = if is_default || vm::has_self_fencing(&self.storage_dir) {
            let ensured = async {
                self.create()?;
                vm::ensure_watchdogs(&self.storage_dir).await
            };
            ensured.await.map(|()| Some(self.duration.as_secs_f64()))
        } else {
            self.remove().map(|()| None)
        };
        checked.inspect_err(|error| tracing::warn!(%error, "VMs are not fenced")).ok().flatten()
    }

    /// Ensures that the node has a lease, or returns [`Error::Unavailable`] if it has expired.
    pub(crate) async fn ensure(&self) -> Result<()> {
        let _lock = self.file_lock.lock().await;
        self.create()
    }

    fn create(&self) -> Result<()> {
        let deadline = *self.deadline.lock();
        let deadline = deadline.filter(|deadline| !is_past(*deadline)).ok_or_else(|| {
            Error::Unavailable("the fencing lease of the node has expired: it cannot check in".into())
        })?;
        write_deadline(&self.storage_dir, deadline, true)
            .map_err(io_error("failed to create the fencing lease"))
    }

    /// Extends the lease by a check-in that began at `began`.
    pub(crate) fn renew(&self, began: BootTime) -> Result<()> {
        let failed = io_error("failed to renew the fencing lease");
        let deadline = began.since_boot() + self.duration;
        *self.deadline.lock() = Some(deadline);
        match write_deadline(&self.storage_dir, deadline, false) {
            // No VM needs it.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            written => written.map_err(failed),
        }
    }

    /// Ends the lease because the daemon stops on purpose: VMs keep running.
    pub(crate) fn end(&self) -> Result<()> {
        *self.deadline.lock() = None;
        self.remove()
    }

    fn remove(&self) -> Result<()> {
        match fs::remove_file(self.storage_dir.join(LEASE_FILE)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(io_error("failed to end the fencing lease")(error))
            }
            _ => Ok(()),
        }
    }
}

/// Returns whether a deadline has passed.
pub(crate) fn is_past(deadline: Duration) -> bool {
    BootTime::now().since_boot() >= deadline
}

/// Writes the deadline in place, with a constant length: a full disk must not end the lease.
fn write_deadline(storage_dir: &Path, deadline: Duration, create: bool) -> io::Result<()> {
    let path = storage_dir.join(LEASE_FILE);
    let file = OpenOptions::new().write(true).create(create).truncate(false).mode(0o600).open(path)?;
    file.write_all_at(format!("{:020}\n", deadline.as_millis()).as_bytes(), 0)
}

/// Returns the deadline, or `None` without a lease.
pub(crate) fn read_deadline(storage_dir: &Path) -> io::Result<Option<Duration>> {
    match fs::read_to_string(storage_dir.join(LEASE_FILE)) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        // A damaged file counts as expired.
        text => Ok(Some(Duration::from_millis(text?.trim().parse().unwrap_or(0)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewed_lease_ends_after_its_duration() {
        let dir = tempfile::tempdir().unwrap();
        let lease = FencingLease::new(dir.path(), Duration::from_secs(30));
        lease.renew(BootTime::now()).unwrap();
        assert_eq!(read_deadline(dir.path()).unwrap(), None, "no VM needs it");
        let before = BootTime::now().since_boot();
        write_deadline(dir.path(), before, true).unwrap();
        lease.renew(BootTime::now()).unwrap();
        let deadline = read_deadline(dir.path()).unwrap().unwrap();
        assert!(deadline > before + Duration::from_secs(29) && deadline < before + Duration::from_secs(60));
        fs::write(dir.path().join(LEASE_FILE), "damaged").unwrap();
        assert_eq!(read_deadline(dir.path()).unwrap(), Some(Duration::ZERO));
        lease.end().unwrap();
        lease.end().unwrap();
        assert_eq!(read_deadline(dir.path()).unwrap(), None);
    }

    #[tokio::test]
    async fn lease_exists_only_while_a_vm_needs_it_and_the_node_checks_in() {
        let dir = tempfile::tempdir().unwrap();
        let lease = FencingLease::new(dir.path(), Duration::from_secs(30));
        assert!(matches!(lease.ensure().await, Err(Error::Unavailable(_))), "it has not checked in");
        assert_eq!(lease.check(true).await, None);
        assert_eq!(read_deadline(dir.path()).unwrap(), None);
        lease.renew(BootTime::now()).unwrap();
        assert_eq!(lease.check(true).await, Some(30.0));
        assert!(!is_past(read_deadline(dir.path()).unwrap().unwrap()));
        assert_eq!(lease.check(false).await, None);
        assert_eq!(read_deadline(dir.path()).unwrap(), None);
        lease.ensure().await.unwrap();
        lease.renew(BootTime::now().before(Duration::from_secs(31))).unwrap();
        assert!(is_past(read_deadline(dir.path()).unwrap().unwrap()));
        assert!(matches!(lease.ensure().await, Err(Error::Unavailable(_))), "it has expired");
    }
}
