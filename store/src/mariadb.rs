//! MariaDB, alone or as a Galera cluster.

use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, OptsBuilder, Params, Pool, PoolConstraints, PoolOpts};

use crate::error::StoreError;
use crate::row::Row;
use crate::value::Value;

pub(super) struct MariaDb {
    pool: Pool,
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
        // The driver's error may contain the URL, and with it the password.
        let opts = Opts::from_url(url).map_err(|_| {
            StoreError::Internal("the mysql: URL must be mysql://USER:PASSWORD@HOST:PORT/NAME".into())
        })?;
        if opts.db_name().is_none_or(str::is_empty) {
            return Err(StoreError::Internal("the mysql: URL must end with the name of a database".into()));
        }
        let constraints = PoolConstraints::new(1, 24).expect("1 is less than 24");
        let pool_opts = PoolOpts::default()
            .with_constraints(constraints)
            .with_reset_connection(false)
            // By default all but one are closed as soon as they are idle, so that every burst reconnects.
            .with_inactive_connection_ttl(Duration::from_secs(60));
        let opts = OptsBuilder::from_opts(opts)
            .pool_opts(pool_opts)
            // Updates count the rows that they match, as in SQLite, not those that they change.
            .client_found_rows(true)
            .stmt_cache_size(128)
            .tcp_keepalive(Some(Duration::from_secs(30)))
            .prefer_socket(false)
            .setup(vec![
                "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'",
                "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
                // Less than the timeout of a statement, so that a lock is a conflict and not an outage.
                "SET SESSION innodb_lock_wait_timeout = 5",
            ]);
        let mariadb = Self { pool: Pool::new(opts) };
        // Names are compared by bytes, as in SQLite: no case folding, no padding.
        let mut conn = mariadb.connection().await?;
        let sql = "ALTER DATABASE CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin";
        with_timeout(STATEMENT_TIMEOUT, conn.query_drop(sql)).await?;
        Ok(mariadb)
    }

    async fn connection(&self) -> Result<Conn, StoreError> {
        with_timeout(CONNECT_TIMEOUT, self.pool.get_conn()).await
    }

    pub(super) async fn query(&self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        let mut conn = self.connection().await?;
        match select(&mut conn, sql, params).await {
            // The server may have closed an idle connection, so retry with another one.
            Err(StoreError::Unavailable(_)) => {
                drop(conn);
                let mut conn = self.connection().await?;
                select(&mut conn, sql, params).await
            }
            other => other,
        }
    }

    pub(super) async fn begin(&self) -> Result<MariaDbTx, StoreError> {
        for last in [false, true] {
            let mut conn = self.connection().await?;
            match with_timeout(STATEMENT_TIMEOUT, conn.query_drop("START TRANSACTION")).await {
                Ok(()) => return Ok(MariaDbTx { conn: Some(conn) }),
                Err(StoreError::Unavailable(_)) if !last => {}
                Err(error) => return Err(error),
            }
        }
        unreachable!("the second attempt returns")
    }

    pub(super) async fn close(&self) {
        if let Err(error) = self.pool.clone().disconnect().await {
            tracing::warn!(%error, "failed to close the database");
        }
    }
}

pub(super) struct MariaDbTx {
    /// `Some` until the transaction ends.
    conn: Option<Conn>,
}

impl MariaDbTx {
    fn conn(&mut self) -> Result<&mut Conn, StoreError> {
        self.conn.as_mut().ok_or_else(|| StoreError::Internal("the transaction has ended".into()))
    }

    pub(super) async fn query(&mut self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        select(self.conn()?, sql, params).await
    }

    pub(super) async fn execute(&mut self, sql: &str, params: &[Value]) -> Result<u64, StoreError> {
        let conn = self.conn()?;
        with_timeout(STATEMENT_TIMEOUT, conn.exec_drop(sql, positional(params))).await?;
        Ok(conn.affected_rows())
    }

    /// Runs a statement that changes the schema, without a timeout.
    pub(super) async fn execute_ddl(&mut self, sql: &str) -> Result<(), StoreError> {
        self.conn()?.query_drop(sql).await.map_err(failure)
    }

    pub(super) async fn commit(mut self) -> Result<(), StoreError> {
        let conn = self.conn()?;
        match with_timeout(STATEMENT_TIMEOUT, conn.query_drop("COMMIT")).await {
            Ok(()) => {
                // Dropping the connection returns it to the pool.
                drop(self.conn.take());
                Ok(())
            }
            // Whether the server committed is unknown, so the transaction must not be retried on another connection.
            Err(error) => Err(error),
        }
    }

    pub(super) async fn rollback(mut self) {
        if let Some(conn) = &mut self.conn
            && with_timeout(STATEMENT_TIMEOUT, conn.query_drop("ROLLBACK")).await.is_ok()
        {
            drop(self.conn.take());
        }
    }
}

impl Drop for MariaDbTx {
    /// Closes the connection of an unfinished transaction, which the server then rolls back.
    fn drop(&mut self) {
        if let Some(conn) = self.conn.take()
            && let Ok(handle) = tokio::runtime::Handle::try_current()
        {
            handle.spawn(conn.disconnect());
        }
    }
}

async fn select(conn: &mut Conn, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
    let rows: Vec<mysql_async::Row> =
        with_timeout(STATEMENT_TIMEOUT, conn.exec(sql, positional(params))).await?;
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
            let text = format!("{} {}", server.code, server.message);
            match server.code {
                // Lock wait timeout, deadlock or certification conflict, changed since read.
                1205 | 1213 | 1020 => StoreError::Conflict(text),
                1060 => StoreError::DuplicateColumn(text),
                1062 => StoreError::Duplicate(text),
                // Too long, not text, out of range.
                1406 | 1366 | 1264 => StoreError::TooLong(text),
                // Galera not ready, shutting down, too many connections, read-only, killed, access denied.
                1047 | 1053 | 1040 | 1290 | 1927 | 1317 | 1044 | 1045 | 1049 => StoreError::Unavailable(text),
                _ => StoreError::Internal(text),
            }
        }
        mysql_async::Error::Io(error) => StoreError::Unavailable(error.to_string()),
        mysql_async::Error::Driver(error) => StoreError::Unavailable(error.to_string()),
        other => StoreError::Internal(other.to_string()),
    }
}
