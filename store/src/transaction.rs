//! Transactions, and when they are retried. See docs/decisions/0006.

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use muster_types::Error;

use crate::error::{StoreError, TxError};
use crate::idempotency_keys::{self, IdempotencyLease};
use crate::membership::Membership;
use crate::row::{Read, Row};
use crate::store_metrics::StoreMetrics;
use crate::value::Value;
use crate::{mariadb, sqlite};

pub(crate) enum TxEngine {
    Sqlite(sqlite::SqliteTx),
    MariaDb(mariadb::MariaDbTx),
}

/// Returns an error if the caller of a change does not wait for it any longer.
type RequireWaiting = Box<dyn Fn() -> Result<(), Error> + Send>;

/// A change that a caller requested.
struct Change {
    /// Whether a transaction of it was committed.
    has_committed: Cell<bool>,
    require_waiting: RequireWaiting,
    /// Whether a transaction of it that wrote something was committed.
    has_changed: Cell<bool>,
    /// Set if the caller may repeat the request.
    lease: Option<IdempotencyLease>,
    /// Whether its transactions are rolled back.
    is_dry_run: bool,
}

tokio::task_local! {
    static CHANGE: Change;
}

/// Runs a change that a caller requested. Its first transaction is committed only if the caller still waits, according to
/// `require_waiting`: the daemon may have been frozen since the request began. If the database fails after a transaction was
/// committed, for example while the response is read, the error says that it is unknown whether the change was made.
pub async fn run_change<T>(
    require_waiting: impl Fn() -> Result<(), Error> + Send + 'static,
    change: impl Future<Output = T>,
) -> T {
    run_keyed_change(require_waiting, None, change).await
}

/// Runs a change that its caller may repeat, if it has a lease. The transaction that first writes something also records
/// that, so that after a crash the request is executed again if and only if it has changed nothing.
pub async fn run_keyed_change<T>(
    require_waiting: impl Fn() -> Result<(), Error> + Send + 'static,
    lease: Option<IdempotencyLease>,
    change: impl Future<Output = T>,
) -> T {
    let require_waiting = Box::new(require_waiting);
    let (has_committed, has_changed) = (Cell::new(false), Cell::new(false));
    let state = Change { has_committed, require_waiting, has_changed, lease, is_dry_run: false };
    CHANGE.scope(state, change).await
}

/// Runs a change to find out what it would do: its transactions are rolled back instead of committed.
pub async fn dry_run<T>(change: impl Future<Output = T>) -> T {
    let state = Change {
        has_committed: Cell::new(false),
        require_waiting: Box::new(|| Ok(())),
        has_changed: Cell::new(false),
        lease: None,
        is_dry_run: true,
    };
    CHANGE.scope(state, change).await
}

/// Runs a change, or with `only_check` finds out what it would do.
pub async fn run_or_check<T>(only_check: Option<bool>, change: impl Future<Output = T>) -> T {
    if only_check.unwrap_or(false) { dry_run(change).await } else { change.await }
}

/// Whether the current task runs a change whose transactions are rolled back.
#[must_use]
pub fn is_dry_run() -> bool {
    CHANGE.try_with(|change| change.is_dry_run).unwrap_or(false)
}

/// Returns the lease of the change that the current task runs, unless something was changed already.
#[must_use]
pub fn current_lease() -> Option<IdempotencyLease> {
    let lease = CHANGE.try_with(|change| change.lease.clone().filter(|_| !change.has_changed.get()));
    lease.ok().flatten()
}

/// Runs transactions that are no part of the change that the caller requested, such as the count of its attempts.
pub async fn beside_change<T>(transactions: impl Future<Output = T>) -> T {
    run_change(|| Ok(()), transactions).await
}

/// Whether the current task runs a change of which a transaction was committed.
pub(crate) fn has_committed() -> bool {
    CHANGE.try_with(|change| change.has_committed.get()).unwrap_or(false)
}

/// Rejects the first transaction of a change whose caller has given up.
fn require_waiting() -> Result<(), Error> {
    let waiting = CHANGE
        .try_with(|change| if change.has_committed.get() { Ok(()) } else { (change.require_waiting)() });
    waiting.unwrap_or(Ok(()))
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
            && let Err(error) = idempotency_keys::mark_changed(&mut self, &lease).await
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
                        let _ = CHANGE.try_with(|change| {
                            change.has_committed.set(true);
                            change.has_changed.set(has_written || change.has_changed.get());
                        });
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
