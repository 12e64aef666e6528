//! Forwards requests that only the daemon of another node can answer.
//!
//! The caller's token is not: each request has a service key of its own, whose token names the caller, and the receiving
//! daemon checks again what the caller may do. See docs/decisions/0043.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use muster_types::Error;
use muster_types::node::{HostFeature, NodeApi};

use crate::authorized_stream::AuthorizedStream;
use crate::error::ApiResult;
use crate::incoming::Incoming;
use crate::response::{Documented, Success};
use crate::upgrade::Upgrade;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::instance::{console, locate};
use muster_control::objects::node_location::NodeLocation;
use muster_control::objects::service_key::ServiceKey;
use muster_control::peer::{STALL_TIMEOUT, until_stalled};
use muster_store::instances::InstanceRow;
use muster_store::nodes::NodeRow;
use muster_store::{beside_change, current_lease};

/// The lease under which a daemon executes the request of another one: its hash and its owner. See docs/decisions/0088.
pub(crate) const IDEMPOTENCY_LEASE: HeaderName = HeaderName::from_static("x-muster-idempotency-lease");
const FORWARDED: HeaderName = HeaderName::from_static(muster_control::peer::FORWARDED);
const FORWARDED_REQUEST_HEADERS: &[HeaderName] =
    &[header::RANGE, header::IF_RANGE, header::IF_MATCH, header::CONTENT_LENGTH, header::CONTENT_TYPE];
const FORWARDED_RESPONSE_HEADERS: &[HeaderName] = &[
    header::CONTENT_TYPE,
    header::CONTENT_LENGTH,
    header::CONTENT_RANGE,
    header::ACCEPT_RANGES,
    header::ETAG,
    header::RETRY_AFTER,
];

