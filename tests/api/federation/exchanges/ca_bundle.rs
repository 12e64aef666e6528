//! The configured CA bundle that verifies the certificates of issuers.

use std::fs;

use muster_test_cluster::wait_for;
use muster_testing::Issuer;

use super::{Fixture, TOKEN_REJECTED, UNAVAILABLE, UNTRUSTED_ISSUER, status_and_error};

const INVALID_CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";

impl Fixture {
    /// Asserts that exchanges are unavailable and that the response does not reveal the cause.
    async fn assert_unavailable(&self, case: &str) {
        let before = self.minted_key_count().await;
        let response = self.exchange(&self.token()).await;
        let members: Vec<_> = response.body.as_object().unwrap().keys().collect();
        assert_eq!(members, ["error", "request_id", "status"], "{case}");
        assert_eq!(status_and_error(&response), UNAVAILABLE, "{case}");
        assert_eq!(self.minted_key_count().await, before, "{case}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_exchanges_without_usable_ca_bundle() {
    let fixture = Fixture::new().await;
    let valid = fs::read(&fixture.ca_bundle).unwrap();
    fs::remove_file(&fixture.ca_bundle).unwrap();
    fixture.assert_unavailable("missing").await;
    for (bytes, case) in [
        (&b"not PEM"[..], "not PEM"),
        (b"", "empty"),
        (b"\xff\xfe\x00", "not text"),
        (INVALID_CERTIFICATE.as_bytes(), "invalid certificate"),
        (&valid[..valid.len() / 2], "half a certificate"),
    ] {
        fs::write(&fixture.ca_bundle, bytes).unwrap();
        fixture.assert_unavailable(case).await;
    }
    fs::remove_file(&fixture.ca_bundle).unwrap();
    fs::create_dir(&fixture.ca_bundle).unwrap();
    fixture.assert_unavailable("a directory").await;
    assert_eq!(fixture.issuer.fetches(), 0);
    // An unknown issuer is still reported as untrusted.
    assert_eq!(status_and_error(&fixture.exchange("rubbish").await), UNTRUSTED_ISSUER);

    fs::remove_dir(&fixture.ca_bundle).unwrap();
    fs::write(&fixture.ca_bundle, &valid).unwrap();
    fixture.assert_exchange_succeeds().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_exchanges_without_ca_bundle_despite_cached_keys() {
    let fixture = Fixture::new().await;
    let token = fixture.token();
    fixture.assert_exchange_succeeds().await;
    let valid = fs::read(&fixture.ca_bundle).unwrap();
    fs::remove_file(&fixture.ca_bundle).unwrap();
    fixture.assert_unavailable("missing").await;
    assert_eq!(status_and_error(&fixture.exchange(&token).await), UNAVAILABLE);
    fs::write(&fixture.ca_bundle, "not PEM").unwrap();
    fixture.assert_unavailable("not PEM").await;
    fs::write(&fixture.ca_bundle, &valid).unwrap();
    let response = fixture.exchange(&token).await;
    assert_eq!(response.status, 200, "the token was not consumed: {}", response.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_issuer_with_unknown_ca() {
    let fixture = Fixture::new().await;
    Issuer::start().write_ca(&fixture.ca_bundle);
    fixture.assert_refused(&fixture.token(), TOKEN_REJECTED, "certificate of another CA").await;
    assert_eq!(fixture.issuer.fetches(), 0);
    // The CA is added without a restart.
    let both = fs::read_to_string(&fixture.ca_bundle).unwrap() + &fixture.issuer.ca_pem();
    fs::write(&fixture.ca_bundle, both).unwrap();
    let token = fixture.token();
    wait_for("the CA bundle to be reloaded", async || {
        (fixture.exchange(&token).await.status == 200).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn uses_system_cas_without_ca_bundle_setting() {
    let fixture = Fixture::with(Issuer::start(), &[("FEDERATION_JWKS_CA_BUNDLE", "")]).await;
    fixture.assert_refused(&fixture.token(), TOKEN_REJECTED, "certificate of no public CA").await;
    assert_eq!(fixture.issuer.fetches(), 0);
}
