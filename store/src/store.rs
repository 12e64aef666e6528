//! An open database, on either engine.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use muster_types::Error;
use tokio::sync::Semaphore;

use crate::change::current_precondition;
use crate::error::StoreError;
use crate::membership::Membership;
use crate::migrate::Migration;
use crate::row::{Read, Row};
use crate::store_metrics::StoreMetrics;
use crate::time::NOW;
use crate::transaction::{Tx, TxEngine};
use crate::value::Value;
use crate::{mariadb, migrate, params, sqlite, transaction};

/// The maximum number of transactions with a precondition at a time. Each needs two connections: its own, and that of its check.
pub(crate) const MAX_CONDITIONAL_TRANSACTIONS: usize = 8;

pub(crate) enum Engine {
    Sqlite(sqlite::Sqlite),
    MariaDb(mariadb::MariaDb),
}

/// The address of a database.
enum DatabaseUrl<'a> {
    Sqlite(&'a Path),
    MariaDb(&'a str),
}

impl<'a> DatabaseUrl<'a> {
    fn parse(url: &'a str) -> Result<Self, StoreError> {
        if let Some(path) = url.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").filter(|rest| rest.starts_with('/')).unwrap_or(path);
            if path.is_empty() {
                return Err(StoreError::Internal("sqlite: needs a path".into()));
            }
            return Ok(Self::Sqlite(Path::new(path)));
        }
        if url.starts_with("mysql:") {
            return Ok(Self::MariaDb(url));
        }
        Err(StoreError::Internal("the database URL must start with sqlite: or mysql:".into()))
    }
}

/// Facts about a database that is not open.
#[derive(Debug, Clone, PartialEq)]
pub struct DatabaseFacts {
    /// The name and the version of the engine.
    pub version: String,
    /// The Unix time of its clock.
    pub time: f64,
}

/// An open and migrated database.
pub struct Store {
    pub(crate) engine: Engine,
    /// The nodes of this daemon; checked by every transaction.
    pub membership: Arc<Membership>,
    /// Limits the transactions with a precondition.
    pub(crate) conditional: Arc<Semaphore>,
    /// The number of statements.
    statements: Arc<AtomicU64>,
    pub metrics: StoreMetrics,
    /// The migrations that this program knows, by number.
    pub(crate) migrations: &'static [Migration],
    /// Whether some of them are held back.
    has_held_migrations: AtomicBool,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.engine {
            Engine::Sqlite(_) => "Store(SQLite)",
            Engine::MariaDb(_) => "Store(MariaDB)",
        })
    }
}

impl Read for &Store {
    async fn rows(&mut self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        self.query(sql, params).await
    }
}

