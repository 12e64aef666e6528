//! `muster operation`.

use clap::Subcommand;
use clap::builder::PossibleValuesParser;
use muster_types::object::ObjectType;
use muster_types::operation::{OperationHandle, OperationRecord, OperationState, OperationType};

use super::list::{ListOptions, ListView};
use super::metadata;
use super::session::Session;
use super::wait::PollTimer;
use super::why;
use crate::api::{Client, ObjectPath};
use crate::exit_code::timed_out;
use crate::output::{Table, escape_control, or_dash};
use crate::time::format_utc;

/// How operations are listed.
pub(super) const LIST: ListView<OperationRecord> = ListView {
    table,
    wide: &["attempts", "created", "updated", "namespace"],
    order: &[],
    watched: &[ObjectType::ClusterOperation],
};

/// Commands for operations.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show an operation
    Show {
        #[arg(value_name = "TYPE", value_parser = operation_types())]
        operation_type: String,
        uuid: String,
    },
    /// Explain the state of an operation, and what to do
    Why {
        #[arg(value_name = "TYPE", value_parser = operation_types())]
        operation_type: String,
        uuid: String,
    },
    /// List an operation and its dependencies, newest first
    Chain {
        uuid: String,
        #[command(flatten)]
        list: ListOptions,
    },
    /// List the operations on an object, newest first
    List {
        /// Type of the object, such as namespace or node
        #[arg(long, value_name = "TYPE")]
        target_type: String,
        /// Id of the object, or name of a namespace
        #[arg(long, value_name = "ID")]
        target: String,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show the metadata of an operation
    Metadata {
        #[arg(value_name = "TYPE", value_parser = operation_types())]
        operation_type: String,
        uuid: String,
    },
    /// Set a metadata key of an operation
    SetMetadata {
        #[arg(value_name = "TYPE", value_parser = operation_types())]
        operation_type: String,
        uuid: String,
        #[command(flatten)]
        item: metadata::MetadataItem,
    },
    /// Delete a metadata key of an operation
    DeleteMetadata {
        #[arg(value_name = "TYPE", value_parser = operation_types())]
        operation_type: String,
        uuid: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

fn operation_types() -> PossibleValuesParser {
    PossibleValuesParser::new(OperationType::ALL.iter().map(|operation_type| operation_type.as_str()))
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::Show { operation_type, uuid } => {
            session.show(client.operation(&operation_type, &uuid).await?, details)
        }
        Command::Why { operation_type, uuid } => {
            why::explain(session, ObjectPath::Operation(&operation_type, &uuid)).await
        }
        Command::Chain { uuid, list } => {
            let query = list.query();
            session.list(&list, &LIST, || client.operation_chain(&uuid, &query)).await
        }
        Command::List { target_type, target, list } => {
            let query = list.query();
            session.list(&list, &LIST, || client.operations(&target_type, &target, &query)).await
        }
        Command::Metadata { operation_type, uuid } => {
            metadata::show(session, ObjectPath::Operation(&operation_type, &uuid)).await
        }
        Command::SetMetadata { operation_type, uuid, item } => {
            metadata::set(session, ObjectPath::Operation(&operation_type, &uuid), &item).await
        }
        Command::DeleteMetadata { operation_type, uuid, item } => {
            metadata::delete(session, ObjectPath::Operation(&operation_type, &uuid), &item).await
        }
    }
}

/// Waits until an operation has ended. Returns why it failed, if it did.
pub(super) async fn wait_until_complete(
    client: &Client,
    handle: &OperationHandle,
    mut timer: PollTimer,
    consequence: &str,
) -> anyhow::Result<Option<String>> {
    loop {
        let record = client.operation(handle.op_type.as_str(), &handle.op_uuid.to_string()).await?.value()?;
        match record.state {
            OperationState::Queued | OperationState::Executing => {}
            OperationState::Complete => return Ok(None),
            OperationState::Error | OperationState::Abort => {
                return Ok(Some(escape_control(&error(&record))));
            }
        }
        if !timer.tick().await {
            return Err(timed_out(format!("timed out; {consequence}")));
        }
    }
}

fn target(operation: &OperationRecord) -> String {
    format!("{} {}", operation.target_object_type, operation.target_uuid)
}

/// Returns why an operation failed, if it did.
pub(super) fn error(operation: &OperationRecord) -> String {
    let error = operation.error_report.as_ref();
    error.map_or_else(|| "-".to_owned(), |error| format!("{} ({})", error.message, error.code))
}

/// Lists operations.
fn table(operations: Vec<OperationRecord>) -> Table {
    let table = Table::new(&["UUID", "TYPE", "STATE"], &["TARGET", "ERROR"]);
    table.rows(operations.into_iter().map(|operation| {
        [
            operation.uuid.to_string(),
            operation.operation_type.to_string(),
            operation.state.to_string(),
            target(&operation),
            error(&operation),
        ]
    }))
}

fn details(operation: OperationRecord) -> Table {
    let parents = operation.depends_on.iter().map(|parent| format!("{} {}", parent.op_type, parent.op_uuid));
    let details = [
        ("uuid", operation.uuid.to_string()),
        ("type", operation.operation_type.to_string()),
        ("state", operation.state.to_string()),
        ("error", error(&operation)),
        ("target", target(&operation)),
        ("steps", operation.tasks.join(", ")),
        ("depends on", or_dash(parents.collect::<Vec<_>>().join(", "))),
        ("attempts", operation.attempts.to_string()),
        ("created", format_utc(operation.created)),
        ("updated", format_utc(operation.updated)),
        ("namespace", or_dash(operation.namespace.unwrap_or_default())),
    ];
    Table::key_values(details.map(|(name, value)| (name.to_owned(), value)))
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn shows_why_an_operation_failed() {
        let operation: OperationRecord = from_value(json!({
            "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "object_type": "clusteroperation",
            "operation_type": "namespace_op", "state": "error", "tasks": ["revoke", "clean"], "depends_on": [],
            "error_report": { "code": "internal.unknown", "message": "it broke", "details": {} }, "namespace": "ci",
            "target_object_type": "namespace", "target_uuid": "ci", "attempts": 3, "created": 1_767_225_600.0,
            "updated": 1_767_225_601.0, "version": 1
        }))
        .unwrap();
        let text = details(operation.clone()).render(None);
        assert!(text.contains("error       it broke (internal.unknown)\n"), "{text}");
        assert!(text.contains("steps       revoke, clean\n"), "{text}");
        let text = table(vec![operation]).render(None);
        assert!(text.ends_with("namespace ci  it broke (internal.unknown)\n"), "{text}");
    }
}
