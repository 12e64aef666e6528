//! Drafts: files that grow, one writer at a time, summed up while they do.
//!
//! ```text
//! stream ──1 MiB──▶ write     each in a thread of its own, one at a time; the next MiB is received meanwhile
//!             └────▶ sums
//! ```
//!
//! The length of the file is the truth. Sums are only of use when they are of just that length; otherwise the file is
//! read once more when somebody asks.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use muster_types::storage::{ByteStream, Draft};
use muster_types::{Error, Result};
use tokio::sync::{OwnedMutexGuard, watch};

use super::places::{self, Places, failed};
use super::sums::{Lane, PIECE, Summed, Summing, blocking, sum_up};

/// How many drafts are remembered that nobody works on.
const REMEMBERED: usize = 128;

/// How long such a draft is remembered.
const IDLE: Duration = Duration::from_secs(3600);

/// All drafts of a storage.
#[derive(Debug)]
pub(super) struct Drafts {
    places: Places,
    known: Mutex<HashMap<Draft, (Instant, Arc<Known>)>>,
}

#[derive(Debug)]
struct Known {
    /// Held by whoever works on the file; has the sums of its beginning.
    turn: Arc<tokio::sync::Mutex<Option<Summing>>>,
    /// Changes when those that append shall stop.
    stop: watch::Sender<()>,
}

/// The right to work on a draft.
pub(super) type Turn = OwnedMutexGuard<Option<Summing>>;

impl Drafts {
    pub(super) fn new(places: Places) -> Self {
        Self { places, known: Mutex::default() }
    }

    fn known(&self, draft: Draft) -> Arc<Known> {
        let mut all = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        // Work that nobody waits for any more holds the turn only.
        let idle = |known: &Arc<Known>| Arc::strong_count(known) == 1 && Arc::strong_count(&known.turn) == 1;
        all.retain(|_, (used, known)| now.duration_since(*used) < IDLE || !idle(known));
        if all.len() > REMEMBERED
            && let Some(oldest) =
                all.iter().filter(|(_, (_, known))| idle(known)).min_by_key(|(_, (used, _))| used)
        {
            let oldest = *oldest.0;
            all.remove(&oldest);
        }
        let fresh = || (now, Arc::new(Known { turn: Arc::default(), stop: watch::Sender::new(()) }));
        let (used, known) = all.entry(draft).or_insert_with(fresh);
        *used = now;
        known.clone()
    }

    /// Waits until nobody works on a draft.
    pub(super) async fn turn(&self, draft: Draft) -> Turn {
        self.known(draft).turn.clone().lock_owned().await
    }

    pub(super) async fn size(&self, draft: Draft) -> Result<Option<u64>> {
        let path = self.places.draft(draft);
        blocking(move || match fs::metadata(path) {
            Ok(found) => Ok(Some(found.len())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("a draft cannot be looked at")(error)),
        })
        .await
    }

    pub(super) async fn append(
        &self,
        draft: Draft,
        at: Option<u64>,
        most: u64,
        mut data: ByteStream,
    ) -> Result<u64> {
        let known = self.known(draft);
        let mut stop = known.stop.subscribe();
        let turn = known.turn.clone().lock_owned().await;
        let stopped = || Error::Conflict("the upload was cut while this part came in".into());
        if stop.has_changed().unwrap_or(true) {
            return Err(stopped());
        }
        let places = self.places.clone();
        let file = self.places.draft(draft);
        let writer = blocking(move || Writer::open(turn, places, &file, at)).await?;
        let mut received = writer.size;
        let mut pipe = Pipe::new(writer);
        let mut buffer = Vec::new();
        let mut failure = None;
        loop {
            let next = tokio::select! {
                biased;
                _ = stop.changed() => Some(Err(stopped())),
                next = std::future::poll_fn(|context| data.as_mut().poll_next(context)) => next,
            };
            let mut bytes = match next {
                Some(Ok(bytes)) => bytes,
                Some(Err(error)) => {
                    failure = Some(error);
                    break;
                }
                None => break,
            };
            received = received.saturating_add(bytes.len() as u64);
            if received > most {
                pipe.undo().await?;
                return Err(Error::TooLarge(format!("the content is larger than {most} bytes")));
            }
            if buffer.is_empty() && bytes.len() >= PIECE {
                pipe = pipe.push(bytes).await?;
                continue;
            }
            while !bytes.is_empty() {
                let part = bytes.split_to(bytes.len().min(PIECE - buffer.len()));
                if buffer.capacity() == 0 {
                    buffer.reserve_exact(PIECE);
                }
                buffer.extend_from_slice(&part);
                if buffer.len() == PIECE {
                    pipe = pipe.push(std::mem::take(&mut buffer).into()).await?;
                }
            }
        }
        if failure.is_some() && at.is_none() {
            // Who does not say where a part begins sends all of it again, and may have cut the draft before this came.
            pipe.undo().await?;
            return failure.map_or(Ok(0), Err);
        }
        if !buffer.is_empty() {
            pipe = pipe.push(buffer.into()).await?;
        }
        let size = pipe.end().await?;
        failure.map_or(Ok(size), Err)
    }

