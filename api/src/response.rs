//! Typed responses. Every JSON response is one document followed by a newline.

mod documented;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Map, Value};

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

/// Adds members to the body of an error.
pub(crate) fn with_members<const N: usize>(response: Response, added: [(&str, Value); N]) -> Response {
    let (mut parts, body) = response.into_parts();
    let members = parts.extensions.remove::<RecordedBody>();
    let members = members.and_then(|body| serde_json::from_slice::<Map<String, Value>>(&body.0).ok());
    let Some(mut members) = members else { return Response::from_parts(parts, body) };
    members.extend(added.map(|(name, value)| (name.to_owned(), value)));
    let mut response = json_response(parts.status, &members);
    parts.headers.remove(header::CONTENT_LENGTH);
    response.headers_mut().extend(parts.headers);
    response
}

/// 200 with a body of the given content type.
pub(crate) fn content(content_type: &'static str, body: impl Into<Body>) -> Response {
    respond(StatusCode::OK, HeaderValue::from_static(content_type), body.into())
}

/// 303 to another page of this server.
pub(crate) fn see_other(location: &'static str) -> Response {
    let body = format!("<!doctype html><title>Muster</title><a href=\"{location}\">{location}</a>\n");
    let mut response = content("text/html; charset=utf-8", body);
    *response.status_mut() = StatusCode::SEE_OTHER;
    response.headers_mut().insert(header::LOCATION, HeaderValue::from_static(location));
    response
}

/// 200 with a JSON document that is serialized while it is sent.
pub(crate) fn streamed_json(body: Body) -> Response {
    respond(StatusCode::OK, JSON, body)
}

/// The content security policy of HTML pages: only files of this server, in no frame. The hash is that of the inline
/// script of the API page; Swagger UI needs inline images.
const HTML_POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self' 'sha256-xSSyc7dwmPfFNYjjTV/nt+K7IgQoRCzsOKzSIkt6cnY='; \
     style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'self'; \
     form-action 'none'; frame-ancestors 'none'",
);

/// Adds security headers: browsers use the content type of every response, and limit what HTML pages do. A page may have its
/// own content security policy.
pub(crate) fn protect(response: &mut Response) {
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    let content_type = headers.get(header::CONTENT_TYPE);
    if content_type.is_some_and(|value| value.as_bytes().starts_with(b"text/html")) {
        headers.entry(header::CONTENT_SECURITY_POLICY).or_insert(HTML_POLICY);
        headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
        headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    }
}

pub(crate) fn respond(status: StatusCode, content_type: HeaderValue, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    response
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::digest::{SHA256, digest};
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    #[test]
    fn policy_allows_the_inline_script_of_the_api_page() {
        let page = include_str!("../../ui/apidocs/index.html");
        let (_, rest) = page.split_once("<script>").unwrap();
        let (script, rest) = rest.split_once("</script>").unwrap();
        assert!(!rest.contains("<script>"), "one inline script");
        let hash = STANDARD.encode(digest(&SHA256, script.as_bytes()));
        assert!(HTML_POLICY.to_str().unwrap().contains(&format!("'sha256-{hash}'")), "{hash}");
    }
}
