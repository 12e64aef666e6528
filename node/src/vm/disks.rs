//! The disks of a machine, as files in its folder.
//!
//! ```text
//! vda.qcow2   what the guest wrote
//! vda.base    what lies below: another name of the conversion, which may go. vda.iso if that is an optical disc
//! nvram.fd    the memory of the firmware
//! ```
//!
//! What lies below is a file of the storage under another name: nobody may change its owner, its mode or its bytes.
//! Everything else has its name only once it is whole and synchronised. The folder may belong to the user that a
//! machine runs as, so nothing is followed that is no plain file.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use muster_types::blob::ImageFormat;
use muster_types::ids::BlobId;
use muster_types::vm::{DiskKind, DiskPlan, VmPlan};
use muster_types::{Error, Result};
use nix::libc;

use crate::image::qcow2_writer::{self, Backing};
use crate::storage::{FileStorage, failed};

/// Where the firmware's package puts what its memory begins as.
const FIRMWARE: &str = "/usr/share/OVMF";

const NVRAM: &str = "nvram.fd";

/// No firmware has a larger memory.
const LARGEST_NVRAM: u64 = 16 << 20;

/// Where disks come from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sources<'a> {
    pub(crate) storage: &'a FileStorage,
    pub(crate) firmware: &'a Path,
}

impl<'a> Sources<'a> {
    pub(crate) fn new(storage: &'a FileStorage) -> Self {
        Self { storage, firmware: Path::new(FIRMWARE) }
    }
}

/// Makes the disks of a machine that are not there yet. Blocks.
pub(crate) fn build(folder: &Path, plan: &VmPlan, sources: &Sources<'_>) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(failed("the folder of a machine cannot be made"))?;
    for disk in &plan.disks {
        require_device(&disk.device)?;
        match disk.kind {
            DiskKind::Disk => build_disk(folder, disk, sources)?,
            DiskKind::Cdrom => {
                if let Some(base) = disk.base {
                    link_base(folder, disk, base, sources)?;
                }
            }
            // It is written at every start.
            DiskKind::ConfigDrive => {}
        }
    }
    if plan.uefi {
        build_nvram(folder, plan, sources)?;
    }
    let synchronised = [Some(folder), folder.parent()].into_iter().flatten().try_for_each(sync);
    synchronised.map_err(failed("the folder of a machine is not synchronised"))
}

fn build_disk(folder: &Path, disk: &DiskPlan, sources: &Sources<'_>) -> Result<()> {
    let path = folder.join(format!("{}.qcow2", disk.device));
    if is_plain(&path)? {
        return Ok(());
    }
    let base = disk.base.map(|base| link_base(folder, disk, base, sources)).transpose()?;
    let size = match (disk.size, &base) {
        (Some(size), Some(base)) if size < base.size => {
            return Err(Error::Invalid(format!(
                "disk {} of {size} bytes is smaller than its base, which has {} bytes",
                disk.device, base.size
            )));
        }
        (Some(size), _) => size,
        (None, Some(base)) => base.size,
        (None, None) => {
            return Err(Error::Invalid(format!("disk {} has neither a size nor a base", disk.device)));
        }
    };
    let backing = base.as_ref().map(|base| Backing { name: &base.name, format: base.format });
    // Disks have sectors.
    let size = size.checked_next_multiple_of(512).unwrap_or(size);
    place(&path, |new| qcow2_writer::write(new, size, backing, None))
}

/// What a disk lies on.
struct Base {
    name: String,
    format: &'static str,
    size: u64,
}

/// Gives the conversion of a base a name in the folder.
fn link_base(folder: &Path, disk: &DiskPlan, base: BlobId, sources: &Sources<'_>) -> Result<Base> {
    let names = ["base", "iso"].map(|kind| format!("{}.{kind}", disk.device));
    for name in &names {
        if is_plain(&folder.join(name))? {
            let facts = sources.storage.facts(&folder.join(name))?;
            return Ok(Base {
                name: name.clone(),
                format: format_of(facts.format),
                size: facts.virtual_size,
            });
        }
    }
    let missing = || Error::Unavailable(format!("the conversion of blob {base} is not on this node"));
    let conversion = sources.storage.conversion(base)?.ok_or_else(missing)?;
    let [plain, disc] = names;
    let name = if conversion.facts.format == ImageFormat::Iso { disc } else { plain };
    place(&folder.join(&name), |new| match fs::hard_link(&conversion.path, new) {
        // Some file systems cannot.
        Err(error) if error.kind() != ErrorKind::NotFound => {
            fs::copy(&conversion.path, new)?;
            fs::set_permissions(new, Permissions::from_mode(0o444))?;
            File::open(new)?.sync_all()
        }
        other => other,
    })?;
    Ok(Base { name, format: format_of(conversion.facts.format), size: conversion.facts.virtual_size })
}

