//! Listens to an agent over one connection and keeps the report of its guest.
//!
//! ```text
//! nothing heard ──agent-start──▶ startup ──is-system-running──▶ not ready ◀──▶ ready
//!      │                            ▲                              └── agent-stop ──▶ stopped
//!      └── 300 s ──▶ (the end)      └───────────── agent-start, from anywhere
//! 15 s of silence, from anywhere but `stopped` ──▶ unresponsive (the end)    a reset ──▶ no contact (the end)
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use muster_agent::frame::FrameDecoder;
use muster_agent::{FEATURE_MEMORY, FEATURE_PIECES};
use muster_types::guest::AgentState;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::net::unix::{ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::agent::Agent;
use super::line::{Features, Frame, Known, Line};
use super::packet::Packet;
use crate::guest::boot::Boot;
use crate::guest::contact::{Guest, Signals};
use crate::guest::text::{STATE_TEXT, printable};

/// How often a guest that is not ready is asked, at most.
const ASK: Duration = Duration::from_secs(30);

/// How soon it is asked again at first: boots take seconds.
const ASK_SOON: Duration = Duration::from_secs(1);

/// How soon it is asked at the earliest, whatever it says.
const ASK_AT_ONCE: Duration = Duration::from_millis(200);

/// After how long without a word it is asked for one.
const IDLE: Duration = Duration::from_secs(5);

/// After how long without a word it is given up.
const SILENCE: Duration = Duration::from_secs(15);

/// How long the first word may take.
const FIRST_WORD: Duration = Duration::from_secs(300);

/// How many bytes that nobody can use are read after one that somebody could.
const USELESS: u64 = 64 << 20;

/// How many questions may be without an answer; older ones are forgotten.
const QUESTIONS: usize = 32;

/// How often an agent may start or stop in [`RESTLESS`].
const STARTS: u32 = 100;

/// See [`STARTS`].
const RESTLESS: Duration = Duration::from_secs(60);

/// How much is read at once.
const READ: usize = 64 << 10;

/// How often that is done before others have their turn.
const READS: usize = 8;

/// How much is written to a plain agent at once.
const WRITE: usize = 2048;

/// The oldest agent that is spoken with.
const OLDEST: [u64; 3] = [0, 3, 16];

/// Why a conversation ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It said nothing for too long.
    Silent,
    /// It never said anything.
    Unheard,
    /// The machine was reset.
    Reset,
    /// It sent too much that nobody can use.
    Flooded,
    Broken(String),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent => f.write_str("the guest's agent does not answer"),
            Self::Unheard => f.write_str("the guest's agent never said anything"),
            Self::Reset => f.write_str("the guest was reset"),
            Self::Flooded => f.write_str("the guest's agent sends what nobody can use"),
            Self::Broken(why) => write!(f, "the connection to the guest's agent broke: {why}"),
        }
    }
}

pub(super) struct Conversation<'a> {
    guest: &'a Guest,
    line: Arc<Line>,
    boot: &'a mut Boot,
    /// How many resets are known.
    resets: &'a mut u64,
    paused: bool,
    frames: FrameDecoder,
    buffer: Vec<u8>,
    /// Since when something could have been heard.
    since: Instant,
    /// When something was heard last.
    heard: Option<Instant>,
    pinged: Instant,
    asked: Instant,
    ask_at: Option<Instant>,
    ask_pause: Duration,
    /// The questions about itself, and the pings, that it did not answer yet. Each is answered once.
    questions: VecDeque<u64>,
    /// How often it started or stopped, and since when.
    starts: (u32, Instant),
    /// Bytes that nobody could use, since the last that somebody could.
    useless: u64,
    too_old: bool,
}

/// Ends what goes on over a line, however the conversation ends.
struct Ending<'a>(&'a Guest, Arc<Line>);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.set_speaker(None);
        self.1.lose("nobody looks after the machine any more");
    }
}

