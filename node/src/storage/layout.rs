//! The directory layout of the storage, file system helpers, and free space.
//!
//! ```text
//! drafts/upload-<id>  drafts/fetch-<id>  drafts/copy-<id>  drafts/machine-<id>
//! blobs/<2 digits>/<id>  blobs/<2 digits>/<id>.sums
//! conversions/<id>.qcow2  conversions/<id>.iso
//! work/job-<id>/…
//! ```
//!
//! Directories are private (0700), but the files in them are readable for all users (0644, 0444): a sandboxed program gets
//! access to one file and no directory, and reads it as another user. Incomplete files are in `work`, on the same file
//! system.

use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use muster_types::ids::BlobId;
use muster_types::storage::{Draft, StoredFileKind, blob_path};
use muster_types::{Error, Result};
use nix::libc;
use uuid::Uuid;

use crate::files::{ScratchDir, disk_full, io_error};
use crate::host;

/// The free space that is never used: other data, such as the database, is on the same file system.
const RESERVED_BYTES: u64 = 256 << 20;

/// The paths of a storage.
#[derive(Debug, Clone)]
pub(super) struct StorageLayout {
    root: PathBuf,
}

impl StorageLayout {
    /// Creates no directories yet. Removes the scratch directories of jobs that were killed.
    pub(super) fn new(root: &Path) -> Self {
        let layout = Self { root: root.to_owned() };
        for entry in entries(&layout.work()) {
            if parse_id::<Uuid>(&file_name(&entry), "job-", "").is_some()
                && let Err(error) = fs::remove_dir_all(&entry)
            {
                tracing::warn!(%error, path = %entry.display(), "failed to remove job working directory");
            }
        }
        layout
    }

    pub(super) fn drafts(&self) -> PathBuf {
        self.root.join("drafts")
    }

    pub(super) fn draft(&self, draft: Draft) -> PathBuf {
        self.drafts().join(match draft {
            Draft::Upload(id) => format!("upload-{id}"),
            Draft::Fetch(id) => format!("fetch-{id}"),
            Draft::Copy(id) => format!("copy-{id}"),
            Draft::Vm(id) => format!("machine-{id}"),
        })
    }

    pub(super) fn blob(&self, blob: BlobId) -> PathBuf {
        blob_path(&self.root, blob)
    }

    pub(super) fn checksums(&self, blob: BlobId) -> PathBuf {
        self.blob(blob).with_extension("sums")
    }

    pub(super) fn conversions(&self) -> PathBuf {
        self.root.join("conversions")
    }

    pub(super) fn conversion(&self, blob: BlobId) -> PathBuf {
        self.conversions().join(format!("{blob}.qcow2"))
    }

    /// Returns the path of the conversion of an optical disc, which is a link to the blob.
    pub(super) fn disc(&self, blob: BlobId) -> PathBuf {
        self.conversions().join(format!("{blob}.iso"))
    }

    fn work(&self) -> PathBuf {
        self.root.join("work")
    }

    /// Creates a scratch directory for one job.
    pub(super) fn scratch(&self) -> Result<ScratchDir> {
        ScratchDir::create(self.work().join(format!("job-{}", Uuid::new_v4())))
    }

    /// Returns every file with its path. Also removes checksum files without a blob.
    pub(super) fn find(&self) -> Vec<(StoredFileKind, PathBuf)> {
        let mut found = Vec::new();
        for path in entries(&self.drafts()) {
            let name = file_name(&path);
            let draft = (parse_id(&name, "upload-", "").map(Draft::Upload))
                .or_else(|| parse_id(&name, "fetch-", "").map(Draft::Fetch))
                .or_else(|| parse_id(&name, "copy-", "").map(Draft::Copy))
                .or_else(|| parse_id(&name, "machine-", "").map(Draft::Vm));
            found.extend(draft.map(|draft| (StoredFileKind::Draft(draft), path)));
        }
        for path in entries(&self.root.join("blobs")).iter().flat_map(|dir| entries(dir)) {
            if let Some(blob) = parse_id(&file_name(&path), "", "") {
                found.push((StoredFileKind::Blob(blob), path));
            } else if let Some(blob) = parse_id::<BlobId>(&file_name(&path), "", ".sums") {
                self.remove_orphaned_checksums(blob, &path);
            }
        }
        for path in entries(&self.conversions()) {
            let name = file_name(&path);
            let blob = parse_id(&name, "", ".qcow2").or_else(|| parse_id(&name, "", ".iso"));
            found.extend(blob.map(|blob| (StoredFileKind::Conversion(blob), path)));
        }
        found
    }

    /// Removes a checksum file without a blob, unless it is so young that the blob may be about to follow.
    fn remove_orphaned_checksums(&self, blob: BlobId, checksums: &Path) {
        const MIN_AGE: std::time::Duration = std::time::Duration::from_secs(3600);
        let age = fs::metadata(checksums)
            .and_then(|metadata| metadata.modified())
            .ok()
            .and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age > MIN_AGE) && !self.blob(blob).exists() {
            let _ = fs::remove_file(checksums);
        }
    }

    /// Returns the number of bytes that may still be written.
    pub(super) fn available_bytes(&self) -> u64 {
        let disk = host::disk_space(&self.root);
        disk.free.saturating_sub(RESERVED_BYTES.min(disk.total / 20))
    }

    /// Refuses a write for which there is not enough space.
    pub(super) fn require_space(&self, size: u64) -> Result<()> {
        if self.available_bytes() < size { Err(disk_full()) } else { Ok(()) }
    }
}

