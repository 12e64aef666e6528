//! Uploads. A file is sent in a few large requests, each with the offset that the server must have reached. After a
//! failure the client queries the received size and sends the rest.

use std::fs::File;
use std::io::{self, Read as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{anyhow, bail};
use bytes::{Bytes, BytesMut};
use futures_util::stream::unfold;
use muster_types::ids::UploadId;
use parking_lot::Mutex;
use reqwest::Body;
use tokio::sync::mpsc;

use super::checksum::{CHUNK_SIZE, ContentHasher};
use super::local_file::{LocalFile, read_at};
use super::retry::{Retries, RetryPolicy};
use super::upload_state::UploadState;
use crate::api::{ApiResponse, Client, Error};
use crate::error_text::io_error_text;
use crate::output::format_bytes;
use crate::progress::ProgressMeter;

/// The number of chunks buffered between disk and network.
const CHUNK_QUEUE: usize = 8;
/// The number of bytes of a file in one request.
const REQUEST_SIZE: u64 = 64 << 20;
/// The number of bytes in the request after a failed one: few enough that a refusing server can still respond.
const PROBE_SIZE: u64 = 64 << 10;
/// The number of bytes of standard input in one request. They stay in memory until the server has received them.
const STDIN_REQUEST_SIZE: usize = 8 << 20;
/// The maximum number of uploads that one run creates because the server lost the previous one.
const MAX_UPLOADS: u32 = 3;

/// A completed upload.
#[derive(Debug)]
pub(crate) struct Uploaded {
    pub(crate) upload: UploadId,
    /// The checksum of the sent content.
    pub(crate) sha512: String,
    pub(crate) summary: String,
}

/// Sends a file, resuming the upload of an earlier run if there is one. Keeps the state: the upload ends only when it is
/// consumed.
pub(crate) async fn send_file(
    client: &Client,
    local: &LocalFile,
    state: &mut UploadState,
    policy: RetryPolicy,
) -> anyhow::Result<Uploaded> {
    let title = format!("uploading {}", local.name());
    // A known checksum need not be computed while sending.
    let hasher = state.entry.sha512.is_none().then(|| Arc::new(Mutex::new(ContentHasher::new())));
    for _ in 0..MAX_UPLOADS {
        let Some((upload, at)) = resume_or_create(client, local, state).await? else { continue };
        if let Some(hasher) = &hasher
            && at > 0
        {
            let meter = ProgressMeter::new(&format!("hashing {}", local.name()), 0, Some(at));
            local.hash_up_to(hasher, at, &meter).await?;
        }
        let meter = ProgressMeter::new(&title, at, Some(local.size));
        let source = UploadSource::File { file: Arc::clone(&local.file), hasher: hasher.clone() };
        let mut sender = Sender { client, upload, retries: Retries::new(policy), meter: &meter };
        match sender.send(&source, at, local.size).await {
            Ok(SendOutcome::Complete) => {}
            Ok(SendOutcome::Lost) => {
                meter.println("the server has lost the upload; starting over");
                state.entry.upload = None;
                continue;
            }
            Err(SendError::Local(error)) => return Err(local.read_error(&error)),
            Err(SendError::Remote(error)) => {
                return Err(incomplete_error(&error, meter.position(), local.size));
            }
        }
        local.check_unchanged()?;
        let sha512 = match (&state.entry.sha512, &hasher) {
            (Some(known), _) => known.clone(),
            (None, Some(hasher)) => hasher.lock().digest(),
            (None, None) => bail!("the checksum of the file was not computed"),
        };
        state.entry.sha512 = Some(sha512.clone());
        state.save()?;
        return Ok(Uploaded { upload, sha512, summary: meter.summary() });
    }
    bail!("the server has lost the upload {MAX_UPLOADS} times; see its log")
}

/// Returns the upload to continue and its received size: the saved one or a new one. Returns `None` if the server lost
/// the saved one.
async fn resume_or_create(
    client: &Client,
    local: &LocalFile,
    state: &mut UploadState,
) -> anyhow::Result<Option<(UploadId, u64)>> {
    if let Some(upload) = state.entry.upload {
        let at = match client.upload(&upload.to_string()).await {
            Ok(response) => response.value()?.size,
            Err(error) if error.is_not_found() => {
                crate::message!("the server no longer has the upload of an earlier run; starting over");
                state.entry.upload = None;
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        if at <= local.size {
            let (received, size) = (format_bytes(at), format_bytes(local.size));
            crate::message!("resuming an earlier upload: the server has {received} of {size}");
            return Ok(Some((upload, at)));
        }
        crate::message!("the upload of an earlier run is longer than the file; starting over");
        state.entry.upload = None;
    }
    let upload = client.create_upload().await?.value()?;
    state.entry.upload = Some(upload.uuid);
    state.save()?;
    Ok(Some((upload.uuid, upload.size)))
}

fn incomplete_error(error: &Error, at: u64, size: u64) -> anyhow::Error {
    match error.status() {
        // Another attempt cannot succeed: the content is too large.
        Some(413) => anyhow!("{error}"),
        _ => anyhow!(
            "the upload stopped after about {} of {}: {error}; run the same command again to resume",
            format_bytes(at),
            format_bytes(size)
        ),
    }
}

/// Sends a file without saving state, so that concurrent runs can send it and none is resumed.
pub(crate) async fn send_file_untracked(
    client: &Client,
    local: &LocalFile,
    policy: RetryPolicy,
) -> anyhow::Result<Uploaded> {
    let upload = client.create_upload().await?.value()?.uuid;
    let meter = ProgressMeter::new(&format!("uploading {}", local.name()), 0, Some(local.size));
    let hasher = Arc::new(Mutex::new(ContentHasher::new()));
    let source = UploadSource::File { file: Arc::clone(&local.file), hasher: Some(Arc::clone(&hasher)) };
    let mut sender = Sender { client, upload, retries: Retries::new(policy), meter: &meter };
    match sender.send(&source, 0, local.size).await {
        Ok(SendOutcome::Complete) => {}
        Ok(SendOutcome::Lost) => bail!("the server has lost the upload; run the command again"),
        Err(SendError::Local(error)) => return Err(local.read_error(&error)),
        Err(SendError::Remote(error)) => return Err(error.into()),
    }
    local.check_unchanged()?;
    let sha512 = hasher.lock().digest();
    Ok(Uploaded { upload, sha512, summary: meter.summary() })
}

/// Sends standard input. Another run cannot resume it.
pub(crate) async fn send_stdin(
    client: &Client,
    input: impl io::Read + Send + 'static,
    policy: RetryPolicy,
) -> anyhow::Result<Uploaded> {
    let upload = client.create_upload().await?.value()?.uuid;
    let meter = ProgressMeter::new("uploading standard input", 0, None);
    let mut blocks = read_in_thread(input);
    let (mut hasher, mut at) = (ContentHasher::new(), 0);
    let mut sender = Sender { client, upload, retries: Retries::new(policy), meter: &meter };
    while let Some(block) = blocks.recv().await {
        let block =
            block.map_err(|error| anyhow!("cannot read standard input: {}", io_error_text(&error)))?;
        hasher.update(&block);
        let end = at + block.len() as u64;
        match sender.send(&UploadSource::Memory { start: at, bytes: block }, at, end).await {
            Ok(SendOutcome::Complete) => at = end,
            Ok(SendOutcome::Lost) => bail!("the server has lost the upload; run the command again"),
            Err(SendError::Local(error)) => bail!("cannot read standard input: {}", io_error_text(&error)),
            Err(SendError::Remote(error)) => {
                bail!("{error}; an upload from standard input cannot be resumed")
            }
        }
    }
    Ok(Uploaded { upload, sha512: hasher.digest(), summary: meter.summary() })
}

/// Reads blocks in a thread that is never joined: a read from standard input may block forever.
fn read_in_thread(mut input: impl io::Read + Send + 'static) -> mpsc::Receiver<io::Result<Bytes>> {
    let (sender, receiver) = mpsc::channel(1);
    thread::spawn(move || {
        loop {
            let mut block = Vec::new();
            let read = input.by_ref().take(STDIN_REQUEST_SIZE as u64).read_to_end(&mut block);
            let ended = read.is_err() || block.is_empty();
            if !block.is_empty() || read.is_err() {
                // After an error the content is incomplete, so a partial block is dropped.
                let _ = sender.blocking_send(read.map(|_| block.into()));
            }
            if ended || sender.is_closed() {
                return;
            }
        }
    });
    receiver
}

/// The content to send.
enum UploadSource {
    File { file: Arc<File>, hasher: Option<Arc<Mutex<ContentHasher>>> },
    Memory { start: u64, bytes: Bytes },
}

impl UploadSource {
    /// Returns the first offset that can still be sent.
    fn start(&self) -> u64 {
        match self {
            Self::File { .. } => 0,
            Self::Memory { start, .. } => *start,
        }
    }

    /// Reads the bytes from `at` to `end` in chunks.
    fn read(&self, at: u64, end: u64) -> mpsc::Receiver<io::Result<Bytes>> {
        let (sender, receiver) = mpsc::channel(CHUNK_QUEUE);
        match self {
            Self::File { file, hasher } => {
                let (file, hasher) = (Arc::clone(file), hasher.clone());
                tokio::task::spawn_blocking(move || read_chunks(&file, hasher.as_deref(), at, end, &sender));
            }
            Self::Memory { start, bytes } => {
                let index = |at: u64| at.saturating_sub(*start).min(bytes.len() as u64) as usize;
                let mut rest = bytes.slice(index(at)..index(end));
                tokio::spawn(async move {
                    while !rest.is_empty() {
                        let chunk = rest.split_to(rest.len().min(CHUNK_SIZE));
                        if sender.send(Ok(chunk)).await.is_err() {
                            return;
                        }
                    }
                });
            }
        }
        receiver
    }
}

/// Reads until `end`, until the receiver is dropped, or until an error.
fn read_chunks(
    file: &File,
    hasher: Option<&Mutex<ContentHasher>>,
    mut at: u64,
    end: u64,
    sender: &mpsc::Sender<io::Result<Bytes>>,
) {
    while at < end {
        let mut chunk = BytesMut::zeroed(CHUNK_SIZE);
        let read = read_at(file, &mut chunk, at, end).map(|count| {
            chunk.truncate(count);
            if let Some(hasher) = hasher {
                hasher.lock().update_at(at, &chunk);
            }
            at += count as u64;
            chunk.freeze()
        });
        let failed = read.is_err();
        if sender.blocking_send(read).is_err() || failed {
            return;
        }
    }
}

/// Why content was not sent: reading the local source or the remote call failed.
enum SendError {
    Local(io::Error),
    Remote(Error),
}

impl From<Error> for SendError {
    fn from(error: Error) -> Self {
        Self::Remote(error)
    }
}

/// How sending ended.
enum SendOutcome {
    Complete,
    /// The server no longer has the upload, or has foreign content in it.
    Lost,
}

struct Sender<'a> {
    client: &'a Client,
    upload: UploadId,
    retries: Retries,
    meter: &'a ProgressMeter,
}

impl Sender<'_> {
    /// Sends from `start` until the upload has `end` bytes.
    async fn send(&mut self, source: &UploadSource, start: u64, end: u64) -> Result<SendOutcome, SendError> {
        let (mut at, mut request_size) = (start, REQUEST_SIZE);
        while at < end {
            let next = end.min(at + request_size);
            let error = match self.append(source, at, next).await {
                Ok(size) if size == next => {
                    self.retries.reset();
                    self.meter.set_position(next);
                    (at, request_size) = (next, REQUEST_SIZE);
                    continue;
                }
                Ok(size) => {
                    // Handled like a conflict about the offset.
                    let message = format!("the upload has {size} bytes instead of {next}");
                    Error::Refused { status: 409, message }
                }
                Err(SendError::Remote(error)) => error,
                Err(local) => return Err(local),
            };
            request_size = PROBE_SIZE;
            match self.received_size(error, at).await? {
                Some(size) if (source.start()..=end).contains(&size) => at = size,
                Some(_) | None => return Ok(SendOutcome::Lost),
            }
        }
        Ok(SendOutcome::Complete)
    }

    /// Returns the size of the upload after a failure, or `None` if the server lost it.
    async fn received_size(&mut self, failure: Error, before: u64) -> Result<Option<u64>, Error> {
        let mut error = failure;
        loop {
            match error.status() {
                Some(404) => return Ok(None),
                // The query below renews an expired token, or fails if the token is not the cause.
                Some(401 | 409) => {
                    let unavailable = Error::Refused { status: 503, message: error.to_string() };
                    self.retries.back_off(unavailable, Some(self.meter)).await.map_err(|_| error)?;
                }
                _ => self.retries.back_off(error, Some(self.meter)).await?,
            }
            match self.client.upload(&self.upload.to_string()).await.and_then(ApiResponse::value) {
                Ok(upload) => {
                    if upload.size > before {
                        self.retries.reset();
                    }
                    self.meter.set_position(upload.size);
                    return Ok(Some(upload.size));
                }
                Err(next) if next.status() == Some(401) => return Err(next),
                Err(next) => error = next,
            }
        }
    }

    /// Sends one request and returns the new size of the upload.
    async fn append(&self, source: &UploadSource, at: u64, end: u64) -> Result<u64, SendError> {
        let requested_chunks = Arc::new(AtomicU64::new(0));
        let read_error = Arc::new(Mutex::new(None));
        let body = {
            let (requested_chunks, read_error, meter) =
                (Arc::clone(&requested_chunks), Arc::clone(&read_error), self.meter.clone());
            let chunks = unfold((source.read(at, end), at), move |(mut chunks, at)| {
                let (requested_chunks, read_error, meter) =
                    (Arc::clone(&requested_chunks), Arc::clone(&read_error), meter.clone());
                async move {
                    // A request for the next chunk means that the previous one was passed to the network.
                    meter.set_position(at);
                    requested_chunks.fetch_add(1, Ordering::Relaxed);
                    match chunks.recv().await? {
                        Ok(chunk) => {
                            let next = at + chunk.len() as u64;
                            Some((Ok(chunk), (chunks, next)))
                        }
                        Err(error) => {
                            let kind = io::Error::from(error.kind());
                            *read_error.lock() = Some(error);
                            Some((Err(kind), (chunks, at)))
                        }
                    }
                }
            });
            Body::wrap_stream(chunks)
        };
        let upload = self.upload.to_string();
        let stall_timeout = self.retries.policy.stall_timeout;
        let response = tokio::select! {
            response = self.client.append_upload(&upload, at, end - at, body) => response,
            () = wait_for_stall(&requested_chunks, stall_timeout) => Err(self.client.stalled(stall_timeout)),
        };
        if let Some(error) = read_error.lock().take() {
            return Err(SendError::Local(error));
        }
        Ok(response?.value()?)
    }
}

/// Waits until a counter stays the same for the duration of `timeout`.
async fn wait_for_stall(counter: &AtomicU64, timeout: Duration) {
    loop {
        let before = counter.load(Ordering::Relaxed);
        tokio::time::sleep(timeout).await;
        if counter.load(Ordering::Relaxed) == before {
            return;
        }
    }
}
