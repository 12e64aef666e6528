//! `muster console`: the serial console of an instance in this terminal. The client connects directly to the Telnet
//! server on the instance's node, not through the API.

use std::collections::VecDeque;
use std::io::{self, IsTerminal as _, Read as _};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use muster_types::instance::{InstanceRecord, PowerState};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use super::lookup::{NamedType, resolve};
use super::session::Session;
use crate::api::Client;
use crate::error_text::io_error_text;
use crate::output::escape_control;
use crate::telnet::Telnet;
use crate::terminal::RawTerminal;

/// Ctrl-], which closes the console as in telnet.
const ESCAPE: u8 = 0x1d;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A console negotiates immediately, unless another client is connected.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the console must be silent before the next line of a script: guests drop input before a prompt.
const LINE_DELAY: Duration = Duration::from_secs(1);
const NO_RESPONSE: &str = "the console does not respond; another client may be connected";
const BUFFER_SIZE: usize = 16 * 1024;

/// Arguments of `muster console`.
#[derive(Debug, Args)]
#[command(
    after_help = "Ctrl-] closes the console. If standard input is not a terminal, its lines are sent as if they were typed, \
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
    let record = session.client.instance(&arguments.instance).await?.value()?;
    let name = escape_control(&record.name);
    let port = record.console_port.ok_or_else(|| no_console_error(&record))?;
    if matches!(record.power_state, PowerState::Off | PowerState::Crashed) {
        return Err(no_console_error(&record));
    }
    let id = record.uuid.to_string();
    let host = parse_host(&session.client.viewer_file(&id).await?)
        .context("the server does not return the address of the instance's node")?;
    let stream = connect(&host, port).await?;
    let interactive = io::stdin().is_terminal();
    let hint = if interactive { "; press Ctrl-] to close it" } else { "" };
    eprintln!("console of {name} at {}:{port}{hint}", escape_control(&host));
    let raw =
        RawTerminal::new().map_err(|error| anyhow!("cannot switch the terminal to raw mode: {error}"))?;
    let mut console = ConsoleSession {
        stream,
        telnet: Telnet::default(),
        input: read_in_thread(),
        out: io::stdout(),
        interactive,
        linger: Duration::from_secs(arguments.linger.into()),
        raw,
        responded: false,
    };
    let end = console.run().await;
    drop(console);
    if interactive {
        eprintln!();
    }
    match end? {
        SessionEnd::Left | SessionEnd::Silent => {}
        SessionEnd::Closed => {
            eprintln!("the console of {name} was closed{}", closing_reason(&session.client, &id).await);
        }
        SessionEnd::Signal => bail!("interrupted"),
    }
    Ok(())
}

fn no_console_error(record: &InstanceRecord) -> anyhow::Error {
    let name = escape_control(&record.name);
    match record.power_state {
        PowerState::Off | PowerState::Crashed => anyhow!(
            "instance {name} is {}; start it with `muster instance poweron {}`, or read its console log with `muster \
             instance log {}`",
            record.power_state,
            record.uuid,
            record.uuid
        ),
        PowerState::Initial | PowerState::On | PowerState::Paused => {
            anyhow!("instance {name} has no console yet: its state is {}", record.state)
        }
    }
}

/// Returns the node's address from the viewer file, because only `system` may read node records.
fn parse_host(file: &str) -> Option<String> {
    let host = file.lines().find_map(|line| line.strip_prefix("host="))?.trim();
    (!host.is_empty()).then(|| host.to_owned())
}

async fn connect(host: &str, port: u16) -> anyhow::Result<TcpStream> {
    let failed =
        |reason: &str| anyhow!("cannot reach the console at {}:{port}: {reason}", escape_control(host));
    match timeout(CONNECT_TIMEOUT, TcpStream::connect((host, port))).await {
        Ok(Ok(stream)) => {
            // Send single keystrokes immediately.
            let _ = stream.set_nodelay(true);
            Ok(stream)
        }
        Ok(Err(error)) => Err(failed(&io_error_text(&error))),
        Err(_) => {
            Err(failed("the connection timed out; the node itself must be reachable, not only the API"))
        }
    }
}

async fn closing_reason(client: &Client, id: &str) -> String {
    match client.instance(id).await.and_then(crate::api::ApiResponse::value) {
        Ok(record) => format!(": the instance is {}", record.power_state),
        Err(_) => String::new(),
    }
}

