//! Rows of namespace keys. They hold hashes, never secrets.

use muster_types::ids::KeyId;
use muster_types::namespace::NamespaceState;
use muster_types::time::now;

use super::{Read, Row, Store, StoreError, Tx, params};

/// What a secret is stored as.
#[derive(Debug, Clone)]
pub struct StoredSecret {
    /// Finds the few keys that a presented secret can belong to.
    pub tag: i64,
    pub hash: String,
    pub nonce: String,
}

/// A key to write.
#[derive(Debug, Clone)]
pub struct NewKey {
    pub secret: StoredSecret,
    pub expiry: Option<f64>,
    pub scopes: Option<Vec<String>>,
    /// Who made it, if that was not a caller with a key of its own.
    pub provenance: Option<serde_json::Value>,
}

impl NewKey {
    /// The scopes and the provenance as their columns hold them.
    fn documents(&self) -> (Option<String>, Option<String>) {
        let scopes = self.scopes.as_ref().map(|scopes| serde_json::json!(scopes).to_string());
        (scopes, self.provenance.as_ref().map(ToString::to_string))
    }
}

/// A key that a presented secret may belong to.
#[derive(Debug, Clone)]
pub struct Candidate {
    pub name: String,
    pub hash: String,
    pub nonce: String,
    pub scopes: Option<Vec<String>>,
}

/// What a token is checked against.
#[derive(Debug, Clone)]
pub struct Credential {
    pub namespace_state: NamespaceState,
    pub key: Option<CredentialKey>,
}

#[derive(Debug, Clone)]
pub struct CredentialKey {
    pub nonce: String,
    pub expiry: Option<f64>,
    /// What an exchange wrote of where it is from.
    pub provenance: Option<serde_json::Value>,
}

const LIVE: &str = "state = 'created' AND (expiry IS NULL OR expiry > ?)";

/// The namespace and key that a token names, in one look. `None`: no such namespace.
pub async fn credential(
    store: &Store,
    namespace: &str,
    name: &str,
) -> Result<Option<Credential>, StoreError> {
    let row = store
        .query_one(
            "SELECT n.state, k.nonce, k.expiry, k.provenance FROM namespaces n LEFT JOIN namespace_keys k \
             ON k.namespace = n.name AND k.name = ? AND k.state = 'created' WHERE n.name = ?",
            params![name, namespace],
        )
        .await?;
    row.map(|row| {
        let key = match row.get::<Option<String>>(1)? {
            Some(nonce) => Some(CredentialKey { nonce, expiry: row.get(2)?, provenance: row.json_opt(3)? }),
            None => None,
        };
        Ok(Credential { namespace_state: row.parse(0)?, key })
    })
    .transpose()
}

/// More keys than this share a tag only if somebody made them so; a login does not try them all.
const MOST_CANDIDATES: usize = 16;

/// The live keys of a namespace that carry `tag`.
pub async fn candidates(store: &Store, namespace: &str, tag: i64) -> Result<Vec<Candidate>, StoreError> {
    let sql = format!(
        "SELECT name, hash, nonce, scopes FROM namespace_keys WHERE namespace = ? AND tag = ? AND {LIVE} ORDER BY name LIMIT {MOST_CANDIDATES}"
    );
    let rows = store.query(&sql, params![namespace, tag, now()]).await?;
    rows.iter()
        .map(|row| {
            Ok(Candidate {
                name: row.get(0)?,
                hash: row.get(1)?,
                nonce: row.get(2)?,
                scopes: row.json_opt(3)?,
            })
        })
        .collect()
}

/// `(namespace, key name)` of the live keys of the namespaces from `first` to `last`.
pub async fn names(mut db: impl Read, first: &str, last: &str) -> Result<Vec<(String, String)>, StoreError> {
    let sql = format!(
        "SELECT namespace, name FROM namespace_keys WHERE namespace >= ? AND namespace <= ? AND {LIVE} \
         ORDER BY namespace, name"
    );
    let rows = db.rows(&sql, params![first, last, now()]).await?;
    rows.iter().map(|row| Ok((row.get(0)?, row.get(1)?))).collect()
}

/// The id of a live key.
pub async fn find(mut db: impl Read, namespace: &str, name: &str) -> Result<Option<KeyId>, StoreError> {
    let sql = format!("SELECT uuid FROM namespace_keys WHERE namespace = ? AND name = ? AND {LIVE}");
    let rows = db.rows(&sql, params![namespace, name, now()]).await?;
    rows.first().map(|row| row.parse(0)).transpose()
}

/// What a live key may be used for, if there is one: `None` inside is everything.
pub async fn scopes(
    mut db: impl Read,
    namespace: &str,
    name: &str,
) -> Result<Option<Option<Vec<String>>>, StoreError> {
    let sql = format!("SELECT scopes FROM namespace_keys WHERE namespace = ? AND name = ? AND {LIVE}");
    let rows = db.rows(&sql, params![namespace, name, now()]).await?;
    rows.first().map(|row| row.json_opt(0)).transpose()
}

