//! One error type, cut by what the caller can do about it.
//!
//! The HTTP layer maps each kind to a status; nothing else knows about statuses. The texts are shown
//! to the caller, except that of [`Error::Internal`], which only reaches the log.

use std::net::Ipv4Addr;

use crate::scheduling::SchedulingStage;

/// What went wrong, by what the caller can do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request is malformed; the text names the field.
    #[error("{0}")]
    Invalid(String),
    /// Well-formed, but a value is longer than we store.
    #[error("{0}")]
    TooLong(String),
    /// The caller must prove who it is, or is not who may do this.
    #[error("{0}")]
    Unauthenticated(String),
    /// The caller is known and may not do this.
    #[error("{0}")]
    Forbidden(String),
    /// There is no such thing, or none that the caller may see.
    #[error("{0}")]
    NotFound(String),
    /// The thing is not ready for this; waiting helps.
    #[error("{0}")]
    NotReady(String),
    /// The thing is in a state that does not allow this.
    #[error("{0}")]
    Conflict(String),
    /// The requested address is allocated to another object.
    #[error("address {0} in use")]
    AddressInUse(Ipv4Addr),
    /// A body was announced without its length.
    #[error("{0}")]
    LengthRequired(String),
    /// The body is larger than we read.
    #[error("{0}")]
    TooLarge(String),
    /// The caller asked too often; in so many seconds it may ask again.
    #[error("{text}")]
    TooManyRequests { text: String, retry_after: u64 },
    /// The caller did not send its request in time.
    #[error("{0}")]
    Timeout(String),
    /// There is no room left for it.
    #[error("{0}")]
    InsufficientCapacity(String),
    /// No node can take it; the stage is where the last candidate dropped out.
    #[error("{text}")]
    Unschedulable { text: String, stage: SchedulingStage },
    /// Other transactions prevented this one from committing, again and again; retrying helps.
    #[error("database unavailable, please retry")]
    Contended,
    /// Something we depend on is away; the same request may work later.
    #[error("{0}")]
    Unavailable(String),
    /// Another process on the node uses a console port of the VM; another port may work.
    #[error("{0}")]
    PortInUse(String),
    /// The operator has not set what this needs.
    #[error("{0}")]
    NotConfigured(String),
    /// Our own fault. The text is for the log, never for the caller.
    #[error("{0}")]
    Internal(String),
}

/// The result of nearly everything.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// `<kind> not found`, the one text for absent and invisible things.
    #[must_use]
    pub fn not_found(kind: &str) -> Self {
        Self::NotFound(format!("{kind} not found"))
    }

    /// The text for a database that does not answer.
    #[must_use]
    pub fn database_unavailable() -> Self {
        Self::Unavailable("database unavailable, please retry".into())
    }
}