impl Store {
    /// Opens the database at `url` and applies the missing migrations, except those that are held back.
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        Self::open_with(url, migrate::MIGRATIONS).await
    }

    /// Opens a database as a program with the given migrations.
    pub(crate) async fn open_with(url: &str, migrations: &'static [Migration]) -> Result<Self, StoreError> {
        let store = Self::open_unmigrated(url, migrations).await?;
        migrate::run(&store).await?;
        Ok(store)
    }

    /// Opens a database without changing its schema.
    pub(crate) async fn open_unmigrated(
        url: &str,
        migrations: &'static [Migration],
    ) -> Result<Self, StoreError> {
        let engine = match DatabaseUrl::parse(url)? {
            DatabaseUrl::Sqlite(path) => Engine::Sqlite(sqlite::Sqlite::open(path)?),
            DatabaseUrl::MariaDb(url) => Engine::MariaDb(mariadb::MariaDb::open(url).await?),
        };
        Ok(Self {
            engine,
            membership: Arc::default(),
            conditional: Arc::new(Semaphore::new(MAX_CONDITIONAL_TRANSACTIONS)),
            statements: Arc::default(),
            metrics: StoreMetrics::default(),
            migrations,
            has_held_migrations: AtomicBool::default(),
        })
    }

    /// Connects to the database at `url` without changing it, and returns its version and its time. `None` if it is a file that
    /// does not exist yet.
    pub async fn inspect(url: &str) -> Result<Option<DatabaseFacts>, StoreError> {
        let (name, rows) = match DatabaseUrl::parse(url)? {
            DatabaseUrl::Sqlite(path) if !path.exists() => return Ok(None),
            DatabaseUrl::Sqlite(path) => {
                let sql = format!("SELECT sqlite_version(), CAST({NOW} AS DOUBLE)");
                ("SQLite", sqlite::Sqlite::open(path)?.query(&sql, &[])?)
            }
            DatabaseUrl::MariaDb(url) => {
                let mariadb = mariadb::MariaDb::connect(url).await?;
                let rows = mariadb.query(&format!("SELECT VERSION(), CAST({NOW} AS DOUBLE)"), &[]).await;
                mariadb.close().await;
                ("MariaDB", rows?)
            }
        };
        let row = rows.into_iter().next().ok_or_else(|| StoreError::Internal("no row".into()))?;
        let (version, time): (String, f64) = row.read()?;
        Ok(Some(DatabaseFacts { version: format!("{name} {version}"), time }))
    }

    /// Returns the schema version of this program: the number of the last migration that it knows.
    #[must_use]
    pub fn schema_version(&self) -> i64 {
        self.migrations.last().map_or(0, |migration| migration.number)
    }

    /// Returns whether migrations were held back the last time that this program applied them.
    pub(crate) fn has_held_migrations(&self) -> bool {
        self.has_held_migrations.load(Ordering::Relaxed)
    }

    pub(crate) fn set_held_migrations(&self, has_held: bool) {
        self.has_held_migrations.store(has_held, Ordering::Relaxed);
    }

    /// Runs a statement outside of a transaction and returns its rows.
    pub async fn query(&self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        self.statements.fetch_add(1, Ordering::Relaxed);
        let started = Instant::now();
        let outcome = match &self.engine {
            Engine::Sqlite(sqlite) => sqlite.query(sql, params),
            Engine::MariaDb(mariadb) => mariadb.query(sql, params).await,
        };
        self.metrics.measure(started, outcome)
    }

    /// Runs one modifying statement as its own transaction, and returns the number of rows that it matched. It does not
    /// check the membership of this daemon, so the statement must contain the epoch.
    pub(crate) async fn execute(&self, sql: &str, params: &[Value]) -> Result<u64, Error> {
        match &self.engine {
            Engine::Sqlite(_) => transaction!(self.unfenced(), |tx| { Ok(tx.execute(sql, params).await?) }),
            Engine::MariaDb(mariadb) => {
                self.statements.fetch_add(1, Ordering::Relaxed);
                let started = Instant::now();
                let outcome = mariadb.execute(sql, params).await;
                Ok(self.metrics.measure(started, outcome)?)
            }
        }
    }

    /// Runs a statement outside of a transaction and returns its first row.
    pub async fn query_one(&self, sql: &str, params: &[Value]) -> Result<Option<Row>, StoreError> {
        Ok(self.query(sql, params).await?.into_iter().next())
    }

    /// Returns the number of statements, for tests. The beginning and the end of a transaction count.
    #[must_use]
    pub fn statement_count(&self) -> u64 {
        self.statements.load(Ordering::Relaxed)
    }

    /// Begins a series of related reads. With SQLite they see one consistent state and share a connection; with
    /// MariaDB each sees the state at the time of the read.
    pub fn snapshot(&self) -> Result<Snapshot<'_>, StoreError> {
        let sqlite = match &self.engine {
            Engine::Sqlite(sqlite) => Some(sqlite.snapshot()?),
            Engine::MariaDb(_) => None,
        };
        Ok(Snapshot { store: self, sqlite })
    }

    /// Opens a database that daemons use, without changing its schema, to read it.
    pub async fn open_existing(url: &str) -> Result<Self, StoreError> {
        match DatabaseUrl::parse(url)? {
            DatabaseUrl::Sqlite(path) if !path.exists() => {
                Err(StoreError::Internal(format!("database {} does not exist", path.display())))
            }
            _ => Self::open_unmigrated(url, migrate::MIGRATIONS).await,
        }
    }

    /// Begins a series of reads that see one state of the database, on both engines.
    pub(crate) async fn consistent_snapshot(&self) -> Result<ConsistentSnapshot<'_>, StoreError> {
        Ok(match &self.engine {
            Engine::Sqlite(sqlite) => ConsistentSnapshot::Sqlite(sqlite.snapshot()?),
            Engine::MariaDb(mariadb) => ConsistentSnapshot::MariaDb(mariadb.begin_snapshot().await?),
        })
    }

    /// Begins a transaction. Use [`transaction!`] instead.
    #[doc(hidden)]
    pub async fn begin(&self) -> Result<Tx, StoreError> {
        let started = Instant::now();
        // Before its connection: the checks of the others need one to end.
        let permit = if current_precondition().is_some() {
            Arc::clone(&self.conditional).acquire_owned().await.ok()
        } else {
            None
        };
        let engine = match &self.engine {
            Engine::Sqlite(sqlite) => sqlite.begin().await.map(TxEngine::Sqlite),
            Engine::MariaDb(mariadb) => mariadb.begin().await.map(TxEngine::MariaDb),
        };
        let engine = engine.inspect_err(|error| self.metrics.failed(error))?;
        // The beginning and the end.
        self.statements.fetch_add(2, Ordering::Relaxed);
        let (membership, statements) = (Arc::clone(&self.membership), Arc::clone(&self.statements));
        let metrics = self.metrics.clone();
        Ok(Tx { engine, membership, statements, metrics, started, has_written: false, permit })
    }

    /// Returns this store for transactions that a daemon may commit after its nodes were fenced.
    #[must_use]
    pub fn unfenced(&self) -> Unfenced<'_> {
        Unfenced(self)
    }

    /// Returns an estimate of the number of rows of a table, without counting them.
    pub async fn estimate_rows(&self, table: &str) -> Result<i64, StoreError> {
        let row = match &self.engine {
            Engine::Sqlite(sqlite) => {
                let sql = format!(
                    "SELECT COALESCE((SELECT MAX(rowid) FROM {table}) - (SELECT MIN(rowid) FROM {table}) + 1, 0)"
                );
                sqlite.query(&sql, &[])?.into_iter().next()
            }
            Engine::MariaDb(mariadb) => {
                let sql = "SELECT CAST(table_rows AS SIGNED) FROM information_schema.tables \
                           WHERE table_schema = DATABASE() AND table_name = ?";
                mariadb.query(sql, params![table]).await?.into_iter().next()
            }
        };
        row.map_or(Ok(0), Row::read)
    }

    /// Waits for the current transaction and closes the database.
    pub async fn close(&self) {
        match &self.engine {
            Engine::Sqlite(sqlite) => sqlite.close().await,
            Engine::MariaDb(mariadb) => mariadb.close().await,
        }
    }
}

