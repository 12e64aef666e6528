//! `muster console`: the serial console of an instance in this terminal. It is a telnet server on the instance's node;
//! nothing of it goes through the API.

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

use super::Session;
use crate::api::{Client, io_text};
use crate::output::visible;
use crate::telnet::Telnet;
use crate::terminal::RawTerminal;

/// Ctrl-], which ends it, as in telnet.
const ESCAPE: u8 = 0x1d;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A console greets at once, unless somebody else is on it.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a console must be silent before the next line of a script: guests forget what is typed ahead of a prompt.
const LINE_PAUSE: Duration = Duration::from_secs(1);
const PIECE: usize = 16 * 1024;

/// Arguments of `muster console`.
#[derive(Debug, Args)]
#[command(
    after_help = "Ctrl-] ends it. When standard input is not a terminal, its lines are sent as if they were \
                        typed, and it ends when they have been sent and the console is silent."
)]
pub struct Arguments {
    /// Name or id of the instance
    instance: String,
    /// After the end of standard input, how long the console must be silent
    #[arg(long, value_name = "SECONDS", default_value_t = 2)]
    linger: u32,
}

/// How a conversation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The user has seen enough.
    Left,
    /// Standard input ended and the console fell silent.
    Silent,
    /// The other side hung up.
    Closed,
    /// Somebody told this process to end.
    Signal,
}

pub(super) async fn run(arguments: Arguments, session: &Session) -> anyhow::Result<()> {
    let record = session.client.instance(&arguments.instance).await?.value()?;
    let name = visible(&record.name);
    let port = record.console_port.ok_or_else(|| not_there(&record))?;
    if matches!(record.power_state, PowerState::Off | PowerState::Crashed) {
        return Err(not_there(&record));
    }
    let id = record.uuid.to_string();
    let host = host(&session.client.screen_file(&id).await?)
        .context("the server does not say where the node of the instance is")?;
    let stream = connect(&host, port).await?;
    let interactive = io::stdin().is_terminal();
    let leave = if interactive { "; Ctrl-] ends it" } else { "" };
    eprintln!("console of {name} at {}:{port}{leave}", visible(&host));
    let raw = RawTerminal::new().map_err(|error| anyhow!("cannot take the terminal over: {error}"))?;
    let mut conversation = Conversation {
        stream,
        telnet: Telnet::default(),
        input: read_in_thread(),
        out: io::stdout(),
        interactive,
        linger: Duration::from_secs(arguments.linger.into()),
        raw,
        greeted: false,
    };
    let end = conversation.run().await;
    drop(conversation);
    if interactive {
        eprintln!();
    }
    match end? {
        End::Left | End::Silent => {}
        End::Closed => {
            eprintln!("the console of {name} was closed{}", why_closed(&session.client, &id).await);
        }
        End::Signal => bail!("interrupted"),
    }
    Ok(())
}

fn not_there(record: &InstanceRecord) -> anyhow::Error {
    let name = visible(&record.name);
    match record.power_state {
        PowerState::Off | PowerState::Crashed => anyhow!(
            "instance {name} is {}; `muster instance poweron {}` switches it on, `muster instance log {}` shows what \
             its console showed",
            record.power_state,
            record.uuid,
            record.uuid
        ),
        PowerState::Initial | PowerState::On | PowerState::Paused => {
            anyhow!("instance {name} has no console yet: its state is {}", record.state)
        }
    }
}

/// The node's address, which is in the file for viewers of the screen. Only `system` could ask for it elsewhere.
fn host(file: &str) -> Option<String> {
    let host = file.lines().find_map(|line| line.strip_prefix("host="))?.trim();
    (!host.is_empty()).then(|| host.to_owned())
}

async fn connect(host: &str, port: u16) -> anyhow::Result<TcpStream> {
    let failed = |why: &str| anyhow!("cannot reach the console at {}:{port}: {why}", visible(host));
    match timeout(CONNECT_TIMEOUT, TcpStream::connect((host, port))).await {
        Ok(Ok(stream)) => {
            // Single keys should not wait for more of them.
            let _ = stream.set_nodelay(true);
            Ok(stream)
        }
        Ok(Err(error)) => Err(failed(&io_text(&error))),
        Err(_) => Err(failed("no answer in time; it must be reachable from here, not only the API")),
    }
}

async fn why_closed(client: &Client, id: &str) -> String {
    match client.instance(id).await.and_then(crate::api::Answer::value) {
        Ok(record) => format!(": the instance is {}", record.power_state),
        Err(_) => String::new(),
    }
}

