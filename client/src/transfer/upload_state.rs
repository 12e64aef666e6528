//! State of unfinished uploads, saved between runs in one file per local file, cluster and namespace. A lock prevents
//! concurrent runs from sending the same file.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use aws_lc_rs::digest::{SHA256, digest};
use muster_types::ids::UploadId;
use serde::{Deserialize, Serialize};

use super::local_file::LocalFile;
use crate::api::Client;
use crate::credentials::state_dir;
use crate::error_text::io_error_text;

/// The saved state of an unfinished upload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UploadEntry {
    server: String,
    namespace: String,
    file: String,
    size: u64,
    /// The modification time of the file in seconds, with nanoseconds.
    modified: String,
    /// The checksum of the whole file, once computed.
    #[serde(default)]
    pub(super) sha512: Option<String>,
    /// `None` before the upload is created.
    #[serde(default)]
    pub(super) upload: Option<UploadId>,
}

/// The locked state file of an upload.
#[derive(Debug)]
pub(crate) struct UploadState {
    path: PathBuf,
    /// Locked while this exists.
    file: File,
    /// Describes the current version of the local file.
    pub(super) entry: UploadEntry,
}

impl UploadState {
    /// Loads the state of uploading a file from the user's state directory.
    pub(crate) fn load(client: &Client, local: &LocalFile) -> anyhow::Result<Self> {
        let directory = state_dir().ok_or_else(|| {
            anyhow!("no directory for the upload state: set HOME or XDG_STATE_HOME, or upload from standard input with -")
        })?;
        Self::open(&directory.join("uploads"), client, local)
    }

    pub(super) fn open(directory: &Path, client: &Client, local: &LocalFile) -> anyhow::Result<Self> {
        let (server, namespace) = (client.url(), client.own_namespace());
        let mut identity = format!("{server}\n{namespace}\n").into_bytes();
        identity.extend_from_slice(local.path.as_os_str().as_bytes());
        let name = hex::encode(&digest(&SHA256, &identity).as_ref()[..16]);
        let path = directory.join(format!("{name}.json"));
        let file = open_locked(directory, &path)?;
        let entry = UploadEntry {
            server: server.to_owned(),
            namespace: namespace.to_owned(),
            file: local.path.display().to_string(),
            size: local.size,
            modified: local.modified.clone(),
            sha512: None,
            upload: None,
        };
        let mut state = Self { path, file, entry };
        if let Some(saved) = state.read().filter(|saved| state.is_same_file(saved)) {
            state.entry = saved;
        }
        Ok(state)
    }

    fn read(&mut self) -> Option<UploadEntry> {
        let mut text = String::new();
        self.file.read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Returns whether a saved entry describes the same, unchanged file.
    fn is_same_file(&self, saved: &UploadEntry) -> bool {
        UploadEntry { sha512: None, upload: None, ..saved.clone() } == self.entry
    }

    /// Returns the SHA-512 of the file, computing it if no earlier run did.
    pub(crate) async fn sha512(&mut self, local: &LocalFile) -> anyhow::Result<String> {
        if let Some(known) = &self.entry.sha512 {
            return Ok(known.clone());
        }
        let sha512 = local.sha512().await?;
        self.entry.sha512 = Some(sha512.clone());
        self.save()?;
        Ok(sha512)
    }

    /// Writes the state file.
    pub(super) fn save(&mut self) -> anyhow::Result<()> {
        let write = || {
            let text = format!("{:#}\n", serde_json::to_value(&self.entry)?);
            let mut file = &self.file;
            file.set_len(0)?;
            file.rewind()?;
            file.write_all(text.as_bytes())?;
            file.sync_all()
        };
        write().map_err(|error| anyhow!("cannot write {}: {}", self.path.display(), io_error_text(&error)))
    }

    /// Deletes the state: the upload was consumed or never created.
    pub(crate) fn discard(mut self) {
        (self.entry.sha512, self.entry.upload) = (None, None);
    }
}

impl Drop for UploadState {
    fn drop(&mut self) {
        if self.entry.sha512.is_none() && self.entry.upload.is_none() {
            // An orphaned state file is harmless.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Opens and locks a file that only its owner can read.
fn open_locked(directory: &Path, path: &Path) -> anyhow::Result<File> {
    let open = || {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
    };
    let open_error =
        |error: &std::io::Error| anyhow!("cannot open {}: {}", path.display(), io_error_text(error));
    loop {
        let file = open().map_err(|error| open_error(&error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("another muster process is uploading this file"),
            Err(TryLockError::Error(error)) => return Err(open_error(&error)),
        }
        // The previous lock owner may have deleted the file before it released the lock.
        if file.metadata().map_err(|error| open_error(&error))?.nlink() > 0 {
            return Ok(file);
        }
    }
}
