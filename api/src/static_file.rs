//! Files that do not change while the program runs: validated by their tags, and compressed once.

use std::sync::OnceLock;

use aws_lc_rs::digest::{SHA256, digest};
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;

use crate::compression::{CompressedBody, accepts_gzip, gzip};
use crate::etag;
use crate::response::content;

/// Browsers keep the files, but ask whether they have changed: another version of the program may have other files.
const CACHING: HeaderValue = HeaderValue::from_static("no-cache");

/// A file that does not change.
#[derive(Debug)]
pub(crate) struct StaticFile {
    content_type: &'static str,
    content: Bytes,
    etag: HeaderValue,
    /// `None` if it cannot be compressed. Set when a client first accepts it.
    compressed: OnceLock<Option<Bytes>>,
}

impl StaticFile {
    pub(crate) fn new(content_type: &'static str, content: impl Into<Bytes>) -> Self {
        let content = content.into();
        let etag = etag::of(&digest(&SHA256, &content));
        Self { content_type, content, etag, compressed: OnceLock::new() }
    }

    pub(crate) fn bytes(&self) -> &Bytes {
        &self.content
    }

    pub(crate) fn respond(&self, headers: &HeaderMap) -> Response {
        let known = headers.get(header::IF_NONE_MATCH).is_some_and(|tags| etag::matches(tags, &self.etag));
        let mut response =
            content(self.content_type, if known { Body::empty() } else { self.content.clone().into() });
        if known {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
        } else if accepts_gzip(headers)
            && let Some(compressed) = self.compressed.get_or_init(|| gzip(&self.content).ok())
        {
            response.extensions_mut().insert(CompressedBody(compressed.clone()));
        }
        let headers = response.headers_mut();
        headers.insert(header::ETAG, self.etag.clone());
        headers.insert(header::CACHE_CONTROL, CACHING);
        response
    }
}
