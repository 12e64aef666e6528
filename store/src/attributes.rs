//! The metadata and the references of objects, read in one statement.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use muster_types::object::{ObjectType, Reference};
use serde_json::{Map, Value as JsonValue};

use crate::references::ObjectReferences;
use crate::{Read, Select, StoreError, Value, placeholders};

/// The metadata of one object, and the references to and from it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ObjectAttributes {
    pub metadata: Map<String, JsonValue>,
    pub references: ObjectReferences,
}

/// Returns the attributes of some objects, by object.
pub async fn of_objects(
    mut db: impl Read,
    object_type: ObjectType,
    ids: &[String],
) -> Result<HashMap<String, ObjectAttributes>, StoreError> {
    let mut found: HashMap<String, ObjectAttributes> = HashMap::new();
    if ids.is_empty() {
        return Ok(found);
    }
    // Each part uses an index. Metadata has the columns of a reference: the object, the name and the value.
    let list = placeholders(ids.len());
    let side = |part: u8, side: &str| {
        let columns = Reference::COLUMNS;
        format!(
            "SELECT {part}, {columns} FROM object_references WHERE {side}_type = ? AND {side}_id IN ({list})"
        )
    };
    let sql = format!(
        "{} UNION ALL {} UNION ALL SELECT 2, object_type, object_id, name, value, object_type, object_id, 0.0, 0.0 \
         FROM metadata WHERE object_type = ? AND object_id IN ({list})",
        side(0, "source"),
        side(1, "target"),
    );
    let part = || std::iter::once(Value::from(object_type)).chain(ids.iter().map(Value::from));
    let values: Vec<Value> = part().chain(part()).chain(part()).collect();
    for (part, row) in db.fetch::<(i64, Reference)>(&sql, &values).await? {
        let own = if part == 1 { &row.target_uuid } else { &row.source_uuid };
        let attributes = found.entry(own.clone()).or_default();
        let references = match part {
            0 => &mut attributes.references.from,
            1 => &mut attributes.references.to,
            _ => {
                let value = serde_json::from_str(row.relationship_value.as_deref().unwrap_or("null"));
                let value = value.map_err(|error| StoreError::Internal(format!("metadata: {error}")))?;
                attributes.metadata.insert(row.relationship, value);
                continue;
            }
        };
        references.entry(row.relationship.clone()).or_default().push(row);
    }
    for ObjectReferences { to, from } in found.values_mut().map(|object| &mut object.references) {
        for list in to.values_mut().chain(from.values_mut()) {
            list.sort_by(|a, b| a.created.total_cmp(&b.created));
        }
    }
    Ok(found)
}
