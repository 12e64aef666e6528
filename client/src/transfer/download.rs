//! Downloads of blobs. The content is written to a part file next to the target whose name contains the blob's id, so that
//! another run can resume it. It is renamed to the target only if its SHA-512 matches.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{anyhow, bail};
use bytes::Bytes;
use muster_types::blob::{BlobRecord, HashAlgorithm};
use tokio::sync::{mpsc, oneshot};

use super::checksum::{CHUNK_SIZE, ContentHasher};
use super::retry::{Retries, RetryPolicy};
use crate::api::{Client, Error};
use crate::error_text::io_error_text;
use crate::output::format_bytes;
use crate::progress::ProgressMeter;

/// The number of received chunks buffered between network and disk.
const CHUNK_QUEUE: usize = 32;

/// Where downloaded content is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DownloadTarget {
    Stdout,
    File(PathBuf),
}

impl DownloadTarget {
    /// Creates the target for a file, or for standard output if it is `-`. Replaces an existing file only with `force`.
    pub(crate) fn new(file: &Path, force: bool) -> anyhow::Result<Self> {
        if file == Path::new("-") {
            return Ok(Self::Stdout);
        }
        let name = file.display();
        match fs::metadata(file) {
            Ok(metadata) if metadata.is_dir() => bail!("{name} is a directory; give a file in it"),
            Ok(metadata) if !metadata.is_file() => bail!("{name} is not a regular file; give - and redirect"),
            Ok(_) if !force => bail!("{name} already exists; give --force to replace it"),
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                bail!("cannot write {name}: {}", io_error_text(&error))
            }
            Ok(_) | Err(_) => Ok(Self::File(file.to_owned())),
        }
    }

    /// Returns what becomes of an interrupted download.
    pub(crate) fn interrupt_consequence(&self) -> String {
        match self {
            Self::Stdout => "the output is incomplete".to_owned(),
            Self::File(_) => "the received part is kept: run the same command again to resume".to_owned(),
        }
    }
}

/// Downloads and verifies a blob. Returns a summary of the transfer, or `None` if the reader closed standard output.
pub(crate) async fn download(
    client: &Client,
    blob: &BlobRecord,
    target: &DownloadTarget,
    policy: RetryPolicy,
) -> anyhow::Result<Option<String>> {
    let download = BlobDownload::new(client, blob, policy).await?;
    if download.sha512.is_none() {
        crate::message!(
            "the server has not computed the checksum of blob {} yet: the download is not verified",
            blob.uuid
        );
    }
    match target {
        DownloadTarget::Stdout => download.to_stream(io::stdout(), &download.meter(0)).await,
        DownloadTarget::File(file) => download.to_file(file).await.map(Some),
    }
}

/// Returns the expected checksum, if the server has computed it.
async fn expected_sha512(client: &Client, blob: &BlobRecord) -> anyhow::Result<Option<String>> {
    let known = blob.sha512.clone().or_else(|| blob.checksums.get(&HashAlgorithm::Sha512).cloned());
    match known {
        Some(known) => Ok(Some(known)),
        None => Ok(client.checksum(&blob.uuid.to_string(), HashAlgorithm::Sha512.as_str()).await?.value()?),
    }
}

/// Writes and verifies a blob to a stream without showing progress. A closed pipe is not an error.
pub(crate) async fn download_to_stream(
    client: &Client,
    blob: &BlobRecord,
    out: impl Write + Send + 'static,
    policy: RetryPolicy,
) -> anyhow::Result<()> {
    let download = BlobDownload::new(client, blob, policy).await?;
    download.to_stream(out, &ProgressMeter::hidden()).await.map(drop)
}

/// A part file that only its owner can read. Removed on drop if the download is not complete.
#[derive(Debug)]
pub(crate) struct PrivatePartFile(PathBuf);

impl PrivatePartFile {
    pub(crate) fn new(blob: &BlobRecord, file: &Path) -> anyhow::Result<Self> {
        let path = part_path(file, &blob.uuid.to_string())?;
        let opened = OpenOptions::new().append(true).create(true).mode(0o600).open(&path);
        opened.map_err(|error| anyhow!("cannot write {}: {}", path.display(), io_error_text(&error)))?;
        Ok(Self(path))
    }
}

impl Drop for PrivatePartFile {
    fn drop(&mut self) {
        // A complete download has been renamed.
        let _ = fs::remove_file(&self.0);
    }
}

