//! A session with an agent over one connection, which maintains the report of its guest.
//!
//! ```text
//! no contact ──agent-start──▶ startup ──is-system-running──▶ not ready ◀──▶ ready
//!      │                         ▲                              └── agent-stop ──▶ stopped
//!      └── 300 s ──▶ (end)       └───────────── agent-start, from any state
//! 15 s of silence, from any state but `stopped` ──▶ unresponsive (end)    VM reset ──▶ no contact (end)
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use muster_agent::frame::FrameDecoder;
use muster_agent::{FEATURE_MEMORY, FEATURE_PIECES, FEATURE_TERMINAL};
use muster_types::guest::AgentState;
use muster_types::time::now;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::net::unix::{ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::client::V1Client;
use super::connection::{AgentFeatures, AgentInfo, Connection, QueuedFrame};
use super::packet::Packet;
use crate::guest::boot::BootTracker;
use crate::guest::channel::{AgentChannel, VM_DETACHED, VmStatus};
use crate::guest::text::{MAX_STATE_CHARS, printable, system_state};

/// The maximum interval between readiness queries to a guest that is not ready.
const MAX_QUERY_INTERVAL: Duration = Duration::from_secs(30);

/// The first interval between readiness queries, which doubles with each one: boots take seconds.
const MIN_QUERY_INTERVAL: Duration = Duration::from_secs(1);

/// The minimum interval between readiness queries that restarts of the agent trigger.
const RESTART_QUERY_INTERVAL: Duration = Duration::from_millis(200);

/// The time without data after which the agent is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// The time without data after which the session ends.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(15);

/// The time without any data since the start after which the session ends.
const FIRST_CONTACT_TIMEOUT: Duration = Duration::from_secs(300);

/// The maximum number of consecutive bytes of invalid or unsolicited packets.
const MAX_UNSOLICITED_BYTES: u64 = 64 << 20;

/// The maximum number of unanswered queries; older ones are forgotten.
const MAX_PENDING_QUERIES: usize = 32;

/// The maximum number of agent starts and stops per [`RESTART_WINDOW`].
const MAX_RESTARTS: u32 = 100;

const RESTART_WINDOW: Duration = Duration::from_secs(60);

const READ_SIZE: usize = 64 << 10;

/// The maximum number of reads before other tasks get to run.
const MAX_CONSECUTIVE_READS: usize = 8;

/// The maximum size of a write to a plain agent.
const PLAIN_WRITE_SIZE: usize = 2048;

/// The oldest supported version of a plain agent.
const MIN_PLAIN_VERSION: [u64; 3] = [0, 3, 16];

/// Why a session ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SessionEnd {
    /// The agent stopped answering.
    Unresponsive,
    /// The agent never sent anything.
    NeverResponded,
    /// The VM was reset.
    Reset,
    /// The agent sent too much invalid or unsolicited data.
    Flooded,
    Broken(String),
}

impl SessionEnd {
    /// The VM was removed, and with it its [`AgentChannel`].
    fn vm_detached() -> Self {
        Self::Broken(VM_DETACHED.into())
    }
}

impl fmt::Display for SessionEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unresponsive => f.write_str("the guest's agent does not respond"),
            Self::NeverResponded => f.write_str("the guest's agent never sent anything"),
            Self::Reset => f.write_str("the guest was reset"),
            Self::Flooded => f.write_str("the guest's agent sent too much invalid data"),
            Self::Broken(reason) => write!(f, "the connection to the guest's agent broke: {reason}"),
        }
    }
}

pub(super) struct Session<'a> {
    channel: &'a AgentChannel,
    connection: Arc<Connection>,
    boot: &'a mut BootTracker,
    /// The number of VM resets that have been handled.
    reset_count: &'a mut u64,
    paused: bool,
    frames: FrameDecoder,
    read_buffer: Vec<u8>,
    /// When the session started or the VM was last resumed.
    waiting_since: Instant,
    last_received: Option<Instant>,
    last_ping: Instant,
    last_query: Instant,
    next_query: Option<Instant>,
    query_interval: Duration,
    /// The readiness queries and pings without a reply. A second reply to one of them is ignored.
    pending_queries: VecDeque<u64>,
    /// The number of starts and stops of the agent since the given time.
    restarts: (u32, Instant),
    /// The number of bytes since the last packet that replied to a request.
    unsolicited_bytes: u64,
    too_old: bool,
}

/// Closes the connection when the session ends or is dropped.
struct SessionGuard<'a>(&'a AgentChannel, Arc<Connection>);

impl Drop for SessionGuard<'_> {
    fn drop(&mut self) {
        self.0.set_client(None);
        self.1.close(VM_DETACHED);
    }
}

