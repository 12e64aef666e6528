//! Rows of artifacts. Their versions are references to blobs.

mod details;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use muster_types::artifact::{ArtifactState, ArtifactType, ArtifactVersion};
use muster_types::ids::{ArtifactId, OperationId};
use muster_types::namespace::SYSTEM_NAMESPACE;
use muster_types::time::now;

use super::{FAILED_LAST, Read, StoreError, Tx, Value, columns, params, sha256, to_json};

pub use details::{ArtifactDetails, details};

#[derive(Debug, Clone, PartialEq)]
pub struct ArtifactRow {
    pub id: ArtifactId,
    pub name: String,
    pub namespace: String,
    pub artifact_type: ArtifactType,
    pub source_url: String,
    pub shared: bool,
    pub max_versions: i64,
    pub state: ArtifactState,
    pub error_message: Option<String>,
    /// Whether the newest version was fetched from the source. Only then can the artifact stand for its URL.
    pub fetched: bool,
    /// The validators of the newest version.
    pub source: Validators,
    pub last_operation: Option<OperationId>,
    /// The versions that a deleted artifact had, by index.
    pub deleted_versions: Option<BTreeMap<i64, ArtifactVersion>>,
}

/// The HTTP validators for conditional requests to a source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Validators {
    pub etag: Option<String>,
    pub modified: Option<String>,
    pub length: Option<i64>,
}

/// An artifact to add.
#[derive(Debug, Clone)]
pub struct NewArtifact {
    pub id: ArtifactId,
    pub name: String,
    pub namespace: String,
    pub artifact_type: ArtifactType,
    pub source_url: String,
    pub shared: bool,
    pub max_versions: i64,
}

columns! { ArtifactRow {
    id: uuid,
    name,
    namespace,
    artifact_type,
    source_url,
    shared,
    max_versions,
    state,
    error_message,
    fetched,
    source: Validators { etag, modified, length, },
    last_operation,
    deleted_versions: json(deleted_versions),
} }

/// The states in which an artifact can be found by its name.
const ACTIVE: &str = "state <> 'deleted'";
/// The condition that a namespace may read an artifact.
const VISIBLE: &str =
    "(shared = 1 OR namespace = ? OR namespace IN (SELECT namespace FROM trusts WHERE trusted = ?))";

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<ArtifactRow>, StoreError> {
    db.select(&format!("FROM artifacts WHERE {tail}"), values).await
}

/// Returns the unique key of the artifact of a source, whose URL may be longer than a key.
fn source_key(namespace: &str, artifact_type: ArtifactType, source_url: &str) -> String {
    sha256(&format!("{namespace}/{artifact_type}/{source_url}"))
}

pub async fn get(db: impl Read, id: ArtifactId) -> Result<Option<ArtifactRow>, StoreError> {
    Ok(rows(db, "uuid = ?", params![id]).await?.pop())
}

/// Returns the artifact of a source in a namespace.
pub async fn by_source(
    db: impl Read,
    namespace: &str,
    artifact_type: ArtifactType,
    source_url: &str,
) -> Result<Option<ArtifactRow>, StoreError> {
    let key = source_key(namespace, artifact_type, source_url);
    Ok(rows(db, "source_key = ?", params![key]).await?.pop())
}

/// Returns whether a namespace has an artifact of any type from a source.
pub async fn has_source(mut db: impl Read, namespace: &str, source_url: &str) -> Result<bool, StoreError> {
    let sql = format!("SELECT 1 FROM artifacts WHERE namespace = ? AND source_url = ? AND {ACTIVE} LIMIT 1");
    Ok(!db.rows(&sql, params![namespace, source_url]).await?.is_empty())
}

