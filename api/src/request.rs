//! What every request goes through, matched or not: an id, a tidy path, limits on the body, request events.

use std::collections::HashSet;
use std::fmt;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
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
use serde_json::json;
use tower::ServiceExt as _;
use utoipa::openapi::OpenApi;

use crate::docs::Document;
use crate::error::ApiError;
use crate::exchanges;
use crate::response::{ShownBody, json_response};
use crate::table::{Access, RouteInfo};
use muster_control::app::App;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest request id taken from a caller: it becomes the id of an object.
const LONGEST_ID: usize = 128;
/// Bodies longer than this are not traced.
const LONGEST_TRACE: usize = 1024;
/// How much of a refused piece is taken in, and for how long.
const MOST_DRAINED: usize = 16 << 20;
const DRAIN_TIME: Duration = Duration::from_secs(10);
/// Paths that leave no request events.
const QUIET: &[&str] = &["/", "/livez", "/readyz", "/healthz", "/openapi.json"];

/// What is known of a request besides its head.
#[derive(Debug, Clone)]
pub(crate) struct Incoming {
    pub(crate) id: String,
    pub(crate) remote: String,
    pub(crate) body: Bytes,
}

/// The API: takes a request from the wire and answers it.
#[derive(Clone)]
pub struct Service {
    app: Arc<App>,
    router: Router,
    document: Document,
    /// First path segments of the routes whose bodies may be repeated in events.
    traced: Arc<HashSet<String>>,
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
        let traced = Arc::new(segments.map(str::to_owned).collect());
        Self { app, router, document, traced }
    }

    /// The OpenAPI document as text.
    #[must_use]
    pub fn openapi(&self) -> &str {
        self.document.text()
    }

    /// Answers a request. Never fails and never panics.
    pub async fn call<B>(&self, request: Request<B>, peer: SocketAddr) -> Response
    where
        B: BodyExt<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (mut parts, body) = request.into_parts();
        let id = request_id(&parts.headers);
        let id_header = HeaderValue::from_str(&id).unwrap_or(HeaderValue::from_static("invalid"));
        parts.uri = tidy(parts.uri);
        let (method, uri) = (parts.method.clone(), parts.uri.clone());

        let mut trace = Trace::new(self, &id, &method, &uri);
        // The bytes of an upload go to disk as they come; everything else is a small document.
        let mut rest = None;
        let (body, piece) = if is_piece(&method, &uri) {
            let shared = Shared::new(Body::new(body));
            rest = Some(shared.clone());
            (Ok(Bytes::new()), Body::new(shared))
        } else {
            (self.read_body(self.bounds(&method, &uri), &parts.headers, body).await, Body::empty())
        };
        let mut response = match body {
            // No object has a name that is not text.
            Ok(_) if !is_text(uri.path()) => not_found().await,
            Ok(body) => {
                trace.received(&body);
                let incoming =
                    Incoming { id: id.clone(), remote: peer.ip().to_canonical().to_string(), body };
                parts.extensions.insert(incoming);
                parts.extensions.insert(self.document.clone());
                self.route(Request::from_parts(parts, piece)).await
            }
            Err(error) => ApiError(error).into_response(),
        };
        if let Some(rest) = rest.filter(|_| !response.status().is_success()) {
            rest.drain().await;
        }
        if response.status() == StatusCode::METHOD_NOT_ALLOWED {
            response = wrong_method(&method, &response);
        }
        tracing::debug!(%method, path = uri.path(), status = response.status().as_u16(), %peer, "answered");
        trace.answered(&response);
        response.headers_mut().insert(REQUEST_ID, id_header);
        response
    }

    /// How much a request may say. Strangers can make us work with an exchange, so it is short and says how long it is.
    fn bounds(&self, method: &Method, uri: &Uri) -> Bounds {
        let most = self.app.settings.api_max_request_body_bytes;
        if method.is_safe() || uri.path() != exchanges::PATH {
            return Bounds { most, length_needed: false };
        }
        // What is not in the body may be in the query.
        let query = uri.query().map_or(0, |query| query.len() as u64);
        let most_here = self.app.settings.federation_max_token_bytes.saturating_sub(query);
        Bounds { most: most.min(most_here), length_needed: true }
    }

    async fn read_body<B>(&self, bounds: Bounds, headers: &HeaderMap, body: B) -> Result<Bytes, Error>
    where
        B: BodyExt<Data = Bytes>,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        if body.is_end_stream() && !bounds.length_needed {
            return Ok(Bytes::new());
        }
        let too_large = || Error::TooLarge("request body too large".into());
        let Some(length) = headers.get(header::CONTENT_LENGTH) else {
            return Err(Error::LengthRequired("a content-length is required".into()));
        };
        let length = length.to_str().ok().and_then(|text| text.parse::<u64>().ok());
        if length.is_none_or(|length| length > bounds.most) {
            return Err(too_large());
        }
        let limit = Duration::from_secs(self.app.settings.api_timeout);
        match tokio::time::timeout(limit, body.collect()).await {
            Ok(Ok(body)) => Ok(body.to_bytes()),
            Ok(Err(_)) => Err(Error::Invalid("the request body ended early".into())),
            Err(_) => Err(Error::Timeout("the request body did not arrive in time".into())),
        }
    }

    /// Calls the handler. A change goes on to its end even when the caller hangs up.
    async fn route(&self, request: Request<Body>) -> Response {
        let safe = !is_change(request.method(), request.uri());
        let answer = AssertUnwindSafe(self.router.clone().oneshot(request)).catch_unwind();
        let answer = if safe {
            answer.await
        } else {
            let busy = self.app.begin_change().await;
            let change = tokio::spawn(async move {
                let _busy = busy;
                answer.await
            });
            change.await.unwrap_or_else(|error| Err(Box::new(error)))
        };
        match answer {
            Ok(Ok(response)) => response,
            Err(_) => ApiError(Error::Internal("a handler panicked".into())).into_response(),
        }
    }
}

