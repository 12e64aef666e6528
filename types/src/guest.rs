//! The interface between the control plane and the agents inside VMs.
//!
//! Guests are not trusted: invalid data from a guest fails only the request that it answers.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use bytes::Bytes;
use futures_core::Stream;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::ids::{AgentOperationId, InstanceId};
use crate::object::string_enum;
use crate::storage::ByteStream;
use crate::terminal::{TerminalRequest, TerminalSize};
use crate::vm::ChangeStream;

/// The last known state of a guest's agent.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GuestReport {
    pub state: AgentState,
    /// Unix time at which the agent started.
    pub agent_start_time: Option<f64>,
    /// Unix time at which the guest booted, as reported by the guest.
    pub system_boot_time: Option<f64>,
    /// Identifies the current boot of the guest. It changes with every reboot.
    pub boot_id: Option<String>,
    /// The version that the agent reports.
    pub agent_version: Option<String>,
}

/// Whether a guest's agent accepts requests.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum AgentState {
    /// The agent has never sent anything.
    #[default]
    NoContact,
    /// The agent has stopped answering.
    Unresponsive,
    /// The agent has just started.
    Startup,
    /// The agent announced that it is stopping.
    Stopped,
    /// The agent's version is older than the oldest supported one.
    TooOld,
    /// The agent answers, but the guest has not finished booting; holds the guest's name for that state.
    NotReady(String),
    Ready,
    /// The guest is up, but some of its services failed.
    Degraded,
}

impl AgentState {
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready | Self::Degraded)
    }
}

impl From<&str> for AgentState {
    /// Parses the text of the API and the database. Every text that starts with `ready` counts as ready.
    fn from(text: &str) -> Self {
        if text == "ready" {
            return Self::Ready;
        }
        if text.starts_with("ready") {
            return Self::Degraded;
        }
        let reason = text.strip_prefix("not ready (").and_then(|text| text.strip_suffix(')'));
        match reason.unwrap_or(text) {
            "no contact" => Self::NoContact,
            "unresponsive" => Self::Unresponsive,
            "agent startup" => Self::Startup,
            "agent stopped" => Self::Stopped,
            "agent too old" => Self::TooOld,
            reason => Self::NotReady(reason.to_owned()),
        }
    }
}

impl fmt::Display for AgentState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoContact => f.write_str("not ready (no contact)"),
            Self::Unresponsive => f.write_str("not ready (unresponsive)"),
            Self::Startup => f.write_str("not ready (agent startup)"),
            Self::Stopped => f.write_str("not ready (agent stopped)"),
            Self::TooOld => f.write_str("not ready (agent too old)"),
            Self::NotReady(state) => write!(f, "not ready ({state})"),
            Self::Ready => f.write_str("ready"),
            Self::Degraded => f.write_str("ready (degraded)"),
        }
    }
}

/// A command line for the shell of a guest. A second call with the same key waits for the first one's result.
/// See docs/decisions/0022.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestCommand {
    pub key: CommandKey,
    pub line: String,
    /// The [`GuestReport::boot_id`] during which the command may already have been sent, by an earlier process or over
    /// a connection that broke. The agent then resumes the command and never starts it; if it cannot, the call fails
    /// with [`GuestError::UnknownCommand`], [`GuestError::Restarted`] or [`GuestError::StatelessAgent`].
    pub sent_boot_id: Option<String>,
}

/// Identifies a command: an agent operation and the index of the command within it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommandKey {
    pub operation: AgentOperationId,
    pub index: u32,
}

impl fmt::Display for CommandKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.operation, self.index)
    }
}

/// The result of a command that has exited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandResult {
    pub return_code: i32,
    pub stdout: CommandOutput,
    pub stderr: CommandOutput,
}

/// One output stream of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandOutput {
    /// The complete output.
    Inline(Bytes),
    /// The agent keeps the output for [`GuestApi::output`]. `truncated` if the command wrote more than the agent keeps.
    Stored { size: u64, truncated: bool },
}

string_enum! {
    /// An output stream of a command.
    OutputName {
        Stdout = "stdout",
        Stderr = "stderr",
    }
}

/// File metadata as reported by a guest.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GuestFileInfo {
    pub mode: u32,
    pub size: u64,
    pub uid: u32,
    pub gid: u32,
    pub atime: f64,
    pub mtime: f64,
    pub ctime: f64,
}

/// Why a request to a guest failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GuestError {
    /// The agent cannot be reached, or the connection broke. The request may have been executed.
    #[error("{0}")]
    Unreachable(String),
    /// A resent command: the guest or its agent was restarted since it was sent. The command may have run, completely or
    /// in part, and its result is lost.
    #[error("{0}")]
    Restarted(String),
    /// A resent command: the agent never received it, so it did not run.
    #[error("the guest's agent never received the command")]
    UnknownCommand,
    /// A resent command: the agent keeps no record of commands, so it may or may not have run.
    #[error("the guest's agent does not remember commands")]
    StatelessAgent,
    /// The guest refused or failed; holds the guest's reason.
    #[error("{0}")]
    Refused(String),
    /// The host failed, for example to read the data that it was to send.
    #[error("{0}")]
    HostFailed(String),
}

