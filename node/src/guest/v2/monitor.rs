//! Listens to an agent over the connection that is only for that, and keeps the report of its guest.
//!
//! ```text
//! nothing heard ──welcome──▶ startup ──is-system-running──▶ not ready ◀──▶ ready
//!      └── 300 s ──▶ (the end)    15 s of silence ──▶ unresponsive (the end)    a reset ──▶ no contact (the end)
//! ```

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use muster_types::guest::AgentState;
use prost::Message;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::agent::Agent;
use super::connection::Connection;
use super::inbox::Fault;
use super::message::{Answer, GuestWelcome, Nothing, Question, Reply, SystemRunning};
use super::way::Way;
use crate::guest::boot::Boot;
use crate::guest::contact::{Guest, Signals};
use crate::guest::text::{STATE_TEXT, printable};

/// How often a guest that is not ready is asked, at most.
const ASK: Duration = Duration::from_secs(30);

/// How soon it is asked again at first: boots take seconds.
const ASK_SOON: Duration = Duration::from_secs(1);

/// After how long without a word it is asked for one.
const IDLE: Duration = Duration::from_secs(5);

/// After how long without a word it is given up.
const SILENCE: Duration = Duration::from_secs(15);

/// How long the first word may take.
const FIRST_WORD: Duration = Duration::from_secs(300);

/// How many replies that nobody can use are read after one that somebody could.
const USELESS: u32 = 1000;

/// The longest reply.
pub(super) const LONGEST: usize = 64 << 10;

/// Why nobody listens any more.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It said nothing for too long.
    Silent,
    /// It never said anything.
    Unheard,
    /// The machine was reset.
    Reset,
    /// The guest is another one than it was.
    Restarted,
    /// It sent too much that nobody can use.
    Flooded,
    Fault(Fault),
    /// Nobody looks after the machine any more.
    Over,
}

impl From<Fault> for End {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent => f.write_str("the guest's agent does not answer"),
            Self::Unheard => f.write_str("the guest's agent never said anything"),
            Self::Reset => f.write_str("the guest was reset"),
            Self::Restarted => f.write_str("the guest was restarted"),
            Self::Flooded => f.write_str("the guest's agent sends what nobody can use"),
            Self::Fault(fault) => fault.fmt(f),
            Self::Over => f.write_str("nobody looks after the machine any more"),
        }
    }
}

/// What is known from one connection to the next.
#[derive(Debug)]
pub(super) struct Past {
    pub(super) boot: Boot,
    /// How many resets are known.
    pub(super) resets: u64,
    /// Whether the agent that answers next has just started, as far as anybody can tell.
    pub(super) starting: bool,
}

pub(super) struct Monitor<'a> {
    guest: &'a Guest,
    way: &'a Way,
    past: &'a mut Past,
    connection: Connection,
    /// Told when nobody can ask any more.
    lost: watch::Sender<Option<String>>,
    paused: bool,
    /// Since when something could have been heard.
    since: Instant,
    /// When something was heard last.
    heard: Option<Instant>,
    pinged: Instant,
    ask_at: Option<Instant>,
    ask_pause: Duration,
    useless: u32,
    welcome: String,
    ping: Option<String>,
    question: Option<String>,
}

/// Ends what goes on, however listening ends.
struct Ending<'a>(&'a Guest);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.set_speaker(None);
    }
}

impl<'a> Monitor<'a> {
    /// Speaks and listens until there is a reason not to.
    pub(super) async fn hold(
        guest: &'a Guest,
        way: &'a Way,
        mut connection: Connection,
        signals: &mut watch::Receiver<Signals>,
        past: &'a mut Past,
    ) -> End {
        let _ending = Ending(guest);
        let now = Instant::now();
        let welcome = match connection.welcome() {
            Ok(welcome) => welcome,
            Err(fault) => return fault.into(),
        };
        let mut monitor = Self {
            guest,
            way,
            past,
            connection,
            lost: watch::Sender::new(None),
            paused: signals.borrow().paused,
            since: now,
            heard: None,
            pinged: now,
            ask_at: None,
            ask_pause: ASK_SOON,
            useless: 0,
            welcome,
            ping: None,
            question: None,
        };
        let end = match monitor.listen(signals).await {
            Ok(never) => match never {},
            Err(end) => end,
        };
        monitor.lost.send_replace(Some(end.to_string()));
        end
    }

    async fn listen(
        &mut self,
        signals: &mut watch::Receiver<Signals>,
    ) -> Result<std::convert::Infallible, End> {
        loop {
            let seen = *signals.borrow_and_update();
            self.obey(seen)?;
            let turn = self.next_turn();
            tokio::select! {
                changed = signals.changed() => changed.map_err(|_| End::Over)?,
                reply = self.connection.receive() => self.hear(&reply?)?,
                () = sleep_until(turn), if !self.paused => self.turn()?,
            }
        }
    }

