//! The store: SQL and nothing else. One text for two engines, SQLite in the process and MariaDB.
//!
//! Rules live in `objects/`, not here. Every change goes through [`transaction!`], the one place that
//! retries: on MariaDB (and on Galera in particular) any statement or commit may fail with a conflict, so
//! a transaction's body must do nothing but talk to its [`Tx`].

pub mod addresses;
#[cfg(test)]
mod addresses_tests;
pub mod agent_operations;
#[cfg(test)]
mod agent_operations_tests;
pub mod artifacts;
pub mod blob_locations;
pub mod blobs;
pub mod claims;
#[cfg(test)]
mod claims_tests;
pub mod copy;
pub mod dns_entries;
pub mod events;
pub mod exchanges;
#[cfg(test)]
mod exchanges_tests;
#[cfg(test)]
mod federation_tests;
#[cfg(test)]
mod images_tests;
pub mod instances;
#[cfg(test)]
mod instances_tests;
pub mod interfaces;
pub mod issuers;
pub mod keys;
pub mod leases;
mod mariadb;
pub mod metadata;
mod migrate;
pub mod namespaces;
pub mod networks;
pub mod node_claims;
pub mod node_networks;
pub mod nodes;
pub mod operations;
pub mod references;
pub mod rules;
pub mod seed;
mod sqlite;
#[cfg(test)]
mod tests;
pub mod trusts;
pub mod uploads;
pub mod values;

use std::path::Path;
use std::time::Duration;

use aws_lc_rs::digest;
use muster_types::Error;

/// A value on its way into or out of the database.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Null,
    Int(i64),
    Real(f64),
    Text(String),
    Bytes(Vec<u8>),
}

macro_rules! value_from {
    ($($type:ty => |$v:ident| $e:expr),+ $(,)?) => {$(
        impl From<$type> for Value {
            fn from($v: $type) -> Self { $e }
        }
    )+};
}
value_from! {
    i64 => |v| Self::Int(v),
    bool => |v| Self::Int(i64::from(v)),
    f64 => |v| Self::Real(v),
    String => |v| Self::Text(v),
    &String => |v| Self::Text(v.clone()),
    &str => |v| Self::Text(v.to_owned()),
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

macro_rules! value_from_word {
    ($($type:ty),+) => {$(
        impl From<$type> for Value {
            fn from(value: $type) -> Self { Self::Text(value.to_string()) }
        }
    )+};
}
value_from_word!(
    muster_types::ids::KeyId,
    muster_types::ids::ClaimId,
    muster_types::ids::NodeId,
    muster_types::ids::OperationId,
    muster_types::ids::NetworkId,
    muster_types::ids::InterfaceId,
    muster_types::ids::InstanceId,
    muster_types::ids::BlobId,
    muster_types::ids::ArtifactId,
    muster_types::ids::UploadId,
    muster_types::ids::AgentOperationId,
    muster_types::ids::IssuerId,
    muster_types::ids::RuleId,
    muster_types::agent_operation::AgentOperationState,
    muster_types::artifact::ArtifactState,
    muster_types::artifact::ArtifactType,
    muster_types::blob::BlobState,
    muster_types::blob::CopyState,
    muster_types::address::AddressType,
    muster_types::address::MacAddress,
    muster_types::address::Netblock,
    muster_types::instance::InstanceState,
    muster_types::instance::PowerState,
    muster_types::interface::InterfaceState,
    muster_types::issuer::IssuerState,
    muster_types::network::NetworkState,
    std::net::Ipv4Addr,
    muster_types::object::ObjectType,
    muster_types::event::EventType,
    muster_types::namespace::NamespaceState,
    muster_types::node::NodeState,
    muster_types::operation::OperationState,
    muster_types::operation::OperationType,
    muster_types::rule::RuleState
);

/// Something that answers reading statements: the store itself or a transaction.
pub trait Read {
    fn rows(
        &mut self,
        sql: &str,
        params: &[Value],
    ) -> impl Future<Output = Result<Vec<Row>, StoreError>> + Send;
}

impl Read for &Store {
    async fn rows(&mut self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        self.query(sql, params).await
    }
}

impl Read for &Snapshot<'_> {
    async fn rows(&mut self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        match &self.moment {
            Some(moment) => moment.query(sql, params),
            None => self.store.query(sql, params).await,
        }
    }
}

