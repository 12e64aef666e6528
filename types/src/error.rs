//! The shared error type, with one variant per possible reaction of the caller.
//!
//! Only the HTTP layer maps variants to status codes. Clients see the texts, except that of [`Error::Internal`],
//! which is only logged.

use std::net::Ipv4Addr;

use crate::ids::InstanceId;
use crate::scheduling::SchedulingStage;

/// A failed request.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request is malformed; the text names the field.
    #[error("{0}")]
    Invalid(String),
    /// A value exceeds the maximum length.
    #[error("{0}")]
    TooLong(String),
    /// The credentials are missing or not accepted.
    #[error("{0}")]
    Unauthenticated(String),
    /// The caller is authenticated, but not allowed to do this.
    #[error("{0}")]
    Forbidden(String),
    /// The object does not exist, or the caller may not see it.
    #[error("{0}")]
    NotFound(String),
    /// The object is not ready for this; a retry may succeed.
    #[error("{0}")]
    NotReady(String),
    /// The state of the object does not allow this.
    #[error("{0}")]
    Conflict(String),
    /// Another request is working on the same; `retry_after` is in seconds.
    #[error("{text}")]
    Busy { text: String, retry_after: u64 },
    /// The object is not the version that the caller has named.
    #[error("{0}")]
    PreconditionFailed(String),
    /// The request contradicts an earlier one of the caller.
    #[error("{0}")]
    Mismatch(String),
    /// The requested address is allocated to another object.
    #[error("address {0} in use")]
    AddressInUse(Ipv4Addr),
    /// The request has a body without a `Content-Length`.
    #[error("{0}")]
    LengthRequired(String),
    /// The body exceeds the maximum size.
    #[error("{0}")]
    TooLarge(String),
    /// The caller exceeded a rate limit; `retry_after` is in seconds.
    #[error("{text}")]
    TooManyRequests { text: String, retry_after: u64 },
    /// The caller did not send its request in time.
    #[error("{0}")]
    Timeout(String),
    /// Addresses, disk space or claimed capacity are exhausted.
    #[error("{0}")]
    InsufficientCapacity(String),
    /// No node is suitable for an instance; `stage` filtered out the last candidate. A retry may succeed if it is
    /// `transient`.
    #[error("{text}")]
    Unschedulable { text: String, stage: SchedulingStage, transient: bool },
    /// An instance could not be created. Its record in state `error` has the reason.
    #[error("{error}")]
    InstanceFailed { instance: InstanceId, error: Box<Error> },
    /// The transaction conflicted with others until its retries were used up; a later retry may succeed.
    #[error("database unavailable, please retry")]
    Contended,
    /// A dependency is unreachable; a retry may succeed.
    #[error("{0}")]
    Unavailable(String),
    /// This daemon is no longer a member of the cluster; another node can serve the request.
    #[error("{0}")]
    StaleEpoch(String),
    /// Another process on the node uses a console port of the VM; another port may work.
    #[error("{0}")]
    PortInUse(String),
    /// A required setting is not set.
    #[error("{0}")]
    NotConfigured(String),
    /// A bug or an unexpected failure. The text is logged and never sent to the caller.
    #[error("{0}")]
    Internal(String),
}

/// A [`std::result::Result`] with [`Error`] as the default error type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Returns the error for an object that does not exist or is not visible to the caller: `<kind> not found`.
    #[must_use]
    pub fn not_found(kind: &str) -> Self {
        Self::NotFound(format!("{kind} not found"))
    }

    /// Returns the error for an unreachable database.
    #[must_use]
    pub fn database_unavailable() -> Self {
        Self::Unavailable("database unavailable, please retry".into())
    }
}
