//! The client for an agent that speaks protocol 2.

use muster_types::guest::{
    CommandKey, CommandOutput, CommandResult, GuestCommand, GuestError, GuestFileInfo, GuestFuture,
    GuestTerminal, OutputName,
};
use muster_types::storage::ByteStream;
use muster_types::terminal::TerminalRequest;
use prost::Message;
use serde_json::{Map, Value, json};
use tokio::sync::watch;

use super::address::AgentAddress;
use super::call::{CallError, Caller, MAX_REPLY};
use super::file;
use super::message::{
    ChangeMode, CommandErrorKind, Empty, Execute, ExecuteReply, Facts, ReplyBody, RequestBody,
};
use super::reader::ConnectionError;
use crate::guest::channel::{AgentClient, terminals_unsupported};

/// The maximum size of the result of a command, with its output.
const MAX_EXECUTE_REPLY: usize = 16 << 20;

/// The maximum size of facts, which may take ten times that in memory.
const MAX_FACTS_REPLY: usize = 1 << 20;

/// The exit status of a shell that does not find a program.
const PROGRAM_NOT_FOUND_STATUS: i32 = 127;

#[derive(Debug)]
pub(super) struct V2Client {
    caller: Caller,
    boot_id: Option<String>,
}

impl V2Client {
    pub(super) fn new(
        address: AgentAddress,
        session_end: watch::Receiver<Option<String>>,
        boot_id: Option<String>,
    ) -> Self {
        Self { caller: Caller::new(address, session_end), boot_id }
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
        let line = format!("/bin/sh -c {}", shell_quote(&command.line));
        let request = RequestBody::Execute(Execute { line, request: key.clone(), execution: key });
        match self.caller.request(request, MAX_EXECUTE_REPLY).await {
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
        let reply = self.caller.request(RequestBody::GatherFacts(Empty {}), MAX_FACTS_REPLY).await?;
        let ReplyBody::Facts(bytes) = reply else {
            return Err(GuestError::Refused("the guest's agent reported no facts".into()));
        };
        Ok(facts_to_json(&Facts::decode(bytes).map_err(|_| ConnectionError::InvalidData)?))
    }

    async fn change_mode(&self, path: &str, mode: u32) -> Result<(), GuestError> {
        let mode = i32::try_from(mode).map_err(|_| GuestError::Refused("the mode is out of range".into()))?;
        let request = RequestBody::ChangeMode(ChangeMode { path: path.to_owned(), mode });
        match self.caller.request(request, MAX_REPLY).await? {
            ReplyBody::ModeChanged(_) => Ok(()),
            _ => Err(GuestError::Refused("the guest's agent did not confirm the change of the mode".into())),
        }
    }
}

/// Quotes text as a single shell word.
fn shell_quote(text: &str) -> String {
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
        Box::pin(file::put(&self.caller, path, size, mode, data))
    }

    fn change_mode<'a>(&'a self, path: &'a str, mode: u32) -> GuestFuture<'a, ()> {
        Box::pin(self.change_mode(path, mode))
    }

    fn get<'a>(&'a self, path: &'a str) -> GuestFuture<'a, (GuestFileInfo, ByteStream)> {
        Box::pin(file::get(&self.caller, path))
    }

    fn terminal<'a>(&'a self, _request: &'a TerminalRequest) -> GuestFuture<'a, GuestTerminal> {
        Box::pin(async { Err(terminals_unsupported()) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::{Mount, NamedValue};
    use super::*;

    #[test]
    fn quotes_shell_words() {
        assert_eq!(shell_quote("echo 'a b' $HOME"), r"'echo '\''a b'\'' $HOME'");
        assert_eq!(shell_quote(""), "''");
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