/// A blob to download.
struct BlobDownload<'a> {
    client: &'a Client,
    blob: String,
    size: u64,
    sha512: Option<String>,
    policy: RetryPolicy,
}

impl<'a> BlobDownload<'a> {
    async fn new(client: &'a Client, blob: &BlobRecord, policy: RetryPolicy) -> anyhow::Result<Self> {
        let sha512 = expected_sha512(client, blob).await?;
        let size = u64::try_from(blob.size)
            .map_err(|_| anyhow!("the server sent an invalid size of blob {}", blob.uuid))?;
        Ok(Self { client, blob: blob.uuid.to_string(), size, sha512, policy })
    }

    async fn to_stream(
        &self,
        out: impl Write + Send + 'static,
        meter: &ProgressMeter,
    ) -> anyhow::Result<Option<String>> {
        let writer = WriterThread::start(out, ContentHasher::new());
        let received = self.receive(&writer, 0, meter).await;
        let written = match writer.finish().await {
            Ok((_, hasher)) => hasher,
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(None),
            Err(error) => bail!("cannot write the output: {}", io_error_text(&error)),
        };
        received?;
        if self.matches_checksum(&written) {
            return Ok(Some(meter.summary()));
        }
        bail!("the output is not blob {}: its sha512 is {}; do not use it", self.blob, written.digest())
    }

    async fn to_file(&self, file: &Path) -> anyhow::Result<String> {
        let path = part_path(file, &self.blob)?;
        let (mut part, mut hasher) = self.open_part(&path).await?;
        loop {
            let start = hasher.hashed();
            if start > 0 {
                crate::message!(
                    "resuming an earlier download: {} of {} already received",
                    format_bytes(start),
                    format_bytes(self.size)
                );
            }
            let meter = self.meter(start);
            let writer = WriterThread::start(part, hasher);
            let received = self.receive(&writer, start, &meter).await;
            let written = writer.finish().await;
            (part, hasher) = written
                .map_err(|error| anyhow!("cannot write {}: {}", path.display(), io_error_text(&error)))?;
            received.map_err(|error| {
                let file = file.display();
                anyhow!("{error}; run `muster blob download {} {file}` to resume", self.blob)
            })?;
            let summary = meter.summary();
            drop(meter);
            if self.matches_checksum(&hasher) {
                let stored = part.sync_all().and_then(|()| fs::rename(&path, file));
                stored
                    .map_err(|error| anyhow!("cannot write {}: {}", file.display(), io_error_text(&error)))?;
                return Ok(summary);
            }
            let truncated = part.set_len(0).and_then(|()| io::Seek::rewind(&mut part));
            truncated
                .map_err(|error| anyhow!("cannot write {}: {}", path.display(), io_error_text(&error)))?;
            if start == 0 {
                let _ = fs::remove_file(&path);
                bail!(
                    "the received content is not blob {}: its sha512 is {}; it was removed, run the same command again",
                    self.blob,
                    hasher.digest()
                );
            }
            crate::message!("the part received by an earlier run is damaged; starting over");
            hasher = ContentHasher::new();
        }
    }

    fn meter(&self, start: u64) -> ProgressMeter {
        ProgressMeter::new("downloading", start, Some(self.size))
    }

    fn matches_checksum(&self, hasher: &ContentHasher) -> bool {
        self.sha512.as_ref().is_none_or(|sha512| sha512.eq_ignore_ascii_case(&hasher.digest()))
    }

