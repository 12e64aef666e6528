//! File transfers from the host. Each file is written by its own thread to a temporary file next to the target, which
//! is renamed when it is complete. Targets that cannot be replaced (devices, FIFOs, files in `/proc`) are written in
//! place.

use std::collections::VecDeque;
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use muster_agent::mode::PERMISSION_BITS;
use muster_agent::packet::{Chunk, PutFile};
use nix::libc;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::os::{error_text, sleep, spawn_thread};
use crate::outbox::Responder;
use crate::output_file::create_private;
use crate::spool::{Spool, TEMPORARY_FILE_MARK, TemporaryRecord};

/// The maximum number of concurrent transfers.
const MAX_TRANSFERS: usize = 8;
/// The maximum number of chunks that wait to be written.
const MAX_QUEUED_CHUNKS: usize = 32;
/// How long reading the port may block because a host without flow control sends faster than the disk writes.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a full queue is checked.
const QUEUE_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// A transfer without packets for this long is aborted.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
/// The maximum number of rejected transfers to remember. Their remaining packets are ignored.
const MAX_REJECTED: usize = 64;

pub(crate) struct PutTransfers {
    spool: Arc<Spool>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    transfers: Vec<PutTransfer>,
    rejected: VecDeque<(Value, String)>,
}

struct PutTransfer {
    unique: Value,
    path: String,
    /// Whether the host identifies the transfer by its `unique` in every packet.
    has_unique: bool,
    /// The expected offset of the next chunk.
    offset: u64,
    chunks: SyncSender<Chunk>,
}

/// Why a chunk could not be queued.
enum QueueError {
    /// The writer has ended, after it replied with the reason.
    WriterEnded,
    TooSlow,
}

impl PutTransfers {
    pub(crate) fn new(spool: Arc<Spool>) -> Self {
        Self { spool, state: Mutex::default() }
    }

    /// Handles a packet of a transfer.
    pub(crate) fn receive(&self, responder: &Responder, packet: PutFile) {
        let mut state = self.state.lock();
        let Some(index) = self.find_or_start(&mut state, responder, &packet) else { return };
        let Some(chunk) = packet.chunk else { return };
        let transfer = &mut state.transfers[index];
        if packet.offset.is_some_and(|offset| offset != transfer.offset) {
            let message = format!("{}: expected a chunk at offset {}", transfer.path, transfer.offset);
            let transfer = state.transfers.remove(index);
            return state.reject(responder, transfer.path, &message);
        }
        let is_end = chunk == Chunk::End;
        if let Chunk::Bytes(bytes) = &chunk {
            transfer.offset += bytes.len() as u64;
        }
        match transfer.queue(chunk) {
            Ok(()) if is_end => drop(state.transfers.remove(index)),
            Ok(()) => {}
            Err(error) => {
                let transfer = state.transfers.remove(index);
                match error {
                    QueueError::WriterEnded => state.remember_rejected(transfer.unique, transfer.path),
                    QueueError::TooSlow => {
                        let message =
                            format!("{}: data arrives faster than it can be written", transfer.path);
                        state.reject(responder, transfer.path, &message);
                    }
                }
            }
        }
    }

    /// Returns the index of the packet's transfer, which is started by its first packet. Returns `None` if the packet
    /// is rejected or ignored.
    fn find_or_start(&self, state: &mut State, responder: &Responder, packet: &PutFile) -> Option<usize> {
        if let Some(index) = state.find(&responder.unique, &packet.path) {
            let is_restart = packet.stat.is_some() && (packet.chunk.is_none() || packet.offset == Some(0));
            if !is_restart {
                return Some(index);
            }
            state.transfers.remove(index);
        }
        let identity = (responder.unique.clone(), packet.path.clone());
        if packet.stat.is_none() && !identity.0.is_null() && state.rejected.contains(&identity) {
            return None;
        }
        if packet.stat.is_none() && packet.offset.is_some_and(|offset| offset != 0) {
            state.reject(responder, identity.1, "no such put-file transfer is in progress");
            return None;
        }
        // Checked before the writer starts, which may truncate the target.
        if state.transfers.len() >= MAX_TRANSFERS {
            state.reject(responder, identity.1, "too many concurrent put-file transfers");
            return None;
        }
        match PutTransfer::start(responder, &self.spool, packet) {
            Ok(transfer) => {
                state.rejected.retain(|rejected| rejected.0 != responder.unique);
                state.transfers.push(transfer);
                Some(state.transfers.len() - 1)
            }
            Err(error) => {
                state.reject(responder, identity.1, &format!("failed to start a thread: {error}"));
                None
            }
        }
    }

