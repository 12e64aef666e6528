//! Rows of mapping rules. A rule keeps the name of its issuer, whoever has that name.

use muster_types::ids::RuleId;
use muster_types::rule::{RuleState, RuleTerms};
use muster_types::time::now;

use super::{Read, Row, StoreError, Tx, Value, params};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleRow {
    pub id: RuleId,
    pub namespace: String,
    pub name: String,
    pub state: RuleState,
    pub terms: RuleTerms,
}

const COLUMNS: &str = "uuid, namespace, name, state, issuer, bound_claims, scopes, key_ttl, key_name_prefix";

impl RuleRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        let terms = RuleTerms {
            issuer: row.get(4)?,
            bound_claims: row.json(5)?,
            scopes: row.json(6)?,
            key_ttl: row.get(7)?,
            key_name_prefix: row.get(8)?,
        };
        let (id, state) = (row.parse(0)?, row.parse(3)?);
        Ok(Self { id, namespace: row.get(1)?, name: row.get(2)?, state, terms })
    }
}

async fn rows(mut db: impl Read, tail: &str, values: &[Value]) -> Result<Vec<RuleRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM rules WHERE {tail}");
    db.rows(&sql, values).await?.iter().map(RuleRow::read).collect()
}

/// The live rules of a namespace, by name.
pub async fn list(db: impl Read, namespace: &str) -> Result<Vec<RuleRow>, StoreError> {
    rows(db, "namespace = ? AND live_name IS NOT NULL ORDER BY live_name", params![namespace]).await
}

/// The live rule of a name in a namespace.
pub async fn by_name(db: impl Read, namespace: &str, name: &str) -> Result<Option<RuleRow>, StoreError> {
    Ok(rows(db, "namespace = ? AND live_name = ?", params![namespace, name]).await?.pop())
}

/// A live rule, also if what it says is damaged.
#[derive(Debug, Clone)]
pub struct FoundRule {
    pub id: RuleId,
    /// Absent: it cannot be read.
    pub row: Option<RuleRow>,
}

/// The live rule of a name in a namespace, whatever it says. That the database is away is still an error.
pub async fn find(mut db: impl Read, namespace: &str, name: &str) -> Result<Option<FoundRule>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM rules WHERE namespace = ? AND live_name = ?");
    let rows = db.rows(&sql, params![namespace, name]).await?;
    rows.first().map(|row| Ok(FoundRule { id: row.parse(0)?, row: RuleRow::read(row).ok() })).transpose()
}

/// Keeps a rule alive and as it is until this transaction ends. Says whether it is alive.
pub async fn hold(tx: &mut Tx, id: RuleId) -> Result<bool, StoreError> {
    let sql = "UPDATE rules SET version = version + 1 WHERE uuid = ? AND state = 'created'";
    Ok(tx.execute(sql, params![id]).await? == 1)
}

/// The bound claims and the scopes as their columns hold them.
fn documents(terms: &RuleTerms) -> (String, String) {
    (serde_json::json!(terms.bound_claims).to_string(), serde_json::json!(terms.scopes).to_string())
}

/// Adds a rule; a name that a live rule of the namespace has is [`StoreError::Duplicate`].
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
    let met = tx
        .execute(
            "UPDATE rules SET issuer = ?, bound_claims = ?, scopes = ?, key_ttl = ?, key_name_prefix = ?, \
             version = version + 1 WHERE uuid = ? AND state = 'created'",
            params![&terms.issuer, bound_claims, scopes, terms.key_ttl, &terms.key_name_prefix, id],
        )
        .await?;
    Ok(met == 1)
}

/// Soft-deletes a live rule: its name may be used again.
pub async fn soft_delete(tx: &mut Tx, id: RuleId) -> Result<bool, StoreError> {
    let met = tx
        .execute(
            "UPDATE rules SET state = 'deleted', live_name = NULL, updated = ?, version = version + 1 \
             WHERE uuid = ? AND state = 'created'",
            params![now(), id],
        )
        .await?;
    Ok(met == 1)
}

/// Soft-deletes every rule of a namespace.
pub async fn soft_delete_of(tx: &mut Tx, namespace: &str) -> Result<(), StoreError> {
    tx.execute(
        "UPDATE rules SET state = 'deleted', live_name = NULL, updated = ?, version = version + 1 \
         WHERE namespace = ? AND state = 'created'",
        params![now(), namespace],
    )
    .await?;
    Ok(())
}

/// Some of the rules of a namespace, in whatever state.
pub async fn some_of(mut db: impl Read, namespace: &str, limit: i64) -> Result<Vec<RuleId>, StoreError> {
    let rows =
        db.rows("SELECT uuid FROM rules WHERE namespace = ? LIMIT ?", params![namespace, limit]).await?;
    rows.iter().map(|row| row.parse(0)).collect()
}

/// Rules that were soft-deleted before `before`.
pub async fn deleted_before(mut db: impl Read, before: f64, limit: i64) -> Result<Vec<RuleId>, StoreError> {
    let rows = db
        .rows(
            "SELECT uuid FROM rules WHERE state = 'deleted' AND updated <= ? ORDER BY updated LIMIT ?",
            params![before, limit],
        )
        .await?;
    rows.iter().map(|row| row.parse(0)).collect()
}

/// Removes the row of a soft-deleted rule.
pub async fn remove_deleted(tx: &mut Tx, id: RuleId) -> Result<bool, StoreError> {
    Ok(tx.execute("DELETE FROM rules WHERE uuid = ? AND state = 'deleted'", params![id]).await? == 1)
}
