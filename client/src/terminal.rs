//! Raw mode of the user's terminal.

use std::io::{self, IsTerminal as _};

use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use nix::unistd::Pid;

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
        kill(Pid::this(), Signal::SIGSTOP)?;
        self.enable_raw_mode()
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        self.restore();
    }
}
