//! Why an API call failed.

use reqwest::StatusCode;

/// Why an API call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request cannot be built from what the caller gave.
    #[error("{0}")]
    InvalidInput(String),
    /// The response is JSON, but not of the expected structure.
    #[error("{0}")]
    UnknownFormat(String),
    /// The server did not respond.
    #[error("cannot reach {url}: {reason}")]
    Unreachable { url: String, reason: String },
    /// The response is not one of this API.
    #[error("{url} does not respond like a muster API: {reason}")]
    UnexpectedResponse { url: String, reason: String },
    /// The server rejected the credentials.
    #[error("cannot log in to {url} as namespace {namespace}: {message}")]
    LoginRefused { url: String, namespace: String, status: u16, message: String },
    /// The credentials are valid but do not permit this call.
    #[error("namespace {namespace} may not do this: {message}")]
    NotAllowed { namespace: String, message: String },
    /// The server refused the call, with its own message.
    #[error("{message}")]
    Refused { status: u16, message: String },
    /// The server does not have the object, or the caller may not see it.
    #[error("{message}")]
    NotFound { path: String, message: String },
    /// The scheduler found no node, with the server's own message. `stage` is where the last candidate dropped out.
    #[error("{message}")]
    NotPlaced { status: u16, message: String, stage: String, transient: bool },
}

impl Error {
    /// Returns the HTTP status, if the server responded with one.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::InvalidInput(_)
            | Self::UnknownFormat(_)
            | Self::Unreachable { .. }
            | Self::UnexpectedResponse { .. } => None,
            Self::LoginRefused { status, .. }
            | Self::Refused { status, .. }
            | Self::NotPlaced { status, .. } => Some(*status),
            Self::NotAllowed { .. } => Some(StatusCode::UNAUTHORIZED.as_u16()),
            Self::NotFound { .. } => Some(StatusCode::NOT_FOUND.as_u16()),
        }
    }

    /// Returns whether the server responded that the object does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.status() == Some(StatusCode::NOT_FOUND.as_u16())
    }

    /// Returns the path of the object that does not exist.
    #[must_use]
    pub fn not_found_path(&self) -> Option<&str> {
        match self {
            Self::NotFound { path, .. } => Some(path),
            _ => None,
        }
    }

    /// Returns whether another attempt may succeed without a change by the caller.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::InvalidInput(_)
            | Self::UnknownFormat(_)
            | Self::UnexpectedResponse { .. }
            | Self::NotFound { .. }
            | Self::NotPlaced { .. } => false,
            Self::LoginRefused { .. } | Self::NotAllowed { .. } | Self::Refused { .. } => {
                matches!(self.status(), Some(408 | 429 | 500 | 502..=504))
            }
        }
    }
}

/// The result of an API call.
pub type Result<T, E = Error> = std::result::Result<T, E>;
