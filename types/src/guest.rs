//! GuestApi: what the agent inside a machine says, and everything that the control plane may ask of it.
//!
//! A guest is not trusted: whatever it sends harms nothing but what was asked of it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::{AgentOperationId, InstanceId};
use crate::object::words;
use crate::storage::ByteStream;
use crate::vm::ChangeStream;

/// How the agent in a guest is.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GuestReport {
    pub state: AgentState,
    /// Unix time at which the agent said that it started.
    pub agent_start_time: Option<f64>,
    /// Unix time at which the guest says that it booted.
    pub system_boot_time: Option<f64>,
    /// Which start of the guest this is: another text is another start.
    pub boot: Option<String>,
    /// The agent's version, as it says.
    pub version: Option<String>,
}

/// Whether a guest can be asked for anything.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum AgentState {
    /// It never said anything.
    #[default]
    NoContact,
    /// It has been silent for too long.
    Unresponsive,
    /// It has just started.
    Startup,
    /// It said that it ends.
    Stopped,
    TooOld,
    /// It is there, but the guest is not up: what the guest calls that.
    NotReady(String),
    Ready,
    /// It is up, but not all of it.
    Degraded,
}

impl AgentState {
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready | Self::Degraded)
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
            Self::NotReady(what) => write!(f, "not ready ({what})"),
            Self::Ready => f.write_str("ready"),
            Self::Degraded => f.write_str("ready (degraded)"),
        }
    }
}

/// A command line for the shell of a guest. The same one twice is one command: the second call waits for the first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestCommand {
    /// The operation and the number of the command in it.
    pub key: CommandKey,
    pub line: String,
    /// Set if it may have been sent before, by a daemon that is gone or over a connection that broke: during which
    /// [`GuestReport::boot`]. An agent that remembers goes on with it. Otherwise it is not run:
    /// [`GuestError::Unknown`], [`GuestError::Restarted`] or [`GuestError::Forgetful`].
    pub again: Option<String>,
}

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

/// A command that ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandResult {
    pub return_code: i32,
    pub stdout: CommandOutput,
    pub stderr: CommandOutput,
}

/// What a command wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandOutput {
    /// All of it.
    Here(Bytes),
    /// The guest has it, for [`GuestApi::output`]. `cut` if the command wrote more than an agent keeps.
    There { size: u64, cut: bool },
}

words! {
    /// Where a command writes.
    OutputName {
        Stdout = "stdout",
        Stderr = "stderr",
    }
}

/// What a guest says of a file.
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

/// Why a guest did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GuestError {
    /// It cannot be reached, or the connection broke. What was asked may have been done.
    #[error("{0}")]
    Away(String),
    /// It was asked again, and the guest or its agent was restarted in between: a command may have run, wholly or in
    /// part, and its result is lost.
    #[error("{0}")]
    Restarted(String),
    /// It was asked again, and has never heard of it: the command did not run.
    #[error("the guest has never heard of it")]
    Unknown,
    /// It was asked again, and cannot know: its agent remembers nothing.
    #[error("the guest's agent does not remember commands")]
    Forgetful,
    /// It did not want to, or could not; the guest's reason.
    #[error("{0}")]
    Refused(String),
    /// Our own side failed: the disk, say. The bytes did not come, or could not go.
    #[error("{0}")]
    Host(String),
}

/// A future that a guest hands out.
pub type GuestFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, GuestError>> + Send + 'a>>;

/// Everything that the control plane may ask of the guests of a node.
///
/// Several things may be asked of one guest at a time. Whoever drops a future or a stream gives it up: a transfer is
/// ended and what it left in the guest is removed, but a command goes on until it is cancelled.
pub trait GuestApi: Send + Sync {
    /// Names a machine whenever the report of its guest may have changed, from now on. There is one listener at a time.
    fn changes(&self) -> ChangeStream;

    /// What is known of the guest of a machine; nothing if the machine is not on or has no way for an agent.
    fn report(&self, id: InstanceId) -> Option<GuestReport>;

    /// What the guest says of itself: distribution, mounts, SSH host keys.
    fn facts(&self, id: InstanceId) -> GuestFuture<'_, Map<String, Value>>;

    /// Runs a command line in the guest's shell and returns when it has ended, however long that takes. An agent that
    /// remembers keeps the result until [`GuestApi::forget`].
    fn execute<'a>(&'a self, id: InstanceId, command: &'a GuestCommand) -> GuestFuture<'a, CommandResult>;

    /// What a command wrote, from its first byte; of one that ended and is not forgotten.
    fn output(&self, id: InstanceId, key: CommandKey, name: OutputName) -> GuestFuture<'_, ByteStream>;

    /// Says that nobody will ask for a command again. Nothing is waited for, and nobody learns if it fails.
    fn forget(&self, id: InstanceId, key: CommandKey) -> GuestFuture<'_, ()>;

    /// Ends a command and what it started, if it still runs, and forgets it.
    fn cancel(&self, id: InstanceId, key: CommandKey) -> GuestFuture<'_, ()>;

    /// Writes a file of `size` bytes: as a whole or, if anything fails, not at all, where the agent can do that. The
    /// bytes are taken from the stream as the guest takes them. With a mode nobody finds the file there with another one;
    /// without it a new one may be read by all, and one that was there is as it was.
    fn put<'a>(
        &'a self,
        id: InstanceId,
        path: &'a str,
        size: u64,
        mode: Option<u32>,
        data: ByteStream,
    ) -> GuestFuture<'a, ()>;

    /// ChangeStream the permissions of a file.
    fn change_mode<'a>(&'a self, id: InstanceId, path: &'a str, mode: u32) -> GuestFuture<'a, ()>;

    /// Reads a file. The stream fails with [`crate::Error::Unavailable`] where this would be [`GuestError::Away`], and
    /// with [`crate::Error::Conflict`] where this would be [`GuestError::Refused`].
    fn get<'a>(&'a self, id: InstanceId, path: &'a str) -> GuestFuture<'a, (GuestFileInfo, ByteStream)>;
}