    pub(crate) fn abort(&self, unique: &Value) {
        self.state.lock().transfers.retain(|transfer| transfer.unique != *unique);
    }

    pub(crate) fn abort_all(&self) {
        *self.state.lock() = State::default();
    }
}

impl State {
    /// Returns the index of a transfer. Hosts identify it by the `unique` of its first packet; some only by its path.
    fn find(&mut self, unique: &Value, path: &str) -> Option<usize> {
        let by_unique =
            |transfer: &PutTransfer| !unique.is_null() && transfer.unique == *unique && transfer.path == path;
        self.transfers.iter().position(by_unique).or_else(|| {
            let is_rejected =
                self.rejected.iter().any(|rejected| rejected.0 == *unique && rejected.1 == path);
            let by_path = |transfer: &PutTransfer| !transfer.has_unique && transfer.path == path;
            if is_rejected { None } else { self.transfers.iter().position(by_path) }
        })
    }

    fn reject(&mut self, responder: &Responder, path: String, message: &str) {
        responder.reply_error(message);
        self.remember_rejected(responder.unique.clone(), path);
    }

    fn remember_rejected(&mut self, unique: Value, path: String) {
        if self.rejected.len() == MAX_REJECTED {
            self.rejected.pop_front();
        }
        self.rejected.push_back((unique, path));
    }
}

impl PutTransfer {
    fn start(responder: &Responder, spool: &Arc<Spool>, packet: &PutFile) -> io::Result<Self> {
        let (chunks, received) = sync_channel(MAX_QUEUED_CHUNKS);
        let (thread_responder, spool) = (responder.clone(), Arc::clone(spool));
        let (path, stat, acknowledge) = (packet.path.clone(), packet.stat, packet.pieces);
        spawn_thread(move || {
            let acknowledge = acknowledge.then_some(&thread_responder);
            let mode = stat.and_then(|stat| stat.mode);
            match write(&path, mode, &received, acknowledge, &spool) {
                Ok(true) => thread_responder.reply(json!({ "command": "put-file-response", "path": path })),
                Ok(false) => {}
                Err(error) => thread_responder.reply_error(&format!("{path}: {}", error_text(&error))),
            }
        })?;
        Ok(Self {
            unique: responder.unique.clone(),
            path: packet.path.clone(),
            has_unique: packet.pieces,
            offset: 0,
            chunks,
        })
    }

    /// Passes a chunk to the writer.
    fn queue(&self, mut chunk: Chunk) -> Result<(), QueueError> {
        let begin = Instant::now();
        loop {
            match self.chunks.try_send(chunk) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Disconnected(_)) => return Err(QueueError::WriterEnded),
                Err(TrySendError::Full(_)) if begin.elapsed() >= QUEUE_TIMEOUT => {
                    return Err(QueueError::TooSlow);
                }
                Err(TrySendError::Full(back)) => chunk = back,
            }
            sleep(QUEUE_POLL_INTERVAL);
        }
    }
}

/// Writes a file as its chunks arrive. Returns false if the transfer was aborted.
fn write(
    path: &str,
    mode: Option<u32>,
    chunks: &Receiver<Chunk>,
    acknowledge: Option<&Responder>,
    spool: &Spool,
) -> io::Result<bool> {
    let mut target = Target::open(Path::new(path), spool)?;
    let mut written = 0;
    loop {
        match chunks.recv_timeout(IDLE_TIMEOUT) {
            Ok(Chunk::Bytes(bytes)) => {
                target.file.write_all(&bytes)?;
                written += bytes.len() as u64;
                if let Some(responder) = acknowledge {
                    responder.reply(json!({ "command": "put-file-response", "offset": written }));
                }
            }
            Ok(Chunk::End) => return target.finish(mode).map(|()| true),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(false),
        }
    }
}

/// A file that is being written.
struct Target {
    file: File,
    /// The metadata of an existing file.
    existing: Option<Metadata>,
    strategy: WriteStrategy,
}

enum WriteStrategy {
    InPlace,
    Rename { temporary: TemporaryFile, path: PathBuf },
}

/// A temporary file, deleted on drop unless it was renamed.
struct TemporaryFile {
    path: PathBuf,
    _record: Option<TemporaryRecord>,
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        _ = fs::remove_file(&self.path);
    }
}

