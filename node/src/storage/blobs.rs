//! Blobs: files that never change, each with the sums of its pieces beside it.
//!
//! The sums have their name before the blob has its own: where a blob is, it can be read.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::future::Future;
use std::io::{ErrorKind, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_core::Stream;
use muster_types::blob::{Content, HashAlgorithm};
use muster_types::ids::BlobId;
use muster_types::storage::ByteStream;
use muster_types::{Error, Result};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use tokio::task::JoinHandle;

use super::places::{self, Places, Scratch, failed, unreadable};
use super::sums::{PIECE, Pieces, blocking, ended, sum_up};

/// How many pieces are read before somebody wants them.
const AHEAD: usize = 2;
/// How many bytes before somebody wants them the kernel is asked to fetch them from the disk.
const FETCHED_AHEAD: u64 = 6 * PIECE as u64;

/// Makes a file the content of a blob. Whatever moment this is killed in, the blob is there whole or not at all.
pub(super) fn keep(places: &Places, file: &Path, pieces: &Pieces, blob: BlobId) -> Result<()> {
    let scratch = places.job()?;
    let sums = write_sums(&scratch, pieces)?;
    let new = scratch.path("blob");
    places::link(file, &new)?;
    places::set_mode(&new, 0o444)?;
    File::open(&new).and_then(|new| new.sync_all()).map_err(failed("a blob is not synchronised"))?;
    let path = places.blob(blob);
    let folder = path.parent().unwrap_or(&path);
    if !folder.exists() {
        places::make(folder)?;
        folder.ancestors().skip(1).take(2).try_for_each(places::sync_folder)?;
    }
    // An older one must not be seen with the sums of this one.
    if path.exists() {
        release(&path, Some(&new))?;
        places::remove(&path)?;
        places::sync_folder(folder)?;
    }
    fs::rename(sums, places.sums(blob)).map_err(failed("the sums of a blob get no name"))?;
    places::sync_folder(folder)?;
    fs::rename(&new, &path).map_err(failed("a blob gets no name"))?;
    places::sync_folder(folder)
}

fn write_sums(scratch: &Scratch, pieces: &Pieces) -> Result<std::path::PathBuf> {
    let path = scratch.path("sums");
    let written = File::create(&path).and_then(|mut file| {
        file.write_all(&pieces.to_bytes())?;
        file.sync_all()
    });
    written.map_err(failed("the sums of a blob are not written")).map(|()| path)
}

/// Lets the draft grow again that a blob about to be removed was made of, unless `new` is the same file.
fn release(path: &Path, new: Option<&Path>) -> Result<()> {
    let Ok(found) = fs::metadata(path) else { return Ok(()) };
    let is_new = new.and_then(|new| fs::metadata(new).ok()).is_some_and(|new| new.ino() == found.ino());
    if found.nlink() > 1 && !is_new { places::set_mode(path, 0o644) } else { Ok(()) }
}

pub(super) fn remove(places: &Places, blob: BlobId) -> Result<()> {
    let path = places.blob(blob);
    release(&path, None)?;
    places::remove(&path)?;
    places::remove(&places.sums(blob))?;
    let folder = path.parent().filter(|folder| folder.exists());
    folder.map_or(Ok(()), places::sync_folder)
}

/// The right sums of a file that has none.
pub(super) struct Repair {
    pieces: Pieces,
    /// The number of the file.
    file: u64,
}

/// Looks at every byte. Says what is wrong, if anything is, and what the sums of the pieces are if only those are.
pub(super) async fn verify(
    places: &Places,
    blob: BlobId,
    content: &Content,
) -> Result<(Option<String>, Option<Repair>)> {
    let wrong = |why: String| Ok((Some(why), None));
    let path = places.blob(blob);
    let open = move || match File::open(path) {
        Ok(file) => {
            let number = file.metadata().map_err(unreadable("a blob cannot be looked at"))?.ino();
            Ok(Some((file, number)))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unreadable("a blob cannot be opened")(error)),
    };
    let look = async {
        let Some((file, number)) = blocking(open).await? else { return Ok(None) };
        Ok(Some((sum_up(file, true).await?, number)))
    };
    let (found, number) = match look.await {
        Ok(Some(found)) => found,
        Ok(None) => return wrong("the file is missing".into()),
        // A disk that cannot be read any more is what this is to find.
        Err(Error::Internal(why)) => return wrong(why),
        Err(error) => return Err(error),
    };
    if found.content.size != content.size {
        return wrong(format!("{} bytes instead of {}", found.content.size, content.size));
    }
    let sums = places.sums(blob);
    let stored = blocking(move || Pieces::read(&sums)).await?;
    let difference = stored.as_ref().map_or(Some(0), |stored| stored.first_difference(&found.pieces));
    let differs = |algorithm: &&HashAlgorithm| {
        found.content.checksums.get(**algorithm) != content.checksums.get(**algorithm)
    };
    if let Some(algorithm) = HashAlgorithm::ALL.iter().find(differs) {
        let place = stored.and(difference).map(|at| format!(" (damaged at byte {at} or after it)"));
        return wrong(format!("{algorithm} differs{}", place.unwrap_or_default()));
    }
    Ok((None, difference.map(|_| Repair { pieces: found.pieces, file: number })))
}

/// Writes the sums of the pieces anew, unless the blob is another one by now.
pub(super) fn repair(places: &Places, blob: BlobId, repair: &Repair) -> Result<()> {
    if fs::metadata(places.blob(blob)).map_or(true, |found| found.ino() != repair.file) {
        return Ok(());
    }
    tracing::warn!(%blob, "the sums of a blob are made anew");
    let scratch = places.job()?;
    let sums = write_sums(&scratch, &repair.pieces)?;
    fs::rename(sums, places.sums(blob)).map_err(failed("the sums of a blob get no name"))
}

/// A part of a blob, of which every byte is checked. [`Error::Internal`] only if it is damaged.
pub(super) fn read(places: &Places, blob: BlobId, range: Range<u64>) -> Result<ByteStream> {
    let path = places.blob(blob);
    let absent = |what| {
        move |error: std::io::Error| match error.kind() {
            ErrorKind::NotFound => Error::not_found("blob"),
            _ => unreadable(what)(error),
        }
    };
    let file = File::open(&path).map_err(absent("a blob cannot be opened"))?;
    let found = file.metadata().map_err(unreadable("a blob cannot be looked at"))?;
    let (size, pieces) = (found.len(), Pieces::read(&places.sums(blob))?);
    // The sums may be those of what takes its place in this moment.
    if fs::metadata(&path).map_err(absent("a blob cannot be looked at"))?.ino() != found.ino() {
        return Err(Error::Unavailable("the blob is being replaced".into()));
    }
    let pieces = pieces
        .filter(|pieces| pieces.size == size)
        .ok_or_else(|| Error::Internal(format!("blob {blob} cannot be checked: its sums are damaged")))?;
    if range.start > range.end || range.end > size {
        return Err(Error::Invalid(format!("bytes {}-{} of {size}", range.start, range.end)));
    }
    let source = Source { blob, file, pieces, spare: Mutex::default() };
    // From its first byte to its last: the kernel reads further ahead.
    source.advise(PosixFadviseAdvice::POSIX_FADV_SEQUENTIAL, 0, 0);
    Ok(Box::pin(Reader {
        source: Arc::new(source),
        next: range.start / PIECE as u64,
        range,
        ahead: VecDeque::with_capacity(AHEAD),
    }))
}

struct Source {
    blob: BlobId,
    file: File,
    pieces: Pieces,
    /// Memory of pieces that nobody holds any more: to get new memory takes as long as to read.
    spare: Mutex<Vec<Vec<u8>>>,
}

/// The bytes of a piece; its memory goes back where it came from.
struct Piece {
    data: Vec<u8>,
    size: usize,
    source: Arc<Source>,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.data[..self.size]
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let mut spare = self.source.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() <= AHEAD {
            spare.push(std::mem::take(&mut self.data));
        }
    }
}

