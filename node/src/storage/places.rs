//! Where files are, what they are called, and how much room is left for them.
//!
//! ```text
//! drafts/upload-<id>  drafts/fetch-<id>  drafts/copy-<id>  drafts/machine-<id>
//! blobs/<2 digits>/<id>  blobs/<2 digits>/<id>.sums
//! conversions/<id>.qcow2  conversions/<id>.iso
//! work/job-<id>/…
//! ```
//!
//! The folders are for us alone (0700), but the files in them may be read by everybody (0644, 0444): a sandboxed
//! program gets one file and no folder, and reads it as another user. Whatever is not yet what its name says lies in
//! `work`, on the same file system.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use muster_types::ids::BlobId;
use muster_types::storage::{Draft, StoredFileKind};
use muster_types::{Error, Result};
use nix::libc;
use uuid::Uuid;

use crate::host;

/// Of the file system, this much stays free: other things live there, too, such as the database.
const FLOOR: u64 = 256 << 20;

/// The folders of a storage.
#[derive(Debug, Clone)]
pub(super) struct Places {
    root: PathBuf,
}

impl Places {
    /// Nothing is created yet. What jobs left that were killed is removed.
    pub(super) fn new(root: &Path) -> Self {
        let places = Self { root: root.to_owned() };
        for entry in entries(&places.work()) {
            if of_kind::<Uuid>(&name(&entry), "job-", "").is_some()
                && let Err(error) = fs::remove_dir_all(&entry)
            {
                tracing::warn!(%error, path = %entry.display(), "what a job left is not removed");
            }
        }
        places
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
        let name = blob.to_string();
        self.root.join("blobs").join(&name[..2]).join(name)
    }

    pub(super) fn sums(&self, blob: BlobId) -> PathBuf {
        self.blob(blob).with_extension("sums")
    }

    pub(super) fn conversions(&self) -> PathBuf {
        self.root.join("conversions")
    }

    pub(super) fn conversion(&self, blob: BlobId) -> PathBuf {
        self.conversions().join(format!("{blob}.qcow2"))
    }

    /// The conversion of an optical disc, which is the blob itself.
    pub(super) fn disc(&self, blob: BlobId) -> PathBuf {
        self.conversions().join(format!("{blob}.iso"))
    }

    fn work(&self) -> PathBuf {
        self.root.join("work")
    }

    /// A folder for one job, which goes with it.
    pub(super) fn job(&self) -> Result<Scratch> {
        let path = self.work().join(format!("job-{}", Uuid::new_v4()));
        make(&path)?;
        Ok(Scratch { path })
    }

    /// Every file, with its path. Also removes what a kill left between two names of one blob.
    pub(super) fn find(&self) -> Vec<(StoredFileKind, PathBuf)> {
        let mut found = Vec::new();
        for path in entries(&self.drafts()) {
            let name = name(&path);
            let draft = (of_kind(&name, "upload-", "").map(Draft::Upload))
                .or_else(|| of_kind(&name, "fetch-", "").map(Draft::Fetch))
                .or_else(|| of_kind(&name, "copy-", "").map(Draft::Copy))
                .or_else(|| of_kind(&name, "machine-", "").map(Draft::Vm));
            found.extend(draft.map(|draft| (StoredFileKind::Draft(draft), path)));
        }
        for path in entries(&self.root.join("blobs")).iter().flat_map(|folder| entries(folder)) {
            if let Some(blob) = of_kind(&name(&path), "", "") {
                found.push((StoredFileKind::Blob(blob), path));
            } else if let Some(blob) = of_kind::<BlobId>(&name(&path), "", ".sums") {
                self.sweep(blob, &path);
            }
        }
        for path in entries(&self.conversions()) {
            let name = name(&path);
            let blob = of_kind(&name, "", ".qcow2").or_else(|| of_kind(&name, "", ".iso"));
            found.extend(blob.map(|blob| (StoredFileKind::Conversion(blob), path)));
        }
        found
    }

    /// Removes sums without a blob, unless the blob is about to come.
    fn sweep(&self, blob: BlobId, sums: &Path) {
        const ABOUT: std::time::Duration = std::time::Duration::from_secs(3600);
        let age = fs::metadata(sums).and_then(|found| found.modified()).ok().and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age > ABOUT) && !self.blob(blob).exists() {
            let _ = fs::remove_file(sums);
        }
    }

    /// How many more bytes may be written.
    pub(super) fn room(&self) -> u64 {
        let disk = host::disk_space(&self.root);
        disk.free.saturating_sub(FLOOR.min(disk.total / 20))
    }

    /// Refuses what would leave too little room.
    pub(super) fn require_room(&self, size: u64) -> Result<()> {
        if self.room() < size { Err(full()) } else { Ok(()) }
    }
}

