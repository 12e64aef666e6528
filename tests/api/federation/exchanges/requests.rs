//! Validation of exchange requests before the token is verified.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{Method, Request};
use serde_json::{Value, json};

use super::{EXCHANGE, Fixture, TOKEN_REJECTED, status_and_error};
use muster_testing::Issuer;

const LENGTH_REQUIRED: (u16, &str) = (411, "a content-length is required");
const BODY_TOO_LARGE: (u16, &str) = (413, "request body too large");

/// Returns a body that never produces data.
fn pending_body() -> Body {
    Body::from_stream(futures_util::stream::pending::<Result<Bytes, std::io::Error>>())
}

impl Fixture {
    /// Sends a request and asserts that it is answered without reading its body.
    async fn respond_without_body(&self, request: Request<Body>) -> muster_test_cluster::ApiResponse {
        let response = self.cluster.request(request);
        tokio::time::timeout(Duration::from_secs(20), response)
            .await
            .expect("a response without reading the body")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_request_without_content_length() {
    let fixture = Fixture::new().await;
    let empty = Request::post(EXCHANGE).body(Body::empty()).unwrap();
    assert_eq!(status_and_error(&fixture.respond_without_body(empty).await), LENGTH_REQUIRED);
    let unknown =
        Request::post(EXCHANGE).header("transfer-encoding", "chunked").body(pending_body()).unwrap();
    assert_eq!(status_and_error(&fixture.respond_without_body(unknown).await), LENGTH_REQUIRED);
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_oversized_request_without_reading_it() {
    let fixture = Fixture::with(Issuer::start(), &[("FEDERATION_MAX_TOKEN_BYTES", "2000")]).await;
    let large = Request::post(EXCHANGE).header("content-length", 2001).body(pending_body()).unwrap();
    assert_eq!(status_and_error(&fixture.respond_without_body(large).await), BODY_TOO_LARGE);
    let huge = Request::post(EXCHANGE).header("content-length", "99999999999999999999").body(pending_body());
    assert_eq!(status_and_error(&fixture.respond_without_body(huge.unwrap()).await), BODY_TOO_LARGE);
    // The limit is exact to the byte.
    let mut body = json!({"token": fixture.token(), "namespace": "ci", "rule": "deploy"}).to_string();
    body.push_str(&" ".repeat(2000 - body.len()));
    let send = async |body: &str| fixture.cluster.send("", Method::POST, EXCHANGE, body.into()).await;
    assert_eq!(status_and_error(&send(&format!("{body} ")).await), BODY_TOO_LARGE);
    let response = send(&body).await;
    assert_eq!(response.status, 200, "{}", response.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn default_body_limit_is_16_kib() {
    let fixture = Fixture::new().await;
    let send = async |body: String| fixture.cluster.send("", Method::POST, EXCHANGE, body.into()).await;
    let body = json!({"token": fixture.token(), "namespace": "ci", "rule": "deploy"}).to_string();
    assert_eq!(status_and_error(&send(format!("{body:<16385}")).await), BODY_TOO_LARGE);
    assert_eq!(send(format!("{body:<16384}")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_field_must_be_a_non_empty_string() {
    let fixture = Fixture::new().await;
    for invalid in [json!(null), json!(""), json!(7), json!(true), json!(["x"]), json!({"x": 1})] {
        for (field, text) in [
            ("token", "no token specified"),
            ("namespace", "no namespace specified"),
            ("rule", "no rule specified"),
        ] {
            let mut body = json!({"token": fixture.token(), "namespace": "ci", "rule": "deploy"});
            body[field] = invalid.clone();
            assert_eq!(
                status_and_error(&fixture.post_exchange(body.clone()).await),
                (400, text),
                "{invalid}"
            );
            body.as_object_mut().unwrap().remove(field);
            assert_eq!(status_and_error(&fixture.post_exchange(body).await), (400, text), "missing");
        }
    }
    // Fields are checked in order.
    assert_eq!(status_and_error(&fixture.post_exchange(json!({})).await), (400, "no token specified"));
    assert_eq!(
        status_and_error(&fixture.post_exchange(json!({"token": "x"})).await),
        (400, "no namespace specified")
    );
    let extra_field = json!({"token": fixture.token(), "namespace": "ci", "rule": "deploy", "scopes": ["*"]});
    assert_eq!(
        status_and_error(&fixture.post_exchange(extra_field).await),
        (400, "scopes: not declared by this endpoint")
    );
    for body in ["{", "[]", "7", "\"token\""] {
        let response = fixture.cluster.send("", Method::POST, EXCHANGE, body.into()).await;
        assert_eq!(response.status, 400, "{body}: {}", response.text);
    }
    assert_eq!(fixture.minted_key_count().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_post_is_allowed() {
    let fixture = Fixture::new().await;
    for method in [Method::GET, Method::PUT, Method::DELETE] {
        let body = json!({"token": fixture.token(), "namespace": "ci", "rule": "deploy"});
        let response = fixture.cluster.call("", method.clone(), EXCHANGE, Some(body)).await;
        assert_eq!(response.status, 405, "{method}");
    }
    assert_eq!(fixture.minted_key_count().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn ignores_authorization_header() {
    let fixture = Fixture::new().await;
    let body = json!({"token": fixture.token(), "namespace": "ci", "rule": "deploy"});
    for token in [fixture.admin.as_str(), "rubbish"] {
        let invalid = with_invalid_signature(&body);
        let response = fixture.cluster.call(token, Method::POST, EXCHANGE, Some(invalid)).await;
        assert_eq!(status_and_error(&response), TOKEN_REJECTED);
    }
    let response = fixture.cluster.call("rubbish", Method::POST, EXCHANGE, Some(body)).await;
    assert_eq!(response.status, 200, "{}", response.text);
}

/// Returns the exchange request with an invalid token signature.
fn with_invalid_signature(body: &Value) -> Value {
    let token = body["token"].as_str().unwrap();
    let (message, signature) = token.rsplit_once('.').unwrap();
    let reversed: String = signature.chars().rev().collect();
    let mut body = body.clone();
    body["token"] = json!(format!("{message}.{reversed}"));
    body
}
