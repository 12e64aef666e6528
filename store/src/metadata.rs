//! Rows of metadata of objects of all types.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use muster_types::object::ObjectType;
use serde_json::{Map, Value as JsonValue};

use super::{Json, Read, Select, StoreError, Tx, Union, Value, params, placeholders};

/// Returns the metadata of the objects from `first` to `last`, as `(object, key, value)`.
pub async fn range(
    mut db: impl Read,
    object_type: ObjectType,
    first: &str,
    last: &str,
) -> Result<Vec<(String, String, JsonValue)>, StoreError> {
    let rows = db
        .fetch(
            "SELECT object_id, name, value FROM metadata \
             WHERE object_type = ? AND object_id >= ? AND object_id <= ? ORDER BY object_id, name",
            params![object_type, first, last],
        )
        .await?;
    Ok(rows.into_iter().map(|(object, name, Json(value))| (object, name, value)).collect())
}

/// Returns the metadata of some objects, by object.
pub async fn of_objects(
    mut db: impl Read,
    object_type: ObjectType,
    ids: &[String],
) -> Result<HashMap<String, Map<String, JsonValue>>, StoreError> {
    let mut by_object: HashMap<String, Map<String, JsonValue>> = HashMap::new();
    if ids.is_empty() {
        return Ok(by_object);
    }
    let sql = format!(
        "SELECT object_id, name, value FROM metadata WHERE object_type = ? AND object_id IN ({})",
        placeholders(ids.len())
    );
    let mut values = vec![Value::from(object_type)];
    values.extend(ids.iter().map(Value::from));
    for (object, name, Json(value)) in db.fetch::<(String, String, Json<_>)>(&sql, &values).await? {
        by_object.entry(object).or_default().insert(name, value);
    }
    Ok(by_object)
}

/// Runs `SELECT columns tail`, where `tail` begins with `FROM`, and returns its row with the metadata of the object. The table
/// must have the column `uuid`.
pub(crate) async fn select<T: Select>(
    db: impl Read,
    object_type: ObjectType,
    tail: &str,
    values: &[Value],
) -> Result<Option<(T, Map<String, JsonValue>)>, StoreError> {
    let mut union = Union::default();
    let row = union.add(T::COLUMNS, tail.to_owned(), values);
    let of_row = format!("FROM metadata WHERE object_type = ? AND object_id IN (SELECT uuid {tail})");
    let values = [&[Value::from(object_type)], values].concat();
    let metadata = union.add("metadata.name, metadata.value", of_row, &values);
    let mut rows = union.fetch(db).await?;
    let metadata = rows.take::<(String, Json<JsonValue>)>(metadata)?;
    let metadata = metadata.into_iter().map(|(name, Json(value))| (name, value)).collect();
    Ok(rows.take(row)?.pop().map(|row| (row, metadata)))
}

/// Returns the metadata of one object.
pub async fn get(
    db: impl Read,
    object_type: ObjectType,
    id: &str,
) -> Result<Map<String, JsonValue>, StoreError> {
    Ok(range(db, object_type, id, id).await?.into_iter().map(|(_, name, value)| (name, value)).collect())
}

/// Returns the approximate size of an object's metadata in bytes.
pub async fn size(mut db: impl Read, object_type: ObjectType, id: &str) -> Result<i64, StoreError> {
    // Two digits for each byte: LENGTH alone counts characters on SQLite.
    let digits: i64 = db
        .fetch_one(
            "SELECT CAST(COALESCE(SUM(LENGTH(HEX(name)) + LENGTH(HEX(value))), 0) AS SIGNED) FROM metadata \
             WHERE object_type = ? AND object_id = ?",
            params![object_type, id],
        )
        .await?;
    Ok(digits / 2)
}

pub async fn set(
    tx: &mut Tx,
    object_type: ObjectType,
    id: &str,
    name: &str,
    value: &JsonValue,
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

/// Removes all metadata of an object.
pub async fn remove_of(tx: &mut Tx, object_type: ObjectType, id: &str) -> Result<(), StoreError> {
    tx.execute("DELETE FROM metadata WHERE object_type = ? AND object_id = ?", params![object_type, id])
        .await?;
    Ok(())
}