/// The future returned by the methods of [`GuestApi`].
pub type GuestFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, GuestError>> + Send + 'a>>;

/// An interactive session with a command in a guest. Dropping the output ends the session and its processes.
pub struct GuestTerminal {
    pub input: Box<dyn TerminalInput>,
    pub output: TerminalOutputStream,
}

impl fmt::Debug for GuestTerminal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GuestTerminal")
    }
}

/// The input of an interactive session.
pub trait TerminalInput: Send {
    /// Sends typed bytes, after the guest has accepted enough of the earlier ones. Some of these must have been read from
    /// the output before.
    fn send(&mut self, bytes: Bytes) -> GuestFuture<'_, ()>;

    fn resize(&mut self, size: TerminalSize) -> GuestFuture<'_, ()>;
}

/// What an interactive session yields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TerminalOutput {
    Bytes(Bytes),
    /// The command has exited with this code. This is the last item.
    Exited(i32),
}

/// The output of an interactive session. An error is the last item.
pub type TerminalOutputStream = Pin<Box<dyn Stream<Item = Result<TerminalOutput, GuestError>> + Send>>;

/// Access to the agents of all guests on a node.
///
/// A guest serves several requests at a time. Dropping a future or a stream cancels it: an unfinished transfer is aborted
/// and its partial file in the guest is removed, but a command keeps running until [`GuestApi::cancel`].
pub trait GuestApi: Send + Sync {
    /// Yields the ID of an instance whenever the report of its guest may have changed. A new stream ends the previous one.
    fn changes(&self) -> ChangeStream;

    /// Returns the state of a guest's agent, or `None` if the VM is off or has no agent channel.
    fn report(&self, id: InstanceId) -> Option<GuestReport>;

    /// Returns the facts that the guest reports: distribution, mounts, SSH host keys.
    fn facts(&self, id: InstanceId) -> GuestFuture<'_, Map<String, Value>>;

    /// Runs a command line in the guest's shell and waits for it to exit, without a timeout. An agent that remembers
    /// commands keeps the result until [`GuestApi::forget`].
    fn execute<'a>(&'a self, id: InstanceId, command: &'a GuestCommand) -> GuestFuture<'a, CommandResult>;

    /// Streams the stored output of a command that has exited and is not forgotten.
    fn output(&self, id: InstanceId, key: CommandKey, name: OutputName) -> GuestFuture<'_, ByteStream>;

    /// Lets the agent discard the result of a command. This is best effort and does not wait for the agent.
    fn forget(&self, id: InstanceId, key: CommandKey) -> GuestFuture<'_, ()>;

    /// Kills a command with all its child processes if it still runs, and discards its result.
    fn cancel(&self, id: InstanceId, key: CommandKey) -> GuestFuture<'_, ()>;

    /// Writes a file of `size` bytes, atomically where the agent supports it. The stream is read only as fast as the guest
    /// accepts the data. The file never exists with permissions other than `mode`; without a mode a new file gets 0644
    /// and an existing file keeps its permissions.
    fn put<'a>(
        &'a self,
        id: InstanceId,
        path: &'a str,
        size: u64,
        mode: Option<u32>,
        data: ByteStream,
    ) -> GuestFuture<'a, ()>;

    /// Changes the permissions of a file.
    fn change_mode<'a>(&'a self, id: InstanceId, path: &'a str, mode: u32) -> GuestFuture<'a, ()>;

    /// Reads a file. The stream reports [`GuestError::Unreachable`] as [`crate::Error::Unavailable`] and
    /// [`GuestError::Refused`] as [`crate::Error::Conflict`].
    fn get<'a>(&'a self, id: InstanceId, path: &'a str) -> GuestFuture<'a, (GuestFileInfo, ByteStream)>;

    /// Runs a command line in the guest's shell with a pseudo-terminal. Fails with [`GuestError::Refused`] if the agent does
    /// not support terminals.
    fn terminal<'a>(&'a self, id: InstanceId, request: &'a TerminalRequest)
    -> GuestFuture<'a, GuestTerminal>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_states_are_parsed_back() {
        let named =
            [AgentState::NoContact, AgentState::Unresponsive, AgentState::Startup, AgentState::Stopped];
        let ready = [AgentState::Ready, AgentState::Degraded];
        let other = [AgentState::TooOld, AgentState::NotReady("instance paused".into())];
        for state in named.into_iter().chain(ready).chain(other) {
            assert_eq!(AgentState::from(state.to_string().as_str()), state);
        }
        assert!(AgentState::from("ready soon").is_ready() && !AgentState::from("").is_ready());
    }
}