impl Read for &mut Tx {
    async fn rows(&mut self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        self.query(sql, params).await
    }
}

/// Converts each expression into a [`Value`] and returns them as an array.
#[macro_export]
macro_rules! values {
    ($($value:expr),* $(,)?) => { [$($crate::Value::from($value)),*] };
}

/// The arguments of a statement, as a slice of [`Value`]s.
#[macro_export]
macro_rules! params {
    ($($value:expr),* $(,)?) => { &$crate::values![$($value),*] };
}

/// Question marks for so many values of a list.
fn marks(count: usize) -> String {
    vec!["?"; count].join(", ")
}

/// Stands for a text that may be longer than a key.
pub fn sha256(text: &str) -> String {
    let hash = digest::digest(&digest::SHA256, text.as_bytes());
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// One row of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Row(pub Vec<Value>);

impl Row {
    /// The column at `index`, as `T`.
    pub fn get<T: FromValue>(&self, index: usize) -> Result<T, StoreError> {
        let value = self.0.get(index).unwrap_or(&Value::Null);
        T::from_value(value).ok_or_else(|| {
            StoreError::Broken(format!("column {index} does not hold a {}", std::any::type_name::<T>()))
        })
    }

    /// The word or id in the column at `index`.
    pub fn parse<T: std::str::FromStr>(&self, index: usize) -> Result<T, StoreError> {
        let text: String = self.get(index)?;
        text.parse().map_err(|_| {
            StoreError::Broken(format!("column {index}: {text:?} is not a {}", std::any::type_name::<T>()))
        })
    }

    /// The word or id in the column at `index`, or nothing.
    pub fn parse_opt<T: std::str::FromStr>(&self, index: usize) -> Result<Option<T>, StoreError> {
        if self.get::<Option<String>>(index)?.is_none() { Ok(None) } else { self.parse(index).map(Some) }
    }

    /// The JSON document in the column at `index`.
    pub fn json<T: serde::de::DeserializeOwned>(&self, index: usize) -> Result<T, StoreError> {
        let text: String = self.get(index)?;
        serde_json::from_str(&text).map_err(|e| StoreError::Broken(format!("column {index}: {e}")))
    }

    /// The JSON document in the column at `index`, or nothing.
    pub fn json_opt<T: serde::de::DeserializeOwned>(&self, index: usize) -> Result<Option<T>, StoreError> {
        if self.get::<Option<String>>(index)?.is_none() { Ok(None) } else { self.json(index).map(Some) }
    }
}

/// A type that a column can be read as.
pub trait FromValue: Sized {
    fn from_value(value: &Value) -> Option<Self>;
}

impl FromValue for i64 {
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Int(n) => Some(*n),
            _ => None,
        }
    }
}

impl FromValue for bool {
    fn from_value(value: &Value) -> Option<Self> {
        i64::from_value(value).map(|n| n != 0)
    }
}

impl FromValue for f64 {
    #[expect(clippy::cast_precision_loss, reason = "whole numbers in a DOUBLE column are times and counts")]
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Real(n) => Some(*n),
            Value::Int(n) => Some(*n as Self),
            _ => None,
        }
    }
}

impl FromValue for String {
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Text(text) => Some(text.clone()),
            _ => None,
        }
    }
}

impl<T: FromValue> FromValue for Option<T> {
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Null => Some(None),
            other => T::from_value(other).map(Some),
        }
    }
}

/// What the database said, by what can be done about it.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another transaction was in the way; the same transaction may work at once.
    #[error("conflict: {0}")]
    Conflict(String),
    /// A row with this key exists.
    #[error("duplicate key: {0}")]
    Duplicate(String),
    /// A value does not fit its column.
    #[error("{0}")]
    TooLong(String),
    /// The database does not answer.
    #[error("unavailable: {0}")]
    Unavailable(String),
    /// A bug, or a damaged database.
    #[error("{0}")]
    Broken(String),
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Conflict(why) => {
                tracing::warn!(%why, "transaction gave up after conflicts");
                Self::Contended
            }
            StoreError::Unavailable(why) => {
                tracing::warn!(%why, "database unavailable");
                Self::database_unavailable()
            }
            StoreError::TooLong(why) => {
                tracing::warn!(%why, "a value was not stored");
                Self::TooLong("a value is longer than can be stored".into())
            }
            StoreError::Duplicate(why) | StoreError::Broken(why) => Self::Internal(format!("store: {why}")),
        }
    }
}