/// A store whose transactions do not check the membership of this daemon.
#[derive(Debug)]
pub struct Unfenced<'a>(&'a Store);

impl Unfenced<'_> {
    /// Begins a transaction. Use [`transaction!`](crate::transaction!) instead.
    #[doc(hidden)]
    pub async fn begin(&self) -> Result<Tx, StoreError> {
        Ok(Tx { membership: Arc::default(), ..self.0.begin().await? })
    }
}

/// A series of related reads.
pub struct Snapshot<'a> {
    store: &'a Store,
    sqlite: Option<sqlite::SqliteSnapshot<'a>>,
}

impl std::fmt::Debug for Snapshot<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Snapshot")
    }
}

impl Read for &Snapshot<'_> {
    async fn rows(&mut self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        match &self.sqlite {
            Some(snapshot) => {
                self.store.statements.fetch_add(1, Ordering::Relaxed);
                let started = Instant::now();
                self.store.metrics.measure(started, snapshot.query(sql, params))
            }
            None => self.store.query(sql, params).await,
        }
    }
}

/// A series of reads that see one state of the database.
pub(crate) enum ConsistentSnapshot<'a> {
    Sqlite(sqlite::SqliteSnapshot<'a>),
    MariaDb(mariadb::MariaDbTx),
}

impl std::fmt::Debug for ConsistentSnapshot<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ConsistentSnapshot")
    }
}

impl ConsistentSnapshot<'_> {
    pub(crate) fn is_sqlite(&self) -> bool {
        matches!(self, Self::Sqlite(_))
    }

    /// Ends the snapshot, and returns its connection.
    pub(crate) async fn end(self) {
        if let Self::MariaDb(tx) = self {
            tx.rollback().await;
        }
    }
}

impl Read for ConsistentSnapshot<'_> {
    async fn rows(&mut self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        match self {
            ConsistentSnapshot::Sqlite(snapshot) => snapshot.query(sql, params),
            ConsistentSnapshot::MariaDb(tx) => tx.query(sql, params).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use muster_types::time::now;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn inspecting_a_database_does_not_create_it() {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", folder.path().join("muster.db").display());
        assert_eq!(Store::inspect(&url).await.unwrap(), None);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        Store::open(&url).await.unwrap().close().await;
        let facts = Store::inspect(&url).await.unwrap().unwrap();
        assert!(facts.version.starts_with("SQLite 3."), "{facts:?}");
        assert!((facts.time - now()).abs() < 60.0, "{facts:?}");
        assert!(Store::inspect("postgres://x").await.is_err());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn inspects_a_server() {
        let Some(url) = muster_testing::database_url() else {
            return muster_testing::skipped("mariadb-server");
        };
        let facts = Store::inspect(&url).await.unwrap().unwrap();
        assert!(facts.version.starts_with("MariaDB 1"), "{facts:?}");
        assert!((facts.time - now()).abs() < 60.0, "{facts:?}");
        assert!(Store::inspect("mysql://root@127.0.0.1:9/x").await.is_err());
    }
}