impl<'a> Session<'a> {
    /// Runs a session until it ends.
    pub(super) async fn run(
        channel: &'a AgentChannel,
        mut stream: UnixStream,
        vm_status: &mut watch::Receiver<VmStatus>,
        reset_count: &'a mut u64,
        boot: &'a mut BootTracker,
    ) -> SessionEnd {
        let (connection, write_queue) = Connection::new();
        let _guard = SessionGuard(channel, connection.clone());
        let now = Instant::now();
        let mut session = Self {
            channel,
            connection: connection.clone(),
            boot,
            reset_count,
            paused: vm_status.borrow().paused,
            frames: FrameDecoder::new(connection.max_frame_size()),
            read_buffer: Vec::new(),
            waiting_since: now,
            last_received: None,
            last_ping: now,
            last_query: now,
            next_query: Some(now),
            query_interval: MIN_QUERY_INTERVAL,
            pending_queries: VecDeque::new(),
            restarts: (0, now),
            unsolicited_bytes: 0,
            too_old: false,
        };
        let (reader, writer) = stream.split();
        let end = tokio::select! {
            end = session.read_loop(&reader, vm_status) => end,
            end = write_loop(writer, write_queue, &connection) => end,
        };
        connection.close(&end.to_string());
        end
    }

    async fn read_loop(
        &mut self,
        reader: &ReadHalf<'_>,
        vm_status: &mut watch::Receiver<VmStatus>,
    ) -> SessionEnd {
        loop {
            if let Some(end) = self.apply_vm_status(*vm_status.borrow_and_update()) {
                return end;
            }
            let end = tokio::select! {
                changed = vm_status.changed() => changed.err().map(|_| SessionEnd::vm_detached()),
                ready = reader.readable() => match ready {
                    Ok(()) => self.read(reader, vm_status).await,
                    Err(error) => Some(SessionEnd::Broken(error.to_string())),
                },
                () = sleep_until(self.next_timer()), if !self.paused => self.handle_timer(),
            };
            if let Some(end) = end {
                return end;
            }
        }
    }

    /// Applies a change of the VM. Returns the end of the session if the VM was reset.
    fn apply_vm_status(&mut self, status: VmStatus) -> Option<SessionEnd> {
        if self.paused && !status.paused {
            // The guest could not send anything while it was paused.
            let now = Instant::now();
            self.waiting_since = now;
            self.last_received = self.last_received.map(|_| now);
        }
        self.paused = status.paused;
        if *self.reset_count != status.reset_count {
            *self.reset_count = status.reset_count;
            return Some(SessionEnd::Reset);
        }
        None
    }

    /// Returns when the next timer expires.
    fn next_timer(&self) -> Instant {
        let silence = match self.last_received {
            None => Some(self.waiting_since + FIRST_CONTACT_TIMEOUT),
            Some(_) if self.connection.expects_silence() => None,
            Some(received) => {
                Some((received.max(self.last_ping) + PING_INTERVAL).min(received + SILENCE_TIMEOUT))
            }
        };
        // The timers are recomputed at least this often, as the end of a silent request re-enables the silence timeout.
        let later = Instant::now() + MAX_QUERY_INTERVAL;
        [silence, self.next_query].into_iter().flatten().fold(later, Instant::min)
    }

    /// Sends the pings and queries that are due, or ends the session after a timeout.
    fn handle_timer(&mut self) -> Option<SessionEnd> {
        let now = Instant::now();
        self.read_buffer = Vec::new();
        match self.last_received {
            None if now >= self.waiting_since + FIRST_CONTACT_TIMEOUT => {
                return Some(SessionEnd::NeverResponded);
            }
            Some(received) if !self.connection.expects_silence() => {
                if now >= received + SILENCE_TIMEOUT {
                    return Some(SessionEnd::Unresponsive);
                }
                if now >= received.max(self.last_ping) + PING_INTERVAL {
                    self.last_ping = now;
                    self.send_query("ping");
                }
            }
            _ => {}
        }
        if self.next_query.is_some_and(|due| now >= due) {
            self.send_query("is-system-running");
            self.last_query = now;
            // The serial port buffers queries until the agent starts.
            let interval =
                if self.last_received.is_some() { self.query_interval } else { MAX_QUERY_INTERVAL };
            self.next_query = Some(now + interval);
            if self.last_received.is_some() {
                self.query_interval = (self.query_interval * 2).min(MAX_QUERY_INTERVAL);
            }
        }
        None
    }

