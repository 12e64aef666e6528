//! Agent operations: commands and file transfers inside guests. This module creates and lists them; `end.rs` ends them,
//! `perform.rs` performs them, and `reconcile/agent_operations.rs` starts them.
//! Interactive sessions are in `terminal.rs`.
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
pub mod terminal;

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
use crate::objects::agent_operation_record::{record, records};
use crate::objects::audit::with_caller;
use crate::objects::{blob, instance};
use muster_store::agent_operations::{
    self, AgentOperationOutcome, AgentOperationRow, NewAgentOperation, QueueLimits,
};
use muster_store::instances::{self, InstanceRow};
use muster_store::{blobs, references, transaction};

/// The number of operations in a page of a list.
const PAGE_SIZE: i64 = 200;
/// The maximum length of the queue of an instance.
const QUEUE_LIMITS: QueueLimits = QueueLimits { operations: 100, bytes: 256 << 10 };
const MAX_PATH_BYTES: usize = 4096;
const MAX_COMMAND_LINE_BYTES: usize = 64 << 10;

/// The relationship between an unfinished operation and the blob that it copies into a guest.
const AGENT_INPUT: &str = "agent_input";
/// The relationship between an operation and a blob from a guest; the value is `stdout`, `stderr` or `content`.
pub(crate) const AGENT_OUTPUT: &str = "agent_output";

/// How long an operation may take. `None` means the default, 0 no limit.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Budgets {
    pub deadline_seconds: Option<f64>,
    pub progress_timeout_seconds: Option<f64>,
}

/// A requested agent operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentOperationRequest {
    Execute {
        command_line: String,
    },
    /// Blob and mode are parsed after the check that the instance is ready.
    Put {
        blob: String,
        path: String,
        mode: Option<Value>,
    },
    Get {
        path: String,
    },
}

