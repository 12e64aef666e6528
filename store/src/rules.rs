//! Rows of mapping rules. A rule refers to its issuer by name.

#[cfg(test)]
mod tests;

use muster_types::ids::RuleId;
use muster_types::object::ObjectType;
use muster_types::rule::{RuleState, RuleTerms};
use muster_types::time::now;
use serde_json::{Map, Value as JsonValue};

use super::{Read, Select, StoreError, Tx, Value, columns, metadata, params};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleRow {
    pub id: RuleId,
    pub namespace: String,
    pub name: String,
    pub state: RuleState,
    pub terms: RuleTerms,
}

columns! { RuleRow {
    id: uuid,
    namespace,
    name,
    state,
    terms: RuleTerms {
        issuer,
        bound_claims: json(bound_claims),
        scopes: json(scopes),
        key_ttl,
        key_name_prefix,
    },
} }

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<RuleRow>, StoreError> {
    db.select(&format!("FROM rules WHERE {tail}"), values).await
}

/// Returns the live rules of a namespace, by name.
pub async fn list(db: impl Read, namespace: &str) -> Result<Vec<RuleRow>, StoreError> {
    rows(db, "namespace = ? AND live_name IS NOT NULL ORDER BY live_name", params![namespace]).await
}

/// Returns the live rule with a name in a namespace.
pub async fn by_name(db: impl Read, namespace: &str, name: &str) -> Result<Option<RuleRow>, StoreError> {
    Ok(rows(db, "namespace = ? AND live_name = ?", params![namespace, name]).await?.pop())
}

/// Returns the live rule with a name in a namespace, with its metadata.
pub async fn with_metadata(
    db: impl Read,
    namespace: &str,
    name: &str,
) -> Result<Option<(RuleRow, Map<String, JsonValue>)>, StoreError> {
    let tail = "FROM rules WHERE namespace = ? AND live_name = ?";
    metadata::select(db, ObjectType::Rule, tail, params![namespace, name]).await
}

/// A live rule that may be damaged.
#[derive(Debug, Clone)]
pub struct FoundRule {
    pub id: RuleId,
    /// `None` if the row cannot be read.
    pub row: Option<RuleRow>,
}

/// Returns the live rule with a name in a namespace, even if its columns cannot be read.
pub async fn find(mut db: impl Read, namespace: &str, name: &str) -> Result<Option<FoundRule>, StoreError> {
    let sql = format!("SELECT uuid, {} FROM rules WHERE namespace = ? AND live_name = ?", RuleRow::COLUMNS);
    let found: Option<(RuleId, Result<RuleRow, StoreError>)> =
        db.fetch_optional(&sql, params![namespace, name]).await?;
    Ok(found.map(|(id, row)| FoundRule { id, row: row.ok() }))
}

/// Locks a rule until the transaction ends. Returns whether it is live.
pub async fn lock(tx: &mut Tx, id: RuleId) -> Result<bool, StoreError> {
    let sql = "UPDATE rules SET version = version + 1 WHERE uuid = ? AND state = 'created'";
    Ok(tx.execute(sql, params![id]).await? == 1)
}

/// Returns the bound claims and the scopes as JSON.
fn documents(terms: &RuleTerms) -> (String, String) {
    (serde_json::json!(terms.bound_claims).to_string(), serde_json::json!(terms.scopes).to_string())
}

/// Adds a rule; the name of a live rule of the namespace is a [`StoreError::Duplicate`].
pub async fn insert(
    tx: &mut Tx,
    namespace: &str,
    name: &str,
    terms: &RuleTerms,
) -> Result<RuleRow, StoreError> {
    let (id, time) = (RuleId::new(), now());
    let (bound_claims, scopes) = documents(terms);
    tx.execute(
        "INSERT INTO rules (uuid, namespace, name, live_name, state, issuer, bound_claims, scopes, key_ttl, \
         key_name_prefix, created, updated, version) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)",
        params![
            id,
            namespace,
            name,
            name,
            RuleState::Created,
            &terms.issuer,
            bound_claims,
            scopes,
            terms.key_ttl,
            &terms.key_name_prefix,
            time,
            time
        ],
    )
    .await?;
    let (namespace, name) = (namespace.to_owned(), name.to_owned());
    Ok(RuleRow { id, namespace, name, state: RuleState::Created, terms: terms.clone() })
}

/// Replaces the terms of a live rule.
pub async fn update(tx: &mut Tx, id: RuleId, terms: &RuleTerms) -> Result<bool, StoreError> {
    let (bound_claims, scopes) = documents(terms);
    let updated = tx
        .execute(
            "UPDATE rules SET issuer = ?, bound_claims = ?, scopes = ?, key_ttl = ?, key_name_prefix = ?, \
             version = version + 1 WHERE uuid = ? AND state = 'created'",
            params![&terms.issuer, bound_claims, scopes, terms.key_ttl, &terms.key_name_prefix, id],
        )
        .await?;
    Ok(updated == 1)
}

/// Soft-deletes a live rule, whose name may then be used again.
pub async fn soft_delete(tx: &mut Tx, id: RuleId) -> Result<bool, StoreError> {
    let updated = tx
        .execute(
            "UPDATE rules SET state = 'deleted', live_name = NULL, updated = ?, version = version + 1 \
             WHERE uuid = ? AND state = 'created'",
            params![now(), id],
        )
        .await?;
    Ok(updated == 1)
}

/// Soft-deletes all rules of a namespace.
pub async fn soft_delete_of(tx: &mut Tx, namespace: &str) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE rules SET state = 'deleted', live_name = NULL, updated = ?, version = version + 1 \
         WHERE namespace = ? AND state = 'created'",
        params![now(), namespace],
    )
    .await?;
    Ok(())
}

/// Returns up to `limit` rules of a namespace, including deleted ones.
pub async fn of_namespace(mut db: impl Read, namespace: &str, limit: i64) -> Result<Vec<RuleId>, StoreError> {
    db.fetch("SELECT uuid FROM rules WHERE namespace = ? LIMIT ?", params![namespace, limit]).await
}

/// Returns the rules that were soft-deleted before `before`.
pub async fn deleted_before(mut db: impl Read, before: f64, limit: i64) -> Result<Vec<RuleId>, StoreError> {
    db.fetch(
        "SELECT uuid FROM rules WHERE state = 'deleted' AND updated <= ? ORDER BY updated LIMIT ?",
        params![before, limit],
    )
    .await
}

/// Removes the row of a soft-deleted rule.
pub async fn remove_deleted(tx: &mut Tx, id: RuleId) -> Result<bool, StoreError> {
    Ok(tx.execute("DELETE FROM rules WHERE uuid = ? AND state = 'deleted'", params![id]).await? == 1)
}
