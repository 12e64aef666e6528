//! Agent operations: what callers want done inside guests. This file takes them in and shows them; how they end is in
//! `end.rs`, and who does them is `reconcile/agent_operations.rs`.
//!
//! | what | own namespace | trusted by the owner | `system` | anyone else |
//! |---|---|---|---|---|
//! | list and read | yes | yes | yes | 404 |
//! | create and delete | yes | 404 | yes | 404 |

pub(crate) mod clock;
pub(crate) mod end;
mod mode;
mod output;
pub(crate) mod perform;

pub use mode::parse as parse_mode;

use std::sync::Arc;

use muster_types::agent_operation::{AgentCommand, AgentOperationRecord, AgentOperationState};
use muster_types::blob::BlobState;
use muster_types::event::Event;
use muster_types::guest::GuestError;
use muster_types::ids::{AgentOperationId, BlobId, InstanceId};
use muster_types::instance::{InstanceState, agent_is_ready};
use muster_types::node::NodeApi;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;
use muster_types::{Error, Result};
use serde_json::{Map, Value};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::{blob, instance};
use muster_store::agent_operations::{
    self, AgentOperationOutcome, AgentOperationRow, NewAgentOperation, QueueLimits,
};
use muster_store::instances::{self, InstanceRow};
use muster_store::{Read, blobs, metadata, references, transaction};

/// Version of the record's format.
const VERSION: i64 = 3;
/// Operations read at once for a list.
const PAGE: i64 = 200;
/// What may wait at one instance.
const ROOM: QueueLimits = QueueLimits { operations: 100, bytes: 256 << 10 };
const LONGEST_PATH: usize = 4096;
const LONGEST_COMMAND_LINE: usize = 64 << 10;

/// How an operation uses the content that it puts into a guest, until it has ended.
const AGENT_INPUT: &str = "agent_input";
/// How an operation uses what came out of a guest; the value is `stdout`, `stderr` or `content`.
pub(crate) const AGENT_OUTPUT: &str = "agent_output";

/// How long an operation may take. Nothing: the default; 0: without an end.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Budgets {
    pub deadline_seconds: Option<f64>,
    pub progress_timeout_seconds: Option<f64>,
}

/// What a caller wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    Execute {
        command_line: String,
    },
    /// Blob and mode as the caller wrote them: whether the instance is ready is looked at first.
    Put {
        blob: String,
        path: String,
        mode: Option<Value>,
    },
    Get {
        path: String,
    },
}

impl Wanted {
    fn word(&self) -> &'static str {
        match self {
            Self::Execute { .. } => "execute",
            Self::Put { .. } => "put",
            Self::Get { .. } => "get",
        }
    }

    /// Refuses what no guest could be asked.
    fn check(&self) -> Result<()> {
        match self {
            Self::Execute { command_line } => {
                check_text("command_line", command_line, LONGEST_COMMAND_LINE)?;
                // What takes six bytes on its way for each of its own would be more than an agent reads at once.
                let written = serde_json::to_string(command_line).map_or(usize::MAX, |text| text.len());
                if written > 2 * LONGEST_COMMAND_LINE {
                    return Err(Error::Invalid("command_line: has too many control characters".into()));
                }
                Ok(())
            }
            Self::Put { path, .. } | Self::Get { path } => {
                check_text("path", path, LONGEST_PATH)?;
                if path.starts_with('/') {
                    Ok(())
                } else {
                    Err(Error::Invalid("path: must be absolute".into()))
                }
            }
        }
    }

    fn commands(&self) -> Result<Vec<AgentCommand>> {
        Ok(match self.clone() {
            Self::Execute { command_line } => {
                vec![AgentCommand::Execute { commandline: command_line, block_for_result: true }]
            }
            Self::Put { blob, path, mode } => {
                let mode = mode.as_ref().map(parse_mode).transpose()?;
                let blob_uuid = blob.parse().map_err(|_| Error::not_found("blob"))?;
                let put = AgentCommand::PutBlob { blob_uuid, path: path.clone() };
                std::iter::once(put).chain(mode.map(|mode| AgentCommand::Chmod { path, mode })).collect()
            }
            Self::Get { path } => vec![AgentCommand::GetFile { path }],
        })
    }
}

