//! MariaDB, alone or as a Galera cluster.

mod servers;
#[cfg(test)]
mod tests;
mod url;

use std::sync::Arc;
use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Params};

use self::servers::{ActiveServer, Servers};
use crate::error::StoreError;
use crate::row::Row;
use crate::value::Value;

pub(super) struct MariaDb {
    servers: Arc<Servers>,
}

/// How long a caller waits for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a caller waits for the result of one statement.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Waits for a response of the server, with a timeout.
async fn with_timeout<T>(
    limit: Duration,
    response: impl Future<Output = Result<T, mysql_async::Error>>,
) -> Result<T, StoreError> {
    match tokio::time::timeout(limit, response).await {
        Ok(response) => response.map_err(failure),
        Err(_) => Err(StoreError::Unavailable(format!("no response after {} seconds", limit.as_secs()))),
    }
}

impl MariaDb {
    pub(super) async fn open(url: &str) -> Result<Self, StoreError> {
        let mariadb = Self::connect(url).await?;
        // Names are compared by bytes, as in SQLite: no case folding, no padding.
        let sql = "ALTER DATABASE CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin";
        let active = mariadb.servers.active().await?;
        let mut conn = active.connection().await?;
        active.response(STATEMENT_TIMEOUT, conn.query_drop(sql)).await?;
        Ok(mariadb)
    }

    /// Connects without changing the database.
    pub(super) async fn connect(url: &str) -> Result<Self, StoreError> {
        Ok(Self { servers: Servers::open(url::parse(url)?).await? })
    }

    pub(super) async fn query(&self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        let active = self.servers.active().await?;
        match query_once(&active, sql, params).await {
            // The server may have closed an idle connection, or failed, so retry with another one.
            Err(StoreError::Unavailable(_)) => {
                self.servers.recheck(&active).await;
                query_once(&*self.servers.active().await?, sql, params).await
            }
            other => other,
        }
    }

    /// Runs a modifying statement as its own transaction. If the connection breaks, whether it was committed is unknown.
    pub(super) async fn execute(&self, sql: &str, params: &[Value]) -> Result<u64, StoreError> {
        let active = self.servers.active().await?;
        match execute_once(&active, sql, params).await {
            // Nothing was written, and another server may have become the writable one.
            Err(StoreError::ReadOnly(_)) => {
                self.servers.recheck(&active).await;
                execute_once(&*self.servers.active().await?, sql, params).await
            }
            Err(error @ StoreError::Unavailable(_)) => {
                self.servers.recheck(&active).await;
                Err(error)
            }
            other => other,
        }
    }

    pub(super) async fn begin(&self) -> Result<MariaDbTx, StoreError> {
        self.begin_with(&["START TRANSACTION"]).await
    }

    /// Begins a transaction that reads one state of the database.
    pub(super) async fn begin_snapshot(&self) -> Result<MariaDbTx, StoreError> {
        // Only of the next transaction, so that the connection can be used again.
        let isolation = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ";
        self.begin_with(&[isolation, "START TRANSACTION WITH CONSISTENT SNAPSHOT"]).await
    }

    async fn begin_with(&self, statements: &[&str]) -> Result<MariaDbTx, StoreError> {
        for last in [false, true] {
            let active = self.servers.active().await?;
            match begin_once(&active, statements).await {
                Ok(conn) => return Ok(MariaDbTx { conn: Some(conn), server: active }),
                Err(StoreError::Unavailable(_)) if !last => self.servers.recheck(&active).await,
                Err(error) => return Err(error),
            }
        }
        unreachable!("the second attempt returns")
    }

    pub(super) async fn close(&self) {
        self.servers.close().await;
    }
}

impl Drop for MariaDb {
    fn drop(&mut self) {
        self.servers.abandon();
    }
}

async fn query_once(server: &ActiveServer, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
    let mut conn = server.connection().await?;
    select(server, &mut conn, sql, params).await
}

