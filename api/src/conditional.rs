//! Tags of records, `If-None-Match` and `If-Match`. See docs/decisions/0088.

use std::collections::HashSet;
use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, digest};
use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Request};
use axum::http::header::{AUTHORIZATION, COOKIE, ETAG, IF_MATCH, IF_NONE_MATCH};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use muster_types::Error;
use tokio::sync::OwnedMutexGuard;
use tower::ServiceExt as _;

use crate::arguments::form_pairs;
use crate::error::ApiError;
use crate::etag;
use crate::forward::is_forwarded;
use crate::incoming::Incoming;
use crate::response::RecordedBody;
use muster_control::auth::Caller;
use muster_control::state::ObjectLocks;
use muster_store::{ObjectRow, Precondition, beside_change, require_precondition};

/// The tables of the objects below these paths, with the primary key, and the field of a record that contains it.
const OBJECT_TABLES: &[(&str, &str, &str, &str)] = &[
    ("/instances/", "instances", "uuid", "uuid"),
    ("/networks/", "networks", "uuid", "uuid"),
    ("/artifacts/", "artifacts", "uuid", "uuid"),
    ("/interfaces/", "interfaces", "uuid", "uuid"),
    ("/blobs/", "blobs", "uuid", "uuid"),
    ("/nodes/", "nodes", "uuid", "uuid"),
    ("/auth/namespaces/", "namespaces", "name", "name"),
];

/// The routes that return records, and the router that serves them.
pub(crate) struct RecordRoutes {
    router: Router,
    templates: HashSet<String>,
    /// One lock for each record and namespace of callers, so that no request waits for those of another namespace.
    locks: ObjectLocks<(String, String)>,
}

/// The paths of the records that a request is about.
#[derive(Debug, PartialEq, Eq)]
struct RecordPaths<'a> {
    /// The record that is changed: the longest part of the path of the request that is a record.
    record: &'a str,
    /// The object that the record belongs to: the shortest such part.
    object: &'a str,
}

/// Reads records as the caller of a request.
#[derive(Clone)]
struct RecordReader {
    router: Router,
    headers: HeaderMap,
    query: String,
    incoming: Option<Incoming>,
}

impl RecordRoutes {
    pub(crate) fn new(router: Router, templates: HashSet<String>) -> Self {
        Self { router, templates, locks: ObjectLocks::default() }
    }

    /// Returns the records that a request is about.
    fn paths<'a>(&self, template: &str, path: &'a str) -> Option<RecordPaths<'a>> {
        let ends = |text: &str| {
            let mut ends: Vec<usize> = text.match_indices('/').map(|(at, _)| at).skip(1).collect();
            ends.push(text.len());
            ends
        };
        let mut records = ends(template)
            .into_iter()
            .zip(ends(path))
            .filter(|(end, _)| self.templates.contains(&template[..*end]))
            .map(|(_, end)| &path[..end]);
        let object = records.next()?;
        Some(RecordPaths { record: records.next_back().unwrap_or(object), object })
    }

    fn reader(&self, request: &Parts) -> RecordReader {
        let query = request.uri.query().unwrap_or_default();
        let namespace = form_pairs(query).filter(|(name, _)| name == "namespace");
        let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(namespace).finish();
        let headers = [AUTHORIZATION, COOKIE].into_iter();
        let headers = headers.filter_map(|name| Some((name.clone(), request.headers.get(name)?.clone())));
        let incoming = request.extensions.get::<Incoming>();
        let incoming = incoming.map(|incoming| Incoming { body: bytes::Bytes::new(), ..incoming.clone() });
        RecordReader { router: self.router.clone(), headers: headers.collect(), query, incoming }
    }
}

impl RecordReader {
    async fn read(&self, path: &str) -> Response {
        let mut builder = Request::builder().method(Method::GET).uri(format!("{path}?{}", self.query));
        if let Some(headers) = builder.headers_mut() {
            headers.extend(self.headers.clone());
        }
        if let Some(incoming) = &self.incoming {
            builder = builder.extension(incoming.clone());
        }
        match builder.body(Body::empty()) {
            Ok(read) => self.router.clone().oneshot(read).await.unwrap_or_else(|never| match never {}),
            Err(error) => ApiError(Error::Internal(error.to_string())).into_response(),
        }
    }

    /// Returns the row of the object at a path, if it is known.
    async fn row(&self, path: &str) -> Option<ObjectRow> {
        let (_, table, key_column, field) =
            OBJECT_TABLES.iter().find(|(prefix, ..)| path.starts_with(prefix))?;
        let response = self.read(path).await;
        let record = response.extensions().get::<RecordedBody>()?;
        let record: serde_json::Value = serde_json::from_slice(&record.0).ok()?;
        Some(ObjectRow { table, key_column, key: record[field].as_str()?.to_owned() })
    }
}

/// Returns whether a record has one of the tags of a header.
fn is_current(record: &Response, tags: &HeaderValue) -> bool {
    record.headers().get(ETAG).is_some_and(|tag| etag::matches(tags, tag))
}

fn has_changed(path: &str) -> Error {
    Error::PreconditionFailed(format!("If-Match: {path} has changed; read it again"))
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

/// Checks the header `If-Match` of a change, and lets the transaction that changes something check it again. Returns the lock
/// that other such changes of the record through this daemon wait for, or the response to a request that must not be executed.
pub(crate) async fn check(request: &Parts) -> Result<Option<OwnedMutexGuard<()>>, Response> {
    let Some(tags) = request.headers.get(IF_MATCH) else { return Ok(None) };
    let refuse = |error: Error| ApiError(error).into_response();
    let routes = request.extensions.get::<Arc<RecordRoutes>>();
    let template = request.extensions.get::<MatchedPath>();
    let paths = routes.zip(template).and_then(|(routes, template)| {
        routes.paths(template.as_str(), request.uri.path()).map(|paths| (routes, paths))
    });
    let Some((routes, RecordPaths { record: path, object })) = paths else {
        return Err(refuse(Error::Invalid(
            "If-Match: not supported here, because no record has this path".into(),
        )));
    };
    // The daemon that has forwarded a request holds its own lock meanwhile. If this one waited as well, two daemons that
    // forward to each other could wait for each other.
    let lock = if is_forwarded(&request.headers) {
        None
    } else {
        let caller = request.extensions.get::<Caller>();
        let namespace = caller.map(|caller| caller.namespace.clone()).unwrap_or_default();
        Some(routes.locks.lock((namespace, path.to_owned())).await)
    };
    let reader = routes.reader(request);
    let current = reader.read(path).await;
    if current.status() != StatusCode::OK {
        return Err(current);
    }
    if !is_current(&current, tags) {
        let mut response = refuse(has_changed(path));
        response.headers_mut().extend(current.headers().get(ETAG).map(|tag| (ETAG, tag.clone())));
        return Err(response);
    }
    let row = reader.row(object).await;
    let (path, tags) = (path.to_owned(), tags.clone());
    require_precondition(Precondition::new(row, move || {
        let (reader, path, tags) = (reader.clone(), path.clone(), tags.clone());
        async move {
            let current = beside_change(reader.read(&path)).await;
            if is_current(&current, &tags) { Ok(()) } else { Err(has_changed(&path)) }
        }
    }));
    Ok(lock)
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
            let paths = routes.paths(template, path);
            assert_eq!(paths.as_ref().map(|paths| paths.record), record, "{path}");
            if let Some(paths) = paths {
                assert!(["/instances/a", "/instances/a%2Fb", "/auth/namespaces/x"].contains(&paths.object));
            }
        }
    }
}
