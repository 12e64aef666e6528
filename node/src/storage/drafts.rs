//! Drafts: files that grow, with one writer at a time, and are hashed while they are written.
//!
//! ```text
//! stream ──1 MiB──▶ write     each a blocking task, one at a time; the next MiB is received meanwhile
//!             └────▶ hash
//! ```
//!
//! The length of the file is authoritative. A hasher is only used if it has hashed exactly that length; otherwise the
//! file is read again when its checksums are requested.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use muster_types::storage::{ByteStream, Draft};
use muster_types::{Error, Result};
use parking_lot::Mutex;
use tokio::sync::{OwnedMutexGuard, watch};

use super::checksums::{BackgroundTask, CHUNK_SIZE, ContentHasher, HashedContent, hash_file, run_blocking};
use super::layout::{self, StorageLayout};
use crate::files::{self, io_error};

/// The maximum number of idle drafts that are cached.
const MAX_CACHED_DRAFTS: usize = 128;

/// The time that an idle draft is cached.
const CACHE_TTL: Duration = Duration::from_secs(3600);

/// The drafts of a storage.
#[derive(Debug)]
pub(super) struct Drafts {
    layout: StorageLayout,
    states: Mutex<HashMap<Draft, (Instant, Arc<DraftState>)>>,
}

#[derive(Debug)]
struct DraftState {
    /// Locked while the file is in use; contains the hasher of the data written so far.
    lock: Arc<tokio::sync::Mutex<Option<ContentHasher>>>,
    /// Notifies running appends that they have to stop.
    stop: watch::Sender<()>,
}

/// The exclusive access to a draft.
pub(super) type DraftGuard = OwnedMutexGuard<Option<ContentHasher>>;

impl Drafts {
    pub(super) fn new(layout: StorageLayout) -> Self {
        Self { layout, states: Mutex::default() }
    }

    fn state(&self, draft: Draft) -> Arc<DraftState> {
        let mut states = self.states.lock();
        let now = Instant::now();
        // A blocking task whose future was dropped still owns the lock, but not the state.
        let is_idle =
            |state: &Arc<DraftState>| Arc::strong_count(state) == 1 && Arc::strong_count(&state.lock) == 1;
        states.retain(|_, (last_used, state)| now.duration_since(*last_used) < CACHE_TTL || !is_idle(state));
        if states.len() > MAX_CACHED_DRAFTS
            && let Some(oldest) = states
                .iter()
                .filter(|(_, (_, state))| is_idle(state))
                .min_by_key(|(_, (last_used, _))| last_used)
        {
            let oldest = *oldest.0;
            states.remove(&oldest);
        }
        let new = || (now, Arc::new(DraftState { lock: Arc::default(), stop: watch::Sender::new(()) }));
        let (last_used, state) = states.entry(draft).or_insert_with(new);
        *last_used = now;
        state.clone()
    }

    /// Locks a draft.
    pub(super) async fn lock(&self, draft: Draft) -> DraftGuard {
        self.state(draft).lock.clone().lock_owned().await
    }

