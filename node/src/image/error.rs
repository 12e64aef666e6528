//! Why a host cannot handle images.

/// Why this host cannot handle images.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum ImagesError {
    /// The sandbox needs unprivileged user namespaces.
    #[error("images cannot be inspected: {0}")]
    NoUserNamespaces(String),
    #[error("images cannot be inspected: {0}")]
    Unusable(String),
}

impl From<String> for ImagesError {
    fn from(reason: String) -> Self {
        Self::Unusable(reason)
    }
}
