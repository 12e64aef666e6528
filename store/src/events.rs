//! Rows of events and of their links to objects. See docs/decisions/0002.

#[cfg(test)]
mod tests;

use muster_types::event::{Event, EventRecord, EventType};
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::Map;

use super::time::NOW;
use super::{
    Read, Select, Store, StoreError, Tx, Value, columns, params, placeholders, to_json, transaction, values,
};

/// Inserts a batch of events. Inserting an event again has no effect.
pub async fn insert(store: &Store, events: &[Event]) -> muster_types::Result<()> {
    let mut rows = Vec::with_capacity(events.len() * 8);
    let mut links = Vec::with_capacity(events.len() * 6);
    for event in events {
        let id = event.event_uuid.to_string();
        let extra = to_json(&event.extra)?;
        for object in &event.objects {
            links.extend(values![
                object.object_type,
                &object.id,
                event.timestamp,
                &id,
                event.event_type,
                event.namespace.as_ref()
            ]);
        }
        rows.extend(values![
            id,
            event.timestamp,
            event.event_type,
            &event.message,
            extra,
            &event.node,
            event.request_id.as_ref(),
            event.duration
        ]);
    }
    // Also those of a daemon that was fenced: they explain what it did.
    transaction!(store.unfenced(), |tx| {
        replace(
            tx,
            "REPLACE INTO events (event_uuid, timestamp, event_type, message, extra, node, request_id, duration, stored) \
             VALUES",
            (8, &format!(", {NOW}")),
            &rows,
        )
        .await?;
        replace(
            tx,
            "REPLACE INTO event_links (object_type, object_id, timestamp, event_uuid, event_type, namespace) VALUES",
            (6, ""),
            &links,
        )
        .await?;
        Ok(())
    })
}

/// Inserts many rows per statement, in few enough sizes that prepared statements are reused. A row has `width` values,
/// followed by `constant`.
async fn replace(
    tx: &mut Tx,
    head: &str,
    (width, constant): (usize, &str),
    values: &[Value],
) -> Result<(), StoreError> {
    let mut rest = values;
    for size in [100, 10, 5, 4, 3, 2, 1] {
        if rest.len() < size * width {
            continue;
        }
        let row = format!("({}{constant})", vec!["?"; width].join(","));
        let sql = format!("{head} {}", vec![row; size].join(","));
        while rest.len() >= size * width {
            let (batch, remaining) = rest.split_at(size * width);
            tx.execute(&sql, batch).await?;
            rest = remaining;
        }
    }
    Ok(())
}

pub(crate) struct EventRow {
    event_uuid: String,
    request_id: Option<String>,
    timestamp: f64,
    event_type: String,
    message: String,
    extra: Map<String, serde_json::Value>,
    node: String,
    duration: Option<f64>,
}

columns! { EventRow {
    event_uuid,
    request_id,
    timestamp,
    event_type,
    message,
    extra: json(extra),
    node,
    duration,
} }

impl From<EventRow> for EventRecord {
    fn from(row: EventRow) -> Self {
        Self {
            event_uuid: row.event_uuid,
            request_id: row.request_id,
            timestamp: row.timestamp,
            kind: row.event_type.clone(),
            event_type: row.event_type,
            message: row.message,
            extra: row.extra,
            fqdn: row.node.clone(),
            node: row.node,
            duration: row.duration,
        }
    }
}

/// The place of an event in the list of an object.
#[derive(Debug, Clone, PartialEq)]
pub struct EventPosition {
    pub timestamp: f64,
    pub event_uuid: String,
}

impl EventPosition {
    #[must_use]
    pub fn of(record: &EventRecord) -> Self {
        Self { timestamp: record.timestamp, event_uuid: record.event_uuid.clone() }
    }
}

