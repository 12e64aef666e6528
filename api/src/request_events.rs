//! The events of API requests. See docs/decisions/0005.

use std::collections::HashSet;
use std::sync::Arc;

use axum::body::Bytes;
use axum::http::{Method, Uri};
use axum::response::Response;
use muster_types::event::Event;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;
use parking_lot::Mutex;
use serde::de::DeserializeSeed as _;

use crate::access::{Access, RouteInfo};
use crate::arguments::form_pairs;
use crate::incoming::{is_change, is_upload_chunk};
use crate::redaction::{NOT_LOGGED, Redactor, UNRECORDED_FIELDS};
use crate::response::RecordedBody;
use muster_control::app::App;
use muster_control::events::RefusalKind;

/// The maximum length of a URL in an event, in bytes.
pub(crate) const MAX_RECORDED_URL: usize = 1024;
/// The maximum length of a body in an event, in bytes.
const MAX_RECORDED_BODY: usize = 1024;
/// Paths without request events.
const UNRECORDED_PATHS: &[&str] = &["/", "/livez", "/readyz", "/healthz", "/openapi.json"];

/// First path segments of the routes whose bodies may be recorded in events.
#[derive(Debug)]
pub(crate) struct RecordableRoutes(HashSet<String>);

impl RecordableRoutes {
    pub(crate) fn new(routes: &[RouteInfo]) -> Self {
        let guarded = routes.iter().filter(|route| route.access != Access::Public);
        let segments =
            guarded.filter_map(|route| first_segment(&route.path)).filter(|segment| *segment != "auth");
        Self(segments.map(str::to_owned).collect())
    }
}

/// The events of one request: recorded for changes and errors, and for reads if configured. Failed requests without a
/// valid token are sampled.
pub(crate) struct RequestEvents {
    app: Arc<App>,
    recordable: Arc<RecordableRoutes>,
    id: String,
    source: String,
    method: Method,
    uri: Uri,
    /// Unix time of the arrival.
    arrived: f64,
    progress: Mutex<Progress>,
}

/// The state of a request so far.
#[derive(Default)]
struct Progress {
    authenticated: bool,
    body: Bytes,
    /// Whether the arrival is recorded.
    recorded: bool,
}

impl RequestEvents {
    pub(crate) fn new(
        app: &Arc<App>,
        recordable: &Arc<RecordableRoutes>,
        id: &str,
        source: &str,
        (method, uri): (&Method, &Uri),
    ) -> Self {
        Self {
            app: Arc::clone(app),
            recordable: Arc::clone(recordable),
            id: id.to_owned(),
            source: source.to_owned(),
            method: method.clone(),
            uri: uri.clone(),
            arrived: now(),
            progress: Mutex::default(),
        }
    }

    /// Notes that the caller has a valid token.
    pub(crate) fn authenticated(&self) {
        self.progress.lock().authenticated = true;
    }

    /// Returns whether the caller has a valid token.
    pub(crate) fn is_authenticated(&self) -> bool {
        self.progress.lock().authenticated
    }

    /// Notes the body, and records the request if its caller has a valid token.
    pub(crate) fn received(&self, body: &Bytes) {
        let mut progress = self.progress.lock();
        progress.body = body.clone();
        if progress.authenticated && self.records_success() {
            self.record_arrival(&mut progress, 0);
        }
    }

    /// Records the response.
    pub(crate) fn responded(&self, response: &Response) {
        let mut progress = self.progress.lock();
        let status = response.status();
        let failed = status.is_client_error() || status.is_server_error();
        if !progress.recorded && !self.records_success() && (!failed || self.is_unrecorded()) {
            return;
        }
        let mut suppressed = 0;
        if failed && !progress.authenticated {
            match self.app.events.sample_refusal(RefusalKind::Request, &self.source) {
                Some(count) => suppressed = count,
                None => return,
            }
        }
        if !progress.recorded {
            self.record_arrival(&mut progress, suppressed);
        }
        let body = response
            .extensions()
            .get::<RecordedBody>()
            .map(|body| self.recorded_body(&body.0))
            .unwrap_or_default();
        let mut event = self.event("api response sent").with("status", status.as_u16()).with("body", body);
        event.duration = Some((now() - self.arrived).max(0.0));
        self.app.events.record_if_room(event);
    }

    /// Returns whether the request is recorded even if it succeeds.
    fn records_success(&self) -> bool {
        let change = is_change(&self.method, &self.uri) && !is_upload_chunk(&self.method, &self.uri);
        (change || self.app.settings.api_request_events_for_reads) && !self.is_unrecorded()
    }

