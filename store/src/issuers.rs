//! Rows of trusted issuers. Live ones have a name and a URL that no other live one has.

use muster_types::ids::IssuerId;
use muster_types::issuer::{IssuerState, IssuerTerms};
use muster_types::time::now;

use super::{Read, Row, StoreError, Tx, Value, params, sha256};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuerRow {
    pub id: IssuerId,
    pub name: String,
    pub state: IssuerState,
    pub terms: IssuerTerms,
}

const COLUMNS: &str = "uuid, name, state, issuer_url, jwks_uri, audience";

impl IssuerRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        let terms = IssuerTerms { issuer_url: row.get(3)?, jwks_uri: row.get(4)?, audience: row.get(5)? };
        Ok(Self { id: row.parse(0)?, name: row.get(1)?, state: row.parse(2)?, terms })
    }
}

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<IssuerRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM issuers WHERE {tail}");
    db.rows(&sql, values).await?.iter().map(IssuerRow::read).collect()
}

/// The live issuers, by name.
pub async fn list(db: impl Read) -> Result<Vec<IssuerRow>, StoreError> {
    rows(db, "state = 'created' ORDER BY name", &[]).await
}

/// The live issuer of a name.
pub async fn by_name(db: impl Read, name: &str) -> Result<Option<IssuerRow>, StoreError> {
    Ok(rows(db, "live_name = ?", params![name]).await?.pop())
}

/// The live issuer of a URL.
pub async fn by_url(db: impl Read, url: &str) -> Result<Option<IssuerRow>, StoreError> {
    Ok(rows(db, "live_url = ?", params![sha256(url)]).await?.pop())
}

/// The issuer of a name that was deleted last and is not removed yet.
pub async fn deleted_of_name(db: impl Read, name: &str) -> Result<Option<IssuerRow>, StoreError> {
    let tail = "state = 'deleted' AND name = ? ORDER BY updated DESC, uuid LIMIT 1";
    Ok(rows(db, tail, params![name]).await?.pop())
}

/// A name or URL that somebody took since we looked: run again and see it.
fn taken(error: StoreError) -> StoreError {
    match error {
        StoreError::Duplicate(why) => StoreError::Conflict(why),
        other => other,
    }
}

/// Adds an issuer. That no live one has its name or URL was looked at in the same transaction.
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
    .map_err(taken)?;
    Ok(IssuerRow { id, name: name.to_owned(), state: IssuerState::Created, terms: terms.clone() })
}

/// Replaces the terms of a live issuer. That no other live one has the URL was looked at in the same transaction.
pub async fn update(tx: &mut Tx, id: IssuerId, terms: &IssuerTerms) -> Result<bool, StoreError> {
    let met = tx
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
        .map_err(taken)?;
    Ok(met == 1)
}

/// Keeps an issuer alive and as it is until this transaction ends. Says whether it is alive.
pub async fn hold(tx: &mut Tx, id: IssuerId) -> Result<bool, StoreError> {
    let sql = "UPDATE issuers SET version = version + 1 WHERE uuid = ? AND state = 'created'";
    Ok(tx.execute(sql, params![id]).await? == 1)
}

/// Soft-deletes a live issuer: its name and URL may be used again.
pub async fn soft_delete(tx: &mut Tx, id: IssuerId) -> Result<bool, StoreError> {
    let met = tx
        .execute(
            "UPDATE issuers SET state = 'deleted', live_name = NULL, live_url = NULL, updated = ?, \
             version = version + 1 WHERE uuid = ? AND state = 'created'",
            params![now(), id],
        )
        .await?;
    Ok(met == 1)
}

/// Issuers that were soft-deleted before `before`.
pub async fn deleted_before(mut db: impl Read, before: f64, limit: i64) -> Result<Vec<IssuerId>, StoreError> {
    let rows = db
        .rows(
            "SELECT uuid FROM issuers WHERE state = 'deleted' AND updated <= ? ORDER BY updated LIMIT ?",
            params![before, limit],
        )
        .await?;
    rows.iter().map(|row| row.parse(0)).collect()
}

/// Removes the row of a soft-deleted issuer.
pub async fn remove_deleted(tx: &mut Tx, id: IssuerId) -> Result<bool, StoreError> {
    Ok(tx.execute("DELETE FROM issuers WHERE uuid = ? AND state = 'deleted'", params![id]).await? == 1)
}
