//! The client for an agent that speaks protocol 2. Every request has its own connection.

use std::sync::Arc;

use muster_types::guest::{
    CommandKey, CommandOutput, CommandResult, GuestCommand, GuestError, GuestFileInfo, GuestFuture,
    OutputName,
};
use muster_types::storage::ByteStream;
use prost::Message;
use serde_json::{Map, Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::address::AgentAddress;
use super::connection::Connection;
use super::file;
use super::message::{
    ChangeMode, CommandError, CommandErrorKind, Empty, Execute, ExecuteReply, Facts, ReplyBody, RequestBody,
};
use super::reader::ConnectionError;
use crate::guest::channel::{AgentClient, VM_DETACHED};

/// The maximum number of connections to one guest, not counting that of the session.
const MAX_CONNECTIONS: usize = 4;

/// The maximum size of the result of a command, with its output.
const MAX_EXECUTE_REPLY: usize = 16 << 20;

/// The maximum size of facts, which may take ten times that in memory.
const MAX_FACTS_REPLY: usize = 1 << 20;

/// The maximum size of any other reply.
pub(super) const MAX_REPLY: usize = 256 << 10;

/// The maximum number of replies to other requests than the call's.
const MAX_STRAY_REPLIES: u32 = 1000;

/// The exit status of a shell that does not find a program.
const PROGRAM_NOT_FOUND_STATUS: i32 = 127;

#[derive(Debug)]
pub(super) struct V2Client {
    address: AgentAddress,
    /// The reason why the session ended, once it has.
    session_end: watch::Receiver<Option<String>>,
    boot_id: Option<String>,
    connections: Arc<Semaphore>,
}

/// A request that receives replies until it is dropped.
#[derive(Debug)]
pub(super) struct Call {
    connection: Connection,
    id: String,
    session_end: watch::Receiver<Option<String>>,
    stray_replies: u32,
    _permit: OwnedSemaphorePermit,
}

/// Why a call failed.
#[derive(Debug)]
pub(super) enum CallError {
    /// The agent reported an error.
    Command(CommandErrorKind),
    Guest(GuestError),
}

impl From<ConnectionError> for CallError {
    fn from(error: ConnectionError) -> Self {
        Self::Guest(error.into())
    }
}

impl From<CallError> for GuestError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Command(
                CommandErrorKind::ProgramNotFound(reason)
                | CommandErrorKind::FileNotFound(reason)
                | CommandErrorKind::Other(reason),
            ) => Self::Refused(reason),
            CallError::Guest(error) => error,
        }
    }
}