/// Selects some of the events of an object.
#[derive(Debug, Clone)]
pub struct EventPage<'a> {
    /// Only events that this namespace caused. A former namespace of the same name does not count.
    pub namespace: Option<&'a str>,
    pub event_type: Option<EventType>,
    /// Only older events.
    pub after: Option<EventPosition>,
    pub limit: i64,
}

/// Returns the newest events of an object, newest first.
pub async fn list(
    db: impl Read,
    object: &ObjectRef,
    event_type: Option<EventType>,
    limit: i64,
) -> Result<Vec<EventRecord>, StoreError> {
    page(db, object, &EventPage { namespace: None, event_type, after: None, limit }).await
}

/// The types of events that are recorded periodically, whether anything changes or not.
const PERIODIC: [EventType; 3] = [EventType::Usage, EventType::Resources, EventType::Prune];

/// Returns the select of the newest events of an object that are not periodic, and its arguments.
pub(crate) fn newest_changes(object: &ObjectRef, limit: i64) -> (String, Vec<Value>) {
    let mut values = params![object.object_type, &object.id].to_vec();
    values.extend(PERIODIC.map(Value::from));
    values.push(limit.into());
    (newest(" AND l.event_type NOT IN (?, ?, ?)"), values)
}

/// Returns the select of the newest events of an object that meet further conditions, newest first. Its arguments are the type
/// and the id of the object, those of the conditions, and the maximum number.
fn newest(conditions: &str) -> String {
    format!(
        "SELECT {} FROM event_links l JOIN events e ON e.event_uuid = l.event_uuid \
         WHERE l.object_type = ? AND l.object_id = ?{conditions} \
         ORDER BY l.timestamp DESC, l.event_uuid DESC LIMIT ?",
        EventRow::columns_of("e")
    )
}

/// Returns the selected events of an object, newest first.
pub async fn page(
    mut db: impl Read,
    object: &ObjectRef,
    selection: &EventPage<'_>,
) -> Result<Vec<EventRecord>, StoreError> {
    let mut conditions = String::new();
    let mut values = params![object.object_type, &object.id].to_vec();
    if let Some(namespace) = selection.namespace {
        conditions +=
            " AND l.namespace = ? AND l.timestamp >= (SELECT created FROM namespaces WHERE name = ?)";
        values.extend_from_slice(params![namespace, namespace]);
    }
    if let Some(event_type) = selection.event_type {
        conditions += " AND l.event_type = ?";
        values.push(event_type.into());
    }
    if let Some(EventPosition { timestamp, event_uuid }) = &selection.after {
        // The first condition lets both engines use the index.
        conditions += " AND l.timestamp <= ? AND (l.timestamp < ? OR l.event_uuid < ?)";
        values.extend_from_slice(params![*timestamp, *timestamp, event_uuid]);
    }
    values.push(selection.limit.into());
    let rows: Vec<EventRow> = db.fetch(&newest(&conditions), &values).await?;
    Ok(rows.into_iter().map(EventRecord::from).collect())
}

/// The maximum number of rows that one statement removes.
const MAX_BATCH: usize = 100;
/// Whether an event has no link. Its links have its type and time, so that the index by age finds them.
const UNLINKED: &str = "NOT EXISTS (SELECT 1 FROM event_links l WHERE l.event_type = e.event_type \
                        AND l.timestamp = e.timestamp AND l.event_uuid = e.event_uuid)";

/// Removes up to `limit` links of a type that are older than `before`. Returns the number of removed links.
pub async fn prune_links(
    tx: &mut Tx,
    event_type: EventType,
    before: f64,
    limit: i64,
) -> Result<u64, StoreError> {
    prune(tx, "event_type = ? AND timestamp < ?", params![event_type, before], limit).await
}

