//! Answers: always a JSON document and a newline, `null` when there is nothing to say.

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Serialize;

/// Most answers fit into this many bytes.
const USUAL_LENGTH: usize = 1024;
const JSON: HeaderValue = HeaderValue::from_static("application/json");

pub(crate) fn json_response(status: StatusCode, value: &impl Serialize) -> Response {
    let mut body = Vec::with_capacity(USUAL_LENGTH);
    if let Err(error) = serde_json::to_writer(&mut body, value) {
        tracing::error!(%error, "an answer cannot be written");
        return respond(StatusCode::INTERNAL_SERVER_ERROR, JSON, Body::from("null\n"));
    }
    body.push(b'\n');
    let body = Bytes::from(body);
    let mut response = respond(status, JSON, Body::from(body.clone()));
    response.extensions_mut().insert(ShownBody(body));
    response
}

/// The body of an answer, for the event that repeats it.
#[derive(Debug, Clone)]
pub(crate) struct ShownBody(pub(crate) Bytes);

/// 200 with a value.
pub(crate) fn ok(value: &impl Serialize) -> Response {
    json_response(StatusCode::OK, value)
}

/// 200 with `null`.
pub(crate) fn nothing() -> Response {
    ok(&())
}

/// 200 with text of a kind.
pub(crate) fn text(kind: &'static str, body: impl Into<Body>) -> Response {
    respond(StatusCode::OK, HeaderValue::from_static(kind), body.into())
}

pub(crate) fn streamed_json(body: Body) -> Response {
    respond(StatusCode::OK, JSON, body)
}

pub(crate) fn respond(status: StatusCode, kind: HeaderValue, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
