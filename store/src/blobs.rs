//! Rows of blobs, and which of them holds a content.

use std::collections::HashMap;

use muster_types::blob::{BlobState, Checksums, ContentDigest, HashAlgorithm, ImageFacts};
use muster_types::ids::{BlobId, NodeId};
use muster_types::time::now;

use super::{Read, Row, StoreError, Tx, Value, marks, params};

#[derive(Debug, Clone, PartialEq)]
pub struct BlobRow {
    pub id: BlobId,
    pub state: BlobState,
    pub size: i64,
    pub checksums: Checksums,
    pub modified: Option<String>,
    pub depends_on: Option<BlobId>,
    pub image: Option<ImageFacts>,
    pub last_used: Option<f64>,
    pub created: f64,
    pub version: i64,
}

impl BlobRow {
    /// What the blob holds.
    #[must_use]
    pub fn content(&self) -> ContentDigest {
        ContentDigest { size: u64::try_from(self.size).unwrap_or(0), checksums: self.checksums.clone() }
    }
}

/// A blob to add.
#[derive(Debug, Clone)]
pub struct NewBlob {
    pub id: BlobId,
    pub content: ContentDigest,
    pub modified: Option<String>,
    pub image: Option<ImageFacts>,
}

const COLUMNS: &str = "uuid, state, size, sha1, sha256, sha512, xxh128, modified, depends_on, image, last_used, created, \
                       version";
/// What counts as using a blob. That an operation works on it does not.
const IN_USE: &str = "target_type = 'blob' AND source_type <> 'clusteroperation'";

impl BlobRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self {
            id: row.parse(0)?,
            state: row.parse(1)?,
            size: row.get(2)?,
            checksums: Checksums {
                sha1: row.get(3)?,
                sha256: row.get(4)?,
                sha512: row.get(5)?,
                xxh128: row.get(6)?,
            },
            modified: row.get(7)?,
            depends_on: row.parse_opt(8)?,
            image: row.json_opt(9)?,
            last_used: row.get(10)?,
            created: row.get(11)?,
            version: row.get(12)?,
        })
    }
}

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<BlobRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM blobs WHERE {tail}");
    db.rows(&sql, values).await?.iter().map(BlobRow::read).collect()
}

pub async fn get(db: impl Read, id: BlobId) -> Result<Option<BlobRow>, StoreError> {
    Ok(rows(db, "uuid = ?", params![id]).await?.pop())
}

/// Some blobs by id.
pub async fn some(db: impl Read, ids: &[BlobId]) -> Result<HashMap<BlobId, BlobRow>, StoreError> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    let values: Vec<Value> = ids.iter().map(|id| (*id).into()).collect();
    let rows = rows(db, &format!("uuid IN ({})", marks(ids.len())), &values).await?;
    Ok(rows.into_iter().map(|row| (row.id, row)).collect())
}

/// The next blobs after `after`, by id: those that are not deleted, of all nodes or of one.
pub async fn page(
    db: impl Read,
    node: Option<NodeId>,
    after: Option<BlobId>,
    limit: i64,
) -> Result<Vec<BlobRow>, StoreError> {
    let mut tail = "uuid > ? AND state <> 'deleted'".to_owned();
    let mut values: Vec<Value> = vec![after.map_or_else(String::new, |id| id.to_string()).into()];
    if let Some(node) = node {
        tail.push_str(" AND uuid IN (SELECT blob_uuid FROM blob_locations WHERE node_uuid = ?)");
        values.push(node.into());
    }
    values.push(limit.into());
    rows(db, &format!("{tail} ORDER BY uuid LIMIT ?"), &values).await
}

/// The whole blobs of a checksum.
pub async fn by_checksum(
    db: impl Read,
    algorithm: HashAlgorithm,
    sum: &str,
) -> Result<Vec<BlobRow>, StoreError> {
    rows(db, &format!("{algorithm} = ? AND state = 'created' ORDER BY created LIMIT 100"), params![sum]).await
}

/// Whether a blob is a version of an artifact that this namespace may read.
pub async fn is_readable(mut db: impl Read, id: BlobId, caller: &str) -> Result<bool, StoreError> {
    let sql = "SELECT 1 FROM object_references JOIN artifacts ON artifacts.uuid = source_id \
               WHERE target_type = 'blob' AND target_id = ? AND source_type = 'artifact' AND state <> 'deleted' \
               AND (shared = 1 OR namespace = ? OR namespace IN (SELECT namespace FROM trusts WHERE trusted = ?)) \
               LIMIT 1";
    Ok(!db.rows(sql, params![id, caller, caller]).await?.is_empty())
}

/// How many objects use each of some blobs.
pub async fn uses(mut db: impl Read, ids: &[BlobId]) -> Result<HashMap<BlobId, i64>, StoreError> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    let sql = format!(
        "SELECT target_id, COUNT(*) FROM object_references WHERE {IN_USE} AND target_id IN ({}) GROUP BY target_id",
        marks(ids.len())
    );
    let values: Vec<Value> = ids.iter().map(|id| (*id).into()).collect();
    db.rows(&sql, &values).await?.iter().map(|row| Ok((row.parse(0)?, row.get(1)?))).collect()
}