/// What a body may be.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    /// Bytes.
    most: u64,
    /// Whether its length must be said even if there is no body.
    length_needed: bool,
}

/// A body that two can read, one after the other.
#[derive(Clone)]
struct Shared(Arc<Mutex<Body>>);

impl Shared {
    fn new(body: Body) -> Self {
        Self(Arc::new(Mutex::new(body)))
    }

    /// Takes in some of what a handler left. Many callers only look for an answer when they have sent everything; if
    /// the connection were closed before, they would never see why they are refused.
    async fn drain(mut self) {
        let mut left = MOST_DRAINED;
        let drained = async {
            while let Some(Ok(frame)) = self.frame().await {
                let size = frame.data_ref().map_or(0, Bytes::len);
                left = left.saturating_sub(size);
                if left == 0 {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(DRAIN_TIME, drained).await;
    }
}

impl HttpBody for Shared {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut body = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Pin::new(&mut *body).poll_frame(cx)
    }
}

/// The caller's request id if it is usable, else a fresh one.
fn request_id(headers: &HeaderMap) -> String {
    headers
        .get(REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .filter(|id| {
            !id.is_empty() && id.len() <= LONGEST_ID && id.bytes().all(|byte| byte.is_ascii_graphic())
        })
        // Ids that grow with time keep the events of one time together in the database.
        .map_or_else(|| uuid::Uuid::now_v7().to_string(), str::to_owned)
}

/// Whether a path is UTF-8 once it is decoded.
fn is_text(path: &str) -> bool {
    !path.contains('%') || percent_encoding::percent_decode_str(path).decode_utf8().is_ok()
}

/// Both slash forms are the same path, and so is one that a base URL with a slash at its end makes.
fn tidy(uri: Uri) -> Uri {
    let path = uri.path();
    if (path.len() <= 1 || !path.ends_with('/')) && !path.starts_with("//") {
        return uri;
    }
    let path = format!("/{}", path.trim_matches('/'));
    let whole = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path,
    };
    let Ok(whole) = PathAndQuery::try_from(whole) else { return uri };
    let mut parts = uri.into_parts();
    parts.path_and_query = Some(whole);
    Uri::from_parts(parts).unwrap_or_default()
}

/// 405 as the existing API words it, or the answer to OPTIONS.
fn wrong_method(method: &Method, response: &Response) -> Response {
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

/// The answer for a path that is no route.
pub(crate) async fn not_found() -> Response {
    ApiError(Error::not_found("route")).into_response()
}

/// Whether a call changes anything. A login does not, though it is a POST; its audit event tells of it.
fn is_change(method: &Method, uri: &Uri) -> bool {
    !method.is_safe() && uri.path() != "/auth"
}

/// Whether a request brings a piece of an upload. There are thousands of them, so they leave no events unless they
/// are refused.
pub(crate) fn is_piece(method: &Method, uri: &Uri) -> bool {
    let rest = uri.path().strip_prefix("/upload/");
    *method == Method::POST && rest.is_some_and(|id| !id.is_empty() && !id.contains('/'))
}

fn first_segment(path: &str) -> Option<&str> {
    path.trim_start_matches('/').split('/').next().filter(|segment| !segment.is_empty())
}

/// The request events of one request: recorded for changes and refusals, and for reads if so set.
struct Trace<'a> {
    service: &'a Service,
    id: &'a str,
    method: &'a Method,
    uri: &'a Uri,
    /// Unix time of the arrival.
    arrived: f64,
    body: Bytes,
    recorded: bool,
}

impl<'a> Trace<'a> {
    fn new(service: &'a Service, id: &'a str, method: &'a Method, uri: &'a Uri) -> Self {
        Self { service, id, method, uri, arrived: now(), body: Bytes::new(), recorded: false }
    }

    fn is_quiet(&self) -> bool {
        QUIET.contains(&self.uri.path()) || self.uri.path().starts_with("/apidocs")
    }

    /// A login may be sent to any path by mistake, so only bodies to known routes are repeated.
    fn may_show_body(&self) -> bool {
        first_segment(self.uri.path()).is_some_and(|segment| self.service.traced.contains(segment))
    }

    fn shown(&self, body: &[u8]) -> String {
        if body.is_empty() {
            String::new()
        } else if !self.may_show_body() {
            "...body not logged as this route handles credentials...".to_owned()
        } else if body.len() > LONGEST_TRACE {
            "...body not logged as it is too long...".to_owned()
        } else {
            String::from_utf8_lossy(body).into_owned()
        }
    }

    /// The request has arrived whole.
    fn received(&mut self, body: &Bytes) {
        self.body = body.clone();
        let change = is_change(self.method, self.uri) && !is_piece(self.method, self.uri);
        let wanted = change || self.service.app.settings.api_request_events_for_reads;
        if wanted && !self.is_quiet() {
            self.record_arrival();
        }
    }

    fn record_arrival(&mut self) {
        self.recorded = true;
        // A query could carry a secret wherever a body could.
        let url = if self.may_show_body() { self.uri.to_string() } else { self.uri.path().to_owned() };
        let body = self.shown(&self.body);
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

    /// The answer is known.
    fn answered(&mut self, response: &Response) {
        let status = response.status();
        let refused = status.is_client_error() || status.is_server_error();
        if !self.recorded && (!refused || self.is_quiet()) {
            return;
        }
        if !self.recorded {
            self.record_arrival();
        }
        let body =
            response.extensions().get::<ShownBody>().map(|shown| self.shown(&shown.0)).unwrap_or_default();
        let mut event = self.event("api response sent").with("status", status.as_u16()).with("body", body);
        event.duration = Some((now() - self.arrived).max(0.0));
        self.service.app.events.record_if_room(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_slash_forms_are_one_path() {
        for (given, tidied) in [
            ("/", "/"),
            ("/auth", "/auth"),
            ("/auth/", "/auth"),
            ("//auth", "/auth"),
            ("//", "/"),
            ("/auth/namespaces/?limit=1", "/auth/namespaces?limit=1"),
            ("/a%2Fb/", "/a%2Fb"),
        ] {
            assert_eq!(tidy(given.parse().unwrap()).to_string(), tidied, "{given}");
        }
    }

    #[test]
    fn a_request_id_is_taken_over_only_when_it_can_be_an_object_id() {
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
