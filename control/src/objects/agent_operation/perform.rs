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
use super::clock::{ProgressClock, with_progress, with_progress_until_end};
use super::output::{self, CommandOutcome};
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
const COMMAND_LOST: &str =
    "the guest or its agent restarted while the command ran; whether it finished is not known";

/// The results of the commands of an operation, and the error if it failed.
type OperationOutcome<'a> = (Vec<CommandOutcome<'a>>, Option<String>);

/// A running agent operation.
pub(crate) struct AgentOperationRun {
    pub(crate) app: Arc<App>,
    pub(crate) node: Arc<dyn NodeApi>,
    /// The row at the start: queued, or executing if a daemon died or a connection broke.
    pub(crate) row: AgentOperationRow,
    pub(crate) clock: Arc<ProgressClock>,
}

/// Why a command has no result.
#[derive(Debug)]
pub(super) enum Failure {
    /// The guest is unreachable; the command is retried.
    Unreachable(String),
    /// The command failed permanently.
    Permanent(String),
    /// The database or the disk failed; the operation is retried.
    Retry(Error),
}

impl From<GuestError> for Failure {
    fn from(error: GuestError) -> Self {
        match error {
            GuestError::Unreachable(reason) | GuestError::Restarted(reason) => Self::Unreachable(reason),
            GuestError::UnknownCommand | GuestError::StatelessAgent => Self::Permanent(error.to_string()),
            GuestError::Refused(reason) | GuestError::HostFailed(reason) => Self::Permanent(reason),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Retry(error)
    }
}

impl Failure {
    /// Classifies an error of a transfer between a guest and the disk.
    pub(super) fn from_transfer(error: Error) -> Self {
        match error {
            Error::Unavailable(_) | Error::Contended => Self::Unreachable(error.to_string()),
            Error::Internal(reason) => {
                tracing::error!(%reason, "failed to store data of guest");
                Self::Permanent("server error".into())
            }
            other => Self::Permanent(other.to_string()),
        }
    }
}

/// Returns the key that identifies the command line of an operation in the guest.
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
        if let Err(error) = self.perform().await {
            tracing::warn!(operation = %self.row.id, %error, "failed to perform agent operation, retrying");
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    async fn perform(&self) -> Result<()> {
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
        // A transfer can be repeated, so it records no boot id.
        row.sent_boot =
            is_command_line(row).then(|| boot.unwrap_or_default().chars().take(MAX_BOOT_ID_CHARS).collect());
        let begun = transaction!(self.app.store, |tx| {
            Ok(agent_operations::begin(tx, row.id, row.state, row.sent_boot.as_deref()).await?)
        })?;
        row.state = AgentOperationState::Executing;
        row.attempts += 1;
        Ok(begun)
    }

    async fn command_line(
        &self,
        row: &mut AgentOperationRow,
        line: &str,
    ) -> Result<Option<OperationOutcome<'_>>> {
        let key = command_key(row);
        let mut sent_boot_id = None;
        if row.state == AgentOperationState::Executing {
            sent_boot_id = Some(row.sent_boot.clone().unwrap_or_default());
        } else if !self.begin(row).await? {
            return Ok(None);
        }
        let mut backoff = MIN_BACKOFF;
        loop {
            let command = GuestCommand { key, line: line.to_owned(), sent_boot_id: sent_boot_id.clone() };
            let failure = match self.guests().execute(row.instance, &command).await {
                Ok(executed) => match output::command_outcome(self, key, line, executed).await {
                    Ok(outcome) => return Ok(Some((vec![outcome], None))),
                    Err(failure) => failure,
                },
                Err(GuestError::Restarted(reason)) if sent_boot_id.is_some() => {
                    tracing::info!(operation = %row.id, reason, "guest lost a running command");
                    Failure::Permanent(COMMAND_LOST.into())
                }
                Err(error @ (GuestError::UnknownCommand | GuestError::StatelessAgent))
                    if sent_boot_id.is_some() =>
                {
                    if !self.begin(row).await? {
                        return Ok(None);
                    }
                    if error == GuestError::StatelessAgent {
                        let text = "the command is sent again and may run a second time";
                        let event = audit(row, text).with("reason", error.to_string());
                        self.app.events.record(event.with("attempts", row.attempts));
                    }
                    sent_boot_id = None;
                    continue;
                }
                Err(error) => error.into(),
            };
            match failure {
                Failure::Unreachable(reason) => {
                    tracing::debug!(operation = %row.id, reason, "guest is unreachable, retrying command");
                    self.wait_reachable(row, &mut backoff).await;
                    sent_boot_id = Some(row.sent_boot.clone().unwrap_or_default());
                }
                Failure::Permanent(reason) => {
                    return Ok(Some((vec![failure_outcome(row.commands.first(), &reason)], Some(reason))));
                }
                Failure::Retry(error) => return Err(error),
            }
        }
    }

