//! Errors of the database, by how they are handled.

use muster_types::Error;

use crate::change::has_committed;

/// An error of the database.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another transaction interfered; the same transaction may succeed if it is retried.
    #[error("conflict: {0}")]
    Conflict(String),
    /// A row with this key exists.
    #[error("duplicate key: {0}")]
    Duplicate(String),
    /// A migration adds a column that exists.
    #[error("{0}")]
    DuplicateColumn(String),
    /// A value does not fit its column.
    #[error("{0}")]
    TooLong(String),
    /// No node of this daemon is a member of the cluster any longer. See docs/decisions/0050.
    #[error("{0}")]
    StaleEpoch(String),
    /// The database cannot be reached or is not ready.
    #[error("unavailable: {0}")]
    Unavailable(String),
    /// The response to a commit is lost, so it is unknown whether the transaction took effect.
    #[error("outcome unknown: {0}")]
    OutcomeUnknown(String),
    /// The disk of the database is full or fails.
    #[error("disk full: {0}")]
    DiskFull(String),
    /// The database does not accept writes.
    #[error("read-only: {0}")]
    ReadOnly(String),
    /// A bug, a wrong configuration or a damaged database.
    #[error("{0}")]
    Internal(String),
}

impl StoreError {
    /// Turns a duplicate key into a conflict, for transactions that find the row when they are retried.
    #[must_use]
    pub fn retry_duplicate(self) -> Self {
        match self {
            Self::Duplicate(reason) => Self::Conflict(reason),
            other => other,
        }
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Conflict(reason)
            | StoreError::Unavailable(reason)
            | StoreError::DiskFull(reason)
            | StoreError::ReadOnly(reason)
                if has_committed() =>
            {
                tracing::warn!(%reason, "database failed after a part of a change was committed");
                outcome_unknown()
            }
            StoreError::Conflict(reason) => {
                tracing::warn!(%reason, "transaction failed after repeated conflicts");
                Self::Contended
            }
            StoreError::Unavailable(reason) => {
                tracing::warn!(%reason, "database unavailable");
                Self::database_unavailable()
            }
            StoreError::OutcomeUnknown(reason) => {
                tracing::warn!(%reason, "lost the response to a commit");
                outcome_unknown()
            }
            StoreError::StaleEpoch(reason) => Self::StaleEpoch(reason),
            StoreError::DiskFull(reason) => {
                tracing::error!(%reason, "failed to write to the disk of the database");
                Self::Unavailable(
                    "database unavailable: its disk is full or fails, please retry when the operator has repaired it"
                        .into(),
                )
            }
            StoreError::ReadOnly(reason) => {
                tracing::warn!(%reason, "database is read-only");
                Self::Unavailable("database unavailable: it is read-only, please retry".into())
            }
            StoreError::TooLong(reason) => {
                tracing::warn!(%reason, "failed to store a value");
                Self::TooLong("a value is longer than can be stored".into())
            }
            StoreError::Duplicate(reason)
            | StoreError::DuplicateColumn(reason)
            | StoreError::Internal(reason) => Self::Internal(format!("store: {reason}")),
        }
    }
}

fn outcome_unknown() -> Error {
    let text =
        "database unavailable: it is unknown whether the change was made, please check before you retry";
    Error::Unavailable(text.into())
}

/// The error of a transaction body: of the database or of the caller.
#[derive(Debug)]
pub enum TxError {
    Store(StoreError),
    Rejected(Error),
}

impl From<StoreError> for TxError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<Error> for TxError {
    fn from(error: Error) -> Self {
        Self::Rejected(error)
    }
}
