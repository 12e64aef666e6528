//! Files that a host puts into the guest. Each is written by a thread of its own, beside its place, and moved there when
//! it is whole; where that cannot be (a device, a file in `/proc`) it is written in place.

use std::collections::VecDeque;
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use muster_agent::mode::BITS;
use muster_agent::packet::{Chunk, PutFile, Stat};
use nix::libc;
use serde_json::{Value, json};

use crate::commands::Commands;
use crate::outbox::{Asker, lock};
use crate::port::pause;
use crate::process;
use crate::reason;
use crate::spool::Note;

/// In the name of every file that is not whole yet.
pub(crate) const MARK: &str = ".muster-";
/// Files that are put at a time.
const MOST: usize = 8;
/// Pieces of a file that wait to be written.
const AHEAD: usize = 32;
/// How long the port is not read because a host without flow control sends faster than the disk writes.
const STALL: Duration = Duration::from_secs(10);
/// A host that says nothing for so long has gone away without a word.
const SILENCE: Duration = Duration::from_secs(600);
/// Files that were refused and whose packets may still come.
const REFUSED: usize = 64;

#[derive(Default)]
pub(crate) struct Puts {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    puts: Vec<Put>,
    refused: VecDeque<(Value, String)>,
}

struct Put {
    unique: Value,
    path: String,
    /// Whether the host speaks of it by its `unique` alone.
    is_modern: bool,
    /// Where the next piece begins.
    offset: u64,
    pieces: SyncSender<Chunk>,
}

impl Puts {
    /// A packet of a file.
    pub(crate) fn take(&self, asker: &Asker, commands: &Arc<Commands>, packet: PutFile) {
        let mut state = lock(&self.state);
        let index = state.find(&asker.unique, &packet.path);
        let index = match (index, packet.stat) {
            // A host without memory begins anew.
            (Some(index), Some(_)) if packet.chunk.is_none() || packet.offset == Some(0) => {
                state.puts.remove(index);
                None
            }
            (index, _) => index,
        };
        let refused = (asker.unique.clone(), packet.path.clone());
        let is_refused = packet.stat.is_none() && !refused.0.is_null() && state.refused.contains(&refused);
        let index = match index {
            Some(index) => index,
            None if is_refused => return,
            None if packet.stat.is_some() || packet.offset.is_none_or(|offset| offset == 0) => {
                match Put::start(asker, commands, &packet) {
                    Ok(put) if state.puts.len() < MOST => {
                        state.refused.retain(|refused| refused.0 != asker.unique);
                        state.puts.push(put);
                        state.puts.len() - 1
                    }
                    Ok(_) => return state.refuse(asker, packet.path, "too many files are put at once"),
                    Err(error) => return state.refuse(asker, packet.path, &error.to_string()),
                }
            }
            None => return state.refuse(asker, packet.path, "no such file is being put"),
        };
        let Some(chunk) = packet.chunk else { return };
        let put = &mut state.puts[index];
        if packet.offset.is_some_and(|offset| offset != put.offset) {
            let message = format!("{}: a piece is missing before this one", put.path);
            let put = state.puts.remove(index);
            return state.refuse(asker, put.path, &message);
        }
        let is_end = chunk == Chunk::End;
        if let Chunk::Bytes(bytes) = &chunk {
            put.offset += bytes.len() as u64;
        }
        match put.hand_over(chunk) {
            Ok(()) if is_end => drop(state.puts.remove(index)),
            Ok(()) => {}
            Err(is_slow) => {
                let put = state.puts.remove(index);
                if is_slow {
                    let message = format!("{}: it is not written as fast as it comes", put.path);
                    return state.refuse(asker, put.path, &message);
                }
                // Its thread has told the reason.
                state.note_refused(put.unique, put.path);
            }
        }
    }

    pub(crate) fn abandon(&self, unique: &Value) {
        lock(&self.state).puts.retain(|put| put.unique != *unique);
    }

    /// The host is gone.
    pub(crate) fn hang_up(&self) {
        *lock(&self.state) = State::default();
    }
}

impl State {
    /// Hosts name a file by the `unique` of its first packet; some only by its path.
    fn find(&mut self, unique: &Value, path: &str) -> Option<usize> {
        // One whose thread has ended for want of pieces is found dead when a piece comes.
        let by_unique = |put: &Put| !unique.is_null() && put.unique == *unique && put.path == path;
        let index = self.puts.iter().position(by_unique);
        index.or_else(|| {
            let is_refused = self.refused.iter().any(|refused| refused.0 == *unique && refused.1 == path);
            let by_path = |put: &Put| !put.is_modern && put.path == path;
            if is_refused { None } else { self.puts.iter().position(by_path) }
        })
    }

    fn refuse(&mut self, asker: &Asker, path: String, message: &str) {
        asker.refuse(message);
        self.note_refused(asker.unique.clone(), path);
    }

    fn note_refused(&mut self, unique: Value, path: String) {
        if self.refused.len() == REFUSED {
            self.refused.pop_front();
        }
        self.refused.push_back((unique, path));
    }
}

