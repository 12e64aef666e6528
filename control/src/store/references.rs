//! Rows of references: which object uses which other, and as what.

use std::collections::{BTreeMap, HashMap};

use muster_types::object::{ObjectRef, ObjectType, Reference};
use muster_types::time::now;

use super::{Read, StoreError, Tx, params};

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
    let mut found = range(db, object.object_type, &object.id, &object.id).await?;
    Ok(found.remove(&object.id).unwrap_or_default())
}

/// The references of the objects from `first` to `last`, by object.
pub async fn range(
    mut db: impl Read,
    object_type: ObjectType,
    first: &str,
    last: &str,
) -> Result<HashMap<String, Around>, StoreError> {
    let sql = "SELECT source_type, source_id, relationship, relationship_value, target_type, target_id, created, \
               last_active FROM object_references WHERE (source_type = ? AND source_id >= ? AND source_id <= ?) \
               OR (target_type = ? AND target_id >= ? AND target_id <= ?) ORDER BY created, uuid";
    let values = params![object_type, first, last, object_type, first, last];
    let mut found: HashMap<String, Around> = HashMap::new();
    for row in db.rows(sql, values).await? {
        let reference = Reference {
            source_object_type: row.get(0)?,
            source_uuid: row.get(1)?,
            relationship: row.get(2)?,
            relationship_value: row.get(3)?,
            target_object_type: row.get(4)?,
            target_uuid: row.get(5)?,
            created: row.get(6)?,
            last_active: row.get(7)?,
        };
        let within = |kind: &str, id: &str| kind == object_type.as_str() && id >= first && id <= last;
        let key = || reference.relationship.clone();
        if within(&reference.source_object_type, &reference.source_uuid) {
            let around = found.entry(reference.source_uuid.clone()).or_default();
            around.from.entry(key()).or_default().push(reference.clone());
        }
        if within(&reference.target_object_type, &reference.target_uuid) {
            let around = found.entry(reference.target_uuid.clone()).or_default();
            around.to.entry(key()).or_default().push(reference);
        }
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

/// Forgets everything that `source` used.
pub async fn remove_from(tx: &mut Tx, source: &ObjectRef) -> Result<(), StoreError> {
    tx.execute(
        "DELETE FROM object_references WHERE source_type = ? AND source_id = ?",
        params![source.object_type, &source.id],
    )
    .await?;
    Ok(())
}
