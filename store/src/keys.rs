//! Rows of namespace keys, which contain hashes instead of secrets. See docs/decisions/0003.

#[cfg(test)]
mod tests;

use muster_types::ids::KeyId;
use muster_types::key::KeyState;
use muster_types::namespace::NamespaceState;
use muster_types::object::ObjectType;
use muster_types::time::now;
use serde_json::{Map, Value as JsonValue};

use super::{Json, Read, Store, StoreError, Tx, columns, metadata, params};

/// The stored form of a secret.
#[derive(Debug, Clone)]
pub struct StoredSecret {
    /// Selects the few keys that a presented secret can belong to.
    pub tag: i64,
    pub hash: String,
    pub nonce: String,
}

/// A key to add.
#[derive(Debug, Clone)]
pub struct NewKey {
    pub secret: StoredSecret,
    pub expiry: Option<f64>,
    pub scopes: Option<Vec<String>>,
    /// The origin of a key that a token exchange created, or that was created with such a key.
    pub provenance: Option<serde_json::Value>,
}

impl NewKey {
    /// Returns the scopes and the provenance as JSON.
    fn documents(&self) -> (Option<String>, Option<String>) {
        let scopes = self.scopes.as_ref().map(|scopes| serde_json::json!(scopes).to_string());
        (scopes, self.provenance.as_ref().map(ToString::to_string))
    }
}

/// A key that a presented secret may belong to.
#[derive(Debug, Clone)]
pub struct KeyCandidate {
    pub name: String,
    pub hash: String,
    pub nonce: String,
    pub scopes: Option<Vec<String>>,
}

/// The part of a key that its namespace may see.
#[derive(Debug, Clone)]
pub struct KeyRow {
    pub id: KeyId,
    pub name: String,
    pub expiry: Option<f64>,
    /// `None` for an unrestricted key.
    pub scopes: Option<Vec<String>>,
}

/// The rows that a token is checked against.
#[derive(Debug, Clone)]
pub struct Credential {
    pub namespace_state: NamespaceState,
    pub key: Option<CredentialKey>,
    /// The namespaces that trust the namespace.
    pub trusting: Vec<String>,
}

#[derive(Debug, Clone)]
pub struct CredentialKey {
    pub nonce: String,
    pub expiry: Option<f64>,
    /// The origin of a key that a token exchange created.
    pub provenance: Option<serde_json::Value>,
}

pub(crate) const LIVE: &str = "state = 'created' AND (expiry IS NULL OR expiry > ?)";

/// Returns the namespace and the key that a token names, or `None` if there is no such namespace.
pub async fn credential(
    mut store: &Store,
    namespace: &str,
    name: &str,
) -> Result<Option<Credential>, StoreError> {
    type CredentialColumns =
        (NamespaceState, Option<String>, Option<f64>, (Json<Option<serde_json::Value>>, Option<String>));
    // Every request runs this statement, so it also reads what most requests need.
    let rows: Vec<CredentialColumns> = store
        .fetch(
            "SELECT n.state, k.nonce, k.expiry, k.provenance, t.namespace FROM namespaces n \
             LEFT JOIN namespace_keys k ON k.namespace = n.name AND k.name = ? AND k.state = 'created' \
             LEFT JOIN trusts t ON t.trusted = n.name WHERE n.name = ?",
            params![name, namespace],
        )
        .await?;
    let mut credential: Option<Credential> = None;
    for (namespace_state, nonce, expiry, (Json(provenance), trusting)) in rows {
        let key = nonce.map(|nonce| CredentialKey { nonce, expiry, provenance });
        let credential =
            credential.get_or_insert_with(|| Credential { namespace_state, key, trusting: vec![] });
        credential.trusting.extend(trusting);
    }
    Ok(credential)
}

/// The maximum number of keys that a login tries. More keys share a tag only if their secrets were chosen for it.
const MAX_CANDIDATES: usize = 16;

columns! { KeyRow { id: uuid, name, expiry, scopes: json(scopes), } }
columns! { KeyCandidate { name, hash, nonce, scopes: json(scopes), } }

