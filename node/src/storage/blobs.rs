//! Blobs: immutable files, each with a file of the checksums of its chunks.
//!
//! The checksum file is renamed into place before the blob, so that every blob that exists can be verified.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::future::Future;
use std::io::{ErrorKind, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_core::Stream;
use muster_types::blob::{ContentDigest, HashAlgorithm};
use muster_types::ids::BlobId;
use muster_types::storage::ByteStream;
use muster_types::{Error, Result};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use super::checksums::{CHUNK_SIZE, ChunkChecksums, hash_file, run_blocking, task_failed};
use super::layout::{self, StorageLayout, read_error};
use crate::files::{self, ScratchDir, io_error};

/// The number of chunks that are read before the reader requests them.
const READ_AHEAD_CHUNKS: usize = 2;
/// How far ahead of the reader the kernel is advised to read from disk.
const KERNEL_READ_AHEAD_BYTES: u64 = 6 * CHUNK_SIZE as u64;

/// Makes a file the content of a blob. If this process is killed, the blob is either complete or does not exist.
pub(super) fn commit(
    layout: &StorageLayout,
    file: &Path,
    chunks: &ChunkChecksums,
    blob: BlobId,
) -> Result<()> {
    let scratch = layout.scratch()?;
    let checksums = write_checksums(&scratch, chunks)?;
    let new = scratch.path("blob");
    layout::link(file, &new)?;
    layout::set_mode(&new, 0o444)?;
    File::open(&new).and_then(|new| new.sync_all()).map_err(io_error("failed to sync a blob"))?;
    let path = layout.blob(blob);
    let dir = path.parent().expect("blobs are in a directory");
    if !dir.exists() {
        files::create_dir(dir)?;
        dir.ancestors().skip(1).take(2).try_for_each(layout::sync_dir)?;
    }
    // The previous content must not be visible together with the new checksums.
    if path.exists() {
        make_draft_writable(&path, Some(&new))?;
        layout::remove(&path)?;
        layout::sync_dir(dir)?;
    }
    fs::rename(checksums, layout.checksums(blob))
        .map_err(io_error("failed to publish the checksums of a blob"))?;
    layout::sync_dir(dir)?;
    fs::rename(&new, &path).map_err(io_error("failed to publish a blob"))?;
    layout::sync_dir(dir)
}

fn write_checksums(scratch: &ScratchDir, chunks: &ChunkChecksums) -> Result<std::path::PathBuf> {
    let path = scratch.path("checksums");
    let written = File::create(&path).and_then(|mut file| {
        file.write_all(&chunks.to_bytes())?;
        file.sync_all()
    });
    written.map_err(io_error("failed to write the checksums of a blob")).map(|()| path)
}

/// Makes a draft writable again whose blob is about to be removed, unless `new` is the same file.
fn make_draft_writable(path: &Path, new: Option<&Path>) -> Result<()> {
    let Ok(metadata) = fs::metadata(path) else { return Ok(()) };
    let is_new = new.and_then(|new| fs::metadata(new).ok()).is_some_and(|new| new.ino() == metadata.ino());
    if metadata.nlink() > 1 && !is_new { layout::set_mode(path, 0o644) } else { Ok(()) }
}

pub(super) fn remove(layout: &StorageLayout, blob: BlobId) -> Result<()> {
    let path = layout.blob(blob);
    make_draft_writable(&path, None)?;
    layout::remove(&path)?;
    layout::remove(&layout.checksums(blob))?;
    let dir = path.parent().filter(|dir| dir.exists());
    dir.map_or(Ok(()), layout::sync_dir)
}

/// The chunk checksums of an intact blob whose checksum file is missing or damaged.
pub(super) struct ChecksumRepair {
    chunks: ChunkChecksums,
    /// The inode of the blob.
    inode: u64,
}

/// Reads a blob completely. Returns what is wrong with it, if anything, and a repair if only its checksum file is wrong.
pub(super) async fn verify(
    layout: &StorageLayout,
    blob: BlobId,
    content: &ContentDigest,
) -> Result<(Option<String>, Option<ChecksumRepair>)> {
    let damaged = |reason: String| Ok((Some(reason), None));
    let path = layout.blob(blob);
    let open = move || match File::open(path) {
        Ok(file) => {
            let inode = file.metadata().map_err(read_error("failed to inspect a blob"))?.ino();
            Ok(Some((file, inode)))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(read_error("failed to open a blob")(error)),
    };
    let hashed = async {
        let Some((file, inode)) = run_blocking(open).await? else { return Ok(None) };
        Ok(Some((hash_file(file, true).await?, inode)))
    };
    let (found, inode) = match hashed.await {
        Ok(Some(found)) => found,
        Ok(None) => return damaged("the file is missing".into()),
        // Verification is meant to find files that cannot be read.
        Err(Error::Internal(reason)) => return damaged(reason),
        Err(error) => return Err(error),
    };
    if found.content.size != content.size {
        return damaged(format!("{} bytes instead of {}", found.content.size, content.size));
    }
    let checksums = layout.checksums(blob);
    let stored = run_blocking(move || ChunkChecksums::read(&checksums)).await?;
    let difference = stored.as_ref().map_or(Some(0), |stored| stored.first_difference(&found.chunks));
    let differs = |algorithm: &&HashAlgorithm| {
        found.content.checksums.get(**algorithm) != content.checksums.get(**algorithm)
    };
    if let Some(algorithm) = HashAlgorithm::ALL.iter().find(differs) {
        let place = stored.and(difference).map(|offset| format!(" (damaged at byte {offset} or after it)"));
        return damaged(format!("{algorithm} differs{}", place.unwrap_or_default()));
    }
    Ok((None, difference.map(|_| ChecksumRepair { chunks: found.chunks, inode })))
}

/// Writes the checksum file again, unless the blob has been replaced meanwhile.
pub(super) fn repair(layout: &StorageLayout, blob: BlobId, repair: &ChecksumRepair) -> Result<()> {
    if fs::metadata(layout.blob(blob)).map_or(true, |metadata| metadata.ino() != repair.inode) {
        return Ok(());
    }
    tracing::warn!(%blob, "repaired checksum file of blob");
    let scratch = layout.scratch()?;
    let checksums = write_checksums(&scratch, &repair.chunks)?;
    fs::rename(checksums, layout.checksums(blob))
        .map_err(io_error("failed to publish the checksums of a blob"))
}

/// Reads a part of a blob and verifies every byte. [`Error::Internal`] means that the blob is damaged.
pub(super) fn read(layout: &StorageLayout, blob: BlobId, range: Range<u64>) -> Result<ByteStream> {
    let path = layout.blob(blob);
    let not_found_or = |what| {
        move |error: std::io::Error| match error.kind() {
            ErrorKind::NotFound => Error::not_found("blob"),
            _ => read_error(what)(error),
        }
    };
    let file = File::open(&path).map_err(not_found_or("failed to open a blob"))?;
    let metadata = file.metadata().map_err(read_error("failed to inspect a blob"))?;
    let (size, chunks) = (metadata.len(), ChunkChecksums::read(&layout.checksums(blob))?);
    // The checksums may belong to a file that is just replacing this one.
    if fs::metadata(&path).map_err(not_found_or("failed to inspect a blob"))?.ino() != metadata.ino() {
        return Err(Error::Unavailable("the blob is being replaced".into()));
    }
    let chunks = chunks.filter(|chunks| chunks.size == size).ok_or_else(|| {
        Error::Internal(format!("blob {blob} cannot be verified: its checksums are missing or damaged"))
    })?;
    if range.start > range.end || range.end > size {
        return Err(Error::Invalid(format!(
            "range {}-{} is not within {size} bytes",
            range.start, range.end
        )));
    }
    let source = BlobSource { blob, file, chunks, free_buffers: Mutex::default() };
    // The whole range is read in order, so the kernel may read further ahead.
    source.advise(PosixFadviseAdvice::POSIX_FADV_SEQUENTIAL, 0, 0);
    Ok(Box::pin(BlobReader {
        source: Arc::new(source),
        next_chunk: range.start / CHUNK_SIZE as u64,
        range,
        pending: VecDeque::with_capacity(READ_AHEAD_CHUNKS),
    }))
}

struct BlobSource {
    blob: BlobId,
    file: File,
    chunks: ChunkChecksums,
    /// Buffers for reuse: allocating one takes as long as reading into it.
    free_buffers: Mutex<Vec<Vec<u8>>>,
}

/// The bytes of a chunk; its buffer is returned for reuse on drop.
struct BufferedChunk {
    data: Vec<u8>,
    size: usize,
    source: Arc<BlobSource>,
}

impl AsRef<[u8]> for BufferedChunk {
    fn as_ref(&self) -> &[u8] {
        &self.data[..self.size]
    }
}

impl Drop for BufferedChunk {
    fn drop(&mut self) {
        let mut free_buffers = self.source.free_buffers.lock();
        if free_buffers.len() <= READ_AHEAD_CHUNKS {
            free_buffers.push(std::mem::take(&mut self.data));
        }
    }
}

impl BlobSource {
    /// Advises the kernel about future reads; failures do not matter.
    fn advise(&self, advice: PosixFadviseAdvice, offset: u64, size: usize) {
        let (Ok(offset), Ok(size)) = (i64::try_from(offset), i64::try_from(size)) else { return };
        let _ = posix_fadvise(&self.file, offset, size, advice);
    }

    fn chunk(self: &Arc<Self>, number: u64) -> Result<Bytes> {
        let offset = number * CHUNK_SIZE as u64;
        // The disk reads while this chunk is verified and sent.
        self.advise(PosixFadviseAdvice::POSIX_FADV_WILLNEED, offset + KERNEL_READ_AHEAD_BYTES, CHUNK_SIZE);
        let buffer = self.free_buffers.lock().pop();
        let mut data = buffer.unwrap_or_else(|| vec![0; CHUNK_SIZE]);
        let size = self.chunks.size.saturating_sub(offset).min(CHUNK_SIZE as u64);
        let size = usize::try_from(size).expect("at most CHUNK_SIZE");
        let read = self.file.read_exact_at(&mut data[..size], offset);
        read.map_err(read_error(&format!("failed to read blob {} at byte {offset}", self.blob)))?;
        let is_intact =
            usize::try_from(number).is_ok_and(|number| self.chunks.matches(number, &data[..size]));
        if !is_intact {
            return Err(Error::Internal(format!(
                "blob {} is damaged at byte {offset} or after it",
                self.blob
            )));
        }
        Ok(Bytes::from_owner(BufferedChunk { data, size, source: self.clone() }))
    }
}

struct BlobReader {
    source: Arc<BlobSource>,
    /// The range that has not been returned yet.
    range: Range<u64>,
    /// The next chunk to read.
    next_chunk: u64,
    pending: VecDeque<JoinHandle<Result<Bytes>>>,
}

impl Stream for BlobReader {
    type Item = Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let reader = &mut *self;
        while reader.pending.len() < READ_AHEAD_CHUNKS
            && reader.next_chunk * (CHUNK_SIZE as u64) < reader.range.end
        {
            let (source, number) = (reader.source.clone(), reader.next_chunk);
            reader.pending.push_back(tokio::task::spawn_blocking(move || source.chunk(number)));
            reader.next_chunk += 1;
        }
        if reader.range.is_empty() {
            return Poll::Ready(None);
        }
        let Some(first) = reader.pending.front_mut() else { return Poll::Ready(None) };
        let chunk = ready!(Pin::new(first).poll(context)).unwrap_or_else(|error| Err(task_failed(error)));
        reader.pending.pop_front();
        let skipped = reader.range.start % CHUNK_SIZE as u64;
        let length = (reader.range.end - reader.range.start).min(CHUNK_SIZE as u64 - skipped);
        let slice = chunk.map(|chunk| {
            #[expect(clippy::cast_possible_truncation, reason = "not longer than a chunk")]
            let (start, end) = (skipped as usize, (skipped + length) as usize);
            chunk.slice(start..end)
        });
        reader.range.start += length;
        if slice.is_err() {
            reader.range.start = reader.range.end;
            reader.pending.clear();
        }
        Poll::Ready(Some(slice))
    }
}
