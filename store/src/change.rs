//! Changes that callers requested, each with its transactions. See docs/decisions/0006 and 0088.

use std::cell::{Cell, RefCell};

use muster_types::Error;

use crate::precondition::Precondition;

/// One execution of a request with a key. Only its owner may change something and store the response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyLease {
    /// The hash of the caller and its key.
    pub hash: String,
    pub owner: String,
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
    /// Checked by the transaction that first writes something.
    precondition: RefCell<Option<Precondition>>,
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
    let precondition = RefCell::default();
    let state =
        Change { has_committed, require_waiting, has_changed, lease, precondition, is_dry_run: false };
    CHANGE.scope(state, change).await
}

/// Runs a change to find out what it would do: its transactions are rolled back instead of committed.
pub async fn dry_run<T>(change: impl Future<Output = T>) -> T {
    let state = Change {
        has_committed: Cell::new(false),
        require_waiting: Box::new(|| Ok(())),
        has_changed: Cell::new(false),
        lease: None,
        precondition: RefCell::default(),
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

/// Lets the change that the current task runs commit something only if a condition is met.
pub fn require_precondition(precondition: Precondition) {
    // Without a change, nothing is committed.
    let _ = CHANGE.try_with(|change| change.precondition.replace(Some(precondition)));
}

/// Returns the condition of the change that the current task runs, unless something was changed already.
pub(crate) fn current_precondition() -> Option<Precondition> {
    let found =
        CHANGE.try_with(|change| change.precondition.borrow().clone().filter(|_| !change.has_changed.get()));
    found.ok().flatten()
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
pub(crate) fn require_waiting() -> Result<(), Error> {
    let waiting = CHANGE
        .try_with(|change| if change.has_committed.get() { Ok(()) } else { (change.require_waiting)() });
    waiting.unwrap_or(Ok(()))
}

/// Records that a transaction was committed.
pub(crate) fn record_commit(has_written: bool) {
    // Transactions of periodic tasks are no part of a change.
    let _ = CHANGE.try_with(|change| {
        change.has_committed.set(true);
        change.has_changed.set(has_written || change.has_changed.get());
    });
}