    /// Transfers files, from the beginning again after the guest was unreachable.
    async fn transfer(&self, row: &mut AgentOperationRow) -> Result<Option<OperationOutcome<'_>>> {
        let mut backoff = MIN_BACKOFF;
        if row.state == AgentOperationState::Executing {
            // A daemon died meanwhile: the connection to the guest may not be established yet.
            self.clock.record_progress();
            self.app.agents.wait_ready(&self.node, row.instance).await;
        }
        loop {
            if !self.begin(row).await? {
                return Ok(None);
            }
            self.clock.record_progress();
            let mut outcomes = Vec::new();
            match self.run_commands(row, &mut outcomes).await {
                Ok(()) => return Ok(Some((outcomes, None))),
                Err(Failure::Unreachable(reason)) => {
                    tracing::debug!(operation = %row.id, reason, "guest is unreachable, retrying transfer");
                    // The progress clock keeps running.
                    self.wait_reachable(row, &mut backoff).await;
                }
                Err(Failure::Permanent(reason)) => {
                    outcomes.push(failure_outcome(row.commands.get(outcomes.len()), &reason));
                    return Ok(Some((outcomes, Some(reason))));
                }
                Err(Failure::Retry(error)) => return Err(error),
            }
        }
    }

    /// Performs the commands in order until one fails.
    async fn run_commands<'a>(
        &'a self,
        row: &AgentOperationRow,
        outcomes: &mut Vec<CommandOutcome<'a>>,
    ) -> Result<(), Failure> {
        for command in &row.commands {
            outcomes.push(match command {
                AgentCommand::PutBlob { blob_uuid, path } => self.put(row, *blob_uuid, path).await?,
                AgentCommand::Chmod { path, mode } => self.change_mode(row, path, mode).await?,
                AgentCommand::GetFile { path } => self.get(row, path).await?,
                AgentCommand::Execute { .. } => {
                    return Err(Failure::Permanent("a command line is not a transfer".into()));
                }
            });
        }
        Ok(())
    }

    async fn put(
        &self,
        row: &AgentOperationRow,
        blob: BlobId,
        path: &str,
    ) -> Result<CommandOutcome<'_>, Failure> {
        let blob_row = blobs::get(&*self.app.store, blob).await.map_err(Error::from)?;
        let blob_row = blob_row.ok_or_else(|| Failure::Permanent("blob not found".into()))?;
        let size = blob_row.content().size;
        let data = self.node.storage().read(blob, 0..size).await.map_err(Failure::from_transfer)?;
        // Sets the mode before the content is written, so that private content is never readable.
        let mode = row.commands.iter().find_map(|command| match command {
            AgentCommand::Chmod { mode: ChmodMode::Number(bits), .. } => Some(bits & 0o777),
            _ => None,
        });
        self.guests().put(row.instance, path, size, mode, with_progress(&self.clock, data)).await?;
        Ok(CommandOutcome { result: path_result(path), outputs: vec![] })
    }

    async fn change_mode(
        &self,
        row: &AgentOperationRow,
        path: &str,
        mode: &ChmodMode,
    ) -> Result<CommandOutcome<'_>, Failure> {
        self.clock.record_progress();
        match mode {
            ChmodMode::Number(bits) => self.guests().change_mode(row.instance, path, bits & 0o7777).await?,
            // Symbolic modes depend on the current mode of the file.
            ChmodMode::Symbolic(words) => {
                let index = u32::try_from(row.attempts).map_err(|_| {
                    Error::Internal(format!("operation {}: {} attempts", row.id, row.attempts))
                })?;
                let command = GuestCommand {
                    // Each attempt needs a new key, because a guest runs the command of a key once.
                    key: CommandKey { operation: row.id, index },
                    line: format!("chmod -- {words} {}", shell_quoted(path)),
                    sent_boot_id: None,
                };
                let executed = self.guests().execute(row.instance, &command).await?;
                let _ = self.guests().forget(row.instance, command.key).await;
                if executed.return_code != 0 {
                    return Err(Failure::Permanent(match &executed.stderr {
                        CommandOutput::Inline(text) if !text.is_empty() => {
                            String::from_utf8_lossy(&text[..text.len().min(1024)]).trim().to_owned()
                        }
                        _ => format!("chmod ended with {}", executed.return_code),
                    }));
                }
            }
        }
        Ok(CommandOutcome { result: path_result(path), outputs: vec![] })
    }

    async fn get(&self, row: &AgentOperationRow, path: &str) -> Result<CommandOutcome<'_>, Failure> {
        let (facts, data) = self.guests().get(row.instance, path).await?;
        self.clock.record_progress();
        let data = with_progress_until_end(&self.clock, data);
        let content = output::store_output(self, "content", u64::MAX, data).await;
        let content = content.map_err(Failure::from_transfer)?;
        let mut result = path_result(path);
        result.insert("result".into(), json!(true));
        result.insert("stat_result".into(), stat_result(&facts));
        Ok(CommandOutcome { result, outputs: vec![content] })
    }

    /// Waits with a backoff until an unreachable guest is ready again.
    async fn wait_reachable(&self, row: &AgentOperationRow, backoff: &mut Duration) {
        // The node may not have noticed yet that the guest is unreachable.
        tokio::time::sleep(*backoff).await;
        *backoff = (*backoff * 2).min(MAX_BACKOFF);
        self.app.agents.wait_ready(&self.node, row.instance).await;
    }
}

