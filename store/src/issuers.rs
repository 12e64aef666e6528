//! Rows of trusted issuers. The names and URLs of live issuers are unique.

#[cfg(test)]
mod tests;

use muster_types::ids::IssuerId;
use muster_types::issuer::{IssuerState, IssuerTerms};
use muster_types::time::now;

use super::{Read, StoreError, Tx, Value, columns, params, sha256};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuerRow {
    pub id: IssuerId,
    pub name: String,
    pub state: IssuerState,
    pub terms: IssuerTerms,
}

columns! { IssuerRow {
    id: uuid,
    name,
    state,
    terms: IssuerTerms { issuer_url, jwks_uri, audience, },
} }

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<IssuerRow>, StoreError> {
    db.select(&format!("FROM issuers WHERE {tail}"), values).await
}

/// Returns the live issuers, by name.
pub async fn list(db: impl Read) -> Result<Vec<IssuerRow>, StoreError> {
    rows(db, "state = 'created' ORDER BY name", &[]).await
}

/// Returns the live issuer with a name.
pub async fn by_name(db: impl Read, name: &str) -> Result<Option<IssuerRow>, StoreError> {
    Ok(rows(db, "live_name = ?", params![name]).await?.pop())
}

/// Returns the live issuer with a URL.
pub async fn by_url(db: impl Read, url: &str) -> Result<Option<IssuerRow>, StoreError> {
    Ok(rows(db, "live_url = ?", params![sha256(url)]).await?.pop())
}

/// Returns the most recently soft-deleted issuer with a name.
pub async fn deleted_of_name(db: impl Read, name: &str) -> Result<Option<IssuerRow>, StoreError> {
    let tail = "state = 'deleted' AND name = ? ORDER BY updated DESC, uuid LIMIT 1";
    Ok(rows(db, tail, params![name]).await?.pop())
}

/// Adds an issuer, whose name and URL the caller has checked in the same transaction. If they were taken since, the
/// transaction is retried.
pub async fn insert(tx: &mut Tx, name: &str, terms: &IssuerTerms) -> Result<IssuerRow, StoreError> {
    let (id, time) = (IssuerId::new(), now());
    tx.execute(
        "INSERT INTO issuers (uuid, name, live_name, state, issuer_url, live_url, jwks_uri, audience, created, \
         updated, version) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)",
        params![
            id,
            name,
            name,
            IssuerState::Created,
            &terms.issuer_url,
            sha256(&terms.issuer_url),
            &terms.jwks_uri,
            &terms.audience,
            time,
            time
        ],
    )
    .await
    .map_err(StoreError::retry_duplicate)?;
    Ok(IssuerRow { id, name: name.to_owned(), state: IssuerState::Created, terms: terms.clone() })
}

/// Replaces the terms of a live issuer, whose URL the caller has checked in the same transaction.
pub async fn update(tx: &mut Tx, id: IssuerId, terms: &IssuerTerms) -> Result<bool, StoreError> {
    let updated = tx
        .execute(
            "UPDATE issuers SET issuer_url = ?, live_url = ?, jwks_uri = ?, audience = ?, version = version + 1 \
             WHERE uuid = ? AND state = 'created'",
            params![
                &terms.issuer_url,
                sha256(&terms.issuer_url),
                &terms.jwks_uri,
                &terms.audience,
                id
            ],
        )
        .await
        .map_err(StoreError::retry_duplicate)?;
    Ok(updated == 1)
}

/// Locks an issuer until the transaction ends. Returns whether it is live.
pub async fn lock(tx: &mut Tx, id: IssuerId) -> Result<bool, StoreError> {
    let sql = "UPDATE issuers SET version = version + 1 WHERE uuid = ? AND state = 'created'";
    Ok(tx.execute(sql, params![id]).await? == 1)
}

/// Soft-deletes a live issuer, whose name and URL may then be used again.
pub async fn soft_delete(tx: &mut Tx, id: IssuerId) -> Result<bool, StoreError> {
    let updated = tx
        .execute(
            "UPDATE issuers SET state = 'deleted', live_name = NULL, live_url = NULL, updated = ?, \
             version = version + 1 WHERE uuid = ? AND state = 'created'",
            params![now(), id],
        )
        .await?;
    Ok(updated == 1)
}

/// Returns the issuers that were soft-deleted before `before`.
pub async fn deleted_before(mut db: impl Read, before: f64, limit: i64) -> Result<Vec<IssuerId>, StoreError> {
    db.fetch(
        "SELECT uuid FROM issuers WHERE state = 'deleted' AND updated <= ? ORDER BY updated LIMIT ?",
        params![before, limit],
    )
    .await
}

/// Removes the row of a soft-deleted issuer.
pub async fn remove_deleted(tx: &mut Tx, id: IssuerId) -> Result<bool, StoreError> {
    Ok(tx.execute("DELETE FROM issuers WHERE uuid = ? AND state = 'deleted'", params![id]).await? == 1)
}
