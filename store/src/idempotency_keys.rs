//! Rows of idempotency keys: requests that their callers may repeat, with their responses. See docs/decisions/0088.

#[cfg(test)]
mod tests;

use muster_types::idempotency::IdempotencyState;

use super::time::NOW;
use super::{Read, Store, StoreError, Tx, params, transaction};
pub use crate::change::IdempotencyLease;

/// The row of a key.
#[derive(Debug, Clone, PartialEq)]
pub struct IdempotencyRow {
    pub request_hash: String,
    /// The id of the request that is or was executed.
    pub request_id: String,
    pub state: IdempotencyState,
    /// The number of seconds for which the execution counts as running; not positive if it has ended.
    pub leased_for: f64,
    /// The number of seconds until the key expires.
    pub expires_in: f64,
    /// The encrypted response, if it is finished.
    pub response: String,
}

/// A request that is to be executed.
#[derive(Debug, Clone)]
pub struct NewIdempotencyKey<'a> {
    pub namespace: &'a str,
    pub request_hash: &'a str,
    pub request_id: &'a str,
    /// In seconds.
    pub lease: f64,
    /// In seconds.
    pub lifetime: f64,
}

/// Returns the row of a key.
pub async fn get(mut db: impl Read, hash: &str) -> Result<Option<IdempotencyRow>, StoreError> {
    let sql = format!(
        "SELECT request_hash, request_id, state, response, CAST(leased_until - {NOW} AS DOUBLE), \
         CAST(expires - {NOW} AS DOUBLE) FROM idempotency_keys WHERE hash = ?"
    );
    type Fields = ((String, String, IdempotencyState, String), (f64, f64));
    let found: Option<Fields> = db.fetch_optional(&sql, params![hash]).await?;
    let row = found.map(|((request_hash, request_id, state, response), (leased_for, expires_in))| {
        IdempotencyRow { request_hash, request_id, state, response, leased_for, expires_in }
    });
    Ok(row)
}

/// Returns the number of keys of a namespace that have not expired, and the number of seconds until the first expires.
pub async fn count(mut db: impl Read, namespace: &str) -> Result<(i64, f64), StoreError> {
    let sql = format!(
        "SELECT COUNT(*), CAST(COALESCE(MIN(expires) - {NOW}, 0) AS DOUBLE) FROM idempotency_keys \
         WHERE namespace = ? AND expires > {NOW}"
    );
    db.fetch_one(&sql, params![namespace]).await
}

/// Adds a key whose request is running.
pub async fn insert(
    tx: &mut Tx,
    lease: &IdempotencyLease,
    new: &NewIdempotencyKey<'_>,
) -> Result<(), StoreError> {
    // An expired row that is not removed yet.
    let sql = format!("DELETE FROM idempotency_keys WHERE hash = ? AND expires <= {NOW}");
    tx.execute(&sql, params![&lease.hash]).await?;
    let sql = format!(
        "INSERT INTO idempotency_keys (hash, namespace, request_hash, request_id, state, owner, leased_until, response, \
         expires) VALUES (?, ?, ?, ?, ?, ?, {NOW} + ?, '', {NOW} + ?)"
    );
    let values = params![
        &lease.hash,
        new.namespace,
        new.request_hash,
        new.request_id,
        IdempotencyState::Running,
        &lease.owner,
        new.lease,
        new.lifetime
    ];
    // If another request inserted the row meanwhile, the retry finds it.
    tx.execute(&sql, values).await.map_err(StoreError::retry_duplicate)?;
    Ok(())
}

/// Takes over a request that has changed nothing and whose execution has ended. Returns `false` if it does not apply.
pub async fn take_over(
    tx: &mut Tx,
    lease: &IdempotencyLease,
    request_id: &str,
    seconds: f64,
) -> Result<bool, StoreError> {
    let sql = format!(
        "UPDATE idempotency_keys SET owner = ?, request_id = ?, leased_until = {NOW} + ? \
         WHERE hash = ? AND state = ? AND leased_until <= {NOW}"
    );
    let values = params![&lease.owner, request_id, seconds, &lease.hash, IdempotencyState::Running];
    Ok(tx.execute(&sql, values).await? == 1)
}

/// Extends the lease of a running request.
pub async fn renew(store: &Store, lease: &IdempotencyLease, seconds: f64) -> muster_types::Result<()> {
    transaction!(store, |tx| {
        let sql =
            format!("UPDATE idempotency_keys SET leased_until = {NOW} + ? WHERE hash = ? AND owner = ?");
        tx.execute(&sql, params![seconds, &lease.hash, &lease.owner]).await?;
        Ok(())
    })
}

/// Stores the response of a request.
pub async fn finish(store: &Store, lease: &IdempotencyLease, response: &str) -> muster_types::Result<()> {
    transaction!(store, |tx| {
        let sql = "UPDATE idempotency_keys SET state = ?, response = ? WHERE hash = ? AND owner = ?";
        let values = params![IdempotencyState::Finished, response, &lease.hash, &lease.owner];
        tx.execute(sql, values).await?;
        Ok(())
    })
}

/// Ends the execution of a request that has failed. Its key is removed if it has changed nothing; returns whether it is.
pub async fn abandon(store: &Store, lease: &IdempotencyLease) -> muster_types::Result<bool> {
    transaction!(store, |tx| {
        let sql = "DELETE FROM idempotency_keys WHERE hash = ? AND owner = ? AND state = ?";
        let values = params![&lease.hash, &lease.owner, IdempotencyState::Running];
        if tx.execute(sql, values).await? == 1 {
            return Ok(true);
        }
        let sql = "UPDATE idempotency_keys SET leased_until = 0 WHERE hash = ? AND owner = ?";
        tx.execute(sql, params![&lease.hash, &lease.owner]).await?;
        Ok(false)
    })
}

/// Removes up to `limit` expired keys. Returns the number of removed rows.
pub async fn remove_expired(tx: &mut Tx, limit: i64) -> Result<usize, StoreError> {
    let sql = format!("SELECT hash FROM idempotency_keys WHERE expires <= {NOW} ORDER BY expires LIMIT ?");
    let expired = tx.query(&sql, params![limit]).await?;
    for row in &expired {
        tx.execute("DELETE FROM idempotency_keys WHERE hash = ?", &row.0).await?;
    }
    Ok(expired.len())
}

/// Removes the keys of a namespace.
pub async fn remove_of_namespace(tx: &mut Tx, namespace: &str) -> Result<u64, StoreError> {
    tx.execute("DELETE FROM idempotency_keys WHERE namespace = ?", params![namespace]).await
}
