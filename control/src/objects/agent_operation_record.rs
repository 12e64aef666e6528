//! Builds the API records of agent operations.

use muster_store::Read;
use muster_store::agent_operations::AgentOperationRow;
use muster_store::attributes::{self, ObjectAttributes};
use muster_types::Result;
use muster_types::agent_operation::AgentOperationRecord;
use muster_types::object::ObjectType;

/// The version of the record's format.
const VERSION: i64 = 3;

/// Returns the record of one operation.
pub(crate) async fn record(db: impl Read, row: AgentOperationRow) -> Result<AgentOperationRecord> {
    let id = row.id.to_string();
    let mut attributes_of =
        attributes::of_objects(db, ObjectType::AgentOperation, std::slice::from_ref(&id)).await?;
    Ok(to_record(row, attributes_of.remove(&id).unwrap_or_default()))
}

/// Returns the records of rows, with a constant number of queries.
pub(crate) async fn records(
    db: impl Read,
    rows: Vec<AgentOperationRow>,
) -> Result<Vec<AgentOperationRecord>> {
    let ids: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
    let mut attributes_of = attributes::of_objects(db, ObjectType::AgentOperation, &ids).await?;
    let records = rows.into_iter().zip(ids);
    Ok(records.map(|(row, id)| to_record(row, attributes_of.remove(&id).unwrap_or_default())).collect())
}

pub(crate) fn to_record(row: AgentOperationRow, attributes: ObjectAttributes) -> AgentOperationRecord {
    let ObjectAttributes { metadata, references } = attributes;
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
        metadata,
        version: VERSION,
        references_to: references.to,
        references_from: references.from,
    }
}