/// Removes up to `limit` links of API requests, starting at request `from`, that are older than `before`. Returns the
/// number of removed links and the last request, at which the next batch starts.
pub async fn prune_request_links(
    tx: &mut Tx,
    from: &str,
    before: f64,
    limit: i64,
) -> Result<(u64, Option<String>), StoreError> {
    let condition = "object_type = ? AND object_id >= ? AND timestamp < ?";
    let values = params![ObjectType::ApiRequest, from, before];
    let links = find_links(tx, condition, "ORDER BY object_id", values, limit).await?;
    let last = links.last().map(|link| link.object_id.clone());
    Ok((remove_links(tx, links).await?, last))
}

/// The approximate size of an event besides its texts, in bytes: the other columns, its links and the indexes.
const EVENT_OVERHEAD: i64 = 500;

/// The number of hexadecimal digits of the texts of an event, two for each byte. `LENGTH` alone counts characters on SQLite
/// and bytes on MariaDB.
const TEXT_DIGITS: &str = "LENGTH(HEX(e.message)) + LENGTH(HEX(e.extra))";

/// Returns the approximate size of an event in bytes from its [`TEXT_DIGITS`].
const fn event_bytes(digits: i64) -> i64 {
    digits / 2 + EVENT_OVERHEAD
}

/// The size of a page of events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EventPageSize {
    /// The approximate size of the events, in bytes.
    pub bytes: i64,
    /// The last event, after which the next page starts; `None` if there is no event.
    pub last: Option<String>,
    /// Whether there may be more events.
    pub is_full: bool,
}

/// Returns the size of the next `limit` events after `after`.
pub async fn size_of_page(mut db: impl Read, after: &str, limit: i64) -> Result<EventPageSize, StoreError> {
    let sql = format!(
        "SELECT e.event_uuid, {TEXT_DIGITS} FROM events e WHERE e.event_uuid > ? ORDER BY e.event_uuid LIMIT ?"
    );
    let sizes: Vec<(String, i64)> = db.fetch(&sql, params![after, limit]).await?;
    let bytes = sizes.iter().map(|(_, digits)| event_bytes(*digits)).sum();
    let is_full = usize::try_from(limit) == Ok(sizes.len());
    Ok(EventPageSize { bytes, last: sizes.into_iter().last().map(|(event, _)| event), is_full })
}

/// Links that were removed, together with the events that they were the last link of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RemovedEvents {
    pub links: u64,
    /// The approximate size of the events, in bytes.
    pub bytes: i64,
    /// The last object, at which the next batch starts.
    pub last: Option<String>,
}

/// Removes up to `limit` links of API requests, starting at request `from`, that are older than `before`, and their
/// events.
pub async fn remove_requests(
    tx: &mut Tx,
    from: &str,
    before: f64,
    limit: i64,
) -> Result<RemovedEvents, StoreError> {
    let condition = "object_type = ? AND object_id >= ? AND timestamp < ?";
    let values = params![ObjectType::ApiRequest, from, before];
    let links = find_links(tx, condition, "ORDER BY object_id", values, limit).await?;
    remove_with_events(tx, links).await
}

/// Removes up to `limit` links of a type that are older than `before`, the oldest first, and their events.
pub async fn remove_older(
    tx: &mut Tx,
    event_type: EventType,
    before: f64,
    limit: i64,
) -> Result<RemovedEvents, StoreError> {
    let condition = "event_type = ? AND timestamp < ?";
    let links = find_links(tx, condition, "ORDER BY timestamp", params![event_type, before], limit).await?;
    remove_with_events(tx, links).await
}

async fn remove_with_events(tx: &mut Tx, links: Vec<LinkKey>) -> Result<RemovedEvents, StoreError> {
    let last = links.last().map(|link| link.object_id.clone());
    let mut events: Vec<String> = links.iter().map(|link| link.event_uuid.clone()).collect();
    events.sort_unstable();
    events.dedup();
    let mut removed = RemovedEvents { links: remove_links(tx, links).await?, bytes: 0, last };
    for batch in events.chunks(MAX_BATCH) {
        let sql = format!(
            "SELECT e.event_uuid, {TEXT_DIGITS} FROM events e WHERE e.event_uuid IN ({}) AND {UNLINKED}",
            placeholders(batch.len())
        );
        let ids: Vec<Value> = batch.iter().map(Value::from).collect();
        let unlinked: Vec<(String, i64)> = tx.fetch(&sql, &ids).await?;
        removed.bytes += unlinked.iter().map(|(_, digits)| event_bytes(*digits)).sum::<i64>();
        remove_events(tx, unlinked.into_iter().map(|(event, _)| event).collect()).await?;
    }
    Ok(removed)
}