impl Put {
    fn start(asker: &Asker, commands: &Arc<Commands>, packet: &PutFile) -> io::Result<Self> {
        let (pieces, received) = sync_channel(AHEAD);
        let (asker_there, commands) = (asker.clone(), Arc::clone(commands));
        let (path, stat, wants_pieces) = (packet.path.clone(), packet.stat, packet.pieces);
        process::start(move || {
            let told = if wants_pieces { Some(&asker_there) } else { None };
            let mode = stat.and_then(|stat: Stat| stat.mode);
            match write(&path, mode, &received, told, &commands) {
                Ok(true) => asker_there.say(json!({ "command": "put-file-response", "path": path })),
                Ok(false) => {}
                Err(error) => asker_there.refuse(&format!("{path}: {}", reason(&error))),
            }
        })?;
        Ok(Self {
            unique: asker.unique.clone(),
            path: packet.path.clone(),
            is_modern: wants_pieces,
            offset: 0,
            pieces,
        })
    }

    /// Gives a piece to the thread that writes. It fails if there is none any more, or, with true, if it is too slow.
    fn hand_over(&self, mut chunk: Chunk) -> Result<(), bool> {
        let begin = Instant::now();
        loop {
            match self.pieces.try_send(chunk) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Disconnected(_)) => return Err(false),
                Err(TrySendError::Full(_)) if begin.elapsed() >= STALL => return Err(true),
                Err(TrySendError::Full(back)) => chunk = back,
            }
            pause(Duration::from_millis(2));
        }
    }
}

/// Writes a file as its pieces come. False if it was abandoned.
fn write(
    path: &str,
    mode: Option<u32>,
    pieces: &Receiver<Chunk>,
    told: Option<&Asker>,
    commands: &Commands,
) -> io::Result<bool> {
    let mut target = Target::open(Path::new(path), commands)?;
    let mut written = 0;
    loop {
        match pieces.recv_timeout(SILENCE) {
            Ok(Chunk::Bytes(bytes)) => {
                target.file.write_all(&bytes)?;
                written += bytes.len() as u64;
                if let Some(asker) = told {
                    asker.say(json!({ "command": "put-file-response", "offset": written }));
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
    /// What was there before.
    before: Option<Metadata>,
    place: Place,
}

enum Place {
    There,
    Beside { temporary: Temporary, path: PathBuf },
}

/// Removed unless it is moved away.
struct Temporary {
    path: PathBuf,
    _note: Option<Note>,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        _ = fs::remove_file(&self.path);
    }
}

impl Target {
    fn open(path: &Path, commands: &Commands) -> io::Result<Self> {
        let before = match fs::metadata(path) {
            Ok(facts) if facts.is_dir() => return Err(io::Error::from_raw_os_error(libc::EISDIR)),
            Ok(facts) => Some(facts),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let real = match &before {
            Some(facts) if !facts.is_file() => {
                // A pipe that nobody reads is refused, and not waited for.
                let flags = if facts.file_type().is_fifo() { libc::O_NONBLOCK } else { 0 };
                let file = OpenOptions::new().write(true).custom_flags(flags | libc::O_NOCTTY).open(path)?;
                if facts.file_type().is_fifo() {
                    let arg = nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty());
                    nix::fcntl::fcntl(&file, arg)?;
                }
                return Ok(Self { file, before, place: Place::There });
            }
            Some(_) => fs::canonicalize(path)?,
            // A link to what is not there yet.
            None if fs::symlink_metadata(path).is_ok() => return Self::in_place(path, before),
            None => path.to_owned(),
        };
        match Temporary::create(&real, commands) {
            Ok((file, temporary)) => {
                Ok(Self { file, before, place: Place::Beside { temporary, path: real } })
            }
            Err(_) if before.is_some() => Self::in_place(&real, before),
            Err(error) => Err(error),
        }
    }

    fn in_place(path: &Path, before: Option<Metadata>) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
        Ok(Self { file, before, place: Place::There })
    }

    /// Puts the file in its place, with the permissions that the host wants, or those that it had.
    fn finish(self, mode: Option<u32>) -> io::Result<()> {
        let Self { file, before, place } = self;
        if let Some(mode) = mode.filter(|_| before.as_ref().is_none_or(Metadata::is_file)) {
            set_mode(&file, mode & 0o777)?;
        }
        let Place::Beside { temporary, path } = place else { return Ok(()) };
        if let Some(before) = &before {
            // Only root may give files away; then the permissions are as they were, in the hands of another.
            _ = std::os::unix::fs::fchown(&file, Some(before.uid()), Some(before.gid()));
        }
        if mode.is_none() {
            set_mode(&file, before.as_ref().map_or(0o644, |before| before.mode() & BITS))?;
        }
        file.sync_data()?;
        match fs::rename(&temporary.path, &path) {
            Ok(()) => Ok(()),
            // A file that is mounted there cannot be replaced, but it can be written.
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

impl Temporary {
    fn create(target: &Path, commands: &Commands) -> io::Result<(File, Self)> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let name = target.file_name().ok_or_else(|| io::Error::from_raw_os_error(libc::EISDIR))?;
        // A name has at most 255 bytes.
        let name: String = name.to_string_lossy().chars().take(50).collect();
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = target.with_file_name(format!(".{name}{MARK}{}-{number}", std::process::id()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        let note = commands.spool().note(&path).ok();
        Ok((file, Self { path, _note: note }))
    }
}
