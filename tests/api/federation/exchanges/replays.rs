//! Replay protection: a token can be exchanged once per rule.

use std::sync::Arc;

use muster_testing::Issuer;
use muster_testing::issuer::Signer;
use serde_json::json;

use super::super::put;
use super::{CLAIMS_MISMATCH, Fixture, TOKEN_REJECTED, TOKEN_USED, merge, status_and_error};
use crate::networks::{get, post};

#[tokio::test(flavor = "multi_thread")]
async fn token_can_be_exchanged_once() {
    let fixture = Fixture::new().await;
    let token = fixture.token();
    assert_eq!(fixture.exchange(&token).await.status, 200);
    fixture.assert_refused(&token, TOKEN_USED, "second time").await;
    fixture.assert_refused(&token, TOKEN_USED, "third time").await;
    fixture.assert_exchange_succeeds().await;
}

async fn assert_one_of_fifty_succeeds(url: Option<&str>) {
    let fixture = Arc::new(Fixture::on(url, Issuer::start(), &[]).await);
    // First without, then with cached keys.
    for _ in 0..2 {
        let before = fixture.minted_key_count().await;
        let token = fixture.token();
        let start = Arc::new(tokio::sync::Barrier::new(50));
        let exchanges: Vec<_> = (0..50)
            .map(|_| {
                let (fixture, token, start) = (Arc::clone(&fixture), token.clone(), Arc::clone(&start));
                tokio::spawn(async move {
                    start.wait().await;
                    fixture.exchange(&token).await
                })
            })
            .collect();
        let mut succeeded = 0;
        for exchange in exchanges {
            let response = exchange.await.unwrap();
            if response.status == 200 {
                succeeded += 1;
            } else {
                assert_eq!(status_and_error(&response), TOKEN_USED);
            }
        }
        assert_eq!((succeeded, fixture.minted_key_count().await - before), (1, 1));
    }
    assert_eq!(fixture.issuer.fetches(), 1, "all exchanges share one fetch");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_of_fifty_concurrent_exchanges_succeeds() {
    assert_one_of_fifty_succeeds(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_of_fifty_concurrent_exchanges_succeeds_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => assert_one_of_fifty_succeeds(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn token_can_be_exchanged_once_per_rule() {
    let fixture = Fixture::new().await;
    fixture.add_rule("other", &json!({})).await;
    let token = fixture.token();
    assert_eq!(fixture.exchange(&token).await.status, 200);
    let response = fixture.exchange_with_rule(&token, "ci", "other").await;
    assert_eq!(response.status, 200, "{}", response.text);
    assert_eq!(status_and_error(&fixture.exchange_with_rule(&token, "ci", "other").await), TOKEN_USED);
    fixture.assert_refused(&token, TOKEN_USED, "used with the first rule").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_token_is_not_consumed() {
    let fixture = Fixture::new().await;
    let path = "/auth/namespaces/ci/rules/deploy";
    let rule_update = |sub: &str| {
        let mut body =
            merge(&super::rule_request("deploy", "forge"), &json!({"bound_claims": { "sub": sub }}));
        body.as_object_mut().unwrap().remove("name");
        body
    };
    let token = fixture.token();
    assert_eq!(put(&fixture.cluster, &fixture.admin, path, rule_update("other")).await.status, 200);
    fixture.assert_refused(&token, CLAIMS_MISMATCH, "the rule does not match").await;
    fixture.execute_sql("UPDATE namespaces SET state = 'deleted' WHERE name = 'ci'").await;
    fixture.assert_refused(&token, CLAIMS_MISMATCH, "the namespace is deleted as well").await;
    fixture.execute_sql("UPDATE namespaces SET state = 'created' WHERE name = 'ci'").await;
    assert_eq!(put(&fixture.cluster, &fixture.admin, path, rule_update("repo:x")).await.status, 200);
    let response = fixture.exchange(&token).await;
    assert_eq!(response.status, 200, "{}", response.text);
    // Updating a rule keeps its record of used tokens.
    assert_eq!(put(&fixture.cluster, &fixture.admin, path, rule_update("repo:x")).await.status, 200);
    fixture.assert_refused(&token, TOKEN_USED, "after updating the rule").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_with_same_jti_are_one_token() {
    let fixture = Fixture::new().await;
    let first = fixture.token_with_claims(&json!({"jti": "one name"}));
    let second = fixture.token_with_claims(&json!({"jti": "one name", "ref": "next"}));
    assert_ne!(first, second);
    assert_eq!(fixture.exchange(&first).await.status, 200);
    fixture.assert_refused(&second, TOKEN_USED, "the same jti").await;
    // The jti of one issuer does not conflict with that of another.
    let other = Issuer::start();
    std::fs::write(&fixture.ca_bundle, fixture.issuer.ca_pem() + &other.ca_pem()).unwrap();
    let body = json!({"name": "other", "issuer_url": other.url(), "jwks_uri": other.jwks_uri(), "audience": "cloud"});
    assert_eq!(post(&fixture.cluster, &fixture.admin, "/auth/issuers", body).await.status, 200);
    let mut rule_update = merge(&super::rule_request("deploy", "other"), &json!({}));
    rule_update.as_object_mut().unwrap().remove("name");
    let path = "/auth/namespaces/ci/rules/deploy";
    assert_eq!(put(&fixture.cluster, &fixture.admin, path, rule_update).await.status, 200);
    assert_eq!(get(&fixture.cluster, &fixture.admin, path).await.body["issuer"], "other");
    let other_token = other.token(merge(&other.claims("cloud"), &json!({"ref": "main", "jti": "one name"})));
    let response = fixture.exchange(&other_token).await;
    assert_eq!(response.status, 200, "{}", response.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn identifies_token_without_usable_jti_by_content() {
    let fixture = Fixture::new().await;
    let unusable = [json!(null), json!(""), json!(7), json!(["x"]), json!("x".repeat(129))];
    for jti in unusable {
        let mut claims = merge(&fixture.claims(), &json!({"jti": jti, "nonce": jti}));
        claims.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        let header = json!({"alg": "ES256", "kid": "ec-1"});
        let sign = || fixture.issuer.token_with(header.clone(), claims.clone(), Signer::Ec("ES256"));
        // ECDSA signatures of the same message differ.
        let (first, second) = (sign(), sign());
        assert_ne!(first, second);
        let response = fixture.exchange(&first).await;
        assert_eq!(response.status, 200, "{jti}: {}", response.text);
        fixture.assert_refused(&first, TOKEN_USED, "the same token").await;
        fixture.assert_refused(&second, TOKEN_USED, "another signature").await;
        // The last character of a signature has unused bits.
        let response = fixture.exchange(&reencode_signature(&first)).await;
        assert!([TOKEN_USED, TOKEN_REJECTED].contains(&status_and_error(&response)), "{}", response.text);
    }
    // A jti of 128 characters is accepted.
    let long_jti = json!({"jti": "é".repeat(128)});
    assert_eq!(fixture.exchange(&fixture.token_with_claims(&long_jti)).await.status, 200);
    let same_jti = merge(&long_jti, &json!({"ref": "next"}));
    fixture.assert_refused(&fixture.token_with_claims(&same_jti), TOKEN_USED, "the same long jti").await;
}

/// Re-encodes the signature of a token with different unused bits.
fn reencode_signature(token: &str) -> String {
    const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let (start, last) = token.split_at(token.len() - 1);
    let value = ALPHABET.iter().position(|character| *character == last.as_bytes()[0]).unwrap();
    format!("{start}{}", char::from(ALPHABET[value ^ 1]))
}