impl Source {
    /// Tells the kernel what is to come. It may take the advice or not.
    fn advise(&self, advice: PosixFadviseAdvice, at: u64, size: usize) {
        let (Ok(at), Ok(size)) = (i64::try_from(at), i64::try_from(size)) else { return };
        let _ = posix_fadvise(&self.file, at, size, advice);
    }

    fn piece(self: &Arc<Self>, number: u64) -> Result<Bytes> {
        let at = number * PIECE as u64;
        // The disk is at work while this piece is compared and sent.
        self.advise(PosixFadviseAdvice::POSIX_FADV_WILLNEED, at + FETCHED_AHEAD, PIECE);
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut data = spare.unwrap_or_else(|| vec![0; PIECE]);
        let size = usize::try_from(self.pieces.size.saturating_sub(at)).map_or(PIECE, |size| size.min(PIECE));
        let read = self.file.read_exact_at(&mut data[..size], at);
        read.map_err(unreadable(&format!("blob {} at byte {at} cannot be read", self.blob)))?;
        let right = usize::try_from(number).is_ok_and(|number| self.pieces.is_right(number, &data[..size]));
        if !right {
            return Err(Error::Internal(format!("blob {} is damaged at byte {at} or after it", self.blob)));
        }
        Ok(Bytes::from_owner(Piece { data, size, source: self.clone() }))
    }
}

struct Reader {
    source: Arc<Source>,
    /// What is still to be handed out.
    range: Range<u64>,
    /// The piece that is to be read next.
    next: u64,
    ahead: VecDeque<JoinHandle<Result<Bytes>>>,
}

impl Stream for Reader {
    type Item = Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let reader = &mut *self;
        while reader.ahead.len() < AHEAD && reader.next * (PIECE as u64) < reader.range.end {
            let (source, number) = (reader.source.clone(), reader.next);
            reader.ahead.push_back(tokio::task::spawn_blocking(move || source.piece(number)));
            reader.next += 1;
        }
        if reader.range.is_empty() {
            return Poll::Ready(None);
        }
        let Some(first) = reader.ahead.front_mut() else { return Poll::Ready(None) };
        let piece = ready!(Pin::new(first).poll(context)).unwrap_or_else(|error| Err(ended(error)));
        reader.ahead.pop_front();
        let within = reader.range.start % PIECE as u64;
        let wanted = (reader.range.end - reader.range.start).min(PIECE as u64 - within);
        let slice = piece.map(|piece| {
            #[expect(clippy::cast_possible_truncation, reason = "not longer than a piece")]
            let (start, end) = (within as usize, (within + wanted) as usize);
            piece.slice(start..end)
        });
        reader.range.start += wanted;
        if slice.is_err() {
            reader.range.start = reader.range.end;
            reader.ahead.clear();
        }
        Poll::Ready(Some(slice))
    }
}
