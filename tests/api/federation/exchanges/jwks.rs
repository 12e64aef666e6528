//! The keys of an issuer, and issuers that do not give them as they should.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_test_cluster::wait_for;
use muster_testing::Issuer;
use muster_testing::issuer::{Certificate, Mode, Signer};
use muster_testing::web_server::{Reply, WebServer};
use serde_json::{Value, json};

use super::{REJECTED, World, with};

const HASTY: (&str, &str) = ("FEDERATION_JWKS_FETCH_TIMEOUT_SECONDS", "1");

impl World {
    /// Expects that the issuer's keys are of no use, and that they are once it has been repaired.
    async fn no_use(&self, what: &str) {
        self.refused(&self.token(), REJECTED, what).await;
        self.issuer.serve(Mode::Keys);
        self.repaired(what).await;
    }

    /// Waits until an exchange works.
    async fn repaired(&self, what: &str) {
        let token = self.token();
        let work = async || (self.exchange(&token).await.status == 200).then_some(());
        wait_for(&format!("the end of: {what}"), work).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_fetched_once_and_kept() {
    let world = World::new().await;
    for _ in 0..5 {
        world.works().await;
    }
    world.refused(&world.token_but(&json!({"aud": "other"})), REJECTED, "for somebody else").await;
    assert_eq!(world.issuer.fetches(), 1);
    // They outlive a short illness of the issuer.
    world.issuer.serve(Mode::Status(500));
    world.works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_not_kept_for_longer_than_the_setting_says() {
    let world = World::with(Issuer::start(), &[("FEDERATION_JWKS_CACHE_SECONDS", "1"), HASTY]).await;
    world.works().await;
    world.issuer.serve(Mode::Status(500));
    wait_for("the keys to be forgotten", async || {
        (super::refusal(&world.exchange(&world.token()).await) == REJECTED).then_some(())
    })
    .await;
    assert!(world.issuer.fetches() > 1);
    world.no_use("forgotten").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn new_keys_are_good_at_once_and_old_ones_no_more() {
    let world = World::new().await;
    world.works().await;
    let old = world.token();
    world.issuer.rotate();
    world.works().await;
    world.refused(&old, REJECTED, "signed with a key that is withdrawn").await;
    // And once more, right away.
    world.issuer.rotate();
    world.works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_unknown_keys_makes_few_fetches() {
    let world = Arc::new(World::new().await);
    world.works().await;
    let unknown = |number: usize| {
        let world = Arc::clone(&world);
        tokio::spawn(async move {
            let header = json!({"alg": "RS256", "kid": format!("unknown-{number}")});
            let token = world.issuer.token_with(header, world.claims(), Signer::Rsa("RS256"));
            assert_eq!(super::refusal(&world.exchange(&token).await), REJECTED);
        })
    };
    // One after the other, and all at once.
    for number in 0..60 {
        unknown(number).await.unwrap();
    }
    let all: Vec<_> = (60..160).map(unknown).collect();
    for exchange in all {
        exchange.await.unwrap();
    }
    assert!(world.issuer.fetches() <= 20, "{} fetches", world.issuer.fetches());
    // Known ones go on working.
    world.works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_issuer_that_hangs_is_given_up() {
    let world = World::with(Issuer::start(), &[HASTY]).await;
    world.issuer.serve(Mode::Hang);
    let started = Instant::now();
    world.refused(&world.token(), REJECTED, "hangs").await;
    let waited = started.elapsed();
    assert!((1..8).contains(&waited.as_secs()), "it had its time and no more: {waited:?}");
    world.issuer.serve(Mode::Keys);
    world.repaired("hangs").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_wait_for_an_issuer_that_hangs_wait_together() {
    let world = Arc::new(World::with(Issuer::start(), &[HASTY]).await);
    world.issuer.serve(Mode::Hang);
    let started = Instant::now();
    let all: Vec<_> = (0..20)
        .map(|_| {
            let world = Arc::clone(&world);
            tokio::spawn(async move { world.exchange(&world.token()).await })
        })
        .collect();
    for exchange in all {
        assert_eq!(super::refusal(&exchange.await.unwrap()), REJECTED);
    }
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert!(world.issuer.fetches() <= 4, "{} fetches", world.issuer.fetches());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_issuer_that_is_slow_is_given_up() {
    let world = World::with(Issuer::start(), &[HASTY]).await;
    world.issuer.serve(Mode::Slow);
    let started = Instant::now();
    world.refused(&world.token(), REJECTED, "slow").await;
    assert!(
        started.elapsed() < Duration::from_secs(8),
        "its whole answer has a time: {:?}",
        started.elapsed()
    );
    world.issuer.serve(Mode::Keys);
    world.repaired("slow").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_huge_is_not_read() {
    let world = World::new().await;
    world.issuer.serve(Mode::Huge);
    world.no_use("huge").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_no_json_is_no_use() {
    let world = World::new().await;
    world.issuer.serve(Mode::NotJson);
    world.no_use("not JSON").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_another_status_is_no_use() {
    for status in [404, 500] {
        let world = World::new().await;
        world.issuer.serve(Mode::Status(status));
        world.no_use("another status").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_redirect_leads_away_from_https() {
    let world = World::new().await;
    let keys = world.issuer.jwks().to_string();
    let web = WebServer::new(move |_, _| Reply::ok(keys.as_bytes())).await;
    for target in [web.url("/keys"), format!("//{}/keys", web.address), "file:///etc/passwd".into()] {
        let world = World::new().await;
        world.issuer.serve(Mode::Redirect(target.clone()));
        world.refused(&world.token(), REJECTED, &target).await;
    }
    assert_eq!(web.requests().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redirect_to_https_is_followed() {
    let world = World::new().await;
    world.issuer.serve(Mode::Redirect(world.issuer.moved_uri()));
    world.works().await;
    assert_eq!(world.issuer.fetches(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redirect_that_leads_nowhere_ends() {
    let world = World::new().await;
    world.issuer.serve(Mode::Redirect(world.issuer.jwks_uri()));
    world.refused(&world.token(), REJECTED, "in a circle").await;
    assert!(world.issuer.fetches() <= 10, "{} fetches", world.issuer.fetches());
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_that_cannot_be_used_do_not_spoil_the_others() {
    let world = World::new().await;
    let mut keys: Vec<Value> = vec![
        json!(7),
        json!({}),
        json!({"kty": "OKP", "crv": "Ed25519", "x": "AAAA", "kid": "rsa-1"}),
        json!({"kty": "RSA", "n": "!", "e": "AQAB", "kid": "broken"}),
        json!({"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "short"}),
        with(&world.issuer.rsa_jwk(), &json!({"kid": "sealing", "use": "enc"})),
        with(&world.issuer.rsa_jwk(), &json!({"kid": "signing", "key_ops": ["sign"]})),
    ];
    keys.extend(world.issuer.jwks()["keys"].as_array().unwrap().clone());
    world.issuer.publish(keys);
    world.works().await;
    for id in ["broken", "short", "sealing", "signing"] {
        let header = json!({"alg": "RS256", "kid": id});
        let token = world.issuer.token_with(header, world.claims(), Signer::Rsa("RS256"));
        world.refused(&token, REJECTED, id).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_issuer_without_keys_verifies_nothing() {
    for keys in [json!([]), json!({}), json!(7)] {
        let world = World::new().await;
        match keys.as_array() {
            Some(keys) => world.issuer.publish(keys.clone()),
            None => world.issuer.publish(vec![keys]),
        }
        world.refused(&world.token(), REJECTED, "no keys").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_keys_of_another_address_replace_those_of_the_old_one() {
    let world = World::new().await;
    world.works().await;
    let other = Issuer::start();
    std::fs::write(&world.bundle, world.issuer.ca_pem() + &other.ca_pem()).unwrap();
    world.change_forge(&json!({"jwks_uri": other.jwks_uri()})).await;
    world.refused(&world.token(), REJECTED, "with the old key").await;
    let answer = world.exchange(&other.token(world.claims())).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_must_be_good() {
    for certificate in [Certificate::WrongHost, Certificate::Expired] {
        let world = World::with(Issuer::start_with(certificate), &[]).await;
        world.refused(&world.token(), REJECTED, &format!("{certificate:?}")).await;
        assert_eq!(world.issuer.fetches(), 0, "{certificate:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn private_addresses_are_not_asked_unless_they_are_allowed() {
    let refused = |networks: &'static str, host: &'static str| async move {
        let world = World::with(Issuer::start(), &[("FEDERATION_JWKS_ALLOWED_NETWORKS", networks)]).await;
        let uri = world.issuer.jwks_uri().replace("localhost", host);
        world.change_forge(&json!({ "jwks_uri": uri })).await;
        let answer = world.exchange(&world.token()).await;
        if answer.status != 200 {
            assert_eq!(super::refusal(&answer), REJECTED);
            assert_eq!(world.issuer.fetches(), 0);
        }
        answer.status != 200
    };
    assert!(refused("", "localhost").await);
    assert!(refused("", "127.0.0.1").await);
    assert!(refused("10.0.0.0/8", "127.0.0.1").await);
    assert!(refused("127.0.0.2/32", "127.0.0.1").await);
    assert!(!refused("127.0.0.1/32", "127.0.0.1").await);
    assert!(!refused("127.0.0.0/8,::1", "localhost").await);
}
