//! Asks the daemon of another node to answer a request that only it can.
//!
//! The caller's own token goes along: every daemon of the cluster accepts it, and the other one checks it anew.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use axum::response::Response;
use muster_types::Error;

use crate::error::ApiResult;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_store::nodes::NodeRow;

/// Marks a request that was handed on once: it is not handed on again.
const HANDED_ON: HeaderName = HeaderName::from_static("x-muster-handed-on");
/// Headers of a request, and of an answer, that go along.
const ASKED: &[HeaderName] =
    &[header::AUTHORIZATION, header::RANGE, header::IF_RANGE, header::CONTENT_LENGTH, header::CONTENT_TYPE];
const ANSWERED: &[HeaderName] = &[
    header::CONTENT_TYPE,
    header::CONTENT_LENGTH,
    header::CONTENT_RANGE,
    header::ACCEPT_RANGES,
    header::ETAG,
    header::X_CONTENT_TYPE_OPTIONS,
];

/// A request on its way to another daemon.
#[derive(Debug)]
pub(crate) struct Handed<'a> {
    pub(crate) method: Method,
    pub(crate) uri: &'a Uri,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) body: reqwest::Body,
}

impl<'a> Handed<'a> {
    /// A request that only reads.
    pub(crate) fn read(uri: &'a Uri, headers: &'a HeaderMap) -> Self {
        Self { method: Method::GET, uri, headers, body: reqwest::Body::default() }
    }
}

/// Hands a request on to the daemon of `node`, and its answer back.
pub(crate) async fn ask(app: &App, node: &NodeRow, caller: &Caller, request: Handed<'_>) -> ApiResult {
    let name = &node.identity.name;
    let silent =
        || Error::Unavailable(format!("peer node {name} did not answer the proxied request, please retry"));
    if node.report.api_url.is_empty() || request.headers.contains_key(&HANDED_ON) {
        return Err(silent().into());
    }
    let path = request.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut asked = HeaderMap::new();
    for name in ASKED {
        if let Some(value) = request.headers.get(name) {
            asked.insert(name, value.clone());
        }
    }
    asked.insert(HANDED_ON, HeaderValue::from_static("1"));
    let answer = app
        .peers
        .get()?
        .request(request.method, format!("{}{path}", node.report.api_url))
        .headers(asked)
        .header("x-request-id", &caller.request_id)
        .body(request.body)
        .send()
        .await
        .map_err(|error| {
            tracing::warn!(node = name, %error, "a peer does not answer");
            silent()
        })?;
    let mut response = Response::new(Body::empty());
    *response.status_mut() = answer.status();
    for name in ANSWERED {
        if let Some(value) = answer.headers().get(name) {
            response.headers_mut().insert(name, value.clone());
        }
    }
    *response.body_mut() = Body::from_stream(answer.bytes_stream());
    Ok(response)
}
