//! The agent of a guest, and what it can be asked: each over a connection of its own.

use std::sync::Arc;

use muster_types::guest::{
    CommandKey, CommandOutput, CommandResult, GuestCommand, GuestError, GuestFileInfo, GuestFuture,
    OutputName,
};
use muster_types::storage::ByteStream;
use prost::Message;
use serde_json::{Map, Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::connection::Connection;
use super::file;
use super::inbox::Fault;
use super::message::{self, Answer, ChangeMode, CommandError, Execute, Facts, Nothing, Question};
use super::way::Way;
use crate::guest::contact::Speaker;
use crate::guest::text::{ERROR_TEXT, printable};

/// How many connections there are to one guest at a time, beside the one that looks after it.
const CONNECTIONS: usize = 4;

/// The longest answer to a command, with everything that it wrote.
const EXECUTED: usize = 16 << 20;

/// The longest of what a guest says of itself. In memory it may become ten times that.
const FACTS: usize = 1 << 20;

/// The longest of any other answer.
pub(super) const USUAL: usize = 256 << 10;

/// How many replies to nothing are passed over.
const STRAYS: u32 = 1000;

/// What agents up to 1.0.1 say where others let the shell answer.
const NO_SUCH_COMMAND: &str = "No such command";

/// What a shell answers then.
const NOT_FOUND: i32 = 127;

#[derive(Debug)]
pub(super) struct Agent {
    way: Way,
    /// Why nobody can ask any more, once that is so.
    lost: watch::Receiver<Option<String>>,
    boot: Option<String>,
    connections: Arc<Semaphore>,
}

/// Something that was asked, until it is dropped.
#[derive(Debug)]
pub(super) struct Call {
    connection: Connection,
    id: String,
    lost: watch::Receiver<Option<String>>,
    strays: u32,
    _permit: OwnedSemaphorePermit,
}

impl Agent {
    pub(super) fn new(way: Way, lost: watch::Receiver<Option<String>>, boot: Option<String>) -> Self {
        Self { way, lost, boot, connections: Arc::new(Semaphore::new(CONNECTIONS)) }
    }

    /// Asks something whose answers are no longer than that.
    pub(super) async fn call(&self, question: Question, most: usize) -> Result<Call, GuestError> {
        let mut lost = self.lost.clone();
        let opened = async {
            let permit = self.connections.clone().acquire_owned().await.map_err(away)?;
            Ok::<_, GuestError>((self.way.connect().await.map_err(away)?, permit))
        };
        let (stream, permit) = tokio::select! {
            biased;
            why = lose(&mut lost) => return Err(why),
            opened = opened => opened?,
        };
        let mut connection = Connection::new(stream, most);
        connection.welcome()?;
        let id = connection.ask(question)?;
        Ok(Call { connection, id, lost, strays: 0, _permit: permit })
    }

    /// Asks something that has one short answer.
    async fn ask(&self, question: Question, most: usize) -> Result<Answer, GuestError> {
        self.call(question, most).await?.next().await
    }

    async fn execute(&self, command: &GuestCommand) -> Result<CommandResult, GuestError> {
        if let Some(boot) = &command.again {
            return Err(match self.boot.as_ref() == Some(boot) {
                true => GuestError::Forgetful,
                false => {
                    GuestError::Restarted("the guest or its agent was restarted while the command ran".into())
                }
            });
        }
        let key = command.key.to_string();
        // Some agents look for the first word among the programs, and put others before it: so that it means the same
        // everywhere, it is that of a shell.
        let line = format!("/bin/sh -c {}", quoted(&command.line));
        let question = Question::Execute(Execute { line, request: key.clone(), execution: key });
        match self.ask(question, EXECUTED).await {
            Ok(Answer::Executed(bytes)) => {
                let executed = message::Executed::decode(bytes).map_err(|_| Fault::Garbage)?;
                let (stdout, stderr) =
                    (CommandOutput::Here(executed.stdout), CommandOutput::Here(executed.stderr));
                Ok(CommandResult { return_code: executed.return_code, stdout, stderr })
            }
            Ok(_) => Err(GuestError::Refused("the guest did not say how the command ended".into())),
            Err(GuestError::Refused(why)) if why.starts_with(NO_SUCH_COMMAND) => Ok(CommandResult {
                return_code: NOT_FOUND,
                stdout: CommandOutput::Here("".into()),
                stderr: CommandOutput::Here((why + "\n").into()),
            }),
            Err(error) => Err(error),
        }
    }

    async fn facts(&self) -> Result<Map<String, Value>, GuestError> {
        let answer = self.ask(Question::GatherFacts(Nothing {}), FACTS).await?;
        let Answer::Facts(bytes) = answer else {
            return Err(GuestError::Refused("the guest said nothing of itself".into()));
        };
        Ok(facts(&Facts::decode(bytes).map_err(|_| Fault::Garbage)?))
    }

    async fn change_mode(&self, path: &str, mode: u32) -> Result<(), GuestError> {
        let mode =
            i32::try_from(mode).map_err(|_| GuestError::Refused("there are no such permissions".into()))?;
        let question = Question::ChangeMode(ChangeMode { path: path.to_owned(), mode });
        match self.ask(question, USUAL).await? {
            Answer::ModeChanged(_) => Ok(()),
            _ => Err(GuestError::Refused("the guest did not say whether it did it".into())),
        }
    }
}

impl Call {
    /// The next answer. Whoever drops this loses nothing.
    pub(super) async fn next(&mut self) -> Result<Answer, GuestError> {
        let Self { connection, id, lost, strays, .. } = self;
        let answer = async {
            loop {
                let reply = connection.receive_patiently().await?;
                if reply.id == id.as_bytes()
                    && let Some(answer) = reply.answer
                {
                    return Ok(answer);
                }
                *strays += 1;
                if *strays > STRAYS {
                    return Err(Fault::Garbage.into());
                }
            }
        };
        let answer: Result<Answer, GuestError> = tokio::select! {
            biased;
            why = lose(lost) => Err(why),
            answer = answer => answer,
        };
        match answer? {
            Answer::CommandError(bytes) => {
                let error = CommandError::decode(bytes).unwrap_or_default().error;
                let why = printable(&String::from_utf8_lossy(&error), ERROR_TEXT);
                Err(GuestError::Refused(if why.is_empty() { "the guest gave no reason".into() } else { why }))
            }
            Answer::UnknownCommand(_) => {
                Err(GuestError::Refused("the guest's agent does not know what it was asked".into()))
            }
            answer => Ok(answer),
        }
    }

    /// Says more about what was asked.
    pub(super) fn say(&mut self, question: Question) -> Result<(), GuestError> {
        Ok(self.connection.say(&self.id, question)?)
    }

    /// How much of what was said is still here.
    pub(super) fn unsaid(&self) -> usize {
        self.connection.unwritten()
    }
}

/// Waits until nobody can ask any more.
async fn lose(lost: &mut watch::Receiver<Option<String>>) -> GuestError {
    let why = lost.wait_for(Option::is_some).await.ok().and_then(|why| why.clone());
    GuestError::Away(why.unwrap_or_else(|| "nobody looks after the machine any more".into()))
}

fn away(error: impl std::fmt::Display) -> GuestError {
    GuestError::Away(format!("the guest's agent cannot be reached: {error}"))
}

/// What it means for whoever asked.
impl From<Fault> for GuestError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Ended | Fault::Broken(_) => Self::Away(fault.to_string()),
            // It would say the same again.
            Fault::TooLong(_) | Fault::Garbage => Self::Refused(fault.to_string()),
        }
    }
}

