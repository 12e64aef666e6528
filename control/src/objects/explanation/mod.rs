//! Explains why an object is in its state, from its record, its unfinished operations and its events.

mod instance;
mod network;
mod operation;
mod placement;

use muster_store::operations::OperationRow;
use muster_types::event::EventRecord;
use muster_types::event_message::EventMessage;
use muster_types::explanation::AwaitedObject;
use muster_types::object::ObjectType;
use muster_types::operation::{OperationRecord, OperationState};
use muster_types::time::format_utc;

use crate::objects::operation::record_without_metadata;

pub use instance::explain_instance;
pub use network::explain_network;
pub use operation::explain_operation;

/// The number of events that are searched for a reason.
const MAX_EVENTS: i64 = 200;
/// Fields of an event that contain a reason.
const REASON_FIELDS: [&str; 3] = ["reason", "error", "error_message"];

/// Returns the latest event with a message.
fn last<'a>(events: &'a [EventRecord], message: &EventMessage) -> Option<&'a EventRecord> {
    let text = message.to_string();
    events.iter().find(|event| event.message == text)
}

/// Returns the reason that an event gives.
fn reason(event: &EventRecord) -> Option<String> {
    let value =
        REASON_FIELDS.iter().find_map(|name| event.extra.get(*name)).filter(|value| !value.is_null())?;
    // An error report contains its message as a field.
    let value = value.get("message").unwrap_or(value);
    Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

/// Returns an unfinished operation as something that is waited for.
fn awaited(operation: OperationRow) -> AwaitedObject {
    let operation = record_without_metadata(operation);
    AwaitedObject {
        object_type: ObjectType::ClusterOperation.to_string(),
        uuid: operation.uuid.to_string(),
        state: operation.state.to_string(),
        text: describe(&operation),
    }
}

/// Describes what an operation does, and how far it is.
fn describe(operation: &OperationRecord) -> String {
    let mut text = if operation.tasks.is_empty() {
        operation.operation_type.to_string()
    } else {
        operation.tasks.join(", ")
    };
    text.push_str(&format!(" since {}", format_utc(operation.created)));
    if operation.state == OperationState::Queued && operation.attempts > 0 {
        text.push_str(&format!(", tried {} times", operation.attempts));
    } else if operation.attempts > 1 {
        text.push_str(&format!(", attempt {}", operation.attempts));
    }
    if let Some(progress) = &operation.progress {
        text.push_str(&format!(", {}", megabytes(progress.done)));
        if let Some(total) = progress.total {
            text.push_str(&format!(" of {}", megabytes(total)));
        }
    }
    text
}

fn megabytes(bytes: i64) -> String {
    format!("{} MB", bytes / 1_000_000)
}