/// Returns the live keys of a namespace that have `tag`.
pub async fn candidates(
    mut store: &Store,
    namespace: &str,
    tag: i64,
) -> Result<Vec<KeyCandidate>, StoreError> {
    let tail = format!(
        "FROM namespace_keys WHERE namespace = ? AND tag = ? AND {LIVE} ORDER BY name LIMIT {MAX_CANDIDATES}"
    );
    store.select(&tail, params![namespace, tag, now()]).await
}

/// Returns `(namespace, key name)` of the live keys of the namespaces from `first` to `last`.
pub async fn names(mut db: impl Read, first: &str, last: &str) -> Result<Vec<(String, String)>, StoreError> {
    let sql = format!(
        "SELECT namespace, name FROM namespace_keys WHERE namespace >= ? AND namespace <= ? AND {LIVE} \
         ORDER BY namespace, name"
    );
    db.fetch(&sql, params![first, last, now()]).await
}

/// Returns the expiry and the scopes of a live key, and its metadata.
pub async fn get(
    db: impl Read,
    namespace: &str,
    name: &str,
) -> Result<Option<(KeyRow, Map<String, JsonValue>)>, StoreError> {
    let tail = format!("FROM namespace_keys WHERE namespace = ? AND name = ? AND {LIVE}");
    metadata::select(db, ObjectType::NamespaceKey, &tail, params![namespace, name, now()]).await
}

/// Returns the id of a live key.
pub async fn find(mut db: impl Read, namespace: &str, name: &str) -> Result<Option<KeyId>, StoreError> {
    let sql = format!("SELECT uuid FROM namespace_keys WHERE namespace = ? AND name = ? AND {LIVE}");
    db.fetch_optional(&sql, params![namespace, name, now()]).await
}

/// Returns the scopes of a live key, if it exists; the inner `None` is an unrestricted key.
pub async fn scopes(
    mut db: impl Read,
    namespace: &str,
    name: &str,
) -> Result<Option<Option<Vec<String>>>, StoreError> {
    let sql = format!("SELECT scopes FROM namespace_keys WHERE namespace = ? AND name = ? AND {LIVE}");
    let scopes = db.fetch_optional(&sql, params![namespace, name, now()]).await?;
    Ok(scopes.map(|Json(scopes)| scopes))
}

/// Whether a key was created or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    Created(KeyId),
    Rotated(KeyId),
}

/// Adds a key, or replaces the one with that name, including its scopes.
pub async fn put(tx: &mut Tx, namespace: &str, name: &str, key: &NewKey) -> Result<PutOutcome, StoreError> {
    let (scopes, provenance) = key.documents();
    let sql = "SELECT uuid, state FROM namespace_keys WHERE namespace = ? AND name = ?";
    let existing: Option<(KeyId, KeyState)> = tx.fetch_optional(sql, params![namespace, name]).await?;
    if let Some((id, state)) = existing {
        let updated = tx
            .execute(
            "UPDATE namespace_keys SET state = 'created', tag = ?, hash = ?, nonce = ?, expiry = ?, scopes = ?, \
             provenance = ?, updated = ?, version = version + 1 WHERE uuid = ?",
            params![
                key.secret.tag,
                &key.secret.hash,
                &key.secret.nonce,
                key.expiry,
                scopes,
                provenance,
                now(),
                id
            ],
        )
        .await?;
        if updated != 1 {
            return Err(StoreError::Conflict("the key was removed while it was replaced".into()));
        }
        return Ok(match state {
            KeyState::Deleted => {
                metadata::remove_of(tx, ObjectType::NamespaceKey, &id.to_string()).await?;
                PutOutcome::Created(id)
            }
            KeyState::Created => PutOutcome::Rotated(id),
        });
    }
    // If the name was added since it was read, the retry replaces it.
    let id = insert(tx, namespace, name, key).await.map_err(StoreError::retry_duplicate)?;
    Ok(PutOutcome::Created(id))
}

