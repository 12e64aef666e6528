//! Rows of exchanges: how often somebody tried within a minute, and which tokens a rule has taken.

use muster_types::ids::RuleId;

use super::{Read, StoreError, Tx, params, sha256};

/// How often `source` has tried in a minute so far.
pub async fn attempts(mut db: impl Read, source: &str, minute: i64) -> Result<i64, StoreError> {
    let sql = "SELECT attempts FROM exchange_attempts WHERE source = ? AND minute = ?";
    let rows = db.rows(sql, params![source, minute]).await?;
    rows.first().map_or(Ok(0), |row| row.get(0))
}

/// Counts an attempt. Says the how manieth it is: no two of a source and a minute are the same.
pub async fn count_attempt(tx: &mut Tx, source: &str, minute: i64) -> Result<i64, StoreError> {
    // The row is ours from here to the end of the transaction, so what is read is what was written.
    let sql = "UPDATE exchange_attempts SET attempts = attempts + 1 WHERE source = ? AND minute = ?";
    if tx.execute(sql, params![source, minute]).await? == 1 {
        return attempts(tx, source, minute).await;
    }
    let sql = "INSERT INTO exchange_attempts (source, minute, attempts) VALUES (?, ?, 1)";
    match tx.execute(sql, params![source, minute]).await {
        Ok(_) => Ok(1),
        // Somebody was the first since we looked: run again and count on.
        Err(StoreError::Duplicate(why)) => Err(StoreError::Conflict(why)),
        Err(error) => Err(error),
    }
}

/// Takes a token for a rule, unless the rule has had it. Says whether it is taken now.
pub async fn take_token(
    tx: &mut Tx,
    rule: RuleId,
    issuer_url: &str,
    token_id: &str,
    expires: f64,
) -> Result<bool, StoreError> {
    let sql = "INSERT INTO exchanged_tokens (rule, token, expires) VALUES (?, ?, ?)";
    // What names a token may be longer than a key.
    let token = sha256(&format!("{issuer_url}\n{token_id}"));
    match tx.execute(sql, params![rule, token, expires]).await {
        Ok(_) => Ok(true),
        Err(StoreError::Duplicate(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes some of the counts of minutes before `minute`. Says how many.
pub async fn remove_attempts(tx: &mut Tx, minute: i64, limit: i64) -> Result<usize, StoreError> {
    let sql = "SELECT source, minute FROM exchange_attempts WHERE minute < ? ORDER BY minute LIMIT ?";
    let old = tx.query(sql, params![minute, limit]).await?;
    for row in &old {
        tx.execute("DELETE FROM exchange_attempts WHERE source = ? AND minute = ?", &row.0).await?;
    }
    Ok(old.len())
}

/// Removes some of the tokens that expired before `before`. Says how many.
pub async fn remove_tokens(tx: &mut Tx, before: f64, limit: i64) -> Result<usize, StoreError> {
    let sql = "SELECT rule, token FROM exchanged_tokens WHERE expires < ? ORDER BY expires LIMIT ?";
    let old = tx.query(sql, params![before, limit]).await?;
    for row in &old {
        tx.execute("DELETE FROM exchanged_tokens WHERE rule = ? AND token = ?", &row.0).await?;
    }
    Ok(old.len())
}
