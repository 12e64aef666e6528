//! Trusted issuers, mapping rules and token exchange.

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

/// Returns the status and error text of a response.
fn status_and_error(response: &ApiResponse) -> (u16, &str) {
    (response.status.as_u16(), response.body["error"].as_str().unwrap_or_default())
}

/// Returns a body with fields added or replaced.
fn merge(body: &Value, changes: &Value) -> Value {
    let mut body = body.clone();
    for (name, value) in changes.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// Returns the request body that creates an issuer.
pub(crate) fn issuer_request(name: &str) -> Value {
    json!({"name": name, "issuer_url": format!("https://{name}.example"),
           "jwks_uri": format!("https://{name}.example/keys"), "audience": "cloud"})
}

/// Returns the request body that creates a rule.
pub(crate) fn rule_request(name: &str, issuer: &str) -> Value {
    json!({"name": name, "issuer": issuer, "bound_claims": {"sub": "repo:x", "ref": ["main", "next"]},
           "scopes": ["artifact.*", "blob.read"], "key_ttl": 600, "key_name_prefix": "robot"})
}

/// Creates a cluster with the issuer `forge`, and returns it with the administrator's token.
async fn cluster(settings: &[(&str, &str)]) -> (Cluster, String) {
    let cluster = Cluster::with(settings, None).await;
    let token = cluster.token("system").await;
    let response = post(&cluster, &token, "/auth/issuers", issuer_request("forge")).await;
    assert_eq!(response.status, 200, "{}", response.text);
    (cluster, token)
}
