//! Relations between tables that hold in every state of a cluster. A snapshot in which one does not hold is not consistent.

use muster_types::ids::BlobId;

use crate::row::Read;
use crate::{StoreError, params};

/// A blob whose content is complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredBlob {
    pub id: BlobId,
    pub size: u64,
    pub sha256: String,
}

/// Each relation, and the statement that counts the rows that violate it.
const INVARIANTS: &[(&str, &str)] = &[
    (
        "interfaces without their instance",
        "SELECT COUNT(*) FROM interfaces WHERE state <> 'deleted' \
         AND instance_uuid NOT IN (SELECT uuid FROM instances)",
    ),
    (
        "interfaces without their network",
        "SELECT COUNT(*) FROM interfaces WHERE state <> 'deleted' \
         AND network_uuid NOT IN (SELECT uuid FROM networks)",
    ),
    (
        "interfaces whose address is not allocated",
        "SELECT COUNT(*) FROM interfaces i WHERE i.state <> 'deleted' AND i.ipv4 IS NOT NULL \
         AND NOT EXISTS (SELECT 1 FROM addresses a WHERE a.network_uuid = i.network_uuid AND a.user_id = i.instance_uuid)",
    ),
    (
        "instances on an unknown node",
        "SELECT COUNT(*) FROM instances WHERE state <> 'deleted' AND node_uuid IS NOT NULL \
         AND node_uuid NOT IN (SELECT uuid FROM nodes)",
    ),
    (
        "instances without their namespace",
        "SELECT COUNT(*) FROM instances WHERE state <> 'deleted' AND namespace NOT IN (SELECT name FROM namespaces)",
    ),
    (
        "networks without their namespace",
        "SELECT COUNT(*) FROM networks WHERE state <> 'deleted' AND namespace IS NOT NULL \
         AND namespace NOT IN (SELECT name FROM namespaces)",
    ),
    (
        "keys without their namespace",
        "SELECT COUNT(*) FROM namespace_keys WHERE namespace NOT IN (SELECT name FROM namespaces)",
    ),
    (
        "references to unknown blobs",
        "SELECT COUNT(*) FROM object_references WHERE target_type = 'blob' \
         AND target_id NOT IN (SELECT uuid FROM blobs)",
    ),
    (
        "contents of unknown blobs",
        "SELECT COUNT(*) FROM blob_contents WHERE blob_uuid NOT IN (SELECT uuid FROM blobs)",
    ),
    (
        "links to unknown events",
        "SELECT COUNT(*) FROM event_links WHERE event_uuid NOT IN (SELECT event_uuid FROM events)",
    ),
    (
        "address blocks with a wrong number of addresses",
        "SELECT COUNT(*) FROM address_blocks b WHERE b.bits = 8 AND b.taken <> (SELECT COUNT(*) FROM addresses a \
         WHERE a.network_uuid = b.network_uuid AND a.address >= b.block * 256 AND a.address < (b.block + 1) * 256)",
    ),
];

/// Returns the relations between tables that do not hold, each with the number of violations.
pub async fn check(mut db: impl Read) -> Result<Vec<String>, StoreError> {
    let mut violations = Vec::new();
    for (relation, sql) in INVARIANTS {
        let count: i64 = db.fetch_one(sql, &[]).await?;
        if count > 0 {
            violations.push(format!("{count} {relation}"));
        }
    }
    Ok(violations)
}

/// Returns whether a blob exists whose content is complete.
pub async fn has_blob(mut db: impl Read, id: BlobId) -> Result<bool, StoreError> {
    let sql = "SELECT COUNT(*) FROM blobs WHERE uuid = ? AND state = 'created'";
    let count: i64 = db.fetch_one(sql, params![id]).await?;
    Ok(count > 0)
}

/// Returns the blobs whose content is complete.
pub async fn blobs(mut db: impl Read) -> Result<Vec<StoredBlob>, StoreError> {
    let sql = "SELECT uuid, size, sha256 FROM blobs WHERE state = 'created' ORDER BY uuid";
    let rows: Vec<(BlobId, i64, String)> = db.fetch(sql, &[]).await?;
    let blob = |(id, size, sha256): (BlobId, i64, String)| {
        let size = u64::try_from(size)
            .map_err(|_| StoreError::Internal(format!("table blobs, size of {id}: {size} is negative")))?;
        Ok(StoredBlob { id, size, sha256 })
    };
    rows.into_iter().map(blob).collect()
}
