//! Doing one agent operation in its guest, from its first command to its end. A command line runs once, or an event
//! says that it may have run twice (docs/decisions/0022).

use std::sync::Arc;
use std::time::Duration;

use muster_types::agent_operation::{AgentCommand, AgentOperationState, Mode};
use muster_types::guest::{CommandKey, CommandOutput, GuestApi, GuestCommand, GuestError, GuestFileInfo};
use muster_types::ids::BlobId;
use muster_types::node::NodeApi;
use muster_types::{Error, Result};
use serde_json::{Map, Value, json};

use super::audit;
use super::clock::{Clock, watched, watched_to_the_end};
use super::output::{self, Outcome};
use crate::app::App;
use muster_store::agent_operations::{self, AgentOperationRow};
use muster_store::{blobs, transaction};

/// How long one waits before a guest that was away is asked again: at first, and at most.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// How long an operation rests that the database or the disk stopped.
const REST: Duration = Duration::from_secs(1);
/// How long one waits for a guest to forget a command.
const FORGETTING: Duration = Duration::from_secs(3);

/// How much is kept of what a guest calls its start, in characters.
const LONGEST_BOOT: usize = 255;
const LOST: &str = "the guest or its agent restarted while the command ran; whether it finished is not known";

/// What came of the commands of an operation, and why it failed if it did.
type Ended<'a> = (Vec<Outcome<'a>>, Option<String>);

/// An operation under way.
pub(crate) struct Work {
    pub(crate) app: Arc<App>,
    pub(crate) node: Arc<dyn NodeApi>,
    /// As it was found: queued, or left by a daemon that died or a connection that broke.
    pub(crate) row: AgentOperationRow,
    pub(crate) clock: Arc<Clock>,
}

/// Why a command has no result.
#[derive(Debug)]
pub(super) enum Failure {
    /// The guest cannot be reached: it is asked again.
    Away(String),
    /// It failed, and would again.
    Final(String),
    /// Our own side could not go on: the operation is taken up again.
    Later(Error),
}

impl From<GuestError> for Failure {
    fn from(error: GuestError) -> Self {
        match error {
            GuestError::Unreachable(why) | GuestError::Restarted(why) => Self::Away(why),
            GuestError::UnknownCommand | GuestError::StatelessAgent => Self::Final(error.to_string()),
            GuestError::Refused(why) | GuestError::HostFailed(why) => Self::Final(why),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Later(error)
    }
}

impl Failure {
    /// What became of bytes between a guest and the disk.
    pub(super) fn of_bytes(error: Error) -> Self {
        match error {
            Error::Unavailable(why) => Self::Away(why),
            Error::Internal(why) => {
                tracing::error!(%why, "bytes of a guest were not kept");
                Self::Final("server error".into())
            }
            other => Self::Final(other.to_string()),
        }
    }
}

/// The command of an operation that is a command line, as its guest knows it.
pub(crate) fn command_key(row: &AgentOperationRow) -> CommandKey {
    CommandKey { operation: row.id, index: 0 }
}

/// Whether an operation is a command line, which must not run twice.
pub(crate) fn is_command(row: &AgentOperationRow) -> bool {
    matches!(row.commands.first(), Some(AgentCommand::Execute { .. }))
}

impl Work {
    pub(super) fn guests(&self) -> &dyn GuestApi {
        self.node.guests()
    }

    /// Does the operation, unless somebody ends it first.
    pub(crate) async fn run(self) {
        if let Err(error) = self.go().await {
            tracing::warn!(operation = %self.row.id, %error, "an agent operation rests");
            tokio::time::sleep(REST).await;
        }
    }

    async fn go(&self) -> Result<()> {
        let mut row = self.row.clone();
        let ended = match row.commands.first() {
            Some(AgentCommand::Execute { commandline, .. }) => {
                let line = commandline.clone();
                self.command_line(&mut row, &line).await?
            }
            _ => self.transfer(&mut row).await?,
        };
        // Nobody wants it any more.
        let Some((outcomes, error)) = ended else { return Ok(()) };
        self.clock.stop();
        if output::finish(self, &row, outcomes, error.as_deref()).await? && is_command(&row) {
            let forget = self.guests().forget(row.instance, command_key(&row));
            let _ = tokio::time::timeout(FORGETTING, forget).await;
        }
        Ok(())
    }

    /// Writes down that it is begun, or begun again. `false`: nobody wants it any more.
    async fn begin(&self, row: &mut AgentOperationRow) -> Result<bool> {
        let boot = self.guests().report(row.instance).and_then(|report| report.boot_id);
        // What is only moved may be moved again.
        row.sent_boot =
            is_command(row).then(|| boot.unwrap_or_default().chars().take(LONGEST_BOOT).collect());
        let met = transaction!(self.app.store, |tx| {
            Ok(agent_operations::begin(tx, row.id, row.state, row.sent_boot.as_deref()).await?)
        })?;
        row.state = AgentOperationState::Executing;
        row.attempts += 1;
        Ok(met)
    }