fn check_text(field: &str, text: &str, most: usize) -> Result<()> {
    let bad = |why: &str| Err(Error::Invalid(format!("{field}: {why}")));
    if text.is_empty() {
        return bad("must not be empty");
    }
    if text.contains('\0') {
        return bad("must not contain NUL");
    }
    if text.len() > most {
        return bad(&format!("must be at most {most} bytes"));
    }
    Ok(())
}

/// The content that is put into a guest.
pub(crate) fn input(commands: &[AgentCommand]) -> Option<BlobId> {
    commands.iter().find_map(|command| match command {
        AgentCommand::PutBlob { blob_uuid, .. } => Some(*blob_uuid),
        AgentCommand::Execute { .. } | AgentCommand::Chmod { .. } | AgentCommand::GetFile { .. } => None,
    })
}

/// The operation as the subject of events.
pub fn object(id: AgentOperationId) -> ObjectRef {
    ObjectRef::new(ObjectType::AgentOperation, id)
}

/// An audit event of an operation and of its instance, with the request that asked for the operation.
pub(crate) fn audit(row: &AgentOperationRow, message: &str) -> Event {
    let mut event = Event::audit(object(row.id), message).also(instance::object(row.instance));
    event.request_id.clone_from(&row.request_id);
    event.with("operation_uuid", row.id.to_string())
}

/// Queues something to be done inside an instance that the caller was found to own.
pub async fn create(
    app: &App,
    caller: &Caller,
    instance: InstanceId,
    wanted: Wanted,
    budgets: Budgets,
) -> Result<AgentOperationRecord> {
    let received = now();
    let row = instances::get(&*app.store, instance).await?.ok_or_else(|| Error::not_found("instance"))?;
    require_ready(&row)?;
    let (deadline, progress_timeout) = read_budgets(app, &wanted, budgets, received)?;
    wanted.check()?;
    let commands = wanted.commands()?;
    let blob = input(&commands);
    if let Some(blob) = blob {
        // Whoever knows its id may read it.
        let found = blobs::get(&*app.store, blob).await?;
        found.filter(|row| row.state == BlobState::Created).ok_or_else(|| Error::not_found("blob"))?;
    }
    let new = NewAgentOperation {
        id: AgentOperationId::new(),
        instance,
        namespace: row.namespace.clone(),
        state: blob.map_or(AgentOperationState::Queued, |_| AgentOperationState::Preflight),
        commands,
        deadline,
        progress_timeout,
        request_id: Some(caller.request_id.clone()),
    };
    let row = transaction!(app.store, |tx| {
        // The order of the instance's operations is decided while it is held.
        if !instances::lock(tx, instance, &[InstanceState::Created]).await? {
            return Err(instance::not_ready(&row).into());
        }
        let Some(queued) = agent_operations::insert(tx, &new, ROOM).await? else {
            let (most, kilobytes) = (ROOM.operations, ROOM.bytes >> 10);
            return Err(Error::Conflict(format!(
                "too much waits for the agent of the instance: it may be {most} agent operations, and {kilobytes} KiB \
                 of command lines and paths"
            ))
            .into());
        };
        if let Some(blob) = blob {
            if !blobs::lock(tx, blob).await? {
                return Err(Error::not_found("blob").into());
            }
            references::insert(tx, &object(new.id), AGENT_INPUT, None, &blob::object(blob)).await?;
        }
        Ok(queued)
    })?;
    app.agents.notify_changed(instance);
    let event = Event::audit(object(new.id), format!("agent {} request from REST API", wanted.word()))
        .also(instance::object(instance))
        .with("operation_uuid", new.id.to_string());
    app.record(caller, instance::asked(caller, event));
    one(&*app.store, row).await
}

/// Refuses what only a guest that is up can do.
fn require_ready(row: &InstanceRow) -> Result<()> {
    instance::require_created(row)?;
    if agent_is_ready(row.agent_state.as_deref()) {
        Ok(())
    } else {
        Err(Error::Invalid("instance agent not ready".into()))
    }
}

