//! Fetching and caching the keys of issuers, including misbehaving issuers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_test_cluster::wait_for;
use muster_testing::Issuer;
use muster_testing::issuer::{Certificate, Mode, Signer};
use muster_testing::web_server::{Reply, WebServer};
use serde_json::{Value, json};

use super::{Fixture, TOKEN_REJECTED, merge};

const SHORT_FETCH_TIMEOUT: (&str, &str) = ("FEDERATION_JWKS_FETCH_TIMEOUT_SECONDS", "1");

impl Fixture {
    /// Asserts that the issuer's response is rejected, and accepted once the issuer is repaired.
    async fn assert_rejected_until_repaired(&self, case: &str) {
        self.assert_refused(&self.token(), TOKEN_REJECTED, case).await;
        self.issuer.serve(Mode::Keys);
        self.wait_for_exchange(case).await;
    }

    /// Waits until an exchange succeeds.
    async fn wait_for_exchange(&self, case: &str) {
        let token = self.token();
        let exchange_succeeds = async || (self.exchange(&token).await.status == 200).then_some(());
        wait_for(&format!("recovery from: {case}"), exchange_succeeds).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fetches_keys_once_and_caches_them() {
    let fixture = Fixture::new().await;
    for _ in 0..5 {
        fixture.assert_exchange_succeeds().await;
    }
    fixture
        .assert_refused(
            &fixture.token_with_claims(&json!({"aud": "other"})),
            TOKEN_REJECTED,
            "wrong audience",
        )
        .await;
    assert_eq!(fixture.issuer.fetches(), 1);
    // Cached keys survive a short outage of the issuer.
    fixture.issuer.serve(Mode::Status(500));
    fixture.assert_exchange_succeeds().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cached_keys_expire() {
    let fixture =
        Fixture::with(Issuer::start(), &[("FEDERATION_JWKS_CACHE_SECONDS", "1"), SHORT_FETCH_TIMEOUT]).await;
    fixture.assert_exchange_succeeds().await;
    fixture.issuer.serve(Mode::Status(500));
    wait_for("the cached keys to expire", async || {
        (super::status_and_error(&fixture.exchange(&fixture.token()).await) == TOKEN_REJECTED).then_some(())
    })
    .await;
    assert!(fixture.issuer.fetches() > 1);
    fixture.assert_rejected_until_repaired("expired cache").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn key_rotation_takes_effect_immediately() {
    let fixture = Fixture::new().await;
    fixture.assert_exchange_succeeds().await;
    let signed_before_rotation = fixture.token();
    fixture.issuer.rotate();
    fixture.assert_exchange_succeeds().await;
    fixture.assert_refused(&signed_before_rotation, TOKEN_REJECTED, "signed with a withdrawn key").await;
    // A second rotation right after the first.
    fixture.issuer.rotate();
    fixture.assert_exchange_succeeds().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_key_ids_cause_few_fetches() {
    let fixture = Arc::new(Fixture::new().await);
    fixture.assert_exchange_succeeds().await;
    let exchange_with_unknown_key = |number: usize| {
        let fixture = Arc::clone(&fixture);
        tokio::spawn(async move {
            let header = json!({"alg": "RS256", "kid": format!("unknown-{number}")});
            let token = fixture.issuer.token_with(header, fixture.claims(), Signer::Rsa("RS256"));
            assert_eq!(super::status_and_error(&fixture.exchange(&token).await), TOKEN_REJECTED);
        })
    };
    // Sequentially, then concurrently.
    for number in 0..60 {
        exchange_with_unknown_key(number).await.unwrap();
    }
    let exchanges: Vec<_> = (60..160).map(exchange_with_unknown_key).collect();
    for exchange in exchanges {
        exchange.await.unwrap();
    }
    assert!(fixture.issuer.fetches() <= 20, "{} fetches", fixture.issuer.fetches());
    // Known keys still work.
    fixture.assert_exchange_succeeds().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn times_out_on_hanging_issuer() {
    let fixture = Fixture::with(Issuer::start(), &[SHORT_FETCH_TIMEOUT]).await;
    fixture.issuer.serve(Mode::Hang);
    let started = Instant::now();
    fixture.assert_refused(&fixture.token(), TOKEN_REJECTED, "hanging issuer").await;
    let waited = started.elapsed();
    assert!((1..8).contains(&waited.as_secs()), "the fetch is bounded by the timeout: {waited:?}");
    fixture.issuer.serve(Mode::Keys);
    fixture.wait_for_exchange("hanging issuer").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_exchanges_share_one_hanging_fetch() {
    let fixture = Arc::new(Fixture::with(Issuer::start(), &[SHORT_FETCH_TIMEOUT]).await);
    fixture.issuer.serve(Mode::Hang);
    let started = Instant::now();
    let exchanges: Vec<_> = (0..20)
        .map(|_| {
            let fixture = Arc::clone(&fixture);
            tokio::spawn(async move { fixture.exchange(&fixture.token()).await })
        })
        .collect();
    for exchange in exchanges {
        assert_eq!(super::status_and_error(&exchange.await.unwrap()), TOKEN_REJECTED);
    }
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert!(fixture.issuer.fetches() <= 4, "{} fetches", fixture.issuer.fetches());
}

#[tokio::test(flavor = "multi_thread")]
async fn times_out_on_slow_issuer() {
    let fixture = Fixture::with(Issuer::start(), &[SHORT_FETCH_TIMEOUT]).await;
    fixture.issuer.serve(Mode::Slow);
    let started = Instant::now();
    fixture.assert_refused(&fixture.token(), TOKEN_REJECTED, "slow issuer").await;
    assert!(
        started.elapsed() < Duration::from_secs(8),
        "the timeout covers the whole response: {:?}",
        started.elapsed()
    );
    fixture.issuer.serve(Mode::Keys);
    fixture.wait_for_exchange("slow issuer").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_oversized_response() {
    let fixture = Fixture::new().await;
    fixture.issuer.serve(Mode::Huge);
    fixture.assert_rejected_until_repaired("oversized response").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_response_that_is_not_json() {
    let fixture = Fixture::new().await;
    fixture.issuer.serve(Mode::NotJson);
    fixture.assert_rejected_until_repaired("not JSON").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_response_with_error_status() {
    for status in [404, 500] {
        let fixture = Fixture::new().await;
        fixture.issuer.serve(Mode::Status(status));
        fixture.assert_rejected_until_repaired("unexpected status").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_redirect_to_other_schemes() {
    let fixture = Fixture::new().await;
    let keys = fixture.issuer.jwks().to_string();
    let web = WebServer::new(move |_, _| Reply::ok(keys.as_bytes())).await;
    for target in [web.url("/keys"), format!("//{}/keys", web.address), "file:///etc/passwd".into()] {
        let fixture = Fixture::new().await;
        fixture.issuer.serve(Mode::Redirect(target.clone()));
        fixture.assert_refused(&fixture.token(), TOKEN_REJECTED, &target).await;
    }
    assert_eq!(web.requests().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn follows_redirect_to_https() {
    let fixture = Fixture::new().await;
    fixture.issuer.serve(Mode::Redirect(fixture.issuer.moved_uri()));
    fixture.assert_exchange_succeeds().await;
    assert_eq!(fixture.issuer.fetches(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn stops_at_redirect_loop() {
    let fixture = Fixture::new().await;
    fixture.issuer.serve(Mode::Redirect(fixture.issuer.jwks_uri()));
    fixture.assert_refused(&fixture.token(), TOKEN_REJECTED, "redirect loop").await;
    assert!(fixture.issuer.fetches() <= 10, "{} fetches", fixture.issuer.fetches());
}

#[tokio::test(flavor = "multi_thread")]
async fn ignores_unusable_keys() {
    let fixture = Fixture::new().await;
    let mut keys: Vec<Value> = vec![
        json!(7),
        json!({}),
        json!({"kty": "OKP", "crv": "Ed25519", "x": "AAAA", "kid": "rsa-1"}),
        json!({"kty": "RSA", "n": "!", "e": "AQAB", "kid": "broken"}),
        json!({"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "short"}),
        merge(&fixture.issuer.rsa_jwk(), &json!({"kid": "sealing", "use": "enc"})),
        merge(&fixture.issuer.rsa_jwk(), &json!({"kid": "signing", "key_ops": ["sign"]})),
    ];
    keys.extend(fixture.issuer.jwks()["keys"].as_array().unwrap().clone());
    fixture.issuer.publish(keys);
    fixture.assert_exchange_succeeds().await;
    for id in ["broken", "short", "sealing", "signing"] {
        let header = json!({"alg": "RS256", "kid": id});
        let token = fixture.issuer.token_with(header, fixture.claims(), Signer::Rsa("RS256"));
        fixture.assert_refused(&token, TOKEN_REJECTED, id).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_tokens_of_issuer_without_keys() {
    for keys in [json!([]), json!({}), json!(7)] {
        let fixture = Fixture::new().await;
        match keys.as_array() {
            Some(keys) => fixture.issuer.publish(keys.clone()),
            None => fixture.issuer.publish(vec![keys]),
        }
        fixture.assert_refused(&fixture.token(), TOKEN_REJECTED, "no keys").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_jwks_uri_replaces_cached_keys() {
    let fixture = Fixture::new().await;
    fixture.assert_exchange_succeeds().await;
    let other = Issuer::start();
    std::fs::write(&fixture.ca_bundle, fixture.issuer.ca_pem() + &other.ca_pem()).unwrap();
    fixture.update_issuer(&json!({"jwks_uri": other.jwks_uri()})).await;
    fixture.assert_refused(&fixture.token(), TOKEN_REJECTED, "signed with the old key").await;
    let response = fixture.exchange(&other.token(fixture.claims())).await;
    assert_eq!(response.status, 200, "{}", response.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_invalid_certificates() {
    for certificate in [Certificate::WrongHost, Certificate::Expired] {
        let fixture = Fixture::with(Issuer::start_with(certificate), &[]).await;
        fixture.assert_refused(&fixture.token(), TOKEN_REJECTED, &format!("{certificate:?}")).await;
        assert_eq!(fixture.issuer.fetches(), 0, "{certificate:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fetches_from_loopback_addresses_by_default_but_not_from_link_local_ones() {
    let is_refused = |networks: &'static str, host: &'static str| async move {
        let fixture = Fixture::with(Issuer::start(), &[("FEDERATION_JWKS_ALLOWED_NETWORKS", networks)]).await;
        let uri = fixture.issuer.jwks_uri().replace("localhost", host);
        fixture.update_issuer(&json!({ "jwks_uri": uri })).await;
        let response = fixture.exchange(&fixture.token()).await;
        if response.status != 200 {
            assert_eq!(super::status_and_error(&response), TOKEN_REJECTED);
            assert_eq!(fixture.issuer.fetches(), 0);
        }
        response.status != 200
    };
    assert!(!is_refused("", "localhost").await);
    assert!(!is_refused("", "127.0.0.1").await);
    assert!(!is_refused("10.0.0.0/8", "127.0.0.1").await);
    assert!(is_refused("", "169.254.169.254").await);
}
