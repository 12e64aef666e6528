//! Rows of references: which object uses which other, and as what.

use std::collections::BTreeMap;

use muster_types::object::{ObjectRef, Reference};
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

/// What `object` uses.
pub async fn from(db: impl Read, object: &ObjectRef) -> Result<References, StoreError> {
    list(db, "source", object).await
}

/// What uses `object`.
pub async fn to(db: impl Read, object: &ObjectRef) -> Result<References, StoreError> {
    list(db, "target", object).await
}

async fn list(mut db: impl Read, side: &str, object: &ObjectRef) -> Result<References, StoreError> {
    let sql = format!(
        "SELECT source_type, source_id, relationship, relationship_value, target_type, target_id, created, last_active \
         FROM object_references WHERE {side}_type = ? AND {side}_id = ? ORDER BY created, uuid"
    );
    let mut found = References::new();
    for row in db.rows(&sql, params![object.object_type, &object.id]).await? {
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
        found.entry(reference.relationship.clone()).or_default().push(reference);
    }
    Ok(found)
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