impl Target {
    fn open(path: &Path, spool: &Spool) -> io::Result<Self> {
        let existing = match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => return Err(io::Error::from_raw_os_error(libc::EISDIR)),
            Ok(metadata) => Some(metadata),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let real = match &existing {
            Some(metadata) if !metadata.is_file() => {
                // Opening a FIFO without a reader fails rather than blocks.
                let flags = if metadata.file_type().is_fifo() { libc::O_NONBLOCK } else { 0 };
                let file = OpenOptions::new().write(true).custom_flags(flags | libc::O_NOCTTY).open(path)?;
                if metadata.file_type().is_fifo() {
                    let arg = nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty());
                    nix::fcntl::fcntl(&file, arg)?;
                }
                return Ok(Self { file, existing, strategy: WriteStrategy::InPlace });
            }
            Some(_) => fs::canonicalize(path)?,
            // A dangling symbolic link.
            None if fs::symlink_metadata(path).is_ok() => return Self::in_place(path, existing),
            None => path.to_owned(),
        };
        match TemporaryFile::create(&real, spool) {
            Ok((file, temporary)) => {
                Ok(Self { file, existing, strategy: WriteStrategy::Rename { temporary, path: real } })
            }
            Err(_) if existing.is_some() => Self::in_place(&real, existing),
            Err(error) => Err(error),
        }
    }

    fn in_place(path: &Path, existing: Option<Metadata>) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
        Ok(Self { file, existing, strategy: WriteStrategy::InPlace })
    }

    /// Moves the file to its path, with the requested mode or that of the existing file.
    fn finish(self, mode: Option<u32>) -> io::Result<()> {
        let Self { file, existing, strategy } = self;
        if let Some(mode) = mode.filter(|_| existing.as_ref().is_none_or(Metadata::is_file)) {
            set_mode(&file, mode & 0o777)?;
        }
        let WriteStrategy::Rename { temporary, path } = strategy else { return Ok(()) };
        if let Some(existing) = &existing {
            // Fails unless the agent is root; the file then has the agent's user as its owner.
            _ = std::os::unix::fs::fchown(&file, Some(existing.uid()), Some(existing.gid()));
        }
        if mode.is_none() {
            set_mode(&file, existing.as_ref().map_or(0o644, |existing| existing.mode() & PERMISSION_BITS))?;
        }
        file.sync_data()?;
        match fs::rename(&temporary.path, &path) {
            Ok(()) => Ok(()),
            // A mount point cannot be replaced, but it can be written.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EXDEV)) => {
                let mut from = File::open(&temporary.path)?;
                let mut to = OpenOptions::new().write(true).truncate(true).open(&path)?;
                io::copy(&mut from, &mut to)?;
                to.sync_data()
            }
            Err(error) => Err(error),
        }
    }
}

fn set_mode(file: &File, mode: u32) -> io::Result<()> {
    file.set_permissions(Permissions::from_mode(mode))
}

impl TemporaryFile {
    fn create(target: &Path, spool: &Spool) -> io::Result<(File, Self)> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let name = target.file_name().ok_or_else(|| io::Error::from_raw_os_error(libc::EISDIR))?;
        // Shortened, because file names have at most 255 bytes.
        let name: String = name.to_string_lossy().chars().take(50).collect();
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path =
            target.with_file_name(format!(".{name}{TEMPORARY_FILE_MARK}{}-{number}", std::process::id()));
        // Recorded first: a reset at any moment leaves no file that nothing removes.
        let record = spool.record_temporary(&path).inspect_err(|error| {
            eprintln!("failed to record temporary file {}: {error}", path.display());
        });
        let file = create_or_replace(&path)?;
        Ok((file, Self { path, _record: record.ok() }))
    }
}

/// Creates a temporary file. One that exists is the orphan of an earlier boot, in which the agent had the same process id.
fn create_or_replace(path: &Path) -> io::Result<File> {
    match create_private(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(path)?;
            create_private(path)
        }
        created => created,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_file_replaces_an_orphan_but_not_what_it_links_to() {
        let directory = tempfile::TempDir::new().unwrap();
        let (orphan, target) = (directory.path().join("orphan"), directory.path().join("target"));
        fs::write(&orphan, "old").unwrap();
        create_or_replace(&orphan).unwrap();
        assert_eq!(fs::read(&orphan).unwrap(), b"");
        fs::write(&target, "other").unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&target, &link).unwrap();
        create_or_replace(&link).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"other");
        assert!(fs::symlink_metadata(&link).unwrap().is_file());
    }
}