    fn send_query(&mut self, command: &str) {
        let (number, unique) = self.connection.new_request_id();
        self.connection.send_optional(&json!({ "command": command, "unique": unique }));
        if self.pending_queries.len() == MAX_PENDING_QUERIES {
            self.pending_queries.pop_front();
        }
        self.pending_queries.push_back(number);
    }

    /// Removes the pending query that a packet replies to. Returns whether there was one.
    fn take_pending_query(&mut self, packet: &Packet) -> bool {
        let Some(number) = self.connection.request_number(packet) else { return false };
        let found = self.pending_queries.iter().position(|query| *query == number);
        found.is_some_and(|index| self.pending_queries.remove(index).is_some())
    }

    /// Counts a start or stop of the agent. Returns whether there are too many.
    fn exceeds_restart_limit(&mut self) -> bool {
        if self.restarts.1.elapsed() > RESTART_WINDOW {
            self.restarts = (0, Instant::now());
        }
        self.restarts.0 += 1;
        self.restarts.0 > MAX_RESTARTS
    }

    async fn read(
        &mut self,
        reader: &ReadHalf<'_>,
        vm_status: &mut watch::Receiver<VmStatus>,
    ) -> Option<SessionEnd> {
        for _ in 0..MAX_CONSECUTIVE_READS {
            self.read_buffer.resize(READ_SIZE, 0);
            let size = match reader.try_read(&mut self.read_buffer) {
                Ok(0) => return Some(SessionEnd::Broken("QEMU closed the socket".into())),
                Ok(size) => size,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
                Err(error) => return Some(SessionEnd::Broken(error.to_string())),
            };
            let skipped = self.frames.skipped();
            self.frames.set_max_length(self.connection.max_frame_size());
            self.frames.feed(&self.read_buffer[..size]);
            while let Some(body) = self.frames.next_frame() {
                if let Some(end) = self.handle_frame(&body, vm_status).await {
                    return Some(end);
                }
            }
            let skipped = self.frames.skipped() - skipped;
            self.unsolicited_bytes += skipped;
            if skipped < size as u64 {
                self.last_received = Some(Instant::now());
            }
            if self.unsolicited_bytes > MAX_UNSOLICITED_BYTES {
                return Some(SessionEnd::Flooded);
            }
        }
        tokio::task::yield_now().await;
        None
    }

    async fn handle_frame(
        &mut self,
        body: &[u8],
        vm_status: &mut watch::Receiver<VmStatus>,
    ) -> Option<SessionEnd> {
        let Some(packet) = Packet::parse(body) else {
            self.unsolicited_bytes += body.len() as u64;
            return None;
        };
        let is_solicited = match packet.command() {
            "agent-start" | "agent-stop" if self.exceeds_restart_limit() => return Some(SessionEnd::Flooded),
            "agent-start" => {
                self.handle_agent_start(&packet);
                false
            }
            "agent-stop" => {
                self.connection.fail_calls("the guest's agent was stopped");
                self.channel.set_client(None);
                self.channel.update_report(|report| report.state = AgentState::Stopped);
                self.next_query = None;
                false
            }
            "is-system-running-response" => {
                let is_reply = self.take_pending_query(&packet);
                if is_reply {
                    self.handle_system_running(&packet);
                }
                is_reply
            }
            "ping" => {
                if let Some(unique) = packet.echoable_unique() {
                    self.connection.send_optional(&json!({ "command": "pong", "unique": unique }));
                }
                false
            }
            "pong" => self.take_pending_query(&packet),
            _ => match self.deliver_reply(packet, body.len(), vm_status).await {
                Ok(delivered) => delivered,
                Err(end) => return Some(end),
            },
        };
        self.unsolicited_bytes = if is_solicited { 0 } else { self.unsolicited_bytes + body.len() as u64 };
        None
    }

    /// Delivers a reply of `size` bytes to its call. Returns whether there was one, or the end of the session, which may
    /// come while the buffer of the call is full.
    async fn deliver_reply(
        &mut self,
        packet: Packet,
        size: usize,
        vm_status: &mut watch::Receiver<VmStatus>,
    ) -> Result<bool, SessionEnd> {
        let connection = self.connection.clone();
        let mut delivery = std::pin::pin!(connection.deliver(packet, size));
        loop {
            tokio::select! {
                biased;
                delivered = &mut delivery => return Ok(delivered),
                changed = vm_status.changed() => {
                    changed.map_err(|_| SessionEnd::vm_detached())?;
                    self.apply_vm_status(*vm_status.borrow_and_update()).map_or(Ok(()), Err)?;
                }
            }
        }
    }