/// Whole blobs that nothing has used since `before`.
pub async fn unused(db: impl Read, before: f64, limit: i64) -> Result<Vec<BlobRow>, StoreError> {
    let tail = format!(
        "state = 'created' AND updated <= ? AND NOT EXISTS \
         (SELECT 1 FROM object_references WHERE {IN_USE} AND target_id = blobs.uuid) ORDER BY updated LIMIT ?"
    );
    rows(db, &tail, params![before, limit]).await
}

/// Deleted blobs of which no node has anything, whose state changed before `before`.
pub async fn cleanable(db: impl Read, before: f64, limit: i64) -> Result<Vec<BlobRow>, StoreError> {
    let tail = "state = 'deleted' AND updated <= ? \
                AND NOT EXISTS (SELECT 1 FROM blob_locations WHERE blob_uuid = blobs.uuid) ORDER BY updated LIMIT ?";
    rows(db, tail, params![before, limit]).await
}

/// The blob that holds a content.
pub async fn of_content(mut db: impl Read, sha512: &str) -> Result<Option<BlobId>, StoreError> {
    let rows = db.rows("SELECT blob_uuid FROM blob_contents WHERE sha512 = ?", params![sha512]).await?;
    rows.first().map(|row| row.parse(0)).transpose()
}

/// Adds a blob that is yet to be whole.
pub async fn insert(tx: &mut Tx, new: &NewBlob) -> Result<(), StoreError> {
    let (time, sums) = (now(), &new.content.checksums);
    let image = new.image.as_ref().map(serde_json::to_string).transpose();
    let image = image.map_err(|error| StoreError::Broken(error.to_string()))?;
    tx.execute(
        "INSERT INTO blobs (uuid, state, size, sha1, sha256, sha512, xxh128, modified, image, created, updated, version) \
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)",
        params![
            new.id,
            BlobState::Initial,
            i64::try_from(new.content.size).unwrap_or(i64::MAX),
            &sums.sha1,
            &sums.sha256,
            &sums.sha512,
            &sums.xxh128,
            new.modified.as_ref(),
            image,
            time,
            time
        ],
    )
    .await?;
    Ok(())
}

/// Makes a blob the one that holds its content.
pub async fn claim(tx: &mut Tx, sha512: &str, id: BlobId) -> Result<(), StoreError> {
    tx.execute("INSERT INTO blob_contents (sha512, blob_uuid) VALUES (?, ?)", params![sha512, id]).await?;
    Ok(())
}

/// A blob is whole from now on, if it was being made.
pub async fn set_created(tx: &mut Tx, id: BlobId) -> Result<bool, StoreError> {
    let (from, to) = (BlobState::Initial, BlobState::Created);
    let sql = "UPDATE blobs SET state = ?, updated = ?, version = version + 1 WHERE uuid = ? AND state = ?";
    Ok(tx.execute(sql, params![to, now(), id, from]).await? == 1)
}

/// Deletes a blob that was seen to be unused. Says whether nothing has used it since: whoever begins to changes the
/// row first.
pub async fn delete(tx: &mut Tx, seen: &BlobRow) -> Result<bool, StoreError> {
    let sql = "UPDATE blobs SET state = ?, updated = ?, version = version + 1 \
               WHERE uuid = ? AND state = 'created' AND version = ?";
    let met = tx.execute(sql, params![BlobState::Deleted, now(), seen.id, seen.version]).await? == 1;
    if met {
        tx.execute("DELETE FROM blob_contents WHERE blob_uuid = ?", params![seen.id]).await?;
    }
    Ok(met)
}

/// Keeps a whole blob from going until this transaction ends, and counts as a change of what uses it.
pub async fn hold(tx: &mut Tx, id: BlobId) -> Result<bool, StoreError> {
    let sql = "UPDATE blobs SET updated = ?, version = version + 1 WHERE uuid = ? AND state = 'created'";
    Ok(tx.execute(sql, params![now(), id]).await? == 1)
}

/// Writes down what was found out about a blob as a disk image, unless it is known.
pub async fn set_image(tx: &mut Tx, id: BlobId, facts: &ImageFacts) -> Result<(), StoreError> {
    let facts = serde_json::to_string(facts).map_err(|error| StoreError::Broken(error.to_string()))?;
    tx.execute("UPDATE blobs SET image = ? WHERE uuid = ? AND image IS NULL", params![facts, id]).await?;
    Ok(())
}

/// Writes down that a blob is only whole with another one.
pub async fn set_depends_on(tx: &mut Tx, id: BlobId, base: BlobId) -> Result<(), StoreError> {
    tx.execute("UPDATE blobs SET depends_on = ? WHERE uuid = ?", params![base, id]).await?;
    Ok(())
}

/// Writes down that a blob was read.
pub async fn set_used(tx: &mut Tx, id: BlobId) -> Result<(), StoreError> {
    tx.execute("UPDATE blobs SET last_used = ? WHERE uuid = ?", params![now(), id]).await?;
    Ok(())
}

/// Removes the row of a blob that is deleted, or never became whole.
pub async fn remove(tx: &mut Tx, id: BlobId) -> Result<bool, StoreError> {
    let sql = "DELETE FROM blobs WHERE uuid = ? AND state <> 'created'";
    Ok(tx.execute(sql, params![id]).await? == 1)
}
