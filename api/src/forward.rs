//! Forwards requests that only the daemon of another node can answer.
//!
//! The caller's token is forwarded as well: every daemon of the cluster accepts it, and the receiving one verifies it
//! again.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use axum::response::{IntoResponse, Response};
use muster_types::Error;
use muster_types::node::NodeApi;

use crate::error::ApiResult;
use crate::request::Incoming;
use crate::response::{Documented, Success};
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::instance::locate;
use muster_control::objects::node_location::NodeLocation;
use muster_store::instances::InstanceRow;
use muster_store::nodes::NodeRow;

/// Marks a forwarded request, which is not forwarded again.
const FORWARDED: HeaderName = HeaderName::from_static("x-muster-handed-on");
const FORWARDED_REQUEST_HEADERS: &[HeaderName] =
    &[header::AUTHORIZATION, header::RANGE, header::IF_RANGE, header::CONTENT_LENGTH, header::CONTENT_TYPE];
const FORWARDED_RESPONSE_HEADERS: &[HeaderName] = &[
    header::CONTENT_TYPE,
    header::CONTENT_LENGTH,
    header::CONTENT_RANGE,
    header::ACCEPT_RANGES,
    header::ETAG,
    header::X_CONTENT_TYPE_OPTIONS,
];

/// The response of this daemon, or the one of the daemon that a request was forwarded to.
#[derive(Debug)]
pub(crate) enum MaybeForwarded<T> {
    Local(T),
    Forwarded(Response),
}

impl<T: IntoResponse> IntoResponse for MaybeForwarded<T> {
    fn into_response(self) -> Response {
        match self {
            Self::Local(response) => response.into_response(),
            Self::Forwarded(response) => response,
        }
    }
}

impl<T: Documented> Documented for MaybeForwarded<T> {
    fn success() -> Option<Success> {
        T::success()
    }
}

/// Extracts a request as it arrived, to forward it.
#[derive(Debug)]
pub(crate) struct OriginalRequest {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
}

impl FromRequestParts<Arc<App>> for OriginalRequest {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, Infallible> {
        let incoming = parts.extensions.get::<Incoming>();
        Ok(Self {
            method: parts.method.clone(),
            uri: parts.uri.clone(),
            headers: parts.headers.clone(),
            body: incoming.map(|incoming| incoming.body.clone()).unwrap_or_default(),
        })
    }
}

impl OriginalRequest {
    pub(crate) fn uri(&self) -> &Uri {
        &self.uri
    }

    pub(crate) fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// Forwards the request to the daemon of `node` and returns its response.
    pub(crate) async fn forward(self, app: &App, node: &NodeRow, caller: &Caller) -> ApiResult<Response> {
        let body = reqwest::Body::from(self.body.clone());
        self.forward_with(app, node, caller, body).await
    }

    /// Forwards the request with a body that is still arriving.
    pub(crate) async fn forward_with(
        self,
        app: &App,
        node: &NodeRow,
        caller: &Caller,
        body: reqwest::Body,
    ) -> ApiResult<Response> {
        let name = &node.identity.name;
        let unavailable = || {
            Error::Unavailable(format!("peer node {name} did not answer the proxied request, please retry"))
        };
        if node.report.api_url.is_empty() || self.headers.contains_key(&FORWARDED) {
            return Err(unavailable().into());
        }
        let path = self.uri.path_and_query().map_or("/", |path| path.as_str());
        let mut headers = HeaderMap::new();
        copy_headers(&self.headers, &mut headers, FORWARDED_REQUEST_HEADERS);
        headers.insert(FORWARDED, HeaderValue::from_static("1"));
        let received = app
            .peers
            .get()?
            .request(self.method, format!("{}{path}", node.report.api_url))
            .headers(headers)
            .header("x-request-id", &caller.request_id)
            .body(body)
            .send()
            .await
            .map_err(|error| {
                tracing::warn!(node = name, %error, "failed to forward request to peer");
                unavailable()
            })?;
        let mut response = Response::new(Body::empty());
        *response.status_mut() = received.status();
        copy_headers(received.headers(), response.headers_mut(), FORWARDED_RESPONSE_HEADERS);
        *response.body_mut() = Body::from_stream(received.bytes_stream());
        Ok(response)
    }
}

fn copy_headers(from: &HeaderMap, to: &mut HeaderMap, names: &[HeaderName]) {
    for name in names {
        if let Some(value) = from.get(name) {
            to.insert(name, value.clone());
        }
    }
}

/// Where a request about an instance is answered.
pub(crate) enum InstanceNode {
    Local(Arc<dyn NodeApi>),
    /// The daemon of another node has answered.
    Forwarded(Response),
    /// The instance is not placed on a node.
    Unplaced,
}

impl InstanceNode {
    /// Finds the node of an instance, and forwards the request if the node belongs to another daemon.
    pub(crate) async fn find(
        app: &App,
        caller: &Caller,
        instance: &InstanceRow,
        request: OriginalRequest,
    ) -> ApiResult<Self> {
        match locate(app, instance).await? {
            None => Ok(Self::Unplaced),
            Some(NodeLocation::Local(node)) => Ok(Self::Local(node)),
            Some(NodeLocation::Remote(node)) => {
                request.forward(app, &node, caller).await.map(Self::Forwarded)
            }
        }
    }
}

/// The error for a created instance without a node, which the store rules out.
pub(crate) fn unplaced() -> Error {
    Error::Internal("a created instance has no node".into())
}
