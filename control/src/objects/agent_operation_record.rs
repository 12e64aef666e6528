//! Builds the API records of agent operations.

use muster_store::Read;
use muster_store::agent_operations::AgentOperationRow;
use muster_store::attributes::{self, ObjectAttributes};
use muster_types::agent_operation::AgentOperationRecord;
use muster_types::object::ObjectType;
use muster_types::{Error, Result};

/// The version of the record's format.
const VERSION: i64 = 3;

/// Returns the record of one operation.
pub(crate) async fn to_record<D: Read + Copy>(db: D, row: AgentOperationRow) -> Result<AgentOperationRecord> {
    let mut records = records(db, vec![row]).await?;
    records.pop().ok_or_else(|| Error::not_found("agent operation"))
}

/// Returns the records of rows, with a constant number of queries.
pub(crate) async fn records<D: Read + Copy>(
    db: D,
    rows: Vec<AgentOperationRow>,
) -> Result<Vec<AgentOperationRecord>> {
    let ids: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
    let mut attributes_of = attributes::of_objects(db, ObjectType::AgentOperation, &ids).await?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let id = row.id.to_string();
            let ObjectAttributes { metadata, references } = attributes_of.remove(&id).unwrap_or_default();
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
        })
        .collect())
}
