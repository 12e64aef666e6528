//! Receiving the content of a blob. It goes to a file next to the one that is wanted, whose name holds the blob's id,
//! so that another run can go on with it; only what has the blob's sha512 gets the wanted name.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{anyhow, bail};
use bytes::Bytes;
use muster_types::blob::{BlobRecord, HashAlgorithm};
use tokio::sync::{mpsc, oneshot};

use super::{CHUNK, CHUNKS, Policy, Tally, Tries};
use crate::api::{Client, Error, io_text};
use crate::output::bytes;
use crate::progress::Meter;

/// Where a content goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    Stdout,
    File(PathBuf),
}

impl Target {
    /// A file, or for `-` standard output. What is there is not replaced unless that is wanted.
    pub(crate) fn new(file: &Path, force: bool) -> anyhow::Result<Self> {
        if file == Path::new("-") {
            return Ok(Self::Stdout);
        }
        let name = file.display();
        match fs::metadata(file) {
            Ok(about) if about.is_dir() => bail!("{name} is a folder; name a file in it"),
            Ok(about) if !about.is_file() => bail!("{name} is not a regular file; give - and redirect"),
            Ok(_) if !force => bail!("{name} is there already; give --force to replace it"),
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                bail!("cannot write {name}: {}", io_text(&error))
            }
            Ok(_) | Err(_) => Ok(Self::File(file.to_owned())),
        }
    }

    /// What becomes of a download that is interrupted.
    pub(crate) fn when_interrupted(&self) -> String {
        match self {
            Self::Stdout => "what was written is not whole".to_owned(),
            Self::File(_) => "what has arrived is kept: run the same command again to go on".to_owned(),
        }
    }
}

/// Receives a blob whole and checked. The answer says how much was moved and how fast; nothing if the reader of
/// standard output has seen enough.
pub(crate) async fn download(
    client: &Client,
    blob: &BlobRecord,
    target: &Target,
    policy: Policy,
) -> anyhow::Result<Option<String>> {
    let wanted = Wanted::new(client, blob, policy).await?;
    if wanted.sha512.is_none() {
        eprintln!(
            "the server does not know the checksum of blob {} yet: what arrives is not checked",
            blob.uuid
        );
    }
    match target {
        Target::Stdout => wanted.to_stream(io::stdout(), &wanted.meter(0)).await,
        Target::File(file) => wanted.to_file(file).await.map(Some),
    }
}

/// What the content must sum up to, if the server knows.
async fn sha512(client: &Client, blob: &BlobRecord) -> anyhow::Result<Option<String>> {
    let known = blob.sha512.clone().or_else(|| blob.checksums.get(&HashAlgorithm::Sha512).cloned());
    match known {
        Some(known) => Ok(Some(known)),
        None => Ok(client.checksum(&blob.uuid.to_string(), HashAlgorithm::Sha512.as_str()).await?.value()?),
    }
}

/// Writes a blob to a stream, whole and checked, and shows nothing but that. A reader that has seen enough is no error.
pub(crate) async fn pour(
    client: &Client,
    blob: &BlobRecord,
    out: impl Write + Send + 'static,
    policy: Policy,
) -> anyhow::Result<()> {
    let wanted = Wanted::new(client, blob, policy).await?;
    wanted.to_stream(out, &Meter::hidden()).await.map(drop)
}

/// What has arrived of a blob for a file: nobody else may read it, and if it does not become whole it is removed when
/// this is dropped.
#[derive(Debug)]
pub(crate) struct PrivatePart(PathBuf);

impl PrivatePart {
    pub(crate) fn new(blob: &BlobRecord, file: &Path) -> anyhow::Result<Self> {
        let path = part_of(file, &blob.uuid.to_string())?;
        let opened = OpenOptions::new().append(true).create(true).mode(0o600).open(&path);
        opened.map_err(|error| anyhow!("cannot write {}: {}", path.display(), io_text(&error)))?;
        Ok(Self(path))
    }
}

impl Drop for PrivatePart {
    fn drop(&mut self) {
        // What became whole has another name.
        let _ = fs::remove_file(&self.0);
    }
}