/// Whether a write made a key or replaced one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    Created(KeyId),
    Rotated(KeyId),
}

/// Adds a key, or replaces the one of that name and with it every right of the old one.
pub async fn put(tx: &mut Tx, namespace: &str, name: &str, key: &NewKey) -> Result<Put, StoreError> {
    let (scopes, provenance) = key.documents();
    let row = tx
        .query_one(
            "SELECT uuid, state FROM namespace_keys WHERE namespace = ? AND name = ?",
            params![namespace, name],
        )
        .await?;
    if let Some(row) = row {
        let id: KeyId = row.parse(0)?;
        let met = tx
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
        if met != 1 {
            return Err(StoreError::Conflict("the key went while it was replaced".into()));
        }
        let was_deleted = row.get::<String>(1)? == "deleted";
        return Ok(if was_deleted { Put::Created(id) } else { Put::Rotated(id) });
    }
    match insert(tx, namespace, name, key).await {
        Ok(id) => Ok(Put::Created(id)),
        // Somebody added the name since we looked: run again and rotate it.
        Err(StoreError::Duplicate(why)) => Err(StoreError::Conflict(why)),
        Err(error) => Err(error),
    }
}

/// Adds a key; a name that any key of the namespace has, deleted ones too, is [`StoreError::Duplicate`].
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

/// Soft-deletes a live key: it stops working at once, and its name may be used again.
pub async fn soft_delete(tx: &mut Tx, namespace: &str, name: &str) -> Result<bool, StoreError> {
    let sql = format!(
        "UPDATE namespace_keys SET state = 'deleted', updated = ?, version = version + 1 \
         WHERE namespace = ? AND name = ? AND {LIVE}"
    );
    Ok(tx.execute(&sql, params![now(), namespace, name, now()]).await? == 1)
}

/// A key that the sweep or the cleaner is about to handle.
#[derive(Debug, Clone)]
pub struct OldKey {
    pub id: KeyId,
    pub namespace: String,
    pub name: String,
}

impl OldKey {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self { id: row.parse(0)?, namespace: row.get(1)?, name: row.get(2)? })
    }
}

/// Live keys that expired before `before`.
pub async fn expired_before(mut db: impl Read, before: f64, limit: i64) -> Result<Vec<OldKey>, StoreError> {
    let rows = db
        .rows(
            "SELECT uuid, namespace, name FROM namespace_keys WHERE state = 'created' AND expiry < ? \
             ORDER BY expiry LIMIT ?",
            params![before, limit],
        )
        .await?;
    rows.iter().map(OldKey::read).collect()
}

/// Soft-deletes a key that expired before `before`, unless it was rotated meanwhile.
pub async fn soft_delete_expired(tx: &mut Tx, id: KeyId, before: f64) -> Result<bool, StoreError> {
    let met = tx
        .execute(
            "UPDATE namespace_keys SET state = 'deleted', updated = ?, version = version + 1 \
             WHERE uuid = ? AND state = 'created' AND expiry < ?",
            params![now(), id, before],
        )
        .await?;
    Ok(met == 1)
}

/// Soft-deleted keys whose state changed before `before`.
pub async fn deleted_before(mut db: impl Read, before: f64, limit: i64) -> Result<Vec<OldKey>, StoreError> {
    let rows = db
        .rows(
            "SELECT uuid, namespace, name FROM namespace_keys WHERE state = 'deleted' AND updated <= ? LIMIT ?",
            params![before, limit],
        )
        .await?;
    rows.iter().map(OldKey::read).collect()
}

/// Removes the row of a soft-deleted key.
pub async fn remove_deleted(tx: &mut Tx, id: KeyId) -> Result<bool, StoreError> {
    Ok(tx.execute("DELETE FROM namespace_keys WHERE uuid = ? AND state = 'deleted'", params![id]).await? == 1)
}

/// Soft-deletes every key of a namespace.
pub async fn soft_delete_of(tx: &mut Tx, namespace: &str) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE namespace_keys SET state = 'deleted', updated = ?, version = version + 1 \
         WHERE namespace = ? AND state = 'created'",
        params![now(), namespace],
    )
    .await?;
    Ok(())
}

/// Some of the keys of a namespace, in whatever state.
pub async fn some_of(mut db: impl Read, namespace: &str, limit: i64) -> Result<Vec<OldKey>, StoreError> {
    let rows = db
        .rows(
            "SELECT uuid, namespace, name FROM namespace_keys WHERE namespace = ? LIMIT ?",
            params![namespace, limit],
        )
        .await?;
    rows.iter().map(OldKey::read).collect()
}
