//! The user's terminal in interactive commands: raw mode, input, output and signals.

use std::io::{self, IsTerminal as _, Read as _};
use std::thread;

use anyhow::anyhow;
use nix::sys::signal::{self as unix_signal, kill};
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use nix::unistd::Pid;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::error_text::io_error_text;

const BUFFER_SIZE: usize = 16 * 1024;

/// Keeps the terminal in raw mode while it exists. Restores the previous mode on drop, also after a panic.
#[derive(Debug)]
pub(crate) struct RawTerminal(Termios);

impl RawTerminal {
    /// Enables raw mode. Returns `None` if standard input is not a terminal.
    pub(crate) fn new() -> nix::Result<Option<Self>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let terminal = Self(tcgetattr(io::stdin())?);
        terminal.enable_raw_mode()?;
        Ok(Some(terminal))
    }

    fn enable_raw_mode(&self) -> nix::Result<()> {
        let mut raw = self.0.clone();
        cfmakeraw(&mut raw);
        // Keeps pending input.
        tcsetattr(io::stdin(), SetArg::TCSADRAIN, &raw)
    }

    fn restore(&self) {
        // Fails only if the terminal was closed.
        let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, &self.0);
    }

    /// Stops this process with the terminal restored; returns when the process is continued.
    pub(crate) fn suspend(&self) -> nix::Result<()> {
        self.restore();
        kill(Pid::this(), unix_signal::Signal::SIGSTOP)?;
        self.enable_raw_mode()
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        self.restore();
    }
}

/// Reads standard input in a thread that is never joined: a read may block forever.
pub(crate) fn read_in_thread() -> mpsc::Receiver<Vec<u8>> {
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

/// Writes output of the guest. Returns false if the reader closed the pipe.
pub(crate) fn write_output(out: &mut impl io::Write, bytes: &[u8]) -> anyhow::Result<bool> {
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(anyhow!("cannot write the output: {}", io_error_text(&error))),
    }
}

/// The signals that end an interactive session.
pub(crate) struct EndSignals([Signal; 4]);

impl EndSignals {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self([
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
            signal(SignalKind::interrupt())?,
            signal(SignalKind::quit())?,
        ]))
    }

    pub(crate) async fn recv(&mut self) {
        let [terminate, hangup, interrupt, quit] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
            _ = interrupt.recv() => {}
            _ = quit.recv() => {}
        }
    }
}
