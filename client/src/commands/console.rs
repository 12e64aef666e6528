//! `muster console`: the serial console of an instance in this terminal, through a WebSocket of the API.

use std::collections::VecDeque;
use std::io::{self, IsTerminal as _};
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use muster_types::instance::{InstanceRecord, InstanceState, PowerState};
use muster_types::session::ConsoleKind;
use muster_websocket::{RelayEnd, Role, relay};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use super::lookup::{NamedType, resolve};
use super::session::Session;
use crate::api::Client;
use crate::exit_code::{Outcome, error_with_outcome, interrupted};
use crate::output::escape_control;
use crate::terminal::{EndSignals, RawTerminal, read_in_thread, write_output};

/// Ctrl-], which closes the console as in telnet.
const ESCAPE: u8 = 0x1d;
/// How long the console must be silent before the next line of a script: guests drop input before a prompt.
const LINE_DELAY: Duration = Duration::from_secs(1);
const BUFFER_SIZE: usize = 16 * 1024;
/// How long the end of the connection may take after the user has left.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Arguments of `muster console`.
#[derive(Debug, Args)]
#[command(
    after_help = "Ctrl-] closes the console. It works through every node of the cluster. If standard input is not a terminal, its lines are sent as if they were typed, \
                  and the command ends when all lines are sent and the console is silent."
)]
pub struct Arguments {
    /// Name or id of the instance
    instance: String,
    /// How long the console must be silent after the end of standard input
    #[arg(long, value_name = "SECONDS", default_value_t = 2)]
    linger: u32,
}

/// Why a console session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionEnd {
    /// The user left.
    Left,
    /// Standard input ended and the console is silent.
    Silent,
    /// The server closed the connection.
    Closed,
    /// The process received a signal.
    Signal,
}

pub(super) async fn run(mut arguments: Arguments, session: &Session) -> anyhow::Result<()> {
    resolve(&session.client, NamedType::Instance, &mut arguments.instance, None).await?;
    let record = running_instance(&session.client, &arguments.instance).await?;
    let name = escape_control(&record.name);
    let id = record.uuid.to_string();
    let socket = session.client.open_console(&id, ConsoleKind::Serial).await?;
    let (stream, relayed) = tokio::io::duplex(BUFFER_SIZE);
    let mut relaying = tokio::spawn(relay(socket, relayed, Role::Client));
    let interactive = io::stdin().is_terminal();
    let hint = if interactive { "; press Ctrl-] to close it" } else { "" };
    crate::message!("console of {name}{hint}");
    let raw =
        RawTerminal::new().map_err(|error| anyhow!("cannot switch the terminal to raw mode: {error}"))?;
    let mut console = ConsoleSession {
        stream,
        input: read_in_thread(),
        out: io::stdout(),
        interactive,
        linger: Duration::from_secs(arguments.linger.into()),
        raw,
    };
    let end = console.run().await;
    // Closes the connection and restores the terminal.
    drop(console);
    if interactive {
        crate::message!("");
    }
    let relay_end = timeout(CLOSE_TIMEOUT, &mut relaying).await;
    match end? {
        SessionEnd::Left | SessionEnd::Silent => Ok(()),
        SessionEnd::Closed => {
            let relay_end = relay_end.ok().and_then(Result::ok).unwrap_or(RelayEnd::Lost);
            check_end(&relay_end).map_err(|error| error.context(format!("lost the console of {name}")))?;
            crate::message!("the console of {name} was closed{}", closing_reason(&session.client, &id).await);
            Ok(())
        }
        SessionEnd::Signal => Err(interrupted("interrupted")),
    }
}

/// Returns an instance, or an error if it has no console because it does not run.
pub(super) async fn running_instance(client: &Client, instance: &str) -> anyhow::Result<InstanceRecord> {
    let record = client.instance(instance).await?.value()?;
    let is_off = matches!(record.power_state, PowerState::Off | PowerState::Crashed);
    if record.state != InstanceState::Created || is_off {
        return Err(no_console_error(&record));
    }
    Ok(record)
}

/// Returns an error if a console did not end because the instance or the user closed it.
pub(super) fn check_end(end: &RelayEnd) -> anyhow::Result<()> {
    let reason = match end {
        RelayEnd::Closed | RelayEnd::PeerClosed => return Ok(()),
        RelayEnd::ClosedWith(reason) => escape_control(reason),
        RelayEnd::Idle => "no data was transferred for an hour".to_owned(),
        RelayEnd::Lost | RelayEnd::PeerFailed => "the server closed the connection unexpectedly".to_owned(),
        RelayEnd::Unresponsive => "the server does not respond".to_owned(),
        RelayEnd::InvalidFrame => "the server sent a frame that is not valid".to_owned(),
    };
    Err(error_with_outcome(Outcome::Unavailable, reason))
}

