//! The part of request handling that all routes share: request id, path normalization, body limits, request events.

use std::collections::HashSet;
use std::fmt;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt as _;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame};
use muster_types::Error;
use muster_types::event::Event;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;
use parking_lot::Mutex;
use serde_json::json;
use tower::ServiceExt as _;
use utoipa::openapi::OpenApi;

use crate::document::Document;
use crate::error::ApiError;
use crate::response::{RecordedBody, json_response};
use crate::table::{Access, RouteInfo};
use muster_control::app::App;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The path of token exchanges, which have their own body limit.
const EXCHANGE_PATH: &str = "/auth/federated";
/// The maximum length of a caller's request id, which becomes an object id.
const MAX_ID_LENGTH: usize = 128;
/// The maximum length of a body in a request event.
const MAX_RECORDED_BODY: usize = 1024;
/// Limits for reading the rest of a rejected upload chunk.
const MAX_DRAINED_BYTES: usize = 16 << 20;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Paths without request events.
const UNRECORDED_PATHS: &[&str] = &["/", "/livez", "/readyz", "/healthz", "/openapi.json"];

/// The data of a request that handlers need besides its head.
#[derive(Debug, Clone)]
pub(crate) struct Incoming {
    pub(crate) id: String,
    pub(crate) remote: String,
    pub(crate) body: Bytes,
}

/// The API as a service.
#[derive(Clone)]
pub struct Service {
    app: Arc<App>,
    router: Router,
    document: Document,
    /// First path segments of the routes whose bodies may be recorded in events.
    recordable: Arc<HashSet<String>>,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Service")
    }
}

impl Service {
    pub(crate) fn new(app: Arc<App>, router: Router, document: OpenApi, routes: &[RouteInfo]) -> Self {
        let document = Document::new(document, &app.settings);
        let guarded = routes.iter().filter(|route| route.access != Access::Public);
        let segments =
            guarded.filter_map(|route| first_segment(&route.path)).filter(|segment| *segment != "auth");
        let recordable = Arc::new(segments.map(str::to_owned).collect());
        Self { app, router, document, recordable }
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
        let (mut parts, body) = request.into_parts();
        let id = request_id(&parts.headers);
        let id_header = HeaderValue::from_str(&id).expect("a request id is visible ASCII");
        parts.uri = normalize(parts.uri);
        let (method, uri) = (parts.method.clone(), parts.uri.clone());

        let mut events = RequestEvents::new(self, &id, &method, &uri);
        // Upload chunks are streamed to disk; all other bodies are small documents.
        let mut unread = None;
        let (body, chunk) = if is_upload_chunk(&method, &uri) {
            let shared = SharedBody::new(Body::new(body));
            unread = Some(shared.clone());
            (Ok(Bytes::new()), Body::new(shared))
        } else {
            (self.read_body(self.body_limit(&method, &uri), &parts.headers, body).await, Body::empty())
        };
        let mut response = match body {
            // Object names are UTF-8.
            Ok(_) if !is_utf8(uri.path()) => not_found().await,
            Ok(body) => {
                events.received(&body);
                let incoming =
                    Incoming { id: id.clone(), remote: peer.ip().to_canonical().to_string(), body };
                parts.extensions.insert(incoming);
                parts.extensions.insert(self.document.clone());
                self.route(Request::from_parts(parts, chunk)).await
            }
            Err(error) => ApiError(error).into_response(),
        };
        if let Some(unread) = unread.filter(|_| !response.status().is_success()) {
            unread.drain().await;
        }
        if response.status() == StatusCode::METHOD_NOT_ALLOWED {
            response = method_not_allowed(&method, &response);
        }
        tracing::debug!(%method, path = uri.path(), status = response.status().as_u16(), %peer, "request handled");
        events.responded(&response);
        response.headers_mut().insert(REQUEST_ID, id_header);
        response
    }

    /// Returns the limit of a request body. Exchanges are not authenticated, so their bodies are short and need a length.
    fn body_limit(&self, method: &Method, uri: &Uri) -> BodyLimit {
        let max = self.app.settings.api_max_request_body_bytes;
        if method.is_safe() || uri.path() != EXCHANGE_PATH {
            return BodyLimit { max, length_required: false };
        }
        // Arguments may be in the query as well.
        let query = uri.query().map_or(0, |query| query.len() as u64);
        let max_exchange = self.app.settings.federation_max_token_bytes.saturating_sub(query);
        BodyLimit { max: max.min(max_exchange), length_required: true }
    }

    async fn read_body<B>(&self, limit: BodyLimit, headers: &HeaderMap, body: B) -> Result<Bytes, Error>
    where
        B: BodyExt<Data = Bytes>,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        if body.is_end_stream() && !limit.length_required {
            return Ok(Bytes::new());
        }
        let too_large = || Error::TooLarge("request body too large".into());
        let Some(length) = headers.get(header::CONTENT_LENGTH) else {
            return Err(Error::LengthRequired("a content-length is required".into()));
        };
        let length = length.to_str().ok().and_then(|text| text.parse::<u64>().ok());
        if length.is_none_or(|length| length > limit.max) {
            return Err(too_large());
        }
        let timeout = Duration::from_secs(self.app.settings.api_timeout);
        match tokio::time::timeout(timeout, body.collect()).await {
            Ok(Ok(body)) => Ok(body.to_bytes()),
            Ok(Err(_)) => Err(Error::Invalid("the request body ended early".into())),
            Err(_) => Err(Error::Timeout("the request body did not arrive in time".into())),
        }
    }

    /// Calls the handler. Changes run to completion even if the caller disconnects.
    async fn route(&self, request: Request<Body>) -> Response {
        let read_only = !is_change(request.method(), request.uri());
        let response = AssertUnwindSafe(self.router.clone().oneshot(request)).catch_unwind();
        let response = if read_only {
            response.await
        } else {
            let guard = self.app.begin_change().await;
            let change = tokio::spawn(async move {
                let _guard = guard;
                response.await
            });
            change.await.unwrap_or_else(|error| Err(Box::new(error)))
        };
        match response {
            Ok(Ok(response)) => response,
            Err(_) => ApiError(Error::Internal("a handler panicked".into())).into_response(),
        }
    }
}

