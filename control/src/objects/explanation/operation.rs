//! Why an operation is in its state.

use muster_types::Result;
use muster_types::explanation::{AwaitedObject, Explanation, NextStep};
use muster_types::ids::OperationId;
use muster_types::object::ObjectType;
use muster_types::operation::{OperationRecord, OperationState};

use super::{MAX_EVENTS, describe, last, reason};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::operation;
use muster_store::explanations;
use muster_store::operations::OperationRow;
use muster_types::event::EventRecord;
use muster_types::event_message::EventMessage;

/// Explains an operation that the caller may read.
pub async fn explain_operation(
    app: &App,
    caller: &Caller,
    operation_type: &str,
    id: &str,
) -> Result<Explanation> {
    let row = operation::find_readable(app, caller, operation_type, id).await?;
    let is_queued = row.state == OperationState::Queued;
    let depends_on = row.depends_on.iter().filter(|_| is_queued).map(|parent| parent.op_uuid);
    let depends_on: Vec<OperationId> = depends_on.collect();
    let (parents, events) = explanations::of_operation(&*app.store, row.id, &depends_on, MAX_EVENTS).await?;
    let record = operation::record_without_metadata(row);
    let waits_for = unfinished(parents);
    Ok(Explanation {
        object_type: ObjectType::ClusterOperation.to_string(),
        uuid: record.uuid.to_string(),
        name: None,
        state: record.state.to_string(),
        since: Some(record.updated),
        why: why(&record, &events, !waits_for.is_empty()),
        waits_for,
        next: next(&record),
        placement: vec![],
    })
}

/// Returns the unfinished operations among those that an operation depends on. Only their types and states are shown: they may
/// belong to another namespace.
fn unfinished(parents: Vec<OperationRow>) -> Vec<AwaitedObject> {
    let unfinished = parents.into_iter().filter(|row| !row.state.is_final());
    let awaited = unfinished.map(|row| AwaitedObject {
        object_type: ObjectType::ClusterOperation.to_string(),
        uuid: row.id.to_string(),
        state: row.state.to_string(),
        text: row.operation_type.to_string(),
    });
    awaited.collect()
}

fn why(record: &OperationRecord, events: &[EventRecord], has_parents: bool) -> String {
    let failure = record.error_report.as_ref().map(|report| report.message.clone());
    let work = describe(record);
    match record.state {
        OperationState::Queued if has_parents => format!("{work}: it waits for other operations"),
        OperationState::Queued => {
            let retried = EventMessage::OperationState(OperationState::Queued);
            match last(events, &retried).and_then(reason) {
                Some(reason) => format!("{work}: the last attempt failed and will be repeated: {reason}"),
                None => format!("{work}: it waits for a worker"),
            }
        }
        OperationState::Executing => format!("{work}: it is in progress"),
        OperationState::Complete => format!("{work}: it is complete"),
        OperationState::Error => {
            format!("{work}: it failed: {}", failure.as_deref().unwrap_or("no reason was recorded"))
        }
        OperationState::Abort => {
            format!(
                "{work}: it was cancelled, because an operation before it failed or its object is deleted"
            )
        }
    }
}

fn next(record: &OperationRecord) -> Vec<NextStep> {
    match record.state {
        OperationState::Queued | OperationState::Executing | OperationState::Complete => vec![],
        OperationState::Error | OperationState::Abort => {
            let noun = &record.target_object_type;
            let step = format!("muster {noun} events {}", record.target_uuid);
            vec![NextStep::command("read the events of its object", step)]
        }
    }
}
