//! Validation of identity tokens.

use muster_testing::Issuer;
use muster_testing::issuer::Signer;
use muster_types::time::now;
use serde_json::{Value, json};

use super::{Fixture, TOKEN_REJECTED, UNTRUSTED_ISSUER, merge, status_and_error};

/// Returns the header of a valid token with changes; null removes a field.
fn header(changes: &Value) -> Value {
    let mut header = merge(&json!({"alg": "RS256", "typ": "JWT", "kid": "rsa-1"}), changes);
    header.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    header
}

impl Fixture {
    /// Returns a token with valid claims, a changed header and the given signer.
    fn token_with_header(&self, changes: &Value, signer: Signer) -> String {
        self.issuer.token_with(header(changes), self.claims(), signer)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_unsigned_token() {
    let fixture = Fixture::new().await;
    for algorithm in ["none", "None", "NONE", "nOnE", ""] {
        for id in [json!("rsa-1"), json!(null)] {
            let changes = json!({"alg": algorithm, "kid": id});
            fixture
                .assert_refused(&fixture.token_with_header(&changes, Signer::None), TOKEN_REJECTED, algorithm)
                .await;
            fixture
                .assert_refused(
                    &fixture.token_with_header(&changes, Signer::Rsa("RS256")),
                    TOKEN_REJECTED,
                    algorithm,
                )
                .await;
        }
    }
    fixture
        .assert_refused(
            &fixture.token_with_header(&json!({}), Signer::None),
            TOKEN_REJECTED,
            "signature missing",
        )
        .await;
    fixture.assert_exchange_succeeds().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_public_key_as_hmac_secret() {
    let fixture = Fixture::new().await;
    for secret in fixture.issuer.public_key_texts() {
        for id in [json!("rsa-1"), json!(null)] {
            for algorithm in ["HS256", "RS256"] {
                let changes = json!({"alg": algorithm, "kid": id});
                let token = fixture.token_with_header(&changes, Signer::Hmac(secret.clone()));
                fixture.assert_refused(&token, TOKEN_REJECTED, algorithm).await;
            }
        }
    }
    // Symmetric keys are ignored even if the issuer publishes them.
    let secret = json!({"kty": "oct", "kid": "hmac", "alg": "HS256", "use": "sig", "k": "c2VjcmV0"});
    fixture.issuer.publish(vec![secret]);
    let changes = json!({"alg": "HS256", "kid": "hmac"});
    fixture
        .assert_refused(
            &fixture.token_with_header(&changes, Signer::Hmac(b"secret".to_vec())),
            TOKEN_REJECTED,
            "oct",
        )
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_algorithm_that_does_not_match_the_key() {
    let fixture = Fixture::new().await;
    let cases = [
        (json!({"alg": "ES256", "kid": "rsa-1"}), Signer::Ec("ES256")),
        (json!({"alg": "ES256", "kid": "rsa-1"}), Signer::Rsa("RS256")),
        (json!({"alg": "RS256", "kid": "ec-1"}), Signer::Rsa("RS256")),
        (json!({"alg": "RS256", "kid": "ec-1"}), Signer::Ec("ES256")),
        (json!({"alg": "ES384", "kid": "ec-1"}), Signer::Ec("ES256")),
        (json!({"alg": "ES384", "kid": "ec-1"}), Signer::Ec("ES384")),
        // The key is declared for RS256.
        (json!({"alg": "RS512"}), Signer::Rsa("RS512")),
        (json!({"alg": "PS256"}), Signer::Rsa("PS256")),
        // The declared algorithm differs from the one that signed.
        (json!({"alg": "RS256"}), Signer::Rsa("PS256")),
        (json!({"alg": "RS256"}), Signer::Rsa("RS384")),
        (json!({"alg": null}), Signer::Rsa("RS256")),
        (json!({"alg": 7}), Signer::Rsa("RS256")),
        (json!({"alg": ["RS256"]}), Signer::Rsa("RS256")),
        (json!({"alg": "rs256"}), Signer::Rsa("RS256")),
        (json!({"alg": "RS1"}), Signer::Rsa("RS256")),
        (json!({"alg": "EdDSA"}), Signer::Rsa("RS256")),
    ];
    for (changes, signer) in cases {
        let case = format!("{changes} {signer:?}");
        fixture.assert_refused(&fixture.token_with_header(&changes, signer), TOKEN_REJECTED, &case).await;
    }
    let valid = fixture.token_with_header(&json!({"alg": "ES256", "kid": "ec-1"}), Signer::Ec("ES256"));
    assert_eq!(fixture.exchange(&valid).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn ignores_keys_and_urls_in_token_header() {
    let fixture = Fixture::new().await;
    // Another issuer with a trusted certificate.
    let attacker = Issuer::start();
    std::fs::write(&fixture.ca_bundle, fixture.issuer.ca_pem() + &attacker.ca_pem()).unwrap();
    let jwk = merge(&attacker.rsa_jwk(), &json!({"kid": "rsa-1"}));
    let injected_headers = [
        json!({ "jwk": jwk }),
        json!({"jku": attacker.jwks_uri()}),
        json!({"x5u": attacker.jwks_uri()}),
        json!({"x5c": ["MIIB"]}),
        json!({"jwk": jwk, "jku": attacker.jwks_uri(), "x5u": attacker.jwks_uri(), "x5c": ["MIIB"]}),
    ];
    for injected in &injected_headers {
        for id in [json!("rsa-1"), json!("unknown"), json!(null)] {
            let changes = merge(injected, &json!({ "kid": id }));
            let forged = attacker.token_with(header(&changes), fixture.claims(), Signer::Rsa("RS256"));
            fixture.assert_refused(&forged, TOKEN_REJECTED, &changes.to_string()).await;
        }
        // They do not invalidate a correctly signed token either.
        let response = fixture.exchange(&fixture.token_with_header(injected, Signer::Rsa("RS256"))).await;
        assert_eq!(response.status, 200, "{injected}: {}", response.text);
    }
    assert_eq!(attacker.fetches(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_critical_headers_and_invalid_key_ids() {
    let fixture = Fixture::new().await;
    for changes in [
        json!({"crit": ["exp"]}),
        json!({"crit": []}),
        json!({"crit": ["b64"], "b64": false}),
        json!({"kid": 7}),
        json!({"kid": ["rsa-1"]}),
    ] {
        fixture
            .assert_refused(
                &fixture.token_with_header(&changes, Signer::Rsa("RS256")),
                TOKEN_REJECTED,
                &changes.to_string(),
            )
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_unknown_key_id() {
    let fixture = Fixture::new().await;
    for id in ["rsa-2", "RSA-1", "rsa-1 ", "", "ec-1"] {
        let token = fixture.token_with_header(&json!({ "kid": id }), Signer::Rsa("RS256"));
        fixture.assert_refused(&token, TOKEN_REJECTED, id).await;
    }
    fixture.assert_exchange_succeeds().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn token_without_key_id_requires_a_single_matching_key() {
    let fixture = Fixture::new().await;
    let token = || fixture.token_with_header(&json!({"kid": null}), Signer::Rsa("RS256"));
    let response = fixture.exchange(&token()).await;
    assert_eq!(response.status, 200, "one key matches: {}", response.text);

    let other = Fixture::new().await;
    let jwk = other.issuer.rsa_jwk();
    other.issuer.publish(vec![
        merge(&jwk, &json!({"kid": "a"})),
        merge(&fixture.issuer.rsa_jwk(), &json!({"kid": "b"})),
    ]);
    let token = other.token_with_header(&json!({"kid": null}), Signer::Rsa("RS256"));
    other.assert_refused(&token, TOKEN_REJECTED, "two keys match").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn checks_token_times_without_leeway() {
    let fixture = Fixture::new().await;
    let time = now();
    let cases = [
        (json!({"exp": time - 1.0}), "expired a second ago"),
        (json!({"exp": (time - 3600.0) as u64}), "expired an hour ago"),
        (json!({"exp": 0}), "expired at the epoch"),
        (json!({"exp": -1}), "expired before the epoch"),
        (json!({"exp": null}), "no expiry"),
        (json!({"exp": (time + 300.0).to_string()}), "expiry is a string"),
        (json!({"exp": [time + 300.0]}), "expiry is a list"),
        (json!({"exp": true}), "expiry is a boolean"),
        (json!({"nbf": time + 60.0}), "not valid yet"),
        (json!({"nbf": (time + 60.0) as u64}), "not valid yet"),
        (json!({"nbf": (time - 60.0).to_string()}), "not-before is a string"),
    ];
    for (changes, case) in cases {
        fixture.assert_refused(&fixture.token_with_claims(&changes), TOKEN_REJECTED, case).await;
    }
    for valid in [
        json!({"exp": time + 300.5}),
        json!({"nbf": time - 1.0}),
        json!({"nbf": (time - 1.0) as u64}),
        json!({"iat": time + 3600.0}),
        json!({"iat": "yesterday"}),
    ] {
        let response = fixture.exchange(&fixture.token_with_claims(&valid)).await;
        assert_eq!(response.status, 200, "{valid}: {}", response.text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_wrong_audience() {
    let fixture = Fixture::new().await;
    let cases = [
        json!(null),
        json!("other"),
        json!("Cloud"),
        json!("cloud "),
        json!("cloud/"),
        json!(""),
        json!(7),
        json!(true),
        json!({"cloud": true}),
        json!([]),
        json!(["other"]),
        json!(["other", "clouds"]),
        json!([["cloud"]]),
    ];
    for audience in cases {
        let token = fixture.token_with_claims(&json!({ "aud": audience }));
        fixture.assert_refused(&token, TOKEN_REJECTED, &audience.to_string()).await;
    }
    for valid in [json!(["cloud"]), json!(["other", "cloud"])] {
        let response = fixture.exchange(&fixture.token_with_claims(&json!({ "aud": valid }))).await;
        assert_eq!(response.status, 200, "{valid}: {}", response.text);
    }
    fixture.update_issuer(&json!({"audience": "elsewhere"})).await;
    fixture.assert_refused(&fixture.token(), TOKEN_REJECTED, "the audience has changed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn matches_issuer_url_exactly() {
    let fixture = Fixture::new().await;
    let url = fixture.issuer.url();
    let cases = [
        json!(format!("{url}/")),
        json!(url.replace("localhost", "LOCALHOST")),
        json!(url.replace("https", "http")),
        json!(format!(" {url}")),
        json!(format!("{url}\u{0}")),
        json!("https://elsewhere.example"),
        json!("forge"),
        json!(""),
        json!(null),
        json!(7),
        json!([url]),
    ];
    for issuer in cases {
        let token = fixture.token_with_claims(&json!({ "iss": issuer }));
        fixture.assert_refused(&token, UNTRUSTED_ISSUER, &issuer.to_string()).await;
    }
    assert_eq!(fixture.issuer.fetches(), 0, "no keys are fetched for an unknown issuer");
    // A trailing slash in the configured URL matters as well.
    fixture.update_issuer(&json!({"issuer_url": format!("{url}/")})).await;
    fixture.assert_refused(&fixture.token(), UNTRUSTED_ISSUER, "without the slash").await;
    let response = fixture.exchange(&fixture.token_with_claims(&json!({"iss": format!("{url}/")}))).await;
    assert_eq!(response.status, 200, "{}", response.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_malformed_tokens() {
    let fixture = Fixture::new().await;
    let valid = fixture.token();
    let parts: Vec<&str> = valid.split('.').collect();
    for token in [
        "x".to_owned(),
        "..".to_owned(),
        "...".to_owned(),
        "a.b.c".to_owned(),
        "\u{0}".to_owned(),
        "é.é.é".to_owned(),
        format!("{}..{}", parts[0], parts[2]),
        format!("{}.e30.{}", parts[0], parts[2]),
        format!("{}.W10.{}", parts[0], parts[2]),
        format!("{}.{}!.{}", parts[0], parts[1], parts[2]),
    ] {
        fixture.assert_refused(&token, UNTRUSTED_ISSUER, &token).await;
    }
    // Either refusal is acceptable for these.
    for token in [
        format!("{}.{}", parts[0], parts[1]),
        format!("{valid}."),
        format!("{valid}.{}", parts[2]),
        format!("{valid}="),
        format!("{valid} "),
        format!(" {valid}"),
        format!("{valid}\n"),
        format!(".{}.{}", parts[1], parts[2]),
        format!("e30.{}.{}", parts[1], parts[2]),
        format!("bnVsbA.{}.{}", parts[1], parts[2]),
    ] {
        let response = fixture.exchange(&token).await;
        assert!(
            [UNTRUSTED_ISSUER, TOKEN_REJECTED].contains(&status_and_error(&response)),
            "{token}: {}",
            response.text
        );
    }
    assert_eq!(fixture.minted_key_count().await, 0);
    assert_eq!(fixture.exchange(&valid).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_modified_token() {
    let fixture = Fixture::new().await;
    let (first, second) = (fixture.token_with_claims(&json!({"ref": "other"})), fixture.token());
    let (first, second): (Vec<_>, Vec<_>) = (first.split('.').collect(), second.split('.').collect());
    let swapped = format!("{}.{}.{}", first[0], second[1], first[2]);
    fixture.assert_refused(&swapped, TOKEN_REJECTED, "signature of another token").await;
    let changed_character = if second[2].starts_with('A') { "B" } else { "A" };
    let damaged = format!("{}.{}.{changed_character}{}", second[0], second[1], &second[2][1..]);
    fixture.assert_refused(&damaged, TOKEN_REJECTED, "corrupted signature").await;
    let short = format!("{}.{}.{}", second[0], second[1], &second[2][..40]);
    fixture.assert_refused(&short, TOKEN_REJECTED, "truncated signature").await;
    let none = format!("{}.{}.", second[0], second[1]);
    fixture.assert_refused(&none, TOKEN_REJECTED, "no signature").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_token_signed_by_another_issuer() {
    let fixture = Fixture::new().await;
    let other = Issuer::start();
    std::fs::write(&fixture.ca_bundle, fixture.issuer.ca_pem() + &other.ca_pem()).unwrap();
    let body = json!({"name": "other", "issuer_url": other.url(), "jwks_uri": other.jwks_uri(), "audience": "cloud"});
    let created = crate::networks::post(&fixture.cluster, &fixture.admin, "/auth/issuers", body).await;
    assert_eq!(created.status, 200, "{}", created.text);
    // The other issuer is trusted as well, but not for these claims.
    fixture
        .assert_refused(&other.token(fixture.claims()), TOKEN_REJECTED, "signed by the other issuer")
        .await;
    let other_claims = merge(&fixture.claims(), &json!({"iss": other.url()}));
    fixture
        .assert_refused(&fixture.issuer.token(other_claims), TOKEN_REJECTED, "claims the other issuer")
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_all_tokens_without_trusted_issuers() {
    let fixture = Fixture::without_issuer(None, Issuer::start(), &[]).await;
    for token in [fixture.token(), "x".into()] {
        assert_eq!(status_and_error(&fixture.exchange(&token).await), UNTRUSTED_ISSUER);
    }
    assert_eq!(fixture.issuer.fetches(), 0);
}