/// Returns up to [`crate::MAX_NAMESAKES`] artifacts with a name; labels only if there are no others, because labels have
/// their own paths.
async fn named(db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<ArtifactRow>, StoreError> {
    let tail = format!("name = ? AND {tail} AND {ACTIVE} ORDER BY artifact_type = 'label', {FAILED_LAST}");
    let mut found = rows(db, &tail, values).await?;
    let is_label = |row: &ArtifactRow| row.artifact_type == ArtifactType::Label;
    if found.iter().any(|row| !is_label(row)) {
        found.retain(|row| !is_label(row));
    }
    Ok(found)
}

/// Returns artifacts with a name, in one namespace or in all.
pub async fn by_name(
    db: impl Read,
    name: &str,
    namespace: Option<&str>,
) -> Result<Vec<ArtifactRow>, StoreError> {
    match namespace {
        Some(namespace) => named(db, "namespace = ?", params![name, namespace]).await,
        None => named(db, "1 = 1", params![name]).await,
    }
}

/// Returns artifacts with a name that `system` shares with all namespaces.
pub async fn by_name_shared(db: impl Read, name: &str) -> Result<Vec<ArtifactRow>, StoreError> {
    named(db, "namespace = ? AND shared = 1", params![name, SYSTEM_NAMESPACE]).await
}

/// Returns the next artifacts after `after`, by id. With `seen_by`, only those that this namespace may read.
pub async fn page(
    db: impl Read,
    seen_by: Option<&str>,
    after: Option<ArtifactId>,
    limit: i64,
) -> Result<Vec<ArtifactRow>, StoreError> {
    let mut tail = format!("uuid > ? AND {ACTIVE}");
    let mut values: Vec<Value> = vec![after.map_or_else(String::new, |id| id.to_string()).into()];
    if let Some(caller) = seen_by {
        tail = format!("{tail} AND {VISIBLE}");
        values.extend([caller.into(), caller.into()]);
    }
    values.push(limit.into());
    rows(db, &format!("{tail} ORDER BY uuid LIMIT ?"), &values).await
}

/// Returns all undeleted artifacts of a namespace.
pub async fn of_namespace(db: impl Read, namespace: &str) -> Result<Vec<ArtifactRow>, StoreError> {
    rows(db, &format!("namespace = ? AND {ACTIVE} ORDER BY uuid"), params![namespace]).await
}

/// Returns the snapshots of the disks of an instance.
pub async fn snapshots_of(db: impl Read, instance: &str) -> Result<Vec<ArtifactRow>, StoreError> {
    let tail = format!("artifact_type = 'snapshot' AND name LIKE ? AND {ACTIVE} ORDER BY name");
    rows(db, &tail, params![format!("{instance}/%")]).await
}

/// Returns the artifacts without a version that no unfinished operation will fetch.
pub async fn without_operation(db: impl Read, before: f64) -> Result<Vec<ArtifactRow>, StoreError> {
    let tail = "state = 'initial' AND artifact_type <> 'snapshot' AND updated <= ? AND NOT EXISTS (SELECT 1 FROM operations \
                WHERE target_type = 'artifact' AND target_id = artifacts.uuid AND state IN ('queued', 'executing')) \
                ORDER BY updated LIMIT 500";
    rows(db, tail, params![before]).await
}

/// Adds an artifact; an existing source is a [`StoreError::Duplicate`].
pub async fn insert(tx: &mut Tx, new: &NewArtifact) -> Result<ArtifactRow, StoreError> {
    let time = now();
    tx.execute(
        "INSERT INTO artifacts (uuid, name, namespace, artifact_type, source_url, source_key, shared, max_versions, \
         newest, state, created, updated, version) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, 1)",
        params![
            new.id,
            &new.name,
            &new.namespace,
            new.artifact_type,
            &new.source_url,
            source_key(&new.namespace, new.artifact_type, &new.source_url),
            new.shared,
            new.max_versions,
            ArtifactState::Initial,
            time,
            time
        ],
    )
    .await?;
    let row = get(&mut *tx, new.id).await?;
    row.ok_or_else(|| StoreError::Internal("a new artifact has no row".into()))
}

/// Locks an artifact until the transaction ends. Returns whether it is not deleted.
pub async fn lock(tx: &mut Tx, id: ArtifactId) -> Result<bool, StoreError> {
    let sql = format!("UPDATE artifacts SET version = version + 1 WHERE uuid = ? AND {ACTIVE}");
    Ok(tx.execute(&sql, params![id]).await? == 1)
}

/// Changes the state of an artifact if it is still `from`.
pub async fn set_state(
    tx: &mut Tx,
    id: ArtifactId,
    from: ArtifactState,
    to: ArtifactState,
) -> Result<bool, StoreError> {
    if !from.can_transition_to(to) {
        return Err(StoreError::Internal(format!("an artifact cannot go from {from} to {to}")));
    }
    let release_source = if to == ArtifactState::Deleted { "source_key = NULL, " } else { "" };
    let sql = format!(
        "UPDATE artifacts SET {release_source}state = ?, updated = ?, version = version + 1 WHERE uuid = ? AND state = ?"
    );
    Ok(tx.execute(&sql, params![to, now(), id, from]).await? == 1)
}

/// Records the versions that a deleted artifact had.
pub async fn set_deleted_versions(
    tx: &mut Tx,
    id: ArtifactId,
    versions: &BTreeMap<i64, ArtifactVersion>,
) -> Result<(), StoreError> {
    let sql = "UPDATE artifacts SET deleted_versions = ? WHERE uuid = ? AND state = 'deleted'";
    tx.execute(sql, params![to_json(versions)?, id]).await?;
    Ok(())
}

/// Records why an artifact's source failed to be fetched, or `None` after a success.
pub async fn set_error(tx: &mut Tx, id: ArtifactId, error: Option<&str>) -> Result<(), StoreError> {
    tx.execute("UPDATE artifacts SET error_message = ? WHERE uuid = ?", params![error, id]).await?;
    Ok(())
}

pub async fn set_shared(tx: &mut Tx, id: ArtifactId, shared: bool) -> Result<(), StoreError> {
    tx.execute("UPDATE artifacts SET shared = ?, version = version + 1 WHERE uuid = ?", params![shared, id])
        .await?;
    Ok(())
}

pub async fn set_max_versions(tx: &mut Tx, id: ArtifactId, max_versions: i64) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE artifacts SET max_versions = ?, version = version + 1 WHERE uuid = ?",
        params![max_versions, id],
    )
    .await?;
    Ok(())
}

