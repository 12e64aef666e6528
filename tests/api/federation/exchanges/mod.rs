//! Exchange of identity tokens for keys, with a cluster that trusts a real HTTPS issuer.

mod bound_claims;
mod ca_bundle;
mod cleanup;
mod jwks;
mod minted_keys;
mod rate_limit;
mod replays;
mod requests;
mod rules;
mod token_validation;

use std::net::SocketAddr;
use std::path::PathBuf;

use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt as _;
use muster_test_cluster::{ApiResponse, Cluster};
use muster_testing::Issuer;
use serde_json::{Value, json};

use super::{merge, rule_request, status_and_error};
use crate::networks::post;

const EXCHANGE: &str = "/auth/federated";
/// The audience of the issuer's tokens.
const AUDIENCE: &str = "cloud";

const UNTRUSTED_ISSUER: (u16, &str) = (401, "federated exchange refused: untrusted issuer");
const TOKEN_REJECTED: (u16, &str) = (401, "federated exchange refused: token rejected");
const NO_RULE: (u16, &str) = (401, "federated exchange refused: no such rule");
const RULE_UNUSABLE: (u16, &str) = (401, "federated exchange refused: rule is unusable");
const WRONG_ISSUER: (u16, &str) = (401, "federated exchange refused: wrong issuer");
const CLAIMS_MISMATCH: (u16, &str) = (401, "federated exchange refused: claims do not match");
const NO_NAMESPACE: (u16, &str) = (401, "federated exchange refused: no such namespace");
const TOKEN_USED: (u16, &str) = (401, "federated exchange refused: token already used");
const TOO_MANY_ATTEMPTS: (u16, &str) = (429, "too many federated exchange attempts");
const UNAVAILABLE: (u16, &str) = (503, "federated exchange is unavailable, please retry");

/// A cluster that trusts the issuer `forge`, with the rule `deploy` in the namespace `ci`.
struct Fixture {
    cluster: Cluster,
    issuer: Issuer,
    /// The administrator's token.
    admin: String,
    ca_bundle: PathBuf,
    _folder: tempfile::TempDir,
}

impl Fixture {
    async fn new() -> Self {
        Self::with(Issuer::start(), &[]).await
    }

    /// Creates the fixture with the given issuer and settings. Attempts are not rate limited.
    async fn with(issuer: Issuer, settings: &[(&str, &str)]) -> Self {
        Self::on(None, issuer, settings).await
    }

    /// Creates the fixture on the given database.
    async fn on(url: Option<&str>, issuer: Issuer, settings: &[(&str, &str)]) -> Self {
        let fixture = Self::without_issuer(url, issuer, settings).await;
        let forge = fixture.issuer_request();
        let response = post(&fixture.cluster, &fixture.admin, "/auth/issuers", forge).await;
        assert_eq!(response.status, 200, "{}", response.text);
        fixture.cluster.create_namespace("ci").await;
        fixture.add_rule("deploy", &json!({})).await;
        fixture
    }

    /// Creates a cluster without trusted issuers.
    async fn without_issuer(url: Option<&str>, issuer: Issuer, settings: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ca_bundle = folder.path().join("authorities.pem");
        issuer.write_ca(&ca_bundle);
        let mut all = vec![
            ("FEDERATION_JWKS_CA_BUNDLE", ca_bundle.to_str().unwrap()),
            ("FEDERATION_JWKS_ALLOWED_NETWORKS", "127.0.0.0/8 ::1"),
            ("FEDERATION_JWKS_FETCH_TIMEOUT_SECONDS", "10"),
            ("FEDERATION_RATE_LIMIT_PER_MINUTE", "0"),
        ];
        all.extend_from_slice(settings);
        let cluster = match url {
            Some(url) => Cluster::on(url, tempfile::tempdir().unwrap(), &all, None).await,
            None => Cluster::with(&all, None).await,
        };
        let admin = cluster.token("system").await;
        Self { cluster, issuer, admin, ca_bundle, _folder: folder }
    }

    /// Returns the request body that creates the issuer.
    fn issuer_request(&self) -> Value {
        json!({"name": "forge", "issuer_url": self.issuer.url(), "jwks_uri": self.issuer.jwks_uri(),
               "audience": AUDIENCE})
    }

    /// Updates the trusted issuer.
    async fn update_issuer(&self, changes: &Value) {
        let body = merge(&self.issuer_request(), changes);
        let response = super::put(&self.cluster, &self.admin, "/auth/issuers/forge", body).await;
        assert_eq!(response.status, 200, "{}", response.text);
    }

    /// Creates a rule in `ci` and returns its record.
    async fn add_rule(&self, name: &str, changes: &Value) -> Value {
        let body = merge(&rule_request(name, "forge"), changes);
        let response = post(&self.cluster, &self.admin, "/auth/namespaces/ci/rules", body).await;
        assert_eq!(response.status, 200, "{}", response.text);
        response.body
    }

    /// Returns the claims of a new token that the rule accepts.
    fn claims(&self) -> Value {
        merge(&self.issuer.claims(AUDIENCE), &json!({"ref": "main"}))
    }

    /// Returns a new token that the rule accepts.
    fn token(&self) -> String {
        self.issuer.token(self.claims())
    }

    /// Returns a token with changed claims; null removes a claim.
    fn token_with_claims(&self, changes: &Value) -> String {
        let mut claims = merge(&self.claims(), changes);
        claims.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        self.issuer.token(claims)
    }

    /// Exchanges a token with the rule `deploy`.
    async fn exchange(&self, token: &str) -> ApiResponse {
        self.exchange_with_rule(token, "ci", "deploy").await
    }

    async fn exchange_with_rule(&self, token: &str, namespace: &str, rule: &str) -> ApiResponse {
        self.post_exchange(json!({"token": token, "namespace": namespace, "rule": rule})).await
    }

    async fn post_exchange(&self, body: Value) -> ApiResponse {
        post(&self.cluster, "", EXCHANGE, body).await
    }

    /// Sends an exchange request from the given client address.
    async fn exchange_from(&self, peer: &str, body: &Value) -> ApiResponse {
        let body = body.to_string();
        let request = Request::post(EXCHANGE).header("content-length", body.len()).body(Body::from(body));
        let peer = SocketAddr::new(peer.parse().unwrap(), 9);
        let (head, body) = self.cluster.service.call(request.unwrap(), peer).await.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        ApiResponse { status: head.status, headers: head.headers, body, text }
    }

    /// Exchanges a new token and asserts success.
    async fn assert_exchange_succeeds(&self) -> Value {
        let response = self.exchange(&self.token()).await;
        assert_eq!(response.status, 200, "{}", response.text);
        response.body
    }

    /// Asserts that a token is refused and that no key is minted.
    async fn assert_refused(&self, token: &str, expected: (u16, &str), case: &str) {
        let before = self.minted_key_count().await;
        let response = self.exchange(token).await;
        assert_eq!(status_and_error(&response), expected, "{case}");
        assert_eq!(self.minted_key_count().await, before, "{case}: a key was minted");
    }

    /// Returns the number of minted keys.
    async fn minted_key_count(&self) -> i64 {
        self.cluster.count_rows("namespace_keys", "name LIKE 'robot-%'").await
    }

    /// Changes rows directly in the database.
    async fn execute_sql(&self, sql: &str) {
        let mut tx = self.cluster.app.store.begin().await.unwrap();
        let outcome = tx.execute(sql, &[]).await.map_err(Into::into);
        let mut retry = muster_store::Retry::default();
        assert!(tx.finish(outcome, &mut retry).await.unwrap().unwrap() > 0, "{sql}");
    }
}
