//! Reads and writes all rows of a cluster, independent of the engine: for backups. See docs/decisions/0097.
//!
//! A row is the values of its columns in the order of the schema, which is the same on both engines.

mod invariants;
mod restart;
#[cfg(test)]
mod tests;

use muster_types::settings::mask_password;

use crate::copy::{BATCH_ROWS, key_of, page_of, primary_key};
use crate::migrate::{MIGRATIONS, Migration, TABLES};
use crate::row::Read as _;
use crate::schema::{RESTORE_MARK, unfinished_restore};
use crate::store::{ConsistentSnapshot, Store};
use crate::{Row, StoreError, Value, migrate, params, placeholders, schema, transaction};

pub use invariants::{StoredBlob, blobs, check, has_blob};
pub use restart::{DrillInstance, prepare_drill, restart};

/// The maximum number of bytes of an encoded row.
pub const MAX_ROW_BYTES: usize = 64 << 20;
/// The maximum number of bytes of the rows that one transaction inserts.
const BATCH_BYTES: usize = 8 << 20;

/// One consistent state of the database, which can be read while daemons use it.
#[derive(Debug)]
pub struct BackupSnapshot<'a> {
    snapshot: ConsistentSnapshot<'a>,
    /// The schema version of the database.
    pub schema_version: i64,
}

impl<'a> BackupSnapshot<'a> {
    /// Begins a snapshot. Rejects a database whose migrations are not complete, because its tables are those of no release.
    pub async fn begin(store: &'a Store) -> Result<Self, StoreError> {
        let mut snapshot = store.consistent_snapshot().await?;
        let schema = schema::get(&mut snapshot).await?;
        if schema.minimum == RESTORE_MARK {
            return Err(StoreError::Internal(unfinished_restore()));
        }
        if schema.version < store.schema_version() || !schema::held_migrations(store, schema).is_empty() {
            return Err(StoreError::Internal(format!(
                "the database has schema version {}, and this program has {}: upgrade all nodes first, or use the release that \
                 they run",
                schema.version,
                store.schema_version()
            )));
        }
        if schema.version > store.schema_version() {
            return Err(StoreError::Internal(format!(
                "the database has schema version {}, which this program does not know: use the release of the daemons",
                schema.version
            )));
        }
        Ok(Self { snapshot, schema_version: schema.version })
    }

    /// Returns the names of all tables, in the order in which they are restored.
    #[must_use]
    pub fn tables(&self) -> &'static [&'static str] {
        TABLES
    }

    /// Returns the next rows of a table after a row, in key order.
    pub async fn page(&mut self, table: &str, after: Option<&Row>) -> Result<Vec<Row>, StoreError> {
        let after = after.map(|row| key_of(table, row));
        let is_sqlite = self.snapshot.is_sqlite();
        page_of(&mut self.snapshot, is_sqlite, table, &primary_key(table), after.as_deref(), BATCH_ROWS).await
    }

    /// Returns the blobs that are complete.
    pub async fn blobs(&mut self) -> Result<Vec<StoredBlob>, StoreError> {
        blobs(&mut self.snapshot).await
    }

    /// Ends the snapshot.
    pub async fn end(self) {
        self.snapshot.end().await;
    }
}

/// Encodes a row.
#[must_use]
pub fn encode(row: &Row) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut add = |kind: u8, content: &[u8]| {
        bytes.push(kind);
        bytes.extend_from_slice(&u32::try_from(content.len()).unwrap_or(u32::MAX).to_be_bytes());
        bytes.extend_from_slice(content);
    };
    for value in &row.0 {
        match value {
            Value::Null => add(0, &[]),
            Value::Int(n) => add(1, &n.to_be_bytes()),
            Value::Real(n) => add(2, &n.to_bits().to_be_bytes()),
            Value::Text(text) => add(3, text.as_bytes()),
            Value::Bytes(content) => add(4, content),
        }
    }
    bytes
}

/// Decodes a row. Returns `None` if the bytes are not one.
#[must_use]
pub fn decode(mut bytes: &[u8]) -> Option<Row> {
    let mut values = Vec::new();
    while !bytes.is_empty() {
        let (kind, rest) = bytes.split_first()?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (content, rest) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
        values.push(match kind {
            0 => content.is_empty().then_some(Value::Null)?,
            1 => Value::Int(i64::from_be_bytes(content.try_into().ok()?)),
            2 => Value::Real(f64::from_bits(u64::from_be_bytes(content.try_into().ok()?))),
            3 => Value::Text(std::str::from_utf8(content).ok()?.to_owned()),
            4 => Value::Bytes(content.to_owned()),
            _ => return None,
        });
        bytes = rest;
    }
    Some(Row(values))
}

/// A database that a backup is being restored into. No daemon starts with it before [`Restoration::finish`].
#[derive(Debug)]
pub struct Restoration {
    url: String,
    store: Store,
    table: Option<&'static str>,
    /// The rows that are not inserted yet, and their size.
    batch: Vec<Row>,
    batch_bytes: usize,
}

impl Restoration {
    /// Begins to restore into a database without rows, with the schema of the backup. What an earlier restoration that was
    /// interrupted has inserted is removed.
    pub async fn begin(url: &str, schema_version: i64) -> Result<Self, StoreError> {
        let known = MIGRATIONS.last().map_or(0, |migration| migration.number);
        if schema_version > known {
            return Err(StoreError::Internal(format!(
                "the backup has schema version {schema_version}, and this program has {known}: use the release that created the \
                 backup, or a newer one"
            )));
        }
        let count = MIGRATIONS.iter().filter(|migration| migration.number <= schema_version).count();
        let migrations: &'static [Migration] = &MIGRATIONS[..count];
        let store = Store::open_unmigrated(url, migrations).await?;
        migrate::create_bootstrap_tables(&store).await?;
        let is_unfinished = schema::get(&store).await?.minimum == RESTORE_MARK;
        let applied = applied_version(&store).await?;
        if applied > schema_version {
            return Err(StoreError::Internal(format!(
                "database {} has schema version {applied}, which is newer than that of the backup: restore into a new database",
                mask_password(url)
            )));
        }
        if !is_unfinished {
            require_empty(&store, url, applied).await?;
            set_mark(&store, true).await?;
        }
        migrate::apply_missing(&store).await?;
        if is_unfinished {
            clear(&store).await?;
        }
        Ok(Self { url: url.to_owned(), store, table: None, batch: Vec::new(), batch_bytes: 0 })
    }

