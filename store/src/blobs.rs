//! Rows of blobs, and the blob of each content. See docs/decisions/0015.

mod details;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use muster_types::blob::{BlobState, Checksums, ContentDigest, HashAlgorithm, ImageFacts};
use muster_types::ids::{BlobId, NodeId};
use muster_types::time::now;

use super::{
    Read, StoreError, Tx, Value, blob_metadata, blob_namespaces, columns, params, placeholders, to_json,
};

pub(crate) use details::add_uses;
pub use details::{BlobDetails, details};

#[derive(Debug, Clone, PartialEq)]
pub struct BlobRow {
    pub id: BlobId,
    pub state: BlobState,
    /// Never negative: written from a `u64`.
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
    /// Returns the size and the checksums.
    #[must_use]
    pub fn content(&self) -> ContentDigest {
        ContentDigest { size: self.size.cast_unsigned(), checksums: self.checksums.clone() }
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

columns! { BlobRow {
    id: uuid,
    state,
    size,
    checksums: Checksums { sha1, sha256, sha512, xxh128, },
    modified,
    depends_on,
    image: json(image),
    last_used,
    created,
    version,
} }

/// The references that count as uses of a blob. Operations do not.
const IN_USE: &str = "target_type = 'blob' AND source_type <> 'clusteroperation'";

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<BlobRow>, StoreError> {
    db.select(&format!("FROM blobs WHERE {tail}"), values).await
}

pub async fn get(db: impl Read, id: BlobId) -> Result<Option<BlobRow>, StoreError> {
    Ok(rows(db, "uuid = ?", params![id]).await?.pop())
}

/// Returns some blobs by id.
pub async fn by_ids(db: impl Read, ids: &[BlobId]) -> Result<HashMap<BlobId, BlobRow>, StoreError> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    let values: Vec<Value> = ids.iter().map(|id| (*id).into()).collect();
    let rows = rows(db, &format!("uuid IN ({})", placeholders(ids.len())), &values).await?;
    Ok(rows.into_iter().map(|row| (row.id, row)).collect())
}

/// Returns the next undeleted blobs after `after`, by id, of all nodes or of one.
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

/// Returns the complete blobs with a checksum.
pub async fn by_checksum(
    db: impl Read,
    algorithm: HashAlgorithm,
    checksum: &str,
) -> Result<Vec<BlobRow>, StoreError> {
    rows(db, &format!("{algorithm} = ? AND state = 'created' ORDER BY created LIMIT 100"), params![checksum])
        .await
}

/// Returns whether a blob is a version of an artifact that a namespace may read.
pub async fn is_readable(mut db: impl Read, id: BlobId, caller: &str) -> Result<bool, StoreError> {
    let sql = "SELECT 1 FROM object_references JOIN artifacts ON artifacts.uuid = source_id \
               WHERE target_type = 'blob' AND target_id = ? AND source_type = 'artifact' AND state <> 'deleted' \
               AND (shared = 1 OR namespace = ? OR namespace IN (SELECT namespace FROM trusts WHERE trusted = ?)) \
               LIMIT 1";
    Ok(!db.rows(sql, params![id, caller, caller]).await?.is_empty())
}

/// Returns the complete blobs that have been unused since `before`.
pub async fn unused(db: impl Read, before: f64, limit: i64) -> Result<Vec<BlobRow>, StoreError> {
    let tail = format!(
        "state = 'created' AND updated <= ? AND NOT EXISTS \
         (SELECT 1 FROM object_references WHERE {IN_USE} AND target_id = blobs.uuid) ORDER BY updated LIMIT ?"
    );
    rows(db, &tail, params![before, limit]).await
}

/// Returns whether anything uses a blob.
pub async fn is_used(mut db: impl Read, id: BlobId) -> Result<bool, StoreError> {
    let sql = format!("SELECT 1 FROM object_references WHERE {IN_USE} AND target_id = ? LIMIT 1");
    Ok(!db.rows(&sql, params![id]).await?.is_empty())
}

/// Returns the deleted blobs that no node has and whose state changed before `before`.
pub async fn cleanable(db: impl Read, before: f64, limit: i64) -> Result<Vec<BlobRow>, StoreError> {
    let tail = "state = 'deleted' AND updated <= ? \
                AND NOT EXISTS (SELECT 1 FROM blob_locations WHERE blob_uuid = blobs.uuid) ORDER BY updated LIMIT ?";
    rows(db, tail, params![before, limit]).await
}

/// Returns the blob of a content.
pub async fn by_content(mut db: impl Read, sha512: &str) -> Result<Option<BlobId>, StoreError> {
    db.fetch_optional("SELECT blob_uuid FROM blob_contents WHERE sha512 = ?", params![sha512]).await
}

/// Adds a blob that is not complete yet.
pub async fn insert(tx: &mut Tx, new: &NewBlob) -> Result<(), StoreError> {
    let (time, checksums) = (now(), &new.content.checksums);
    let image = new.image.as_ref().map(to_json).transpose()?;
    let size = i64::try_from(new.content.size)
        .map_err(|_| StoreError::TooLong(format!("a blob of {} bytes", new.content.size)))?;
    tx.execute(
        "INSERT INTO blobs (uuid, state, size, sha1, sha256, sha512, xxh128, modified, image, created, updated, version) \
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)",
        params![
            new.id,
            BlobState::Initial,
            size,
            &checksums.sha1,
            &checksums.sha256,
            &checksums.sha512,
            &checksums.xxh128,
            new.modified.as_ref(),
            image,
            time,
            time
        ],
    )
    .await?;
    Ok(())
}

/// Makes a blob the only one of its content; a content that has a blob is a [`StoreError::Duplicate`].
pub async fn insert_content(tx: &mut Tx, sha512: &str, id: BlobId) -> Result<(), StoreError> {
    tx.execute("INSERT INTO blob_contents (sha512, blob_uuid) VALUES (?, ?)", params![sha512, id]).await?;
    Ok(())
}

/// Marks a blob as complete. Returns `false` if it was not being created.
pub async fn set_created(tx: &mut Tx, id: BlobId) -> Result<bool, StoreError> {
    let (from, to) = (BlobState::Initial, BlobState::Created);
    let sql = "UPDATE blobs SET state = ?, updated = ?, version = version + 1 WHERE uuid = ? AND state = ?";
    Ok(tx.execute(sql, params![to, now(), id, from]).await? == 1)
}

/// Deletes an unused blob. Returns `false` if it was locked since `row` was read, because something began to use it.
pub async fn delete(tx: &mut Tx, row: &BlobRow) -> Result<bool, StoreError> {
    let sql = "UPDATE blobs SET state = ?, updated = ?, version = version + 1 \
               WHERE uuid = ? AND state = 'created' AND version = ?";
    let deleted = tx.execute(sql, params![BlobState::Deleted, now(), row.id, row.version]).await? == 1;
    if deleted {
        tx.execute("DELETE FROM blob_contents WHERE blob_uuid = ?", params![row.id]).await?;
    }
    Ok(deleted)
}

/// Locks a blob until the transaction ends, before its uses change. Returns whether it is complete.
pub async fn lock(tx: &mut Tx, id: BlobId) -> Result<bool, StoreError> {
    let sql = "UPDATE blobs SET updated = ?, version = version + 1 WHERE uuid = ? AND state = 'created'";
    Ok(tx.execute(sql, params![now(), id]).await? == 1)
}

/// Records the image format of a blob, unless it is recorded already.
pub async fn set_image(tx: &mut Tx, id: BlobId, facts: &ImageFacts) -> Result<(), StoreError> {
    let sql = "UPDATE blobs SET image = ? WHERE uuid = ? AND image IS NULL";
    tx.execute(sql, params![to_json(facts)?, id]).await?;
    Ok(())
}

/// Records the base that a blob depends on.
pub async fn set_depends_on(tx: &mut Tx, id: BlobId, base: BlobId) -> Result<(), StoreError> {
    tx.execute("UPDATE blobs SET depends_on = ? WHERE uuid = ?", params![base, id]).await?;
    Ok(())
}

/// Records that a blob was read.
pub async fn set_used(tx: &mut Tx, id: BlobId) -> Result<(), StoreError> {
    tx.execute("UPDATE blobs SET last_used = ? WHERE uuid = ?", params![now(), id]).await?;
    Ok(())
}

/// Removes a blob that is deleted or was never completed, with what each namespace has of it.
pub async fn remove(tx: &mut Tx, id: BlobId) -> Result<bool, StoreError> {
    let sql = "DELETE FROM blobs WHERE uuid = ? AND state <> 'created'";
    let removed = tx.execute(sql, params![id]).await? == 1;
    if removed {
        blob_metadata::remove_of(tx, id).await?;
        blob_namespaces::remove_of(tx, id).await?;
    }
    Ok(removed)
}
