//! A session with an agent over one long-lived connection, which maintains the report of its guest.
//!
//! ```text
//! no contact ──welcome──▶ startup ──is-system-running──▶ not ready ◀──▶ ready
//!      └── 300 s ──▶ (end)    15 s of silence ──▶ unresponsive (end)    VM reset ──▶ no contact (end)
//! ```

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use muster_types::guest::AgentState;
use muster_types::time::now;
use prost::Message;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::address::AgentAddress;
use super::client::V2Client;
use super::connection::Connection;
use super::message::{Empty, GuestWelcome, Reply, ReplyBody, RequestBody, SystemRunning};
use super::reader::ConnectionError;
use crate::guest::boot::BootTracker;
use crate::guest::channel::{AgentChannel, VM_DETACHED, VmStatus};
use crate::guest::text::{MAX_STATE_CHARS, printable, system_state};

/// The maximum interval between readiness queries to a guest that is not ready.
const MAX_QUERY_INTERVAL: Duration = Duration::from_secs(30);

/// The first interval between readiness queries, which doubles with each one: boots take seconds.
const MIN_QUERY_INTERVAL: Duration = Duration::from_secs(1);

/// The time without a reply after which the agent is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// The time without a reply after which the session ends.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(15);

/// The time without any reply since the start after which the session ends.
const FIRST_CONTACT_TIMEOUT: Duration = Duration::from_secs(300);

/// The maximum number of consecutive replies without a request.
const MAX_UNSOLICITED_REPLIES: u32 = 1000;

/// The maximum size of a reply.
pub(super) const MAX_SESSION_REPLY: usize = 64 << 10;

/// Why a session ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SessionEnd {
    /// The agent stopped answering.
    Unresponsive,
    /// The agent never sent anything.
    NeverResponded,
    /// The VM was reset.
    Reset,
    /// The guest was rebooted.
    Restarted,
    /// The agent sent too many replies without a request.
    Flooded,
    Connection(ConnectionError),
    /// The VM was removed, and with it its [`AgentChannel`].
    VmDetached,
}

impl From<ConnectionError> for SessionEnd {
    fn from(error: ConnectionError) -> Self {
        Self::Connection(error)
    }
}

impl fmt::Display for SessionEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unresponsive => f.write_str("the guest's agent does not respond"),
            Self::NeverResponded => f.write_str("the guest's agent never sent anything"),
            Self::Reset => f.write_str("the guest was reset"),
            Self::Restarted => f.write_str("the guest was restarted"),
            Self::Flooded => f.write_str("the guest's agent sent too many unexpected replies"),
            Self::Connection(error) => error.fmt(f),
            Self::VmDetached => f.write_str(VM_DETACHED),
        }
    }
}

/// State that outlives a session.
#[derive(Debug)]
pub(super) struct SessionHistory {
    pub(super) boot: BootTracker,
    /// The number of VM resets that have been handled.
    pub(super) reset_count: u64,
    /// Whether the agent that answers next counts as newly started.
    pub(super) agent_starting: bool,
}

pub(super) struct Session<'a> {
    channel: &'a AgentChannel,
    address: &'a AgentAddress,
    history: &'a mut SessionHistory,
    connection: Connection,
    /// Set to the reason when the session ends, which ends the calls of its client.
    end_reason: watch::Sender<Option<String>>,
    paused: bool,
    /// When the session started or the VM was last resumed.
    waiting_since: Instant,
    last_received: Option<Instant>,
    last_ping: Instant,
    next_query: Option<Instant>,
    query_interval: Duration,
    unsolicited_replies: u32,
    welcome_id: Option<String>,
    ping_id: Option<String>,
    query_id: Option<String>,
}

/// Removes the client when the session ends or is dropped.
struct SessionGuard<'a>(&'a AgentChannel);

impl Drop for SessionGuard<'_> {
    fn drop(&mut self) {
        self.0.set_client(None);
    }
}

impl<'a> Session<'a> {
    /// Runs a session until it ends.
    pub(super) async fn run(
        channel: &'a AgentChannel,
        address: &'a AgentAddress,
        mut connection: Connection,
        vm_status: &mut watch::Receiver<VmStatus>,
        history: &'a mut SessionHistory,
    ) -> SessionEnd {
        let _guard = SessionGuard(channel);
        let now = Instant::now();
        let welcome_id = match connection.welcome() {
            Ok(id) => Some(id),
            Err(error) => return error.into(),
        };
        let mut session = Self {
            channel,
            address,
            history,
            connection,
            end_reason: watch::Sender::new(None),
            paused: vm_status.borrow().paused,
            waiting_since: now,
            last_received: None,
            last_ping: now,
            next_query: None,
            query_interval: MIN_QUERY_INTERVAL,
            unsolicited_replies: 0,
            welcome_id,
            ping_id: None,
            query_id: None,
        };
        let end = match session.event_loop(vm_status).await {
            Ok(never) => match never {},
            Err(end) => end,
        };
        session.end_reason.send_replace(Some(end.to_string()));
        end
    }

    async fn event_loop(
        &mut self,
        vm_status: &mut watch::Receiver<VmStatus>,
    ) -> Result<Infallible, SessionEnd> {
        loop {
            let status = *vm_status.borrow_and_update();
            self.apply_vm_status(status)?;
            let timer = self.next_timer();
            tokio::select! {
                changed = vm_status.changed() => changed.map_err(|_| SessionEnd::VmDetached)?,
                reply = self.connection.receive() => self.handle_reply(&reply?)?,
                () = sleep_until(timer), if !self.paused => self.handle_timer()?,
            }
        }
    }