/// A word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// As agents of protocol 1 say it.
fn facts(facts: &Facts) -> Map<String, Value> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let distribution: Map<String, Value> = facts
        .distribution
        .iter()
        .map(|fact| {
            let value = serde_json::from_slice(&fact.value).unwrap_or_else(|_| text(&fact.value).into());
            (text(&fact.name), value)
        })
        .collect();
    let mounts: Vec<Value> = facts.mounts.iter().map(|mount| {
        json!({
            "device": text(&mount.device), "mount_point": text(&mount.place), "vfs_type": text(&mount.kind),
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

impl Speaker for Agent {
    fn facts(&self) -> GuestFuture<'_, Map<String, Value>> {
        Box::pin(self.facts())
    }

    fn execute<'a>(&'a self, command: &'a GuestCommand) -> GuestFuture<'a, CommandResult> {
        Box::pin(self.execute(command))
    }

    fn output(&self, _key: CommandKey, _name: OutputName) -> GuestFuture<'_, ByteStream> {
        // It came with the result.
        Box::pin(async { Err(GuestError::Forgetful) })
    }

    fn forget(&self, _key: CommandKey) -> GuestFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn cancel(&self, _key: CommandKey) -> GuestFuture<'_, ()> {
        Box::pin(async { Err(GuestError::Refused("the guest's agent cannot end commands".into())) })
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
    use super::*;

    #[test]
    fn a_line_is_one_word_of_a_shell() {
        assert_eq!(quoted("echo 'a b' $HOME"), r"'echo '\''a b'\'' $HOME'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn facts_are_those_of_the_other_protocol() {
        let fact = |name: &str, value: &str| message::Fact {
            name: name.to_owned().into(),
            value: value.to_owned().into(),
        };
        let mount =
            message::Mount { device: "/dev/vda1".into(), place: "/".into(), kind: vec![b'x', 0xff].into() };
        let said = Facts {
            distribution: vec![
                fact("id", r#""debian""#),
                fact("version_parts", r#"{"major": "12"}"#),
                fact("x", "{"),
            ],
            mounts: vec![mount],
            ssh_host_keys: vec![fact("rsa", "ssh-rsa AAAA\n")],
        };
        assert_eq!(
            Value::Object(facts(&said)),
            json!({
                "distribution": { "id": "debian", "version_parts": { "major": "12" }, "x": "{" },
                "mounts": [{ "device": "/dev/vda1", "mount_point": "/", "vfs_type": "x\u{fffd}" }],
                "ssh-host-keys": { "rsa": "ssh-rsa AAAA\n" },
            })
        );
    }
}
