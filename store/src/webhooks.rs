//! Rows of webhooks. A row is removed when its webhook is deleted: webhooks have neither metadata nor events of their own.
//! See docs/decisions/0089.

#[cfg(test)]
pub(crate) mod tests;

use muster_types::event::EventType;
use muster_types::ids::WebhookId;
use muster_types::object::ObjectType;
use muster_types::webhook::WebhookTerms;

use super::time::NOW;
use super::{Read, Select as _, StoreError, Tx, Value, columns, params, to_json};

/// The schema version of the first release with webhooks.
pub const SCHEMA_VERSION: i64 = 20;

#[derive(Debug, Clone, PartialEq)]
pub struct WebhookRow {
    pub id: WebhookId,
    pub namespace: String,
    pub name: String,
    pub url: String,
    pub event_types: Vec<EventType>,
    pub object_types: Vec<ObjectType>,
    pub message_prefix: Option<String>,
    /// Events that were stored since this time of the database are sent; `None` if the webhook is disabled.
    pub enabled_since: Option<f64>,
    /// The encrypted secret, and the one that it has replaced.
    pub secret: String,
    pub previous_secret: Option<String>,
    /// Until when the previous secret signs, too, in Unix time of the database.
    pub previous_secret_expires: Option<f64>,
    pub dropped: i64,
    pub last_delivered: Option<f64>,
    pub last_failed: Option<f64>,
    pub last_error: Option<String>,
}

columns! { WebhookRow {
    id: uuid,
    namespace,
    name,
    url,
    event_types: json(event_types),
    object_types: json(object_types),
    message_prefix,
    enabled_since,
    secret,
    previous_secret,
    previous_secret_expires,
    dropped,
    last_delivered,
    last_failed,
    last_error,
} }

/// Returns webhooks with the number of their pending deliveries.
async fn with_pending(
    mut db: impl Read,
    condition: &str,
    values: &[Value],
) -> Result<Vec<(WebhookRow, i64)>, StoreError> {
    let sql = format!(
        "SELECT {}, (SELECT COUNT(*) FROM webhook_deliveries d WHERE d.webhook_uuid = w.uuid AND d.state = 'pending') \
         FROM webhooks w WHERE {condition}",
        WebhookRow::columns_of("w")
    );
    db.fetch(&sql, values).await
}

/// Returns the webhooks of a namespace by name, with the number of their pending deliveries.
pub async fn list(db: impl Read, namespace: &str) -> Result<Vec<(WebhookRow, i64)>, StoreError> {
    with_pending(db, "w.namespace = ? ORDER BY w.name", params![namespace]).await
}

/// Returns the webhook with a name in a namespace, with the number of its pending deliveries.
pub async fn by_name(
    db: impl Read,
    namespace: &str,
    name: &str,
) -> Result<Option<(WebhookRow, i64)>, StoreError> {
    Ok(with_pending(db, "w.namespace = ? AND w.name = ?", params![namespace, name]).await?.pop())
}

/// Returns a webhook that is enabled and whose namespace exists.
pub async fn enabled_by_id(mut db: impl Read, id: WebhookId) -> Result<Option<WebhookRow>, StoreError> {
    db.select_optional(&format!("FROM webhooks w WHERE uuid = ? AND {ENABLED}"), params![id]).await
}

/// Returns all webhooks that are enabled and whose namespace exists.
pub async fn enabled(mut db: impl Read) -> Result<Vec<WebhookRow>, StoreError> {
    db.select(&format!("FROM webhooks w WHERE {ENABLED} ORDER BY uuid"), &[]).await
}

/// Whether a webhook sends events. The operation that deletes a namespace may be late.
const ENABLED: &str = "enabled_since IS NOT NULL AND EXISTS (SELECT 1 FROM namespaces n WHERE n.name = w.namespace \
                       AND n.state = 'created')";

/// A webhook that is to be added.
#[derive(Debug, Clone)]
pub struct NewWebhook<'a> {
    pub id: WebhookId,
    pub namespace: &'a str,
    pub name: &'a str,
    pub terms: &'a WebhookTerms,
    /// The encrypted secret.
    pub secret: &'a str,
}

/// Adds a webhook; a name that is in use is a [`StoreError::Duplicate`].
pub async fn insert(tx: &mut Tx, new: &NewWebhook<'_>) -> Result<(), StoreError> {
    let since = if new.terms.enabled { NOW } else { "NULL" };
    let sql = format!(
        "INSERT INTO webhooks (uuid, namespace, name, url, event_types, object_types, message_prefix, enabled_since, secret, \
         dropped, version) VALUES (?, ?, ?, ?, ?, ?, ?, {since}, ?, 0, 1)"
    );
    let (event_types, object_types) = (to_json(&new.terms.event_types)?, to_json(&new.terms.object_types)?);
    let values = params![
        new.id,
        new.namespace,
        new.name,
        &new.terms.url,
        event_types,
        object_types,
        new.terms.message_prefix.as_ref(),
        new.secret
    ];
    tx.execute(&sql, values).await?;
    Ok(())
}

