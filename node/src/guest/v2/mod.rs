//! Protocol 2: protocol buffers over a virtual socket. One long-lived connection tracks the state of the guest, and every
//! request has its own connection.
//!
//! ```text
//! run_sessions ──connects──▶ Session ──agent state──▶ AgentChannel's report
//!   ▲                           │
//!   └── session end ────────────┘        V2Client ──connects──▶ Call: execute, put, get
//! ```
//!
//! These agents do not remember commands: when its connection breaks, the output of a command is lost.

mod address;
mod call;
mod client;
mod connection;
mod file;
mod message;
mod reader;
mod session;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use muster_types::guest::{AgentState, GuestReport};
use tokio::sync::watch;
use tokio::time::Instant;

pub(super) use self::address::AgentAddress;
use self::connection::Connection;
use self::reader::ConnectionError;
use self::session::{MAX_SESSION_REPLY, Session, SessionEnd, SessionHistory};
use super::boot::BootTracker;
use super::channel::{AgentChannel, VmStatus};

/// The interval between connection attempts. Polling is the only way to notice that an agent started to listen.
const RECONNECT_DELAY: Duration = Duration::from_secs(1);

/// The interval between connection attempts to a guest without contact for [`FAST_RECONNECT_PERIOD`], which may not have
/// an agent.
const SLOW_RECONNECT_DELAY: Duration = Duration::from_secs(15);

const FAST_RECONNECT_PERIOD: Duration = Duration::from_secs(300);

/// The delay before reconnecting to a guest that sent invalid data.
const FLOOD_DELAY: Duration = Duration::from_secs(10);

/// Runs one session after the other with the agent at `address`, until the VM is detached.
pub(super) async fn run_sessions(channel: Arc<AgentChannel>, address: AgentAddress) {
    let mut vm_status = channel.vm_status();
    let reset_count = vm_status.borrow().reset_count;
    let mut history = SessionHistory { boot: BootTracker::default(), reset_count, agent_starting: false };
    let mut last_contact = Instant::now();
    loop {
        // A paused guest does not accept connections.
        if vm_status.wait_for(|status| !status.paused).await.is_err() {
            return;
        }
        let end = match address.connect().await {
            Ok(stream) => {
                let connection = Connection::new(stream, MAX_SESSION_REPLY);
                let end = Session::run(&channel, &address, connection, &mut vm_status, &mut history).await;
                if channel.report().state != AgentState::NoContact {
                    last_contact = Instant::now();
                }
                end
            }
            Err(error) => SessionEnd::Connection(error.into()),
        };
        tracing::debug!(instance = %channel.id(), reason = %end, "guest agent session ended");
        let Some(delay) = reconnect_delay(&end, last_contact) else { return };
        history.agent_starting |= matches!(end, SessionEnd::Connection(_));
        if let Some(state) = state_after(&end) {
            channel.update_report(|report| {
                if !matches!(report.state, AgentState::NoContact | AgentState::Stopped) {
                    report.state = state;
                }
            });
        }
        if handle_reset(&channel, &vm_status, &mut history)
            || wait_for_reset(delay, &mut vm_status, history.reset_count).await
        {
            handle_reset(&channel, &vm_status, &mut history);
            last_contact = Instant::now();
        }
    }
}

/// Returns the delay before the next session, or `None` if no session follows.
fn reconnect_delay(end: &SessionEnd, last_contact: Instant) -> Option<Duration> {
    Some(match end {
        SessionEnd::VmDetached => return None,
        SessionEnd::Reset | SessionEnd::Unresponsive | SessionEnd::NeverResponded => Duration::ZERO,
        SessionEnd::Restarted => RECONNECT_DELAY,
        SessionEnd::Flooded
        | SessionEnd::Connection(ConnectionError::ReplyTooLong(_) | ConnectionError::InvalidData) => {
            FLOOD_DELAY
        }
        SessionEnd::Connection(ConnectionError::Closed | ConnectionError::Io(_)) => {
            match last_contact.elapsed() < FAST_RECONNECT_PERIOD {
                true => RECONNECT_DELAY,
                false => SLOW_RECONNECT_DELAY,
            }
        }
    })
}

/// Returns the state of the agent after a session, or `None` if it does not change.
fn state_after(end: &SessionEnd) -> Option<AgentState> {
    match end {
        SessionEnd::Reset | SessionEnd::NeverResponded | SessionEnd::VmDetached => None,
        SessionEnd::Connection(ConnectionError::Closed) => Some(AgentState::Stopped),
        SessionEnd::Unresponsive
        | SessionEnd::Restarted
        | SessionEnd::Flooded
        | SessionEnd::Connection(_) => Some(AgentState::Unresponsive),
    }
}

/// Clears the report if the VM was reset. Returns whether it was.
fn handle_reset(
    channel: &AgentChannel,
    vm_status: &watch::Receiver<VmStatus>,
    history: &mut SessionHistory,
) -> bool {
    let reset_count = vm_status.borrow().reset_count;
    if history.reset_count == reset_count {
        return false;
    }
    history.reset_count = reset_count;
    history.boot.end_boot();
    history.agent_starting = true;
    channel.update_report(|report| *report = GuestReport::default());
    true
}

/// Waits for a reset of the VM. Returns `false` if there was none within `delay`.
async fn wait_for_reset(
    delay: Duration,
    vm_status: &mut watch::Receiver<VmStatus>,
    reset_count: u64,
) -> bool {
    let reset = vm_status.wait_for(|status| status.reset_count != reset_count);
    matches!(tokio::time::timeout(delay, reset).await, Ok(Ok(_)))
}
