//! `/metrics`, on a port of its own.

use axum::body::Body;
use axum::http::{HeaderValue, Request, StatusCode};
use axum::response::Response;
use hyper::body::Incoming;

use super::response::{respond, text};
use crate::app::App;

/// Answers a request on the metrics port.
#[must_use]
pub fn metrics(app: &App, request: &Request<Incoming>) -> Response {
    match request.uri().path() {
        "/" | "/metrics" => {
            text("application/openmetrics-text; version=1.0.0; charset=utf-8", app.events.metrics().text())
        }
        _ => {
            respond(StatusCode::NOT_FOUND, HeaderValue::from_static("text/plain"), Body::from("not found\n"))
        }
    }
}
