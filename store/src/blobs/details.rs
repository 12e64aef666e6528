//! Everything that belongs to blobs besides their rows, read in one statement.

use std::collections::HashMap;

use muster_types::ids::BlobId;
use muster_types::object::Reference;

use crate::blob_metadata::BlobMetadataRow;
use crate::blob_namespaces::BlobReceiptRow;
use crate::references::ObjectReferences;
use crate::{Read, Select as _, StoreError, Union, Value, placeholders};

/// The details of some blobs.
#[derive(Debug, Default)]
pub struct BlobDetails {
    /// By blob, without users that the namespace may not read.
    pub references: HashMap<String, ObjectReferences>,
    pub metadata: Vec<BlobMetadataRow>,
    /// The receipts of the namespace.
    pub receipts: HashMap<BlobId, BlobReceiptRow>,
    /// The names of the nodes with a complete copy, in order.
    pub locations: HashMap<BlobId, Vec<String>>,
}

/// Returns the details of some blobs as a namespace may read them; `None` reads all.
pub async fn details(
    db: impl Read,
    ids: &[BlobId],
    seen_by: Option<&str>,
) -> Result<BlobDetails, StoreError> {
    if ids.is_empty() {
        return Ok(BlobDetails::default());
    }
    let list = placeholders(ids.len());
    let values: Vec<Value> = ids.iter().map(|id| (*id).into()).collect();
    let mut union = Union::default();
    let uses = add_uses(&mut union, &list, &values, seen_by);
    let tail = format!("FROM object_references WHERE source_type = 'blob' AND source_id IN ({list})");
    let from = union.add(Reference::COLUMNS, tail, &values);
    let tail = format!(
        "FROM blob_locations JOIN nodes ON nodes.uuid = node_uuid \
         WHERE blob_uuid IN ({list}) AND blob_locations.state = 'whole'"
    );
    let locations = union.add("blob_uuid, nodes.name", tail, &values);
    let values: Vec<Value> = values.into_iter().chain(seen_by.map(Value::from)).collect();
    let own = if seen_by.is_some() { " AND namespace = ?" } else { "" };
    let tail = format!("FROM blob_metadata WHERE blob_uuid IN ({list}){own}");
    let metadata = union.add(BlobMetadataRow::COLUMNS, tail, &values);
    let tail = format!("FROM blob_namespaces WHERE blob_uuid IN ({list}){own}");
    let receipts = seen_by.map(|_| union.add(BlobReceiptRow::COLUMNS, tail, &values));

    let mut rows = union.fetch(db).await?;
    let mut details = BlobDetails { metadata: rows.take(metadata)?, ..BlobDetails::default() };
    for row in rows.take::<Reference>(uses)? {
        let references = details.references.entry(row.target_uuid.clone()).or_default();
        references.to.entry(row.relationship.clone()).or_default().push(row);
    }
    for row in rows.take::<Reference>(from)? {
        let references = details.references.entry(row.source_uuid.clone()).or_default();
        references.from.entry(row.relationship.clone()).or_default().push(row);
    }
    details.references.values_mut().for_each(ObjectReferences::sort);
    if let Some(receipts) = receipts {
        details.receipts =
            rows.take(receipts)?.into_iter().map(|row: BlobReceiptRow| (row.blob, row)).collect();
    }
    for (blob, node) in rows.take(locations)? {
        details.locations.entry(blob).or_default().push(node);
    }
    details.locations.values_mut().for_each(|names| names.sort_unstable());
    Ok(details)
}

/// Adds the references to blobs to a union. `blobs` is a list or a select with the parameters `values`. With `seen_by`, only
/// references from artifacts, instances and agent operations that this namespace may read.
pub(crate) fn add_uses(union: &mut Union, blobs: &str, values: &[Value], seen_by: Option<&str>) -> usize {
    let mut tail = format!("FROM object_references WHERE target_type = 'blob' AND target_id IN ({blobs})");
    let mut values = values.to_vec();
    if let Some(caller) = seen_by {
        let sources =
            [("artifact", "artifacts"), ("instance", "instances"), ("agentoperation", "agent_operations")];
        let conditions = sources.map(|(object_type, table)| {
            values.extend([caller.into(), caller.into()]);
            let shared = if table == "artifacts" { "users.shared = 1 OR " } else { "" };
            format!(
                "(source_type = '{object_type}' AND EXISTS (SELECT 1 FROM {table} users WHERE users.uuid = source_id \
                 AND ({shared}users.namespace = ? OR users.namespace IN (SELECT namespace FROM trusts WHERE trusted = ?))))"
            )
        });
        tail = format!("{tail} AND ({})", conditions.join(" OR "));
    }
    union.add(Reference::COLUMNS, tail, &values)
}