impl V2Client {
    pub(super) fn new(
        address: AgentAddress,
        session_end: watch::Receiver<Option<String>>,
        boot_id: Option<String>,
    ) -> Self {
        Self { address, session_end, boot_id, connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)) }
    }

    /// Sends a request whose replies have at most `max_reply` bytes.
    pub(super) async fn call(&self, request: RequestBody, max_reply: usize) -> Result<Call, GuestError> {
        let mut session_end = self.session_end.clone();
        let opened = async {
            let permit = self.connections.clone().acquire_owned().await.map_err(unreachable)?;
            Ok::<_, GuestError>((self.address.connect().await.map_err(unreachable)?, permit))
        };
        let (stream, permit) = tokio::select! {
            biased;
            error = session_ended(&mut session_end) => return Err(error),
            opened = opened => opened?,
        };
        let mut connection = Connection::new(stream, max_reply);
        connection.welcome()?;
        let id = connection.request(request)?;
        Ok(Call { connection, id, session_end, stray_replies: 0, _permit: permit })
    }

    /// Sends a request and waits for its only reply.
    async fn request(&self, request: RequestBody, max_reply: usize) -> Result<ReplyBody, CallError> {
        self.call(request, max_reply).await.map_err(CallError::Guest)?.next().await
    }

    async fn execute(&self, command: &GuestCommand) -> Result<CommandResult, GuestError> {
        if let Some(boot_id) = &command.sent_boot_id {
            return Err(match self.boot_id.as_ref() == Some(boot_id) {
                true => GuestError::StatelessAgent,
                false => {
                    GuestError::Restarted("the guest or its agent was restarted while the command ran".into())
                }
            });
        }
        let key = command.key.to_string();
        // Some agents resolve the first word themselves and prepend other programs. An explicit shell behaves the same
        // with all agents.
        let line = format!("/bin/sh -c {}", quoted(&command.line));
        let request = RequestBody::Execute(Execute { line, request: key.clone(), execution: key });
        match self.request(request, MAX_EXECUTE_REPLY).await {
            Ok(ReplyBody::Execute(bytes)) => {
                let reply = ExecuteReply::decode(bytes).map_err(|_| ConnectionError::InvalidData)?;
                Ok(CommandResult {
                    return_code: reply.return_code,
                    stdout: CommandOutput::Inline(reply.stdout),
                    stderr: CommandOutput::Inline(reply.stderr),
                })
            }
            Ok(_) => {
                Err(GuestError::Refused("the guest's agent did not report the command's exit status".into()))
            }
            Err(CallError::Command(CommandErrorKind::ProgramNotFound(reason))) => Ok(CommandResult {
                return_code: PROGRAM_NOT_FOUND_STATUS,
                stdout: CommandOutput::Inline("".into()),
                stderr: CommandOutput::Inline((reason + "\n").into()),
            }),
            Err(error) => Err(error.into()),
        }
    }

    async fn facts(&self) -> Result<Map<String, Value>, GuestError> {
        let reply = self.request(RequestBody::GatherFacts(Empty {}), MAX_FACTS_REPLY).await?;
        let ReplyBody::Facts(bytes) = reply else {
            return Err(GuestError::Refused("the guest's agent reported no facts".into()));
        };
        Ok(facts_to_json(&Facts::decode(bytes).map_err(|_| ConnectionError::InvalidData)?))
    }

    async fn change_mode(&self, path: &str, mode: u32) -> Result<(), GuestError> {
        let mode = i32::try_from(mode).map_err(|_| GuestError::Refused("the mode is out of range".into()))?;
        let request = RequestBody::ChangeMode(ChangeMode { path: path.to_owned(), mode });
        match self.request(request, MAX_REPLY).await? {
            ReplyBody::ModeChanged(_) => Ok(()),
            _ => Err(GuestError::Refused("the guest's agent did not confirm the change of the mode".into())),
        }
    }
}

impl Call {
    /// Waits for the next reply. Cancel safe.
    pub(super) async fn next(&mut self) -> Result<ReplyBody, CallError> {
        let Self { connection, id, session_end, stray_replies, .. } = self;
        let reply = async {
            loop {
                let reply = connection.receive_with_ping().await?;
                if reply.id == id.as_bytes()
                    && let Some(body) = reply.body
                {
                    return Ok(body);
                }
                *stray_replies += 1;
                if *stray_replies > MAX_STRAY_REPLIES {
                    return Err(CallError::from(ConnectionError::InvalidData));
                }
            }
        };
        let reply = tokio::select! {
            biased;
            error = session_ended(session_end) => Err(CallError::Guest(error)),
            reply = reply => reply,
        };
        match reply? {
            ReplyBody::CommandError(bytes) => {
                let error = CommandError::decode(bytes).map_err(|_| ConnectionError::InvalidData)?;
                Err(CallError::Command(error.kind()))
            }
            ReplyBody::UnknownCommand(_) => {
                let unsupported = "the guest's agent does not support the request";
                Err(CallError::Guest(GuestError::Refused(unsupported.into())))
            }
            body => Ok(body),
        }
    }

    /// Sends a further message of the request.
    pub(super) fn send(&mut self, message: RequestBody) -> Result<(), GuestError> {
        Ok(self.connection.send(&self.id, message)?)
    }

    /// Returns the number of bytes that are not written to the socket.
    pub(super) fn unwritten(&self) -> usize {
        self.connection.unwritten()
    }
}

/// Waits for the end of the session and returns it as an error.
async fn session_ended(session_end: &mut watch::Receiver<Option<String>>) -> GuestError {
    let reason = session_end.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
    // The session was dropped without an end.
    GuestError::Unreachable(reason.unwrap_or_else(|| VM_DETACHED.into()))
}

fn unreachable(error: impl std::fmt::Display) -> GuestError {
    GuestError::Unreachable(format!("the guest's agent cannot be reached: {error}"))
}