/// What comes from standard input, until it ends. The thread is nobody's to wait for: it may never say anything more.
fn read_in_thread() -> mpsc::Receiver<Vec<u8>> {
    let (to, from) = mpsc::channel(16);
    thread::spawn(move || {
        let mut piece = vec![0; PIECE];
        while let Ok(count) = io::stdin().read(&mut piece) {
            if count == 0 || to.blocking_send(piece[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    from
}

/// The keys that type the lines of a script. What has no end yet is a line, too.
fn lines(input: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    // The key that ends a line is the carriage return.
    let keys = |byte: &u8| if *byte == b'\n' { b'\r' } else { *byte };
    input.split_inclusive(|byte| *byte == b'\n').map(move |line| line.iter().map(keys).collect())
}

/// What is sent of what was typed, and whether the user left.
fn typed(input: &[u8]) -> (Vec<u8>, bool) {
    let end = input.iter().position(|byte| *byte == ESCAPE);
    (Telnet::send(&input[..end.unwrap_or(input.len())]), end.is_some())
}

/// Shows what the guest says. False when nobody reads it any more.
fn show(out: &mut impl io::Write, bytes: &[u8]) -> anyhow::Result<bool> {
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(anyhow!("cannot write the output: {}", io_text(&error))),
    }
}

/// The next of a signal that need not exist.
async fn next(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

#[derive(Debug)]
struct Conversation<W> {
    stream: TcpStream,
    telnet: Telnet,
    input: mpsc::Receiver<Vec<u8>>,
    out: W,
    interactive: bool,
    linger: Duration,
    raw: Option<RawTerminal>,
    /// Whether the other side has said anything.
    greeted: bool,
}

impl<W: io::Write> Conversation<W> {
    async fn run(&mut self) -> anyhow::Result<End> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hang_up = signal(SignalKind::hangup())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut quit = signal(SignalKind::quit())?;
        // Only with a terminal is there something to put right before this process stops.
        let stop = SignalKind::from_raw(nix::sys::signal::Signal::SIGTSTP as i32);
        let mut stop = self.raw.is_some().then(|| signal(stop)).transpose()?;
        let mut input_ended = false;
        // Lines of a script that are not typed yet.
        let mut waiting = VecDeque::new();
        let greeting_due = Instant::now() + GREETING_TIMEOUT;
        let mut told = false;
        let mut heard = Instant::now();
        let mut piece = vec![0; PIECE];
        loop {
            tokio::select! {
                read = self.stream.read(&mut piece) => {
                    let Some(count) = read.ok().filter(|count| *count > 0) else { return Ok(End::Closed) };
                    heard = Instant::now();
                    if !self.take(&piece[..count]).await? {
                        return Ok(End::Left);
                    }
                }
                input = self.input.recv(), if !input_ended && waiting.is_empty() => {
                    match input {
                        None => input_ended = true,
                        Some(input) if self.interactive => {
                            let (sent, left) = typed(&input);
                            if self.stream.write_all(&sent).await.is_err() {
                                return Ok(End::Closed);
                            }
                            if left {
                                return Ok(End::Left);
                            }
                        }
                        Some(input) => waiting.extend(lines(&input)),
                    }
                }
                () = sleep_until(heard + LINE_PAUSE), if self.greeted && !waiting.is_empty() => {
                    heard = Instant::now();
                    let line = waiting.pop_front().unwrap_or_default();
                    if self.stream.write_all(&Telnet::send(&line)).await.is_err() {
                        return Ok(End::Closed);
                    }
                }
                () = sleep_until(greeting_due), if !self.greeted && !told => {
                    if !self.interactive {
                        bail!("the console does not answer; somebody else may be on it");
                    }
                    told = true;
                    eprint!("the console does not answer; somebody else may be on it\r\n");
                }
                () = sleep_until(heard + self.linger), if input_ended && waiting.is_empty() => {
                    return Ok(if self.interactive { End::Left } else { End::Silent });
                }
                () = next(&mut stop) => {
                    if let Some(raw) = &self.raw {
                        raw.suspend()?;
                    }
                }
                _ = terminate.recv() => return Ok(End::Signal),
                _ = hang_up.recv() => return Ok(End::Signal),
                _ = interrupt.recv() => return Ok(End::Signal),
                _ = quit.recv() => return Ok(End::Signal),
            }
        }
    }

    /// Takes what the other side said. False when nobody wants to see it.
    async fn take(&mut self, bytes: &[u8]) -> anyhow::Result<bool> {
        self.greeted = true;
        let (mut shown, mut answer) = (vec![], vec![]);
        self.telnet.receive(bytes, &mut shown, &mut answer);
        // A side that is gone is noticed with the next read.
        let _ = self.stream.write_all(&answer).await;
        if shown.is_empty() { Ok(true) } else { show(&mut self.out, &shown) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_is_named_by_the_file_for_viewers() {
        let file = "[virt-viewer]\ntype=spice\nhost=10.0.0.3\nport=31000\nhost-subject=C=x\n";
        assert_eq!(host(file).as_deref(), Some("10.0.0.3"));
        assert_eq!(host("[virt-viewer]\nhost=\n"), None);
        assert_eq!(host("null"), None);
    }

    #[test]
    fn the_escape_ends_it_only_when_it_was_typed() {
        assert_eq!(typed(b"ls\r"), (b"ls\r".to_vec(), false));
        assert_eq!(typed(b"ab\x1dcd"), (b"ab".to_vec(), true));
        assert_eq!(lines(b"ab\x1d\n").collect::<Vec<_>>(), [b"ab\x1d\r"]);
    }

    #[test]
    fn the_lines_of_a_script_are_typed_one_by_one() {
        let typed: Vec<Vec<u8>> = lines(b"root\n\nls").collect();
        assert_eq!(typed, [&b"root\r"[..], b"\r", b"ls"]);
        assert_eq!(lines(b"").count(), 0);
    }

    /// A conversation with a guest that this listener will be, and how to type.
    async fn converse(interactive: bool) -> (Conversation<Vec<u8>>, TcpStream, mpsc::Sender<Vec<u8>>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = connect("127.0.0.1", listener.local_addr().unwrap().port()).await.unwrap();
        let (guest, _) = listener.accept().await.unwrap();
        let (keys, input) = mpsc::channel(4);
        let conversation = Conversation {
            stream,
            telnet: Telnet::default(),
            input,
            out: vec![],
            interactive,
            linger: Duration::from_millis(50),
            raw: None,
            greeted: false,
        };
        (conversation, guest, keys)
    }

    #[tokio::test]
    async fn what_is_typed_reaches_the_guest_until_the_escape() {
        let (mut conversation, mut guest, keys) = converse(true).await;
        let guest = async move {
            // Suppressing go ahead is offered, and taken.
            guest.write_all(b"\xff\xfb\x03login: ").await.unwrap();
            let mut answer = [0; 3];
            guest.read_exact(&mut answer).await.unwrap();
            keys.send(b"root\r".to_vec()).await.unwrap();
            keys.send(b"ls\x1drest".to_vec()).await.unwrap();
            let mut all = vec![];
            guest.read_to_end(&mut all).await.unwrap();
            (answer, all)
        };
        let talk = async move {
            let end = conversation.run().await.unwrap();
            (end, conversation.out)
        };
        let ((end, shown), (answer, all)) = tokio::join!(talk, guest);
        assert_eq!((end, shown.as_slice(), &answer), (End::Left, &b"login: "[..], b"\xff\xfd\x03"));
        assert_eq!(all, b"root\rls");
    }

    #[tokio::test]
    async fn a_script_ends_when_it_is_typed_and_the_guest_is_silent() {
        let (mut conversation, mut guest, keys) = converse(false).await;
        let guest = async move {
            guest.write_all(b"\xff\xfb\x01login: ").await.unwrap();
            keys.send(b"root\n".to_vec()).await.unwrap();
            drop(keys);
            let mut got = [0; 8];
            guest.read_exact(&mut got).await.unwrap();
            guest.write_all(b"# ").await.unwrap();
            (got, guest)
        };
        let talk = async {
            let end = conversation.run().await.unwrap();
            (end, conversation.out.clone())
        };
        let ((end, shown), (got, _guest)) = tokio::join!(talk, guest);
        assert_eq!((end, shown.as_slice(), &got), (End::Silent, &b"login: # "[..], b"\xff\xfd\x01root\r"));
    }

    #[tokio::test]
    async fn a_console_that_hangs_up_ends_it() {
        let (mut conversation, guest, _keys) = converse(true).await;
        drop(guest);
        assert_eq!(conversation.run().await.unwrap(), End::Closed);
    }
}
