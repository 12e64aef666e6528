//! A file that has its name only once it is complete.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, Flock, FlockArg, OFlag, RenameFlags, renameat2};

use super::progress::{BackupPhase, ProgressReceiver};
use super::{BackupError, with_path};

/// A file that is being written under a temporary name in the same directory. It is removed unless it is finished.
#[derive(Debug)]
pub(super) struct OutputFile {
    target: PathBuf,
    temporary: PathBuf,
    /// Locked, so that another process does not write the same file.
    file: Flock<File>,
    is_finished: bool,
    written: u64,
    progress: ProgressReceiver,
}

impl OutputFile {
    /// Creates the file, or continues with the temporary file of a process that was killed. Rejects a name that exists.
    pub(super) fn create(target: &Path, progress: ProgressReceiver) -> Result<Self, BackupError> {
        let name = target.file_name().and_then(|name| name.to_str());
        let name =
            name.ok_or_else(|| BackupError::Failed(format!("{} is not a file name", target.display())))?;
        if fs::symlink_metadata(target).is_ok() {
            return Err(exists(target));
        }
        let temporary = directory(target).join(format!(".{name}.partial"));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(OFlag::O_NOFOLLOW.bits())
            .open(&temporary)
            .map_err(with_path("create", &temporary))?;
        let busy = || BackupError::Failed(format!("another process is writing {}", target.display()));
        let file = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|_| busy())?;
        // Another process may have finished the file after it was opened here.
        let is_current = fs::symlink_metadata(&temporary).and_then(|found| {
            Ok((found.ino(), found.dev()) == (file.metadata()?.ino(), file.metadata()?.dev()))
        });
        if !is_current.unwrap_or(false) {
            return Err(busy());
        }
        let prepared = file.set_len(0).and_then(|()| file.set_permissions(Permissions::from_mode(0o600)));
        prepared.map_err(with_path("write", &temporary))?;
        Ok(Self { target: target.to_owned(), temporary, file, is_finished: false, written: 0, progress })
    }

    /// Returns the temporary name.
    pub(super) fn temporary(&self) -> &Path {
        &self.temporary
    }

    /// Syncs the file, and waits until it is on disk.
    pub(super) fn sync(&mut self) -> Result<(), BackupError> {
        self.file.sync_all().map_err(with_path("write", &self.target))
    }

    /// Gives the file its name, and returns its size.
    pub(super) fn finish(mut self) -> Result<u64, BackupError> {
        let size = self.file.metadata().map_err(with_path("write", &self.target))?.len();
        let renamed =
            renameat2(AT_FDCWD, &self.temporary, AT_FDCWD, &self.target, RenameFlags::RENAME_NOREPLACE);
        match renamed {
            Err(Errno::EEXIST) => return Err(exists(&self.target)),
            // The file system cannot do this in one step.
            Err(Errno::EINVAL | Errno::ENOSYS) if !self.target.exists() => {
                fs::rename(&self.temporary, &self.target).map_err(with_path("write", &self.target))?;
            }
            Err(errno) => return Err(with_path("write", &self.target)(errno.into())),
            Ok(()) => {}
        }
        self.is_finished = true;
        let parent = directory(&self.target);
        File::open(parent).and_then(|parent| parent.sync_all()).map_err(with_path("sync", parent))?;
        Ok(size)
    }
}

impl Write for OutputFile {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let count = self.file.write(data)?;
        self.written += count as u64;
        self.progress.report(BackupPhase::Write, self.written, None);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if !self.is_finished {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Returns the directory of a file.
pub(super) fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn exists(path: &Path) -> BackupError {
    BackupError::Failed(format!("{} exists, and backups do not replace files", path.display()))
}