    pub(super) async fn truncate(&self, draft: Draft, size: u64) -> Result<()> {
        let mut turn = self.interrupt(draft).await;
        let path = self.places.draft(draft);
        blocking(move || {
            let found = fs::metadata(&path).map_err(absent)?;
            if size > found.len() {
                return Err(Error::Invalid(format!("cannot cut {} bytes to {size}", found.len())));
            }
            require_own(&found)?;
            let file = OpenOptions::new().write(true).open(path).map_err(absent)?;
            if turn.as_ref().is_some_and(|summing| summing.size != size) {
                *turn = None;
            }
            file.set_len(size).map_err(failed("a draft cannot be cut"))
        })
        .await
    }

    pub(super) async fn remove(&self, draft: Draft) -> Result<()> {
        let mut turn = self.interrupt(draft).await;
        let path = self.places.draft(draft);
        blocking(move || {
            *turn = None;
            places::remove(&path)
        })
        .await
    }

    /// Makes a finished file a draft, in place of one that is there.
    pub(super) async fn adopt(&self, draft: Draft, file: PathBuf) -> Result<()> {
        let mut turn = self.interrupt(draft).await;
        let places = self.places.clone();
        blocking(move || {
            places::make(&places.drafts())?;
            places::take_over(&file)?;
            // Whatever is known was of what is there now.
            *turn = None;
            places::set_mode(&file, 0o644)?;
            let to = places.draft(draft);
            fs::rename(file, &to).map_err(failed("a draft gets no name"))?;
            if places::may_be_written(&to) {
                // Whoever made it holds it open, and could change it after it was summed up.
                let scratch = places.job()?;
                let copy = scratch.path("own");
                fs::copy(&to, &copy).map_err(failed("a draft cannot be copied"))?;
                fs::rename(copy, &to).map_err(failed("a draft gets no name"))?;
            }
            Ok(())
        })
        .await
    }

    /// Stops those that append, and waits for them.
    async fn interrupt(&self, draft: Draft) -> Turn {
        let known = self.known(draft);
        known.stop.send_replace(());
        known.turn.clone().lock_owned().await
    }

    /// The sums of a draft whose turn it is: those that were made while it came in, or else it is read.
    pub(super) async fn summed(&self, draft: Draft, turn: &mut Turn) -> Result<Summed> {
        let path = self.places.draft(draft);
        let open = move || {
            let file = File::open(path).map_err(absent)?;
            let size = file.metadata().map_err(failed("a draft cannot be looked at"))?.len();
            Ok((file, size))
        };
        let (file, size) = blocking(open).await?;
        match turn.take().filter(|summing| summing.size == size) {
            Some(summing) => {
                let (summed, summing) = summing.sums().await?;
                **turn = Some(summing);
                Ok(summed)
            }
            None => sum_up(file, false).await,
        }
    }
}

pub(super) fn absent(error: std::io::Error) -> Error {
    if error.kind() == ErrorKind::NotFound {
        return Error::not_found("draft");
    }
    failed("a draft cannot be opened")(error)
}

/// Refuses to change a file that is also a blob's.
fn require_own(found: &fs::Metadata) -> Result<()> {
    if found.nlink() > 1 {
        return Err(Error::Conflict("the content is kept already and does not change any more".into()));
    }
    Ok(())
}

/// The end of a draft. It travels through the threads that write, with the turn: should nobody wait for them any
/// more, the next one's turn begins after the last write.
#[derive(Debug)]
struct Writer {
    turn: Turn,
    file: File,
    places: Places,
    /// The size when this began.
    before: u64,
    size: u64,
}

