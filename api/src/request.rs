//! The part of request handling that all routes share: request id, path normalization, error bodies, request events.

use std::collections::HashSet;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::MatchedPath;
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt as _;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame};
use muster_types::Error;
use parking_lot::Mutex;
use tower::ServiceExt as _;
use utoipa::openapi::OpenApi;

use crate::access::RouteInfo;
use crate::compression::{accepts_gzip, compress};
use crate::conditional::RecordRoutes;
use crate::document::Document;
use crate::error::{ApiError, error_response, panicked};
use crate::incoming::Incoming;
use crate::request_events::{RecordableRoutes, RequestEvents};
use crate::response::{protect, with_members};

use muster_control::app::App;
use muster_control::traces::{self, Span, TRACEPARENT};

/// The route of requests whose path no route has.
const UNMATCHED: &str = "unmatched";
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The maximum length of a caller's request id, which becomes an object id.
const MAX_ID_LENGTH: usize = 128;
/// The maximum number of bytes that are read after a request was rejected.
const MAX_DRAINED_BYTES: usize = 16 << 20;
/// How long the rest of a rejected request may pause.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// The maximum time for draining a body.
const MAX_DRAIN_TIME: Duration = Duration::from_secs(10);

/// Returns a method for metrics. Clients can invent any number of others.
fn method_label(method: &Method) -> &str {
    let known = [
        Method::GET,
        Method::HEAD,
        Method::POST,
        Method::PUT,
        Method::DELETE,
        Method::OPTIONS,
        Method::PATCH,
    ];
    if known.contains(method) { method.as_str() } else { "other" }
}

/// Adds the template of the route to a response, for the metrics.
pub(crate) async fn name_route(route: MatchedPath, request: Request<Body>, next: Next) -> Response {
    let mut response = next.run(request).await;
    response.extensions_mut().insert(route);
    response
}

/// Returns whether a request without a token was accepted because of the credentials in it: a login, an exchange, a ticket or an
/// invitation. Anyone can send any number of others.
fn has_used_credentials(method: &Method, status: StatusCode) -> bool {
    *method == Method::POST && status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS
}

/// The API as a service.
#[derive(Clone)]
pub struct Service {
    app: Arc<App>,
    router: Router,
    document: Document,
    recordable: Arc<RecordableRoutes>,
    records: Arc<RecordRoutes>,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Service")
    }
}

impl Service {
    pub(crate) fn new(
        app: Arc<App>,
        router: Router,
        document: OpenApi,
        routes: &[RouteInfo],
        records: HashSet<String>,
    ) -> Self {
        let document = Document::new(document, &app.settings);
        let recordable = Arc::new(RecordableRoutes::new(routes));
        let records = Arc::new(RecordRoutes::new(router.clone(), records));
        Self { app, router, document, recordable, records }
    }

    /// Returns the OpenAPI document as text.
    #[must_use]
    pub fn openapi(&self) -> &str {
        self.document.text()
    }

    /// Handles a request. Never fails and never panics.
    pub async fn call<B>(&self, request: Request<B>, peer: SocketAddr) -> Response
    where
        B: BodyExt<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let started = Instant::now();
        let (mut parts, body) = request.into_parts();
        let id = request_id(&parts.headers);
        let id_header = HeaderValue::from_str(&id).expect("a request id is visible ASCII");
        let trailing_slash = parts.uri.path().ends_with('/');
        parts.uri = normalize(parts.uri);
        let (method, uri) = (parts.method.clone(), parts.uri.clone());
        let accepts_gzip = accepts_gzip(&parts.headers);
        let (remote, source) = addresses(peer);
        let events = RequestEvents::new(&self.app, &self.recordable, &id, &source, (&method, &uri));
        let traceparent = parts.headers.get(TRACEPARENT).and_then(|value| value.to_str().ok());
        let span = if events.is_unrecorded() { None } else { self.app.traces.begin_request(traceparent) };
        let events = Arc::new(events);
        let body = SharedBody::new(Body::new(body));
        // Object names are UTF-8.
        let mut response = if is_utf8(uri.path()) {
            let incoming = Incoming { id: id.clone(), remote, source, trailing_slash, body: Bytes::new() };
            parts.extensions.insert(incoming);
            parts.extensions.insert(self.document.clone());
            parts.extensions.insert(Arc::clone(&self.records));
            parts.extensions.insert(Arc::clone(&events));
            let request = Request::from_parts(parts, Body::new(body.clone()));
            traces::within(span.as_ref().map(Span::context), self.route(request)).await
        } else {
            not_found().await
        };
        let route = response.extensions().get::<MatchedPath>().cloned();
        if response.status() == StatusCode::METHOD_NOT_ALLOWED {
            response = method_not_allowed(&method, &response);
        }
        if !response.status().is_success() && response.status() != StatusCode::SWITCHING_PROTOCOLS {
            body.drain_in_background();
            response = with_members(response, [("request_id", id.as_str().into())]);
        }
        let route = route.as_ref().map_or(UNMATCHED, MatchedPath::as_str);
        if let Some(span) = span {
            // With the spans of other requests, anyone could displace those that matter.
            let is_admitted = events.is_authenticated() || has_used_credentials(&method, response.status());
            if is_admitted && route != UNMATCHED {
                self.end_span(span, method_label(&method), route, &id, response.status());
            }
        }
        self.app.metrics.responded(method_label(&method), route, response.status().as_u16(), started);
        tracing::debug!(%method, path = uri.path(), status = response.status().as_u16(), %peer, "request handled");
        events.responded(&response);
        protect(&mut response);
        response.headers_mut().insert(REQUEST_ID, id_header);
        compress(accepts_gzip, response)
    }

    /// Exports the span of a request.
    fn end_span(&self, mut span: Span, method: &str, route: &str, id: &str, status: StatusCode) {
        if !span.context().is_sampled() {
            return;
        }
        span.rename(format!("{method} {route}"));
        span.set_text("http.request.method", method);
        span.set_text("http.route", route);
        span.set_text("muster.request_id", id);
        span.set_number("http.response.status_code", status.as_u16().into());
        if status.is_server_error() {
            span.fail(status.canonical_reason().unwrap_or_default());
        }
        self.app.traces.end(span);
    }

    /// Calls the guard and the handler of a request.
    async fn route(&self, request: Request<Body>) -> Response {
        match AssertUnwindSafe(self.router.clone().oneshot(request)).catch_unwind().await {
            Ok(Ok(response)) => response,
            Err(_) => panicked(),
        }
    }
}

