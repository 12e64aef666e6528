//! Backups of a cluster: one encrypted file with a snapshot of the database, the seed, and the blobs if they are wanted. See
//! docs/decisions/0097.

mod archive;
mod create;
mod encryption;
mod load;
mod output_file;
mod progress;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;

use muster_store::StoreError;
use muster_store::backup::StoredBlob;
use muster_types::ids::BlobId;
use muster_types::storage::blob_path;
use nix::sys::statvfs::statvfs;
use tokio::sync::mpsc;

pub use archive::{ArchiveWriter, FORMAT, Manifest, PartHeader};
pub use create::{BackupSummary, NewBackup, create};
pub use encryption::{DecryptionKey, EncryptedWriter, Protection, generate_key};
pub use load::{BackupReport, LoadTarget, LoadedBackup, load, verify};
pub use muster_types::backup::BlobMode;
pub use progress::{BackupPhase, BackupProgress, ProgressReceiver};

/// The result of copying a blob: why it failed, if it did.
pub type CopyFuture<'a> = Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>>;

/// The other hosts of the cluster, which have blobs that this host lacks.
pub trait BlobSource: fmt::Debug + Send + Sync {
    /// Sends the content of a blob in parts of at most [`MAX_CHUNK_BYTES`].
    fn copy(&self, blob: BlobId, sink: mpsc::Sender<Vec<u8>>) -> CopyFuture<'_>;
}

/// The maximum size of a part of a blob.
pub const MAX_CHUNK_BYTES: usize = 1 << 20;

/// Why a backup cannot be created or read.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    #[error("wrong key: {0}")]
    WrongKey(String),
    #[error("the backup is damaged: {0}")]
    Damaged(String),
    #[error("{0}")]
    Failed(String),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Io(io::Error),
}

impl From<io::Error> for BackupError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::InvalidData => Self::Damaged(error.to_string()),
            io::ErrorKind::UnexpectedEof => Self::Damaged("the file is truncated".to_owned()),
            _ => Self::Io(error),
        }
    }
}

/// Adds what failed to an error of the file system.
fn with_path<'a>(action: &'a str, path: &'a Path) -> impl Fn(io::Error) -> BackupError + 'a {
    move |error| {
        let text = format!("failed to {action} {}: {error}", path.display());
        BackupError::Io(io::Error::new(error.kind(), text))
    }
}

/// Fails if a directory has less space than needed. The nearest parent that exists counts.
fn require_space(directory: &Path, needed: u64) -> Result<(), BackupError> {
    let Some(existing) = directory.ancestors().find(|path| path.exists()) else { return Ok(()) };
    // A file system that does not tell is used until it is full.
    let Ok(usage) = statvfs(existing) else { return Ok(()) };
    let available = usage.blocks_available().saturating_mul(usage.fragment_size());
    if needed <= available {
        return Ok(());
    }
    Err(BackupError::Failed(format!(
        "not enough space in {}: the blobs need {} MiB, and {} MiB are available",
        directory.display(),
        needed.div_ceil(1 << 20),
        available >> 20
    )))
}

/// Returns the file of a blob in one of some storages.
fn find_blob(storages: &[PathBuf], blob: &StoredBlob) -> Option<PathBuf> {
    storages.iter().map(|root| blob_path(root, blob.id)).find(|path| path.is_file())
}
