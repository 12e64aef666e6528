//! Rows of one-time tickets, which contain hashes instead of tickets. See docs/decisions/0080.

#[cfg(test)]
mod tests;

use muster_types::session::TicketPurpose;
use muster_types::time::now;
use serde_json::Value as JsonValue;

use super::{Read, StoreError, Tx, columns, params, sha256};

/// A ticket without its text.
#[derive(Debug, Clone, PartialEq)]
pub struct TicketRow {
    pub purpose: TicketPurpose,
    pub namespace: String,
    pub key_name: String,
    /// What the ticket allows.
    pub document: JsonValue,
    /// Unix time.
    pub expires: f64,
}

columns! { TicketRow { purpose, namespace, key_name, document: json(document), expires, } }

/// Returns the number of tickets of a key that have not expired.
pub async fn count(mut db: impl Read, namespace: &str, key_name: &str) -> Result<i64, StoreError> {
    let sql = "SELECT COUNT(*) FROM tickets WHERE namespace = ? AND key_name = ? AND expires > ?";
    db.fetch_one(sql, params![namespace, key_name, now()]).await
}

/// Adds a ticket.
pub async fn insert(tx: &mut Tx, ticket: &str, row: &TicketRow) -> Result<(), StoreError> {
    let sql = "INSERT INTO tickets (hash, purpose, namespace, key_name, document, expires) \
               VALUES (?, ?, ?, ?, ?, ?)";
    let (hash, document) = (sha256(ticket), row.document.to_string());
    tx.execute(sql, params![hash, row.purpose, &row.namespace, &row.key_name, document, row.expires]).await?;
    Ok(())
}

/// Removes and returns a ticket, unless it has expired. Of several concurrent callers, one gets it.
pub async fn take(
    tx: &mut Tx,
    ticket: &str,
    purpose: TicketPurpose,
) -> Result<Option<TicketRow>, StoreError> {
    let hash = sha256(ticket);
    let row: Option<TicketRow> =
        tx.select_optional("FROM tickets WHERE hash = ? AND purpose = ?", params![&hash, purpose]).await?;
    let Some(row) = row else { return Ok(None) };
    let is_removed = tx.execute("DELETE FROM tickets WHERE hash = ?", params![&hash]).await? == 1;
    Ok(Some(row).filter(|row| is_removed && row.expires > now()))
}

/// Removes up to `limit` tickets that expired before `before`. Returns the number of removed rows.
pub async fn remove_expired(tx: &mut Tx, before: f64, limit: i64) -> Result<usize, StoreError> {
    let sql = "SELECT hash FROM tickets WHERE expires < ? ORDER BY expires LIMIT ?";
    let expired = tx.query(sql, params![before, limit]).await?;
    for row in &expired {
        tx.execute("DELETE FROM tickets WHERE hash = ?", &row.0).await?;
    }
    Ok(expired.len())
}
