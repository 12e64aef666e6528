//! `muster agent`: pending and finished operations inside guests.

use clap::Subcommand;
use muster_types::agent_operation::{AgentCommand, AgentOperationRecord, ChmodMode};
use muster_types::object::ObjectType;

use super::events;
use super::list::{ListOptions, ListView};
use super::lookup::{NamedType, resolve};
use super::metadata;
use super::session::Session;
use crate::api::ObjectPath;
use crate::output::{Table, compact, or_dash};
use crate::time::format_utc;

const LIST: ListView<AgentOperationRecord> = ListView {
    table,
    wide: &["deadline", "error_message", "namespace"],
    order: &[],
    watched: &[ObjectType::AgentOperation],
};

/// Commands for agent operations, which `muster exec` and `muster cp` create.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the pending agent operations of an instance in execution order
    List {
        instance: String,
        /// Include finished operations
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show an agent operation and its results
    Show { uuid: String },
    /// Delete an agent operation; a running command is killed
    Delete { uuid: String },
    /// Show the events of an agent operation, newest first
    Events {
        uuid: String,
        #[command(flatten)]
        filter: events::EventFilter,
    },
    /// Show the metadata of an agent operation
    Metadata { uuid: String },
    /// Set a metadata key of an agent operation
    SetMetadata {
        uuid: String,
        #[command(flatten)]
        item: metadata::MetadataItem,
    },
    /// Delete a metadata key of an agent operation
    DeleteMetadata {
        uuid: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List { mut instance, all, list } => {
            resolve(client, NamedType::Instance, &mut instance, None).await?;
            let query = list.query();
            session.list(&list, &LIST, || client.agent_operations(&instance, all, &query)).await
        }
        Command::Show { uuid } => session.show(client.agent_operation(&uuid).await?, details),
        Command::Delete { uuid } => {
            let response = client.delete_agent_operation(&uuid).await?;
            session.confirm(&response, &format!("agent operation {uuid} deleted"))
        }
        Command::Events { uuid, filter } => {
            events::show(session, ObjectPath::AgentOperation(&uuid), &filter).await
        }
        Command::Metadata { uuid } => metadata::show(session, ObjectPath::AgentOperation(&uuid)).await,
        Command::SetMetadata { uuid, item } => {
            metadata::set(session, ObjectPath::AgentOperation(&uuid), &item).await
        }
        Command::DeleteMetadata { uuid, item } => {
            metadata::delete(session, ObjectPath::AgentOperation(&uuid), &item).await
        }
    }
}

/// Describes a command in one line.
fn describe_command(command: &AgentCommand) -> String {
    match command {
        AgentCommand::Execute { commandline, .. } => format!("execute {commandline}"),
        AgentCommand::PutBlob { blob_uuid, path } => format!("put blob {blob_uuid} at {path}"),
        AgentCommand::Chmod { path, mode: ChmodMode::Number(mode) } => {
            format!("set mode {:o} of {path}", mode & 0o7777)
        }
        AgentCommand::Chmod { path, mode: ChmodMode::Symbolic(mode) } => format!("set mode {mode} of {path}"),
        AgentCommand::GetFile { path } => format!("get {path}"),
    }
}

/// Describes all commands of an operation in one line.
pub(super) fn describe(operation: &AgentOperationRecord) -> String {
    operation.commands.iter().map(describe_command).collect::<Vec<_>>().join(", ")
}

/// Returns why an operation failed, if it did.
pub(super) fn failure(operation: &AgentOperationRecord) -> Option<String> {
    let expired = operation.expiry_reason.map(|reason| format!("its {reason} timeout expired"));
    operation.error_message.clone().or(expired)
}

fn outcome(operation: &AgentOperationRecord) -> String {
    let code = || operation.results.get("0")?.get("return-code").map(|code| format!("returned {code}"));
    or_dash(failure(operation).or_else(code).unwrap_or_default())
}

