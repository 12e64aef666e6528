//! Identity tokens exchanged for keys: a cluster that trusts a real https issuer.

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
use muster_testing::Issuer;
use serde_json::{Value, json};

use super::{refusal, rule, with};
use crate::harness::{Answer, Cluster};
use crate::networks::post;

const EXCHANGE: &str = "/auth/federated";
/// What the issuer's tokens are for.
const AUDIENCE: &str = "cloud";

const UNTRUSTED: (u16, &str) = (401, "federated exchange refused: untrusted issuer");
const REJECTED: (u16, &str) = (401, "federated exchange refused: token rejected");
const NO_RULE: (u16, &str) = (401, "federated exchange refused: no such rule");
const UNUSABLE: (u16, &str) = (401, "federated exchange refused: rule is unusable");
const WRONG_ISSUER: (u16, &str) = (401, "federated exchange refused: wrong issuer");
const NO_MATCH: (u16, &str) = (401, "federated exchange refused: claims do not match");
const NO_NAMESPACE: (u16, &str) = (401, "federated exchange refused: no such namespace");
const USED: (u16, &str) = (401, "federated exchange refused: token already used");
const TOO_MANY: (u16, &str) = (429, "too many federated exchange attempts");
const UNAVAILABLE: (u16, &str) = (503, "federated exchange is unavailable, please retry");

/// A cluster with the namespace `ci`, which trusts the issuer `forge` and has the rule `deploy` for it.
struct World {
    cluster: Cluster,
    issuer: Issuer,
    /// The administrator's token.
    admin: String,
    bundle: PathBuf,
    _folder: tempfile::TempDir,
}

impl World {
    async fn new() -> Self {
        Self::with(Issuer::start(), &[]).await
    }

    /// The same with an issuer and settings of the test's choice. Attempts are not limited.
    async fn with(issuer: Issuer, settings: &[(&str, &str)]) -> Self {
        Self::on(None, issuer, settings).await
    }

    /// The same on a database of the test's choice.
    async fn on(url: Option<&str>, issuer: Issuer, settings: &[(&str, &str)]) -> Self {
        let world = Self::without_issuer(url, issuer, settings).await;
        let forge = world.forge();
        let answer = post(&world.cluster, &world.admin, "/auth/issuers", forge).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        world.cluster.create_namespace("ci").await;
        world.add_rule("deploy", &json!({})).await;
        world
    }

    /// A cluster that trusts nobody.
    async fn without_issuer(url: Option<&str>, issuer: Issuer, settings: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let bundle = folder.path().join("authorities.pem");
        issuer.write_ca(&bundle);
        let mut all = vec![
            ("FEDERATION_JWKS_CA_BUNDLE", bundle.to_str().unwrap()),
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
        Self { cluster, issuer, admin, bundle, _folder: folder }
    }

    /// The issuer as it is asked for.
    fn forge(&self) -> Value {
        json!({"name": "forge", "issuer_url": self.issuer.url(), "jwks_uri": self.issuer.jwks_uri(),
               "audience": AUDIENCE})
    }

    /// Changes what the cluster knows of the issuer.
    async fn change_forge(&self, changes: &Value) {
        let body = with(&self.forge(), changes);
        let answer = super::put(&self.cluster, &self.admin, "/auth/issuers/forge", body).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
    }

    /// Makes a rule of `ci` and answers it.
    async fn add_rule(&self, name: &str, changes: &Value) -> Value {
        let body = with(&rule(name, "forge"), changes);
        let answer = post(&self.cluster, &self.admin, "/auth/namespaces/ci/rules", body).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.body
    }

    /// The claims of a new token that the rule takes.
    fn claims(&self) -> Value {
        with(&self.issuer.claims(AUDIENCE), &json!({"ref": "main"}))
    }

    /// A new token that the rule takes.
    fn token(&self) -> String {
        self.issuer.token(self.claims())
    }

    /// A token whose claims are changed; null leaves one out.
    fn token_but(&self, changes: &Value) -> String {
        let mut claims = with(&self.claims(), changes);
        claims.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        self.issuer.token(claims)
    }

    /// Exchanges a token by the rule.
    async fn exchange(&self, token: &str) -> Answer {
        self.exchange_by(token, "ci", "deploy").await
    }

    async fn exchange_by(&self, token: &str, namespace: &str, rule: &str) -> Answer {
        self.ask(json!({"token": token, "namespace": namespace, "rule": rule})).await
    }

    async fn ask(&self, body: Value) -> Answer {
        post(&self.cluster, "", EXCHANGE, body).await
    }

    /// Exchanges a token from an address.
    async fn exchange_from(&self, peer: &str, body: &Value) -> Answer {
        let body = body.to_string();
        let request = Request::post(EXCHANGE).header("content-length", body.len()).body(Body::from(body));
        let peer = SocketAddr::new(peer.parse().unwrap(), 9);
        let (head, body) = self.cluster.service.call(request.unwrap(), peer).await.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Answer { status: head.status, headers: head.headers, body, text }
    }

    /// Exchanges a new token and expects that it works.
    async fn works(&self) -> Value {
        let answer = self.exchange(&self.token()).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.body
    }

    /// Expects that a token is refused, and that nothing was minted for it.
    async fn refused(&self, token: &str, expected: (u16, &str), what: &str) {
        let before = self.minted().await;
        let answer = self.exchange(token).await;
        assert_eq!(refusal(&answer), expected, "{what}");
        assert_eq!(self.minted().await, before, "{what}: minted nevertheless");
    }

    /// How many keys were ever minted.
    async fn minted(&self) -> i64 {
        self.cluster.count("namespace_keys", "name LIKE 'robot-%'").await
    }

    /// Changes rows behind the cluster's back.
    async fn execute(&self, sql: &str) {
        let mut tx = self.cluster.app.store.begin().await.unwrap();
        let outcome = tx.execute(sql, &[]).await.map_err(Into::into);
        let mut retry = muster_store::Retry::default();
        assert!(tx.finish(outcome, &mut retry).await.unwrap().unwrap() > 0, "{sql}");
    }
}
