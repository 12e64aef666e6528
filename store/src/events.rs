//! Rows of events and of their links to objects.

use muster_types::event::{Event, EventRecord, EventType};
use muster_types::object::{ObjectRef, ObjectType};

use super::{Read, Row, Store, StoreError, Tx, Value, params, transaction, values};

/// Writes a batch. Writing one again changes nothing.
pub async fn insert(store: &Store, events: &[Event]) -> muster_types::Result<()> {
    let mut rows = Vec::with_capacity(events.len() * 8);
    let mut links = Vec::with_capacity(events.len() * 5);
    for event in events {
        let id = event.event_uuid.to_string();
        let extra = serde_json::to_string(&event.extra).unwrap_or_else(|_| "{}".to_owned());
        for object in &event.objects {
            links.extend(values![object.object_type, &object.id, event.timestamp, &id, event.event_type]);
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
    transaction!(store, |tx| {
        replace(
            tx,
            "REPLACE INTO events (event_uuid, timestamp, event_type, message, extra, node, request_id, duration) VALUES",
            8,
            &rows,
        )
        .await?;
        replace(
            tx,
            "REPLACE INTO event_links (object_type, object_id, timestamp, event_uuid, event_type) VALUES",
            5,
            &links,
        )
        .await?;
        Ok(())
    })
}

/// Runs a statement for many rows at once, in few enough sizes that prepared statements are reused.
async fn replace(tx: &mut Tx, head: &str, width: usize, values: &[Value]) -> Result<(), StoreError> {
    let mut rest = values;
    for size in [100, 10, 1] {
        if rest.len() < size * width {
            continue;
        }
        let row = format!("({})", vec!["?"; width].join(","));
        let sql = format!("{head} {}", vec![row; size].join(","));
        while rest.len() >= size * width {
            let (now, later) = rest.split_at(size * width);
            tx.execute(&sql, now).await?;
            rest = later;
        }
    }
    Ok(())
}

/// The newest events of an object.
pub async fn list(
    mut db: impl Read,
    object: &ObjectRef,
    event_type: Option<EventType>,
    limit: i64,
) -> Result<Vec<EventRecord>, StoreError> {
    let filter = if event_type.is_some() { "AND l.event_type = ?" } else { "" };
    let sql = format!(
        "SELECT e.event_uuid, e.request_id, e.timestamp, e.event_type, e.message, e.extra, e.node, e.duration \
         FROM event_links l JOIN events e ON e.event_uuid = l.event_uuid \
         WHERE l.object_type = ? AND l.object_id = ? {filter} ORDER BY l.timestamp DESC, l.event_uuid DESC LIMIT ?"
    );
    let mut values = params![object.object_type, &object.id].to_vec();
    values.extend(event_type.map(Value::from));
    values.push(limit.into());
    let rows = db.rows(&sql, &values).await?;
    rows.iter()
        .map(|row| {
            let (kind, node): (String, String) = (row.get(3)?, row.get(6)?);
            Ok(EventRecord {
                event_uuid: row.get(0)?,
                request_id: row.get(1)?,
                timestamp: row.get(2)?,
                event_type: kind.clone(),
                kind,
                message: row.get(4)?,
                extra: row.json(5)?,
                fqdn: node.clone(),
                node,
                duration: row.get(7)?,
            })
        })
        .collect()
}

/// Removes up to `limit` links of a type that are older than `before`. Says how many.
pub async fn prune_links(
    tx: &mut Tx,
    event_type: EventType,
    before: f64,
    limit: i64,
) -> Result<u64, StoreError> {
    prune(tx, "event_type = ? AND timestamp < ?", params![event_type, before], limit).await
}

/// Removes up to `limit` links, older than `before`, of API requests from `from` on. Says how many went, and the
/// last request it came to: going on there makes one pass over the index of many batches.
pub async fn prune_request_links(
    tx: &mut Tx,
    from: &str,
    before: f64,
    limit: i64,
) -> Result<(u64, Option<String>), StoreError> {
    let condition = "object_type = ? AND object_id >= ? AND timestamp < ?";
    let values = params![ObjectType::ApiRequest, from, before];
    let doomed = doomed(tx, condition, "ORDER BY object_id", values, limit).await?;
    let last = doomed.last().map(|row| row.get(1)).transpose()?;
    Ok((remove_links(tx, &doomed).await?, last))
}

/// Removes up to `limit` links of one object.
pub async fn prune_object_links(tx: &mut Tx, object: &ObjectRef, limit: i64) -> Result<u64, StoreError> {
    prune(tx, "object_type = ? AND object_id = ?", params![object.object_type, &object.id], limit).await
}

async fn prune(tx: &mut Tx, condition: &str, values: &[Value], limit: i64) -> Result<u64, StoreError> {
    let doomed = doomed(tx, condition, "", values, limit).await?;
    remove_links(tx, &doomed).await
}

/// The keys of the next links to remove. `DELETE … LIMIT` is not in every SQLite, so they are looked up first.
async fn doomed(
    tx: &mut Tx,
    condition: &str,
    order: &str,
    values: &[Value],
    limit: i64,
) -> Result<Vec<Row>, StoreError> {
    let sql = format!(
        "SELECT object_type, object_id, timestamp, event_uuid FROM event_links WHERE {condition} {order} LIMIT ?"
    );
    let mut select = values.to_vec();
    select.push(limit.into());
    tx.query(&sql, &select).await
}

async fn remove_links(tx: &mut Tx, doomed: &[Row]) -> Result<u64, StoreError> {
    for row in doomed {
        tx.execute(
            "DELETE FROM event_links WHERE object_type = ? AND object_id = ? AND timestamp = ? AND event_uuid = ?",
            &row.0,
        )
        .await?;
    }
    Ok(doomed.len() as u64)
}

/// Looks at up to `limit` events after `after` and removes those that no object links any more. Says how
/// many went and where to go on; `None` means the end was reached.
pub async fn prune_orphans(
    tx: &mut Tx,
    after: &str,
    limit: i64,
) -> Result<(u64, Option<String>), StoreError> {
    let seen = tx
        .query(
            // The index by age finds an event's links: they have its type and time.
            "SELECT e.event_uuid, (SELECT COUNT(*) FROM event_links l WHERE l.event_type = e.event_type \
             AND l.timestamp = e.timestamp AND l.event_uuid = e.event_uuid) \
             FROM events e WHERE e.event_uuid > ? ORDER BY e.event_uuid LIMIT ?",
            params![after, limit],
        )
        .await?;
    let mut gone = 0;
    for row in &seen {
        if row.get::<i64>(1)? == 0 {
            gone += tx.execute("DELETE FROM events WHERE event_uuid = ?", &row.0[..1]).await?;
        }
    }
    let full = i64::try_from(seen.len()).unwrap_or(i64::MAX) == limit;
    let last = if full { seen.last().map(|row| row.get(0)).transpose()? } else { None };
    Ok((gone, last))
}