    async fn command_line(&self, row: &mut AgentOperationRow, line: &str) -> Result<Option<Ended<'_>>> {
        let key = command_key(row);
        let mut sent_boot_id = None;
        if row.state == AgentOperationState::Executing {
            sent_boot_id = Some(row.sent_boot.clone().unwrap_or_default());
        } else if !self.begin(row).await? {
            return Ok(None);
        }
        let mut pause = SHORTEST_PAUSE;
        loop {
            let command = GuestCommand { key, line: line.to_owned(), sent_boot_id: sent_boot_id.clone() };
            let failure = match self.guests().execute(row.instance, &command).await {
                Ok(executed) => match output::executed(self, key, line, executed).await {
                    Ok(outcome) => return Ok(Some((vec![outcome], None))),
                    Err(failure) => failure,
                },
                Err(GuestError::Restarted(why)) if sent_boot_id.is_some() => {
                    tracing::info!(operation = %row.id, why, "a command was lost");
                    Failure::Final(LOST.into())
                }
                Err(error @ (GuestError::UnknownCommand | GuestError::StatelessAgent))
                    if sent_boot_id.is_some() =>
                {
                    if !self.begin(row).await? {
                        return Ok(None);
                    }
                    if error == GuestError::StatelessAgent {
                        let text = "the command is sent once more and may run a second time";
                        let event = audit(row, text).with("reason", error.to_string());
                        self.app.events.record(event.with("attempts", row.attempts));
                    }
                    sent_boot_id = None;
                    continue;
                }
                Err(error) => error.into(),
            };
            match failure {
                Failure::Away(why) => {
                    tracing::debug!(operation = %row.id, why, "the guest of a command is away");
                    self.come_back(row, &mut pause).await;
                    sent_boot_id = Some(row.sent_boot.clone().unwrap_or_default());
                }
                Failure::Final(why) => {
                    return Ok(Some((vec![refused(row.commands.first(), &why)], Some(why))));
                }
                Failure::Later(error) => return Err(error),
            }
        }
    }

