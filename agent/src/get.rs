//! Files that a host gets out of the guest, each read by a thread of its own, as fast as the host takes it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use muster_agent::PIECE;
use muster_agent::packet;
use nix::libc;
use serde_json::{Value, json};

use crate::outbox::{Asker, lock};
use crate::process;
use crate::reason;

/// Files that are got at a time.
const MOST: usize = 16;
/// What hosts get at once that ask for no more.
const PLAIN: usize = 1024;
/// A host that takes nothing for so long has gone away without a word.
const SILENCE: Duration = Duration::from_secs(600);

#[derive(Default)]
pub(crate) struct Gets {
    gets: Mutex<Vec<Arc<Get>>>,
}

struct Get {
    unique: Value,
    window: u64,
    allowance: Mutex<Allowance>,
    changed: Condvar,
}

struct Allowance {
    /// Up to where may be sent.
    limit: u64,
    is_over: bool,
}

impl Gets {
    pub(crate) fn start(self: &Arc<Self>, asker: &Asker, path: &str, window: Option<u64>) {
        let get = Arc::new(Get {
            unique: asker.unique.clone(),
            window: window.unwrap_or(u64::MAX),
            allowance: Mutex::new(Allowance { limit: window.unwrap_or(u64::MAX), is_over: false }),
            changed: Condvar::new(),
        });
        let mut gets = lock(&self.gets);
        if gets.len() >= MOST {
            return refuse(asker, path, "too many files are got at once");
        }
        let (all, its, asker_there, path_there) =
            (Arc::clone(self), Arc::clone(&get), asker.clone(), path.to_owned());
        let piece = if window.is_some() { PIECE } else { PLAIN };
        let thread = process::start(move || {
            if let Err(error) = its.run(&asker_there, &path_there, piece) {
                refuse(&asker_there, &path_there, &format!("{path_there}: {}", reason(&error)));
            }
            lock(&all.gets).retain(|get| !Arc::ptr_eq(get, &its));
        });
        match thread {
            Ok(()) => gets.push(get),
            Err(error) => refuse(asker, path, &error.to_string()),
        }
    }

    /// The host has taken so many bytes.
    pub(crate) fn more(&self, unique: &Value, offset: u64) {
        for get in lock(&self.gets).iter().filter(|get| get.unique == *unique) {
            let mut allowance = lock(&get.allowance);
            allowance.limit = allowance.limit.max(offset.saturating_add(get.window));
            get.changed.notify_all();
        }
    }

    pub(crate) fn abandon(&self, unique: &Value) {
        for get in lock(&self.gets).iter().filter(|get| get.unique == *unique) {
            get.end();
        }
    }

    /// The host is gone.
    pub(crate) fn hang_up(&self) {
        lock(&self.gets).iter().for_each(|get| get.end());
    }
}

fn refuse(asker: &Asker, path: &str, message: &str) {
    asker.say(json!({ "command": "get-file-response", "path": path, "result": false, "message": message }));
}

impl Get {
    fn end(&self) {
        lock(&self.allowance).is_over = true;
        self.changed.notify_all();
    }

    /// How many bytes may be sent now, at least one; nothing if it is over.
    fn wait(&self, sent: u64) -> Option<u64> {
        let mut allowance = lock(&self.allowance);
        while !allowance.is_over && allowance.limit <= sent {
            let waited = self.changed.wait_timeout(allowance, SILENCE);
            let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            allowance = guard;
            allowance.is_over |= timeout.timed_out() && allowance.limit <= sent;
        }
        if allowance.is_over { None } else { Some(allowance.limit - sent) }
    }

    fn run(&self, asker: &Asker, path: &str, piece: usize) -> io::Result<()> {
        let (mut file, stat) = open(path)?;
        let packet = |offset: u64, chunk: Value| {
            json!({
                "command": "get-file-response", "path": path, "result": true,
                "offset": offset, "encoding": "base64", "chunk": chunk,
            })
        };
        let first =
            json!({ "command": "get-file-response", "path": path, "result": true, "stat_result": stat });
        if !asker.send(first) {
            return Ok(());
        }
        let mut buffer = vec![0; piece];
        let mut sent = 0;
        loop {
            let Some(allowed) = self.wait(sent) else { return Ok(()) };
            let length = usize::try_from(allowed).unwrap_or(piece).min(piece);
            let count = fill(&mut file, &mut buffer[..length])?;
            if count == 0 {
                asker.send(packet(sent, Value::Null));
                return Ok(());
            }
            let packet = packet(sent, packet::chunk(&buffer[..count]).into());
            let is_here = if piece == PLAIN { asker.send(packet) } else { asker.send_much(packet) };
            if !is_here {
                return Ok(());
            }
            sent += count as u64;
        }
    }
}

fn open(path: &str) -> io::Result<(File, Value)> {
    // Looked at first: opening a device may do something.
    let facts = fs::metadata(path)?;
    if facts.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    // A pipe that nobody writes to is empty, and not waited for.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    let facts = file.metadata()?;
    let time = |seconds: i64, nanoseconds: i64| seconds as f64 + nanoseconds as f64 / 1e9;
    let stat = json!({
        "mode": facts.mode(), "size": facts.size(), "uid": facts.uid(), "gid": facts.gid(),
        "atime": time(facts.atime(), facts.atime_nsec()),
        "mtime": time(facts.mtime(), facts.mtime_nsec()),
        "ctime": time(facts.ctime(), facts.ctime_nsec()),
    });
    Ok((file, stat))
}

/// Reads until the buffer is full or the file ends.
fn fill(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut count = 0;
    while count < buffer.len() {
        match file.read(&mut buffer[count..]) {
            Ok(0) => break,
            Ok(more) => count += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // What was read is sent; then it is tried again.
            Err(_) if count > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}
