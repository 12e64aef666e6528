//! Uploads that have not ended, remembered from one run of the program to the next: one file for each content that
//! goes to a namespace of a cluster. A lock keeps two runs from sending the same file at once.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use aws_lc_rs::digest::{SHA256, digest};
use muster_types::ids::UploadId;
use serde::{Deserialize, Serialize};

use super::hex;
use super::upload::LocalFile;
use crate::api::{Client, io_text};
use crate::credentials::state_dir;

/// What is known of an upload that has not ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    server: String,
    namespace: String,
    file: String,
    size: u64,
    /// When the file was last changed, to the nanosecond.
    modified: String,
    /// Of the whole file, once that is known.
    #[serde(default)]
    pub(super) sha512: Option<String>,
    /// Nothing before the upload has begun.
    #[serde(default)]
    pub(super) upload: Option<UploadId>,
}

/// The memory of one upload.
#[derive(Debug)]
pub(crate) struct Remembered {
    path: PathBuf,
    /// Locked for as long as this lives.
    file: File,
    /// About the file as it is now.
    pub(super) entry: Entry,
}

impl Remembered {
    /// What is remembered of sending a file, in the user's folder.
    pub(crate) fn of(client: &Client, local: &LocalFile) -> anyhow::Result<Self> {
        let folder = state_dir().ok_or_else(|| {
            anyhow!("no folder to remember the upload in: set HOME or XDG_STATE_HOME, or upload from -")
        })?;
        Self::open(&folder.join("uploads"), client, local)
    }

    pub(super) fn open(folder: &Path, client: &Client, local: &LocalFile) -> anyhow::Result<Self> {
        let (server, namespace) = (client.url(), client.acts_as());
        let mut about = format!("{server}\n{namespace}\n").into_bytes();
        about.extend_from_slice(local.path.as_os_str().as_bytes());
        let name = hex(digest(&SHA256, &about).as_ref().get(..16).unwrap_or_default());
        let path = folder.join(format!("{name}.json"));
        let file = lock(folder, &path)?;
        let entry = Entry {
            server: server.to_owned(),
            namespace: namespace.to_owned(),
            file: local.path.display().to_string(),
            size: local.size,
            modified: local.modified.clone(),
            sha512: None,
            upload: None,
        };
        let mut known = Self { path, file, entry };
        if let Some(before) = known.read().filter(|before| known.fits(before)) {
            known.entry = before;
        }
        Ok(known)
    }

    fn read(&mut self) -> Option<Entry> {
        let mut text = String::new();
        self.file.read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Whether something remembered is about the same, unchanged file.
    fn fits(&self, before: &Entry) -> bool {
        Entry { sha512: None, upload: None, ..before.clone() } == self.entry
    }

    /// The sha512 of the file; if it is not known from an earlier run, the file is read.
    pub(crate) async fn sha512(&mut self, local: &LocalFile) -> anyhow::Result<String> {
        if let Some(known) = &self.entry.sha512 {
            return Ok(known.clone());
        }
        let sha512 = local.sha512().await?;
        self.entry.sha512 = Some(sha512.clone());
        self.save()?;
        Ok(sha512)
    }

    /// Writes down what is known.
    pub(super) fn save(&mut self) -> anyhow::Result<()> {
        let write = || {
            let text = format!("{:#}\n", serde_json::to_value(&self.entry)?);
            let mut file = &self.file;
            file.set_len(0)?;
            file.rewind()?;
            file.write_all(text.as_bytes())?;
            file.sync_all()
        };
        write().map_err(|error| anyhow!("cannot write {}: {}", self.path.display(), io_text(&error)))
    }

    /// Forgets it: the upload has ended, or none has begun.
    pub(crate) fn forget(mut self) {
        (self.entry.sha512, self.entry.upload) = (None, None);
    }
}

impl Drop for Remembered {
    fn drop(&mut self) {
        if self.entry.sha512.is_none() && self.entry.upload.is_none() {
            // One that is left is of no use, but does no harm either.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Opens and locks a file that only its owner may read.
fn lock(folder: &Path, path: &Path) -> anyhow::Result<File> {
    let open = || {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
    };
    let bad = |error: &std::io::Error| anyhow!("cannot open {}: {}", path.display(), io_text(error));
    loop {
        let file = open().map_err(|error| bad(&error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("another muster is uploading this file now"),
            Err(TryLockError::Error(error)) => return Err(bad(&error)),
        }
        // Whoever had the lock before may have removed the file before giving it up.
        if file.metadata().map_err(|error| bad(&error))?.nlink() > 0 {
            return Ok(file);
        }
    }
}
