//! How often one address may try in a minute.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{Method, Request};
use muster_testing::Issuer;
use muster_types::time::now;
use serde_json::{Value, json};

use super::{EXCHANGE, NO_MATCH, TOO_MANY, UNTRUSTED, World, refusal};
use crate::harness::wait_for;

async fn limited(limit: &str) -> World {
    let settings = [("FEDERATION_RATE_LIMIT_PER_MINUTE", limit), ("FEDERATION_MAX_TOKEN_BYTES", "4000")];
    let world = World::with(Issuer::start(), &settings).await;
    // The rest of the test is in one minute.
    wait_for("the beginning of a minute", async || (now() % 60.0 < 35.0).then_some(())).await;
    world
}

impl World {
    fn body(&self, token: &str) -> Value {
        json!({"token": token, "namespace": "ci", "rule": "deploy"})
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_attempt_counts_whatever_becomes_of_it() {
    let world = limited("4").await;
    let address = "192.0.2.7";
    let from = async |address, token: &str| world.exchange_from(address, &world.body(token)).await;
    assert_eq!(refusal(&from(address, "rubbish").await), UNTRUSTED);
    let stranger = world.token_but(&json!({"iss": "https://elsewhere.example"}));
    assert_eq!(refusal(&from(address, &stranger).await), UNTRUSTED);
    let other = world.token_but(&json!({"ref": "other"}));
    assert_eq!(refusal(&from(address, &other).await), NO_MATCH);
    assert_eq!(from(address, &world.token()).await.status, 200);
    let token = world.token();
    let refused = from(address, &token).await;
    assert_eq!(refusal(&refused), TOO_MANY);
    assert_eq!(refusal(&from(address, "rubbish").await), TOO_MANY, "before the token is looked at");
    assert_eq!(refusal(&from("::ffff:192.0.2.7", &token).await), TOO_MANY, "the same address in another way");

    let answer = from("192.0.2.8", &token).await;
    assert_eq!(answer.status, 200, "another address: {}", answer.text);
    assert_eq!(from("2001:db8::7", &world.token()).await.status, 200);
    // In another minute.
    world.execute("UPDATE exchange_attempts SET minute = minute - 1").await;
    assert_eq!(from(address, &world.token()).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_attempt_does_not_count() {
    let world = limited("2").await;
    let large = "x".repeat(4001);
    for _ in 0..3 {
        assert_eq!(world.ask(json!({"token": "x", "namespace": "ci"})).await.status, 400);
        assert_eq!(world.ask(json!({"token": 7, "namespace": "ci", "rule": "x"})).await.status, 400);
        let surplus = json!({"token": "x", "namespace": "ci", "rule": "x", "more": 1});
        assert_eq!(world.ask(surplus).await.status, 400);
        assert_eq!(world.ask(json!({"token": large, "namespace": "ci", "rule": "x"})).await.status, 413);
        let answer = world.cluster.send("", Method::POST, EXCHANGE, b"{".to_vec()).await;
        assert_eq!(answer.status, 400);
        assert_eq!(world.cluster.send("", Method::POST, EXCHANGE, vec![]).await.status, 411);
    }
    world.works().await;
    world.works().await;
    assert_eq!(refusal(&world.exchange(&world.token()).await), TOO_MANY);
    assert_eq!(world.ask(json!({})).await.status, 400, "still the request's own fault");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_is_exact_for_many_at_once() {
    let world = Arc::new(limited("20").await);
    let all: Vec<_> = (0..60)
        .map(|_| {
            let world = Arc::clone(&world);
            tokio::spawn(async move { world.exchange("rubbish").await })
        })
        .collect();
    let mut through = 0;
    for exchange in all {
        let answer = exchange.await.unwrap();
        if refusal(&answer) == UNTRUSTED {
            through += 1;
        } else {
            assert_eq!(refusal(&answer), TOO_MANY);
        }
    }
    assert_eq!(through, 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_says_himself_where_he_comes_from() {
    let world = limited("2").await;
    let mut through = 0;
    for number in 0..5 {
        let body = world.body("rubbish").to_string();
        let address = format!("198.51.100.{number}");
        let request = Request::post(EXCHANGE)
            .header("content-length", body.len())
            .header("x-forwarded-for", &address)
            .header("x-real-ip", &address)
            .header("forwarded", format!("for={address}"));
        let answer = world.cluster.request(request.body(Body::from(body)).unwrap()).await;
        through += usize::from(refusal(&answer) == UNTRUSTED);
    }
    assert_eq!(through, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_is_told_when_to_come_back() {
    let world = limited("1").await;
    world.works().await;
    let answer = world.exchange(&world.token()).await;
    assert_eq!(refusal(&answer), TOO_MANY);
    let after: f64 = answer.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1.0..=60.0).contains(&after), "{after}");
    let then = now() + after;
    assert!(then % 60.0 < 3.0 || then % 60.0 > 57.0, "at the end of the minute, not {}", then % 60.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_limit_nothing_is_too_much() {
    for limit in ["0", "-1"] {
        let world = limited(limit).await;
        for _ in 0..100 {
            assert_eq!(refusal(&world.exchange("rubbish").await), UNTRUSTED);
        }
        world.works().await;
    }
}
