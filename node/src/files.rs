//! File system helpers that storage, images and VMs share.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use muster_types::{Error, Result};
use nix::libc;

/// A directory for one job, removed when it is dropped.
#[derive(Debug)]
pub(crate) struct ScratchDir {
    path: PathBuf,
}

impl ScratchDir {
    pub(crate) fn create(path: PathBuf) -> Result<Self> {
        create_dir(&path)?;
        Ok(Self { path })
    }

    /// Returns the path of a file in the directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "failed to remove job working directory");
        }
    }
}

pub(crate) fn disk_full() -> Error {
    Error::InsufficientCapacity("the node does not have enough disk space".into())
}

/// Returns a function that converts an I/O error. `action` says what failed, such as "failed to create a file".
pub(crate) fn io_error(action: &str) -> impl FnOnce(io::Error) -> Error {
    move |error| match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => {
            tracing::warn!(action, %error, "disk is full");
            disk_full()
        }
        _ => Error::Internal(format!("{action}: {error}")),
    }
}

/// Creates a private directory.
pub(crate) fn create_dir(path: &Path) -> Result<()> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(path);
    created.map_err(io_error("failed to create a directory"))
}
