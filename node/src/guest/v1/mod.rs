//! Protocol 1: JSON packets over a serial port. Agents with the features that the crate `muster-agent` describes get the
//! extended protocol, all others the plain one.
//!
//! ```text
//! run_sessions ──connects──▶ Session ──agent state──▶ AgentChannel's report
//!   ▲                          │  └─ replies ──▶ Connection ──▶ Call: execute, put, get
//!   └──── session end ─────────┘         write loop ◀── Connection ◀──┘
//! ```
//!
//! QEMU serves one connection per port at a time, so there is one session at a time.

mod client;
mod connection;
mod execute;
mod get;
mod packet;
mod put;
mod session;
mod terminal;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use muster_types::guest::{AgentState, GuestReport};

use self::session::{Session, SessionEnd};
use super::boot::BootTracker;
use super::channel::AgentChannel;
use crate::vm_socket;

/// The delay before reconnecting after a connection broke.
const RECONNECT_DELAY: Duration = Duration::from_secs(1);

/// The delay before reconnecting to a guest that sent too much invalid data.
const FLOOD_DELAY: Duration = Duration::from_secs(10);

/// Runs one session after the other with the agent of a VM whose sockets are in `vm_dir`, until the task is aborted.
pub(super) async fn run_sessions(channel: Arc<AgentChannel>, vm_dir: PathBuf) {
    let mut vm_status = channel.vm_status();
    let mut boot = BootTracker::default();
    let mut reset_count = vm_status.borrow().reset_count;
    loop {
        let end = match vm_socket::connect(&vm_dir, vm_socket::AGENT).await {
            Ok(stream) => Session::run(&channel, stream, &mut vm_status, &mut reset_count, &mut boot).await,
            Err(error) => SessionEnd::Broken(error.to_string()),
        };
        tracing::debug!(instance = %channel.id(), reason = %end, "guest agent session ended");
        let delay = match &end {
            SessionEnd::Reset => {
                boot.end_boot();
                channel.update_report(|report| *report = GuestReport::default());
                Duration::ZERO
            }
            SessionEnd::Unresponsive | SessionEnd::NeverResponded => Duration::ZERO,
            SessionEnd::Broken(_) => RECONNECT_DELAY,
            SessionEnd::Flooded => FLOOD_DELAY,
        };
        if matches!(end, SessionEnd::Unresponsive | SessionEnd::Broken(_) | SessionEnd::Flooded) {
            channel.update_report(|report| {
                if !matches!(report.state, AgentState::NoContact | AgentState::Stopped) {
                    report.state = AgentState::Unresponsive;
                }
            });
        }
        tokio::time::sleep(delay).await;
    }
}
