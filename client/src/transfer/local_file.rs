//! Local files to upload.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{anyhow, bail};
use parking_lot::Mutex;

use super::checksum::{CHUNK_SIZE, ContentHasher};
use crate::error_text::io_error_text;
use crate::progress::ProgressMeter;

/// A file to upload, in the state in which it was opened.
#[derive(Debug)]
pub(crate) struct LocalFile {
    /// The path as the user gave it.
    given: PathBuf,
    /// The canonical path.
    pub(super) path: PathBuf,
    pub(super) file: Arc<File>,
    pub(crate) size: u64,
    /// The modification time in seconds, with nanoseconds.
    pub(super) modified: String,
}

impl LocalFile {
    pub(crate) fn open(given: &Path) -> anyhow::Result<Self> {
        let read_error =
            |error: &io::Error| anyhow!("cannot read {}: {}", given.display(), io_error_text(error));
        let file = File::open(given).map_err(|error| read_error(&error))?;
        let metadata = file.metadata().map_err(|error| read_error(&error))?;
        if !metadata.is_file() {
            bail!(
                "{} is not a regular file; give - and redirect its output to standard input",
                given.display()
            );
        }
        let path = given.canonicalize().map_err(|error| read_error(&error))?;
        let (size, modified) = (metadata.len(), modified(&metadata));
        Ok(Self { given: given.to_owned(), path, file: Arc::new(file), size, modified })
    }

    /// Returns the file name without directories.
    pub(crate) fn name(&self) -> String {
        self.given.file_name().unwrap_or(self.given.as_os_str()).to_string_lossy().into_owned()
    }

    /// Computes the SHA-512 as hexadecimal digits.
    pub(crate) async fn sha512(&self) -> anyhow::Result<String> {
        let meter = ProgressMeter::new(&format!("hashing {}", self.name()), 0, Some(self.size));
        let hasher = Arc::new(Mutex::new(ContentHasher::new()));
        self.hash_up_to(&hasher, self.size, &meter).await?;
        self.check_unchanged()?;
        let digest = hasher.lock().digest();
        Ok(digest)
    }

    /// Hashes the bytes before `end` that have not been hashed yet.
    pub(super) async fn hash_up_to(
        &self,
        hasher: &Arc<Mutex<ContentHasher>>,
        end: u64,
        meter: &ProgressMeter,
    ) -> anyhow::Result<()> {
        let (file, hasher, meter) = (Arc::clone(&self.file), Arc::clone(hasher), meter.clone());
        let work = move || {
            let mut hasher = hasher.lock();
            let mut chunk = vec![0; CHUNK_SIZE];
            while hasher.hashed() < end {
                let count = read_at(&file, &mut chunk, hasher.hashed(), end)?;
                hasher.update(&chunk[..count]);
                meter.set_position(hasher.hashed());
            }
            Ok(())
        };
        let hashed: io::Result<()> = tokio::task::spawn_blocking(work).await?;
        hashed.map_err(|error| self.read_error(&error))
    }

    /// Fails if the file was changed since it was opened.
    pub(crate) fn check_unchanged(&self) -> anyhow::Result<()> {
        let metadata = self.file.metadata().map_err(|error| self.read_error(&error))?;
        if metadata.len() == self.size && modified(&metadata) == self.modified {
            return Ok(());
        }
        bail!(
            "{} was changed during the upload; run the same command again once it no longer changes",
            self.given.display()
        )
    }

    pub(super) fn read_error(&self, error: &io::Error) -> anyhow::Error {
        anyhow!("cannot read {}: {}", self.given.display(), io_error_text(error))
    }
}

fn modified(metadata: &Metadata) -> String {
    format!("{}.{:09}", metadata.mtime(), metadata.mtime_nsec())
}

/// Reads at least one byte at `at`, none beyond `end`.
pub(super) fn read_at(file: &File, chunk: &mut [u8], at: u64, end: u64) -> io::Result<usize> {
    let length = (end - at).min(chunk.len() as u64) as usize;
    loop {
        match file.read_at(&mut chunk[..length], at) {
            Ok(0) => {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file was truncated"));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
