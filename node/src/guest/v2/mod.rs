//! Speaks protocol 2 with an agent that listens on a virtual socket: protocol buffers, one connection that lasts to learn
//! how the guest is, and one more for everything that it is asked.
//!
//! ```text
//! keep ──connects──▶ monitor ──listens──▶ what the agent says of itself ──▶ the report
//!   ▲                   │
//!   └── it ended ───────┘        agent ──connects──▶ call: execute, put, get
//! ```
//!
//! These agents remember nothing: a command whose connection broke is lost, and so is what it wrote.

mod agent;
mod connection;
#[cfg(test)]
mod fake;
mod file;
mod inbox;
mod message;
mod monitor;
#[cfg(test)]
mod tests;
mod way;

use std::sync::Arc;
use std::time::Duration;

use muster_types::guest::{AgentState, GuestReport};
use tokio::sync::watch;
use tokio::time::Instant;

use self::connection::Connection;
use self::inbox::Fault;
use self::monitor::{End, LONGEST, Monitor, Past};
pub(super) use self::way::Way;
use super::boot::Boot;
use super::contact::{Guest, Signals};

/// How long to wait before a guest is reached for again: it says nothing of itself when its agent begins to listen.
const AGAIN: Duration = Duration::from_secs(1);

/// The same for one that has not answered for [`EAGER`]: it may have no agent.
const AGAIN_LATER: Duration = Duration::from_secs(15);

const EAGER: Duration = Duration::from_secs(300);

/// The same for a guest that sends what nobody can use.
const FLOODED: Duration = Duration::from_secs(10);

/// Stays in contact with a guest for as long as somebody wants that.
pub(super) async fn keep(guest: Arc<Guest>, way: Way) {
    let mut signals = guest.signals();
    let resets = signals.borrow().resets;
    let mut past = Past { boot: Boot::default(), resets, starting: false };
    let mut since = Instant::now();
    loop {
        // Nobody answers meanwhile.
        if signals.wait_for(|signals| !signals.paused).await.is_err() {
            return;
        }
        let end = match way.connect().await {
            Ok(stream) => {
                let connection = Connection::new(stream, LONGEST);
                let end = Monitor::hold(&guest, &way, connection, &mut signals, &mut past).await;
                if guest.report().state != AgentState::NoContact {
                    since = Instant::now();
                }
                end
            }
            Err(error) => End::Fault(Fault::Broken(error.to_string())),
        };
        tracing::debug!(machine = %guest.id(), %end, "the connection to a guest's agent ended");
        let pause = match &end {
            End::Over => return,
            End::Reset | End::Silent | End::Unheard => Duration::ZERO,
            End::Restarted => AGAIN,
            End::Flooded | End::Fault(Fault::TooLong(_) | Fault::Garbage) => FLOODED,
            End::Fault(Fault::Ended | Fault::Broken(_)) if since.elapsed() < EAGER => AGAIN,
            End::Fault(Fault::Ended | Fault::Broken(_)) => AGAIN_LATER,
        };
        past.starting |= matches!(end, End::Fault(_));
        let state = match end {
            End::Reset | End::Unheard | End::Over => None,
            End::Fault(Fault::Ended) => Some(AgentState::Stopped),
            End::Silent | End::Restarted | End::Flooded | End::Fault(_) => Some(AgentState::Unresponsive),
        };
        if let Some(state) = state {
            guest.change(|report| {
                if !matches!(report.state, AgentState::NoContact | AgentState::Stopped) {
                    report.state = state;
                }
            });
        }
        if forget_after_reset(&guest, &signals, &mut past) || wait(pause, &mut signals, past.resets).await {
            forget_after_reset(&guest, &signals, &mut past);
            since = Instant::now();
        }
    }
}

/// Whether the machine was reset: nothing is known then.
fn forget_after_reset(guest: &Guest, signals: &watch::Receiver<Signals>, past: &mut Past) -> bool {
    let resets = signals.borrow().resets;
    if past.resets == resets {
        return false;
    }
    past.resets = resets;
    past.boot.end();
    past.starting = true;
    guest.change(|report| *report = GuestReport::default());
    true
}

/// Waits that long, or until the machine was reset, which is answered.
async fn wait(pause: Duration, signals: &mut watch::Receiver<Signals>, resets: u64) -> bool {
    let reset = signals.wait_for(|signals| signals.resets != resets);
    matches!(tokio::time::timeout(pause, reset).await, Ok(Ok(_)))
}
