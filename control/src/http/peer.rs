//! Asks the daemon of another node to answer a request that only it can.
//!
//! The caller's own token goes along: every daemon of the cluster accepts it, and the other one checks it anew.

use std::sync::OnceLock;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use axum::response::Response;
use muster_types::Error;

use super::error::ApiResult;
use crate::app::App;
use crate::auth::Caller;
use crate::store::nodes::NodeRow;

/// Marks a request that was handed on once: it is not handed on again.
const HANDED_ON: HeaderName = HeaderName::from_static("x-muster-handed-on");
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a peer may say nothing: it may be reading a large file before it answers.
const SILENCE: Duration = Duration::from_secs(600);
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
pub(super) struct Handed<'a> {
    pub(super) method: Method,
    pub(super) uri: &'a Uri,
    pub(super) headers: &'a HeaderMap,
    pub(super) body: reqwest::Body,
}

impl<'a> Handed<'a> {
    /// A request that only reads.
    pub(super) fn read(uri: &'a Uri, headers: &'a HeaderMap) -> Self {
        Self { method: Method::GET, uri, headers, body: reqwest::Body::default() }
    }
}

/// Hands a request on to the daemon of `node`, and its answer back.
pub(super) async fn ask(app: &App, node: &NodeRow, caller: &Caller, request: Handed<'_>) -> ApiResult {
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
    let answer = client(app)
        .map_err(Error::Internal)?
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

/// One client for all peers, which also trusts the cluster's own certificate.
pub(crate) fn client(app: &App) -> Result<&'static reqwest::Client, String> {
    static CLIENT: OnceLock<Result<reqwest::Client, String>> = OnceLock::new();
    let made = CLIENT.get_or_init(|| {
        let mut builder =
            reqwest::Client::builder().connect_timeout(CONNECT_TIMEOUT).read_timeout(SILENCE).no_proxy();
        if !app.settings.tls_certificate.is_empty() {
            let pem = std::fs::read(&app.settings.tls_certificate).map_err(|e| e.to_string())?;
            for certificate in reqwest::Certificate::from_pem_bundle(&pem).map_err(|e| e.to_string())? {
                builder = builder.add_root_certificate(certificate);
            }
        }
        builder.build().map_err(|error| error.to_string())
    });
    made.as_ref().map_err(Clone::clone)
}
