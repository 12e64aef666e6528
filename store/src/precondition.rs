//! Conditions that a change depends on, checked in the transaction that makes it. See docs/decisions/0088.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use muster_types::Error;

/// The row of an object: its table, and the value of its primary key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectRow {
    pub table: &'static str,
    pub key_column: &'static str,
    pub key: String,
}

type CheckFuture = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

/// A condition that the database must meet when a change is committed.
#[derive(Clone)]
pub struct Precondition {
    /// The row that others must not change between the check and the commit.
    row: Option<ObjectRow>,
    check: Arc<dyn Fn() -> CheckFuture + Send + Sync>,
}

impl fmt::Debug for Precondition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Precondition").field("row", &self.row).finish_non_exhaustive()
    }
}

impl Precondition {
    /// Creates a condition. `check` reads what other transactions have committed, over other connections.
    pub fn new<F>(row: Option<ObjectRow>, check: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<(), Error>> + Send + 'static,
    {
        Self { row, check: Arc::new(move || Box::pin(check())) }
    }

    pub(crate) fn row(&self) -> Option<&ObjectRow> {
        self.row.as_ref()
    }

    pub(crate) async fn check(&self) -> Result<(), Error> {
        (self.check)().await
    }
}
