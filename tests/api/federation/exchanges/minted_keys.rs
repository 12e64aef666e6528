//! Keys minted by exchanges.

use std::collections::HashSet;

use muster_test_cluster::wait_for;
use muster_testing::issuer::Signer;
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use super::{Fixture, merge, status_and_error};
use crate::networks::{get, post};

impl Fixture {
    /// Logs in with a minted key and returns the token.
    async fn log_in(&self, minted: &Value) -> String {
        let body = json!({"namespace": minted["namespace"], "key": minted["key"]});
        let response = post(&self.cluster, "", "/auth", body).await;
        assert_eq!(response.status, 200, "{}", response.text);
        response.body["access_token"].as_str().unwrap().to_owned()
    }

    /// Returns a column of a minted key.
    async fn key_column(&self, column: &str, minted: &Value) -> String {
        let name = minted["key_name"].as_str().unwrap();
        let sql = format!("SELECT CAST({column} AS CHAR) FROM namespace_keys WHERE name = '{name}'");
        self.cluster.app.store.query(&sql, &[]).await.unwrap()[0].scalar().unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mints_key_with_scopes_of_the_rule() {
    let fixture = Fixture::new().await;
    let minted = fixture.assert_exchange_succeeds().await;
    assert_eq!(minted.as_object().unwrap().len(), 3, "{minted}");
    assert_eq!(minted["namespace"], "ci");
    let random = minted["key_name"].as_str().unwrap().strip_prefix("robot-").unwrap();
    assert!(random.len() == 8 && random.chars().all(|c| c.is_ascii_alphanumeric()), "{random}");
    let key = minted["key"].as_str().unwrap();
    assert!(key.starts_with("sfk_") && key.len() == 42, "{key}");

    let token = fixture.log_in(&minted).await;
    assert_eq!(get(&fixture.cluster, &token, "/artifacts").await.status, 200);
    let not_scoped = (403, "token is not scoped for this operation");
    assert_eq!(status_and_error(&get(&fixture.cluster, &token, "/instances").await), not_scoped);
    assert_eq!(status_and_error(&get(&fixture.cluster, &token, "/auth/namespaces").await), not_scoped);
    let rule = json!({"name": "more"});
    assert_eq!(
        status_and_error(&post(&fixture.cluster, &token, "/auth/namespaces/ci/rules", rule).await),
        not_scoped
    );
    let names = get(&fixture.cluster, &fixture.admin, "/auth/namespaces/ci/keys").await.body;
    assert_eq!(names, json!([minted["key_name"]]));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_exchange_mints_a_new_key() {
    let fixture = Fixture::new().await;
    let mut names = HashSet::new();
    let mut keys = HashSet::new();
    for _ in 0..5 {
        let minted = fixture.assert_exchange_succeeds().await;
        fixture.log_in(&minted).await;
        names.insert(minted["key_name"].to_string());
        keys.insert(minted["key"].to_string());
    }
    assert_eq!((names.len(), keys.len()), (5, 5));
    assert_eq!(fixture.minted_key_count().await, 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_created_by_minted_key_inherit_its_expiry() {
    let fixture = Fixture::new().await;
    fixture.add_rule("keys", &json!({"scopes": ["*"]})).await;
    let minted = fixture.exchange_with_rule(&fixture.token(), "ci", "keys").await.body;
    let expiry = fixture.key_column("expiry", &minted).await;
    let token = fixture.log_in(&minted).await;
    let far_future = muster_types::time::now() + 1e6;
    let create_key = async |token: &str, body: Value| -> Value {
        let response = post(&fixture.cluster, token, "/auth/namespaces/ci/keys", body).await;
        assert_eq!(response.status, 200, "{}", response.text);
        merge(&response.body, &json!({"namespace": "ci"}))
    };
    let created = create_key(&token, json!({"key_name": "first"})).await;
    let next = fixture.log_in(&created).await;
    create_key(&next, json!({"key_name": "second", "expiry": far_future})).await;
    // Replacing the minted key itself does not extend its lifetime either.
    create_key(&next, json!({"key_name": minted["key_name"]})).await;
    for name in [json!("first"), json!("second"), minted["key_name"].clone()] {
        let key = json!({"key_name": name});
        assert_eq!(fixture.key_column("expiry", &key).await, expiry, "{name}");
        let provenance: Value = serde_json::from_str(&fixture.key_column("provenance", &key).await).unwrap();
        assert_eq!(provenance["rule_name"], "keys", "{name}");
    }
    create_key(&fixture.admin, json!({"key_name": "own"})).await;
    let sql = "SELECT 1 FROM namespace_keys WHERE name = 'own' AND expiry IS NULL AND provenance IS NULL";
    assert_eq!(fixture.cluster.app.store.query(sql, &[]).await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn minted_key_expires_after_ttl_of_the_rule() {
    let fixture = Fixture::new().await;
    fixture.add_rule("short", &json!({"key_ttl": 3})).await;
    let response = fixture.exchange_with_rule(&fixture.token(), "ci", "short").await;
    let token = fixture.log_in(&response.body).await;
    assert_eq!(get(&fixture.cluster, &token, "/artifacts").await.status, 200);
    let body = json!({"namespace": "ci", "key": response.body["key"]});
    wait_for("the key to expire", async || {
        (post(&fixture.cluster, "", "/auth", body.clone()).await.status == 401).then_some(())
    })
    .await;
    assert_eq!(
        get(&fixture.cluster, &token, "/artifacts").await.status,
        401,
        "its token is rejected as well"
    );
    assert_eq!(get(&fixture.cluster, &fixture.admin, "/auth/namespaces/ci/keys").await.body, json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn records_provenance_of_minted_key() {
    let fixture = Fixture::new().await;
    let started = muster_types::time::now();
    let claims = fixture.claims();
    let response = fixture.exchange(&fixture.issuer.token(claims.clone())).await;
    let minted = response.body;
    let rule = get(&fixture.cluster, &fixture.admin, "/auth/namespaces/ci/rules/deploy").await.body;
    let satisfied = json!({"sub": "repo:x", "ref": "main"});
    let provenance: Value = serde_json::from_str(&fixture.key_column("provenance", &minted).await).unwrap();
    let expected = json!({"source": "federated", "rule": rule["uuid"], "rule_name": "deploy",
                          "issuer": "forge", "claims": satisfied, "jti": claims["jti"], "sub": "repo:x"});
    assert_eq!(provenance, expected);
    let scopes: Value = serde_json::from_str(&fixture.key_column("scopes", &minted).await).unwrap();
    assert_eq!(scopes, rule["scopes"]);
    let expiry: f64 = fixture.key_column("expiry", &minted).await.parse().unwrap();
    assert!((600.0..=630.0).contains(&(expiry - started)), "{expiry}");

    let id = fixture.key_column("uuid", &minted).await;
    let events = fixture.cluster.events(&ObjectRef::new(ObjectType::NamespaceKey, id)).await;
    let event = events.iter().find(|e| e.message == "key minted by federated exchange").unwrap();
    assert_eq!((event.event_type.as_str(), &event.extra["rule"]), ("audit", &rule["uuid"]));
    assert_eq!((&event.extra["claims"], &event.extra["scopes"]), (&satisfied, &rule["scopes"]));
    assert_eq!(event.extra["issuer"], "forge");
    assert!(event.request_id.is_some());

    let events = fixture.cluster.events(&ObjectRef::namespace("ci")).await;
    let event = events.iter().find(|e| e.message == "federated exchange minted a key").unwrap();
    assert_eq!((event.event_type.as_str(), &event.extra["key_name"]), ("audit", &minted["key_name"]));
    assert_eq!((&event.extra["claims"], &event.extra["issuer"]), (&satisfied, &json!("forge")));
    assert!(!event.extra["rule"].is_null());
    let object = ObjectRef::new(ObjectType::Rule, rule["uuid"].as_str().unwrap());
    assert!(!fixture.cluster.messages(&object).await.contains(&"federated exchange refused".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn stores_neither_token_nor_key() {
    let fixture = Fixture::new().await;
    let token = fixture.token();
    let minted = fixture.exchange(&token).await.body;
    fixture.assert_refused(&token, super::TOKEN_USED, "again").await;
    let refused = fixture.token_with_claims(&json!({"ref": "other"}));
    fixture.assert_refused(&refused, super::CLAIMS_MISMATCH, "other claims").await;
    fixture.cluster.messages(&ObjectRef::namespace("ci")).await;
    let key = minted["key"].as_str().unwrap();
    let mut secrets = vec![key.to_owned(), key[4..36].to_owned()];
    secrets.extend([&token, &refused].iter().flat_map(|token| token.split('.').skip(1)).map(str::to_owned));
    let mut files_with_key_name = 0;
    let mut directories = vec![fixture.cluster.directory().to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
            if entry.path().is_dir() {
                directories.push(entry.path());
                continue;
            }
            let bytes = std::fs::read(entry.path()).unwrap();
            let text = String::from_utf8_lossy(&bytes);
            files_with_key_name += usize::from(text.contains(minted["key_name"].as_str().unwrap()));
            for secret in &secrets {
                assert!(!text.contains(secret), "{} contains {secret}", entry.path().display());
            }
        }
    }
    assert!(files_with_key_name > 0, "the name of the key is stored");
}

#[tokio::test(flavor = "multi_thread")]
async fn accepts_all_nine_signature_algorithms() {
    let fixture = Fixture::new().await;
    let mut published = vec![merge(&fixture.issuer.rsa_jwk(), &json!({"kid": "r"}))];
    for algorithm in ["ES256", "ES384", "ES512"] {
        published.push(merge(&fixture.issuer.ec_jwk(algorithm), &json!({ "kid": algorithm })));
    }
    fixture.issuer.publish(published);
    let rsa =
        ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"].map(|name| (name, "r", Signer::Rsa(name)));
    let ec = ["ES256", "ES384", "ES512"].map(|name| (name, name, Signer::Ec(name)));
    for (algorithm, id, signer) in rsa.into_iter().chain(ec) {
        let token = fixture.issuer.token_with(json!({"alg": algorithm, "kid": id}), fixture.claims(), signer);
        let response = fixture.exchange(&token).await;
        assert_eq!(response.status, 200, "{algorithm}: {}", response.text);
    }
    assert_eq!(fixture.issuer.fetches(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_of_system_can_mint_admin_keys() {
    let fixture = Fixture::new().await;
    let scopes = json!({"scopes": ["node.read", "cluster-admin"]});
    let body = merge(&super::rule_request("root", "forge"), &scopes);
    let created = post(&fixture.cluster, &fixture.admin, "/auth/namespaces/system/rules", body).await;
    assert_eq!(created.status, 200, "{}", created.text);
    let response = fixture.exchange_with_rule(&fixture.token(), "system", "root").await;
    assert_eq!((response.status.as_u16(), &response.body["namespace"]), (200, &json!("system")));
    let token = fixture.log_in(&response.body).await;
    assert_eq!(get(&fixture.cluster, &token, "/nodes").await.status, 200);
    assert_eq!(get(&fixture.cluster, &token, "/admin/locks").await.status, 403);
}
