//! `/metrics`, served on a separate port.

use axum::body::Body;
use axum::http::header::ACCEPT;
use axum::http::{HeaderValue, Request, StatusCode};
use axum::response::Response;
use hyper::body::Incoming;

use crate::response::{content, respond};
use muster_control::app::App;

/// Handles a request on the metrics port.
#[must_use]
pub fn metrics(app: &App, request: &Request<Incoming>) -> Response {
    match request.uri().path() {
        "/" | "/metrics" => {
            // The text is valid in both formats; the content type is negotiated.
            let accept =
                request.headers().get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
            let content_type = if accept.contains("openmetrics") {
                "application/openmetrics-text; version=1.0.0; charset=utf-8"
            } else {
                "text/plain; version=0.0.4; charset=utf-8"
            };
            content(content_type, app.events.metrics_text())
        }
        _ => {
            respond(StatusCode::NOT_FOUND, HeaderValue::from_static("text/plain"), Body::from("not found\n"))
        }
    }
}
