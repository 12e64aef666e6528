//! Copies a cluster from one database to another, and verifies the copy.

#[cfg(test)]
mod tests;

use aws_lc_rs::digest;

use super::store::Engine;
use super::{Read, Row, Store, StoreError, Value, migrate, params, placeholders, transaction};

/// The copy of one table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableCopy {
    pub table: &'static str,
    pub rows: u64,
    /// The SHA-256 hash of all values of all rows, in key order.
    pub checksum: String,
}

/// The number of rows that are copied per transaction.
pub(crate) const BATCH_ROWS: i64 = 500;

/// Copies all tables. The target must be empty and no daemon may use the source.
pub async fn run(
    from: &str,
    to: &str,
    mut progress: impl FnMut(&'static str, u64),
) -> Result<Vec<TableCopy>, StoreError> {
    let source = Store::open(from).await?;
    let target = Store::open(to).await?;
    check_unused(&source, "source").await?;
    check_complete(&source).await?;
    for table in migrate::TABLES {
        if !page(&target, table, &primary_key(table), None, 1).await?.is_empty() {
            return Err(StoreError::Internal(format!("the target is not empty: table {table} has rows")));
        }
    }
    let mut copied = Vec::new();
    for table in migrate::TABLES {
        let source_rows = copy_table(&source, &target, table, &mut progress).await?;
        let target_rows = checksum(&target, table).await?;
        if source_rows != target_rows {
            return Err(StoreError::Internal(format!(
                "table {table} differs after the copy: {} rows became {}; the target must not be used",
                source_rows.rows, target_rows.rows
            )));
        }
        copied.push(source_rows);
    }
    source.close().await;
    target.close().await;
    Ok(copied)
}

/// Returns an error if a daemon uses the database, because its writes during the copy would be lost.
async fn check_unused(store: &Store, which: &str) -> Result<(), StoreError> {
    let leases = super::leases::list(store).await?;
    // The role of the only network node stays with the node while its daemon is stopped.
    let others = [migrate::MIGRATION_LEASE, super::leases::NETWORK_NODE_LEASE];
    match leases.iter().find(|lease| !others.contains(&lease.name.as_str())) {
        Some(lease) => Err(StoreError::Internal(format!(
            "a daemon on node {} (process {}) is using the {which}: stop it first",
            lease.node, lease.pid
        ))),
        None => Ok(()),
    }
}

/// Returns an error if the source lacks migrations that the target has, because their tables differ.
async fn check_complete(source: &Store) -> Result<(), StoreError> {
    let schema = super::schema::get(source).await?;
    match super::schema::held_migrations(source, schema).first() {
        Some(number) => {
            let nodes = super::nodes::with_older_schema(source, *number).await?.join(", ");
            Err(StoreError::Internal(format!(
                "migration {number} of the source is held back until these nodes are upgraded or deleted: {nodes}"
            )))
        }
        None => Ok(()),
    }
}

async fn copy_table(
    source: &Store,
    target: &Store,
    table: &'static str,
    progress: &mut impl FnMut(&'static str, u64),
) -> Result<TableCopy, StoreError> {
    let mut hasher = TableHasher::new(table);
    let mut after = None;
    loop {
        let rows = page(source, table, &primary_key(table), after.as_deref(), BATCH_ROWS).await?;
        let Some(last) = rows.last() else { return Ok(hasher.finish()) };
        let sql = format!("INSERT INTO {table} VALUES ({})", placeholders(last.0.len()));
        transaction!(target, |tx| {
            for row in &rows {
                tx.execute(&sql, &row.0).await?;
            }
            Ok(())
        })
        .map_err(|error| StoreError::Internal(format!("table {table}: {error}")))?;
        after = Some(key_of(table, last));
        rows.iter().for_each(|row| hasher.add(row));
        progress(table, hasher.rows);
    }
}

async fn checksum(store: &Store, table: &'static str) -> Result<TableCopy, StoreError> {
    let mut hasher = TableHasher::new(table);
    let mut after = None;
    loop {
        let rows = page(store, table, &primary_key(table), after.as_deref(), BATCH_ROWS).await?;
        let Some(last) = rows.last() else { return Ok(hasher.finish()) };
        after = Some(key_of(table, last));
        rows.iter().for_each(|row| hasher.add(row));
    }
}

struct TableHasher {
    table: &'static str,
    rows: u64,
    hash: digest::Context,
}

impl TableHasher {
    fn new(table: &'static str) -> Self {
        Self { table, rows: 0, hash: digest::Context::new(&digest::SHA256) }
    }

    fn add(&mut self, row: &Row) {
        self.rows += 1;
        for value in &row.0 {
            let (kind, bytes): (u8, &[u8]) = match value {
                Value::Null => (0, &[]),
                Value::Int(n) => (1, &n.to_be_bytes()),
                Value::Real(n) => (2, &n.to_bits().to_be_bytes()),
                Value::Text(text) => (3, text.as_bytes()),
                Value::Bytes(bytes) => (4, bytes),
            };
            self.hash.update(&[kind]);
            self.hash.update(&(bytes.len() as u64).to_be_bytes());
            self.hash.update(bytes);
        }
    }

    fn finish(self) -> TableCopy {
        let checksum = hex::encode(self.hash.finish());
        TableCopy { table: self.table, rows: self.rows, checksum }
    }
}

/// Returns the columns of a table's primary key, which are the first columns of every table.
pub(crate) fn primary_key(table: &str) -> Vec<&'static str> {
    match table {
        "cluster_values" | "namespaces" => vec!["name"],
        "trusts" => vec!["namespace", "trusted"],
        "metadata" => vec!["object_type", "object_id", "name"],
        "events" => vec!["event_uuid"],
        "addresses" | "address_halos" => vec!["network_uuid", "address"],
        "address_blocks" => vec!["network_uuid", "bits", "block"],
        "hardware_addresses" => vec!["macaddr"],
        "dns_entries" => vec!["network_uuid", "name"],
        "node_networks" => vec!["node_uuid", "network_uuid"],
        "blob_contents" => vec!["sha512"],
        "node_claims" => vec!["node_uuid"],
        "instance_ports" => vec!["node_uuid", "port"],
        "instance_migrations" => vec!["instance_uuid"],
        "instance_replicas" => vec!["instance_uuid", "node_uuid"],
        "blob_locations" => vec!["blob_uuid", "node_uuid"],
        "blob_metadata" => vec!["blob_uuid", "namespace", "name"],
        "blob_namespaces" => vec!["blob_uuid", "namespace"],
        "namespace_quotas" => vec!["namespace", "name"],
        "event_links" => vec!["object_type", "object_id", "timestamp", "event_uuid"],
        "exchange_attempts" => vec!["source", "minute"],
        "exchanged_tokens" => vec!["rule", "token"],
        "tickets" | "idempotency_keys" => vec!["hash"],
        _ => vec!["uuid"],
    }
}

pub(crate) fn key_of(table: &str, row: &Row) -> Vec<Value> {
    row.0[..primary_key(table).len()].to_vec()
}

/// Returns the next rows after a key, in key order.
async fn page(
    store: &Store,
    table: &str,
    keys: &[&str],
    after: Option<&[Value]>,
    limit: i64,
) -> Result<Vec<Row>, StoreError> {
    page_of(store, matches!(store.engine, Engine::Sqlite(_)), table, keys, after, limit).await
}

/// Like [`page`], of a database of which `db` reads a state.
pub(crate) async fn page_of(
    mut db: impl Read,
    is_sqlite: bool,
    table: &str,
    keys: &[&str],
    after: Option<&[Value]>,
    limit: i64,
) -> Result<Vec<Row>, StoreError> {
    let order = keys.join(", ");
    let Some(after) = after else {
        return db.rows(&format!("SELECT * FROM {table} ORDER BY {order} LIMIT ?"), params![limit]).await;
    };
    let (condition, mut values) = after_key(is_sqlite, keys, after);
    let sql = format!("SELECT * FROM {table} WHERE {condition} ORDER BY {order} LIMIT ?");
    values.push(limit.into());
    db.rows(&sql, &values).await
}

/// Returns the condition that a row follows a key, in the form for which the engine uses its index.
fn after_key(is_sqlite: bool, keys: &[&str], after: &[Value]) -> (String, Vec<Value>) {
    if is_sqlite {
        return (format!("({}) > ({})", keys.join(", "), placeholders(keys.len())), after.to_vec());
    }
    let mut alternatives = Vec::new();
    let mut values = Vec::new();
    for (at, key) in keys.iter().enumerate() {
        let equal: String = keys[..at].iter().map(|key| format!("{key} = ? AND ")).collect();
        alternatives.push(format!("({equal}{key} > ?)"));
        values.extend_from_slice(&after[..=at]);
    }
    (alternatives.join(" OR "), values)
}
