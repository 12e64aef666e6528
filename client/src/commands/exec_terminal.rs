//! `muster exec -t`: a command with a terminal in a guest, in this terminal.

use std::io::{self, IsTerminal as _, Write};
use std::time::Duration;

use anyhow::{anyhow, bail};
use bytes::BytesMut;
use muster_types::terminal::{
    DEFAULT_TERMINAL_SIZE, KEEPALIVE_INTERVAL, SILENCE_TIMEOUT, TerminalFrame, TerminalRequest, TerminalSize,
    take_frame,
};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::agent_wait::{ReadinessArguments, wait_until_ready};
use super::wait::PollTimer;
use crate::api::Client;
use crate::output::escape_control;
use crate::terminal::{EndSignals, RawTerminal, read_in_thread, write_output};

/// The terminal type if the environment has none.
const DEFAULT_TERM: &str = "xterm";
const READ_SIZE: usize = 16 * 1024;

/// Runs a command line and returns its exit code.
pub(super) async fn run(
    client: &Client,
    instance: &str,
    command_line: String,
    stdin: bool,
    readiness: ReadinessArguments,
) -> anyhow::Result<i32> {
    let interactive = io::stdin().is_terminal();
    if stdin && !interactive {
        bail!("standard input is not a terminal; use -i without -t to pass it to the command");
    }
    wait_until_ready(client, instance, &mut PollTimer::new(readiness.wait)).await?;
    let term = std::env::var("TERM").ok().filter(|term| !term.is_empty());
    let request = TerminalRequest {
        command_line,
        term: term.unwrap_or_else(|| DEFAULT_TERM.to_owned()),
        size: terminal_size(),
    };
    let stream = client.open_terminal(instance, &request).await?;
    let raw =
        RawTerminal::new().map_err(|error| anyhow!("cannot switch the terminal to raw mode: {error}"))?;
    let input = interactive.then(read_in_thread);
    let result = relay(stream, input, io::stdout()).await;
    drop(raw);
    result
}

/// Returns the size of this terminal.
fn terminal_size() -> TerminalSize {
    match terminal_size::terminal_size() {
        Some((columns, rows)) => TerminalSize { rows: rows.0, columns: columns.0 },
        None => DEFAULT_TERMINAL_SIZE,
    }
}

/// Finds the escape sequence that leaves a session: Enter, tilde, dot, as in ssh.
#[derive(Debug, Default)]
struct EscapeDetector(usize);

impl EscapeDetector {
    /// Returns whether the sequence is complete.
    fn feed(&mut self, input: &[u8]) -> bool {
        for byte in input {
            self.0 = match (self.0, byte) {
                (_, b'\r' | b'\n') => 1,
                (1, b'~') => 2,
                (2, b'.') => return true,
                _ => 0,
            };
        }
        false
    }
}

/// Moves data between this terminal and a guest, and returns the exit code of the command.
async fn relay<S: AsyncRead + AsyncWrite>(
    stream: S,
    mut input: Option<mpsc::Receiver<Vec<u8>>>,
    mut out: impl Write,
) -> anyhow::Result<i32> {
    let (mut reader, mut writer) = split(stream);
    let (mut end_signals, mut resized) = (EndSignals::new()?, signal(SignalKind::window_change())?);
    let mut escape = EscapeDetector::default();
    let (keepalive, silence) =
        (Duration::from_secs(KEEPALIVE_INTERVAL), Duration::from_secs(SILENCE_TIMEOUT));
    let (mut last_sent, mut last_received) = (Instant::now(), Instant::now());
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(READ_SIZE);
        let frame = tokio::select! {
            read = reader.read_buf(&mut buffer) => {
                if !read.is_ok_and(|count| count > 0) {
                    bail!("the server closed the connection");
                }
                last_received = Instant::now();
                if let Some(code) = handle_frames(&mut buffer, &mut out)? {
                    return Ok(code);
                }
                continue;
            }
            typed = next_input(&mut input) => {
                if escape.feed(&typed) {
                    bail!("left the session");
                }
                TerminalFrame::Data(typed.into())
            }
            _ = resized.recv() => TerminalFrame::Resize(terminal_size()),
            () = sleep_until(last_sent + keepalive) => TerminalFrame::keepalive(),
            () = sleep_until(last_received + silence) => bail!("the server does not respond"),
            () = end_signals.recv() => bail!("interrupted"),
        };
        last_sent = Instant::now();
        let mut encoded = BytesMut::new();
        frame.encode(&mut encoded);
        // The next read returns the reason why the connection is closed.
        let _ = writer.write_all(&encoded).await;
    }
}

/// Waits for input. Does not return without an input, or after its end.
async fn next_input(input: &mut Option<mpsc::Receiver<Vec<u8>>>) -> Vec<u8> {
    if let Some(receiver) = input {
        if let Some(typed) = receiver.recv().await {
            return typed;
        }
        *input = None;
    }
    std::future::pending().await
}

/// Writes the received output. Returns the exit code once it has arrived.
fn handle_frames(buffer: &mut BytesMut, out: &mut impl Write) -> anyhow::Result<Option<i32>> {
    while let Some(frame) = take_frame(buffer)? {
        match frame {
            TerminalFrame::Data(bytes) if bytes.is_empty() => {}
            TerminalFrame::Data(bytes) => {
                if !write_output(out, &bytes)? {
                    bail!("the output was closed");
                }
            }
            TerminalFrame::Exited(code) => return Ok(Some(code)),
            TerminalFrame::Failed(reason) => bail!("{}", escape_control(&reason)),
            TerminalFrame::Resize(_) => {}
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn relay_frames(frames: &[TerminalFrame]) -> (anyhow::Result<i32>, Vec<u8>) {
        let (client, mut server) = tokio::io::duplex(1 << 16);
        let mut bytes = BytesMut::new();
        frames.iter().for_each(|frame| frame.encode(&mut bytes));
        server.write_all(&bytes).await.unwrap();
        drop(server);
        let mut out = vec![];
        (relay(client, None, &mut out).await, out)
    }

    #[tokio::test]
    async fn writes_output_and_returns_the_exit_code() {
        let output = TerminalFrame::Data("hello\r\n".into());
        let (code, out) =
            relay_frames(&[TerminalFrame::keepalive(), output.clone(), TerminalFrame::Exited(7)]).await;
        assert_eq!((code.unwrap(), out.as_slice()), (7, &b"hello\r\n"[..]));
        let (failed, _) =
            relay_frames(&[output.clone(), TerminalFrame::Failed("the guest\u{1b} was reset".into())]).await;
        assert!(failed.unwrap_err().to_string().starts_with("the guest"));
        let (closed, _) = relay_frames(&[output]).await;
        assert_eq!(closed.unwrap_err().to_string(), "the server closed the connection");
    }

    #[tokio::test]
    async fn sends_input_and_leaves_after_the_escape_sequence() {
        let (client, mut server) = tokio::io::duplex(1 << 16);
        let (sender, input) = mpsc::channel(8);
        for typed in ["ls\r", "\u{3}", "a~.\r", "~", "."] {
            sender.send(typed.as_bytes().to_vec()).await.unwrap();
        }
        let left = relay(client, Some(input), io::sink()).await;
        assert_eq!(left.unwrap_err().to_string(), "left the session");
        let mut buffer = BytesMut::new();
        while server.read_buf(&mut buffer).await.unwrap() > 0 {}
        let mut typed = vec![];
        while let Some(TerminalFrame::Data(bytes)) = take_frame(&mut buffer).unwrap() {
            typed.extend_from_slice(&bytes);
        }
        assert_eq!(typed, b"ls\r\x03a~.\r~");
    }
}
