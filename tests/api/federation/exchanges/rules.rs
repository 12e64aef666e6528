//! Rules, issuers and namespaces that an exchange cannot use.

use std::sync::Arc;

use axum::http::Method;
use muster_test_cluster::wait_for;
use muster_testing::Issuer;
use muster_testing::issuer::Mode;
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::json;

use super::{
    Fixture, NO_NAMESPACE, NO_RULE, RULE_UNUSABLE, UNTRUSTED_ISSUER, WRONG_ISSUER, merge, status_and_error,
};
use crate::networks::{delete, get, post};

const DEPLOY: &str = "/auth/namespaces/ci/rules/deploy";

async fn assert_unknown_namespace_looks_like_unknown_rule(url: Option<&str>) {
    let fixture = Fixture::on(url, Issuer::start(), &[]).await;
    fixture.cluster.create_namespace("empty").await;
    let unknown = fixture.exchange_with_rule(&fixture.token(), "ci", "absent").await;
    assert_eq!(status_and_error(&unknown), NO_RULE);
    // Everything but the request id is the same.
    let without_id = |response: &muster_test_cluster::ApiResponse| {
        let id = response.headers["x-request-id"].to_str().unwrap();
        (response.status, response.text.replace(id, ""))
    };
    for (namespace, rule) in [
        ("absent", "deploy"),
        ("empty", "deploy"),
        ("ci", "Deploy"),
        ("CI", "deploy"),
        ("ci ", "deploy"),
        ("ci", "deploy "),
        ("cı", "déploy"),
        ("ci", "%"),
    ] {
        let response = fixture.exchange_with_rule(&fixture.token(), namespace, rule).await;
        assert_eq!(without_id(&response), without_id(&unknown), "{namespace:?} {rule:?}");
    }
    // A caller without a valid token does not learn whether a rule exists.
    let response = fixture
        .exchange_with_rule(&fixture.token_with_claims(&json!({"aud": "other"})), "ci", "absent")
        .await;
    assert_eq!(status_and_error(&response), super::TOKEN_REJECTED);
    assert_eq!(fixture.minted_key_count().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_namespace_looks_like_unknown_rule() {
    assert_unknown_namespace_looks_like_unknown_rule(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_namespace_looks_like_unknown_rule_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => assert_unknown_namespace_looks_like_unknown_rule(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_exchange_with_deleted_rule() {
    let fixture = Fixture::new().await;
    let token = fixture.token();
    assert_eq!(delete(&fixture.cluster, &fixture.admin, DEPLOY).await.status, 200);
    fixture.assert_refused(&token, NO_RULE, "deleted").await;
    fixture.add_rule("deploy", &json!({})).await;
    assert_eq!(fixture.exchange(&token).await.status, 200, "the rule was created again");
}

async fn assert_damaged_rule_mints_nothing(url: Option<&str>) {
    let fixture = Fixture::on(url, Issuer::start(), &[]).await;
    let damaged_values = [
        ("bound_claims", "'{'"),
        ("bound_claims", "''"),
        ("bound_claims", "'null'"),
        ("bound_claims", "'{}'"),
        ("bound_claims", "'[]'"),
        ("bound_claims", "'{\"sub\": 7}'"),
        ("bound_claims", "'{\"sub\": []}'"),
        ("bound_claims", "'{\"sub\": \"repo:x\", \"ref\": [7]}'"),
        ("scopes", "''"),
        ("scopes", "'null'"),
        ("scopes", "'[]'"),
        ("scopes", "'\"*\"'"),
        ("scopes", "'[7]'"),
        ("key_ttl", "0"),
        ("key_ttl", "-5"),
    ];
    for (column, value) in damaged_values {
        let assignment = format!("{column} = {value}");
        fixture.add_rule("damaged", &json!({})).await;
        fixture.execute_sql(&format!("UPDATE rules SET {assignment} WHERE live_name = 'damaged'")).await;
        let response = fixture.exchange_with_rule(&fixture.token(), "ci", "damaged").await;
        assert_eq!(status_and_error(&response), RULE_UNUSABLE, "{assignment}");
        fixture
            .execute_sql("UPDATE rules SET state = 'deleted', live_name = NULL WHERE live_name = 'damaged'")
            .await;
    }
    assert_eq!(fixture.minted_key_count().await, 0);
    fixture.assert_exchange_succeeds().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_rule_mints_nothing() {
    assert_damaged_rule_mints_nothing(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_rule_mints_nothing_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => assert_damaged_rule_mints_nothing(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_refusal_in_events_of_the_rule() {
    let fixture = Fixture::new().await;
    let rule = get(&fixture.cluster, &fixture.admin, DEPLOY).await.body;
    fixture.execute_sql("UPDATE rules SET scopes = '[]' WHERE live_name = 'deploy'").await;
    fixture.assert_refused(&fixture.token(), RULE_UNUSABLE, "no scopes").await;
    fixture.execute_sql("UPDATE rules SET scopes = '[\"*\"]' WHERE live_name = 'deploy'").await;
    fixture.assert_exchange_succeeds().await;
    let object = ObjectRef::new(ObjectType::Rule, rule["uuid"].as_str().unwrap());
    let events = fixture.cluster.events(&object).await;
    let refused: Vec<_> = events.iter().filter(|e| e.message == "federated exchange refused").collect();
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].extra["reason"], "rule is unusable");
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_accepts_only_tokens_of_its_issuer() {
    let fixture = Fixture::new().await;
    let other = Issuer::start();
    std::fs::write(&fixture.ca_bundle, fixture.issuer.ca_pem() + &other.ca_pem()).unwrap();
    let body = json!({"name": "other", "issuer_url": other.url(), "jwks_uri": other.jwks_uri(), "audience": "cloud"});
    assert_eq!(post(&fixture.cluster, &fixture.admin, "/auth/issuers", body).await.status, 200);
    fixture.add_rule("others", &json!({"issuer": "other"})).await;
    let other_token = other.token(merge(&other.claims("cloud"), &json!({"ref": "main"})));
    fixture.assert_refused(&other_token, WRONG_ISSUER, "token of the other issuer").await;
    let response = fixture.exchange_with_rule(&fixture.token(), "ci", "others").await;
    assert_eq!(status_and_error(&response), WRONG_ISSUER);
    assert_eq!(fixture.exchange_with_rule(&other_token, "ci", "others").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_issuer_is_untrusted_until_created_again() {
    let fixture = Fixture::new().await;
    let token = fixture.token();
    fixture.assert_exchange_succeeds().await;
    assert_eq!(delete(&fixture.cluster, &fixture.admin, "/auth/issuers/forge").await.status, 200);
    fixture.assert_refused(&token, UNTRUSTED_ISSUER, "deleted").await;
    let fetched = fixture.issuer.fetches();
    // Under another name it is not the issuer of the rule.
    let other = merge(&fixture.issuer_request(), &json!({"name": "other"}));
    assert_eq!(post(&fixture.cluster, &fixture.admin, "/auth/issuers", other).await.status, 200);
    fixture.assert_refused(&token, WRONG_ISSUER, "under another name").await;
    assert!(fixture.issuer.fetches() > fetched, "keys are not cached across issuers");
    assert_eq!(delete(&fixture.cluster, &fixture.admin, "/auth/issuers/other").await.status, 200);
    assert_eq!(
        post(&fixture.cluster, &fixture.admin, "/auth/issuers", fixture.issuer_request()).await.status,
        200
    );
    let response = fixture.exchange(&token).await;
    assert_eq!(response.status, 200, "the rule refers to the new issuer: {}", response.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_namespace_gets_no_keys() {
    let fixture = Fixture::new().await;
    // Only the namespace is deleted so far, not its rules.
    fixture.execute_sql("UPDATE namespaces SET state = 'deleted' WHERE name = 'ci'").await;
    fixture.assert_refused(&fixture.token(), NO_NAMESPACE, "namespace deleted").await;
    fixture.execute_sql("UPDATE namespaces SET state = 'created' WHERE name = 'ci'").await;
    fixture.assert_exchange_succeeds().await;

    let token = fixture.token();
    fixture.cluster.call(&fixture.admin, Method::DELETE, "/auth/namespaces/ci", None).await;
    let response = fixture.exchange(&token).await;
    assert!([NO_NAMESPACE, NO_RULE].contains(&status_and_error(&response)), "{}", response.text);
    fixture.cluster.settle().await;
    fixture.assert_refused(&token, NO_RULE, "rules deleted").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_during_key_fetch_prevents_exchange() {
    for path in ["/auth/issuers/forge", DEPLOY, "/auth/namespaces/ci"] {
        let fixture = Arc::new(Fixture::new().await);
        fixture.issuer.serve(Mode::Hang);
        let token = fixture.token();
        let exchanging_fixture = Arc::clone(&fixture);
        let exchange = tokio::spawn(async move { exchanging_fixture.exchange(&token).await });
        wait_for("the fetch", async || (fixture.issuer.fetches() > 0).then_some(())).await;
        let deleted = delete(&fixture.cluster, &fixture.admin, path).await;
        assert_eq!(deleted.status, 200, "{path}: {}", deleted.text);
        fixture.issuer.serve(Mode::Keys);
        let response = exchange.await.unwrap();
        assert_eq!(response.status, 401, "{path}: {}", response.text);
        assert!(response.text.contains("federated exchange refused: "), "{}", response.text);
        assert_eq!(fixture.minted_key_count().await, 0, "{path}");
    }
}
