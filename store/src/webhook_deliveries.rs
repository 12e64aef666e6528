//! Rows of deliveries: the events that are or were sent to webhooks. See docs/decisions/0089.

#[cfg(test)]
mod tests;

use muster_types::event::EventType;
use muster_types::ids::{DeliveryId, WebhookId};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::webhook::DeliveryState;

use super::{Read, StoreError, Tx, Value, columns, params, placeholders};

/// The maximum number of ids in one statement.
const MAX_BATCH: usize = 100;

/// A delivery without its body.
#[derive(Debug, Clone, PartialEq)]
pub struct DeliveryRow {
    pub id: DeliveryId,
    pub event_uuid: String,
    pub event_type: EventType,
    pub message: String,
    pub object: ObjectRef,
    pub state: DeliveryState,
    pub attempts: i64,
    pub created: f64,
    pub next_attempt: f64,
    pub finished: Option<f64>,
    pub response_status: Option<i64>,
    pub error: Option<String>,
}

columns! { DeliveryRow {
    id: uuid,
    event_uuid,
    event_type,
    message,
    object: object(object_type, object_id),
    state,
    attempts,
    created,
    next_attempt,
    finished,
    response_status,
    error,
} }

fn object(object_type: ObjectType, id: String) -> ObjectRef {
    ObjectRef { object_type, id }
}

/// Returns the deliveries of a webhook, newest first.
pub async fn list(mut db: impl Read, webhook: WebhookId) -> Result<Vec<DeliveryRow>, StoreError> {
    let tail = "FROM webhook_deliveries WHERE webhook_uuid = ? ORDER BY created DESC, uuid DESC";
    db.select(tail, params![webhook]).await
}

/// Returns a delivery of a webhook.
pub async fn get(
    mut db: impl Read,
    webhook: WebhookId,
    id: DeliveryId,
) -> Result<Option<DeliveryRow>, StoreError> {
    let tail = "FROM webhook_deliveries WHERE uuid = ? AND webhook_uuid = ?";
    db.select_optional(tail, params![id, webhook]).await
}

/// A delivery that is to be queued.
#[derive(Debug, Clone)]
pub struct NewDelivery {
    pub id: DeliveryId,
    pub webhook: WebhookId,
    pub event_uuid: String,
    pub event_type: EventType,
    pub message: String,
    pub object: ObjectRef,
    pub body: String,
    /// Unix time of the database.
    pub created: f64,
}