    /// Returns whether neither events nor traces are recorded, because clients only look whether the daemon works, or load a page.
    pub(crate) fn is_unrecorded(&self) -> bool {
        let path = self.uri.path();
        UNRECORDED_PATHS.contains(&path)
            || path.starts_with("/apidocs")
            || path == "/docs"
            || path.starts_with("/docs/")
            || path == "/ui"
            || path.starts_with("/ui/")
    }

    /// A login may be sent to a wrong path by mistake, so only bodies for known routes are recorded.
    fn may_record_body(&self) -> bool {
        first_segment(self.uri.path()).is_some_and(|segment| self.recordable.0.contains(segment))
    }

    fn recorded_body(&self, body: &[u8]) -> String {
        if body.is_empty() {
            String::new()
        } else if self.may_record_body() {
            redacted_body(body)
        } else {
            "...body not logged as this route handles credentials...".to_owned()
        }
    }

    /// Records the arrival. `suppressed` is the number of requests of the same source that were not recorded.
    fn record_arrival(&self, progress: &mut Progress, suppressed: u64) {
        progress.recorded = true;
        // A query can contain the same secrets as a body.
        let url = if self.may_record_body() { redacted_url(&self.uri) } else { self.uri.path().to_owned() };
        let body = self.recorded_body(&progress.body);
        let url = shortened(url, MAX_RECORDED_URL);
        let mut event = self.event("api request received").with("url", url).with("body", body);
        if suppressed > 0 {
            event = event.with("suppressed", suppressed);
        }
        event.timestamp = self.arrived;
        self.app.events.record_if_room(event);
    }

    fn event(&self, what: &str) -> Event {
        let object = ObjectRef::new(ObjectType::ApiRequest, &self.id);
        let method: String = self.method.as_str().chars().take(32).collect();
        let mut event = Event::audit(object, format!("{method} {what}"));
        event.request_id = Some(self.id.clone());
        event
    }
}

fn first_segment(path: &str) -> Option<&str> {
    path.trim_start_matches('/').split('/').next().filter(|segment| !segment.is_empty())
}

/// Shortens a text to at most `max` bytes and an ellipsis.
pub(crate) fn shortened(mut text: String, max: usize) -> String {
    if text.len() > max {
        let end = (0..=max).rev().find(|index| text.is_char_boundary(*index)).unwrap_or_default();
        text.truncate(end);
        text.push('…');
    }
    text
}

/// Returns a body as it may be recorded. A body that is not JSON may be anything, so it is not recorded. Reads no more of a body
/// than is needed for the recorded part.
fn redacted_body(body: &[u8]) -> String {
    let mut recorded = String::new();
    let mut document = serde_json::Deserializer::from_slice(body);
    let redactor = Redactor { recorded: &mut recorded, max: MAX_RECORDED_BODY };
    match redactor.deserialize(&mut document).and_then(|()| document.end()) {
        Ok(()) => recorded,
        Err(_) if recorded.len() >= MAX_RECORDED_BODY => shortened(recorded, MAX_RECORDED_BODY),
        Err(_) => "...body not logged as it is not JSON...".to_owned(),
    }
}

/// Returns path and query as they may be recorded.
fn redacted_url(uri: &Uri) -> String {
    let Some(query) = uri.query() else { return uri.path().to_owned() };
    if form_pairs(query).any(|(name, _)| UNRECORDED_FIELDS.contains(&name.as_str())) {
        return format!("{}?{NOT_LOGGED}", uri.path());
    }
    format!("{}?{query}", uri.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redacts_secrets_at_any_depth() {
        let body =
            br#"{"name":"a","user_data":"c2VjcmV0","ssh_key":"ssh-rsa A","x":[{"key":"k"}],"token":null}"#;
        let text = redacted_body(body);
        for secret in ["c2VjcmV0", "ssh-rsa", "\"k\""] {
            assert!(!text.contains(secret), "{text}");
        }
        assert!(text.contains("\"name\":\"a\"") && text.contains(NOT_LOGGED), "{text}");
        assert!(!redacted_body(b"user_data=c2VjcmV0").contains("c2VjcmV0"));
        let uri: Uri = "/instances?user_data=c2VjcmV0".parse().unwrap();
        assert_eq!(redacted_url(&uri), format!("/instances?{NOT_LOGGED}"));
    }

    #[test]
    fn shortens_long_texts_between_characters() {
        assert_eq!(shortened("äöü".to_owned(), 3), "ä…");
        let long = redacted_body(format!("{{\"name\":\"{}\"}}", "x".repeat(5000)).as_bytes());
        assert!(long.len() < MAX_RECORDED_BODY + 8, "{}", long.len());
        let invalid_end = format!("[{}", "1,".repeat(5000));
        assert!(redacted_body(invalid_end.as_bytes()).starts_with("[1,1,"), "read only as far as needed");
        assert!(redacted_body(b"[1,1").contains("not JSON"));
    }
}
