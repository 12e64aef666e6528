//! File transfers to the host. Each file is read by its own thread, as fast as the host acknowledges the data.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::sync::Arc;
use std::time::Duration;

use muster_agent::{MAX_CHUNK_SIZE, packet};
use nix::libc;
use parking_lot::{Condvar, Mutex};
use serde_json::{Value, json};

use crate::os::{error_text, spawn_thread};
use crate::outbox::Responder;

/// The maximum number of concurrent transfers.
const MAX_TRANSFERS: usize = 16;
/// The chunk size for hosts that do not set a window.
const PLAIN_CHUNK_SIZE: usize = 1024;
/// A transfer that the host does not acknowledge for this long is aborted.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

#[derive(Default)]
pub(crate) struct GetTransfers {
    transfers: Mutex<Vec<Arc<GetTransfer>>>,
}

struct GetTransfer {
    unique: Value,
    window: u64,
    flow: Mutex<FlowControl>,
    changed: Condvar,
}

struct FlowControl {
    /// The offset up to which data may be sent.
    limit: u64,
    is_aborted: bool,
}

impl GetTransfers {
    pub(crate) fn start(self: &Arc<Self>, responder: &Responder, path: &str, window: Option<u64>) {
        let transfer = Arc::new(GetTransfer {
            unique: responder.unique.clone(),
            window: window.unwrap_or(u64::MAX),
            flow: Mutex::new(FlowControl { limit: window.unwrap_or(u64::MAX), is_aborted: false }),
            changed: Condvar::new(),
        });
        let mut transfers = self.transfers.lock();
        if transfers.len() >= MAX_TRANSFERS {
            return reply_failure(responder, path, "too many concurrent get-file transfers");
        }
        let (all, own) = (Arc::clone(self), Arc::clone(&transfer));
        let (thread_responder, thread_path) = (responder.clone(), path.to_owned());
        let chunk_size = if window.is_some() { MAX_CHUNK_SIZE } else { PLAIN_CHUNK_SIZE };
        let thread = spawn_thread(move || {
            if let Err(error) = own.run(&thread_responder, &thread_path, chunk_size) {
                let message = format!("{thread_path}: {}", error_text(&error));
                reply_failure(&thread_responder, &thread_path, &message);
            }
            all.transfers.lock().retain(|transfer| !Arc::ptr_eq(transfer, &own));
        });
        match thread {
            Ok(_) => transfers.push(transfer),
            Err(error) => reply_failure(responder, path, &format!("failed to start a thread: {error}")),
        }
    }

    /// Records that the host has read up to `offset`.
    pub(crate) fn acknowledge(&self, unique: &Value, offset: u64) {
        for transfer in self.transfers.lock().iter().filter(|transfer| transfer.unique == *unique) {
            let mut flow = transfer.flow.lock();
            flow.limit = flow.limit.max(offset.saturating_add(transfer.window));
            transfer.changed.notify_all();
        }
    }

    pub(crate) fn abort(&self, unique: &Value) {
        for transfer in self.transfers.lock().iter().filter(|transfer| transfer.unique == *unique) {
            transfer.abort();
        }
    }

    pub(crate) fn abort_all(&self) {
        self.transfers.lock().iter().for_each(|transfer| transfer.abort());
    }
}

fn reply_failure(responder: &Responder, path: &str, message: &str) {
    responder
        .reply(json!({ "command": "get-file-response", "path": path, "result": false, "message": message }));
}

impl GetTransfer {
    fn abort(&self) {
        self.flow.lock().is_aborted = true;
        self.changed.notify_all();
    }

    /// Blocks until data may be sent and returns how many bytes, or `None` if the transfer is aborted.
    fn wait_for_window(&self, sent: u64) -> Option<u64> {
        let mut flow = self.flow.lock();
        while !flow.is_aborted && flow.limit <= sent {
            let result = self.changed.wait_for(&mut flow, IDLE_TIMEOUT);
            flow.is_aborted |= result.timed_out() && flow.limit <= sent;
        }
        if flow.is_aborted { None } else { Some(flow.limit - sent) }
    }

    fn run(&self, responder: &Responder, path: &str, chunk_size: usize) -> io::Result<()> {
        let (mut file, stat) = open(path)?;
        let chunk_packet = |offset: u64, chunk: Value| {
            json!({
                "command": "get-file-response", "path": path, "result": true,
                "offset": offset, "encoding": "base64", "chunk": chunk,
            })
        };
        let first =
            json!({ "command": "get-file-response", "path": path, "result": true, "stat_result": stat });
        if !responder.reply_blocking(first) {
            return Ok(());
        }
        let mut buffer = vec![0; chunk_size];
        let mut sent = 0;
        loop {
            let Some(allowed) = self.wait_for_window(sent) else { return Ok(()) };
            let length = allowed.min(chunk_size as u64) as usize;
            let count = fill(&mut file, &mut buffer[..length])?;
            if count == 0 {
                responder.reply_blocking(chunk_packet(sent, Value::Null));
                return Ok(());
            }
            let packet = chunk_packet(sent, packet::encode_chunk(&buffer[..count]).into());
            let is_connected = if chunk_size == PLAIN_CHUNK_SIZE {
                responder.reply_blocking(packet)
            } else {
                responder.reply_chunk_blocking(packet)
            };
            if !is_connected {
                return Ok(());
            }
            sent += count as u64;
        }
    }
}

/// Opens a file and returns it with its `stat_result`.
fn open(path: &str) -> io::Result<(File, Value)> {
    // Checked before opening, because opening a device may have side effects.
    if fs::metadata(path)?.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    // Without blocking: a FIFO without a writer is empty.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    let metadata = file.metadata()?;
    let time = |seconds: i64, nanoseconds: i64| seconds as f64 + nanoseconds as f64 / 1e9;
    let stat = json!({
        "mode": metadata.mode(), "size": metadata.size(), "uid": metadata.uid(), "gid": metadata.gid(),
        "atime": time(metadata.atime(), metadata.atime_nsec()),
        "mtime": time(metadata.mtime(), metadata.mtime_nsec()),
        "ctime": time(metadata.ctime(), metadata.ctime_nsec()),
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
            // Send the data before the error. The next read returns the error again.
            Err(_) if count > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}
