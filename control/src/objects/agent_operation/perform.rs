//! Performs one agent operation in its guest. A command line runs once, or an event says that it may have run twice.
//! See docs/decisions/0022.

use std::sync::Arc;
use std::time::Duration;

use muster_types::agent_operation::{AgentCommand, AgentOperationState, ChmodMode};
use muster_types::guest::{CommandKey, CommandOutput, GuestApi, GuestCommand, GuestError, GuestFileInfo};
use muster_types::ids::BlobId;
use muster_types::node::NodeApi;
use muster_types::{Error, Result};
use serde_json::{Map, Value, json};

use super::audit;
use super::clock::{ProgressClock, watched, watched_to_the_end};
use super::output::{self, Outcome};
use crate::app::App;
use muster_store::agent_operations::{self, AgentOperationRow};
use muster_store::{blobs, transaction};

/// The backoff before an unreachable guest is retried: initial and maximum.
const MIN_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// The delay before an operation is retried that failed because of the database or the disk.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// How long to wait for a guest to forget a command.
const FORGET_TIMEOUT: Duration = Duration::from_secs(3);

/// The maximum number of characters of a guest's boot id that are stored.
const MAX_BOOT_ID_CHARS: usize = 255;
const LOST: &str = "the guest or its agent restarted while the command ran; whether it finished is not known";

/// The results of the commands of an operation, and the error if it failed.
type Ended<'a> = (Vec<Outcome<'a>>, Option<String>);

/// A running agent operation.
pub(crate) struct AgentOperationRun {
    pub(crate) app: Arc<App>,
    pub(crate) node: Arc<dyn NodeApi>,
    /// As it was found: queued, or left by a daemon that died or a connection that broke.
    pub(crate) row: AgentOperationRow,
    pub(crate) clock: Arc<ProgressClock>,
}

/// Why a command has no result.
#[derive(Debug)]
pub(super) enum Failure {
    /// The guest is unreachable; the command is retried.
    Away(String),
    /// The command failed permanently.
    Final(String),
    /// The database or the disk failed; the operation is retried.
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
    /// Classifies an error of a transfer between a guest and the disk.
    pub(super) fn of_bytes(error: Error) -> Self {
        match error {
            Error::Unavailable(_) | Error::Contended => Self::Away(error.to_string()),
            Error::Internal(why) => {
                tracing::error!(%why, "failed to store data of guest");
                Self::Final("server error".into())
            }
            other => Self::Final(other.to_string()),
        }
    }
}

/// Returns the key by which the guest knows the command line of an operation.
pub(crate) fn command_key(row: &AgentOperationRow) -> CommandKey {
    CommandKey { operation: row.id, index: 0 }
}

/// Returns whether an operation is a command line, which must not run twice.
pub(crate) fn is_command_line(row: &AgentOperationRow) -> bool {
    matches!(row.commands.first(), Some(AgentCommand::Execute { .. }))
}

impl AgentOperationRun {
    pub(super) fn guests(&self) -> &dyn GuestApi {
        self.node.guests()
    }

    /// Performs the operation, unless it is ended first.
    pub(crate) async fn run(self) {
        if let Err(error) = self.go().await {
            tracing::warn!(operation = %self.row.id, %error, "failed to perform agent operation, retrying");
            tokio::time::sleep(RETRY_DELAY).await;
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
        // The operation was ended concurrently.
        let Some((outcomes, error)) = ended else { return Ok(()) };
        self.clock.stop();
        if output::finish(self, &row, outcomes, error.as_deref()).await? && is_command_line(&row) {
            let forget = self.guests().forget(row.instance, command_key(&row));
            let _ = tokio::time::timeout(FORGET_TIMEOUT, forget).await;
        }
        Ok(())
    }

    /// Records that the operation starts, or starts again. Returns `false` if it was ended concurrently.
    async fn begin(&self, row: &mut AgentOperationRow) -> Result<bool> {
        let boot = self.guests().report(row.instance).and_then(|report| report.boot_id);
        // What is only moved may be moved again.
        row.sent_boot =
            is_command_line(row).then(|| boot.unwrap_or_default().chars().take(MAX_BOOT_ID_CHARS).collect());
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
        let mut pause = MIN_BACKOFF;
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
                    tracing::debug!(operation = %row.id, why, "guest is unreachable, retrying command");
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

    /// Transfers files, from the beginning again after the guest was unreachable.
    async fn transfer(&self, row: &mut AgentOperationRow) -> Result<Option<Ended<'_>>> {
        let mut pause = MIN_BACKOFF;
        if row.state == AgentOperationState::Executing {
            // Left by a daemon that died: the connection to the guest may not be established yet.
            self.clock.record_progress();
            self.app.agents.wait_ready(&self.node, row.instance).await;
        }
        loop {
            if !self.begin(row).await? {
                return Ok(None);
            }
            self.clock.record_progress();
            let mut outcomes = Vec::new();
            match self.move_files(row, &mut outcomes).await {
                Ok(()) => return Ok(Some((outcomes, None))),
                Err(Failure::Away(why)) => {
                    tracing::debug!(operation = %row.id, why, "guest is unreachable, retrying transfer");
                    // The progress clock keeps running.
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

    /// Performs the commands in order until one fails.
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
        // Sets the mode before the content is written, so that private content is never readable.
        let mode = row.commands.iter().find_map(|command| match command {
            AgentCommand::Chmod { mode: ChmodMode::Number(bits), .. } => Some(bits & 0o777),
            _ => None,
        });
        self.guests().put(row.instance, path, size, mode, watched(&self.clock, data)).await?;
        Ok(Outcome { result: named(path), kept: vec![] })
    }

    async fn change_mode(
        &self,
        row: &AgentOperationRow,
        path: &str,
        mode: &ChmodMode,
    ) -> Result<Outcome<'_>, Failure> {
        self.clock.record_progress();
        match mode {
            ChmodMode::Number(bits) => self.guests().change_mode(row.instance, path, bits & 0o7777).await?,
            // Symbolic modes depend on the current mode of the file.
            ChmodMode::Symbolic(words) => {
                let index = u32::try_from(row.attempts).map_err(|_| {
                    Error::Internal(format!("operation {}: {} attempts", row.id, row.attempts))
                })?;
                let command = GuestCommand {
                    // Each attempt is a command of its own.
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
        self.clock.record_progress();
        let data = watched_to_the_end(&self.clock, data);
        let kept = output::keep(&self.app, &self.node, "content", u64::MAX, data).await;
        let kept = kept.map_err(Failure::of_bytes)?;
        let mut result = named(path);
        result.insert("result".into(), json!(true));
        result.insert("stat_result".into(), stat_result(&facts));
        Ok(Outcome { result, kept: vec![kept] })
    }

    /// Waits until an unreachable guest is ready again.
    async fn come_back(&self, row: &AgentOperationRow, pause: &mut Duration) {
        // The node may not have noticed yet that the guest is unreachable.
        tokio::time::sleep(*pause).await;
        *pause = (*pause * 2).min(MAX_BACKOFF);
        self.app.agents.wait_ready(&self.node, row.instance).await;
    }
}

fn named(path: &str) -> Map<String, Value> {
    Map::from_iter([("path".to_owned(), json!(path))])
}

/// Returns the result of a failed command.
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

/// Quotes a text for a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_paths_for_the_shell() {
        assert_eq!(quoted("/a b"), "'/a b'");
        assert_eq!(quoted("/it's; $(reboot)"), r"'/it'\''s; $(reboot)'");
    }

    #[test]
    fn retries_unreachable_guests_only() {
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