async fn remove_events(tx: &mut Tx, events: Vec<String>) -> Result<u64, StoreError> {
    let mut removed = 0;
    for batch in events.chunks(MAX_BATCH) {
        let sql = format!("DELETE FROM events WHERE event_uuid IN ({})", placeholders(batch.len()));
        let ids: Vec<Value> = batch.iter().map(Value::from).collect();
        removed += tx.execute(&sql, &ids).await?;
    }
    Ok(removed)
}

/// Removes up to `limit` links of one object.
pub async fn prune_object_links(tx: &mut Tx, object: &ObjectRef, limit: i64) -> Result<u64, StoreError> {
    prune(tx, "object_type = ? AND object_id = ?", params![object.object_type, &object.id], limit).await
}

async fn prune(tx: &mut Tx, condition: &str, values: &[Value], limit: i64) -> Result<u64, StoreError> {
    let links = find_links(tx, condition, "", values, limit).await?;
    remove_links(tx, links).await
}

/// The key of a link.
struct LinkKey {
    object_type: String,
    object_id: String,
    timestamp: f64,
    event_uuid: String,
}

columns! { LinkKey { object_type, object_id, timestamp, event_uuid, } }

/// Returns the keys of links to remove. Not every build of SQLite has `DELETE … LIMIT`, so they are selected first.
async fn find_links(
    tx: &mut Tx,
    condition: &str,
    order: &str,
    values: &[Value],
    limit: i64,
) -> Result<Vec<LinkKey>, StoreError> {
    let mut values = values.to_vec();
    values.push(limit.into());
    tx.select(&format!("FROM event_links WHERE {condition} {order} LIMIT ?"), &values).await
}

async fn remove_links(tx: &mut Tx, links: Vec<LinkKey>) -> Result<u64, StoreError> {
    let count = links.len() as u64;
    for batch in links.chunks(MAX_BATCH) {
        // Both engines look up each key, which they would not with a list of row values.
        let key = "(object_type = ? AND object_id = ? AND timestamp = ? AND event_uuid = ?)";
        let sql = format!("DELETE FROM event_links WHERE {}", vec![key; batch.len()].join(" OR "));
        let keys: Vec<Value> = batch
            .iter()
            .flat_map(|link| values![&link.object_type, &link.object_id, link.timestamp, &link.event_uuid])
            .collect();
        tx.execute(&sql, &keys).await?;
    }
    Ok(count)
}

/// Removes those of the next `limit` events after `after` that have no link. Returns the number of removed events and
/// where to continue; `None` at the end.
pub async fn prune_orphans(
    tx: &mut Tx,
    after: &str,
    limit: i64,
) -> Result<(u64, Option<String>), StoreError> {
    let sql = format!(
        "SELECT e.event_uuid, CASE WHEN {UNLINKED} THEN 1 ELSE 0 END FROM events e WHERE e.event_uuid > ? \
         ORDER BY e.event_uuid LIMIT ?"
    );
    let events: Vec<(String, bool)> = tx.fetch(&sql, params![after, limit]).await?;
    let is_full = usize::try_from(limit) == Ok(events.len());
    let last = events.last().filter(|_| is_full).map(|(event, _)| event.clone());
    let unlinked = events.into_iter().filter(|(_, is_unlinked)| *is_unlinked).map(|(event, _)| event);
    Ok((remove_events(tx, unlinked.collect()).await?, last))
}
