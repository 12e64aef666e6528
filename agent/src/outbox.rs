//! What waits to be written to the port. It holds little: whoever can wait does, and what nobody reads is dropped.
//!
//! A connection is the time between two moments at which the host was away. What was meant for one is never sent in
//! another.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use muster_agent::frame;
use serde_json::Value;

use crate::port::Line;

/// With this many bytes waiting, who can wait does.
const FULL: usize = 512 << 10;
/// With this many bytes waiting, answers are dropped: the host asks much and reads nothing.
const MOST: usize = 8 << 20;

/// What is written at once to a host of which nothing is known, and to one that asked for large pieces.
const NARROW: usize = 2048;
const WIDE: usize = 32 << 10;

struct Frame {
    bytes: Vec<u8>,
    /// How much of it is written at once.
    width: usize,
}

/// Locks, whatever happened to whoever held it before.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
pub(crate) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    frames: VecDeque<Frame>,
    /// Of all frames, with the one that is being written.
    bytes: usize,
    connection: u64,
    /// Where to, while the host is there.
    line: Option<Arc<Line>>,
}

impl Outbox {
    /// The host is there.
    pub(crate) fn connect(&self, line: &Arc<Line>) {
        lock(&self.state).line = Some(Arc::clone(line));
        self.changed.notify_all();
    }

    /// The host is gone, and with it who would have read what waits.
    pub(crate) fn hang_up(&self) {
        let mut state = lock(&self.state);
        state.frames.clear();
        state.bytes = 0;
        state.connection += 1;
        state.line = None;
        self.changed.notify_all();
    }

    pub(crate) fn connection(&self) -> u64 {
        lock(&self.state).connection
    }

    /// Adds a packet, or drops it if too much waits already. Never waits.
    pub(crate) fn say(&self, connection: u64, packet: &Value) {
        self.add(connection, packet, NARROW, MOST);
    }

    /// Adds a packet if no more than this waits then. False if the host is gone.
    fn add(&self, connection: u64, packet: &Value, width: usize, most: usize) -> bool {
        let bytes = frame::encode(packet.to_string().as_bytes());
        let mut state = lock(&self.state);
        if state.connection == connection && state.bytes.saturating_add(bytes.len()) <= most {
            state.bytes += bytes.len();
            state.frames.push_back(Frame { bytes, width });
            self.changed.notify_all();
        }
        state.connection == connection
    }

    /// Waits until little is waiting. False if the host is gone.
    pub(crate) fn wait_for_room(&self, connection: u64) -> bool {
        let mut state = lock(&self.state);
        while state.connection == connection && state.bytes >= FULL {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.connection == connection
    }

    /// Waits until all is written, or for so long.
    pub(crate) fn drain(&self, time: Duration) {
        let end = Instant::now() + time;
        let mut state = lock(&self.state);
        while state.bytes > 0 {
            let Some(left) = end.checked_duration_since(Instant::now()) else { return };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Writes what comes, for ever.
    pub(crate) fn run(&self) -> ! {
        loop {
            let (line, connection, frame) = self.next();
            if line.write(&frame.bytes, frame.width, || self.connection() == connection) {
                let mut state = lock(&self.state);
                if state.connection == connection {
                    state.bytes -= frame.bytes.len();
                    self.changed.notify_all();
                }
            }
        }
    }

    fn next(&self) -> (Arc<Line>, u64, Frame) {
        let mut state = lock(&self.state);
        loop {
            if let Some(line) = state.line.clone()
                && let Some(frame) = state.frames.pop_front()
            {
                return (line, state.connection, frame);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Who asked: a request of a connection, to whom the answer goes.
#[derive(Clone)]
pub(crate) struct Asker {
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) connection: u64,
    pub(crate) unique: Value,
}

impl Asker {
    /// Answers, if the host reads at all.
    pub(crate) fn say(&self, packet: Value) {
        self.outbox.say(self.connection, &self.addressed(packet));
    }

    /// Answers a host that asked for a large piece, if it reads at all.
    pub(crate) fn say_much(&self, packet: Value) {
        self.outbox.add(self.connection, &self.addressed(packet), WIDE, MOST);
    }

    /// Answers when there is room. False if the host is gone.
    pub(crate) fn send(&self, packet: Value) -> bool {
        self.outbox.wait_for_room(self.connection)
            && self.outbox.add(self.connection, &self.addressed(packet), NARROW, usize::MAX)
    }

    /// The same for a host that asked for large pieces.
    pub(crate) fn send_much(&self, packet: Value) -> bool {
        self.outbox.wait_for_room(self.connection)
            && self.outbox.add(self.connection, &self.addressed(packet), WIDE, usize::MAX)
    }

    pub(crate) fn refuse(&self, message: &str) {
        self.outbox.say(self.connection, &muster_agent::packet::command_error(&self.unique, message));
    }

    fn addressed(&self, mut packet: Value) -> Value {
        packet["unique"] = self.unique.clone();
        packet
    }
}
