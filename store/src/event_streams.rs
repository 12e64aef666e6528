//! The order in which events were stored, which streams follow, and what streams need about objects. See
//! docs/decisions/0080.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use muster_types::event::EventRecord;
use muster_types::object::{ObjectRef, ObjectType};

use super::events::EventRow;
use super::{Read, Select as _, StoreError, Union, Value, params, placeholders};

/// The maximum number of ids in one statement.
const MAX_BATCH: usize = 100;
/// The maximum number of unfinished operations that are compared.
const MAX_WORK: i64 = 2000;

/// The place of an event in the order in which events were stored.
#[derive(Debug, Clone, PartialEq)]
pub struct EventPosition {
    /// When the event was stored, in Unix time of the database.
    pub stored: f64,
    pub event_uuid: String,
}

/// Returns the next `limit` events after a position.
pub async fn page(
    mut db: impl Read,
    after: &EventPosition,
    limit: i64,
) -> Result<Vec<EventPosition>, StoreError> {
    let sql = "SELECT stored, event_uuid FROM events WHERE stored >= ? AND (stored > ? OR event_uuid > ?) \
               ORDER BY stored, event_uuid LIMIT ?";
    let rows: Vec<(f64, String)> =
        db.fetch(sql, params![after.stored, after.stored, &after.event_uuid, limit]).await?;
    Ok(rows.into_iter().map(|(stored, event_uuid)| EventPosition { stored, event_uuid }).collect())
}

/// An event, and one of the objects that it is about.
#[derive(Debug, Clone, PartialEq)]
pub struct ObjectEvent {
    pub event: EventRecord,
    pub object: ObjectRef,
    /// The namespace that caused the event, if it was not the service itself.
    pub cause: Option<String>,
}

/// Returns events with each of their objects. Those of API requests are omitted.
pub async fn with_objects(mut db: impl Read, events: &[&str]) -> Result<Vec<ObjectEvent>, StoreError> {
    type Link = (ObjectType, String, Option<String>);
    let mut found = Vec::with_capacity(events.len());
    for batch in events.chunks(MAX_BATCH) {
        // The links of an event have its type and time, so that their index by age finds them.
        let sql = format!(
            "SELECT {}, l.object_type, l.object_id, l.namespace FROM events e JOIN event_links l \
             ON l.event_type = e.event_type AND l.timestamp = e.timestamp AND l.event_uuid = e.event_uuid \
             WHERE e.event_uuid IN ({}) AND l.object_type <> ?",
            EventRow::columns_of("e"),
            placeholders(batch.len())
        );
        let mut values: Vec<Value> = batch.iter().map(|event| Value::from(*event)).collect();
        values.push(ObjectType::ApiRequest.into());
        for (event, (object_type, id, cause)) in db.fetch::<(EventRow, Link)>(&sql, &values).await? {
            found.push(ObjectEvent { event: event.into(), object: ObjectRef { object_type, id }, cause });
        }
    }
    Ok(found)
}

/// Returns the table of a type of objects that belong to a namespace; `None` for other types.
fn owned_table(object_type: ObjectType) -> Option<&'static str> {
    match object_type {
        ObjectType::NamespaceKey => Some("namespace_keys"),
        ObjectType::NamespaceClaim => Some("namespace_claims"),
        ObjectType::Network => Some("networks"),
        ObjectType::Interface => Some("interfaces"),
        ObjectType::Instance => Some("instances"),
        ObjectType::Artifact => Some("artifacts"),
        ObjectType::Upload => Some("uploads"),
        ObjectType::ClusterOperation => Some("operations"),
        ObjectType::AgentOperation => Some("agent_operations"),
        ObjectType::Rule => Some("rules"),
        ObjectType::ApiRequest
        | ObjectType::Namespace
        | ObjectType::Node
        | ObjectType::Blob
        | ObjectType::Issuer => None,
    }
}

/// Returns the namespaces of objects. An object that does not exist, or does not belong to a namespace, is missing.
pub async fn owners(
    db: impl Read + Clone,
    objects: &[&ObjectRef],
) -> Result<HashMap<ObjectRef, String>, StoreError> {
    let mut owners = HashMap::new();
    for batch in objects.chunks(MAX_BATCH) {
        let (mut union, mut types) = (Union::default(), Vec::new());
        for object_type in ObjectType::ALL {
            let Some(table) = owned_table(*object_type) else { continue };
            let ids: Vec<Value> = batch
                .iter()
                .filter(|object| object.object_type == *object_type)
                .map(|object| Value::from(&object.id))
                .collect();
            if !ids.is_empty() {
                let tail = format!("FROM {table} WHERE uuid IN ({})", placeholders(ids.len()));
                types.push((*object_type, union.add("uuid, namespace", tail, &ids)));
            }
        }
        if types.is_empty() {
            continue;
        }
        let mut rows = union.fetch(db.clone()).await?;
        for (object_type, part) in types {
            for (id, namespace) in rows.take::<(String, Option<String>)>(part)? {
                owners.extend(namespace.map(|namespace| (ObjectRef { object_type, id }, namespace)));
            }
        }
    }
    Ok(owners)
}

/// An unfinished operation: of the cluster, or of a guest agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnfinishedWork {
    pub operation: ObjectRef,
    /// The object that it changes.
    pub target: ObjectRef,
    pub namespace: Option<String>,
    /// Changes with the state and the progress of the operation.
    pub version: (i64, Option<String>),
}

/// Returns the unfinished operations.
pub async fn unfinished_work(db: impl Read) -> Result<Vec<UnfinishedWork>, StoreError> {
    type WorkColumns = ((String, ObjectType, String), Option<String>, (i64, Option<String>));
    let mut union = Union::default();
    let mut add = |columns: &str, table: &str, states: &str| {
        let select = format!("SELECT {columns} FROM {table} WHERE state IN ({states}) LIMIT {MAX_WORK}");
        union.add(
            "o.uuid, o.target_type, o.target_id, o.namespace, o.version, o.progress",
            format!("FROM ({select}) o"),
            &[],
        )
    };
    let operations = add(
        "uuid, target_type, target_id, namespace, version, progress",
        "operations",
        "'queued', 'executing'",
    );
    let agent_operations = add(
        "uuid, 'instance' AS target_type, instance_uuid AS target_id, namespace, version, NULL AS progress",
        "agent_operations",
        "'preflight', 'queued', 'executing'",
    );
    let mut rows = union.fetch(db).await?;
    let mut found = Vec::new();
    for (part, object_type) in
        [(operations, ObjectType::ClusterOperation), (agent_operations, ObjectType::AgentOperation)]
    {
        for ((id, target_type, target), namespace, version) in rows.take::<WorkColumns>(part)? {
            found.push(UnfinishedWork {
                operation: ObjectRef { object_type, id },
                target: ObjectRef { object_type: target_type, id: target },
                namespace,
                version,
            });
        }
    }
    Ok(found)
}
