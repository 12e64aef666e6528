//! Speaks protocol 1 with the agent at the other end of a serial port: as the crate `muster-agent` describes it if the
//! agent has its features, otherwise as the agents do that were there before.
//!
//! ```text
//! keep ──connects──▶ conversation ──listens──▶ what the agent says of itself ──▶ the report
//!   ▲                     │  └─ the replies ──▶ line ──▶ calls: execute, put, get
//!   └── it ended ─────────┘            writes ◀── line ◀──┘
//! ```
//!
//! QEMU listens to one connection at a time: there is never another one.

mod agent;
mod conversation;
mod execute;
#[cfg(test)]
mod execute_tests;
#[cfg(test)]
mod fake;
mod get;
#[cfg(test)]
mod hostile_tests;
mod line;
mod packet;
mod put;
#[cfg(test)]
mod released_tests;
#[cfg(test)]
mod state_tests;
#[cfg(test)]
mod transfer_tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use muster_types::guest::{AgentState, GuestReport};

use self::conversation::{Conversation, End};
use super::boot::Boot;
use super::contact::Guest;
use crate::vm::socket;

/// How long to wait before a connection that broke is made anew.
const BROKEN: Duration = Duration::from_secs(1);

/// The same for a guest that sends what nobody can read.
const FLOODED: Duration = Duration::from_secs(10);

/// Stays in contact with a guest whose machine's sockets are in `folder`, for as long as somebody wants that.
pub(super) async fn keep(guest: Arc<Guest>, folder: PathBuf) {
    let mut signals = guest.signals();
    let mut boot = Boot::default();
    let mut resets = signals.borrow().resets;
    loop {
        let end = match socket::connect(&folder, socket::AGENT).await {
            Ok(stream) => Conversation::hold(&guest, stream, &mut signals, &mut resets, &mut boot).await,
            Err(error) => End::Broken(error.to_string()),
        };
        tracing::debug!(machine = %guest.id(), %end, "the connection to a guest's agent ended");
        let pause = match &end {
            End::Reset => {
                boot.end();
                guest.change(|report| *report = GuestReport::default());
                Duration::ZERO
            }
            End::Silent => Duration::ZERO,
            // It may never come.
            End::Unheard => Duration::ZERO,
            End::Broken(_) => BROKEN,
            End::Flooded => FLOODED,
        };
        if matches!(end, End::Silent | End::Broken(_) | End::Flooded) {
            guest.change(|report| {
                if !matches!(report.state, AgentState::NoContact | AgentState::Stopped) {
                    report.state = AgentState::Unresponsive;
                }
            });
        }
        tokio::time::sleep(pause).await;
    }
}