/// Adds a key; the name of any key of the namespace, even a deleted one, is a [`StoreError::Duplicate`].
pub async fn insert(tx: &mut Tx, namespace: &str, name: &str, key: &NewKey) -> Result<KeyId, StoreError> {
    let (id, time) = (KeyId::new(), now());
    let (scopes, provenance) = key.documents();
    tx.execute(
        "INSERT INTO namespace_keys (uuid, namespace, name, state, tag, hash, nonce, expiry, scopes, provenance, \
         created, updated, version) VALUES (?, ?, ?, 'created', ?, ?, ?, ?, ?, ?, ?, ?, 1)",
        params![
            id,
            namespace,
            name,
            key.secret.tag,
            &key.secret.hash,
            &key.secret.nonce,
            key.expiry,
            scopes,
            provenance,
            time,
            time
        ],
    )
    .await?;
    Ok(id)
}

/// Locks a live key until the transaction ends. Returns whether it exists.
pub async fn lock(tx: &mut Tx, id: KeyId) -> Result<bool, StoreError> {
    let sql = format!("UPDATE namespace_keys SET version = version + 1 WHERE uuid = ? AND {LIVE}");
    Ok(tx.execute(&sql, params![id, now()]).await? == 1)
}

/// Soft-deletes a live key, which stops working immediately. Its name may be used again.
pub async fn soft_delete(tx: &mut Tx, namespace: &str, name: &str) -> Result<bool, StoreError> {
    let sql = format!(
        "UPDATE namespace_keys SET state = 'deleted', updated = ?, version = version + 1 \
         WHERE namespace = ? AND name = ? AND {LIVE}"
    );
    Ok(tx.execute(&sql, params![now(), namespace, name, now()]).await? == 1)
}

/// Removes a key immediately, without the time in which a deleted key is kept.
pub async fn remove(tx: &mut Tx, namespace: &str, name: &str) -> Result<(), StoreError> {
    tx.execute("DELETE FROM namespace_keys WHERE namespace = ? AND name = ?", params![namespace, name])
        .await?;
    Ok(())
}

/// The identity of a key that is expired or deleted.
#[derive(Debug, Clone)]
pub struct KeyIdentity {
    pub id: KeyId,
    pub namespace: String,
    pub name: String,
}

columns! { KeyIdentity { id: uuid, namespace, name, } }

/// Returns the live keys that expired before `before`.
pub async fn expired_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<KeyIdentity>, StoreError> {
    db.select(
        "FROM namespace_keys WHERE state = 'created' AND expiry < ? \
             ORDER BY expiry LIMIT ?",
        params![before, limit],
    )
    .await
}

/// Soft-deletes a key that expired before `before`, unless it was replaced since.
pub async fn soft_delete_expired(tx: &mut Tx, id: KeyId, before: f64) -> Result<bool, StoreError> {
    let updated = tx
        .execute(
            "UPDATE namespace_keys SET state = 'deleted', updated = ?, version = version + 1 \
             WHERE uuid = ? AND state = 'created' AND expiry < ?",
            params![now(), id, before],
        )
        .await?;
    Ok(updated == 1)
}

/// Returns the soft-deleted keys whose state changed before `before`.
pub async fn deleted_before(
    mut db: impl Read,
    before: f64,
    limit: i64,
) -> Result<Vec<KeyIdentity>, StoreError> {
    db.select("FROM namespace_keys WHERE state = 'deleted' AND updated <= ? LIMIT ?", params![before, limit])
        .await
}

/// Removes the row of a soft-deleted key.
pub async fn remove_deleted(tx: &mut Tx, id: KeyId) -> Result<bool, StoreError> {
    Ok(tx.execute("DELETE FROM namespace_keys WHERE uuid = ? AND state = 'deleted'", params![id]).await? == 1)
}

/// Soft-deletes all keys of a namespace.
pub async fn soft_delete_of(tx: &mut Tx, namespace: &str) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE namespace_keys SET state = 'deleted', updated = ?, version = version + 1 \
         WHERE namespace = ? AND state = 'created'",
        params![now(), namespace],
    )
    .await?;
    Ok(())
}

/// Returns up to `limit` keys of a namespace, including deleted ones.
pub async fn of_namespace(
    mut db: impl Read,
    namespace: &str,
    limit: i64,
) -> Result<Vec<KeyIdentity>, StoreError> {
    db.select("FROM namespace_keys WHERE namespace = ? LIMIT ?", params![namespace, limit]).await
}