fn table(operations: Vec<AgentOperationRecord>) -> Table {
    let table = Table::new(&["UUID", "STATE", "ATTEMPTS"], &["WHAT", "OUTCOME"]);
    table.rows(operations.into_iter().map(|operation| {
        let (description, outcome) = (describe(&operation), outcome(&operation));
        [
            operation.uuid.to_string(),
            operation.state.to_string(),
            operation.attempts.to_string(),
            description,
            outcome,
        ]
    }))
}

fn details(operation: AgentOperationRecord) -> Table {
    let unless_zero = |value: f64, text: String| if value > 0.0 { text } else { "-".to_owned() };
    let (timeout, failure) = (operation.progress_timeout, failure(&operation));
    let details = [
        ("uuid", operation.uuid.to_string()),
        ("instance", operation.instance_uuid.to_string()),
        ("namespace", operation.namespace),
        ("state", operation.state.to_string()),
        ("failure", or_dash(failure.unwrap_or_default())),
        ("attempts", operation.attempts.to_string()),
        ("deadline", unless_zero(operation.deadline, format_utc(operation.deadline))),
        ("progress timeout", unless_zero(timeout, format!("{timeout} s"))),
        ("last progress", or_dash(operation.last_progress.map(format_utc).unwrap_or_default())),
    ];
    let details = details.map(|(name, value)| (name.to_owned(), value)).into_iter();
    let commands = operation.commands.iter().enumerate();
    let commands = commands.map(|(at, command)| (format!("command {at}"), describe_command(command)));
    let results = operation.results.iter().flat_map(|(at, result)| {
        result.iter().map(move |(name, value)| (format!("result {at} {name}"), compact(value)))
    });
    Table::key_values(details.chain(commands).chain(results))
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    /// Creates a successful operation with some fields replaced.
    pub(in crate::commands) fn example(changes: &Value) -> AgentOperationRecord {
        let mut record = json!({
            "uuid": "7d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "instance_uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
            "namespace": "ci", "state": "complete", "attempts": 1, "deadline": 1_767_225_600.0,
            "commands": [{ "command": "execute", "commandline": "uptime", "block-for-result": true }],
            "results": { "0": {
                "command-line": "uptime", "result": true, "return-code": 0, "stdout": "up\n", "stderr": ""
            } },
            "progress_timeout": 0.0, "last_progress": null, "expiry_reason": null, "error_message": null,
            "metadata": {}, "version": 3, "references_to": {}, "references_from": {}
        });
        for (name, value) in changes.as_object().into_iter().flatten() {
            record[name] = value.clone();
        }
        from_value(record).unwrap()
    }

    #[test]
    fn shows_commands_and_outcome_of_an_operation() {
        let text = table(vec![example(&json!({}))]).render(None);
        assert!(text.ends_with("complete  1         execute uptime  returned 0\n"), "{text}");
        let text = details(example(&json!({}))).render(None);
        assert!(text.contains("deadline               2026-01-01T00:00:00.000Z\n"), "{text}");
        assert!(text.contains("command 0              execute uptime\n"), "{text}");
        assert!(text.contains("result 0 stdout        up\\n\n"), "{text}");
    }

    #[test]
    fn shows_why_an_operation_failed() {
        let put = json!([
            { "command": "put-blob", "blob_uuid": "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "path": "/a" },
            { "command": "chmod", "path": "/a", "mode": 33188 }
        ]);
        let expired = example(&json!({
            "state": "expired", "expiry_reason": "progress", "commands": put, "results": {}, "deadline": 0.0
        }));
        let text = table(vec![expired.clone()]).render(None);
        assert!(text.contains(" at /a, set mode 644 of /a  its progress timeout expired\n"), "{text}");
        assert!(details(expired).render(None).contains("deadline          -\n"));
        let failed = example(&json!({ "state": "error", "error_message": "no such file", "results": {} }));
        assert_eq!(outcome(&failed), "no such file");
    }
}