impl<'a> Conversation<'a> {
    /// Speaks and listens until there is a reason not to.
    pub(super) async fn hold(
        guest: &'a Guest,
        mut stream: UnixStream,
        signals: &mut watch::Receiver<Signals>,
        resets: &'a mut u64,
        boot: &'a mut Boot,
    ) -> End {
        let (line, queue) = Line::new();
        let _ending = Ending(guest, line.clone());
        let now = Instant::now();
        let mut conversation = Self {
            guest,
            line: line.clone(),
            boot,
            resets,
            paused: signals.borrow().paused,
            frames: FrameDecoder::new(line.longest()),
            buffer: Vec::new(),
            since: now,
            heard: None,
            pinged: now,
            asked: now,
            ask_at: Some(now),
            ask_pause: ASK_SOON,
            questions: VecDeque::new(),
            starts: (0, now),
            useless: 0,
            too_old: false,
        };
        let (reader, writer) = stream.split();
        let end = tokio::select! {
            end = conversation.listen(&reader, signals) => end,
            end = write(writer, queue, &line) => end,
        };
        line.lose(&end.to_string());
        end
    }

    async fn listen(&mut self, reader: &ReadHalf<'_>, signals: &mut watch::Receiver<Signals>) -> End {
        loop {
            if let Some(end) = self.obey(*signals.borrow_and_update()) {
                return end;
            }
            let end = tokio::select! {
                changed = signals.changed() => {
                    changed.err().map(|_| End::Broken("nobody looks after the machine any more".into()))
                }
                ready = reader.readable() => match ready {
                    Ok(()) => self.read(reader, signals).await,
                    Err(error) => Some(End::Broken(error.to_string())),
                },
                () = sleep_until(self.next_turn()), if !self.paused => self.turn(),
            };
            if let Some(end) = end {
                return end;
            }
        }
    }

    /// Takes note of what happened to the machine.
    fn obey(&mut self, signals: Signals) -> Option<End> {
        if self.paused && !signals.paused {
            // It could not say anything meanwhile.
            let now = Instant::now();
            self.since = now;
            self.heard = self.heard.map(|_| now);
        }
        self.paused = signals.paused;
        if *self.resets != signals.resets {
            *self.resets = signals.resets;
            return Some(End::Reset);
        }
        None
    }

    /// When there is something to do if nothing is heard until then.
    fn next_turn(&self) -> Instant {
        let silence = match self.heard {
            None => Some(self.since + FIRST_WORD),
            Some(_) if self.line.is_busy() => None,
            Some(heard) => Some((heard.max(self.pinged) + IDLE).min(heard + SILENCE)),
        };
        // Looked at again even if there is nothing: what it did may have ended.
        let later = Instant::now() + ASK;
        [silence, self.ask_at].into_iter().flatten().fold(later, Instant::min)
    }

    /// Does what is due.
    fn turn(&mut self) -> Option<End> {
        let now = Instant::now();
        self.buffer = Vec::new();
        match self.heard {
            None if now >= self.since + FIRST_WORD => return Some(End::Unheard),
            Some(heard) if !self.line.is_busy() => {
                if now >= heard + SILENCE {
                    return Some(End::Silent);
                }
                if now >= heard.max(self.pinged) + IDLE {
                    self.pinged = now;
                    self.question("ping");
                }
            }
            _ => {}
        }
        if self.ask_at.is_some_and(|at| now >= at) {
            self.question("is-system-running");
            self.asked = now;
            // A guest whose agent is not there yet finds everything that was asked when it comes.
            let pause = if self.heard.is_some() { self.ask_pause } else { ASK };
            self.ask_at = Some(now + pause);
            if self.heard.is_some() {
                self.ask_pause = (self.ask_pause * 2).min(ASK);
            }
        }
        None
    }

