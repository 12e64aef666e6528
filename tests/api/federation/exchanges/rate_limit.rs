//! Rate limit of exchanges per client address and minute.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{Method, Request};
use muster_test_cluster::wait_for;
use muster_testing::Issuer;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;
use serde_json::{Value, json};

use super::{CLAIMS_MISMATCH, EXCHANGE, Fixture, TOO_MANY_ATTEMPTS, UNTRUSTED_ISSUER, status_and_error};

async fn with_rate_limit(limit: &str) -> Fixture {
    let settings = [("FEDERATION_RATE_LIMIT_PER_MINUTE", limit), ("FEDERATION_MAX_TOKEN_BYTES", "4000")];
    let fixture = Fixture::with(Issuer::start(), &settings).await;
    // The rest of the test must fall within one minute.
    wait_for("the start of a minute", async || (now() % 60.0 < 35.0).then_some(())).await;
    fixture
}

impl Fixture {
    fn exchange_body(&self, token: &str) -> Value {
        json!({"token": token, "namespace": "ci", "rule": "deploy"})
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn counts_every_attempt_regardless_of_outcome() {
    let fixture = with_rate_limit("4").await;
    let address = "192.0.2.7";
    let exchange_from =
        async |address, token: &str| fixture.exchange_from(address, &fixture.exchange_body(token)).await;
    assert_eq!(status_and_error(&exchange_from(address, "rubbish").await), UNTRUSTED_ISSUER);
    let unknown_issuer = fixture.token_with_claims(&json!({"iss": "https://elsewhere.example"}));
    assert_eq!(status_and_error(&exchange_from(address, &unknown_issuer).await), UNTRUSTED_ISSUER);
    let other_ref = fixture.token_with_claims(&json!({"ref": "other"}));
    assert_eq!(status_and_error(&exchange_from(address, &other_ref).await), CLAIMS_MISMATCH);
    assert_eq!(exchange_from(address, &fixture.token()).await.status, 200);
    let token = fixture.token();
    let refused = exchange_from(address, &token).await;
    assert_eq!(status_and_error(&refused), TOO_MANY_ATTEMPTS);
    assert_eq!(
        status_and_error(&exchange_from(address, "rubbish").await),
        TOO_MANY_ATTEMPTS,
        "the limit is checked before the token"
    );
    assert_eq!(
        status_and_error(&exchange_from("::ffff:192.0.2.7", &token).await),
        TOO_MANY_ATTEMPTS,
        "the same address mapped to IPv6"
    );

    let response = exchange_from("192.0.2.8", &token).await;
    assert_eq!(response.status, 200, "another address: {}", response.text);
    assert_eq!(exchange_from("2001:db8::7", &fixture.token()).await.status, 200);
    // Simulates the next minute.
    fixture.execute_sql("UPDATE exchange_attempts SET minute = minute - 1").await;
    assert_eq!(exchange_from(address, &fixture.token()).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn addresses_of_one_ipv6_network_share_a_limit() {
    let fixture = with_rate_limit("2").await;
    let exchange_from =
        async |address| fixture.exchange_from(address, &fixture.exchange_body(&fixture.token())).await;
    assert_eq!(exchange_from("2001:db8:0:1::7").await.status, 200);
    assert_eq!(exchange_from("2001:db8:0:1::8").await.status, 200);
    assert_eq!(status_and_error(&exchange_from("2001:db8:0:1:ffff::9").await), TOO_MANY_ATTEMPTS);
    assert_eq!(exchange_from("2001:db8:0:2::7").await.status, 200, "another network");
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_exchanges_are_sampled_as_events() {
    let fixture = Fixture::new().await;
    let refused = fixture.token_with_claims(&json!({"ref": "other"}));
    for _ in 0..40 {
        let response = fixture.exchange_from("2001:db8::7", &fixture.exchange_body(&refused)).await;
        assert_eq!(status_and_error(&response), CLAIMS_MISMATCH);
    }
    let rule =
        fixture.cluster.call(&fixture.admin, Method::GET, "/auth/namespaces/ci/rules/deploy", None).await;
    let rule = ObjectRef::new(ObjectType::Rule, rule.body["uuid"].as_str().unwrap());
    let events = fixture.cluster.events(&rule).await;
    let refusals: Vec<_> =
        events.iter().filter(|event| event.message == "federated exchange refused").collect();
    assert!((1..40).contains(&refusals.len()), "{}", refusals.len());
    assert_eq!(refusals[0].extra["remote-address"], "2001:db8::7");
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_requests_do_not_count_as_attempts() {
    let fixture = with_rate_limit("2").await;
    let too_large = "x".repeat(4001);
    for _ in 0..3 {
        assert_eq!(fixture.post_exchange(json!({"token": "x", "namespace": "ci"})).await.status, 400);
        assert_eq!(
            fixture.post_exchange(json!({"token": 7, "namespace": "ci", "rule": "x"})).await.status,
            400
        );
        let extra_field = json!({"token": "x", "namespace": "ci", "rule": "x", "more": 1});
        assert_eq!(fixture.post_exchange(extra_field).await.status, 400);
        assert_eq!(
            fixture.post_exchange(json!({"token": too_large, "namespace": "ci", "rule": "x"})).await.status,
            413
        );
        let response = fixture.cluster.send("", Method::POST, EXCHANGE, b"{".to_vec()).await;
        assert_eq!(response.status, 400);
        assert_eq!(fixture.cluster.send("", Method::POST, EXCHANGE, vec![]).await.status, 411);
    }
    fixture.assert_exchange_succeeds().await;
    fixture.assert_exchange_succeeds().await;
    assert_eq!(status_and_error(&fixture.exchange(&fixture.token()).await), TOO_MANY_ATTEMPTS);
    assert_eq!(
        fixture.post_exchange(json!({})).await.status,
        400,
        "malformed requests are rejected before the limit"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn limit_is_exact_under_concurrency() {
    let fixture = Arc::new(with_rate_limit("20").await);
    let exchanges: Vec<_> = (0..60)
        .map(|_| {
            let fixture = Arc::clone(&fixture);
            tokio::spawn(async move { fixture.exchange("rubbish").await })
        })
        .collect();
    let mut accepted = 0;
    for exchange in exchanges {
        let response = exchange.await.unwrap();
        if status_and_error(&response) == UNTRUSTED_ISSUER {
            accepted += 1;
        } else {
            assert_eq!(status_and_error(&response), TOO_MANY_ATTEMPTS);
        }
    }
    assert_eq!(accepted, 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn ignores_forwarding_headers() {
    let fixture = with_rate_limit("2").await;
    let mut accepted = 0;
    for number in 0..5 {
        let body = fixture.exchange_body("rubbish").to_string();
        let address = format!("198.51.100.{number}");
        let request = Request::post(EXCHANGE)
            .header("content-length", body.len())
            .header("x-forwarded-for", &address)
            .header("x-real-ip", &address)
            .header("forwarded", format!("for={address}"));
        let response = fixture.cluster.request(request.body(Body::from(body)).unwrap()).await;
        accepted += usize::from(status_and_error(&response) == UNTRUSTED_ISSUER);
    }
    assert_eq!(accepted, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn rate_limited_response_has_retry_after() {
    let fixture = with_rate_limit("1").await;
    fixture.assert_exchange_succeeds().await;
    let response = fixture.exchange(&fixture.token()).await;
    assert_eq!(status_and_error(&response), TOO_MANY_ATTEMPTS);
    let retry_after: f64 = response.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1.0..=60.0).contains(&retry_after), "{retry_after}");
    let retry_at = now() + retry_after;
    assert!(
        retry_at % 60.0 < 3.0 || retry_at % 60.0 > 57.0,
        "retry at the end of the minute, not {}",
        retry_at % 60.0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn zero_or_negative_limit_disables_rate_limiting() {
    for limit in ["0", "-1"] {
        let fixture = with_rate_limit(limit).await;
        for _ in 0..100 {
            assert_eq!(status_and_error(&fixture.exchange("rubbish").await), UNTRUSTED_ISSUER);
        }
        fixture.assert_exchange_succeeds().await;
    }
}