async fn execute_once(server: &ActiveServer, sql: &str, params: &[Value]) -> Result<u64, StoreError> {
    let mut conn = server.connection().await?;
    server.response(STATEMENT_TIMEOUT, conn.exec_drop(sql, positional(params))).await?;
    Ok(conn.affected_rows())
}

async fn begin_once(server: &ActiveServer, statements: &[&str]) -> Result<Conn, StoreError> {
    let mut conn = server.connection().await?;
    for statement in statements {
        server.response(STATEMENT_TIMEOUT, conn.query_drop(*statement)).await?;
    }
    Ok(conn)
}

pub(super) struct MariaDbTx {
    /// `Some` until the transaction ends.
    conn: Option<Conn>,
    server: Arc<ActiveServer>,
}

impl MariaDbTx {
    /// Returns whether a row that is only locked can be changed by a transaction on another server.
    pub(super) fn has_several_writers(&self) -> bool {
        self.server.is_galera
    }

    fn conn(&mut self) -> Result<&mut Conn, StoreError> {
        self.conn.as_mut().ok_or_else(|| StoreError::Unavailable("the connection was closed".into()))
    }

    pub(super) async fn query(&mut self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        let server = Arc::clone(&self.server);
        let rows = select(&server, self.conn()?, sql, params).await;
        rows.map_err(|error| self.failed(error))
    }

    pub(super) async fn execute(&mut self, sql: &str, params: &[Value]) -> Result<u64, StoreError> {
        let server = Arc::clone(&self.server);
        let conn = self.conn()?;
        let executed = server.response(STATEMENT_TIMEOUT, conn.exec_drop(sql, positional(params))).await;
        let matched = conn.affected_rows();
        executed.map_err(|error| self.failed(error))?;
        Ok(matched)
    }

    /// Handles the failure of a statement. Closes a connection on which a response may still arrive: the next statement
    /// would take it for its own.
    fn failed(&mut self, error: StoreError) -> StoreError {
        if matches!(error, StoreError::Unavailable(_)) {
            self.close();
        }
        self.server.repeatable(error)
    }

    /// Closes the connection of an unfinished transaction, which the server then rolls back.
    fn close(&mut self) {
        if let Some(conn) = self.conn.take()
            && let Ok(handle) = tokio::runtime::Handle::try_current()
        {
            handle.spawn(conn.disconnect());
        }
    }

    /// Runs a statement that changes the schema, without a timeout.
    pub(super) async fn execute_ddl(&mut self, sql: &str) -> Result<(), StoreError> {
        self.conn()?.query_drop(sql).await.map_err(failure)
    }

