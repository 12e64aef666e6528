//! Keeps the console logs of deleted VMs for ARCHIVE_INSTANCE_CONSOLE_DURATION days, one file for each VM, readable by
//! the daemon's user only.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use muster_types::Result;
use muster_types::ids::InstanceId;

use super::console_log;
use crate::files::io_error;

/// The maximum size of all archived logs of a node. The oldest ones are removed first.
const MAX_ARCHIVE_BYTES: u64 = 1 << 30;

/// The archive of a node.
#[derive(Debug, Clone)]
pub(crate) struct ConsoleArchive {
    dir: PathBuf,
    /// How long a log is kept; zero if none is archived.
    retention: Duration,
    max_bytes: u64,
}

impl ConsoleArchive {
    pub(crate) fn new(storage_dir: &Path, days: u64) -> Self {
        let retention = Duration::from_secs(days.saturating_mul(86400));
        Self { dir: storage_dir.join("console-archive"), retention, max_bytes: MAX_ARCHIVE_BYTES }
    }

    /// Adds the log of a VM that is about to be removed, unless it is empty or logs are not archived.
    pub(super) fn add(&self, id: InstanceId, log: &Path) -> Result<()> {
        if self.retention.is_zero() {
            return Ok(());
        }
        let content = console_log::read(log, None)?;
        if content.is_empty() {
            return Ok(());
        }
        self.write(id, &content).map_err(io_error("failed to archive console log"))
    }

    fn write(&self, id: InstanceId, content: &[u8]) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        let path = self.dir.join(format!("{id}.log"));
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
        file.write_all(content)
    }

    /// Removes the logs that are older than the retention at the time `now`, and the oldest ones above the maximum size.
    pub(super) fn prune(&self, now: SystemTime) -> io::Result<()> {
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        let mut logs = Vec::new();
        for entry in entries {
            let entry = entry?;
            let metadata = entry.metadata()?;
            logs.push((metadata.modified()?, metadata.len(), entry.path()));
        }
        // The newest first.
        logs.sort_unstable_by(|one, other| other.cmp(one));
        let (mut total, mut result) = (0, Ok(()));
        for (modified, size, path) in logs {
            let age = now.duration_since(modified).unwrap_or_default();
            total += size;
            if age < self.retention && total <= self.max_bytes {
                continue;
            }
            // A file that cannot be removed does not keep the others.
            if let Err(error) = fs::remove_file(path) {
                result = Err(error);
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_logs_for_the_configured_days() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("console.log");
        let archive = ConsoleArchive::new(dir.path(), 2);
        let id = InstanceId::new();
        let archived = dir.path().join(format!("console-archive/{id}.log"));
        fs::write(&log, "").unwrap();
        archive.add(id, &log).unwrap();
        assert!(!archived.exists(), "an empty log was archived");
        fs::write(&log, "login: ").unwrap();
        archive.add(id, &log).unwrap();
        assert_eq!(fs::read(&archived).unwrap(), b"login: ");
        let day = Duration::from_secs(86400);
        archive.prune(SystemTime::now() + day).unwrap();
        assert!(archived.exists());
        archive.prune(SystemTime::now() + 2 * day).unwrap();
        assert!(!archived.exists());
    }

    #[test]
    fn removes_the_oldest_logs_above_the_maximum_size() {
        let dir = tempfile::tempdir().unwrap();
        let archive = ConsoleArchive { max_bytes: 20, ..ConsoleArchive::new(dir.path(), 2) };
        let ids = [InstanceId::new(), InstanceId::new(), InstanceId::new()];
        let path = |id: &InstanceId| dir.path().join(format!("console-archive/{id}.log"));
        let now = SystemTime::now();
        for (hours, id) in ids.iter().enumerate() {
            archive.write(*id, b"0123456789").unwrap();
            let age = Duration::from_secs(3600 * hours as u64);
            fs::File::options().write(true).open(path(id)).unwrap().set_modified(now - age).unwrap();
        }
        archive.prune(now).unwrap();
        assert_eq!(ids.each_ref().map(|id| path(id).exists()), [true, true, false]);
    }

    #[test]
    fn archives_nothing_by_default() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("console.log");
        fs::write(&log, "login: ").unwrap();
        let archive = ConsoleArchive::new(dir.path(), 0);
        archive.add(InstanceId::new(), &log).unwrap();
        archive.prune(SystemTime::now()).unwrap();
        assert!(!dir.path().join("console-archive").exists());
    }
}
