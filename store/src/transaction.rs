//! Transactions, and when they are retried. See docs/decisions/0006.

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use muster_types::Error;

use crate::error::{StoreError, TxError};
use crate::membership::Membership;
use crate::row::{Read, Row};
use crate::value::Value;
use crate::{mariadb, sqlite};

pub(crate) enum TxEngine {
    Sqlite(sqlite::SqliteTx),
    MariaDb(mariadb::MariaDbTx),
}

tokio::task_local! {
    /// Whether a transaction of the change was committed.
    static HAS_COMMITTED: Cell<bool>;
}

/// Runs a change that a caller requested. If the database fails after a transaction of it was committed, for example while the
/// response is read, the error says that it is unknown whether the change was made.
pub async fn run_change<T>(change: impl Future<Output = T>) -> T {
    HAS_COMMITTED.scope(Cell::new(false), change).await
}

/// Whether the current task runs a change of which a transaction was committed.
pub(crate) fn has_committed() -> bool {
    HAS_COMMITTED.try_with(Cell::get).unwrap_or(false)
}

/// A transaction, which is rolled back if it is dropped before it is finished.
pub struct Tx {
    pub(crate) engine: TxEngine,
    pub(crate) membership: Arc<Membership>,
    /// The number of statements of the store.
    pub(crate) statements: Arc<AtomicU64>,
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
        match &mut self.engine {
            TxEngine::Sqlite(tx) => tx.query(sql, params),
            TxEngine::MariaDb(tx) => tx.query(sql, params).await,
        }
    }

    /// Runs a statement and returns its first row.
    pub async fn query_one(&mut self, sql: &str, params: &[Value]) -> Result<Option<Row>, StoreError> {
        Ok(self.query(sql, params).await?.into_iter().next())
    }

    /// Runs a modifying statement and returns the number of rows that it matched.
    pub async fn execute(&mut self, sql: &str, params: &[Value]) -> Result<u64, StoreError> {
        self.statements.fetch_add(1, Ordering::Relaxed);
        match &mut self.engine {
            TxEngine::Sqlite(tx) => tx.execute(sql, params),
            TxEngine::MariaDb(tx) => tx.execute(sql, params).await,
        }
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
        let failure = match outcome {
            Ok(value) => {
                let committed = match self.engine {
                    TxEngine::Sqlite(tx) => tx.commit(),
                    TxEngine::MariaDb(tx) => tx.commit().await,
                };
                match committed {
                    Ok(()) => {
                        let _ = HAS_COMMITTED.try_with(|has_committed| has_committed.set(true));
                        return Some(Ok(value));
                    }
                    Err(error) => error,
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
        retry.after(failure).await
    }
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