fn format_of(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Qcow2 => "qcow2",
        ImageFormat::Raw | ImageFormat::Iso => "raw",
    }
}

fn build_nvram(folder: &Path, plan: &VmPlan, sources: &Sources<'_>) -> Result<()> {
    let path = folder.join(NVRAM);
    if is_plain(&path)? {
        return Ok(());
    }
    let package =
        sources.firmware.join(if plan.secure_boot { "OVMF_VARS_4M.ms.fd" } else { "OVMF_VARS_4M.fd" });
    let usual = fs::read(&package).map_err(|error| {
        Error::Conflict(format!(
            "UEFI needs the file {} (Debian package ovmf), which cannot be read: {error}",
            package.display()
        ))
    })?;
    let memory = match plan.nvram_template {
        Some(template) => {
            let missing = || Error::Unavailable(format!("blob {template} is not on this node"));
            let file = sources.storage.blob(template).ok_or_else(missing)?;
            let size = fs::metadata(&file).map_err(failed("a template cannot be looked at"))?.len();
            // The firmware looks for its memory at a place that depends on its size.
            if size != usual.len() as u64 || size > LARGEST_NVRAM {
                return Err(Error::Invalid(format!(
                    "the NVRAM template has {size} bytes, but the memory of the firmware has {}",
                    usual.len()
                )));
            }
            fs::read(file).map_err(failed("a template cannot be read"))?
        }
        None => usual,
    };
    place(&path, |new| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(new)?;
        file.write_all(&memory)?;
        file.sync_all()
    })
}

/// Makes a copy of a disk whose machine is off, at `to` on the same file system. A thin one has only what differs
/// from the disk's base, and names none.
pub(crate) async fn snapshot_off(
    storage: &FileStorage,
    folder: &Path,
    device: &str,
    (thin, compress): (bool, bool),
    to: &Path,
) -> Result<()> {
    require_device(device)?;
    let named = |kind: &str| folder.join(format!("{device}.{kind}"));
    let top = named("qcow2");
    if !is_plain(&top)? {
        return Err(Error::Conflict(format!("the machine has no disk {device}")));
    }
    let mut base = None;
    for path in [named("base"), named("iso")] {
        if is_plain(&path)? {
            base = Some(path);
        }
    }
    // The one who copies reads it as another user; the folder keeps everybody else away.
    readable(&top).map_err(failed("a disk cannot be opened"))?;
    storage.copy_disk((top, base), (thin, compress), to.to_owned()).await
}

fn readable(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    file.set_permissions(Permissions::from_mode(0o644))
}

/// Makes a file under another name, which then gets its own.
pub(super) fn place(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new: PathBuf = path.with_file_name(format!(".{name}.new"));
    let placed = remove(&new).and_then(|()| make(&new)).and_then(|()| fs::rename(&new, path));
    placed.map_err(|error| {
        // Not that it matters: the next one begins by removing it.
        let _ = remove(&new);
        failed("a file of a machine cannot be made")(error)
    })
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether a file is there. What is no plain file is none of ours.
fn is_plain(path: &Path) -> Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_file() => Ok(true),
        Ok(_) => Err(Error::Internal(format!("{} is no plain file", path.display()))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed("a file of a machine cannot be looked at")(error)),
    }
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Devices become names of files.
fn require_device(device: &str) -> Result<()> {
    if !device.is_empty() && device.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Ok(());
    }
    Err(Error::Invalid(format!("{device:?} is no name of a device")))
}

#[cfg(test)]
#[path = "disks_tests.rs"]
mod tests;