/// Replaces the terms of a webhook. One that stays enabled continues where it is.
pub async fn update(tx: &mut Tx, id: WebhookId, terms: &WebhookTerms) -> Result<bool, StoreError> {
    let since = if terms.enabled { format!("COALESCE(enabled_since, {NOW})") } else { "NULL".to_owned() };
    let sql = format!(
        "UPDATE webhooks SET url = ?, event_types = ?, object_types = ?, message_prefix = ?, enabled_since = {since}, \
         version = version + 1 WHERE uuid = ?"
    );
    let (event_types, object_types) = (to_json(&terms.event_types)?, to_json(&terms.object_types)?);
    let values = params![&terms.url, event_types, object_types, terms.message_prefix.as_ref(), id];
    Ok(tx.execute(&sql, values).await? == 1)
}

/// Replaces the secret, if it is still the one that the caller has seen. The old one signs, too, for some seconds.
pub async fn rotate_secret(
    tx: &mut Tx,
    row: &WebhookRow,
    secret: &str,
    overlap: i64,
) -> Result<bool, StoreError> {
    let (previous, expires) =
        if overlap > 0 { ("?", format!("{NOW} + ?")) } else { ("NULL", "NULL".to_owned()) };
    let sql = format!(
        "UPDATE webhooks SET secret = ?, previous_secret = {previous}, previous_secret_expires = {expires}, \
         version = version + 1 WHERE uuid = ? AND secret = ?"
    );
    let mut values: Vec<Value> = vec![secret.into()];
    if overlap > 0 {
        values.extend([Value::from(&row.secret), overlap.into()]);
    }
    values.extend([row.id.into(), Value::from(&row.secret)]);
    Ok(tx.execute(&sql, &values).await? == 1)
}

/// Removes a webhook and its deliveries.
pub async fn remove(tx: &mut Tx, id: WebhookId) -> Result<bool, StoreError> {
    tx.execute("DELETE FROM webhook_deliveries WHERE webhook_uuid = ?", params![id]).await?;
    Ok(tx.execute("DELETE FROM webhooks WHERE uuid = ?", params![id]).await? == 1)
}

/// Removes the webhooks of a namespace and their deliveries.
pub async fn remove_of_namespace(tx: &mut Tx, namespace: &str) -> Result<(), StoreError> {
    let sql = "DELETE FROM webhook_deliveries WHERE webhook_uuid IN (SELECT uuid FROM webhooks WHERE namespace = ?)";
    tx.execute(sql, params![namespace]).await?;
    tx.execute("DELETE FROM webhooks WHERE namespace = ?", params![namespace]).await?;
    Ok(())
}

/// Returns deleted namespaces that have webhooks: a daemon of an earlier release has deleted them.
pub async fn deleted_namespaces(mut db: impl Read) -> Result<Vec<String>, StoreError> {
    let sql = "SELECT DISTINCT w.namespace FROM webhooks w JOIN namespaces n ON n.name = w.namespace \
               WHERE n.state = 'deleted'";
    db.fetch(sql, &[]).await
}

/// Records the result of an attempt: its error, or `None` if it has succeeded.
pub async fn record_attempt(
    tx: &mut Tx,
    id: WebhookId,
    time: f64,
    error: Option<&str>,
) -> Result<(), StoreError> {
    match error {
        None => {
            let sql = "UPDATE webhooks SET last_delivered = ?, version = version + 1 WHERE uuid = ?";
            tx.execute(sql, params![time, id]).await?
        }
        Some(error) => {
            let sql =
                "UPDATE webhooks SET last_failed = ?, last_error = ?, version = version + 1 WHERE uuid = ?";
            tx.execute(sql, params![time, error, id]).await?
        }
    };
    Ok(())
}

/// Counts dropped deliveries. Returns whether an event about it is due: the last one is older than `interval` seconds.
pub async fn count_dropped(
    tx: &mut Tx,
    id: WebhookId,
    count: i64,
    time: f64,
    interval: f64,
) -> Result<bool, StoreError> {
    let sql = "UPDATE webhooks SET dropped = dropped + ?, version = version + 1 WHERE uuid = ?";
    tx.execute(sql, params![count, id]).await?;
    let sql = "UPDATE webhooks SET drop_recorded = ? WHERE uuid = ? AND (drop_recorded IS NULL OR drop_recorded < ?)";
    Ok(tx.execute(sql, params![time, id, time - interval]).await? == 1)
}
