//! Transactions, and when they are retried. See docs/decisions/0006.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use muster_types::Error;
use muster_types::idempotency::IdempotencyState;
use tokio::sync::OwnedSemaphorePermit;

use crate::change::{
    IdempotencyLease, current_lease, current_precondition, is_dry_run, record_commit, require_waiting,
};
use crate::error::{StoreError, TxError};
use crate::membership::Membership;
use crate::params;
use crate::precondition::{ObjectRow, Precondition};
use crate::row::{Read, Row};
use crate::store_metrics::StoreMetrics;
use crate::value::Value;
use crate::{mariadb, sqlite};

pub(crate) enum TxEngine {
    Sqlite(sqlite::SqliteTx),
    MariaDb(mariadb::MariaDbTx),
}

/// A transaction, which is rolled back if it is dropped before it is finished.
pub struct Tx {
    pub(crate) engine: TxEngine,
    pub(crate) membership: Arc<Membership>,
    /// The number of statements of the store.
    pub(crate) statements: Arc<AtomicU64>,
    pub(crate) metrics: StoreMetrics,
    /// When its beginning was requested.
    pub(crate) started: Instant,
    /// Whether it has changed a row.
    pub(crate) has_written: bool,
    /// Held by a transaction with a precondition.
    pub(crate) permit: Option<OwnedSemaphorePermit>,
}

impl std::fmt::Debug for Tx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tx")
    }
}

impl Read for Tx {
    async fn rows(&mut self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        self.query(sql, params).await
    }
}

impl Tx {
    /// Runs a statement and returns its rows.
    pub async fn query(&mut self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        self.statements.fetch_add(1, Ordering::Relaxed);
        let started = Instant::now();
        let outcome = match &mut self.engine {
            TxEngine::Sqlite(tx) => tx.query(sql, params),
            TxEngine::MariaDb(tx) => tx.query(sql, params).await,
        };
        self.metrics.measure(started, outcome)
    }

    /// Runs a statement and returns its first row.
    pub async fn query_one(&mut self, sql: &str, params: &[Value]) -> Result<Option<Row>, StoreError> {
        Ok(self.query(sql, params).await?.into_iter().next())
    }

    /// Returns whether `LOCK IN SHARE MODE` keeps others from changing a row.
    pub(crate) fn has_shared_locks(&self) -> bool {
        matches!(&self.engine, TxEngine::MariaDb(tx) if !tx.has_several_writers())
    }

    /// Runs a modifying statement and returns the number of rows that it matched.
    pub async fn execute(&mut self, sql: &str, params: &[Value]) -> Result<u64, StoreError> {
        self.statements.fetch_add(1, Ordering::Relaxed);
        let started = Instant::now();
        let outcome = match &mut self.engine {
            TxEngine::Sqlite(tx) => tx.execute(sql, params),
            TxEngine::MariaDb(tx) => tx.execute(sql, params).await,
        };
        let matched = self.metrics.measure(started, outcome)?;
        self.has_written |= matched > 0;
        Ok(matched)
    }

    /// Keeps other transactions from changing a row until this one ends. SQLite has one writer anyway.
    pub(crate) async fn lock_row(&mut self, row: &ObjectRow) -> Result<(), StoreError> {
        if matches!(self.engine, TxEngine::MariaDb(_)) {
            let ObjectRow { table, key_column, key } = row;
            let sql = format!("SELECT {key_column} FROM {table} WHERE {key_column} = ? FOR UPDATE");
            self.query(&sql, &[key.into()]).await?;
        }
        Ok(())
    }

    /// Runs a statement that changes the schema, without a timeout.
    pub(crate) async fn execute_ddl(&mut self, sql: &str) -> Result<(), StoreError> {
        match &mut self.engine {
            TxEngine::Sqlite(tx) => tx.execute(sql, &[]).map(|_| ()),
            TxEngine::MariaDb(tx) => tx.execute_ddl(sql).await,
        }
    }