    /// Applies a change of the VM. A reset ends the session.
    fn apply_vm_status(&mut self, status: VmStatus) -> Result<(), SessionEnd> {
        if self.paused && !status.paused {
            // The guest could not send anything while it was paused.
            let now = Instant::now();
            self.waiting_since = now;
            self.last_received = self.last_received.map(|_| now);
        }
        self.paused = status.paused;
        if self.history.reset_count == status.reset_count { Ok(()) } else { Err(SessionEnd::Reset) }
    }

    /// Returns when the next timer expires.
    fn next_timer(&self) -> Instant {
        let silence = match self.last_received {
            None => self.waiting_since + FIRST_CONTACT_TIMEOUT,
            Some(received) => (received.max(self.last_ping) + PING_INTERVAL).min(received + SILENCE_TIMEOUT),
        };
        self.next_query.map_or(silence, |query| query.min(silence))
    }

    /// Sends the pings and queries that are due, or ends the session after a timeout.
    fn handle_timer(&mut self) -> Result<(), SessionEnd> {
        let now = Instant::now();
        match self.last_received {
            None if now >= self.waiting_since + FIRST_CONTACT_TIMEOUT => {
                return Err(SessionEnd::NeverResponded);
            }
            Some(received) if now >= received + SILENCE_TIMEOUT => return Err(SessionEnd::Unresponsive),
            Some(received) if now >= received.max(self.last_ping) + PING_INTERVAL => {
                self.last_ping = now;
                self.ping_id = Some(self.connection.ping()?);
            }
            _ => {}
        }
        if self.next_query.is_some_and(|due| now >= due) {
            self.query_id = Some(self.connection.request(RequestBody::IsSystemRunning(Empty {}))?);
            self.next_query = None;
        }
        Ok(())
    }

    fn handle_reply(&mut self, reply: &Reply) -> Result<(), SessionEnd> {
        self.last_received = Some(Instant::now());
        let replies_to = |id: &Option<String>| id.as_ref().is_some_and(|id| reply.id == id.as_bytes());
        let is_solicited = match &reply.body {
            Some(ReplyBody::Welcome(bytes)) if replies_to(&self.welcome_id) => {
                self.welcome_id = None;
                let welcome = GuestWelcome::decode(bytes.clone());
                self.handle_welcome(&welcome.map_err(|_| ConnectionError::InvalidData)?);
                true
            }
            Some(ReplyBody::SystemRunning(bytes)) if replies_to(&self.query_id) => {
                self.query_id = None;
                let running = SystemRunning::decode(bytes.clone());
                self.handle_system_running(&running.map_err(|_| ConnectionError::InvalidData)?)?;
                true
            }
            Some(ReplyBody::Ping(_)) if replies_to(&self.ping_id) => {
                self.ping_id = None;
                true
            }
            Some(ReplyBody::CommandError(_) | ReplyBody::UnknownCommand(_)) if replies_to(&self.query_id) => {
                self.query_id = None;
                self.schedule_query();
                true
            }
            _ => false,
        };
        self.unsolicited_replies = if is_solicited { 0 } else { self.unsolicited_replies + 1 };
        if self.unsolicited_replies > MAX_UNSOLICITED_REPLIES { Err(SessionEnd::Flooded) } else { Ok(()) }
    }

    fn handle_welcome(&mut self, welcome: &GuestWelcome) {
        let version = String::from_utf8_lossy(&welcome.version);
        let version = printable(version.strip_prefix("version ").unwrap_or(&version), MAX_STATE_CHARS);
        let agent_starting = std::mem::take(&mut self.history.agent_starting);
        let boot_time = timestamp(welcome.boot_time);
        let boot_id = self.history.boot.observe(None, boot_time, false);
        self.channel.update_report(|report| {
            report.agent_version = Some(version).filter(|version| !version.is_empty());
            report.state = AgentState::Startup;
            if agent_starting || report.agent_start_time.is_none() || report.boot_id != boot_id {
                report.agent_start_time = Some(now());
            }
            report.system_boot_time = boot_time.or(report.system_boot_time);
            report.boot_id.clone_from(&boot_id);
        });
        let client = V2Client::new(self.address.clone(), self.end_reason.subscribe(), boot_id);
        self.channel.set_client(Some(Arc::new(client)));
        self.next_query = Some(Instant::now());
    }

    fn handle_system_running(&mut self, running: &SystemRunning) -> Result<(), SessionEnd> {
        let boot_time = timestamp(running.boot_time);
        let boot_id = self.history.boot.observe(None, boot_time, false);
        if boot_id != self.channel.report().boot_id {
            return Err(SessionEnd::Restarted);
        }
        let state = system_state(running.result, &String::from_utf8_lossy(&running.message));
        if !state.is_ready() {
            self.schedule_query();
        }
        self.channel.update_report(|report| {
            report.system_boot_time = boot_time.or(report.system_boot_time);
            report.state = state;
        });
        Ok(())
    }

    fn schedule_query(&mut self) {
        self.next_query = Some(Instant::now() + self.query_interval);
        self.query_interval = (self.query_interval * 2).min(MAX_QUERY_INTERVAL);
    }
}

/// Returns a Unix time within a plausible range. An unset field is 0.
fn timestamp(time: f64) -> Option<f64> {
    (1.0..1e11).contains(&time).then_some(time)
}
