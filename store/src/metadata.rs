//! Rows of metadata, for every kind of object.

use std::collections::HashMap;

use muster_types::object::ObjectType;
use serde_json::{Map, Value as Json};

use super::{Read, StoreError, Tx, Value, marks, params};

/// The metadata of the objects from `first` to `last`, as `(object, key, value)`.
pub async fn range(
    mut db: impl Read,
    object_type: ObjectType,
    first: &str,
    last: &str,
) -> Result<Vec<(String, String, Json)>, StoreError> {
    let rows = db
        .rows(
            "SELECT object_id, name, value FROM metadata \
             WHERE object_type = ? AND object_id >= ? AND object_id <= ? ORDER BY object_id, name",
            params![object_type, first, last],
        )
        .await?;
    rows.iter().map(|row| Ok((row.get(0)?, row.get(1)?, row.json(2)?))).collect()
}

/// The metadata of some objects, by object.
pub async fn of(
    mut db: impl Read,
    object_type: ObjectType,
    ids: &[String],
) -> Result<HashMap<String, Map<String, Json>>, StoreError> {
    let mut found: HashMap<String, Map<String, Json>> = HashMap::new();
    if ids.is_empty() {
        return Ok(found);
    }
    let sql = format!(
        "SELECT object_id, name, value FROM metadata WHERE object_type = ? AND object_id IN ({})",
        marks(ids.len())
    );
    let mut values = vec![Value::from(object_type)];
    values.extend(ids.iter().map(Value::from));
    for row in db.rows(&sql, &values).await? {
        found.entry(row.get(0)?).or_default().insert(row.get(1)?, row.json(2)?);
    }
    Ok(found)
}

/// The metadata of one object.
pub async fn get(db: impl Read, object_type: ObjectType, id: &str) -> Result<Map<String, Json>, StoreError> {
    Ok(range(db, object_type, id, id).await?.into_iter().map(|(_, name, value)| (name, value)).collect())
}

/// How much metadata an object carries, about in bytes.
pub async fn size(mut db: impl Read, object_type: ObjectType, id: &str) -> Result<i64, StoreError> {
    let rows = db
        .rows(
            "SELECT CAST(COALESCE(SUM(LENGTH(name) + LENGTH(value)), 0) AS SIGNED) FROM metadata \
             WHERE object_type = ? AND object_id = ?",
            params![object_type, id],
        )
        .await?;
    rows.first().map_or(Ok(0), |row| row.get(0))
}

pub async fn set(
    tx: &mut Tx,
    object_type: ObjectType,
    id: &str,
    name: &str,
    value: &Json,
) -> Result<(), StoreError> {
    tx.execute(
        "REPLACE INTO metadata (object_type, object_id, name, value) VALUES (?, ?, ?, ?)",
        params![object_type, id, name, value.to_string()],
    )
    .await?;
    Ok(())
}

pub async fn remove(tx: &mut Tx, object_type: ObjectType, id: &str, name: &str) -> Result<(), StoreError> {
    tx.execute(
        "DELETE FROM metadata WHERE object_type = ? AND object_id = ? AND name = ?",
        params![object_type, id, name],
    )
    .await?;
    Ok(())
}

/// Removes everything an object carried.
pub async fn remove_of(tx: &mut Tx, object_type: ObjectType, id: &str) -> Result<(), StoreError> {
    tx.execute("DELETE FROM metadata WHERE object_type = ? AND object_id = ?", params![object_type, id])
        .await?;
    Ok(())
}