impl AgentOperationRequest {
    fn verb(&self) -> &'static str {
        match self {
            Self::Execute { .. } => "execute",
            Self::Put { .. } => "put",
            Self::Get { .. } => "get",
        }
    }

    /// Rejects what no agent accepts.
    fn check(&self) -> Result<()> {
        match self {
            Self::Execute { command_line } => {
                check_text("command_line", command_line, MAX_COMMAND_LINE_BYTES)?;
                // JSON escapes a control character with six bytes, so the message could exceed the limit of an agent.
                let written = serde_json::to_string(command_line).map_or(usize::MAX, |text| text.len());
                if written > 2 * MAX_COMMAND_LINE_BYTES {
                    return Err(Error::Invalid("command_line: has too many control characters".into()));
                }
                Ok(())
            }
            Self::Put { path, .. } | Self::Get { path } => {
                check_text("path", path, MAX_PATH_BYTES)?;
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

fn check_text(field: &str, text: &str, max: usize) -> Result<()> {
    let invalid = |reason: &str| Err(Error::Invalid(format!("{field}: {reason}")));
    if text.is_empty() {
        return invalid("must not be empty");
    }
    if text.contains('\0') {
        return invalid("must not contain NUL");
    }
    if text.len() > max {
        return invalid(&format!("must be at most {max} bytes"));
    }
    Ok(())
}

/// Returns the blob that is copied into a guest.
pub(crate) fn input_blob(commands: &[AgentCommand]) -> Option<BlobId> {
    commands.iter().find_map(|command| match command {
        AgentCommand::PutBlob { blob_uuid, .. } => Some(*blob_uuid),
        AgentCommand::Execute { .. } | AgentCommand::Chmod { .. } | AgentCommand::GetFile { .. } => None,
    })
}

/// Returns the operation as the subject of events.
pub fn object(id: AgentOperationId) -> ObjectRef {
    ObjectRef::new(ObjectType::AgentOperation, id)
}

/// Returns an audit event of an operation and its instance, with the id of the request that created the operation.
pub(crate) fn audit(row: &AgentOperationRow, message: &str) -> Event {
    let mut event = Event::audit(object(row.id), message).with_object(instance::object(row.instance));
    event.request_id.clone_from(&row.request_id);
    event.with("operation_uuid", row.id.to_string())
}

/// Queues an operation for an instance that the caller may change.
pub async fn create(
    app: &App,
    caller: &Caller,
    instance: InstanceId,
    request: AgentOperationRequest,
    budgets: Budgets,
) -> Result<AgentOperationRecord> {
    let received = now();
    let row = instances::get(&*app.store, instance).await?.ok_or_else(|| Error::not_found("instance"))?;
    instance::require_created(&row)?;
    // The agent of an instance whose node does not check in is not ready, either.
    instance::locate(app, &row).await?;
    require_ready(&row)?;
    let (deadline, progress_timeout) = read_budgets(app, &request, budgets, received)?;
    request.check()?;
    let commands = request.commands()?;
    let blob = input_blob(&commands);
    if let Some(blob) = blob {
        // Knowing the id of a blob implies reading it.
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
        // The lock on the instance defines the order of its operations.
        if !instances::lock(tx, instance, &[InstanceState::Created]).await? {
            return Err(instance::not_ready(&row).into());
        }
        let Some(queued) = agent_operations::insert(tx, &new, QUEUE_LIMITS).await? else {
            let (max, kilobytes) = (QUEUE_LIMITS.operations, QUEUE_LIMITS.bytes >> 10);
            return Err(Error::Conflict(format!(
                "the agent queue of the instance is full: it can hold {max} agent operations and {kilobytes} KiB of \
                 command lines and paths"
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
    let event = Event::audit(object(new.id), format!("agent {} request from REST API", request.verb()))
        .with_object(instance::object(instance))
        .with("operation_uuid", new.id.to_string());
    app.record(caller, with_caller(caller, event));
    record(&*app.store, row).await
}

/// Rejects an instance whose agent is not ready.
fn require_ready(row: &InstanceRow) -> Result<()> {
    instance::require_created(row)?;
    if agent_is_ready(row.agent_state.as_deref()) {
        Ok(())
    } else {
        Err(Error::Invalid("instance agent not ready".into()))
    }
}

/// Returns when an operation expires and after how many seconds without progress it fails; 0 means never.
fn read_budgets(
    app: &App,
    request: &AgentOperationRequest,
    budgets: Budgets,
    received: f64,
) -> Result<(f64, f64)> {
    let settings = &app.settings;
    let max = settings.agent_operation_max_deadline;
    let deadline = read_budget(
        "deadline_seconds",
        budgets.deadline_seconds,
        settings.agent_operation_default_deadline,
        max,
    )?;
    let progress = read_budget(
        "progress_timeout_seconds",
        budgets.progress_timeout_seconds,
        settings.agent_operation_default_progress_timeout,
        max,
    )?;
    let deadline = if deadline > 0.0 { received + deadline } else { 0.0 };
    // The progress of a command is not visible.
    let progress = if matches!(request, AgentOperationRequest::Execute { .. }) { 0.0 } else { progress };
    Ok((deadline, progress))
}

#[expect(clippy::cast_precision_loss, reason = "budgets are seconds")]
fn read_budget(name: &str, seconds: Option<f64>, default: u64, max: u64) -> Result<f64> {
    let invalid = |reason: String| Err(Error::Invalid(format!("{name} must {reason}")));
    match seconds {
        None => Ok(default as f64),
        Some(seconds) if !seconds.is_finite() => invalid("be a finite number of seconds".into()),
        Some(seconds) if seconds < 0.0 => invalid("not be negative".into()),
        Some(seconds) if seconds > max as f64 => {
            invalid(format!("not exceed this deployment's AGENT_OPERATION_MAX_DEADLINE of {max} seconds"))
        }
        Some(seconds) => Ok(seconds),
    }
}

/// Returns the next page of the operations of an instance, in order; without `all`, only unfinished ones.
pub async fn list_page(
    app: &App,
    instance: InstanceId,
    all: bool,
    after: Option<i64>,
) -> Result<(Vec<AgentOperationRecord>, Option<i64>)> {
    let rows = agent_operations::page(&*app.store, instance, all, after, PAGE_SIZE).await?;
    let full = i64::try_from(rows.len()).is_ok_and(|count| count == PAGE_SIZE);
    let next = rows.last().filter(|_| full).map(|row| row.sequence);
    Ok((records(&*app.store, rows).await?, next))
}

pub async fn get(app: &App, caller: &Caller, id: AgentOperationId) -> Result<AgentOperationRecord> {
    let row = find(app, caller, id).await?;
    record(&*app.store, row).await
}

/// Returns an operation that the caller may read.
pub async fn find(app: &App, caller: &Caller, id: AgentOperationId) -> Result<AgentOperationRow> {
    let absent = || Error::not_found("agent operation");
    let row = agent_operations::get(&*app.store, id).await?.ok_or_else(absent)?;
    if caller.may_see(&*app.store, &row.namespace).await? { Ok(row) } else { Err(absent()) }
}

/// Returns an operation that the caller may change.
pub async fn find_own(app: &App, caller: &Caller, id: AgentOperationId) -> Result<AgentOperationRow> {
    let row = find(app, caller, id).await?;
    if caller.may_change(&row.namespace) { Ok(row) } else { Err(Error::not_found("agent operation")) }
}

/// Deletes an operation and cancels it if it is running.
pub async fn delete(app: &App, caller: &Caller, id: AgentOperationId) -> Result<AgentOperationRecord> {
    let row = find_own(app, caller, id).await?;
    let deleted = transaction!(app.store, |tx| {
        let Some(row) = agent_operations::get(&mut *tx, id).await? else {
            return Err(Error::not_found("agent operation").into());
        };
        if row.state == AgentOperationState::Deleted {
            return Ok(false);
        }
        end::end_in(tx, &row, AgentOperationState::Deleted, &AgentOperationOutcome::default()).await?;
        Ok(true)
    })?;
    if deleted {
        app.agents.notify_changed(row.instance);
        let event = audit(&row, "agent operation deletion request from REST API");
        app.record(caller, with_caller(caller, event));
    }
    get(app, caller, id).await
}

/// Returns the facts that a guest reports. Call it on the daemon of the instance's node.
pub async fn facts(
    _app: &App,
    node: &Arc<dyn NodeApi>,
    instance: &InstanceRow,
) -> Result<Map<String, Value>> {
    require_ready(instance)?;
    node.guests().facts(instance.id).await.map_err(guest_error)
}

/// Converts the error of a request that was sent to a guest directly.
fn guest_error(error: GuestError) -> Error {
    match error {
        GuestError::Refused(reason) => Error::Conflict(reason),
        other => Error::Unavailable(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use muster_types::agent_operation::ChmodMode;

    use super::*;

    fn refusal(outcome: Result<impl std::fmt::Debug>) -> String {
        outcome.unwrap_err().to_string()
    }

    #[test]
    fn budgets_are_limited_and_have_defaults() {
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
    fn rejects_requests_that_no_agent_accepts() {
        let get = |path: &str| AgentOperationRequest::Get { path: path.into() }.check();
        let run = |line: &str| AgentOperationRequest::Execute { command_line: line.into() }.check();
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
    fn put_without_mode_does_not_chmod() {
        let blob = BlobId::new();
        let put =
            |mode| AgentOperationRequest::Put { blob: blob.to_string(), path: "/x".into(), mode }.commands();
        assert_eq!(put(None).unwrap().len(), 1);
        let with = put(Some(33188.into())).unwrap();
        assert!(matches!(&with[1], AgentCommand::Chmod { mode: ChmodMode::Number(33188), .. }), "{with:?}");
        assert_eq!(input_blob(&with), Some(blob));
        assert_eq!(refusal(put(Some("rw".into()))), "invalid mode: rw");
        let none = AgentOperationRequest::Put { blob: "no uuid".into(), path: "/x".into(), mode: None };
        assert_eq!(refusal(none.commands()), "blob not found");
    }
}