/// When the time of an operation is over, and for how many seconds it may stand still; 0 is without an end.
fn read_budgets(app: &App, wanted: &Wanted, budgets: Budgets, received: f64) -> Result<(f64, f64)> {
    let settings = &app.settings;
    let most = settings.agent_operation_max_deadline;
    let deadline = read_budget(
        "deadline_seconds",
        budgets.deadline_seconds,
        settings.agent_operation_default_deadline,
        most,
    )?;
    let progress = read_budget(
        "progress_timeout_seconds",
        budgets.progress_timeout_seconds,
        settings.agent_operation_default_progress_timeout,
        most,
    )?;
    let deadline = if deadline > 0.0 { received + deadline } else { 0.0 };
    // Nobody can see how far a command is.
    let progress = if matches!(wanted, Wanted::Execute { .. }) { 0.0 } else { progress };
    Ok((deadline, progress))
}

#[expect(clippy::cast_precision_loss, reason = "budgets are seconds")]
fn read_budget(name: &str, seconds: Option<f64>, usual: u64, most: u64) -> Result<f64> {
    let bad = |why: String| Err(Error::Invalid(format!("{name} must {why}")));
    match seconds {
        None => Ok(usual as f64),
        Some(seconds) if !seconds.is_finite() => bad("be a finite number of seconds".into()),
        Some(seconds) if seconds < 0.0 => bad("not be negative".into()),
        Some(seconds) if seconds > most as f64 => {
            bad(format!("not exceed this deployment's AGENT_OPERATION_MAX_DEADLINE of {most} seconds"))
        }
        Some(seconds) => Ok(seconds),
    }
}

/// The next page of the operations of an instance that the caller may read, in order. Unless `all`, only those that
/// have not ended.
pub async fn list_page(
    app: &App,
    instance: InstanceId,
    all: bool,
    after: Option<i64>,
) -> Result<(Vec<AgentOperationRecord>, Option<i64>)> {
    let rows = agent_operations::page(&*app.store, instance, all, after, PAGE).await?;
    let full = i64::try_from(rows.len()).is_ok_and(|count| count == PAGE);
    let next = rows.last().filter(|_| full).map(|row| row.sequence);
    Ok((records(&*app.store, rows).await?, next))
}

pub async fn get(app: &App, caller: &Caller, id: AgentOperationId) -> Result<AgentOperationRecord> {
    let row = find(app, caller, id).await?;
    one(&*app.store, row).await
}

/// An operation that the caller may read.
pub async fn find(app: &App, caller: &Caller, id: AgentOperationId) -> Result<AgentOperationRow> {
    let absent = || Error::not_found("agent operation");
    let row = agent_operations::get(&*app.store, id).await?.ok_or_else(absent)?;
    if caller.may_see(&*app.store, &row.namespace).await? { Ok(row) } else { Err(absent()) }
}

/// Deletes an operation. What is under way in the guest is ended.
pub async fn delete(app: &App, caller: &Caller, id: AgentOperationId) -> Result<AgentOperationRecord> {
    let row = find(app, caller, id).await?;
    if !caller.may_change(&row.namespace) {
        return Err(Error::not_found("agent operation"));
    }
    let news = transaction!(app.store, |tx| {
        let Some(row) = agent_operations::get(&mut *tx, id).await? else {
            return Err(Error::not_found("agent operation").into());
        };
        if row.state == AgentOperationState::Deleted {
            return Ok(false);
        }
        end::end_in(tx, &row, AgentOperationState::Deleted, &AgentOperationOutcome::default()).await?;
        Ok(true)
    })?;
    if news {
        app.agents.notify_changed(row.instance);
        let event = audit(&row, "agent operation deletion request from REST API");
        app.record(caller, instance::asked(caller, event));
    }
    get(app, caller, id).await
}

/// The record of one operation.
async fn one<D: Read + Copy>(db: D, row: AgentOperationRow) -> Result<AgentOperationRecord> {
    let mut records = records(db, vec![row]).await?;
    records.pop().ok_or_else(|| Error::not_found("agent operation"))
}

