//! SQLite, embedded: one writer behind a fair lock, and a pool of readers.
//!
//! A statement takes microseconds and runs on the calling thread; only a commit waits for the disk, so only a commit
//! tells the runtime that it blocks.

#[cfg(test)]
mod tests;

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};
use std::time::Duration;

use muster_types::time::now;
use parking_lot::Mutex;
use rusqlite::config::DbConfig;
use rusqlite::functions::FunctionFlags;
use rusqlite::types::{ToSqlOutput, ValueRef};
use rusqlite::{Connection, ErrorCode, ToSql};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::error::StoreError;
use crate::row::Row;
use crate::value::Value;

pub(super) struct Sqlite {
    path: PathBuf,
    writer: Arc<AsyncMutex<Connection>>,
    readers: Mutex<Vec<Connection>>,
    /// The number of idle reading connections that are kept, with their prepared statements; more are opened under load.
    idle_readers: usize,
}

impl Sqlite {
    pub(super) fn open(path: &Path) -> Result<Self, StoreError> {
        disable_memory_statistics();
        let writer = connect(path)?;
        // A statement runs on the calling thread. The runtime has a thread for each processor, and others while it waits
        // for a commit.
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        Ok(Self {
            path: path.to_owned(),
            writer: Arc::new(AsyncMutex::new(writer)),
            readers: Mutex::default(),
            idle_readers: 2 + 2 * processors,
        })
    }

    pub(super) fn query(&self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        let connection = self.reader()?;
        let rows = select(&connection, sql, params);
        self.return_reader(connection);
        rows
    }

    /// Begins a read transaction.
    pub(super) fn snapshot(&self) -> Result<SqliteSnapshot<'_>, StoreError> {
        let connection = self.reader()?;
        run(&connection, "BEGIN")?;
        Ok(SqliteSnapshot { sqlite: self, connection: Mutex::new(Some(connection)) })
    }

    fn reader(&self) -> Result<Connection, StoreError> {
        let idle = self.readers.lock().pop();
        idle.map_or_else(|| connect(&self.path), Ok)
    }

    fn return_reader(&self, connection: Connection) {
        let mut readers = self.readers.lock();
        if readers.len() < self.idle_readers {
            readers.push(connection);
        }
    }

    pub(super) async fn begin(&self) -> Result<SqliteTx, StoreError> {
        let connection = Arc::clone(&self.writer).lock_owned().await;
        connection.execute_batch("BEGIN IMMEDIATE").map_err(failure)?;
        Ok(SqliteTx { connection, open: true })
    }

    pub(super) async fn close(&self) {
        let writer = self.writer.lock().await;
        self.readers.lock().clear();
        // A failed checkpoint loses nothing: everything committed is on disk.
        let _ = blocking(|| writer.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)"));
    }
}

/// A read transaction, which sees one consistent state of the database.
pub(super) struct SqliteSnapshot<'a> {
    sqlite: &'a Sqlite,
    /// `Some` until this is dropped.
    connection: Mutex<Option<Connection>>,
}

impl SqliteSnapshot<'_> {
    pub(super) fn query(&self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        let connection = self.connection.lock();
        match &*connection {
            Some(connection) => select(connection, sql, params),
            None => Err(StoreError::Internal("a snapshot was read after its end".into())),
        }
    }
}

impl Drop for SqliteSnapshot<'_> {
    fn drop(&mut self) {
        let connection = self.connection.lock().take();
        // A connection that fails to end its transaction is closed.
        if let Some(connection) = connection.filter(|connection| run(connection, "COMMIT").is_ok()) {
            self.sqlite.return_reader(connection);
        }
    }
}

pub(super) struct SqliteTx {
    connection: OwnedMutexGuard<Connection>,
    open: bool,
}

impl SqliteTx {
    pub(super) fn query(&mut self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        select(&self.connection, sql, params)
    }

    pub(super) fn execute(&mut self, sql: &str, params: &[Value]) -> Result<u64, StoreError> {
        let mut statement = self.connection.prepare_cached(sql).map_err(failure)?;
        statement.execute(rusqlite::params_from_iter(params)).map(|n| n as u64).map_err(failure)
    }

    pub(super) fn commit(mut self) -> Result<(), StoreError> {
        blocking(|| self.connection.execute_batch("COMMIT")).map_err(failure)?;
        self.open = false;
        Ok(())
    }
}

impl Drop for SqliteTx {
    fn drop(&mut self) {
        if self.open
            && !self.connection.is_autocommit()
            && let Err(error) = self.connection.execute_batch("ROLLBACK")
        {
            tracing::error!(%error, "failed to roll back transaction");
        }
    }
}

