//! What is wrong with a request before its token is looked at.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{Method, Request};
use serde_json::{Value, json};

use super::{EXCHANGE, REJECTED, World, refusal};
use muster_testing::Issuer;

const NO_LENGTH: (u16, &str) = (411, "a content-length is required");
const TOO_LARGE: (u16, &str) = (413, "request body too large");

/// A body of which nothing ever comes.
fn endless() -> Body {
    Body::from_stream(futures_util::stream::pending::<Result<Bytes, std::io::Error>>())
}

impl World {
    /// A request that must be answered without its body.
    async fn at_once(&self, request: Request<Body>) -> muster_test_cluster::ApiResponse {
        let answer = self.cluster.request(request);
        tokio::time::timeout(Duration::from_secs(20), answer).await.expect("an answer without the body")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_length_is_refused() {
    let world = World::new().await;
    let empty = Request::post(EXCHANGE).body(Body::empty()).unwrap();
    assert_eq!(refusal(&world.at_once(empty).await), NO_LENGTH);
    let unknown = Request::post(EXCHANGE).header("transfer-encoding", "chunked").body(endless()).unwrap();
    assert_eq!(refusal(&world.at_once(unknown).await), NO_LENGTH);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_too_large_is_refused_unread() {
    let world = World::with(Issuer::start(), &[("FEDERATION_MAX_TOKEN_BYTES", "2000")]).await;
    let large = Request::post(EXCHANGE).header("content-length", 2001).body(endless()).unwrap();
    assert_eq!(refusal(&world.at_once(large).await), TOO_LARGE);
    let huge = Request::post(EXCHANGE).header("content-length", "99999999999999999999").body(endless());
    assert_eq!(refusal(&world.at_once(huge.unwrap()).await), TOO_LARGE);
    // To the byte.
    let mut body = json!({"token": world.token(), "namespace": "ci", "rule": "deploy"}).to_string();
    body.push_str(&" ".repeat(2000 - body.len()));
    let send = async |body: &str| world.cluster.send("", Method::POST, EXCHANGE, body.into()).await;
    assert_eq!(refusal(&send(&format!("{body} ")).await), TOO_LARGE);
    let answer = send(&body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_setting_sixteen_kibibytes_are_taken() {
    let world = World::new().await;
    let send = async |body: String| world.cluster.send("", Method::POST, EXCHANGE, body.into()).await;
    let body = json!({"token": world.token(), "namespace": "ci", "rule": "deploy"}).to_string();
    assert_eq!(refusal(&send(format!("{body:<16385}")).await), TOO_LARGE);
    assert_eq!(send(format!("{body:<16384}")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_field_must_be_there_and_a_text() {
    let world = World::new().await;
    for odd in [json!(null), json!(""), json!(7), json!(true), json!(["x"]), json!({"x": 1})] {
        for (field, text) in [
            ("token", "no token specified"),
            ("namespace", "no namespace specified"),
            ("rule", "no rule specified"),
        ] {
            let mut body = json!({"token": world.token(), "namespace": "ci", "rule": "deploy"});
            body[field] = odd.clone();
            assert_eq!(refusal(&world.ask(body.clone()).await), (400, text), "{odd}");
            body.as_object_mut().unwrap().remove(field);
            assert_eq!(refusal(&world.ask(body).await), (400, text), "absent");
        }
    }
    // In order.
    assert_eq!(refusal(&world.ask(json!({})).await), (400, "no token specified"));
    assert_eq!(refusal(&world.ask(json!({"token": "x"})).await), (400, "no namespace specified"));
    let surplus = json!({"token": world.token(), "namespace": "ci", "rule": "deploy", "scopes": ["*"]});
    assert_eq!(refusal(&world.ask(surplus).await), (400, "scopes: not declared by this endpoint"));
    for body in ["{", "[]", "7", "\"token\""] {
        let answer = world.cluster.send("", Method::POST, EXCHANGE, body.into()).await;
        assert_eq!(answer.status, 400, "{body}: {}", answer.text);
    }
    assert_eq!(world.minted().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_posts_are_exchanges() {
    let world = World::new().await;
    for method in [Method::GET, Method::PUT, Method::DELETE] {
        let body = json!({"token": world.token(), "namespace": "ci", "rule": "deploy"});
        let answer = world.cluster.call("", method.clone(), EXCHANGE, Some(body)).await;
        assert_eq!(answer.status, 405, "{method}");
    }
    assert_eq!(world.minted().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_of_the_cluster_makes_no_difference() {
    let world = World::new().await;
    let body = json!({"token": world.token(), "namespace": "ci", "rule": "deploy"});
    for token in [world.admin.as_str(), "rubbish"] {
        let bad = with_other_signature(&body);
        let answer = world.cluster.call(token, Method::POST, EXCHANGE, Some(bad)).await;
        assert_eq!(refusal(&answer), REJECTED);
    }
    let answer = world.cluster.call("rubbish", Method::POST, EXCHANGE, Some(body)).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
}

/// The same with a signature of something else.
fn with_other_signature(body: &Value) -> Value {
    let token = body["token"].as_str().unwrap();
    let (message, signature) = token.rsplit_once('.').unwrap();
    let turned: String = signature.chars().rev().collect();
    let mut body = body.clone();
    body["token"] = json!(format!("{message}.{turned}"));
    body
}
