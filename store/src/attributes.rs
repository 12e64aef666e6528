//! The metadata and the references of objects, read in one statement.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use muster_types::object::{ObjectType, Reference};
use serde_json::{Map, Value as JsonValue};

use crate::references::ObjectReferences;
use crate::{Json, Read, Select as _, StoreError, Union, UnionRows, Value, placeholders};

/// The metadata of one object, and the references to and from it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ObjectAttributes {
    pub metadata: Map<String, JsonValue>,
    pub references: ObjectReferences,
}

/// Returns the attributes of some objects, by object.
pub async fn of_objects(
    db: impl Read,
    object_type: ObjectType,
    ids: &[String],
) -> Result<HashMap<String, ObjectAttributes>, StoreError> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    let values: Vec<Value> = ids.iter().map(Value::from).collect();
    let mut union = Union::default();
    let parts = AttributeParts::add(&mut union, object_type, &placeholders(ids.len()), &values);
    parts.take(&mut union.fetch(db).await?)
}

/// The parts of a union that select the attributes of objects.
#[derive(Debug)]
pub(crate) struct AttributeParts {
    from: usize,
    to: usize,
    metadata: usize,
}

impl AttributeParts {
    /// Adds the parts for objects whose ids are in `ids`, a list or a select with the parameters `values`.
    pub(crate) fn add(union: &mut Union, object_type: ObjectType, ids: &str, values: &[Value]) -> Self {
        let values: Vec<Value> = [&[Value::from(object_type)], values].concat();
        // Each part uses an index.
        let mut side = |side: &str| {
            let tail = format!("FROM object_references WHERE {side}_type = ? AND {side}_id IN ({ids})");
            union.add(Reference::COLUMNS, tail, &values)
        };
        let (from, to) = (side("source"), side("target"));
        let tail = format!("FROM metadata WHERE object_type = ? AND object_id IN ({ids})");
        Self { from, to, metadata: union.add("object_id, name, value", tail, &values) }
    }

    /// Removes the attributes from the rows of the union and returns them by object.
    pub(crate) fn take(self, rows: &mut UnionRows) -> Result<HashMap<String, ObjectAttributes>, StoreError> {
        let mut found: HashMap<String, ObjectAttributes> = HashMap::new();
        for row in rows.take::<Reference>(self.from)? {
            let references = &mut found.entry(row.source_uuid.clone()).or_default().references;
            references.from.entry(row.relationship.clone()).or_default().push(row);
        }
        for row in rows.take::<Reference>(self.to)? {
            let references = &mut found.entry(row.target_uuid.clone()).or_default().references;
            references.to.entry(row.relationship.clone()).or_default().push(row);
        }
        for (object, name, Json(value)) in rows.take::<(String, String, Json<_>)>(self.metadata)? {
            found.entry(object).or_default().metadata.insert(name, value);
        }
        found.values_mut().for_each(|object| object.references.sort());
        Ok(found)
    }
}
