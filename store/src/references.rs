//! Rows of references: which object uses which other object, and in which relationship.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};

use muster_types::object::{ObjectRef, ObjectType, Reference};
use muster_types::time::now;

use super::{Read, Select, StoreError, Tx, Value, columns, params, placeholders};

/// References by relationship.
pub type References = BTreeMap<String, Vec<Reference>>;

/// Records that `source` uses `target` as its `relationship`.
pub async fn insert(
    tx: &mut Tx,
    source: &ObjectRef,
    relationship: &str,
    value: Option<&str>,
    target: &ObjectRef,
) -> Result<(), StoreError> {
    let time = now();
    tx.execute(
        "INSERT INTO object_references (uuid, source_type, source_id, relationship, relationship_value, target_type, \
         target_id, created, last_active) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        params![
            uuid::Uuid::new_v4().to_string(),
            source.object_type,
            &source.id,
            relationship,
            value,
            target.object_type,
            &target.id,
            time,
            time
        ],
    )
    .await?;
    Ok(())
}

columns! { Reference {
    source_object_type: source_type,
    source_uuid: source_id,
    relationship,
    relationship_value,
    target_object_type: target_type,
    target_uuid: target_id,
    created,
    last_active,
} }

/// The references to and from one object.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ObjectReferences {
    pub to: References,
    pub from: References,
}

impl ObjectReferences {
    /// Sorts the references of each relationship, oldest first.
    pub(crate) fn sort(&mut self) {
        for list in self.to.values_mut().chain(self.from.values_mut()) {
            list.sort_by(|a, b| a.created.total_cmp(&b.created));
        }
    }
}

/// Returns the references to and from one object.
pub async fn of_object(db: impl Read, object: &ObjectRef) -> Result<ObjectReferences, StoreError> {
    let mut found = of_objects(db, object.object_type, std::slice::from_ref(&object.id)).await?;
    Ok(found.remove(&object.id).unwrap_or_default())
}

/// Returns the references to and from some objects, by object.
pub async fn of_objects(
    mut db: impl Read,
    object_type: ObjectType,
    ids: &[String],
) -> Result<HashMap<String, ObjectReferences>, StoreError> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    // One statement, of which each half uses an index.
    let half = |number: u8, side: &str| {
        format!(
            "SELECT {number}, {} FROM object_references WHERE {side}_type = ? AND {side}_id IN ({})",
            Reference::COLUMNS,
            placeholders(ids.len())
        )
    };
    let sql = format!("{} UNION ALL {}", half(0, "source"), half(1, "target"));
    let side = || std::iter::once(Value::from(object_type)).chain(ids.iter().map(Value::from));
    let values: Vec<Value> = side().chain(side()).collect();
    let mut found: HashMap<String, ObjectReferences> = HashMap::new();
    for (is_target, reference) in db.fetch::<(bool, Reference)>(&sql, &values).await? {
        let own = if is_target { &reference.target_uuid } else { &reference.source_uuid };
        let references = found.entry(own.clone()).or_default();
        let list = if is_target { &mut references.to } else { &mut references.from };
        list.entry(reference.relationship.clone()).or_default().push(reference);
    }
    found.values_mut().for_each(ObjectReferences::sort);
    Ok(found)
}

/// Removes the reference of a relationship that has this value.
pub async fn remove(
    tx: &mut Tx,
    source: &ObjectRef,
    relationship: &str,
    value: &str,
) -> Result<(), StoreError> {
    tx.execute(
        "DELETE FROM object_references \
         WHERE source_type = ? AND source_id = ? AND relationship = ? AND relationship_value = ?",
        params![source.object_type, &source.id, relationship, value],
    )
    .await?;
    Ok(())
}

/// Removes all references from `source` of one relationship.
pub async fn remove_relationship(
    tx: &mut Tx,
    source: &ObjectRef,
    relationship: &str,
) -> Result<(), StoreError> {
    tx.execute(
        "DELETE FROM object_references WHERE source_type = ? AND source_id = ? AND relationship = ?",
        params![source.object_type, &source.id, relationship],
    )
    .await?;
    Ok(())
}

/// Removes all references from `source`.
pub async fn remove_from(tx: &mut Tx, source: &ObjectRef) -> Result<(), StoreError> {
    tx.execute(
        "DELETE FROM object_references WHERE source_type = ? AND source_id = ?",
        params![source.object_type, &source.id],
    )
    .await?;
    Ok(())
}