    /// Ends the transaction with the outcome of its body. Returns `None` if it is to be retried.
    #[doc(hidden)]
    pub async fn finish<T>(
        mut self,
        mut outcome: Result<T, TxError>,
        retry: &mut Retry,
    ) -> Option<Result<T, Error>> {
        if outcome.is_ok()
            && let Err(error) = Arc::clone(&self.membership).require_in(&mut self).await
        {
            outcome = Err(error.into());
        }
        if outcome.is_ok()
            && self.has_written
            && let Some(lease) = current_lease()
            && let Err(error) = mark_changed(&mut self, &lease).await
        {
            outcome = Err(error);
        }
        if outcome.is_ok()
            && self.has_written
            && let Some(precondition) = current_precondition()
            && let Err(error) = require_precondition(&mut self, &precondition).await
        {
            outcome = Err(error);
        }
        // Immediately before the commit, after all statements.
        let outcome = match outcome {
            Ok(value) => require_waiting().map(|()| value).map_err(TxError::Rejected),
            failed => failed,
        };
        if outcome.is_ok() && is_dry_run() {
            match self.engine {
                TxEngine::Sqlite(tx) => drop(tx),
                TxEngine::MariaDb(tx) => tx.rollback().await,
            }
            return outcome.ok().map(Ok);
        }
        let has_written = self.has_written;
        let failure = match outcome {
            Ok(value) => {
                let committed = match self.engine {
                    TxEngine::Sqlite(tx) => tx.commit(),
                    TxEngine::MariaDb(tx) => tx.commit().await,
                };
                match committed {
                    Ok(()) => {
                        self.metrics.transactions.observe(self.started.elapsed().as_secs_f64());
                        record_commit(has_written);
                        return Some(Ok(value));
                    }
                    Err(error) => {
                        self.metrics.failed(&error);
                        error
                    }
                }
            }
            Err(error) => {
                match self.engine {
                    TxEngine::Sqlite(tx) => drop(tx),
                    TxEngine::MariaDb(tx) => tx.rollback().await,
                }
                match error {
                    TxError::Rejected(error) => return Some(Err(error)),
                    TxError::Store(error) => error,
                }
            }
        };
        // Others may run during the backoff.
        drop(self.permit);
        retry.after(failure).await
    }
}

/// Locks the row of a condition until the end of the transaction, and checks the condition. What the transaction has changed
/// is not visible to the check, so it sees what the transaction replaces.
async fn require_precondition(tx: &mut Tx, precondition: &Precondition) -> Result<(), TxError> {
    if let Some(row) = precondition.row() {
        tx.lock_row(row).await?;
    }
    Ok(precondition.check().await?)
}

/// Marks a request as changed, in the transaction of its first change. Fails if another execution has taken it over.
async fn mark_changed(tx: &mut Tx, lease: &IdempotencyLease) -> Result<(), TxError> {
    let sql = "UPDATE idempotency_keys SET state = ? WHERE hash = ? AND owner = ? AND state = ?";
    let (from, to) = (IdempotencyState::Running, IdempotencyState::Changed);
    if tx.execute(sql, params![to, &lease.hash, &lease.owner, from]).await? == 1 {
        return Ok(());
    }
    Err(Error::Unavailable("the request took too long and was repeated meanwhile, nothing was done".into())
        .into())
}

/// The retry policy of a transaction: exponential backoff with jitter.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct Retry {
    attempts: u32,
}

impl Retry {
    const MAX_ATTEMPTS: u32 = 12;

    /// Waits and returns `None` if the transaction is to be retried; otherwise returns its result.
    pub async fn after<T>(&mut self, failure: StoreError) -> Option<Result<T, Error>> {
        self.attempts += 1;
        match failure {
            StoreError::Conflict(reason) if self.attempts < Self::MAX_ATTEMPTS => {
                let backoff = Duration::from_millis(jitter(1 << self.attempts.min(8)));
                tracing::debug!(%reason, attempts = self.attempts, "retrying transaction");
                tokio::time::sleep(backoff).await;
                None
            }
            other => Some(Err(other.into())),
        }
    }
}

/// Returns a random number between half of `limit` and `limit`, so that two transactions do not conflict again.
fn jitter(limit: u64) -> u64 {
    let mut byte = [0u8; 1];
    // If this fails, the backoff is merely not random.
    let _ = aws_lc_rs::rand::fill(&mut byte);
    limit / 2 + limit * u64::from(byte[0]) / 512
}

/// Runs a body in a transaction and commits it; retries it when it conflicts with another transaction.
///
/// `transaction!(store, |tx| { … Ok(value) })`: the body is an async block that returns
/// `Result<T, TxError>`; `?` converts both store errors and the caller's. It must have no effects except through `tx`.
// A function would read better, but no stable closure bound lets a borrowed `tx` cross an await in a task.
// See docs/decisions/0006.
#[macro_export]
macro_rules! transaction {
    ($store:expr, |$tx:ident| $body:block) => {{
        let mut retry = $crate::Retry::default();
        loop {
            let mut transaction = match $store.begin().await {
                Ok(transaction) => transaction,
                Err(failure) => match retry.after(failure).await {
                    Some(result) => break result,
                    None => continue,
                },
            };
            let outcome: ::std::result::Result<_, $crate::TxError> = {
                let $tx = &mut transaction;
                async { $body }.await
            };
            if let Some(result) = transaction.finish(outcome, &mut retry).await {
                break result;
            }
        }
    }};
}
