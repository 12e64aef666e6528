//! Sending content. A file goes in few large requests, each telling how much the server must already have; after a
//! failure the server is asked how much it has, and the rest is sent.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{anyhow, bail};
use bytes::{Bytes, BytesMut};
use futures_util::stream::unfold;
use muster_types::ids::UploadId;
use reqwest::Body;
use tokio::sync::mpsc;

use super::remembered::Remembered;
use super::{CHUNK, CHUNKS, Policy, Tally, Tries};
use crate::api::{Client, Error, io_text};
use crate::output::bytes;
use crate::progress::Meter;

/// Bytes of a file in one request.
const PIECE: u64 = 64 << 20;
/// Bytes in the request after one that failed: so few that they do not keep a server that refuses them from saying so.
const PROBE: u64 = 64 << 10;
/// Bytes of standard input in one request; they are held in memory until the server has them.
const HELD: usize = 8 << 20;
/// How often one run begins anew because the server has lost the upload.
const BEGINNINGS: u32 = 3;

/// A file to send, as it was when it was opened.
#[derive(Debug)]
pub(crate) struct LocalFile {
    /// As given.
    given: PathBuf,
    /// Without links.
    pub(super) path: PathBuf,
    file: Arc<File>,
    pub(crate) size: u64,
    /// To the nanosecond.
    pub(super) modified: String,
}

impl LocalFile {
    pub(crate) fn open(given: &Path) -> anyhow::Result<Self> {
        let bad = |error: &io::Error| anyhow!("cannot read {}: {}", given.display(), io_text(error));
        let file = File::open(given).map_err(|error| bad(&error))?;
        let about = file.metadata().map_err(|error| bad(&error))?;
        if !about.is_file() {
            bail!(
                "{} is not a regular file; to send what comes out of it, give - and redirect",
                given.display()
            );
        }
        let path = given.canonicalize().map_err(|error| bad(&error))?;
        let (size, modified) = (about.len(), modified(&about));
        Ok(Self { given: given.to_owned(), path, file: Arc::new(file), size, modified })
    }

    /// Its name without folders.
    pub(crate) fn name(&self) -> String {
        self.given.file_name().unwrap_or(self.given.as_os_str()).to_string_lossy().into_owned()
    }

    /// The sha512 of it, as hexadecimal digits.
    pub(crate) async fn sha512(&self) -> anyhow::Result<String> {
        let meter = Meter::new(&format!("hashing {}", self.name()), 0, Some(self.size));
        let tally = Arc::new(Mutex::new(Tally::new()));
        self.count_in(&tally, self.size, &meter).await?;
        self.require_unchanged()?;
        let tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(tally.finish())
    }

    /// Counts in what lies before `end` and is not counted yet.
    async fn count_in(&self, tally: &Arc<Mutex<Tally>>, end: u64, meter: &Meter) -> anyhow::Result<()> {
        let (file, tally, meter) = (Arc::clone(&self.file), Arc::clone(tally), meter.clone());
        let work = move || {
            let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
            let mut chunk = vec![0; CHUNK];
            while tally.at < end {
                let at = tally.at;
                let count = read_at(&file, &mut chunk, at, end)?;
                tally.take(at, chunk.get(..count).unwrap_or_default());
                meter.at(tally.at);
            }
            Ok(())
        };
        let counted: io::Result<()> = tokio::task::spawn_blocking(work).await?;
        counted.map_err(|error| self.unreadable(&error))
    }

    /// Refuses a file that was changed since it was opened.
    pub(crate) fn require_unchanged(&self) -> anyhow::Result<()> {
        let about = self.file.metadata().map_err(|error| self.unreadable(&error))?;
        if about.len() == self.size && modified(&about) == self.modified {
            return Ok(());
        }
        bail!(
            "{} was changed meanwhile; run the same command again once nothing writes to it",
            self.given.display()
        )
    }

    fn unreadable(&self, error: &io::Error) -> anyhow::Error {
        anyhow!("cannot read {}: {}", self.given.display(), io_text(error))
    }
}

fn modified(about: &std::fs::Metadata) -> String {
    format!("{}.{:09}", about.mtime(), about.mtime_nsec())
}

