//! The disks of a VM, as files in its directory.
//!
//! ```text
//! vda.qcow2   the writable layer
//! vda.base    its backing file: a hard link to the conversion, which may be deleted; vda.iso for an ISO image
//! nvram.fd    the NVRAM of the firmware
//! ```
//!
//! A backing file is shared with the storage: its owner, mode and content must not be changed. All other files are
//! renamed into place once they are complete and synced. Files in the directory may belong to the VM's user, so anything
//! but regular files is rejected and symlinks are not followed.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use muster_types::blob::ImageFormat;
use muster_types::ids::BlobId;
use muster_types::vm::{DiskKind, DiskPlan, VmPlan};
use muster_types::{Error, Result};
use nix::libc;

use super::vm_dir::file;
use crate::files::io_error;
use crate::image::qcow2_writer::{self, BackingFile};
use crate::storage::FileStorage;

/// The directory of the firmware package, with the NVRAM templates.
pub(crate) const FIRMWARE_DIR: &str = "/usr/share/OVMF";

/// The maximum size of an NVRAM, larger than that of any firmware.
const MAX_NVRAM_SIZE: u64 = 16 << 20;

/// The sources of initial disk content.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DiskSources<'a> {
    pub(crate) storage: &'a FileStorage,
    pub(crate) firmware_dir: &'a Path,
}

impl<'a> DiskSources<'a> {
    pub(crate) fn new(storage: &'a FileStorage) -> Self {
        Self { storage, firmware_dir: Path::new(FIRMWARE_DIR) }
    }
}

/// Creates the missing disks of a VM. Blocks.
pub(crate) fn build(dir: &Path, plan: &VmPlan, sources: &DiskSources<'_>) -> Result<()> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    created.map_err(io_error("failed to create VM directory"))?;
    for disk in &plan.disks {
        require_device_name(&disk.device)?;
        match disk.kind {
            DiskKind::Disk => build_disk(dir, disk, sources)?,
            DiskKind::Cdrom => {
                if let Some(base) = disk.base {
                    link_base(dir, disk, base, sources)?;
                }
            }
            // Written at every start.
            DiskKind::ConfigDrive => {}
        }
    }
    if plan.uefi {
        build_nvram(dir, plan, sources)?;
    }
    let synced = [Some(dir), dir.parent()].into_iter().flatten().try_for_each(sync);
    synced.map_err(io_error("failed to sync VM directory"))
}

fn build_disk(dir: &Path, disk: &DiskPlan, sources: &DiskSources<'_>) -> Result<()> {
    let path = dir.join(format!("{}.qcow2", disk.device));
    if exists(&path)? {
        return Ok(());
    }
    let base = disk.base.map(|base| link_base(dir, disk, base, sources)).transpose()?;
    let size = match (disk.size, &base) {
        (Some(size), Some(base)) if size < base.size => {
            return Err(Error::Invalid(format!(
                "disk {} of {size} bytes is smaller than its base of {} bytes",
                disk.device, base.size
            )));
        }
        (Some(size), _) => size,
        (None, Some(base)) => base.size,
        (None, None) => {
            return Err(Error::Invalid(format!("disk {} has neither a size nor a base", disk.device)));
        }
    };
    let backing = base.as_ref().map(|base| BackingFile { name: &base.name, format: base.format });
    // A disk consists of whole sectors.
    let size = size
        .checked_next_multiple_of(512)
        .ok_or_else(|| Error::Invalid(format!("disk {} is too large", disk.device)))?;
    create_atomically(&path, |new| qcow2_writer::create(new, size, backing, None))
}

/// The backing file of a disk.
struct DiskBase {
    name: String,
    format: &'static str,
    size: u64,
}

/// Links the conversion of a base into the directory.
fn link_base(dir: &Path, disk: &DiskPlan, base: BlobId, sources: &DiskSources<'_>) -> Result<DiskBase> {
    let names = ["base", "iso"].map(|kind| format!("{}.{kind}", disk.device));
    for name in &names {
        if exists(&dir.join(name))? {
            let facts = sources.storage.facts(&dir.join(name))?;
            return Ok(DiskBase {
                name: name.clone(),
                format: qemu_format(facts.format),
                size: facts.virtual_size,
            });
        }
    }
    let missing = || Error::Unavailable(format!("the conversion of blob {base} is not on this node"));
    let conversion = sources.storage.conversion(base)?.ok_or_else(missing)?;
    let [base_name, iso_name] = names;
    let name = if conversion.facts.format == ImageFormat::Iso { iso_name } else { base_name };
    create_atomically(&dir.join(&name), |new| match fs::hard_link(&conversion.path, new) {
        // The file system does not support hard links, or the file has too many.
        Err(error) if error.kind() != ErrorKind::NotFound => {
            fs::copy(&conversion.path, new)?;
            fs::set_permissions(new, Permissions::from_mode(0o444))?;
            File::open(new)?.sync_all()
        }
        other => other,
    })?;
    Ok(DiskBase { name, format: qemu_format(conversion.facts.format), size: conversion.facts.virtual_size })
}

