//! The queue of packets to write to the port. It is bounded: producers that can block do, and replies that exceed the
//! limit are dropped.
//!
//! A connection lasts from the moment a host opens its end of the port until it closes it. Packets of one connection are
//! never sent in another.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_agent::{frame, packet};
use parking_lot::{Condvar, Mutex};
use serde_json::Value;

use crate::port::Port;

/// The queue length in bytes from which on blocking producers wait.
const HIGH_WATER_MARK: usize = 512 << 10;
/// The queue length in bytes from which on replies are dropped: the host sends requests and reads no replies.
const MAX_QUEUED_BYTES: usize = 8 << 20;

/// The maximum size of a single write to a host that may use small buffers.
const SMALL_WRITE_SIZE: usize = 2048;
/// The maximum size of a single write to a host that requested large chunks.
const LARGE_WRITE_SIZE: usize = 32 << 10;

struct QueuedFrame {
    bytes: Vec<u8>,
    write_size: usize,
}

#[derive(Default)]
pub(crate) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    frames: VecDeque<QueuedFrame>,
    /// The size of all frames, including the one that is being written.
    bytes: usize,
    /// The number of the current connection.
    connection: u64,
    /// Set while a host is connected.
    port: Option<Arc<Port>>,
}

impl Outbox {
    /// Starts to write to the port.
    pub(crate) fn connect(&self, port: &Arc<Port>) {
        self.state.lock().port = Some(Arc::clone(port));
        self.changed.notify_all();
    }

    /// Ends the current connection and drops its packets.
    pub(crate) fn disconnect(&self) {
        let mut state = self.state.lock();
        state.frames.clear();
        state.bytes = 0;
        state.connection += 1;
        state.port = None;
        self.changed.notify_all();
    }

    /// Returns the number of the current connection.
    pub(crate) fn connection(&self) -> u64 {
        self.state.lock().connection
    }

    /// Adds a packet without blocking, or drops it if the queue is full.
    pub(crate) fn enqueue_or_drop(&self, connection: u64, packet: &Value) {
        self.enqueue(connection, packet, SMALL_WRITE_SIZE, MAX_QUEUED_BYTES);
    }

    /// Adds a packet if the queue then has at most `max_queued` bytes. Returns false if the connection has ended.
    fn enqueue(&self, connection: u64, packet: &Value, write_size: usize, max_queued: usize) -> bool {
        let bytes = frame::encode(packet.to_string().as_bytes());
        let mut state = self.state.lock();
        if state.connection == connection && state.bytes.saturating_add(bytes.len()) <= max_queued {
            state.bytes += bytes.len();
            state.frames.push_back(QueuedFrame { bytes, write_size });
            self.changed.notify_all();
        }
        state.connection == connection
    }

    /// Blocks until the queue is below its high-water mark. Returns false if the connection has ended.
    pub(crate) fn wait_for_room(&self, connection: u64) -> bool {
        let mut state = self.state.lock();
        while state.connection == connection && state.bytes >= HIGH_WATER_MARK {
            self.changed.wait(&mut state);
        }
        state.connection == connection
    }

    /// Blocks until everything is written, or until the timeout.
    pub(crate) fn flush(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let mut state = self.state.lock();
        while state.bytes > 0 {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return;
            }
        }
    }

    /// Writes frames to the port as they are added.
    pub(crate) fn run(&self) -> ! {
        loop {
            let (port, connection, frame) = self.next();
            if port.write(&frame.bytes, frame.write_size, || self.connection() == connection) {
                let mut state = self.state.lock();
                if state.connection == connection {
                    state.bytes -= frame.bytes.len();
                    self.changed.notify_all();
                }
            }
        }
    }

    fn next(&self) -> (Arc<Port>, u64, QueuedFrame) {
        let mut state = self.state.lock();
        loop {
            if let Some(port) = state.port.clone()
                && let Some(frame) = state.frames.pop_front()
            {
                return (port, state.connection, frame);
            }
            self.changed.wait(&mut state);
        }
    }
}

/// Sends the replies to one request.
#[derive(Clone)]
pub(crate) struct Responder {
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) connection: u64,
    pub(crate) unique: Value,
}

impl Responder {
    /// Replies without blocking; drops the reply if the queue is full.
    pub(crate) fn reply(&self, packet: Value) {
        self.outbox.enqueue_or_drop(self.connection, &self.with_unique(packet));
    }

    /// Like [`Self::reply`], for a host that requested a large chunk.
    pub(crate) fn reply_chunk(&self, packet: Value) {
        self.outbox.enqueue(self.connection, &self.with_unique(packet), LARGE_WRITE_SIZE, MAX_QUEUED_BYTES);
    }

    /// Replies when the queue has room. Returns false if the connection has ended.
    pub(crate) fn reply_blocking(&self, packet: Value) -> bool {
        self.outbox.wait_for_room(self.connection)
            && self.outbox.enqueue(self.connection, &self.with_unique(packet), SMALL_WRITE_SIZE, usize::MAX)
    }

    /// Like [`Self::reply_blocking`], for a host that requested large chunks.
    pub(crate) fn reply_chunk_blocking(&self, packet: Value) -> bool {
        self.outbox.wait_for_room(self.connection)
            && self.outbox.enqueue(self.connection, &self.with_unique(packet), LARGE_WRITE_SIZE, usize::MAX)
    }

    pub(crate) fn reply_error(&self, message: &str) {
        self.outbox.enqueue_or_drop(self.connection, &packet::command_error(&self.unique, message));
    }

    fn with_unique(&self, mut packet: Value) -> Value {
        packet["unique"] = self.unique.clone();
        packet
    }
}