    /// Takes note of what happened to the machine.
    fn obey(&mut self, signals: Signals) -> Result<(), End> {
        if self.paused && !signals.paused {
            // It could not say anything meanwhile.
            let now = Instant::now();
            self.since = now;
            self.heard = self.heard.map(|_| now);
        }
        self.paused = signals.paused;
        if self.past.resets == signals.resets { Ok(()) } else { Err(End::Reset) }
    }

    /// When there is something to do if nothing is heard until then.
    fn next_turn(&self) -> Instant {
        let silence = match self.heard {
            None => self.since + FIRST_WORD,
            Some(heard) => (heard.max(self.pinged) + IDLE).min(heard + SILENCE),
        };
        self.ask_at.map_or(silence, |at| at.min(silence))
    }

    /// Does what is due.
    fn turn(&mut self) -> Result<(), End> {
        let now = Instant::now();
        match self.heard {
            None if now >= self.since + FIRST_WORD => return Err(End::Unheard),
            Some(heard) if now >= heard + SILENCE => return Err(End::Silent),
            Some(heard) if now >= heard.max(self.pinged) + IDLE => {
                self.pinged = now;
                self.ping = Some(self.connection.ping()?);
            }
            _ => {}
        }
        if self.ask_at.is_some_and(|at| now >= at) {
            self.question = Some(self.connection.ask(Question::IsSystemRunning(Nothing {}))?);
            self.ask_at = None;
        }
        Ok(())
    }

    fn hear(&mut self, reply: &Reply) -> Result<(), End> {
        self.heard = Some(Instant::now());
        let answers =
            |asked: &Option<String>| asked.as_ref().is_some_and(|asked| reply.id == asked.as_bytes());
        let useful = match &reply.answer {
            Some(Answer::Welcome(bytes)) if reply.id == self.welcome.as_bytes() => {
                self.welcome.clear();
                self.hear_welcome(&GuestWelcome::decode(bytes.clone()).map_err(|_| Fault::Garbage)?)?;
                true
            }
            Some(Answer::SystemRunning(bytes)) if answers(&self.question) => {
                self.question = None;
                self.hear_running(&SystemRunning::decode(bytes.clone()).map_err(|_| Fault::Garbage)?)?;
                true
            }
            Some(Answer::Ping(_)) if answers(&self.ping) => {
                self.ping = None;
                true
            }
            Some(Answer::CommandError(_) | Answer::UnknownCommand(_)) if answers(&self.question) => {
                // It cannot say: it is asked again.
                self.question = None;
                self.ask_later();
                true
            }
            _ => false,
        };
        self.useless = if useful { 0 } else { self.useless + 1 };
        if self.useless > USELESS { Err(End::Flooded) } else { Ok(()) }
    }

    fn hear_welcome(&mut self, welcome: &GuestWelcome) -> Result<(), End> {
        let version = String::from_utf8_lossy(&welcome.version);
        let version = printable(version.strip_prefix("version ").unwrap_or(&version), STATE_TEXT);
        let starting = std::mem::take(&mut self.past.starting);
        let time = time(welcome.boot_time);
        let boot = self.past.boot.hear(None, time, false);
        self.guest.change(|report| {
            report.version = Some(version).filter(|version| !version.is_empty());
            report.state = AgentState::Startup;
            if starting || report.agent_start_time.is_none() || report.boot != boot {
                report.agent_start_time = Some(now());
            }
            report.system_boot_time = time.or(report.system_boot_time);
            report.boot.clone_from(&boot);
        });
        let agent = Agent::new(self.way.clone(), self.lost.subscribe(), boot);
        self.guest.set_speaker(Some(Arc::new(agent)));
        self.ask_at = Some(Instant::now());
        Ok(())
    }

    fn hear_running(&mut self, running: &SystemRunning) -> Result<(), End> {
        let time = time(running.boot_time);
        let boot = self.past.boot.hear(None, time, false);
        if boot != self.guest.report().boot {
            return Err(End::Restarted);
        }
        let message = String::from_utf8_lossy(&running.message);
        let state = match (running.result, message.trim()) {
            (_, "degraded") => AgentState::Degraded,
            (true, _) => AgentState::Ready,
            (false, "") => AgentState::NotReady("unknown".into()),
            (false, message) => AgentState::NotReady(printable(message, STATE_TEXT)),
        };
        if !state.is_ready() {
            self.ask_later();
        }
        self.guest.change(|report| {
            report.system_boot_time = time.or(report.system_boot_time);
            report.state = state;
        });
        Ok(())
    }

    fn ask_later(&mut self) {
        self.ask_at = Some(Instant::now() + self.ask_pause);
        self.ask_pause = (self.ask_pause * 2).min(ASK);
    }
}

/// A Unix time that can be one.
fn time(time: f64) -> Option<f64> {
    // Nothing said is nought.
    (1.0..1e11).contains(&time).then_some(time)
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
