//! A token is good for one exchange by a rule.

use std::sync::Arc;

use muster_testing::Issuer;
use muster_testing::issuer::Signer;
use serde_json::json;

use super::super::put;
use super::{NO_MATCH, REJECTED, USED, World, refusal, with};
use crate::networks::{get, post};

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_good_once() {
    let world = World::new().await;
    let token = world.token();
    assert_eq!(world.exchange(&token).await.status, 200);
    world.refused(&token, USED, "again").await;
    world.refused(&token, USED, "and again").await;
    world.works().await;
}

async fn fifty_at_once(url: Option<&str>) {
    let world = Arc::new(World::on(url, Issuer::start(), &[]).await);
    // With cold keys and with warm ones.
    for _ in 0..2 {
        let before = world.minted().await;
        let token = world.token();
        let start = Arc::new(tokio::sync::Barrier::new(50));
        let all: Vec<_> = (0..50)
            .map(|_| {
                let (world, token, start) = (Arc::clone(&world), token.clone(), Arc::clone(&start));
                tokio::spawn(async move {
                    start.wait().await;
                    world.exchange(&token).await
                })
            })
            .collect();
        let mut won = 0;
        for exchange in all {
            let answer = exchange.await.unwrap();
            if answer.status == 200 {
                won += 1;
            } else {
                assert_eq!(refusal(&answer), USED);
            }
        }
        assert_eq!((won, world.minted().await - before), (1, 1));
    }
    assert_eq!(world.issuer.fetches(), 1, "all waited for one fetch");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_fifty_at_once_exactly_one_wins() {
    fifty_at_once(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_fifty_at_once_exactly_one_wins_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => fifty_at_once(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_token_is_good_for_another_rule() {
    let world = World::new().await;
    world.add_rule("other", &json!({})).await;
    let token = world.token();
    assert_eq!(world.exchange(&token).await.status, 200);
    let answer = world.exchange_by(&token, "ci", "other").await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(refusal(&world.exchange_by(&token, "ci", "other").await), USED);
    world.refused(&token, USED, "by the first").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_was_refused_is_not_used_up() {
    let world = World::new().await;
    let path = "/auth/namespaces/ci/rules/deploy";
    let terms = |sub: &str| {
        let mut body = with(&super::rule("deploy", "forge"), &json!({"bound_claims": { "sub": sub }}));
        body.as_object_mut().unwrap().remove("name");
        body
    };
    let token = world.token();
    assert_eq!(put(&world.cluster, &world.admin, path, terms("other")).await.status, 200);
    world.refused(&token, NO_MATCH, "the rule takes somebody else").await;
    world.execute("UPDATE namespaces SET state = 'deleted' WHERE name = 'ci'").await;
    world.refused(&token, NO_MATCH, "nor is there a namespace").await;
    world.execute("UPDATE namespaces SET state = 'created' WHERE name = 'ci'").await;
    assert_eq!(put(&world.cluster, &world.admin, path, terms("repo:x")).await.status, 200);
    let answer = world.exchange(&token).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    // A rule that is changed remembers.
    assert_eq!(put(&world.cluster, &world.admin, path, terms("repo:x")).await.status, 200);
    world.refused(&token, USED, "the rule has changed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_of_one_name_are_one_token() {
    let world = World::new().await;
    let first = world.token_but(&json!({"jti": "one name"}));
    let second = world.token_but(&json!({"jti": "one name", "ref": "next"}));
    assert_ne!(first, second);
    assert_eq!(world.exchange(&first).await.status, 200);
    world.refused(&second, USED, "the same name").await;
    // Names of one issuer are not those of another.
    let other = Issuer::start();
    std::fs::write(&world.bundle, world.issuer.ca_pem() + &other.ca_pem()).unwrap();
    let body = json!({"name": "other", "issuer_url": other.url(), "jwks_uri": other.jwks_uri(), "audience": "cloud"});
    assert_eq!(post(&world.cluster, &world.admin, "/auth/issuers", body).await.status, 200);
    let mut terms = with(&super::rule("deploy", "other"), &json!({}));
    terms.as_object_mut().unwrap().remove("name");
    let path = "/auth/namespaces/ci/rules/deploy";
    assert_eq!(put(&world.cluster, &world.admin, path, terms).await.status, 200);
    assert_eq!(get(&world.cluster, &world.admin, path).await.body["issuer"], "other");
    let theirs = other.token(with(&other.claims("cloud"), &json!({"ref": "main", "jti": "one name"})));
    let answer = world.exchange(&theirs).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_without_a_usable_name_is_known_by_its_words() {
    let world = World::new().await;
    let odd = [json!(null), json!(""), json!(7), json!(["x"]), json!("x".repeat(129))];
    for jti in odd {
        let mut claims = with(&world.claims(), &json!({"jti": jti, "nonce": jti}));
        claims.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        let header = json!({"alg": "ES256", "kid": "ec-1"});
        let sign = || world.issuer.token_with(header.clone(), claims.clone(), Signer::Ec("ES256"));
        // Signatures of one text differ each time they are made.
        let (first, second) = (sign(), sign());
        assert_ne!(first, second);
        let answer = world.exchange(&first).await;
        assert_eq!(answer.status, 200, "{jti}: {}", answer.text);
        world.refused(&first, USED, "the same").await;
        world.refused(&second, USED, "another signature").await;
        // The last letter of a signature has bits that mean nothing.
        let answer = world.exchange(&respelled(&first)).await;
        assert!([USED, REJECTED].contains(&refusal(&answer)), "{}", answer.text);
    }
    // A name of 128 letters is one.
    let long = json!({"jti": "é".repeat(128)});
    assert_eq!(world.exchange(&world.token_but(&long)).await.status, 200);
    let other = with(&long, &json!({"ref": "next"}));
    world.refused(&world.token_but(&other), USED, "the same long name").await;
}

/// The same bytes of a signature, written in another way.
fn respelled(token: &str) -> String {
    const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let (start, last) = token.split_at(token.len() - 1);
    let value = ALPHABET.iter().position(|letter| *letter == last.as_bytes()[0]).unwrap();
    format!("{start}{}", char::from(ALPHABET[value ^ 1]))
}
