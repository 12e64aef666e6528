//! Backups of a cluster: one encrypted file with a snapshot of the database, the seed, and the blobs if they are wanted. See
//! docs/decisions/0097.

mod archive;
mod create;
mod encryption;
mod load;
mod output_file;

use std::io;
use std::path::{Path, PathBuf};

use muster_store::StoreError;
use muster_store::backup::StoredBlob;
use muster_types::storage::blob_path;

pub use archive::{ArchiveWriter, BlobMode, FORMAT, Manifest, PartHeader};
pub use create::{BackupSummary, NewBackup, create};
pub use encryption::{DecryptionKey, EncryptedWriter, Protection, generate_key};
pub use load::{BackupReport, LoadTarget, LoadedBackup, load, verify};

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

/// Returns the file of a blob in one of some storages.
fn find_blob(storages: &[PathBuf], blob: &StoredBlob) -> Option<PathBuf> {
    storages.iter().map(|root| blob_path(root, blob.id)).find(|path| path.is_file())
}
