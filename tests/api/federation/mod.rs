//! Trusted issuers, mapping rules and exchanges.

mod exchanges;
mod issuers;
mod rules;

use axum::http::Method;
use muster_test_cluster::{ApiResponse, Cluster};
use serde_json::{Value, json};

use crate::networks::post;

pub(crate) async fn put(cluster: &Cluster, token: &str, path: &str, body: Value) -> ApiResponse {
    cluster.call(token, Method::PUT, path, Some(body)).await
}

/// Status and text of an answer.
fn refusal(answer: &ApiResponse) -> (u16, &str) {
    (answer.status.as_u16(), answer.body["error"].as_str().unwrap_or_default())
}

/// A body with members added, replaced or, by null, left out.
fn with(body: &Value, changes: &Value) -> Value {
    let mut body = body.clone();
    for (name, value) in changes.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// An issuer as it is asked for.
pub(crate) fn issuer(name: &str) -> Value {
    json!({"name": name, "issuer_url": format!("https://{name}.example"),
           "jwks_uri": format!("https://{name}.example/keys"), "audience": "cloud"})
}

/// A rule as it is asked for.
pub(crate) fn rule(name: &str, issuer: &str) -> Value {
    json!({"name": name, "issuer": issuer, "bound_claims": {"sub": "repo:x", "ref": ["main", "next"]},
           "scopes": ["artifact.*", "blob.read"], "key_ttl": 600, "key_name_prefix": "robot"})
}

/// A cluster with the issuer `forge`, and the administrator's token.
async fn cluster(settings: &[(&str, &str)]) -> (Cluster, String) {
    let cluster = Cluster::with(settings, None).await;
    let token = cluster.token("system").await;
    let answer = post(&cluster, &token, "/auth/issuers", issuer("forge")).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    (cluster, token)
}
