//! Rows of references: which object uses which other, and as what.

use std::collections::{BTreeMap, HashMap};

use muster_types::object::{ObjectRef, ObjectType, Reference};
use muster_types::time::now;

use super::{Read, StoreError, Tx, Value, marks, params};

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

/// The references of one object: what uses it, and what it uses.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Around {
    pub to: References,
    pub from: References,
}

/// What uses an object, and what it uses.
pub async fn around(db: impl Read, object: &ObjectRef) -> Result<Around, StoreError> {
    let mut found = of(db, object.object_type, std::slice::from_ref(&object.id)).await?;
    Ok(found.remove(&object.id).unwrap_or_default())
}

/// The references of some objects, by object.
pub async fn of(
    mut db: impl Read,
    object_type: ObjectType,
    ids: &[String],
) -> Result<HashMap<String, Around>, StoreError> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    // One statement, and both halves answered from an index.
    let half = |number: u8, side: &str| {
        format!(
            "SELECT {number}, source_type, source_id, relationship, relationship_value, target_type, target_id, \
             created, last_active FROM object_references WHERE {side}_type = ? AND {side}_id IN ({})",
            marks(ids.len())
        )
    };
    let sql = format!("{} UNION ALL {}", half(0, "source"), half(1, "target"));
    let side = || std::iter::once(Value::from(object_type)).chain(ids.iter().map(Value::from));
    let values: Vec<Value> = side().chain(side()).collect();
    let mut found: HashMap<String, Around> = HashMap::new();
    for row in db.rows(&sql, &values).await? {
        let is_target: bool = row.get(0)?;
        let reference = Reference {
            source_object_type: row.get(1)?,
            source_uuid: row.get(2)?,
            relationship: row.get(3)?,
            relationship_value: row.get(4)?,
            target_object_type: row.get(5)?,
            target_uuid: row.get(6)?,
            created: row.get(7)?,
            last_active: row.get(8)?,
        };
        let own = if is_target { &reference.target_uuid } else { &reference.source_uuid };
        let around = found.entry(own.clone()).or_default();
        let list = if is_target { &mut around.to } else { &mut around.from };
        list.entry(reference.relationship.clone()).or_default().push(reference);
    }
    for list in found.values_mut().flat_map(|around| around.from.values_mut().chain(around.to.values_mut())) {
        list.sort_by(|a, b| a.created.total_cmp(&b.created));
    }
    Ok(found)
}

/// Forgets one use with its value.
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

/// Forgets everything that `source` used as its `relationship`.
pub async fn remove_as(tx: &mut Tx, source: &ObjectRef, relationship: &str) -> Result<(), StoreError> {
    tx.execute(
        "DELETE FROM object_references WHERE source_type = ? AND source_id = ? AND relationship = ?",
        params![source.object_type, &source.id, relationship],
    )
    .await?;
    Ok(())
}

/// Forgets everything that `source` used.
pub async fn remove_from(tx: &mut Tx, source: &ObjectRef) -> Result<(), StoreError> {
    tx.execute(
        "DELETE FROM object_references WHERE source_type = ? AND source_id = ?",
        params![source.object_type, &source.id],
    )
    .await?;
    Ok(())
}