    pub(super) async fn size(&self, draft: Draft) -> Result<Option<u64>> {
        let path = self.layout.draft(draft);
        run_blocking(move || match fs::metadata(path) {
            Ok(found) => Ok(Some(found.len())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(io_error("failed to inspect a draft")(error)),
        })
        .await
    }

    pub(super) async fn append(
        &self,
        draft: Draft,
        offset: Option<u64>,
        max_size: u64,
        mut data: ByteStream,
    ) -> Result<u64> {
        let state = self.state(draft);
        let mut stop = state.stop.subscribe();
        let guard = state.lock.clone().lock_owned().await;
        let stopped = || Error::Conflict("the upload was truncated while this part was received".into());
        if stop.has_changed().unwrap_or(true) {
            return Err(stopped());
        }
        let layout = self.layout.clone();
        let file = self.layout.draft(draft);
        let writer = run_blocking(move || DraftWriter::open(guard, layout, &file, offset)).await?;
        let mut received = writer.size;
        let mut pipeline = AppendPipeline::new(writer);
        let mut failure = None;
        loop {
            let next = tokio::select! {
                biased;
                _ = stop.changed() => Some(Err(stopped())),
                next = std::future::poll_fn(|context| data.as_mut().poll_next(context)) => next,
            };
            let bytes = match next {
                Some(Ok(bytes)) => bytes,
                Some(Err(error)) => {
                    failure = Some(error);
                    break;
                }
                None => break,
            };
            received = received.saturating_add(bytes.len() as u64);
            if received > max_size {
                pipeline.undo().await?;
                return Err(Error::TooLarge(format!("the content is larger than {max_size} bytes")));
            }
            pipeline = pipeline.append(bytes).await?;
        }
        if failure.is_some() && offset.is_none() {
            // A client that does not name an offset sends everything again, and may have truncated the draft meanwhile.
            pipeline.undo().await?;
            return failure.map_or(Ok(0), Err);
        }
        let size = pipeline.finish().await?;
        failure.map_or(Ok(size), Err)
    }

    pub(super) async fn truncate(&self, draft: Draft, size: u64) -> Result<()> {
        let mut guard = self.interrupt(draft).await;
        let path = self.layout.draft(draft);
        run_blocking(move || {
            let found = fs::metadata(&path).map_err(open_error)?;
            if size > found.len() {
                return Err(Error::Invalid(format!("cannot truncate {} bytes to {size}", found.len())));
            }
            require_unpublished(&found)?;
            let file = OpenOptions::new().write(true).open(path).map_err(open_error)?;
            if guard.as_ref().is_some_and(|hasher| hasher.size != size) {
                *guard = None;
            }
            file.set_len(size).map_err(io_error("failed to truncate a draft"))
        })
        .await
    }

    pub(super) async fn remove(&self, draft: Draft) -> Result<()> {
        let mut guard = self.interrupt(draft).await;
        let path = self.layout.draft(draft);
        run_blocking(move || {
            *guard = None;
            layout::remove(&path)
        })
        .await
    }

    /// Makes a finished file a draft, replacing an existing one.
    pub(super) async fn adopt(&self, draft: Draft, file: PathBuf) -> Result<()> {
        let mut guard = self.interrupt(draft).await;
        let layout = self.layout.clone();
        run_blocking(move || {
            files::create_dir(&layout.drafts())?;
            layout::take_ownership(&file)?;
            // The hasher belongs to the file that is replaced.
            *guard = None;
            layout::set_mode(&file, 0o644)?;
            let to = layout.draft(draft);
            fs::rename(file, &to).map_err(io_error("failed to rename a draft"))?;
            if layout::may_be_open_for_writing(&to) {
                // Its writer still has it open and could change it after it was hashed.
                let scratch = layout.scratch()?;
                let copy = scratch.path("own");
                fs::copy(&to, &copy).map_err(io_error("failed to copy a draft"))?;
                fs::rename(copy, &to).map_err(io_error("failed to rename a draft"))?;
            }
            Ok(())
        })
        .await
    }

    /// Stops running appends and locks the draft.
    async fn interrupt(&self, draft: Draft) -> DraftGuard {
        let state = self.state(draft);
        state.stop.send_replace(());
        state.lock.clone().lock_owned().await
    }

    /// Returns the checksums of a locked draft: those computed while it was written, or else it is read.
    pub(super) async fn hashed(&self, draft: Draft, guard: &mut DraftGuard) -> Result<HashedContent> {
        let path = self.layout.draft(draft);
        let open = move || {
            let file = File::open(path).map_err(open_error)?;
            let size = file.metadata().map_err(io_error("failed to inspect a draft"))?.len();
            Ok((file, size))
        };
        let (file, size) = run_blocking(open).await?;
        match guard.take().filter(|hasher| hasher.size == size) {
            Some(hasher) => {
                let (hashed, hasher) = hasher.finish().await?;
                **guard = Some(hasher);
                Ok(hashed)
            }
            None => hash_file(file, false).await,
        }
    }
}

pub(super) fn open_error(error: std::io::Error) -> Error {
    if error.kind() == ErrorKind::NotFound {
        return Error::not_found("draft");
    }
    io_error("failed to open a draft")(error)
}

/// Refuses to change a file that is also a blob.
fn require_unpublished(found: &fs::Metadata) -> Result<()> {
    if found.nlink() > 1 {
        return Err(Error::Conflict("the content is already stored as a blob and cannot change".into()));
    }
    Ok(())
}

/// The end of a draft. It moves through the blocking tasks together with the guard: if the append is cancelled, the
/// draft stays locked until the last write is done.
#[derive(Debug)]
struct DraftWriter {
    guard: DraftGuard,
    file: File,
    layout: StorageLayout,
    /// The size when the append started.
    before: u64,
    size: u64,
}

impl DraftWriter {
    fn open(guard: DraftGuard, layout: StorageLayout, path: &Path, offset: Option<u64>) -> Result<Self> {
        let before = match fs::metadata(path) {
            Ok(found) => {
                require_unpublished(&found)?;
                found.len()
            }
            Err(error) if error.kind() == ErrorKind::NotFound => 0,
            Err(error) => return Err(open_error(error)),
        };
        if offset.is_some_and(|offset| offset != before) {
            return Err(Error::Conflict(format!("the upload has {before} bytes so far")));
        }
        files::create_dir(&layout.drafts())?;
        let options = OpenOptions::new().write(true).create(true).truncate(false).mode(0o644).open(path);
        let file = options.map_err(io_error("failed to create a draft"))?;
        // Regardless of the umask: the image tools read it as another user.
        file.set_permissions(Permissions::from_mode(0o644))
            .map_err(io_error("failed to set the mode of a draft"))?;
        Ok(Self { guard, file, layout, before, size: before })
    }