fn qemu_format(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Qcow2 => "qcow2",
        ImageFormat::Raw | ImageFormat::Iso => "raw",
    }
}

fn build_nvram(dir: &Path, plan: &VmPlan, sources: &DiskSources<'_>) -> Result<()> {
    let path = dir.join(file::NVRAM);
    if exists(&path)? {
        return Ok(());
    }
    let template_name = if plan.secure_boot { "OVMF_VARS_4M.ms.fd" } else { "OVMF_VARS_4M.fd" };
    let default_path = sources.firmware_dir.join(template_name);
    let default = fs::read(&default_path).map_err(|error| {
        Error::Conflict(format!(
            "UEFI needs {} (Debian package ovmf), but reading it failed: {error}",
            default_path.display()
        ))
    })?;
    let content = match plan.nvram_template {
        Some(template) => {
            let missing = || Error::Unavailable(format!("blob {template} is not on this node"));
            let file = sources.storage.blob(template).ok_or_else(missing)?;
            let size = fs::metadata(&file).map_err(io_error("failed to inspect NVRAM template"))?.len();
            // The address of the NVRAM depends on its size.
            if size != default.len() as u64 || size > MAX_NVRAM_SIZE {
                return Err(Error::Invalid(format!(
                    "the NVRAM template has {size} bytes, but the firmware needs {}",
                    default.len()
                )));
            }
            fs::read(file).map_err(io_error("failed to read NVRAM template"))?
        }
        None => default,
    };
    create_atomically(&path, |new| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(new)?;
        file.write_all(&content)?;
        file.sync_all()
    })
}

/// Copies a disk of a VM that is off to `to`, on the same file system. A thin copy contains only the difference to the
/// disk's base, and has no backing file.
pub(crate) async fn copy_offline(
    storage: &FileStorage,
    dir: &Path,
    device: &str,
    (thin, compress): (bool, bool),
    to: &Path,
) -> Result<()> {
    require_device_name(device)?;
    let path = |extension: &str| dir.join(format!("{device}.{extension}"));
    let top = path("qcow2");
    if !exists(&top)? {
        return Err(Error::Conflict(format!("the VM has no disk {device}")));
    }
    let mut base = None;
    for path in [path("base"), path("iso")] {
        if exists(&path)? {
            base = Some(path);
        }
    }
    // The copying process runs as another user. The directory is not accessible to other users.
    make_readable(&top).map_err(io_error("failed to change the permissions of a disk"))?;
    // Named after the instance. The queue limits the snapshots of each namespace.
    let owner = dir.file_name().unwrap_or_default().to_string_lossy();
    storage.copy_disk(&owner, (top, base), (thin, compress), to.to_owned()).await
}

fn make_readable(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    file.set_permissions(Permissions::from_mode(0o644))
}

/// Creates a file under a temporary name, and renames it into place.
pub(super) fn create_atomically(path: &Path, create: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
    let name = path.file_name().expect("paths of VM files have a name").to_string_lossy();
    let new: PathBuf = path.with_file_name(format!(".{name}.new"));
    let created = remove(&new).and_then(|()| create(&new)).and_then(|()| fs::rename(&new, path));
    created.map_err(|error| {
        // If this fails, the next attempt removes it.
        let _ = remove(&new);
        io_error("failed to create VM file")(error)
    })
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns whether a file exists. Anything but a regular file is an error.
fn exists(path: &Path) -> Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(true),
        Ok(_) => Err(Error::Internal(format!("{} is not a regular file", path.display()))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io_error("failed to inspect VM file")(error)),
    }
}

fn sync(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Validates a device name, which becomes part of file names.
fn require_device_name(device: &str) -> Result<()> {
    if !device.is_empty() && device.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Ok(());
    }
    Err(Error::Invalid(format!("{device:?} is not a valid device name")))
}

#[cfg(test)]
mod tests;