    pub(super) async fn commit(mut self) -> Result<(), StoreError> {
        let server = Arc::clone(&self.server);
        let conn = self.conn()?;
        match server.response(STATEMENT_TIMEOUT, conn.query_drop("COMMIT")).await {
            Ok(()) => {
                // Dropping the connection returns it to the pool.
                drop(self.conn.take());
                Ok(())
            }
            // The transaction must not be retried on another connection.
            Err(StoreError::Unavailable(reason)) => Err(StoreError::OutcomeUnknown(reason)),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn rollback(mut self) {
        let server = Arc::clone(&self.server);
        if let Some(conn) = &mut self.conn
            && server.response(STATEMENT_TIMEOUT, conn.query_drop("ROLLBACK")).await.is_ok()
        {
            drop(self.conn.take());
        }
    }
}

impl Drop for MariaDbTx {
    fn drop(&mut self) {
        self.close();
    }
}

async fn select(
    server: &ActiveServer,
    conn: &mut Conn,
    sql: &str,
    params: &[Value],
) -> Result<Vec<Row>, StoreError> {
    let rows: Vec<mysql_async::Row> =
        server.response(STATEMENT_TIMEOUT, conn.exec(sql, positional(params))).await?;
    rows.into_iter()
        .map(|row| {
            let columns = row.columns();
            let values = row.unwrap().into_iter().zip(columns.iter());
            values.map(|(value, column)| decode(value, column)).collect::<Result<_, _>>().map(Row)
        })
        .collect()
}

fn positional(params: &[Value]) -> Params {
    if params.is_empty() {
        return Params::Empty;
    }
    Params::Positional(
        params
            .iter()
            .map(|value| match value {
                Value::Null => mysql_async::Value::NULL,
                Value::Int(n) => mysql_async::Value::Int(*n),
                Value::Real(n) => mysql_async::Value::Double(*n),
                Value::Text(text) => mysql_async::Value::Bytes(text.clone().into_bytes()),
                Value::Bytes(bytes) => mysql_async::Value::Bytes(bytes.clone()),
            })
            .collect(),
    )
}

/// The character set of columns that contain bytes instead of text.
const BINARY_CHARSET: u16 = 63;

fn decode(value: mysql_async::Value, column: &mysql_async::Column) -> Result<Value, StoreError> {
    use mysql_async::Value as My;
    Ok(match value {
        My::NULL => Value::Null,
        My::Int(n) => Value::Int(n),
        My::UInt(n) => {
            Value::Int(i64::try_from(n).map_err(|_| StoreError::Internal("number out of range".into()))?)
        }
        My::Float(n) => Value::Real(f64::from(n)),
        My::Double(n) => Value::Real(n),
        My::Bytes(bytes) if column.character_set() == BINARY_CHARSET => Value::Bytes(bytes),
        My::Bytes(bytes) => Value::Text(
            String::from_utf8(bytes).map_err(|_| StoreError::Internal("text that is not UTF-8".into()))?,
        ),
        My::Date(..) | My::Time(..) => return Err(StoreError::Internal("a date column".into())),
    })
}

fn failure(error: mysql_async::Error) -> StoreError {
    match error {
        mysql_async::Error::Server(server) => {
            classify(server.code, format!("{} {}", server.code, server.message))
        }
        mysql_async::Error::Io(error) => StoreError::Unavailable(error.to_string()),
        mysql_async::Error::Driver(error) => StoreError::Unavailable(error.to_string()),
        other => StoreError::Internal(other.to_string()),
    }
}

/// Classifies an error of the server by its code.
fn classify(code: u16, text: String) -> StoreError {
    match code {
        // Lock wait timeout, deadlock or certification conflict, changed since read, changed schema.
        1205 | 1213 | 1020 | 1412 | 1615 | 1689 => StoreError::Conflict(text),
        1060 => StoreError::DuplicateColumn(text),
        1062 => StoreError::Duplicate(text),
        // Too long, not text, out of range, larger than a packet.
        1406 | 1366 | 1264 | 1153 => StoreError::TooLong(text),
        // The disk is full or fails. Codes up to 34 are those of the file functions of the server.
        2..=34 | 1004 | 1006 | 1021 | 1023..=1026 | 1030 | 1114 | 1878 => StoreError::DiskFull(text),
        // A setting, the engine, a lock for a backup, or the transaction.
        1036 | 1223 | 1290 | 1792 | 1836 | 1874 => StoreError::ReadOnly(text),
        // Galera not ready, shutting down, failed commit or rollback, killed, lost connection; too many connections
        // or transactions, out of memory or threads.
        1047 | 1053 | 1077 | 1152 | 1154..=1161 | 1180 | 1181 | 1184 | 1317 | 1927 | 1969 => {
            StoreError::Unavailable(text)
        }
        1037..=1043 | 1135 | 1203 | 1226 | 1637 => StoreError::Unavailable(text),
        // Access denied, unknown database, blocked host: a wrong configuration, which may be repaired meanwhile.
        1044 | 1045 | 1049 | 1129 | 1130 | 1142 | 1698 => StoreError::Unavailable(text),
        _ => StoreError::Internal(text),
    }
}