/// Returns the address of a peer, and the address that limits count. A host with IPv6 usually owns a whole /64 network.
fn addresses(peer: SocketAddr) -> (String, String) {
    let remote = peer.ip().to_canonical();
    let source = match remote {
        IpAddr::V4(_) => remote,
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    };
    (remote.to_string(), source.to_string())
}

/// A body that the guard or the handler reads first, and the service drains afterwards.
#[derive(Clone)]
struct SharedBody(Arc<Mutex<Body>>);

impl SharedBody {
    fn new(body: Body) -> Self {
        Self(Arc::new(Mutex::new(body)))
    }

    /// Reads a limited part of the unread body while the response is sent. Many clients read the response only after
    /// they have sent everything; if the connection were closed earlier, they would not see why the request failed.
    fn drain_in_background(self) {
        if !self.is_end_stream() {
            // Limited in total too: a slow sender must not keep the connection.
            tokio::spawn(tokio::time::timeout(MAX_DRAIN_TIME, self.drain()));
        }
    }

    async fn drain(mut self) {
        let mut remaining = MAX_DRAINED_BYTES;
        while let Ok(Some(Ok(frame))) = tokio::time::timeout(DRAIN_TIMEOUT, self.frame()).await {
            remaining = remaining.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
            if remaining == 0 {
                break;
            }
        }
    }
}

impl HttpBody for SharedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut body = self.0.lock();
        Pin::new(&mut *body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.0.lock().is_end_stream()
    }
}

/// Returns the caller's request id if it is valid, or a new one.
fn request_id(headers: &HeaderMap) -> String {
    headers
        .get(REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .filter(|id| {
            !id.is_empty() && id.len() <= MAX_ID_LENGTH && id.bytes().all(|byte| byte.is_ascii_graphic())
        })
        // Time-ordered ids keep events of the same time together in the database.
        .map_or_else(|| uuid::Uuid::now_v7().to_string(), str::to_owned)
}

/// Returns whether a path is valid UTF-8 once it is decoded.
fn is_utf8(path: &str) -> bool {
    !path.contains('%') || percent_encoding::percent_decode_str(path).decode_utf8().is_ok()
}

/// Removes trailing slashes and duplicate leading ones, which base URLs with a trailing slash produce.
fn normalize(uri: Uri) -> Uri {
    let path = uri.path();
    if (path.len() <= 1 || !path.ends_with('/')) && !path.starts_with("//") {
        return uri;
    }
    let path = format!("/{}", path.trim_matches('/'));
    let path_and_query = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path,
    };
    let Ok(path_and_query) = PathAndQuery::try_from(path_and_query) else { return uri };
    let mut parts = uri.into_parts();
    parts.path_and_query = Some(path_and_query);
    Uri::from_parts(parts).expect("only the path of a valid URI was replaced")
}

/// Returns 405 with the common error shape, or the response to OPTIONS.
fn method_not_allowed(method: &Method, response: &Response) -> Response {
    let allow = response.headers().get(header::ALLOW).cloned();
    let mut response = if method == Method::OPTIONS {
        Response::new(Body::empty())
    } else {
        error_response(StatusCode::METHOD_NOT_ALLOWED, "The method is not allowed for the requested URL.")
    };
    if let Some(allow) = allow {
        response.headers_mut().insert(header::ALLOW, allow);
    }
    response
}

/// Responds to a path without a route.
pub(crate) async fn not_found() -> Response {
    ApiError(Error::not_found("route")).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normalizes_slashes() {
        for (given, normalized) in [
            ("/", "/"),
            ("/auth", "/auth"),
            ("/auth/", "/auth"),
            ("//auth", "/auth"),
            ("//", "/"),
            ("/auth/namespaces/?limit=1", "/auth/namespaces?limit=1"),
            ("/a%2Fb/", "/a%2Fb"),
        ] {
            assert_eq!(normalize(given.parse().unwrap()).to_string(), normalized, "{given}");
        }
    }

    #[test]
    fn accepts_only_request_ids_that_can_be_object_ids() {
        let with = |id: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_str(id).unwrap());
            request_id(&headers)
        };
        assert_eq!(with("my-id-7"), "my-id-7");
        for bad in ["", "two words", &"x".repeat(129)] {
            assert_eq!(with(bad).len(), 36, "{bad}");
        }
    }
}