    fn handle_agent_start(&mut self, packet: &Packet) {
        let first = self.last_received.is_none();
        self.connection.fail_calls("the guest's agent was restarted");
        let version = packet.text("message").and_then(|text| text.strip_prefix("version "));
        let version = version.map(|version| printable(version, MAX_STATE_CHARS));
        let before = self.channel.report().boot_id;
        self.update_agent_info(packet, true);
        self.too_old = self.connection.features() == AgentFeatures::default()
            && version.as_deref().is_some_and(is_too_old);
        let boot_id = self.connection.agent_info().boot_id;
        // An agent with features sends this on every new connection, not only after a start.
        let same_agent =
            first && self.connection.features().remembers_commands && boot_id.is_some() && boot_id == before;
        self.channel.update_report(|report| {
            report.agent_version = version;
            report.state = if self.too_old { AgentState::TooOld } else { AgentState::Startup };
            if !same_agent || report.agent_start_time.is_none() {
                report.agent_start_time = Some(now());
            }
        });
        self.publish_client();
        self.query_interval = MIN_QUERY_INTERVAL;
        self.next_query = Some(Instant::now().max(self.last_query + RESTART_QUERY_INTERVAL));
        self.last_received = Some(Instant::now());
    }

    fn handle_system_running(&mut self, packet: &Packet) {
        self.update_agent_info(packet, false);
        let is_running = packet.boolean("result") == Some(true);
        let state = match self.too_old {
            true => AgentState::TooOld,
            false => system_state(is_running, packet.text("message").unwrap_or_default()),
        };
        if state.is_ready() || self.too_old {
            self.next_query = None;
        } else {
            let soon = Instant::now() + self.query_interval;
            if self.next_query.is_none_or(|due| soon < due) {
                self.next_query = Some(soon);
                self.query_interval = (self.query_interval * 2).min(MAX_QUERY_INTERVAL);
            }
        }
        self.publish_client();
        self.channel.update_report(|report| report.state = state);
    }

    /// Records the boot and the features that an agent reports.
    fn update_agent_info(&mut self, packet: &Packet, agent_started: bool) {
        let boot_time = packet.timestamp("system_boot_time");
        let reported = packet.text("boot-id").map(|id| printable(id, MAX_STATE_CHARS));
        let boot_id = self.boot.observe(reported.filter(|id| !id.is_empty()), boot_time, agent_started);
        if !agent_started && self.channel.report().boot_id.is_some_and(|before| Some(before) != boot_id) {
            self.connection.fail_calls("the guest was restarted");
        }
        let features = AgentFeatures {
            remembers_commands: packet.list_contains("features", FEATURE_MEMORY),
            windowed_transfers: packet.list_contains("features", FEATURE_PIECES),
            terminals: packet.list_contains("features", FEATURE_TERMINAL),
        };
        self.connection.set_agent_info(AgentInfo { features, boot_id: boot_id.clone() });
        self.channel.update_report(|report| {
            report.system_boot_time = boot_time.or(report.system_boot_time);
            report.boot_id = boot_id;
        });
    }

    /// Makes the agent available for requests, unless it is too old.
    fn publish_client(&self) {
        let client = (!self.too_old).then(|| V1Client::new(self.connection.clone()));
        self.channel.set_client(client.map(|client| Arc::new(client) as Arc<_>));
    }
}

async fn write_loop(
    mut writer: WriteHalf<'_>,
    mut queue: mpsc::UnboundedReceiver<QueuedFrame>,
    connection: &Connection,
) -> SessionEnd {
    while let Some(frame) = queue.recv().await {
        let windowed = connection.features().windowed_transfers;
        let max_size = if windowed { frame.bytes.len() } else { PLAIN_WRITE_SIZE };
        for part in frame.bytes.chunks(max_size) {
            if let Err(error) = writer.write_all(part).await {
                return SessionEnd::Broken(error.to_string());
            }
        }
    }
    SessionEnd::Broken("the connection is no longer in use".into())
}

/// Returns whether a version is older than the oldest supported one. A version that cannot be parsed counts as newer.
fn is_too_old(version: &str) -> bool {
    let number = |part: &str| part.parse::<u64>().ok();
    let parts: Option<Vec<u64>> = version.split('.').take(3).map(number).collect();
    parts.is_some_and(|parts| parts.as_slice() < MIN_PLAIN_VERSION.as_slice())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compares_version_numbers() {
        for old in ["0.3.15", "0.2.99", "0.3", "0.3.9"] {
            assert!(is_too_old(old), "{old}");
        }
        for new in ["0.3.16", "0.3.16.dev2", "0.4.1", "1.0", "10", "", "new", "0.x.1"] {
            assert!(!is_too_old(new), "{new}");
        }
    }
}
