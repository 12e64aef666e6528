//! The operator's own authorities, by which the certificates of issuers are judged.

use std::fs;

use muster_testing::Issuer;
use serde_json::json;

use super::{REJECTED, UNAVAILABLE, UNTRUSTED, World, refusal};
use crate::harness::wait_for;

const GARBAGE: &str = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";

impl World {
    /// Expects that nothing can be exchanged, and that the answer does not say why.
    async fn unavailable(&self, what: &str) {
        let before = self.minted().await;
        let answer = self.exchange(&self.token()).await;
        assert_eq!(refusal(&answer), UNAVAILABLE, "{what}");
        assert_eq!(answer.body, json!({"error": UNAVAILABLE.1, "status": 503}), "{what}");
        assert_eq!(self.minted().await, before, "{what}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_authorities_a_cluster_exchanges_nothing() {
    let world = World::new().await;
    let good = fs::read(&world.bundle).unwrap();
    fs::remove_file(&world.bundle).unwrap();
    world.unavailable("missing").await;
    for (bytes, what) in [
        (&b"not PEM"[..], "not PEM"),
        (b"", "empty"),
        (b"\xff\xfe\x00", "not even text"),
        (GARBAGE.as_bytes(), "no certificate"),
        (&good[..good.len() / 2], "half a certificate"),
    ] {
        fs::write(&world.bundle, bytes).unwrap();
        world.unavailable(what).await;
    }
    fs::remove_file(&world.bundle).unwrap();
    fs::create_dir(&world.bundle).unwrap();
    world.unavailable("a folder").await;
    assert_eq!(world.issuer.fetches(), 0);
    // A stranger is one all the same.
    assert_eq!(refusal(&world.exchange("rubbish").await), UNTRUSTED);

    fs::remove_dir(&world.bundle).unwrap();
    fs::write(&world.bundle, &good).unwrap();
    world.works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn also_when_it_knows_the_keys_already() {
    let world = World::new().await;
    let token = world.token();
    world.works().await;
    let good = fs::read(&world.bundle).unwrap();
    fs::remove_file(&world.bundle).unwrap();
    world.unavailable("missing").await;
    assert_eq!(refusal(&world.exchange(&token).await), UNAVAILABLE);
    fs::write(&world.bundle, "not PEM").unwrap();
    world.unavailable("not PEM").await;
    fs::write(&world.bundle, &good).unwrap();
    let answer = world.exchange(&token).await;
    assert_eq!(answer.status, 200, "not used up: {}", answer.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_issuer_of_an_unknown_authority_is_not_believed() {
    let world = World::new().await;
    Issuer::start().write_ca(&world.bundle);
    world.refused(&world.token(), REJECTED, "of another authority").await;
    assert_eq!(world.issuer.fetches(), 0);
    // Added later, without a restart.
    let both = fs::read_to_string(&world.bundle).unwrap() + &world.issuer.ca_pem();
    fs::write(&world.bundle, both).unwrap();
    let token = world.token();
    wait_for("the authority", async || (world.exchange(&token).await.status == 200).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_setting_the_system_s_authorities_decide() {
    let world = World::with(Issuer::start(), &[("FEDERATION_JWKS_CA_BUNDLE", "")]).await;
    world.refused(&world.token(), REJECTED, "of no public authority").await;
    assert_eq!(world.issuer.fetches(), 0);
}