impl Writer {
    fn open(turn: Turn, places: Places, path: &Path, at: Option<u64>) -> Result<Self> {
        let before = match fs::metadata(path) {
            Ok(found) => {
                require_own(&found)?;
                found.len()
            }
            Err(error) if error.kind() == ErrorKind::NotFound => 0,
            Err(error) => return Err(absent(error)),
        };
        if at.is_some_and(|at| at != before) {
            return Err(Error::Conflict(format!("the upload has {before} bytes so far")));
        }
        places::make(&places.drafts())?;
        let options = OpenOptions::new().write(true).create(true).truncate(false).mode(0o644).open(path);
        let file = options.map_err(failed("a draft cannot be made"))?;
        // Whatever this process leaves away from new files: another user reads it when it is looked at.
        file.set_permissions(Permissions::from_mode(0o644)).map_err(failed("a draft's mode is not set"))?;
        Ok(Self { turn, file, places, before, size: before })
    }

    /// Writes at the end, or leaves the draft as it was when this began.
    fn write(&mut self, data: &[u8]) -> Result<()> {
        let size = data.len() as u64;
        let written = self.places.require_room(size).and_then(|()| {
            self.file.write_all_at(data, self.size).map_err(failed("a draft cannot be written"))
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
        self.file.set_len(self.before).map_err(failed("a draft cannot be cut"))?;
        self.size = self.before;
        Ok(())
    }
}

/// A writer at work, and the sums beside it.
#[derive(Debug)]
struct Pipe {
    writing: Lane<Result<Writer>>,
    summing: Option<Summing>,
}

impl Pipe {
    fn new(mut writer: Writer) -> Self {
        let former = writer.turn.take().filter(|summing| summing.size == writer.before);
        let summing = former.or_else(|| (writer.before == 0).then(Summing::new));
        Self { writing: Lane::Idle(Ok(writer)), summing }
    }

    /// Comes back while this is being written, but not before what came before is.
    async fn push(self, data: Bytes) -> Result<Self> {
        let mut writer = self.writing.end().await??;
        let summed = data.clone();
        let writing = Lane::go(move || {
            writer.write(&data)?;
            Ok(writer)
        });
        let summing = match self.summing {
            Some(summing) => Some(summing.feed(summed).await?),
            None => None,
        };
        Ok(Self { writing, summing })
    }

    /// Waits for the last write, and leaves the sums for whoever goes on.
    async fn end(self) -> Result<u64> {
        let mut writer = self.writing.end().await??;
        *writer.turn = self.summing;
        Ok(writer.size)
    }

    /// Leaves the draft as it was.
    async fn undo(self) -> Result<()> {
        let mut writer = self.writing.end().await??;
        blocking(move || writer.undo()).await
    }
}

#[cfg(test)]
mod tests {
    use muster_types::ids::BlobId;

    use super::*;

    #[tokio::test]
    async fn a_finished_file_becomes_a_draft_of_our_own() {
        let folder = tempfile::tempdir().unwrap();
        let (drafts, draft) = (Drafts::new(Places::new(folder.path())), Draft::Vm(BlobId::new()));
        let file = folder.path().join("file");
        for text in ["first", "and another"] {
            fs::write(&file, text).unwrap();
            fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
            if nix::unistd::geteuid().is_root() {
                std::os::unix::fs::chown(&file, Some(12345), Some(12345)).unwrap();
            }
            drafts.adopt(draft, file.clone()).await.unwrap();
            assert!(!file.exists());
            let found = fs::metadata(drafts.places.draft(draft)).unwrap();
            let owner = nix::unistd::geteuid().as_raw();
            assert_eq!((found.mode() & 0o777, found.uid(), found.len()), (0o644, owner, text.len() as u64));
            let mut turn = drafts.turn(draft).await;
            assert_eq!(drafts.summed(draft, &mut turn).await.unwrap().content.size, text.len() as u64);
        }
        // Whoever holds it open for writing does not reach the draft.
        fs::write(&file, "as summed up").unwrap();
        let held = fs::OpenOptions::new().write(true).open(&file).unwrap();
        drafts.adopt(draft, file.clone()).await.unwrap();
        std::os::unix::fs::FileExt::write_all_at(&held, b"changed", 0).unwrap();
        assert_eq!(fs::read(drafts.places.draft(draft)).unwrap(), b"as summed up");
        drop(held);
        // Whoever wrote it may have left anything under that name.
        std::os::unix::fs::symlink("/etc/passwd", &file).unwrap();
        assert!(matches!(drafts.adopt(draft, file).await, Err(Error::Internal(_))));
        assert_eq!(drafts.size(draft).await.unwrap(), Some(12));
    }
}