/// Reads standard input in a thread that is never joined: a read may block forever.
fn read_in_thread() -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(16);
    thread::spawn(move || {
        let mut buffer = vec![0; BUFFER_SIZE];
        while let Ok(count) = io::stdin().read(&mut buffer) {
            if count == 0 || sender.blocking_send(buffer[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Splits a script into lines as they are typed. An unterminated last line counts.
fn script_lines(input: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    // The Enter key sends a carriage return.
    let keys = |byte: &u8| if *byte == b'\n' { b'\r' } else { *byte };
    input.split_inclusive(|byte| *byte == b'\n').map(move |line| line.iter().map(keys).collect())
}

/// Encodes typed input up to the escape key, and returns whether that was pressed.
fn encode_typed(input: &[u8]) -> (Vec<u8>, bool) {
    let end = input.iter().position(|byte| *byte == ESCAPE);
    (Telnet::encode(&input[..end.unwrap_or(input.len())]), end.is_some())
}

/// Writes output of the guest. Returns false if the reader closed the pipe.
fn write_output(out: &mut impl io::Write, bytes: &[u8]) -> anyhow::Result<bool> {
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(anyhow!("cannot write the output: {}", io_error_text(&error))),
    }
}

/// Waits for a signal, or forever if there is none.
async fn next_signal(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

/// The signals that end a console session.
struct EndSignals([Signal; 4]);

impl EndSignals {
    fn new() -> io::Result<Self> {
        Ok(Self([
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
            signal(SignalKind::interrupt())?,
            signal(SignalKind::quit())?,
        ]))
    }

    async fn recv(&mut self) {
        let [terminate, hangup, interrupt, quit] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
            _ = interrupt.recv() => {}
            _ = quit.recv() => {}
        }
    }
}

#[derive(Debug)]
struct ConsoleSession<W> {
    stream: TcpStream,
    telnet: Telnet,
    input: mpsc::Receiver<Vec<u8>>,
    out: W,
    interactive: bool,
    linger: Duration,
    raw: Option<RawTerminal>,
    /// Whether the server has sent anything.
    responded: bool,
}

impl<W: io::Write> ConsoleSession<W> {
    async fn run(&mut self) -> anyhow::Result<SessionEnd> {
        let mut end_signals = EndSignals::new()?;
        // Only a raw terminal must be restored before the process stops.
        let stop = SignalKind::from_raw(nix::sys::signal::Signal::SIGTSTP as i32);
        let mut stop = self.raw.is_some().then(|| signal(stop)).transpose()?;
        let mut input_ended = false;
        // Lines of a script that have not been sent yet.
        let mut pending_lines = VecDeque::new();
        let greeting_deadline = Instant::now() + GREETING_TIMEOUT;
        let mut warned = false;
        let mut last_output = Instant::now();
        let mut buffer = vec![0; BUFFER_SIZE];
        loop {
            tokio::select! {
                read = self.stream.read(&mut buffer) => {
                    let Some(count) = read.ok().filter(|count| *count > 0) else { return Ok(SessionEnd::Closed) };
                    last_output = Instant::now();
                    if !self.handle_output(&buffer[..count]).await? {
                        return Ok(SessionEnd::Left);
                    }
                }
                input = self.input.recv(), if !input_ended && pending_lines.is_empty() => {
                    match input {
                        None => input_ended = true,
                        Some(input) if self.interactive => {
                            let (encoded, escape) = encode_typed(&input);
                            if self.stream.write_all(&encoded).await.is_err() {
                                return Ok(SessionEnd::Closed);
                            }
                            if escape {
                                return Ok(SessionEnd::Left);
                            }
                        }
                        Some(input) => pending_lines.extend(script_lines(&input)),
                    }
                }
                () = sleep_until(last_output + LINE_DELAY), if self.responded && !pending_lines.is_empty() => {
                    last_output = Instant::now();
                    let line = pending_lines.pop_front().unwrap_or_default();
                    if self.stream.write_all(&Telnet::encode(&line)).await.is_err() {
                        return Ok(SessionEnd::Closed);
                    }
                }
                () = sleep_until(greeting_deadline), if !self.responded && !warned => {
                    if !self.interactive {
                        bail!(NO_RESPONSE);
                    }
                    warned = true;
                    eprint!("{NO_RESPONSE}\r\n");
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

    /// Handles bytes from the server. Returns false if the reader of standard output closed the pipe.
    async fn handle_output(&mut self, bytes: &[u8]) -> anyhow::Result<bool> {
        self.responded = true;
        let (mut data, mut reply) = (vec![], vec![]);
        self.telnet.decode(bytes, &mut data, &mut reply);
        // The next read reports a closed connection.
        let _ = self.stream.write_all(&reply).await;
        if data.is_empty() { Ok(true) } else { write_output(&mut self.out, &data) }
    }
}

#[cfg(test)]
mod tests;