/// Queues a delivery. Returns whether the webhook does not have one of the same event.
pub async fn insert(tx: &mut Tx, new: &NewDelivery) -> Result<bool, StoreError> {
    let sql = "INSERT INTO webhook_deliveries (uuid, webhook_uuid, event_uuid, event_type, message, object_type, object_id, \
               body, state, attempts, created, next_attempt) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?)";
    let values = params![
        new.id,
        new.webhook,
        &new.event_uuid,
        new.event_type,
        &new.message,
        new.object.object_type,
        &new.object.id,
        &new.body,
        DeliveryState::Pending,
        new.created,
        new.created
    ];
    match tx.execute(sql, values).await {
        Ok(_) => Ok(true),
        Err(StoreError::Duplicate(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Drops the oldest pending deliveries of a webhook above `max`. Returns their number.
pub async fn drop_excess(
    tx: &mut Tx,
    webhook: WebhookId,
    max: i64,
    time: f64,
    reason: &str,
) -> Result<i64, StoreError> {
    let sql = "SELECT COUNT(*) FROM webhook_deliveries WHERE webhook_uuid = ? AND state = 'pending'";
    let count: i64 = tx.fetch_one(sql, params![webhook]).await?;
    if count <= max {
        return Ok(0);
    }
    let sql = "SELECT uuid FROM webhook_deliveries WHERE webhook_uuid = ? AND state = 'pending' \
               ORDER BY created, uuid LIMIT ?";
    let ids: Vec<DeliveryId> = tx.fetch(sql, params![webhook, count - max]).await?;
    for batch in ids.chunks(MAX_BATCH) {
        let sql = format!(
            "UPDATE webhook_deliveries SET state = 'dropped', finished = ?, error = ? WHERE uuid IN ({})",
            placeholders(batch.len())
        );
        let mut values = params![time, reason].to_vec();
        values.extend(batch.iter().map(|id| Value::from(*id)));
        tx.execute(&sql, &values).await?;
    }
    Ok(count - max)
}

/// Returns the webhooks that have a delivery whose attempt is due, those that wait longest first.
pub async fn due_webhooks(mut db: impl Read, time: f64) -> Result<Vec<WebhookId>, StoreError> {
    let sql = "SELECT webhook_uuid FROM webhook_deliveries WHERE state = 'pending' AND next_attempt <= ? \
               GROUP BY webhook_uuid ORDER BY MIN(next_attempt)";
    db.fetch(sql, params![time]).await
}

/// A delivery whose attempt is due.
#[derive(Debug, Clone, PartialEq)]
pub struct DueDelivery {
    pub id: DeliveryId,
    pub body: String,
    /// The number of earlier attempts.
    pub attempts: i64,
}

columns! { DueDelivery {
    id: uuid,
    body,
    attempts,
} }

/// Returns the delivery of a webhook whose attempt has been due longest.
pub async fn next_due(
    mut db: impl Read,
    webhook: WebhookId,
    time: f64,
) -> Result<Option<DueDelivery>, StoreError> {
    let tail = "FROM webhook_deliveries WHERE webhook_uuid = ? AND state = 'pending' AND next_attempt <= ? \
                ORDER BY next_attempt, created, uuid LIMIT 1";
    db.select_optional(tail, params![webhook, time]).await
}

/// The result of an attempt.
#[derive(Debug, Clone, PartialEq)]
pub struct Attempt<'a> {
    pub state: DeliveryState,
    /// Unix time of the database.
    pub time: f64,
    /// When to try again, if the delivery is pending.
    pub next_attempt: f64,
    pub response_status: Option<i64>,
    pub error: Option<&'a str>,
}

/// Records an attempt of a pending delivery. Returns whether the delivery is still pending and has no other attempt.
pub async fn record_attempt(
    tx: &mut Tx,
    delivery: &DueDelivery,
    attempt: &Attempt<'_>,
) -> Result<bool, StoreError> {
    let finished = (attempt.state != DeliveryState::Pending).then_some(attempt.time);
    let sql = "UPDATE webhook_deliveries SET state = ?, attempts = attempts + 1, next_attempt = ?, finished = ?, \
               response_status = ?, error = ? WHERE uuid = ? AND state = 'pending' AND attempts = ?";
    let values = params![
        attempt.state,
        attempt.next_attempt,
        finished,
        attempt.response_status,
        attempt.error,
        delivery.id,
        delivery.attempts
    ];
    Ok(tx.execute(sql, values).await? == 1)
}

/// Queues a delivery again, with all attempts.
pub async fn queue_again(
    tx: &mut Tx,
    webhook: WebhookId,
    id: DeliveryId,
    time: f64,
) -> Result<bool, StoreError> {
    let sql = "UPDATE webhook_deliveries SET state = 'pending', attempts = 0, next_attempt = ?, finished = NULL \
               WHERE uuid = ? AND webhook_uuid = ?";
    Ok(tx.execute(sql, params![time, id, webhook]).await? == 1)
}

/// Removes up to `limit` deliveries that were finished before a time.
pub async fn prune_finished(tx: &mut Tx, before: f64, limit: i64) -> Result<usize, StoreError> {
    let sql = "SELECT uuid FROM webhook_deliveries WHERE state <> 'pending' AND finished < ? LIMIT ?";
    let ids = tx.fetch(sql, params![before, limit]).await?;
    remove(tx, ids).await
}

/// Removes up to `limit` finished deliveries of a webhook, except its newest `max` ones and those that were finished after
/// a time.
pub async fn prune_excess(
    tx: &mut Tx,
    webhook: WebhookId,
    before: f64,
    max: i64,
    limit: i64,
) -> Result<usize, StoreError> {
    let sql = "SELECT uuid FROM webhook_deliveries WHERE webhook_uuid = ? AND state <> 'pending' AND finished < ? \
               ORDER BY finished DESC LIMIT ? OFFSET ?";
    let ids = tx.fetch(sql, params![webhook, before, limit, max]).await?;
    remove(tx, ids).await
}

async fn remove(tx: &mut Tx, ids: Vec<DeliveryId>) -> Result<usize, StoreError> {
    for batch in ids.chunks(MAX_BATCH) {
        let sql = format!(
            "DELETE FROM webhook_deliveries WHERE state <> 'pending' AND uuid IN ({})",
            placeholders(batch.len())
        );
        let values: Vec<Value> = batch.iter().map(|id| Value::from(*id)).collect();
        tx.execute(&sql, &values).await?;
    }
    Ok(ids.len())
}
