//! What a token is exchanged for.

use std::collections::HashSet;

use muster_testing::issuer::Signer;
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use super::{World, refusal, with};
use crate::harness::wait_for;
use crate::networks::{get, post};

impl World {
    /// The token of a minted key.
    async fn log_in(&self, minted: &Value) -> String {
        let body = json!({"namespace": minted["namespace"], "key": minted["key"]});
        let answer = post(&self.cluster, "", "/auth", body).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.body["access_token"].as_str().unwrap().to_owned()
    }

    /// A column of a minted key.
    async fn column(&self, column: &str, minted: &Value) -> String {
        let name = minted["key_name"].as_str().unwrap();
        let sql = format!("SELECT CAST({column} AS CHAR) FROM namespace_keys WHERE name = '{name}'");
        self.cluster.app.store.query(&sql, &[]).await.unwrap()[0].scalar().unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_exchanged_for_a_key_that_can_do_what_the_rule_says() {
    let world = World::new().await;
    let minted = world.works().await;
    assert_eq!(minted.as_object().unwrap().len(), 3, "{minted}");
    assert_eq!(minted["namespace"], "ci");
    let random = minted["key_name"].as_str().unwrap().strip_prefix("robot-").unwrap();
    assert!(random.len() == 8 && random.chars().all(|c| c.is_ascii_alphanumeric()), "{random}");
    let key = minted["key"].as_str().unwrap();
    assert!(key.starts_with("sfk_") && key.len() == 42, "{key}");

    let token = world.log_in(&minted).await;
    assert_eq!(get(&world.cluster, &token, "/artifacts").await.status, 200);
    let not_scoped = (403, "token is not scoped for this operation");
    assert_eq!(refusal(&get(&world.cluster, &token, "/instances").await), not_scoped);
    assert_eq!(refusal(&get(&world.cluster, &token, "/auth/namespaces").await), not_scoped);
    let rule = json!({"name": "more"});
    assert_eq!(refusal(&post(&world.cluster, &token, "/auth/namespaces/ci/rules", rule).await), not_scoped);
    let names = get(&world.cluster, &world.admin, "/auth/namespaces/ci/keys").await.body;
    assert_eq!(names, json!([minted["key_name"]]));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_exchange_makes_a_key_of_its_own() {
    let world = World::new().await;
    let mut names = HashSet::new();
    let mut keys = HashSet::new();
    for _ in 0..5 {
        let minted = world.works().await;
        world.log_in(&minted).await;
        names.insert(minted["key_name"].to_string());
        keys.insert(minted["key"].to_string());
    }
    assert_eq!((names.len(), keys.len()), (5, 5));
    assert_eq!(world.minted().await, 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_it_makes_ends_with_it() {
    let world = World::new().await;
    world.add_rule("keys", &json!({"scopes": ["*"]})).await;
    let minted = world.exchange_by(&world.token(), "ci", "keys").await.body;
    let end = world.column("expiry", &minted).await;
    let token = world.log_in(&minted).await;
    let far = muster_types::time::now() + 1e6;
    let make = async |token: &str, body: Value| -> Value {
        let answer = post(&world.cluster, token, "/auth/namespaces/ci/keys", body).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        with(&answer.body, &json!({"namespace": "ci"}))
    };
    let made = make(&token, json!({"key_name": "first"})).await;
    let next = world.log_in(&made).await;
    make(&next, json!({"key_name": "second", "expiry": far})).await;
    // Nor does it live longer by its own name.
    make(&next, json!({"key_name": minted["key_name"]})).await;
    for name in [json!("first"), json!("second"), minted["key_name"].clone()] {
        let key = json!({"key_name": name});
        assert_eq!(world.column("expiry", &key).await, end, "{name}");
        let provenance: Value = serde_json::from_str(&world.column("provenance", &key).await).unwrap();
        assert_eq!(provenance["rule_name"], "keys", "{name}");
    }
    make(&world.admin, json!({"key_name": "own"})).await;
    let sql = "SELECT 1 FROM namespace_keys WHERE name = 'own' AND expiry IS NULL AND provenance IS NULL";
    assert_eq!(world.cluster.app.store.query(sql, &[]).await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_ends_with_the_time_that_the_rule_gives_it() {
    let world = World::new().await;
    world.add_rule("short", &json!({"key_ttl": 3})).await;
    let answer = world.exchange_by(&world.token(), "ci", "short").await;
    let token = world.log_in(&answer.body).await;
    assert_eq!(get(&world.cluster, &token, "/artifacts").await.status, 200);
    let body = json!({"namespace": "ci", "key": answer.body["key"]});
    wait_for("the key to expire", async || {
        (post(&world.cluster, "", "/auth", body.clone()).await.status == 401).then_some(())
    })
    .await;
    assert_eq!(get(&world.cluster, &token, "/artifacts").await.status, 401, "nor is its token good");
    assert_eq!(get(&world.cluster, &world.admin, "/auth/namespaces/ci/keys").await.body, json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_says_where_it_comes_from() {
    let world = World::new().await;
    let started = muster_types::time::now();
    let claims = world.claims();
    let answer = world.exchange(&world.issuer.token(claims.clone())).await;
    let minted = answer.body;
    let rule = get(&world.cluster, &world.admin, "/auth/namespaces/ci/rules/deploy").await.body;
    let satisfied = json!({"sub": "repo:x", "ref": "main"});
    let provenance: Value = serde_json::from_str(&world.column("provenance", &minted).await).unwrap();
    let expected = json!({"source": "federated", "rule": rule["uuid"], "rule_name": "deploy",
                          "issuer": "forge", "claims": satisfied, "jti": claims["jti"], "sub": "repo:x"});
    assert_eq!(provenance, expected);
    let scopes: Value = serde_json::from_str(&world.column("scopes", &minted).await).unwrap();
    assert_eq!(scopes, rule["scopes"]);
    let expiry: f64 = world.column("expiry", &minted).await.parse().unwrap();
    assert!((600.0..=630.0).contains(&(expiry - started)), "{expiry}");

    let id = world.column("uuid", &minted).await;
    let events = world.cluster.events(&ObjectRef::new(ObjectType::NamespaceKey, id)).await;
    let event = events.iter().find(|e| e.message == "key minted by federated exchange").unwrap();
    assert_eq!((event.event_type.as_str(), &event.extra["rule"]), ("audit", &rule["uuid"]));
    assert_eq!((&event.extra["claims"], &event.extra["scopes"]), (&satisfied, &rule["scopes"]));
    assert_eq!(event.extra["issuer"], "forge");
    assert!(event.request_id.is_some());

    let events = world.cluster.events(&ObjectRef::namespace("ci")).await;
    let event = events.iter().find(|e| e.message == "federated exchange minted a key").unwrap();
    assert_eq!((event.event_type.as_str(), &event.extra["key_name"]), ("audit", &minted["key_name"]));
    assert_eq!((&event.extra["claims"], &event.extra["issuer"]), (&satisfied, &json!("forge")));
    assert!(!event.extra["rule"].is_null());
    let object = ObjectRef::new(ObjectType::Rule, rule["uuid"].as_str().unwrap());
    assert!(!world.cluster.messages(&object).await.contains(&"federated exchange refused".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn neither_the_token_nor_the_key_is_kept_anywhere() {
    let world = World::new().await;
    let token = world.token();
    let minted = world.exchange(&token).await.body;
    world.refused(&token, super::USED, "again").await;
    let refused = world.token_but(&json!({"ref": "other"}));
    world.refused(&refused, super::NO_MATCH, "other claims").await;
    world.cluster.messages(&ObjectRef::namespace("ci")).await;
    let key = minted["key"].as_str().unwrap();
    let mut secrets = vec![key.to_owned(), key[4..36].to_owned()];
    secrets.extend([&token, &refused].iter().flat_map(|token| token.split('.').skip(1)).map(str::to_owned));
    let mut seen = 0;
    let mut folders = vec![world.cluster.folder().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            if entry.path().is_dir() {
                folders.push(entry.path());
                continue;
            }
            let bytes = std::fs::read(entry.path()).unwrap();
            let text = String::from_utf8_lossy(&bytes);
            seen += usize::from(text.contains(minted["key_name"].as_str().unwrap()));
            for secret in &secrets {
                assert!(!text.contains(secret), "{} holds {secret}", entry.path().display());
            }
        }
    }
    assert!(seen > 0, "the name of the key is kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn all_nine_algorithms_are_good() {
    let world = World::new().await;
    let mut published = vec![with(&world.issuer.rsa_jwk(), &json!({"kid": "r"}))];
    for algorithm in ["ES256", "ES384", "ES512"] {
        published.push(with(&world.issuer.ec_jwk(algorithm), &json!({ "kid": algorithm })));
    }
    world.issuer.publish(published);
    let rsa =
        ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"].map(|name| (name, "r", Signer::Rsa(name)));
    let ec = ["ES256", "ES384", "ES512"].map(|name| (name, name, Signer::Ec(name)));
    for (algorithm, id, signer) in rsa.into_iter().chain(ec) {
        let token = world.issuer.token_with(json!({"alg": algorithm, "kid": id}), world.claims(), signer);
        let answer = world.exchange(&token).await;
        assert_eq!(answer.status, 200, "{algorithm}: {}", answer.text);
    }
    assert_eq!(world.issuer.fetches(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_of_system_can_mint_keys_of_administrators() {
    let world = World::new().await;
    let scopes = json!({"scopes": ["node.read", "cluster-admin"]});
    let body = with(&super::rule("root", "forge"), &scopes);
    let made = post(&world.cluster, &world.admin, "/auth/namespaces/system/rules", body).await;
    assert_eq!(made.status, 200, "{}", made.text);
    let answer = world.exchange_by(&world.token(), "system", "root").await;
    assert_eq!((answer.status.as_u16(), &answer.body["namespace"]), (200, &json!("system")));
    let token = world.log_in(&answer.body).await;
    assert_eq!(get(&world.cluster, &token, "/nodes").await.status, 200);
    assert_eq!(get(&world.cluster, &token, "/admin/locks").await.status, 403);
}
