//! Typed responses. Every JSON response is one document followed by a newline.

mod documented;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

pub(crate) use documented::{Documented, DocumentedHandler, JsonBody, Success, named_bodies};

/// Initial capacity of a response body, in bytes; most responses fit.
const INITIAL_CAPACITY: usize = 1024;
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// 200 with a JSON document.
#[derive(Debug)]
pub(crate) struct Json<T>(pub(crate) T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        json_response(StatusCode::OK, &self.0)
    }
}

/// 202 with a JSON document.
#[derive(Debug)]
pub(crate) struct Accepted<T>(pub(crate) T);

impl<T: Serialize> IntoResponse for Accepted<T> {
    fn into_response(self) -> Response {
        json_response(StatusCode::ACCEPTED, &self.0)
    }
}

/// 200 with the JSON document `null`.
#[derive(Debug)]
pub(crate) struct Null;

impl IntoResponse for Null {
    fn into_response(self) -> Response {
        json_response(StatusCode::OK, &())
    }
}

/// An object whose members the OpenAPI document does not list.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct Opaque<T>(pub(crate) T);

/// The body of a response, for the event that records it.
#[derive(Debug, Clone)]
pub(crate) struct RecordedBody(pub(crate) Bytes);

pub(crate) fn json_response(status: StatusCode, value: &impl Serialize) -> Response {
    let mut body = Vec::with_capacity(INITIAL_CAPACITY);
    let serialized = serde_json::to_writer(&mut body, value);
    recorded_response(status, body, serialized)
}

/// The part of `json_response` that does not depend on the type of the value.
fn recorded_response(status: StatusCode, mut body: Vec<u8>, serialized: serde_json::Result<()>) -> Response {
    if let Err(error) = serialized {
        tracing::error!(%error, "failed to serialize response");
        return respond(StatusCode::INTERNAL_SERVER_ERROR, JSON, Body::from("null\n"));
    }
    body.push(b'\n');
    let body = Bytes::from(body);
    let mut response = respond(status, JSON, Body::from(body.clone()));
    response.extensions_mut().insert(RecordedBody(body));
    response
}

/// 200 with a body of the given content type.
pub(crate) fn content(content_type: &'static str, body: impl Into<Body>) -> Response {
    respond(StatusCode::OK, HeaderValue::from_static(content_type), body.into())
}

/// 200 with a JSON document that is serialized while it is sent.
pub(crate) fn streamed_json(body: Body) -> Response {
    respond(StatusCode::OK, JSON, body)
}

pub(crate) fn respond(status: StatusCode, content_type: HeaderValue, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    response
}