/// How a transaction's body fails: with the store's words or with the caller's.
#[derive(Debug)]
pub enum TxError {
    Store(StoreError),
    Refused(Error),
}

impl From<StoreError> for TxError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<Error> for TxError {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

enum Engine {
    Sqlite(sqlite::Sqlite),
    MariaDb(mariadb::MariaDb),
}

/// A database, open and migrated.
pub struct Store {
    engine: Engine,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.engine {
            Engine::Sqlite(_) => "Store(SQLite)",
            Engine::MariaDb(_) => "Store(MariaDB)",
        })
    }
}

impl Store {
    /// Opens the database at `url` and brings its tables up to date.
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        let store = Self::open_raw(url).await?;
        migrate::run(&store).await?;
        Ok(store)
    }

    /// Opens the database at `url` as it is.
    async fn open_raw(url: &str) -> Result<Self, StoreError> {
        let engine = if let Some(path) = url.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").filter(|rest| rest.starts_with('/')).unwrap_or(path);
            if path.is_empty() {
                return Err(StoreError::Broken("sqlite: needs a path".into()));
            }
            Engine::Sqlite(sqlite::Sqlite::open(Path::new(path))?)
        } else if url.starts_with("mysql:") {
            Engine::MariaDb(mariadb::MariaDb::open(url).await?)
        } else {
            return Err(StoreError::Broken("the database URL must start with sqlite: or mysql:".into()));
        };
        Ok(Self { engine })
    }

    /// Runs one reading statement outside any transaction.
    pub async fn query(&self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        match &self.engine {
            Engine::Sqlite(sqlite) => sqlite.query(sql, params),
            Engine::MariaDb(mariadb) => mariadb.query(sql, params).await,
        }
    }

    /// The first row of an answer.
    pub async fn query_one(&self, sql: &str, params: &[Value]) -> Result<Option<Row>, StoreError> {
        Ok(self.query(sql, params).await?.into_iter().next())
    }

    /// Begins to read several things that belong together. With SQLite they are of one moment, and cost one lock;
    /// with MariaDB each is read as it is.
    pub fn snapshot(&self) -> Result<Snapshot<'_>, StoreError> {
        let moment = match &self.engine {
            Engine::Sqlite(sqlite) => Some(sqlite.snapshot()?),
            Engine::MariaDb(_) => None,
        };
        Ok(Snapshot { store: self, moment })
    }

    /// Begins a transaction. Use [`transaction!`] instead.
    #[doc(hidden)]
    pub async fn begin(&self) -> Result<Tx, StoreError> {
        Ok(Tx(match &self.engine {
            Engine::Sqlite(sqlite) => TxEngine::Sqlite(sqlite.begin().await?),
            Engine::MariaDb(mariadb) => TxEngine::MariaDb(mariadb.begin().await?),
        }))
    }

    /// Roughly how many rows a table holds, at no cost.
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
        row.map_or(Ok(0), |row| row.get(0))
    }

    /// Finishes what is under way and closes.
    pub async fn close(&self) {
        match &self.engine {
            Engine::Sqlite(sqlite) => sqlite.close().await,
            Engine::MariaDb(mariadb) => mariadb.close().await,
        }
    }
}

/// Several reads that belong together.
pub struct Snapshot<'a> {
    store: &'a Store,
    moment: Option<sqlite::Moment<'a>>,
}

impl std::fmt::Debug for Snapshot<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Snapshot")
    }
}

enum TxEngine {
    Sqlite(sqlite::SqliteTx),
    MariaDb(mariadb::MariaDbTx),
}

/// A transaction. Dropping it unfinished rolls it back.
pub struct Tx(TxEngine);

impl std::fmt::Debug for Tx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tx")
    }
}