    /// Opens and locks the part file for appending, and hashes what it already contains.
    async fn open_part(&self, path: &Path) -> anyhow::Result<(File, ContentHasher)> {
        let write_error =
            |error: io::Error| anyhow!("cannot write {}: {}", path.display(), io_error_text(&error));
        let opened = OpenOptions::new().read(true).append(true).create(true).open(path);
        let part = opened.map_err(write_error)?;
        match part.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("another muster process is writing {}", path.display()),
            Err(TryLockError::Error(error)) => return Err(write_error(error)),
        }
        let length = part.metadata().map_err(write_error)?.len();
        if length > self.size {
            part.set_len(0).map_err(write_error)?;
        }
        if length == 0 || length > self.size {
            return Ok((part, ContentHasher::new()));
        }
        let meter = ProgressMeter::new("verifying the received part", 0, Some(length));
        let work = move || {
            let (mut hasher, mut chunk) = (ContentHasher::new(), vec![0; CHUNK_SIZE]);
            loop {
                let count = (&part).read(&mut chunk)?;
                if count == 0 {
                    return Ok((part, hasher));
                }
                hasher.update(&chunk[..count]);
                meter.set_position(hasher.hashed());
            }
        };
        tokio::task::spawn_blocking(work).await?.map_err(write_error)
    }

    /// Receives from `at` to the end, over several connections if necessary.
    async fn receive<W>(
        &self,
        writer: &WriterThread<W>,
        mut at: u64,
        meter: &ProgressMeter,
    ) -> anyhow::Result<()> {
        let mut retries = Retries::new(self.policy);
        while at < self.size {
            let before = at;
            let error = match self.receive_once(writer, &mut at, meter).await {
                Ok(()) => continue,
                Err(ReceiveError::WriterFailed) => return Ok(()),
                Err(ReceiveError::Oversized) => {
                    bail!("the server sent more than the {} bytes of blob {}", self.size, self.blob)
                }
                Err(ReceiveError::Connection(error)) => error,
            };
            if at > before {
                retries.reset();
            }
            if let Err(error) = retries.back_off(error, Some(meter)).await {
                bail!(
                    "the download stopped after {} of {}: {error}",
                    format_bytes(at),
                    format_bytes(self.size)
                );
            }
        }
        Ok(())
    }

    /// Receives over one connection.
    async fn receive_once<W>(
        &self,
        writer: &WriterThread<W>,
        at: &mut u64,
        meter: &ProgressMeter,
    ) -> Result<(), ReceiveError> {
        let mut data = self.client.blob_data(&self.blob, *at).await?;
        while let Some(chunk) = data.next(self.policy.stall_timeout).await? {
            let next = *at + chunk.len() as u64;
            if next > self.size {
                return Err(ReceiveError::Oversized);
            }
            writer.write(chunk).await?;
            *at = next;
            meter.set_position(next);
        }
        if *at < self.size {
            let reason = "the connection was closed early".to_owned();
            return Err(Error::Unreachable { url: self.client.url().to_owned(), reason }.into());
        }
        Ok(())
    }
}

/// Why receiving stopped.
enum ReceiveError {
    Connection(Error),
    /// The server sent more than the blob's size.
    Oversized,
    /// The writer thread failed; its own result says why.
    WriterFailed,
}

impl From<Error> for ReceiveError {
    fn from(error: Error) -> Self {
        Self::Connection(error)
    }
}

/// Returns the path of the part file: `.<file>.<blob>.part` next to the file.
fn part_path(file: &Path, blob: &str) -> anyhow::Result<PathBuf> {
    let name = file.file_name().ok_or_else(|| anyhow!("{} does not name a file", file.display()))?;
    let mut part = std::ffi::OsString::from(".");
    part.push(name);
    part.push(format!(".{blob}.part"));
    Ok(file.with_file_name(part))
}

/// A thread that writes and hashes chunks concurrently with the network. Never joined unless its result is needed: a
/// write to a pipe may block forever.
struct WriterThread<W> {
    chunks: mpsc::Sender<Bytes>,
    result: oneshot::Receiver<io::Result<(W, ContentHasher)>>,
}

impl<W: Write + Send + 'static> WriterThread<W> {
    fn start(mut output: W, mut hasher: ContentHasher) -> Self {
        let (chunks, mut receiver) = mpsc::channel::<Bytes>(CHUNK_QUEUE);
        let (done, result) = oneshot::channel();
        thread::spawn(move || {
            let mut work = || {
                while let Some(bytes) = receiver.blocking_recv() {
                    output.write_all(&bytes)?;
                    hasher.update(&bytes);
                }
                output.flush()
            };
            let written = work();
            drop(receiver);
            // The download may have been interrupted.
            let _ = done.send(written.map(|()| (output, hasher)));
        });
        Self { chunks, result }
    }

    /// Waits until everything is written.
    async fn finish(self) -> io::Result<(W, ContentHasher)> {
        drop(self.chunks);
        self.result.await.unwrap_or_else(|_| Err(io::Error::other("the writer thread panicked")))
    }
}

impl<W> WriterThread<W> {
    async fn write(&self, bytes: Bytes) -> Result<(), ReceiveError> {
        self.chunks.send(bytes).await.map_err(|_| ReceiveError::WriterFailed)
    }
}