struct Wanted<'a> {
    client: &'a Client,
    blob: String,
    size: u64,
    sha512: Option<String>,
    policy: Policy,
}

impl<'a> Wanted<'a> {
    async fn new(client: &'a Client, blob: &BlobRecord, policy: Policy) -> anyhow::Result<Self> {
        let sha512 = sha512(client, blob).await?;
        let size = u64::try_from(blob.size).map_err(|_| anyhow!("blob {} has no size", blob.uuid))?;
        Ok(Self { client, blob: blob.uuid.to_string(), size, sha512, policy })
    }

    async fn to_stream(
        &self,
        out: impl Write + Send + 'static,
        meter: &Meter,
    ) -> anyhow::Result<Option<String>> {
        let writer = Writer::start(out, Tally::new());
        let received = self.receive(&writer, 0, meter).await;
        let written = match writer.end().await {
            Ok((_, tally)) => tally,
            // A reader that has seen enough is no error.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(None),
            Err(error) => bail!("cannot write the output: {}", io_text(&error)),
        };
        received?;
        if self.fits(&written) {
            return Ok(Some(meter.summary()));
        }
        bail!("what was written is not blob {}: its sha512 is {}; do not use it", self.blob, written.finish())
    }

    async fn to_file(&self, file: &Path) -> anyhow::Result<String> {
        let path = part_of(file, &self.blob)?;
        let (mut part, mut tally) = self.open_part(&path).await?;
        loop {
            let start = tally.at;
            if start > 0 {
                eprintln!(
                    "going on with an earlier download: {} of {} are here",
                    bytes(start),
                    bytes(self.size)
                );
            }
            let meter = self.meter(start);
            let writer = Writer::start(part, tally);
            let received = self.receive(&writer, start, &meter).await;
            let ended = writer.end().await;
            (part, tally) =
                ended.map_err(|error| anyhow!("cannot write {}: {}", path.display(), io_text(&error)))?;
            received.map_err(|error| {
                let file = file.display();
                anyhow!("{error}; `muster blob download {} {file}` goes on with it", self.blob)
            })?;
            let summary = meter.summary();
            drop(meter);
            if self.fits(&tally) {
                let stored = part.sync_all().and_then(|()| fs::rename(&path, file));
                stored.map_err(|error| anyhow!("cannot write {}: {}", file.display(), io_text(&error)))?;
                return Ok(summary);
            }
            let emptied = part.set_len(0).and_then(|()| io::Seek::rewind(&mut part));
            emptied.map_err(|error| anyhow!("cannot write {}: {}", path.display(), io_text(&error)))?;
            if start == 0 {
                let _ = fs::remove_file(&path);
                bail!(
                    "what arrived is not blob {}: its sha512 is {}; it was removed, run the same command again",
                    self.blob,
                    tally.finish()
                );
            }
            eprintln!("what an earlier run had received is damaged; beginning anew");
            tally = Tally::new();
        }
    }

    fn meter(&self, start: u64) -> Meter {
        Meter::new("downloading", start, Some(self.size))
    }

    fn fits(&self, tally: &Tally) -> bool {
        self.sha512.as_ref().is_none_or(|sha512| sha512.eq_ignore_ascii_case(&tally.finish()))
    }