fn path_result(path: &str) -> Map<String, Value> {
    Map::from_iter([("path".to_owned(), json!(path))])
}

/// Returns the outcome of a failed command.
fn failure_outcome(command: Option<&AgentCommand>, reason: &str) -> CommandOutcome<'static> {
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
    result.insert("message".into(), json!(reason));
    CommandOutcome { result, outputs: vec![] }
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
fn shell_quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_paths_for_the_shell() {
        assert_eq!(shell_quoted("/a b"), "'/a b'");
        assert_eq!(shell_quoted("/it's; $(reboot)"), r"'/it'\''s; $(reboot)'");
    }

    #[test]
    fn retries_unreachable_guests_only() {
        let failure = |error: GuestError| Failure::from(error);
        assert!(matches!(failure(GuestError::Unreachable("x".into())), Failure::Unreachable(_)));
        assert!(matches!(failure(GuestError::Restarted("new".into())), Failure::Unreachable(_)));
        assert!(
            matches!(failure(GuestError::Refused("no".into())), Failure::Permanent(reason) if reason == "no")
        );
        assert!(matches!(Failure::from_transfer(Error::Unavailable("x".into())), Failure::Unreachable(_)));
        assert!(
            matches!(Failure::from_transfer(Error::Conflict("x".into())), Failure::Permanent(reason) if reason == "x")
        );
        let ours = Failure::from_transfer(Error::Internal("secret".into()));
        assert!(matches!(ours, Failure::Permanent(reason) if reason == "server error"));
    }
}
