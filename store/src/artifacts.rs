//! Rows of artifacts. Their versions are references to blobs.

use std::collections::HashSet;

use muster_types::artifact::{ArtifactState, ArtifactType};
use muster_types::ids::{ArtifactId, OperationId};
use muster_types::time::now;

use super::{Read, Row, StoreError, Tx, Value, marks, params, sha256};

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
    /// What the source said of the newest version.
    pub source: Validators,
    pub last_operation: Option<OperationId>,
}

/// How to ask a source whether it has something new.
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

const COLUMNS: &str = "uuid, name, namespace, artifact_type, source_url, shared, max_versions, state, error_message, \
                       etag, modified, length, last_operation";
/// States in which an artifact goes by its name.
const ACTIVE: &str = "state <> 'deleted'";
/// Artifacts that a namespace may read.
const VISIBLE: &str =
    "(shared = 1 OR namespace = ? OR namespace IN (SELECT namespace FROM trusts WHERE trusted = ?))";

impl ArtifactRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self {
            id: row.parse(0)?,
            name: row.get(1)?,
            namespace: row.get(2)?,
            artifact_type: row.parse(3)?,
            source_url: row.get(4)?,
            shared: row.get(5)?,
            max_versions: row.get(6)?,
            state: row.parse(7)?,
            error_message: row.get(8)?,
            source: Validators { etag: row.get(9)?, modified: row.get(10)?, length: row.get(11)? },
            last_operation: row.parse_opt(12)?,
        })
    }
}

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<ArtifactRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM artifacts WHERE {tail}");
    db.rows(&sql, values).await?.iter().map(ArtifactRow::read).collect()
}

/// Stands for what there is one artifact of: sources may be longer than a key.
fn source_key(namespace: &str, artifact_type: ArtifactType, source_url: &str) -> String {
    sha256(&format!("{namespace}/{artifact_type}/{source_url}"))
}

pub async fn get(db: impl Read, id: ArtifactId) -> Result<Option<ArtifactRow>, StoreError> {
    Ok(rows(db, "uuid = ?", params![id]).await?.pop())
}

/// The artifact of a namespace for a source.
pub async fn by_source(
    db: impl Read,
    namespace: &str,
    artifact_type: ArtifactType,
    source_url: &str,
) -> Result<Option<ArtifactRow>, StoreError> {
    let key = source_key(namespace, artifact_type, source_url);
    Ok(rows(db, "source_key = ?", params![key]).await?.pop())
}

/// Whether a namespace has anything from a source, of whatever type.
pub async fn has_source(mut db: impl Read, namespace: &str, source_url: &str) -> Result<bool, StoreError> {
    let sql = format!("SELECT 1 FROM artifacts WHERE namespace = ? AND source_url = ? AND {ACTIVE} LIMIT 1");
    Ok(!db.rows(&sql, params![namespace, source_url]).await?.is_empty())
}

/// Some artifacts of a name; labels only if nothing else has it, for they are called by a path of their own.
async fn named(db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<ArtifactRow>, StoreError> {
    let tail = format!("name = ? AND {tail} AND {ACTIVE} ORDER BY artifact_type = 'label', uuid LIMIT 2");
    let mut found = rows(db, &tail, values).await?;
    let is_label = |row: &ArtifactRow| row.artifact_type == ArtifactType::Label;
    if found.iter().any(|row| !is_label(row)) {
        found.retain(|row| !is_label(row));
    }
    Ok(found)
}

/// The artifacts of a name, in one namespace or in all.
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

/// The artifacts of a name that a namespace may read.
pub async fn by_name_visible(
    db: impl Read,
    name: &str,
    caller: &str,
) -> Result<Vec<ArtifactRow>, StoreError> {
    named(db, VISIBLE, params![name, caller, caller]).await
}

/// The usable images from a source that a namespace may read.
pub async fn by_url_visible(db: impl Read, url: &str, caller: &str) -> Result<Vec<ArtifactRow>, StoreError> {
    let tail = format!(
        "source_url = ? AND artifact_type = 'image' AND state = 'created' AND {VISIBLE} ORDER BY uuid LIMIT 10"
    );
    rows(db, &tail, params![url, caller, caller]).await
}

/// Which of some artifacts a namespace may read.
pub async fn visible(mut db: impl Read, ids: &[String], caller: &str) -> Result<HashSet<String>, StoreError> {
    if ids.is_empty() {
        return Ok(HashSet::new());
    }
    let sql = format!("SELECT uuid FROM artifacts WHERE uuid IN ({}) AND {VISIBLE}", marks(ids.len()));
    let mut values: Vec<Value> = ids.iter().map(Value::from).collect();
    values.extend([caller.into(), caller.into()]);
    db.rows(&sql, &values).await?.iter().map(|row| row.get(0)).collect()
}

/// The next artifacts after `after`, by id. `seen_by` keeps those that this namespace may read.
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

/// Every artifact of a namespace that is not deleted.
pub async fn of_namespace(db: impl Read, namespace: &str) -> Result<Vec<ArtifactRow>, StoreError> {
    rows(db, &format!("namespace = ? AND {ACTIVE} ORDER BY uuid"), params![namespace]).await
}

/// The artifacts that hold copies of the disks of an instance.
pub async fn snapshots_of(db: impl Read, instance: &str) -> Result<Vec<ArtifactRow>, StoreError> {
    let tail = format!("artifact_type = 'snapshot' AND name LIKE ? AND {ACTIVE} ORDER BY name");
    rows(db, &tail, params![format!("{instance}/%")]).await
}

/// Artifacts without any version that no operation is at.
pub async fn abandoned(db: impl Read, before: f64) -> Result<Vec<ArtifactRow>, StoreError> {
    let tail = "state = 'initial' AND artifact_type <> 'snapshot' AND updated <= ? AND NOT EXISTS (SELECT 1 FROM operations \
                WHERE target_type = 'artifact' AND target_id = artifacts.uuid AND state IN ('queued', 'executing')) \
                ORDER BY updated LIMIT 500";
    rows(db, tail, params![before]).await
}

/// Adds an artifact; a duplicate is one that has the same source.
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
    row.ok_or_else(|| StoreError::Broken("a new artifact has no row".into()))
}

