//! The user's terminal, handed over to somebody else for a time.

use std::io::{self, IsTerminal as _};

use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use nix::unistd::Pid;

/// Every key is passed on as it is typed, and what is shown is shown as it is, while this lives. However that ends, also
/// by a panic, the terminal is as it was before.
#[derive(Debug)]
pub(crate) struct RawTerminal(Termios);

impl RawTerminal {
    /// Takes the terminal over; nothing if standard input is none.
    pub(crate) fn new() -> nix::Result<Option<Self>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let taken = Self(tcgetattr(io::stdin())?);
        taken.take()?;
        Ok(Some(taken))
    }

    fn take(&self) -> nix::Result<()> {
        let mut raw = self.0.clone();
        cfmakeraw(&mut raw);
        // What was typed ahead is not lost.
        tcsetattr(io::stdin(), SetArg::TCSADRAIN, &raw)
    }

    fn give_back(&self) {
        // Nothing can be done about a terminal that went away.
        let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, &self.0);
    }

    /// Stops this process with the terminal as it was, as the user asked; returns when it goes on.
    pub(crate) fn suspend(&self) -> nix::Result<()> {
        self.give_back();
        kill(Pid::this(), Signal::SIGSTOP)?;
        self.take()
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        self.give_back();
    }
}