/// Returns the index of the next version, which is never used again.
pub async fn next_index(tx: &mut Tx, id: ArtifactId) -> Result<i64, StoreError> {
    tx.execute("UPDATE artifacts SET newest = newest + 1 WHERE uuid = ?", params![id]).await?;
    tx.fetch_one("SELECT newest FROM artifacts WHERE uuid = ?", params![id]).await
}

/// Records that the newest version was fetched from the source, and its validators.
pub async fn set_fetched(tx: &mut Tx, id: ArtifactId, source: &Validators) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE artifacts SET fetched = 1, etag = ?, modified = ?, length = ? WHERE uuid = ?",
        params![source.etag.as_ref(), source.modified.as_ref(), source.length, id],
    )
    .await?;
    Ok(())
}

/// Records that the newest version does not come from the source, so that the next fetch downloads the source.
pub async fn clear_fetched(tx: &mut Tx, id: ArtifactId) -> Result<(), StoreError> {
    let sql = "UPDATE artifacts SET fetched = 0, etag = NULL, modified = NULL, length = NULL WHERE uuid = ?";
    tx.execute(sql, params![id]).await?;
    Ok(())
}

pub async fn set_operation(tx: &mut Tx, id: ArtifactId, operation: OperationId) -> Result<(), StoreError> {
    tx.execute("UPDATE artifacts SET last_operation = ? WHERE uuid = ?", params![operation, id]).await?;
    Ok(())
}

/// Returns the deleted artifacts whose state changed before `before`.
pub async fn deleted_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<ArtifactId>, StoreError> {
    let sql = "SELECT uuid FROM artifacts WHERE state = 'deleted' AND updated <= ? LIMIT ?";
    db.fetch(sql, params![before, limit]).await
}

/// Removes the row of a deleted artifact.
pub async fn remove(tx: &mut Tx, id: ArtifactId) -> Result<bool, StoreError> {
    let sql = "DELETE FROM artifacts WHERE uuid = ? AND state = 'deleted'";
    Ok(tx.execute(sql, params![id]).await? == 1)
}