impl From<ConnectionError> for GuestError {
    fn from(error: ConnectionError) -> Self {
        match error {
            ConnectionError::Closed | ConnectionError::Io(_) => Self::Unreachable(error.to_string()),
            // A retry would fail in the same way.
            ConnectionError::ReplyTooLong(_) | ConnectionError::InvalidData => {
                Self::Refused(error.to_string())
            }
        }
    }
}

/// Quotes a text as one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Converts facts to the JSON of protocol 1.
fn facts_to_json(facts: &Facts) -> Map<String, Value> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let distribution: Map<String, Value> = facts
        .distribution
        .iter()
        .map(|fact| {
            // A value that is not JSON is passed on as text.
            let value = serde_json::from_slice(&fact.value).unwrap_or_else(|_| text(&fact.value).into());
            (text(&fact.name), value)
        })
        .collect();
    let mounts: Vec<Value> = facts.mounts.iter().map(|mount| {
        json!({
            "device": text(&mount.device), "mount_point": text(&mount.mount_point), "vfs_type": text(&mount.fs_type),
        })
    }).collect();
    let keys: Map<String, Value> =
        facts.ssh_host_keys.iter().map(|key| (text(&key.name), text(&key.value).into())).collect();
    let mut all = Map::new();
    all.insert("distribution".into(), distribution.into());
    all.insert("mounts".into(), mounts.into());
    all.insert("ssh-host-keys".into(), keys.into());
    all
}

impl AgentClient for V2Client {
    fn facts(&self) -> GuestFuture<'_, Map<String, Value>> {
        Box::pin(self.facts())
    }

    fn execute<'a>(&'a self, command: &'a GuestCommand) -> GuestFuture<'a, CommandResult> {
        Box::pin(self.execute(command))
    }

    fn output(&self, _key: CommandKey, _name: OutputName) -> GuestFuture<'_, ByteStream> {
        // All output is part of the result.
        Box::pin(async { Err(GuestError::StatelessAgent) })
    }

    fn forget(&self, _key: CommandKey) -> GuestFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn cancel(&self, _key: CommandKey) -> GuestFuture<'_, ()> {
        Box::pin(async { Err(GuestError::Refused("the guest's agent cannot cancel commands".into())) })
    }

    fn put<'a>(
        &'a self,
        path: &'a str,
        size: u64,
        mode: Option<u32>,
        data: ByteStream,
    ) -> GuestFuture<'a, ()> {
        Box::pin(file::put(self, path, size, mode, data))
    }

    fn change_mode<'a>(&'a self, path: &'a str, mode: u32) -> GuestFuture<'a, ()> {
        Box::pin(self.change_mode(path, mode))
    }

    fn get<'a>(&'a self, path: &'a str) -> GuestFuture<'a, (GuestFileInfo, ByteStream)> {
        Box::pin(file::get(self, path))
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::{Mount, NamedValue};
    use super::*;

    #[test]
    fn quotes_shell_words() {
        assert_eq!(quoted("echo 'a b' $HOME"), r"'echo '\''a b'\'' $HOME'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn converts_facts_to_the_format_of_protocol_1() {
        let fact = |name: &str, value: &str| NamedValue {
            name: name.to_owned().into(),
            value: value.to_owned().into(),
        };
        let mount =
            Mount { device: "/dev/vda1".into(), mount_point: "/".into(), fs_type: vec![b'x', 0xff].into() };
        let reported = Facts {
            distribution: vec![
                fact("id", r#""debian""#),
                fact("version_parts", r#"{"major": "12"}"#),
                fact("x", "{"),
            ],
            mounts: vec![mount],
            ssh_host_keys: vec![fact("rsa", "ssh-rsa AAAA\n")],
        };
        assert_eq!(
            Value::Object(facts_to_json(&reported)),
            json!({
                "distribution": { "id": "debian", "version_parts": { "major": "12" }, "x": "{" },
                "mounts": [{ "device": "/dev/vda1", "mount_point": "/", "vfs_type": "x\u{fffd}" }],
                "ssh-host-keys": { "rsa": "ssh-rsa AAAA\n" },
            })
        );
    }
}
