//! Tags of records, `If-None-Match` and `If-Match`. See docs/decisions/0088.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, digest};
use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Request};
use axum::http::header::{AUTHORIZATION, COOKIE, ETAG, IF_MATCH, IF_NONE_MATCH};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use muster_types::Error;
use tokio::sync::{Mutex, OwnedMutexGuard};
use tower::ServiceExt as _;

use crate::arguments::form_pairs;
use crate::error::ApiError;
use crate::etag;
use crate::incoming::Incoming;
use crate::response::RecordedBody;

/// The number of locks of records, which are chosen by a hash.
const LOCKS: usize = 64;

/// The routes that return records, and the router that serves them.
pub(crate) struct RecordRoutes {
    router: Router,
    templates: HashSet<String>,
    locks: Vec<Arc<Mutex<()>>>,
}

impl RecordRoutes {
    pub(crate) fn new(router: Router, templates: HashSet<String>) -> Self {
        Self { router, templates, locks: (0..LOCKS).map(|_| Arc::default()).collect() }
    }

    /// Returns the path of the record that a request changes: the longest part of its path that is a record.
    fn path<'a>(&self, template: &str, path: &'a str) -> Option<&'a str> {
        let ends = |text: &str| {
            let mut ends: Vec<usize> = text.match_indices('/').map(|(at, _)| at).skip(1).collect();
            ends.push(text.len());
            ends
        };
        let ends = ends(template).into_iter().zip(ends(path)).collect::<Vec<_>>();
        let longest = ends.into_iter().rev().find(|(end, _)| self.templates.contains(&template[..*end]));
        longest.map(|(_, end)| &path[..end])
    }

    /// Reads a record as the caller of a request.
    async fn read(&self, request: &Parts, path: &str) -> Response {
        let query = request.uri.query().unwrap_or_default();
        let namespace = form_pairs(query).filter(|(name, _)| name == "namespace");
        let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(namespace).finish();
        let mut builder = Request::builder().method(Method::GET).uri(format!("{path}?{query}"));
        for name in [AUTHORIZATION, COOKIE] {
            if let Some(value) = request.headers.get(&name) {
                builder = builder.header(name, value);
            }
        }
        if let Some(incoming) = request.extensions.get::<Incoming>() {
            builder = builder.extension(Incoming { body: bytes::Bytes::new(), ..incoming.clone() });
        }
        match builder.body(Body::empty()) {
            Ok(read) => self.router.clone().oneshot(read).await.unwrap_or_else(|never| match never {}),
            Err(error) => ApiError(Error::Internal(error.to_string())).into_response(),
        }
    }
}

/// Adds the tag of a record to a response. If the client knows this version, the response has no body.
pub(crate) fn add_tag(request: &HeaderMap, mut response: Response) -> Response {
    let Some(body) =
        response.extensions().get::<RecordedBody>().filter(|_| response.status() == StatusCode::OK)
    else {
        return response;
    };
    let tag = etag::of(&digest(&SHA256, &body.0));
    if request.get(IF_NONE_MATCH).is_some_and(|tags| etag::matches(tags, &tag)) {
        response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    }
    response.headers_mut().insert(ETAG, tag);
    response
}

/// Checks the header `If-Match` of a change. Returns a lock that other such changes of the record through this daemon wait
/// for, or the response to a request that must not be executed.
pub(crate) async fn check(request: &Parts) -> Result<Option<OwnedMutexGuard<()>>, Response> {
    let Some(tags) = request.headers.get(IF_MATCH) else { return Ok(None) };
    let refuse = |error: Error| ApiError(error).into_response();
    let routes = request.extensions.get::<Arc<RecordRoutes>>();
    let template = request.extensions.get::<MatchedPath>();
    let path = routes.zip(template).and_then(|(routes, template)| {
        routes.path(template.as_str(), request.uri.path()).map(|path| (routes, path))
    });
    let Some((routes, path)) = path else {
        return Err(refuse(Error::Invalid(
            "If-Match: not supported here, because no record has this path".into(),
        )));
    };
    let mut hasher = DefaultHasher::new();
    path.hash(&mut hasher);
    let index = usize::try_from(hasher.finish() % LOCKS as u64).unwrap_or_default();
    let lock = Arc::clone(&routes.locks[index]).lock_owned().await;
    let current = routes.read(request, path).await;
    if current.status() != StatusCode::OK {
        return Err(current);
    }
    match current.headers().get(ETAG) {
        Some(tag) if etag::matches(tags, tag) => Ok(Some(lock)),
        tag => {
            let text = format!("If-Match: {path} has changed; read it again");
            let mut response = refuse(Error::PreconditionFailed(text));
            if let Some(tag) = tag {
                response.headers_mut().insert(ETAG, tag.clone());
            }
            Err(response)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_record_that_a_path_belongs_to() {
        let templates = ["/instances/{ref}", "/instances/{ref}/metadata", "/auth/namespaces/{namespace}"];
        let routes = RecordRoutes::new(Router::new(), templates.map(str::to_owned).into());
        for (template, path, record) in [
            ("/instances/{ref}", "/instances/a", Some("/instances/a")),
            ("/instances/{ref}/poweroff", "/instances/a%2Fb/poweroff", Some("/instances/a%2Fb")),
            ("/instances/{ref}/metadata/{key}", "/instances/a/metadata/k", Some("/instances/a/metadata")),
            ("/auth/namespaces/{namespace}/keys", "/auth/namespaces/x/keys", Some("/auth/namespaces/x")),
            ("/instances", "/instances", None),
            ("/upload", "/upload", None),
        ] {
            assert_eq!(routes.path(template, path), record, "{path}");
        }
    }
}
