//! Parsers of arguments, and secrets that are read instead of given.

use std::convert::Infallible;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::PathBuf;

use anyhow::bail;
use clap::builder::{OsStringValueParser, TypedValueParser};
use muster_types::key::Secret;
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};

use crate::error_text::io_error_text;

/// Accepts any path, including an empty one from an empty environment variable.
pub(super) fn path_parser() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// Wraps a secret from the command line.
pub(super) fn parse_secret(text: &str) -> Result<Secret, Infallible> {
    Ok(Secret::new(text))
}

/// Quotes a word for a POSIX shell.
pub(super) fn shell_quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Returns the given secret, or prompts for it if it is `-`: other users of the host can see arguments.
pub(super) fn given_or_prompted(secret: Secret, key_name: &str) -> anyhow::Result<Secret> {
    if secret.expose() == "-" { prompt_secret(&format!("secret of key {key_name}")) } else { Ok(secret) }
}

/// Reads a secret from the terminal without echo, or from the first line of standard input.
pub(super) fn prompt_secret(prompt: &str) -> anyhow::Result<Secret> {
    let mut line = String::new();
    let read = if io::stdin().is_terminal() {
        let mut out = io::stderr();
        write!(out, "{prompt}: ").and_then(|()| out.flush())?;
        let no_echo = NoEcho::new()?;
        let read = io::stdin().read_line(&mut line);
        drop(no_echo);
        // The line break that the user typed was not echoed either.
        crate::message!("");
        read
    } else {
        io::stdin().read_line(&mut line)
    };
    if let Err(error) = read {
        bail!("cannot read the key: {}", io_error_text(&error));
    }
    match line.trim_end_matches(['\r', '\n']) {
        "" => bail!("no key given"),
        secret => Ok(Secret::new(secret)),
    }
}

/// Asks the user to confirm on the terminal. Fails if standard input is not a terminal.
pub(super) fn prompt_confirmation(question: &str) -> anyhow::Result<bool> {
    if !io::stdin().is_terminal() {
        bail!("{question} standard input is not a terminal: give --yes to confirm");
    }
    let mut out = io::stderr();
    write!(out, "{question} [y/N] ").and_then(|()| out.flush())?;
    let mut line = String::new();
    io::stdin().read_line(&mut line)?;
    Ok(matches!(line.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}

/// Disables the echo of the terminal while it exists.
struct NoEcho(Termios);

impl NoEcho {
    fn new() -> nix::Result<Self> {
        let previous = tcgetattr(io::stdin())?;
        let mut no_echo = previous.clone();
        no_echo.local_flags.remove(LocalFlags::ECHO);
        tcsetattr(io::stdin(), SetArg::TCSAFLUSH, &no_echo)?;
        Ok(Self(previous))
    }
}

impl Drop for NoEcho {
    fn drop(&mut self) {
        // Fails only if the terminal was closed.
        let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &self.0);
    }
}