impl Tx {
    /// Runs a reading statement.
    pub async fn query(&mut self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        match &mut self.0 {
            TxEngine::Sqlite(tx) => tx.query(sql, params),
            TxEngine::MariaDb(tx) => tx.query(sql, params).await,
        }
    }

    /// The first row of an answer.
    pub async fn query_one(&mut self, sql: &str, params: &[Value]) -> Result<Option<Row>, StoreError> {
        Ok(self.query(sql, params).await?.into_iter().next())
    }

    /// Runs a changing statement and says how many rows it met.
    pub async fn execute(&mut self, sql: &str, params: &[Value]) -> Result<u64, StoreError> {
        match &mut self.0 {
            TxEngine::Sqlite(tx) => tx.execute(sql, params),
            TxEngine::MariaDb(tx) => tx.execute(sql, params).await,
        }
    }

    /// Changes tables, which may take long.
    async fn define(&mut self, sql: &str) -> Result<(), StoreError> {
        match &mut self.0 {
            TxEngine::Sqlite(tx) => tx.execute(sql, &[]).map(|_| ()),
            TxEngine::MariaDb(tx) => tx.define(sql).await,
        }
    }

    /// Ends the transaction with the body's outcome. `None` asks for another try.
    #[doc(hidden)]
    pub async fn finish<T>(self, outcome: Result<T, TxError>, retry: &mut Retry) -> Option<Result<T, Error>> {
        let failure = match outcome {
            Ok(value) => {
                let committed = match self.0 {
                    TxEngine::Sqlite(tx) => tx.commit(),
                    TxEngine::MariaDb(tx) => tx.commit().await,
                };
                match committed {
                    Ok(()) => return Some(Ok(value)),
                    Err(error) => error,
                }
            }
            Err(error) => {
                match self.0 {
                    TxEngine::Sqlite(tx) => drop(tx),
                    TxEngine::MariaDb(tx) => tx.rollback().await,
                }
                match error {
                    TxError::Refused(error) => return Some(Err(error)),
                    TxError::Store(error) => error,
                }
            }
        };
        retry.after(failure).await
    }
}

/// How often and how soon a transaction is tried again.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct Retry {
    attempts: u32,
}

impl Retry {
    const MOST: u32 = 12;

    /// Waits if another try makes sense; otherwise says how it ends.
    pub async fn after<T>(&mut self, failure: StoreError) -> Option<Result<T, Error>> {
        self.attempts += 1;
        match failure {
            StoreError::Conflict(why) if self.attempts < Self::MOST => {
                let pause = Duration::from_millis(jitter(1 << self.attempts.min(8)));
                tracing::debug!(%why, attempts = self.attempts, "transaction tried again");
                tokio::time::sleep(pause).await;
                None
            }
            other => Some(Err(other.into())),
        }
    }
}

/// Between half of `limit` and `limit`, at random, so that two that collided do not collide again.
fn jitter(limit: u64) -> u64 {
    let mut byte = [0u8; 1];
    // Without random numbers the pause is merely not spread.
    let _ = aws_lc_rs::rand::fill(&mut byte);
    limit / 2 + limit * u64::from(byte[0]) / 512
}

/// Runs a body in a transaction and commits it; runs it again when another transaction was in the way.
///
/// `transaction!(store, |tx| { … Ok(value) })`: the body is an async block that returns
/// `Result<T, TxError>`; `?` takes both store errors and refusals. It must have no effect but through `tx`.
// A function would read better, but no stable closure bound lets a borrowed `tx` cross an await in a task.
#[macro_export]
macro_rules! transaction {
    ($store:expr, |$tx:ident| $body:block) => {{
        let mut retry = $crate::Retry::default();
        loop {
            #[allow(unused_mut)]
            let mut transaction = match $store.begin().await {
                Ok(transaction) => transaction,
                Err(failure) => match retry.after(failure).await {
                    Some(end) => break end,
                    None => continue,
                },
            };
            let outcome: ::std::result::Result<_, $crate::TxError> = {
                let $tx = &mut transaction;
                async { $body }.await
            };
            if let Some(end) = transaction.finish(outcome, &mut retry).await {
                break end;
            }
        }
    }};
}