    /// Moves files, from the beginning again if the guest was away.
    async fn transfer(&self, row: &mut AgentOperationRow) -> Result<Option<Ended<'_>>> {
        let mut pause = SHORTEST_PAUSE;
        if row.state == AgentOperationState::Executing {
            // Left by a daemon that died: the contact with its guest may still have to be made.
            self.clock.touch();
            self.app.agents.wait_ready(&self.node, row.instance).await;
        }
        loop {
            if !self.begin(row).await? {
                return Ok(None);
            }
            self.clock.touch();
            let mut outcomes = Vec::new();
            match self.move_files(row, &mut outcomes).await {
                Ok(()) => return Ok(Some((outcomes, None))),
                Err(Failure::Away(why)) => {
                    tracing::debug!(operation = %row.id, why, "the guest of a transfer is away");
                    // Its clock goes on.
                    self.come_back(row, &mut pause).await;
                }
                Err(Failure::Final(why)) => {
                    outcomes.push(refused(row.commands.get(outcomes.len()), &why));
                    return Ok(Some((outcomes, Some(why))));
                }
                Err(Failure::Later(error)) => return Err(error),
            }
        }
    }

    /// Does one command after the other, as far as they succeed.
    async fn move_files<'a>(
        &'a self,
        row: &AgentOperationRow,
        outcomes: &mut Vec<Outcome<'a>>,
    ) -> Result<(), Failure> {
        for command in &row.commands {
            outcomes.push(match command {
                AgentCommand::PutBlob { blob_uuid, path } => self.put(row, *blob_uuid, path).await?,
                AgentCommand::Chmod { path, mode } => self.change_mode(row, path, mode).await?,
                AgentCommand::GetFile { path } => self.get(row, path).await?,
                AgentCommand::Execute { .. } => {
                    return Err(Failure::Final("a command line is not a transfer".into()));
                }
            });
        }
        Ok(())
    }

    async fn put(&self, row: &AgentOperationRow, blob: BlobId, path: &str) -> Result<Outcome<'_>, Failure> {
        let found = blobs::get(&*self.app.store, blob).await.map_err(Error::from)?;
        let found = found.ok_or_else(|| Failure::Final("blob not found".into()))?;
        let size = found.content().size;
        let data = self.node.storage().read(blob, 0..size).await.map_err(Failure::of_bytes)?;
        // What is to be private is not seen before.
        let mode = row.commands.iter().find_map(|command| match command {
            AgentCommand::Chmod { mode: Mode::Number(bits), .. } => Some(bits & 0o777),
            _ => None,
        });
        self.guests().put(row.instance, path, size, mode, watched(&self.clock, data)).await?;
        Ok(Outcome { result: named(path), kept: vec![] })
    }

    async fn change_mode(
        &self,
        row: &AgentOperationRow,
        path: &str,
        mode: &Mode,
    ) -> Result<Outcome<'_>, Failure> {
        self.clock.touch();
        match mode {
            Mode::Number(bits) => self.guests().change_mode(row.instance, path, bits & 0o7777).await?,
            // What they mean depends on how the file is.
            Mode::Words(words) => {
                let index = u32::try_from(row.attempts).unwrap_or(u32::MAX);
                let command = GuestCommand {
                    // Another attempt is another command.
                    key: CommandKey { operation: row.id, index },
                    line: format!("chmod -- {words} {}", quoted(path)),
                    sent_boot_id: None,
                };
                let executed = self.guests().execute(row.instance, &command).await?;
                let _ = self.guests().forget(row.instance, command.key).await;
                if executed.return_code != 0 {
                    return Err(Failure::Final(match &executed.stderr {
                        CommandOutput::Inline(text) if !text.is_empty() => {
                            String::from_utf8_lossy(&text[..text.len().min(1024)]).trim().to_owned()
                        }
                        _ => format!("chmod ended with {}", executed.return_code),
                    }));
                }
            }
        }
        Ok(Outcome { result: named(path), kept: vec![] })
    }

    async fn get(&self, row: &AgentOperationRow, path: &str) -> Result<Outcome<'_>, Failure> {
        let (facts, data) = self.guests().get(row.instance, path).await?;
        self.clock.touch();
        let data = watched_to_the_end(&self.clock, data);
        let kept = output::keep(&self.app, &self.node, "content", u64::MAX, data).await;
        let kept = kept.map_err(Failure::of_bytes)?;
        let mut result = named(path);
        result.insert("result".into(), json!(true));
        result.insert("stat_result".into(), stat_result(&facts));
        Ok(Outcome { result, kept: vec![kept] })
    }

    /// Waits until a guest that was away is there again.
    async fn come_back(&self, row: &AgentOperationRow, pause: &mut Duration) {
        // It may not be known yet that it is away.
        tokio::time::sleep(*pause).await;
        *pause = (*pause * 2).min(LONGEST_PAUSE);
        self.app.agents.wait_ready(&self.node, row.instance).await;
    }
}

fn named(path: &str) -> Map<String, Value> {
    Map::from_iter([("path".to_owned(), json!(path))])
}

/// What a command says that failed.
fn refused(command: Option<&AgentCommand>, why: &str) -> Outcome<'static> {
    let mut result = Map::new();
    match command {
        Some(AgentCommand::Execute { commandline, .. }) => {
            result.insert("command-line".into(), json!(commandline));
        }
        Some(
            AgentCommand::PutBlob { path, .. }
            | AgentCommand::Chmod { path, .. }
            | AgentCommand::GetFile { path },
        ) => {
            result.insert("path".into(), json!(path));
        }
        None => {}
    }
    result.insert("result".into(), json!(false));
    result.insert("message".into(), json!(why));
    Outcome { result, kept: vec![] }
}

fn stat_result(facts: &GuestFileInfo) -> Value {
    json!({
        "mode": facts.mode,
        "size": facts.size,
        "uid": facts.uid,
        "gid": facts.gid,
        "atime": facts.atime,
        "mtime": facts.mtime,
        "ctime": facts.ctime,
    })
}

/// A text as one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_one_word_whatever_is_in_it() {
        assert_eq!(quoted("/a b"), "'/a b'");
        assert_eq!(quoted("/it's; $(reboot)"), r"'/it'\''s; $(reboot)'");
    }

    #[test]
    fn a_guest_that_is_away_is_asked_again_and_one_that_refuses_is_not() {
        let of = |error: GuestError| Failure::from(error);
        assert!(matches!(of(GuestError::Unreachable("gone".into())), Failure::Away(_)));
        assert!(matches!(of(GuestError::Restarted("new".into())), Failure::Away(_)));
        assert!(matches!(of(GuestError::Refused("no".into())), Failure::Final(why) if why == "no"));
        assert!(matches!(Failure::of_bytes(Error::Unavailable("x".into())), Failure::Away(_)));
        assert!(matches!(Failure::of_bytes(Error::Conflict("x".into())), Failure::Final(why) if why == "x"));
        let ours = Failure::of_bytes(Error::Internal("secret".into()));
        assert!(matches!(ours, Failure::Final(why) if why == "server error"));
    }
}