fn no_console_error(record: &InstanceRecord) -> anyhow::Error {
    let name = escape_control(&record.name);
    match record.power_state {
        PowerState::Off | PowerState::Crashed => {
            let text = format!(
                "instance {name} is {}; start it with `muster instance poweron {}`, or read its console log with `muster \
                 instance log {}`",
                record.power_state, record.uuid, record.uuid
            );
            error_with_outcome(Outcome::Conflict, text)
        }
        PowerState::Initial | PowerState::On | PowerState::Paused | PowerState::Unknown => {
            let text = format!("instance {name} has no console yet: its state is {}", record.state);
            error_with_outcome(Outcome::Unavailable, text)
        }
    }
}

async fn closing_reason(client: &Client, id: &str) -> String {
    match client.instance(id).await.and_then(crate::api::ApiResponse::value) {
        Ok(record) => format!(": the instance is {}", record.power_state),
        Err(_) => String::new(),
    }
}

/// Splits a script into lines as they are typed. An unterminated last line counts.
fn script_lines(input: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    // The Enter key sends a carriage return.
    let keys = |byte: &u8| if *byte == b'\n' { b'\r' } else { *byte };
    input.split_inclusive(|byte| *byte == b'\n').map(move |line| line.iter().map(keys).collect())
}

/// Returns typed input up to the escape key, and whether that was pressed.
fn until_escape(input: &[u8]) -> (&[u8], bool) {
    let end = input.iter().position(|byte| *byte == ESCAPE);
    (&input[..end.unwrap_or(input.len())], end.is_some())
}

/// Waits for a signal, or forever without a signal handler.
async fn next_signal(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

#[derive(Debug)]
struct ConsoleSession<S, W> {
    stream: S,
    input: mpsc::Receiver<Vec<u8>>,
    out: W,
    interactive: bool,
    linger: Duration,
    raw: Option<RawTerminal>,
}

impl<S: AsyncRead + AsyncWrite + Unpin, W: io::Write> ConsoleSession<S, W> {
    async fn run(&mut self) -> anyhow::Result<SessionEnd> {
        let mut end_signals = EndSignals::new()?;
        // Only a raw terminal must be restored before the process stops.
        let stop = SignalKind::from_raw(nix::sys::signal::Signal::SIGTSTP as i32);
        let mut stop = self.raw.is_some().then(|| signal(stop)).transpose()?;
        let mut input_ended = false;
        // Lines of a script that have not been sent yet.
        let mut pending_lines = VecDeque::new();
        let mut last_output = Instant::now();
        let mut buffer = vec![0; BUFFER_SIZE];
        loop {
            tokio::select! {
                read = self.stream.read(&mut buffer) => {
                    let Some(count) = read.ok().filter(|count| *count > 0) else { return Ok(SessionEnd::Closed) };
                    last_output = Instant::now();
                    if !write_output(&mut self.out, &buffer[..count])? {
                        return Ok(SessionEnd::Left);
                    }
                }
                input = self.input.recv(), if !input_ended && pending_lines.is_empty() => {
                    match input {
                        None => input_ended = true,
                        Some(input) if self.interactive => {
                            let (typed, escape) = until_escape(&input);
                            if self.send(typed).await.is_err() {
                                return Ok(SessionEnd::Closed);
                            }
                            if escape {
                                return Ok(SessionEnd::Left);
                            }
                        }
                        Some(input) => pending_lines.extend(script_lines(&input)),
                    }
                }
                () = sleep_until(last_output + LINE_DELAY), if !pending_lines.is_empty() => {
                    last_output = Instant::now();
                    let line = pending_lines.pop_front().unwrap_or_default();
                    if self.send(&line).await.is_err() {
                        return Ok(SessionEnd::Closed);
                    }
                }
                () = sleep_until(last_output + self.linger), if input_ended && pending_lines.is_empty() => {
                    return Ok(if self.interactive { SessionEnd::Left } else { SessionEnd::Silent });
                }
                () = next_signal(&mut stop) => {
                    if let Some(raw) = &self.raw {
                        raw.suspend()?;
                    }
                }
                () = end_signals.recv() => return Ok(SessionEnd::Signal),
            }
        }
    }

    async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await?;
        self.stream.flush().await
    }
}

#[cfg(test)]
mod tests;