    /// The file that is being filled, locked, and the sum of what it holds. The next byte goes to its end.
    async fn open_part(&self, path: &Path) -> anyhow::Result<(File, Tally)> {
        let bad = |error: io::Error| anyhow!("cannot write {}: {}", path.display(), io_text(&error));
        let opened = OpenOptions::new().read(true).append(true).create(true).open(path);
        let part = opened.map_err(bad)?;
        match part.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("another muster is writing {} now", path.display()),
            Err(TryLockError::Error(error)) => return Err(bad(error)),
        }
        let length = part.metadata().map_err(bad)?.len();
        if length > self.size {
            part.set_len(0).map_err(bad)?;
        }
        if length == 0 || length > self.size {
            return Ok((part, Tally::new()));
        }
        let meter = Meter::new("checking what is here", 0, Some(length));
        let work = move || {
            let (mut tally, mut chunk) = (Tally::new(), vec![0; CHUNK]);
            loop {
                let count = (&part).read(&mut chunk)?;
                if count == 0 {
                    return Ok((part, tally));
                }
                tally.take(tally.at, chunk.get(..count).unwrap_or_default());
                meter.at(tally.at);
            }
        };
        tokio::task::spawn_blocking(work).await?.map_err(bad)
    }

    /// Receives from `at` to the end, over as many connections as it takes.
    async fn receive<W>(&self, writer: &Writer<W>, mut at: u64, meter: &Meter) -> anyhow::Result<()> {
        let mut tries = Tries::new(self.policy);
        while at < self.size {
            let before = at;
            let error = match self.receive_some(writer, &mut at, meter).await {
                Ok(()) => continue,
                Err(Stopped::Writer) => return Ok(()),
                Err(Stopped::TooMuch) => {
                    bail!("the server sends more than the {} bytes of blob {}", self.size, self.blob)
                }
                Err(Stopped::Connection(error)) => error,
            };
            if at > before {
                tries.succeeded();
            }
            if let Err(error) = tries.again(error, Some(meter)).await {
                bail!("{} of {} have arrived, then: {error}", bytes(at), bytes(self.size));
            }
        }
        Ok(())
    }

    /// Receives over one connection.
    async fn receive_some<W>(&self, writer: &Writer<W>, at: &mut u64, meter: &Meter) -> Result<(), Stopped> {
        let mut data = self.client.blob_data(&self.blob, *at).await?;
        while let Some(chunk) = data.next(self.policy.patience).await? {
            let next = *at + chunk.len() as u64;
            if next > self.size {
                return Err(Stopped::TooMuch);
            }
            writer.write(chunk).await?;
            *at = next;
            meter.at(next);
        }
        if *at < self.size {
            let why = "the bytes ended early".to_owned();
            return Err(Error::Unreachable { url: self.client.url().to_owned(), why }.into());
        }
        Ok(())
    }
}

/// Why receiving stopped.
enum Stopped {
    Connection(Error),
    TooMuch,
    /// The writer has failed and says why itself.
    Writer,
}

impl From<Error> for Stopped {
    fn from(error: Error) -> Self {
        Self::Connection(error)
    }
}

/// `.<file>.<blob>.part`, next to the file.
fn part_of(file: &Path, blob: &str) -> anyhow::Result<PathBuf> {
    let name = file.file_name().ok_or_else(|| anyhow!("{} does not name a file", file.display()))?;
    let mut part = std::ffi::OsString::from(".");
    part.push(name);
    part.push(format!(".{blob}.part"));
    Ok(file.with_file_name(part))
}

/// A thread that writes and sums up what it is given, next to the network. Nobody waits for it unless they want what
/// it was given: a pipe may never take more.
struct Writer<W> {
    to: mpsc::Sender<Bytes>,
    result: oneshot::Receiver<io::Result<(W, Tally)>>,
}

impl<W: Write + Send + 'static> Writer<W> {
    fn start(mut file: W, mut tally: Tally) -> Self {
        let (to, mut from) = mpsc::channel::<Bytes>(CHUNKS * 4);
        let (done, result) = oneshot::channel();
        thread::spawn(move || {
            let mut work = || {
                while let Some(bytes) = from.blocking_recv() {
                    file.write_all(&bytes)?;
                    tally.take(tally.at, &bytes);
                }
                file.flush()
            };
            let written = work();
            drop(from);
            // Nobody may be there any more.
            let _ = done.send(written.map(|()| (file, tally)));
        });
        Self { to, result }
    }

    /// Waits until everything is written; the file and the sum of it.
    async fn end(self) -> io::Result<(W, Tally)> {
        drop(self.to);
        self.result.await.unwrap_or_else(|_| Err(io::Error::other("the writer is gone")))
    }
}

impl<W> Writer<W> {
    async fn write(&self, bytes: Bytes) -> Result<(), Stopped> {
        self.to.send(bytes).await.map_err(|_| Stopped::Writer)
    }
}