/// The limit of a request body.
#[derive(Debug, Clone, Copy)]
struct BodyLimit {
    /// In bytes.
    max: u64,
    /// Whether a content-length is required even without a body.
    length_required: bool,
}

/// A body that the handler reads first, and the service drains afterwards.
#[derive(Clone)]
struct SharedBody(Arc<Mutex<Body>>);

impl SharedBody {
    fn new(body: Body) -> Self {
        Self(Arc::new(Mutex::new(body)))
    }

    /// Reads a limited part of the unread body. Many clients read the response only after they have sent everything; if
    /// the connection were closed earlier, they would not see why the request failed.
    async fn drain(mut self) {
        let mut remaining = MAX_DRAINED_BYTES;
        let drained = async {
            while let Some(Ok(frame)) = self.frame().await {
                let size = frame.data_ref().map_or(0, Bytes::len);
                remaining = remaining.saturating_sub(size);
                if remaining == 0 {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, drained).await;
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

/// Returns 405 with the text that released clients expect, or the response to OPTIONS.
fn method_not_allowed(method: &Method, response: &Response) -> Response {
    let allow = response.headers().get(header::ALLOW).cloned();
    let mut response = if method == Method::OPTIONS {
        Response::new(Body::empty())
    } else {
        let text = "The method is not allowed for the requested URL.";
        json_response(StatusCode::METHOD_NOT_ALLOWED, &json!({ "message": text }))
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

/// Returns whether a request changes state. A login is a POST that does not; it has its own audit event.
fn is_change(method: &Method, uri: &Uri) -> bool {
    !method.is_safe() && uri.path() != "/auth"
}

/// Returns whether a request sends a chunk of an upload. An upload has thousands, so they are recorded only when they
/// fail.
pub(crate) fn is_upload_chunk(method: &Method, uri: &Uri) -> bool {
    let rest = uri.path().strip_prefix("/upload/");
    *method == Method::POST && rest.is_some_and(|id| !id.is_empty() && !id.contains('/'))
}

fn first_segment(path: &str) -> Option<&str> {
    path.trim_start_matches('/').split('/').next().filter(|segment| !segment.is_empty())
}

/// The events of one request: recorded for changes and errors, and for reads if configured. See docs/decisions/0005.
struct RequestEvents<'a> {
    service: &'a Service,
    id: &'a str,
    method: &'a Method,
    uri: &'a Uri,
    /// Unix time of the arrival.
    arrived: f64,
    body: Bytes,
    recorded: bool,
}

impl<'a> RequestEvents<'a> {
    fn new(service: &'a Service, id: &'a str, method: &'a Method, uri: &'a Uri) -> Self {
        Self { service, id, method, uri, arrived: now(), body: Bytes::new(), recorded: false }
    }

    fn is_unrecorded(&self) -> bool {
        UNRECORDED_PATHS.contains(&self.uri.path()) || self.uri.path().starts_with("/apidocs")
    }

    /// A login may be sent to a wrong path by mistake, so only bodies for known routes are recorded.
    fn may_record_body(&self) -> bool {
        first_segment(self.uri.path()).is_some_and(|segment| self.service.recordable.contains(segment))
    }

    fn recorded_body(&self, body: &[u8]) -> String {
        if body.is_empty() {
            String::new()
        } else if !self.may_record_body() {
            "...body not logged as this route handles credentials...".to_owned()
        } else if body.len() > MAX_RECORDED_BODY {
            "...body not logged as it is too long...".to_owned()
        } else {
            String::from_utf8_lossy(body).into_owned()
        }
    }

    /// Records the request, once its body has arrived.
    fn received(&mut self, body: &Bytes) {
        self.body = body.clone();
        let change = is_change(self.method, self.uri) && !is_upload_chunk(self.method, self.uri);
        let enabled = change || self.service.app.settings.api_request_events_for_reads;
        if enabled && !self.is_unrecorded() {
            self.record_arrival();
        }
    }

    fn record_arrival(&mut self) {
        self.recorded = true;
        // A query can contain the same secrets as a body.
        let url = if self.may_record_body() { self.uri.to_string() } else { self.uri.path().to_owned() };
        let body = self.recorded_body(&self.body);
        let mut event = self.event("api request received").with("url", url).with("body", body);
        event.timestamp = self.arrived;
        self.service.app.events.record_if_room(event);
    }

    fn event(&self, what: &str) -> Event {
        let object = ObjectRef::new(ObjectType::ApiRequest, self.id);
        let mut event = Event::audit(object, format!("{} {what}", self.method));
        event.request_id = Some(self.id.to_owned());
        event
    }

    /// Records the response.
    fn responded(&mut self, response: &Response) {
        let status = response.status();
        let failed = status.is_client_error() || status.is_server_error();
        if !self.recorded && (!failed || self.is_unrecorded()) {
            return;
        }
        if !self.recorded {
            self.record_arrival();
        }
        let body = response
            .extensions()
            .get::<RecordedBody>()
            .map(|body| self.recorded_body(&body.0))
            .unwrap_or_default();
        let mut event = self.event("api response sent").with("status", status.as_u16()).with("body", body);
        event.duration = Some((now() - self.arrived).max(0.0));
        self.service.app.events.record_if_room(event);
    }
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