/// Keeps an artifact from going until this transaction ends. Says whether it is there.
pub async fn hold(tx: &mut Tx, id: ArtifactId) -> Result<bool, StoreError> {
    let sql = format!("UPDATE artifacts SET version = version + 1 WHERE uuid = ? AND {ACTIVE}");
    Ok(tx.execute(&sql, params![id]).await? == 1)
}

/// Moves an artifact to another state if it is still in `from`.
pub async fn set_state(
    tx: &mut Tx,
    id: ArtifactId,
    from: ArtifactState,
    to: ArtifactState,
) -> Result<bool, StoreError> {
    if !from.may_become(to) {
        return Err(StoreError::Broken(format!("an artifact cannot go from {from} to {to}")));
    }
    let free = if to == ArtifactState::Deleted { "source_key = NULL, " } else { "" };
    let sql = format!(
        "UPDATE artifacts SET {free}state = ?, updated = ?, version = version + 1 WHERE uuid = ? AND state = ?"
    );
    Ok(tx.execute(&sql, params![to, now(), id, from]).await? == 1)
}

/// Says why an artifact's source could not be fetched, or that it could.
pub async fn set_error(tx: &mut Tx, id: ArtifactId, error: Option<&str>) -> Result<(), StoreError> {
    tx.execute("UPDATE artifacts SET error_message = ? WHERE uuid = ?", params![error, id]).await?;
    Ok(())
}

pub async fn set_shared(tx: &mut Tx, id: ArtifactId, shared: bool) -> Result<(), StoreError> {
    tx.execute("UPDATE artifacts SET shared = ?, version = version + 1 WHERE uuid = ?", params![shared, id])
        .await?;
    Ok(())
}

pub async fn set_max_versions(tx: &mut Tx, id: ArtifactId, most: i64) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE artifacts SET max_versions = ?, version = version + 1 WHERE uuid = ?",
        params![most, id],
    )
    .await?;
    Ok(())
}

/// The number of the next version, which no other has or had.
pub async fn next_index(tx: &mut Tx, id: ArtifactId) -> Result<i64, StoreError> {
    tx.execute("UPDATE artifacts SET newest = newest + 1 WHERE uuid = ?", params![id]).await?;
    let row = tx.query_one("SELECT newest FROM artifacts WHERE uuid = ?", params![id]).await?;
    row.map_or_else(|| Err(StoreError::Broken("an artifact without a row".into())), |row| row.get(0))
}

pub async fn set_source(tx: &mut Tx, id: ArtifactId, source: &Validators) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE artifacts SET etag = ?, modified = ?, length = ? WHERE uuid = ?",
        params![source.etag.as_ref(), source.modified.as_ref(), source.length, id],
    )
    .await?;
    Ok(())
}

pub async fn set_operation(tx: &mut Tx, id: ArtifactId, operation: OperationId) -> Result<(), StoreError> {
    tx.execute("UPDATE artifacts SET last_operation = ? WHERE uuid = ?", params![operation, id]).await?;
    Ok(())
}

/// Deleted artifacts whose state changed before `before`.
pub async fn deleted_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<ArtifactId>, StoreError> {
    let sql = "SELECT uuid FROM artifacts WHERE state = 'deleted' AND updated <= ? LIMIT ?";
    db.rows(sql, params![before, limit]).await?.iter().map(|row| row.parse(0)).collect()
}

/// Removes the row of a deleted artifact.
pub async fn remove(tx: &mut Tx, id: ArtifactId) -> Result<bool, StoreError> {
    let sql = "DELETE FROM artifacts WHERE uuid = ? AND state = 'deleted'";
    Ok(tx.execute(sql, params![id]).await? == 1)
}