/// The records of rows, in few reads however many there are.
pub(crate) async fn records<D: Read + Copy>(
    db: D,
    rows: Vec<AgentOperationRow>,
) -> Result<Vec<AgentOperationRecord>> {
    let words: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
    let mut metadata_of = metadata::of_objects(db, ObjectType::AgentOperation, &words).await?;
    let mut references_of = references::of_objects(db, ObjectType::AgentOperation, &words).await?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let id = row.id.to_string();
            let references = references_of.remove(&id).unwrap_or_default();
            AgentOperationRecord {
                uuid: row.id,
                instance_uuid: row.instance,
                namespace: row.namespace,
                state: row.state,
                commands: row.commands,
                results: row.results,
                attempts: row.attempts,
                deadline: row.deadline,
                progress_timeout: row.progress_timeout,
                last_progress: row.last_progress,
                expiry_reason: row.expiry_reason,
                error_message: row.error_message,
                metadata: metadata_of.remove(&id).unwrap_or_default(),
                version: VERSION,
                references_to: references.to,
                references_from: references.from,
            }
        })
        .collect())
}

/// What a guest says of itself. Call it where the instance's node is.
pub async fn facts(
    _app: &App,
    node: &Arc<dyn NodeApi>,
    instance: &InstanceRow,
) -> Result<Map<String, Value>> {
    require_ready(instance)?;
    node.guests().facts(instance.id).await.map_err(|error| match error {
        GuestError::Refused(why) => Error::Conflict(why),
        other => Error::Unavailable(other.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use muster_types::agent_operation::Mode;

    use super::*;

    fn refusal(outcome: Result<impl std::fmt::Debug>) -> String {
        outcome.unwrap_err().to_string()
    }

    #[test]
    fn a_budget_is_within_its_limits_or_the_usual_one() {
        let read = |seconds| read_budget("deadline_seconds", seconds, 600, 86400);
        assert_eq!((read(None).unwrap(), read(Some(0.0)).unwrap()), (600.0, 0.0));
        assert_eq!((read(Some(0.5)).unwrap(), read(Some(86400.0)).unwrap()), (0.5, 86400.0));
        assert_eq!(refusal(read(Some(-0.1))), "deadline_seconds must not be negative");
        assert_eq!(refusal(read(Some(f64::NAN))), "deadline_seconds must be a finite number of seconds");
        assert_eq!(refusal(read(Some(f64::INFINITY))), "deadline_seconds must be a finite number of seconds");
        let text = "deadline_seconds must not exceed this deployment's AGENT_OPERATION_MAX_DEADLINE of 86400 seconds";
        assert_eq!(refusal(read(Some(86400.5))), text);
    }

    #[test]
    fn what_no_guest_could_be_asked_is_refused_by_its_field() {
        let get = |path: &str| Wanted::Get { path: path.into() }.check();
        let run = |line: &str| Wanted::Execute { command_line: line.into() }.check();
        assert!(get("/etc/hosts").is_ok() && run("true").is_ok() && run(&"x".repeat(64 << 10)).is_ok());
        assert_eq!(refusal(get("etc/hosts")), "path: must be absolute");
        assert_eq!(refusal(get("")), "path: must not be empty");
        assert_eq!(refusal(get("/a\0b")), "path: must not contain NUL");
        assert_eq!(refusal(get(&"/".repeat(4097))), "path: must be at most 4096 bytes");
        assert_eq!(refusal(run("")), "command_line: must not be empty");
        assert_eq!(refusal(run(&"x".repeat((64 << 10) + 1))), "command_line: must be at most 65536 bytes");
        assert!(run(&"\u{1}".repeat(20_000)).is_ok());
        assert_eq!(refusal(run(&"\u{1}".repeat(60_000))), "command_line: has too many control characters");
    }

    #[test]
    fn a_put_without_a_mode_changes_none() {
        let blob = BlobId::new();
        let put = |mode| Wanted::Put { blob: blob.to_string(), path: "/x".into(), mode }.commands();
        assert_eq!(put(None).unwrap().len(), 1);
        let with = put(Some(33188.into())).unwrap();
        assert!(matches!(&with[1], AgentCommand::Chmod { mode: Mode::Number(33188), .. }), "{with:?}");
        assert_eq!(input(&with), Some(blob));
        assert_eq!(refusal(put(Some("rw".into()))), "invalid mode: rw");
        let none = Wanted::Put { blob: "no uuid".into(), path: "/x".into(), mode: None };
        assert_eq!(refusal(none.commands()), "blob not found");
    }
}