/// Stops SQLite from counting its memory: the counters have one lock for the whole process, which each allocation takes.
fn disable_memory_statistics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        #[allow(unsafe_code, reason = "rusqlite has no function for this option")]
        // SAFETY: the arguments are those that this option takes. If SQLite is initialized already, it rejects the call.
        let code = unsafe { rusqlite::ffi::sqlite3_config(rusqlite::ffi::SQLITE_CONFIG_MEMSTATUS, 0) };
        if code != rusqlite::ffi::SQLITE_OK {
            tracing::debug!(code, "SQLite keeps counting its memory");
        }
    });
}

fn connect(path: &Path) -> Result<Connection, StoreError> {
    let connection = Connection::open(path).map_err(failure)?;
    connection.busy_timeout(Duration::from_millis(200)).map_err(failure)?;
    connection.set_prepared_statement_cache_capacity(128);
    // Without this, cached statements are planned again for new parameters, which costs more than running them.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true).map_err(failure)?;
    connection
        .execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA temp_store = MEMORY; \
             PRAGMA secure_delete = OFF;",
        )
        .map_err(failure)?;
    add_time_functions(&connection).map_err(failure)?;
    Ok(connection)
}

/// Adds the functions of MariaDB by which statements read the clock of the database. See `time.rs`.
fn add_time_functions(connection: &Connection) -> rusqlite::Result<()> {
    let flags = FunctionFlags::SQLITE_UTF8;
    connection.create_scalar_function("NOW", 1, flags, |_| Ok(now()))?;
    connection.create_scalar_function("UNIX_TIMESTAMP", 1, flags, |context| context.get::<f64>(0))
}

/// Runs a statement without parameters and rows.
fn run(connection: &Connection, sql: &str) -> Result<(), StoreError> {
    let mut statement = connection.prepare_cached(sql).map_err(failure)?;
    statement.execute([]).map(|_| ()).map_err(failure)
}

fn select(connection: &Connection, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
    let mut statement = connection.prepare_cached(sql).map_err(failure)?;
    let columns = statement.column_count();
    let mut rows = statement.query(rusqlite::params_from_iter(params)).map_err(failure)?;
    let mut result = Vec::new();
    while let Some(row) = rows.next().map_err(failure)? {
        let mut values = Vec::with_capacity(columns);
        for column in 0..columns {
            values.push(match row.get_ref(column).map_err(failure)? {
                ValueRef::Null => Value::Null,
                ValueRef::Integer(n) => Value::Int(n),
                ValueRef::Real(n) => Value::Real(n),
                ValueRef::Text(text) => Value::Text(text_of(text)),
                ValueRef::Blob(bytes) => Value::Bytes(bytes.to_owned()),
            });
        }
        result.push(Row(values));
    }
    Ok(result)
}

/// Converts text, replacing invalid UTF-8. Valid text is checked and copied only once.
fn text_of(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => String::from_utf8_lossy(bytes).into_owned(),
    }
}

impl ToSql for Value {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Borrowed(match self {
            Self::Null => ValueRef::Null,
            Self::Int(n) => ValueRef::Integer(*n),
            Self::Real(n) => ValueRef::Real(*n),
            Self::Text(text) => ValueRef::Text(text.as_bytes()),
            Self::Bytes(bytes) => ValueRef::Blob(bytes),
        }))
    }
}

/// Runs `work`, which waits for the disk, without blocking other tasks.
fn blocking<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|handle| handle.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "used as the argument of map_err")]
fn failure(error: rusqlite::Error) -> StoreError {
    let text = error.to_string();
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => StoreError::Conflict(text),
        Some(ErrorCode::ConstraintViolation) => StoreError::Duplicate(text),
        Some(ErrorCode::TooBig) => StoreError::TooLong(text),
        Some(ErrorCode::DiskFull | ErrorCode::SystemIoFailure) => StoreError::DiskFull(text),
        Some(ErrorCode::ReadOnly) => StoreError::ReadOnly(text),
        Some(
            ErrorCode::CannotOpen
            | ErrorCode::PermissionDenied
            | ErrorCode::OutOfMemory
            | ErrorCode::OperationInterrupted
            | ErrorCode::FileLockingProtocolFailed,
        ) => StoreError::Unavailable(text),
        // SQLite has no error code for this.
        _ if text.contains("duplicate column name") => StoreError::DuplicateColumn(text),
        _ => StoreError::Internal(text),
    }
}