/// Reads some bytes before `end`, at least one.
fn read_at(file: &File, chunk: &mut [u8], at: u64, end: u64) -> io::Result<usize> {
    let most = usize::try_from(end - at).unwrap_or(usize::MAX).min(chunk.len());
    loop {
        match file.read_at(chunk.get_mut(..most).unwrap_or_default(), at) {
            Ok(0) => {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file is shorter than it was"));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Content that is whole on a server, as an upload.
#[derive(Debug)]
pub(crate) struct Uploaded {
    pub(crate) upload: UploadId,
    /// Of what was meant to arrive.
    pub(crate) sha512: String,
    pub(crate) summary: String,
}

/// Sends a file, from where an earlier run stopped if there was one. What is remembered is kept: the upload ends only
/// when something is made of it.
pub(crate) async fn send_file(
    client: &Client,
    local: &LocalFile,
    known: &mut Remembered,
    policy: Policy,
) -> anyhow::Result<Uploaded> {
    let title = format!("uploading {}", local.name());
    // If the sum is known already, nothing needs to be summed up while sending.
    let tally = known.entry.sha512.is_none().then(|| Arc::new(Mutex::new(Tally::new())));
    for _ in 0..BEGINNINGS {
        let Some((upload, at)) = begin(client, local, known).await? else { continue };
        if let Some(tally) = &tally
            && at > 0
        {
            let meter = Meter::new(&format!("hashing {}", local.name()), 0, Some(at));
            local.count_in(tally, at, &meter).await?;
        }
        let meter = Meter::new(&title, at, Some(local.size));
        let source = Source::File { file: Arc::clone(&local.file), tally: tally.clone() };
        let mut sending = Sending { client, upload, tries: Tries::new(policy), meter: &meter };
        match sending.send(&source, at, local.size).await {
            Ok(Sent::Whole) => {}
            Ok(Sent::Gone) => {
                meter.say("the server has lost the upload; beginning anew");
                known.entry.upload = None;
                continue;
            }
            Err(Failure::Local(error)) => return Err(local.unreadable(&error)),
            Err(Failure::Remote(error)) => return Err(not_sent(&error, meter.done(), local.size)),
        }
        local.require_unchanged()?;
        let sha512 = match (&known.entry.sha512, &tally) {
            (Some(known), _) => known.clone(),
            (None, Some(tally)) => tally.lock().unwrap_or_else(PoisonError::into_inner).finish(),
            (None, None) => bail!("the file was not summed up"),
        };
        known.entry.sha512 = Some(sha512.clone());
        known.save()?;
        return Ok(Uploaded { upload, sha512, summary: meter.summary() });
    }
    bail!("the server has lost the upload {BEGINNINGS} times; its log says why")
}

/// The upload to go on with and how much of it has arrived: the remembered one, or a new one. Nothing if the
/// remembered one is gone.
async fn begin(
    client: &Client,
    local: &LocalFile,
    known: &mut Remembered,
) -> anyhow::Result<Option<(UploadId, u64)>> {
    if let Some(upload) = known.entry.upload {
        let at = match client.upload(&upload.to_string()).await {
            Ok(answer) => answer.value()?.size,
            Err(error) if error.status() == Some(404) => {
                eprintln!("what an earlier run had sent is no longer on the server; beginning anew");
                known.entry.upload = None;
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        if at <= local.size {
            let (there, all) = (bytes(at), bytes(local.size));
            eprintln!("going on with an earlier upload: {there} of {all} are on the server");
            return Ok(Some((upload, at)));
        }
        eprintln!("what an earlier run had sent is longer than the file; beginning anew");
        known.entry.upload = None;
    }
    let upload = client.create_upload().await?.value()?;
    known.entry.upload = Some(upload.uuid);
    known.save()?;
    Ok(Some((upload.uuid, upload.size)))
}

fn not_sent(error: &Error, at: u64, size: u64) -> anyhow::Error {
    match error.status() {
        // What is too large is so the next time, too.
        Some(413) => anyhow!("{error}"),
        _ => anyhow!(
            "about {} of {} were sent, then: {error}; run the same command again to go on",
            bytes(at),
            bytes(size)
        ),
    }
}

/// Sends a file without remembering that: several runs may send it at once, and none goes on with what another left.
pub(crate) async fn send_once(
    client: &Client,
    local: &LocalFile,
    policy: Policy,
) -> anyhow::Result<Uploaded> {
    let upload = client.create_upload().await?.value()?.uuid;
    let meter = Meter::new(&format!("uploading {}", local.name()), 0, Some(local.size));
    let tally = Arc::new(Mutex::new(Tally::new()));
    let source = Source::File { file: Arc::clone(&local.file), tally: Some(Arc::clone(&tally)) };
    let mut sending = Sending { client, upload, tries: Tries::new(policy), meter: &meter };
    match sending.send(&source, 0, local.size).await {
        Ok(Sent::Whole) => {}
        Ok(Sent::Gone) => bail!("the server has lost the upload; run the command again"),
        Err(Failure::Local(error)) => return Err(local.unreadable(&error)),
        Err(Failure::Remote(error)) => return Err(error.into()),
    }
    local.require_unchanged()?;
    let sha512 = tally.lock().unwrap_or_else(PoisonError::into_inner).finish();
    Ok(Uploaded { upload, sha512, summary: meter.summary() })
}

/// Sends standard input. Nothing of it can be sent again by another run.
pub(crate) async fn send_stdin(
    client: &Client,
    input: impl io::Read + Send + 'static,
    policy: Policy,
) -> anyhow::Result<Uploaded> {
    let upload = client.create_upload().await?.value()?.uuid;
    let meter = Meter::new("uploading standard input", 0, None);
    let mut arriving = read_in_thread(input);
    let (mut tally, mut at) = (Tally::new(), 0);
    let mut sending = Sending { client, upload, tries: Tries::new(policy), meter: &meter };
    while let Some(piece) = arriving.recv().await {
        let piece = piece.map_err(|error| anyhow!("cannot read standard input: {}", io_text(&error)))?;
        tally.take(at, &piece);
        let end = at + piece.len() as u64;
        match sending.send(&Source::Memory { start: at, bytes: piece }, at, end).await {
            Ok(Sent::Whole) => at = end,
            Ok(Sent::Gone) => bail!("the server has lost the upload; run the command again"),
            Err(Failure::Local(error)) => bail!("cannot read standard input: {}", io_text(&error)),
            Err(Failure::Remote(error)) => bail!("{error}; standard input cannot be gone on with"),
        }
    }
    Ok(Uploaded { upload, sha512: tally.finish(), summary: meter.summary() })
}

/// Pieces of what is read. The thread is nobody's to wait for: standard input may never say anything more.
fn read_in_thread(mut input: impl io::Read + Send + 'static) -> mpsc::Receiver<io::Result<Bytes>> {
    let (to, from) = mpsc::channel(1);
    thread::spawn(move || {
        loop {
            let mut piece = Vec::new();
            let read = input.by_ref().take(HELD as u64).read_to_end(&mut piece);
            let ended = read.is_err() || piece.is_empty();
            if !piece.is_empty() || read.is_err() {
                // After an error the content is not whole, whatever was read of it.
                let _ = to.blocking_send(read.map(|_| piece.into()));
            }
            if ended || to.is_closed() {
                return;
            }
        }
    });
    from
}

/// Where the bytes come from.
enum Source {
    File { file: Arc<File>, tally: Option<Arc<Mutex<Tally>>> },
    Memory { start: u64, bytes: Bytes },
}

impl Source {
    /// What lies before this cannot be sent again.
    fn start(&self) -> u64 {
        match self {
            Self::File { .. } => 0,
            Self::Memory { start, .. } => *start,
        }
    }

    /// Bytes from `at` to before `end`, in chunks.
    fn read(&self, at: u64, end: u64) -> mpsc::Receiver<io::Result<Bytes>> {
        let (to, from) = mpsc::channel(CHUNKS);
        match self {
            Self::File { file, tally } => {
                let (file, tally) = (Arc::clone(file), tally.clone());
                tokio::task::spawn_blocking(move || read_chunks(&file, tally.as_deref(), at, end, &to));
            }
            Self::Memory { start, bytes } => {
                let place = |at: u64| usize::try_from(at.saturating_sub(*start)).unwrap_or(usize::MAX);
                let mut rest = bytes.slice(place(at).min(bytes.len())..place(end).min(bytes.len()));
                tokio::spawn(async move {
                    while !rest.is_empty() {
                        let chunk = rest.split_to(rest.len().min(CHUNK));
                        if to.send(Ok(chunk)).await.is_err() {
                            return;
                        }
                    }
                });
            }
        }
        from
    }
}

/// Reads until everything is read, nobody wants more, or it fails.
fn read_chunks(
    file: &File,
    tally: Option<&Mutex<Tally>>,
    mut at: u64,
    end: u64,
    to: &mpsc::Sender<io::Result<Bytes>>,
) {
    while at < end {
        let mut chunk = BytesMut::zeroed(CHUNK);
        let read = read_at(file, &mut chunk, at, end).map(|count| {
            chunk.truncate(count);
            if let Some(tally) = tally {
                tally.lock().unwrap_or_else(PoisonError::into_inner).take(at, &chunk);
            }
            at += count as u64;
            chunk.freeze()
        });
        let failed = read.is_err();
        if to.blocking_send(read).is_err() || failed {
            return;
        }
    }
}

/// Whose fault it is that something was not sent.
enum Failure {
    Local(io::Error),
    Remote(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Remote(error)
    }
}

/// How sending ended.
enum Sent {
    Whole,
    /// The upload is not on the server any more, or holds what is not ours.
    Gone,
}

struct Sending<'a> {
    client: &'a Client,
    upload: UploadId,
    tries: Tries,
    meter: &'a Meter,
}

impl Sending<'_> {
    /// Sends from `at` until the upload is `end` long.
    async fn send(&mut self, source: &Source, start: u64, end: u64) -> Result<Sent, Failure> {
        let (mut at, mut piece) = (start, PIECE);
        while at < end {
            let next = end.min(at + piece);
            let error = match self.append(source, at, next).await {
                Ok(size) if size == next => {
                    self.tries.succeeded();
                    self.meter.at(next);
                    (at, piece) = (next, PIECE);
                    continue;
                }
                Ok(size) => {
                    // As if the server had said that it is not as long as we think.
                    let text = format!("the upload is {size} bytes long instead of {next}");
                    Error::Refused { status: 409, text }
                }
                Err(Failure::Remote(error)) => error,
                Err(local) => return Err(local),
            };
            piece = PROBE;
            match self.look(error, at).await? {
                Some(size) if (source.start()..=end).contains(&size) => at = size,
                Some(_) | None => return Ok(Sent::Gone),
            }
        }
        Ok(Sent::Whole)
    }

    /// After a failure: how long the upload is. Nothing if it is gone.
    async fn look(&mut self, failure: Error, before: u64) -> Result<Option<u64>, Error> {
        let mut error = failure;
        loop {
            match error.status() {
                Some(404) => return Ok(None),
                // Asking for the size renews a token that has become too old, or tells that it is not that.
                Some(401 | 409) => {
                    let text = error.to_string();
                    let unavailable = Error::Refused { status: 503, text };
                    self.tries.again(unavailable, Some(self.meter)).await.map_err(|_| error)?;
                }
                _ => self.tries.again(error, Some(self.meter)).await?,
            }
            match self.client.upload(&self.upload.to_string()).await.and_then(crate::api::Answer::value) {
                Ok(upload) => {
                    if upload.size > before {
                        self.tries.succeeded();
                    }
                    self.meter.at(upload.size);
                    return Ok(Some(upload.size));
                }
                Err(next) if next.status() == Some(401) => return Err(next),
                Err(next) => error = next,
            }
        }
    }

    /// One request. The answer is how long the upload is then.
    async fn append(&self, source: &Source, at: u64, end: u64) -> Result<u64, Failure> {
        let moved = Arc::new(AtomicU64::new(0));
        let broken = Arc::new(Mutex::new(None));
        let body = {
            let (moved, broken, meter) = (Arc::clone(&moved), Arc::clone(&broken), self.meter.clone());
            let chunks = unfold((source.read(at, end), at), move |(mut chunks, at)| {
                let (moved, broken, meter) = (Arc::clone(&moved), Arc::clone(&broken), meter.clone());
                async move {
                    // Asking for the next one means that the one before is on its way.
                    meter.at(at);
                    moved.fetch_add(1, Ordering::Relaxed);
                    match chunks.recv().await? {
                        Ok(chunk) => {
                            let next = at + chunk.len() as u64;
                            Some((Ok(chunk), (chunks, next)))
                        }
                        Err(error) => {
                            let text = io::Error::from(error.kind());
                            *broken.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                            Some((Err(text), (chunks, at)))
                        }
                    }
                }
            });
            Body::wrap_stream(chunks)
        };
        let upload = self.upload.to_string();
        let patience = self.tries.policy.patience;
        let answer = tokio::select! {
            answer = self.client.append_upload(&upload, at, end - at, body) => answer,
            () = stands_still(&moved, patience) => Err(self.client.stalled(patience)),
        };
        if let Some(error) = broken.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(Failure::Local(error));
        }
        Ok(answer?.value()?)
    }
}

/// Waits until nothing has moved for some time.
async fn stands_still(moved: &AtomicU64, patience: Duration) {
    loop {
        let before = moved.load(Ordering::Relaxed);
        tokio::time::sleep(patience).await;
        if moved.load(Ordering::Relaxed) == before {
            return;
        }
    }
}