    /// Begins a table. Rejects one that is unknown, or not behind the previous one.
    pub async fn begin_table(&mut self, name: &str) -> Result<(), StoreError> {
        self.flush().await?;
        let unknown = || StoreError::Internal(format!("the backup contains the unknown table {name:?}"));
        let position = TABLES.iter().position(|table| *table == name).ok_or_else(unknown)?;
        let previous = self.table.and_then(|table| TABLES.iter().position(|other| *other == table));
        if previous.is_some_and(|previous| position <= previous) {
            return Err(StoreError::Internal(format!("table {name} is not in the order of the schema")));
        }
        self.table = Some(TABLES[position]);
        Ok(())
    }

    /// Adds a row to the current table.
    pub async fn add(&mut self, row: Row, bytes: usize) -> Result<(), StoreError> {
        self.batch_bytes += bytes;
        self.batch.push(row);
        if self.batch_bytes >= BATCH_BYTES || i64::try_from(self.batch.len()).is_ok_and(|n| n >= BATCH_ROWS) {
            self.flush().await?;
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), StoreError> {
        let rows = std::mem::take(&mut self.batch);
        self.batch_bytes = 0;
        let Some(table) = self.table.filter(|_| !rows.is_empty()) else { return Ok(()) };
        transaction!(self.store, |tx| {
            for row in &rows {
                let sql = format!("INSERT INTO {table} VALUES ({})", placeholders(row.0.len()));
                tx.execute(&sql, &row.0).await?;
            }
            Ok(())
        })
        .map_err(|error| StoreError::Internal(format!("failed to restore table {table}: {error}")))
    }

    /// Applies the migrations since the backup, and returns the database, which is still marked as being restored.
    pub async fn migrate(mut self) -> Result<RestoredStore, StoreError> {
        self.flush().await?;
        // No daemon of the backup runs, so none holds a migration back.
        transaction!(self.store, |tx| {
            tx.execute("UPDATE nodes SET state = 'error' WHERE state <> 'deleted'", &[]).await?;
            Ok(())
        })
        .map_err(|error| StoreError::Internal(error.to_string()))?;
        self.store.close().await;
        let store = Store::open_unmigrated(&self.url, MIGRATIONS).await?;
        migrate::apply_missing(&store).await?;
        Ok(RestoredStore { store })
    }
}

/// A database with all rows of a backup, which no daemon can use yet.
#[derive(Debug)]
pub struct RestoredStore {
    pub store: Store,
}

impl RestoredStore {
    /// Lets daemons use the database.
    pub async fn finish(self) -> Result<(), StoreError> {
        set_mark(&self.store, false).await?;
        self.store.close().await;
        Ok(())
    }
}

async fn set_mark(store: &Store, is_set: bool) -> Result<(), StoreError> {
    let sql = match is_set {
        true => "REPLACE INTO migrations (number, statements_done) VALUES (?, 0)",
        false => "DELETE FROM migrations WHERE number = ?",
    };
    transaction!(store, |tx| {
        tx.execute(sql, params![RESTORE_MARK]).await?;
        Ok(())
    })
    .map_err(|error| StoreError::Unavailable(error.to_string()))
}

/// Returns the number of the last migration of a database, which may be marked.
async fn applied_version(mut store: &Store) -> Result<i64, StoreError> {
    let sql = "SELECT (SELECT COALESCE(MAX(number), 0) FROM migrations WHERE number <> ?), \
               (SELECT COALESCE(MAX(number), 0) FROM additive_migrations)";
    let (breaking, additive): (i64, i64) = store.fetch_one(sql, params![RESTORE_MARK]).await?;
    Ok(breaking.max(additive))
}

/// Returns an error if a table has rows in a database with a schema version.
async fn require_empty(store: &Store, url: &str, version: i64) -> Result<(), StoreError> {
    for table in tables_of(store, version) {
        if store.query_one(&format!("SELECT 1 FROM {table} LIMIT 1"), &[]).await?.is_some() {
            return Err(StoreError::Internal(format!(
                "database {} is not empty: table {table} has rows. A backup is restored only into a new cluster",
                mask_password(url)
            )));
        }
    }
    Ok(())
}

/// Returns the tables that exist with a schema version.
fn tables_of(store: &Store, version: i64) -> impl Iterator<Item = &'static str> {
    let applied = store.migrations.iter().filter(|migration| migration.number <= version);
    let text: String = applied.map(|migration| migration.text).collect();
    let exists = move |table: &&str| text.contains(&format!("CREATE TABLE IF NOT EXISTS {table} ("));
    TABLES.iter().copied().filter(exists)
}

/// Removes all rows of a restoration that was interrupted.
async fn clear(store: &Store) -> Result<(), StoreError> {
    for table in tables_of(store, store.schema_version()) {
        transaction!(store, |tx| {
            tx.execute(&format!("DELETE FROM {table}"), &[]).await?;
            Ok(())
        })
        .map_err(|error| StoreError::Internal(format!("failed to clear table {table}: {error}")))?;
    }
    Ok(())
}