    fn question(&mut self, command: &str) {
        let (number, unique) = self.line.new_name();
        self.line.mention(&json!({ "command": command, "unique": unique }));
        if self.questions.len() == QUESTIONS {
            self.questions.pop_front();
        }
        self.questions.push_back(number);
    }

    /// Whether a packet answers a question that has no answer yet.
    fn is_answer(&mut self, packet: &Packet) -> bool {
        let Some(number) = self.line.asked(packet) else { return false };
        let found = self.questions.iter().position(|question| *question == number);
        found.is_some_and(|at| self.questions.remove(at).is_some())
    }

    /// Whether an agent that starts or stops once more does so too often.
    fn is_restless(&mut self) -> bool {
        if self.starts.1.elapsed() > RESTLESS {
            self.starts = (0, Instant::now());
        }
        self.starts.0 += 1;
        self.starts.0 > STARTS
    }

    async fn read(&mut self, reader: &ReadHalf<'_>, signals: &mut watch::Receiver<Signals>) -> Option<End> {
        for _ in 0..READS {
            self.buffer.resize(READ, 0);
            let size = match reader.try_read(&mut self.buffer) {
                Ok(0) => return Some(End::Broken("QEMU closed it".into())),
                Ok(size) => size,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
                Err(error) => return Some(End::Broken(error.to_string())),
            };
            let skipped = self.frames.skipped();
            self.frames.set_max_length(self.line.longest());
            self.frames.feed(&self.buffer[..size]);
            while let Some(body) = self.frames.next_frame() {
                if let Some(end) = self.hear(&body, signals).await {
                    return Some(end);
                }
            }
            let skipped = self.frames.skipped() - skipped;
            self.useless += skipped;
            if skipped < size as u64 {
                self.heard = Some(Instant::now());
            }
            if self.useless > USELESS {
                return Some(End::Flooded);
            }
        }
        tokio::task::yield_now().await;
        None
    }

    async fn hear(&mut self, body: &[u8], signals: &mut watch::Receiver<Signals>) -> Option<End> {
        let Some(packet) = Packet::parse(body) else {
            self.useless += body.len() as u64;
            return None;
        };
        let useful = match packet.command() {
            "agent-start" | "agent-stop" if self.is_restless() => return Some(End::Flooded),
            "agent-start" => {
                self.hear_start(&packet);
                false
            }
            "agent-stop" => {
                self.line.fail("the guest's agent was stopped");
                self.guest.set_speaker(None);
                self.guest.change(|report| report.state = AgentState::Stopped);
                self.ask_at = None;
                false
            }
            "is-system-running-response" => {
                let is_answer = self.is_answer(&packet);
                if is_answer {
                    self.hear_running(&packet);
                }
                is_answer
            }
            "ping" => {
                if let Some(unique) = packet.echo() {
                    self.line.mention(&json!({ "command": "pong", "unique": unique }));
                }
                false
            }
            "pong" => self.is_answer(&packet),
            _ => {
                let line = self.line.clone();
                let mut delivery = std::pin::pin!(line.deliver(packet, body.len()));
                loop {
                    tokio::select! {
                        biased;
                        useful = &mut delivery => break useful,
                        changed = signals.changed() => {
                            let end = match changed {
                                Ok(()) => self.obey(*signals.borrow_and_update()),
                                Err(_) => Some(End::Broken("nobody looks after the machine any more".into())),
                            };
                            if end.is_some() {
                                return end;
                            }
                        }
                    }
                }
            }
        };
        self.useless = if useful { 0 } else { self.useless + body.len() as u64 };
        None
    }