/// Returns whether an error indicates lost data rather than a lack of resources.
pub(super) fn is_corruption(error: &io::Error) -> bool {
    let lost = matches!(error.raw_os_error(), Some(libc::EIO | libc::EBADMSG | libc::EUCLEAN));
    lost || error.kind() == ErrorKind::UnexpectedEof
}

/// Returns a function that converts a read error: [`Error::Internal`] only if the data is damaged.
pub(super) fn read_error(action: &str) -> impl FnOnce(io::Error) -> Error {
    move |error| {
        if is_corruption(&error) {
            return Error::Internal(format!("{action}: {error}"));
        }
        tracing::warn!(action, %error, "failed to read from storage");
        Error::Unavailable(format!("{action}, try again later"))
    }
}

/// Syncs a directory, so that its entries survive a power failure.
pub(super) fn sync_dir(path: &Path) -> Result<()> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(io_error("failed to sync a directory"))
}

pub(super) fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, Permissions::from_mode(mode))
        .map_err(io_error("failed to set the mode of a file"))
}

/// Takes ownership of a regular file that another user wrote. Does not follow symbolic links.
pub(super) fn take_ownership(path: &Path) -> Result<()> {
    let action = "failed to take ownership of a file";
    let metadata = fs::symlink_metadata(path).map_err(io_error(action))?;
    if !metadata.is_file() {
        return Err(Error::Internal(format!("{action}: it is not a regular file")));
    }
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    if (metadata.uid(), metadata.gid()) == (uid, gid) {
        return Ok(());
    }
    std::os::unix::fs::lchown(path, Some(uid), Some(gid)).map_err(io_error(action))
}

/// Returns whether a file may be open for writing, in which case the kernel refuses a read lease.
pub(super) fn may_be_open_for_writing(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return true };
    #[expect(unsafe_code, reason = "no safe wrapper exists for this call")]
    // SAFETY: the descriptor is open, and the arguments and the result are integers.
    let leased = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) };
    // Closing the file releases the lease.
    leased != 0
}

/// Creates a hard link, or a copy where that is not possible.
pub(super) fn link(from: &Path, to: &Path) -> Result<()> {
    let linked = fs::hard_link(from, to).or_else(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::AlreadyExists => Err(error),
        _ => fs::copy(from, to).map(drop),
    });
    linked.map_err(io_error("failed to link a file"))
}

/// Removes a file, which need not exist.
pub(super) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io_error("failed to remove a file")(error)),
        _ => Ok(()),
    }
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Returns the id in a file name, if the name is in canonical form.
fn parse_id<Id: FromStr + ToString>(name: &str, before: &str, after: &str) -> Option<Id> {
    let text = name.strip_prefix(before)?.strip_suffix(after)?;
    text.parse().ok().filter(|id: &Id| id.to_string() == text)
}

#[cfg(test)]
mod tests {
    use muster_types::ids::UploadId;

    use super::*;
    use crate::files::create_dir;

    #[test]
    fn finds_only_files_with_canonical_names() {
        let dir = tempfile::tempdir().unwrap();
        let layout = StorageLayout::new(dir.path());
        let (blob, upload) = (BlobId::new(), UploadId::new());
        let draft = Draft::Upload(upload);
        for path in [layout.draft(draft), layout.blob(blob), layout.conversion(blob)] {
            create_dir(path.parent().unwrap()).unwrap();
            fs::write(&path, "x").unwrap();
        }
        fs::write(layout.checksums(blob), "x").unwrap();
        for foreign in ["drafts/upload-", "drafts/notes", "conversions/x.qcow2", "blobs/notes"] {
            fs::write(dir.path().join(foreign), "x").unwrap();
        }
        fs::write(layout.drafts().join(format!("upload-{}", upload.to_string().to_uppercase())), "x")
            .unwrap();
        let mut found: Vec<StoredFileKind> = layout.find().into_iter().map(|(kind, _)| kind).collect();
        found.sort();
        assert_eq!(
            found,
            [StoredFileKind::Draft(draft), StoredFileKind::Blob(blob), StoredFileKind::Conversion(blob)]
        );
    }

    #[test]
    fn startup_removes_only_orphaned_job_directories() {
        let dir = tempfile::tempdir().unwrap();
        let work = dir.path().join("work");
        let orphan = work.join(format!("job-{}", Uuid::new_v4()));
        fs::create_dir_all(orphan.join("out")).unwrap();
        fs::create_dir_all(work.join("foreign")).unwrap();
        StorageLayout::new(dir.path());
        assert!(!orphan.exists() && work.join("foreign").exists());
    }
}