/// Returns whether another daemon has sent a request with these headers.
pub(crate) fn is_forwarded(headers: &HeaderMap) -> bool {
    headers.contains_key(&FORWARDED)
}

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
    /// Creates a request for a path, to send it in place of the one that arrived.
    pub(crate) fn get(path: &str) -> Result<Self, Error> {
        let uri = path.parse().map_err(|error| Error::Internal(format!("{path}: {error}")))?;
        Ok(Self { method: Method::GET, uri, headers: HeaderMap::new(), body: Bytes::new() })
    }

    /// Creates a request with a JSON body, to send it in place of the one that arrived.
    pub(crate) fn post(path: &str, body: &serde_json::Value) -> Result<Self, Error> {
        let headers = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        let (headers, body) = (headers.into_iter().collect(), Bytes::from(body.to_string()));
        Ok(Self { method: Method::POST, headers, body, ..Self::get(path)? })
    }

    pub(crate) fn uri(&self) -> &Uri {
        &self.uri
    }

    /// Returns whether another daemon has sent the request.
    pub(crate) fn is_forwarded(&self) -> bool {
        is_forwarded(&self.headers)
    }

    pub(crate) fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// Forwards the request about an object of the namespace `owner` to the daemon of `node` and returns its response.
    pub(crate) async fn forward(
        self,
        app: &App,
        node: &NodeRow,
        caller: &Caller,
        owner: &str,
    ) -> ApiResult<Response> {
        let body = reqwest::Body::from(self.body.clone());
        self.forward_with(app, node, caller, owner, body).await
    }

    /// Forwards the request with a body that is still arriving.
    pub(crate) async fn forward_with(
        self,
        app: &App,
        node: &NodeRow,
        caller: &Caller,
        owner: &str,
        body: reqwest::Body,
    ) -> ApiResult<Response> {
        let received = self.send(app, node, caller, owner, |request| request.body(body)).await?;
        Ok(received_response(received))
    }

    /// Forwards a request that changes the protocol of its connection to that of a console, and connects both connections.
    pub(crate) async fn forward_upgrade(
        self,
        app: &App,
        node: &NodeRow,
        caller: &Caller,
        owner: &str,
        upgrade: Upgrade,
    ) -> ApiResult<Response> {
        let peer = self.connect(app, node, caller, owner, upgrade.protocol()).await?;
        let session = console::register(app, caller);
        let relay = |peer| upgrade.relay(AuthorizedStream::new(peer, session));
        Ok(peer.map_or_else(|refusal| refusal, relay))
    }

    /// Forwards a request that changes the protocol of its connection. Returns the connection, or the response of a
    /// daemon that refuses.
    pub(crate) async fn connect(
        self,
        app: &App,
        node: &NodeRow,
        caller: &Caller,
        owner: &str,
        protocol: &'static str,
    ) -> ApiResult<Result<reqwest::Upgraded, Response>> {
        let body = self.body.clone();
        let complete = |request: reqwest::RequestBuilder| {
            request.header(header::CONNECTION, "upgrade").header(header::UPGRADE, protocol).body(body)
        };
        let received = self.send(app, node, caller, owner, complete).await?;
        if received.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Ok(Err(received_response(received)));
        }
        Ok(Ok(received.upgrade().await.map_err(|error| no_answer(node, &error))?))
    }

    /// Sends the request to the daemon of `node` with a service key, after `complete` has added what it needs besides.
    async fn send(
        self,
        app: &App,
        node: &NodeRow,
        caller: &Caller,
        owner: &str,
        complete: impl FnOnce(reqwest::RequestBuilder) -> reqwest::RequestBuilder,
    ) -> Result<reqwest::Response, Error> {
        if self.is_forwarded() {
            return Err(no_answer(node, &"the request was forwarded already"));
        }
        let path = self.uri.path_and_query().map_or("/", |path| path.as_str());
        let mut headers = HeaderMap::new();
        copy_headers(&self.headers, &mut headers, FORWARDED_REQUEST_HEADERS);
        headers.insert(FORWARDED, HeaderValue::from_static("1"));
        if let Some(lease) = current_lease() {
            let value = HeaderValue::try_from(format!("{}:{}", lease.hash, lease.owner));
            let value = value.map_err(|error| Error::Internal(error.to_string()))?;
            headers.insert(IDEMPOTENCY_LEASE, value);
        }
        let request = app.peers.request(node, self.method, path).await;
        let request = request.map_err(|error| no_answer(node, &error))?;
        let key = beside_change(ServiceKey::for_caller(app, caller, owner)).await?;
        let request = request.headers(headers).header("x-request-id", &caller.request_id);
        let request = complete(request.bearer_auth(key.token()));
        // The closed connection shows the peer that the caller has given up.
        let received = tokio::select! {
            received = app.peers.forward(node, request, caller.deadline.expires()) => {
                received.map_err(|error| no_answer(node, &error))
            }
            error = caller.deadline.abandoned() => Err(error),
        };
        beside_change(key.remove(app)).await;
        received
    }
}

fn no_answer(node: &NodeRow, error: &dyn std::fmt::Display) -> Error {
    let name = &node.identity.name;
    tracing::warn!(node = name, %error, "failed to forward request to peer");
    // It may be the cause, which retrying does not remove.
    let hint =
        node.report.limits.get(&HostFeature::Api).map(|limit| format!(" ({limit})")).unwrap_or_default();
    Error::Unavailable(format!("peer node {name} did not answer the proxied request, please retry{hint}"))
}

/// Returns the response of a peer as the response of this daemon.
fn received_response(received: reqwest::Response) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = received.status();
    copy_headers(received.headers(), response.headers_mut(), FORWARDED_RESPONSE_HEADERS);
    *response.body_mut() = Body::from_stream(until_stalled(received.bytes_stream(), STALL_TIMEOUT));
    response
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
                request.forward(app, &node, caller, &instance.namespace).await.map(Self::Forwarded)
            }
        }
    }
}

/// The error for a created instance without a node, which the store rules out.
pub(crate) fn unplaced() -> Error {
    Error::Internal("a created instance has no node".into())
}