    fn hear_start(&mut self, packet: &Packet) {
        let first = self.heard.is_none();
        self.line.fail("the guest's agent was started again");
        let version = packet.text("message").and_then(|text| text.strip_prefix("version "));
        let version = version.map(|version| printable(version, STATE_TEXT));
        let before = self.guest.report().boot;
        self.know(packet, true);
        self.too_old =
            self.line.features() == Features::default() && version.as_deref().is_some_and(is_too_old);
        let boot = self.line.known().boot;
        // An agent with features says this on every connection as well, which is no start.
        let same = first && self.line.features().memory && boot.is_some() && boot == before;
        self.guest.change(|report| {
            report.version = version;
            report.state = if self.too_old { AgentState::TooOld } else { AgentState::Startup };
            if !same || report.agent_start_time.is_none() {
                report.agent_start_time = Some(now());
            }
        });
        self.introduce();
        self.ask_pause = ASK_SOON;
        self.ask_at = Some(Instant::now().max(self.asked + ASK_AT_ONCE));
        self.heard = Some(Instant::now());
    }

    fn hear_running(&mut self, packet: &Packet) {
        self.know(packet, false);
        let message = packet.text("message").unwrap_or_default().trim();
        let state = match (packet.flag("result"), message) {
            _ if self.too_old => AgentState::TooOld,
            (_, "degraded") => AgentState::Degraded,
            (Some(true), _) => AgentState::Ready,
            (_, "") => AgentState::NotReady("unknown".into()),
            (_, message) => AgentState::NotReady(printable(message, STATE_TEXT)),
        };
        if state.is_ready() || self.too_old {
            self.ask_at = None;
        } else {
            let soon = Instant::now() + self.ask_pause;
            if self.ask_at.is_none_or(|at| soon < at) {
                self.ask_at = Some(soon);
                self.ask_pause = (self.ask_pause * 2).min(ASK);
            }
        }
        self.introduce();
        self.guest.change(|report| report.state = state);
    }

    /// Takes what an agent says of itself.
    fn know(&mut self, packet: &Packet, started: bool) {
        let time = packet.time("system_boot_time");
        let id = packet.text("boot-id").map(|id| printable(id, STATE_TEXT)).filter(|id| !id.is_empty());
        let boot = self.boot.hear(id, time, started);
        if !started && self.guest.report().boot.is_some_and(|before| Some(before) != boot) {
            self.line.fail("the guest was restarted");
        }
        let can = |word| packet.lists("features", word);
        let features = Features { memory: can(FEATURE_MEMORY), pieces: can(FEATURE_PIECES) };
        self.line.set_known(Known { features, boot: boot.clone() });
        self.guest.change(|report| {
            report.system_boot_time = time.or(report.system_boot_time);
            report.boot = boot;
        });
    }

    /// Lets others ask it from now on.
    fn introduce(&self) {
        let agent = (!self.too_old).then(|| Agent::new(self.line.clone()));
        self.guest.set_speaker(agent.map(|agent| Arc::new(agent) as Arc<_>));
    }
}

async fn write(mut writer: WriteHalf<'_>, mut queue: mpsc::UnboundedReceiver<Frame>, line: &Line) -> End {
    while let Some(frame) = queue.recv().await {
        let most = if line.features().pieces { frame.bytes.len() } else { WRITE };
        for part in frame.bytes.chunks(most) {
            if let Err(error) = writer.write_all(part).await {
                return End::Broken(error.to_string());
            }
        }
    }
    End::Broken("nobody needs it any more".into())
}

/// Whether a version is one that nobody speaks with any more. What cannot be read is taken for a newer one.
fn is_too_old(version: &str) -> bool {
    let number = |part: &str| part.parse::<u64>().ok();
    let parts: Option<Vec<u64>> = version.split('.').take(3).map(number).collect();
    parts.is_some_and(|parts| parts.as_slice() < OLDEST.as_slice())
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        for old in ["0.3.15", "0.2.99", "0.3", "0.3.9"] {
            assert!(is_too_old(old), "{old}");
        }
        for new in ["0.3.16", "0.3.16.dev2", "0.4.1", "1.0", "10", "", "new", "0.x.1"] {
            assert!(!is_too_old(new), "{new}");
        }
    }
}