    /// Writes at the end, or restores the size that the draft had when the append started.
    fn write(&mut self, data: &[u8]) -> Result<()> {
        let size = data.len() as u64;
        let written = self.layout.require_space(size).and_then(|()| {
            self.file.write_all_at(data, self.size).map_err(io_error("failed to write a draft"))
        });
        match written {
            Ok(()) => {
                self.size += size;
                Ok(())
            }
            Err(error) => {
                self.undo()?;
                Err(error)
            }
        }
    }

    fn undo(&mut self) -> Result<()> {
        self.file.set_len(self.before).map_err(io_error("failed to truncate a draft"))?;
        self.size = self.before;
        Ok(())
    }
}

/// A writer and a hasher that work concurrently.
#[derive(Debug)]
struct AppendPipeline {
    writing: BackgroundTask<Result<DraftWriter>>,
    hasher: Option<ContentHasher>,
    /// Received bytes that do not fill a chunk yet.
    buffer: Vec<u8>,
}

impl AppendPipeline {
    fn new(mut writer: DraftWriter) -> Self {
        let previous = writer.guard.take().filter(|hasher| hasher.size == writer.before);
        let hasher = previous.or_else(|| (writer.before == 0).then(ContentHasher::new));
        Self { writing: BackgroundTask::Idle(Ok(writer)), hasher, buffer: Vec::new() }
    }

    /// Appends bytes, which are written in chunks.
    async fn append(mut self, mut bytes: Bytes) -> Result<Self> {
        if self.buffer.is_empty() && bytes.len() >= CHUNK_SIZE {
            return self.write(bytes).await;
        }
        while !bytes.is_empty() {
            let part = bytes.split_to(bytes.len().min(CHUNK_SIZE - self.buffer.len()));
            if self.buffer.capacity() == 0 {
                self.buffer.reserve_exact(CHUNK_SIZE);
            }
            self.buffer.extend_from_slice(&part);
            if self.buffer.len() == CHUNK_SIZE {
                let chunk = std::mem::take(&mut self.buffer).into();
                self = self.write(chunk).await?;
            }
        }
        Ok(self)
    }

    /// Starts to write these bytes, after the previous ones have been written.
    async fn write(self, data: Bytes) -> Result<Self> {
        let mut writer = self.writing.join().await??;
        let hashed = data.clone();
        let writing = BackgroundTask::spawn(move || {
            writer.write(&data)?;
            Ok(writer)
        });
        let hasher = match self.hasher {
            Some(hasher) => Some(hasher.feed(hashed).await?),
            None => None,
        };
        Ok(Self { writing, hasher, buffer: self.buffer })
    }

    /// Writes the rest, waits for it, and stores the hasher for the next append.
    async fn finish(mut self) -> Result<u64> {
        if !self.buffer.is_empty() {
            let rest = std::mem::take(&mut self.buffer).into();
            self = self.write(rest).await?;
        }
        let mut writer = self.writing.join().await??;
        *writer.guard = self.hasher;
        Ok(writer.size)
    }

    /// Restores the size that the draft had when the append started.
    async fn undo(self) -> Result<()> {
        let mut writer = self.writing.join().await??;
        run_blocking(move || writer.undo()).await
    }
}

#[cfg(test)]
mod tests {
    use muster_types::ids::BlobId;

    use super::*;

    #[tokio::test]
    async fn adopted_file_becomes_an_independent_draft() {
        let dir = tempfile::tempdir().unwrap();
        let (drafts, draft) = (Drafts::new(StorageLayout::new(dir.path())), Draft::Vm(BlobId::new()));
        let file = dir.path().join("file");
        for text in ["first", "and another"] {
            fs::write(&file, text).unwrap();
            fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
            if nix::unistd::geteuid().is_root() {
                std::os::unix::fs::chown(&file, Some(12345), Some(12345)).unwrap();
            }
            drafts.adopt(draft, file.clone()).await.unwrap();
            assert!(!file.exists());
            let found = fs::metadata(drafts.layout.draft(draft)).unwrap();
            let owner = nix::unistd::geteuid().as_raw();
            assert_eq!((found.mode() & 0o777, found.uid(), found.len()), (0o644, owner, text.len() as u64));
            let mut guard = drafts.lock(draft).await;
            assert_eq!(drafts.hashed(draft, &mut guard).await.unwrap().content.size, text.len() as u64);
        }
        // A writer that still has the file open cannot change the draft.
        fs::write(&file, "hashed bytes").unwrap();
        let writer = fs::OpenOptions::new().write(true).open(&file).unwrap();
        drafts.adopt(draft, file.clone()).await.unwrap();
        std::os::unix::fs::FileExt::write_all_at(&writer, b"changed", 0).unwrap();
        assert_eq!(fs::read(drafts.layout.draft(draft)).unwrap(), b"hashed bytes");
        drop(writer);
        // The file may be anything its writer put there.
        std::os::unix::fs::symlink("/etc/passwd", &file).unwrap();
        assert!(matches!(drafts.adopt(draft, file).await, Err(Error::Internal(_))));
        assert_eq!(drafts.size(draft).await.unwrap(), Some(12));
    }
}
