//! Rows of token exchanges: attempts per source and minute, and the tokens that a rule has consumed. See
//! docs/decisions/0024.

#[cfg(test)]
mod tests;

use muster_types::ids::RuleId;

use super::{Read, StoreError, Tx, params, sha256};

/// Returns the number of attempts of `source` in a minute.
pub async fn attempts(mut db: impl Read, source: &str, minute: i64) -> Result<i64, StoreError> {
    let sql = "SELECT attempts FROM exchange_attempts WHERE source = ? AND minute = ?";
    Ok(db.fetch_optional(sql, params![source, minute]).await?.unwrap_or(0))
}

/// Counts an attempt and returns its number, which is unique for the source and minute.
pub async fn count_attempt(tx: &mut Tx, source: &str, minute: i64) -> Result<i64, StoreError> {
    // The update locks the row until the transaction ends, so the number is read as it was written.
    let sql = "UPDATE exchange_attempts SET attempts = attempts + 1 WHERE source = ? AND minute = ?";
    if tx.execute(sql, params![source, minute]).await? == 1 {
        return attempts(tx, source, minute).await;
    }
    let sql = "INSERT INTO exchange_attempts (source, minute, attempts) VALUES (?, ?, 1)";
    // If another attempt inserted the row meanwhile, the retry updates it.
    tx.execute(sql, params![source, minute]).await.map_err(StoreError::retry_duplicate)?;
    Ok(1)
}

/// Consumes a token for a rule. Returns `false` if the rule has consumed it before.
pub async fn consume_token(
    tx: &mut Tx,
    rule: RuleId,
    issuer_url: &str,
    token_id: &str,
    expires: f64,
) -> Result<bool, StoreError> {
    let sql = "INSERT INTO exchanged_tokens (rule, token, expires) VALUES (?, ?, ?)";
    // The id of a token may be longer than a key.
    let token = sha256(&format!("{issuer_url}\n{token_id}"));
    match tx.execute(sql, params![rule, token, expires]).await {
        Ok(_) => Ok(true),
        Err(StoreError::Duplicate(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes up to `limit` counts of minutes before `minute`. Returns the number of removed rows.
pub async fn remove_attempts(tx: &mut Tx, minute: i64, limit: i64) -> Result<usize, StoreError> {
    let sql = "SELECT source, minute FROM exchange_attempts WHERE minute < ? ORDER BY minute LIMIT ?";
    let expired = tx.query(sql, params![minute, limit]).await?;
    for row in &expired {
        tx.execute("DELETE FROM exchange_attempts WHERE source = ? AND minute = ?", &row.0).await?;
    }
    Ok(expired.len())
}

/// Removes up to `limit` tokens that expired before `before`. Returns the number of removed rows.
pub async fn remove_tokens(tx: &mut Tx, before: f64, limit: i64) -> Result<usize, StoreError> {
    let sql = "SELECT rule, token FROM exchanged_tokens WHERE expires < ? ORDER BY expires LIMIT ?";
    let expired = tx.query(sql, params![before, limit]).await?;
    for row in &expired {
        tx.execute("DELETE FROM exchanged_tokens WHERE rule = ? AND token = ?", &row.0).await?;
    }
    Ok(expired.len())
}