/// A folder for one job, removed when it is dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
}

impl Scratch {
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "what a job left is not removed");
        }
    }
}

fn full() -> Error {
    Error::Insufficient("the disk of the node has no room for it".into())
}

/// The error of a caller for what the file system said about `what`.
pub(crate) fn failed(what: &str) -> impl FnOnce(io::Error) -> Error {
    move |error| match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => {
            tracing::warn!(what, %error, "no room");
            full()
        }
        _ => Error::Internal(format!("{what}: {error}")),
    }
}

/// Whether the disk itself said that it lost something, rather than this process lacking what it takes to read.
pub(super) fn is_damage(error: &io::Error) -> bool {
    let lost = matches!(error.raw_os_error(), Some(libc::EIO | libc::EBADMSG | libc::EUCLEAN));
    lost || error.kind() == ErrorKind::UnexpectedEof
}

/// The error of a caller for what cannot be read: [`Error::Internal`] only if it is damaged.
pub(super) fn unreadable(what: &str) -> impl FnOnce(io::Error) -> Error {
    move |error| {
        if is_damage(&error) {
            return Error::Internal(format!("{what}: {error}"));
        }
        tracing::warn!(what, %error, "not readable for now");
        Error::Unavailable(format!("{what} for now"))
    }
}

/// Makes a folder for us alone.
pub(super) fn make(path: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(failed("a folder of the storage cannot be made"))
}

/// Makes what was renamed in a folder survive a loss of power.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(failed("a folder is not synchronised"))
}

pub(super) fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed("a file's mode is not set"))
}

/// Makes a file our own that another user wrote for us. It is a file, and not what a link leads to.
pub(super) fn take_over(path: &Path) -> Result<()> {
    let what = "a file cannot be taken over";
    let found = fs::symlink_metadata(path).map_err(failed(what))?;
    if !found.is_file() {
        return Err(Error::Internal(format!("{what}: it is none")));
    }
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    if (found.uid(), found.gid()) == (uid, gid) {
        return Ok(());
    }
    std::os::unix::fs::lchown(path, Some(uid), Some(gid)).map_err(failed(what))
}

/// Whether somebody may have a file open for writing, which a lease on it tells.
pub(super) fn may_be_written(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return true };
    #[expect(unsafe_code, reason = "there is no safe name for this call")]
    // SAFETY: the descriptor is open, and the call takes a number and gives one.
    let leased = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) };
    // The lease goes with the file.
    leased != 0
}

/// Gives a file another name, too, or copies it where that is not possible.
pub(super) fn link(from: &Path, to: &Path) -> Result<()> {
    let linked = fs::hard_link(from, to).or_else(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::AlreadyExists => Err(error),
        _ => fs::copy(from, to).map(drop),
    });
    linked.map_err(failed("a file cannot be linked"))
}

/// Removes a file; nothing there is no error.
pub(super) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("a file is not removed")(error)),
        _ => Ok(()),
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The id in a name, if the name is just what we would give.
fn of_kind<Id: FromStr + ToString>(name: &str, before: &str, after: &str) -> Option<Id> {
    let text = name.strip_prefix(before)?.strip_suffix(after)?;
    text.parse().ok().filter(|id: &Id| id.to_string() == text)
}

#[cfg(test)]
mod tests {
    use muster_types::ids::UploadId;

    use super::*;

    #[test]
    fn only_names_that_we_give_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let places = Places::new(folder.path());
        let (blob, upload) = (BlobId::new(), UploadId::new());
        let draft = Draft::Upload(upload);
        for path in [places.draft(draft), places.blob(blob), places.conversion(blob)] {
            make(path.parent().unwrap()).unwrap();
            fs::write(&path, "x").unwrap();
        }
        fs::write(places.sums(blob), "x").unwrap();
        for stranger in ["drafts/upload-", "drafts/notes", "conversions/x.qcow2", "blobs/notes"] {
            fs::write(folder.path().join(stranger), "x").unwrap();
        }
        fs::write(places.drafts().join(format!("upload-{}", upload.to_string().to_uppercase())), "x")
            .unwrap();
        let mut found: Vec<StoredFileKind> = places.find().into_iter().map(|(what, _)| what).collect();
        found.sort();
        assert_eq!(
            found,
            [StoredFileKind::Draft(draft), StoredFileKind::Blob(blob), StoredFileKind::Conversion(blob)]
        );
    }

    #[test]
    fn a_start_removes_what_jobs_left_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let work = folder.path().join("work");
        let left = work.join(format!("job-{}", Uuid::new_v4()));
        fs::create_dir_all(left.join("out")).unwrap();
        fs::create_dir_all(work.join("of-somebody-else")).unwrap();
        Places::new(folder.path());
        assert!(!left.exists() && work.join("of-somebody-else").exists());
    }
}
