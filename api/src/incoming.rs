//! Requests as the API received them.

use axum::body::Bytes;
use axum::http::{Method, Uri};

use muster_control::auth::Origin;

/// The data of a request that handlers need besides its head.
#[derive(Debug, Clone)]
pub(crate) struct Incoming {
    pub(crate) id: String,
    pub(crate) remote: String,
    /// The address that limits count: the network of `remote` if it is an IPv6 address, else `remote`.
    pub(crate) source: String,
    /// Whether the path ended with a slash, which is removed.
    pub(crate) trailing_slash: bool,
    /// Empty until the guard has read it.
    pub(crate) body: Bytes,
}

impl Incoming {
    /// Returns the origin of the request for routes without a token.
    pub(crate) fn origin(&self) -> Origin<'_> {
        Origin { remote: &self.remote, source: &self.source, request_id: &self.id }
    }
}

/// Returns whether a request changes state. A login is a POST that does not; it has its own audit event.
pub(crate) fn is_change(method: &Method, uri: &Uri) -> bool {
    !method.is_safe() && !matches!(uri.path(), "/auth" | "/auth/session")
}

/// Returns whether a request sends a chunk of an upload. An upload has thousands, so they are recorded only when they
/// fail.
pub(crate) fn is_upload_chunk(method: &Method, uri: &Uri) -> bool {
    let rest = uri.path().strip_prefix("/upload/");
    *method == Method::POST && rest.is_some_and(|id| !id.is_empty() && !id.contains('/'))
}
