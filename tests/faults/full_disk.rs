//! Full disks.

use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sys::statvfs::statvfs;

/// The size of the disks: the scheduler needs a free gigabyte for an instance.
const SIZE: &str = "3g";

fn mount_sized(directory: &Path, flags: MsFlags, size: &str) {
    let options = format!("size={size},mode=755");
    mount(Some("none"), directory, Some("tmpfs"), flags, Some(options.as_str())).unwrap();
}

/// Mounts a file system at a new directory, for all namespaces that are created later.
pub(crate) fn mount_disk(directory: &Path) {
    std::fs::create_dir_all(directory).unwrap();
    mount_sized(directory, MsFlags::empty(), SIZE);
}

/// Leaves no space on a file system until it is dropped.
#[derive(Debug)]
pub(crate) struct FullDisk(PathBuf);

impl FullDisk {
    /// Reduces the size of the file system of [`mount_disk`] to what is in use.
    pub(crate) fn new(directory: &Path) -> Self {
        let usage = statvfs(directory).unwrap();
        let used = (usage.blocks() - usage.blocks_free()) * usage.fragment_size();
        mount_sized(directory, MsFlags::MS_REMOUNT, &used.to_string());
        Self(directory.to_owned())
    }
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        mount_sized(&self.0, MsFlags::MS_REMOUNT, SIZE);
    }
}
