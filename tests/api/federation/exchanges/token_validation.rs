//! Tokens that are no good.

use muster_testing::Issuer;
use muster_testing::issuer::Signer;
use muster_types::time::now;
use serde_json::{Value, json};

use super::{REJECTED, UNTRUSTED, World, refusal, with};

/// The header of a good token, changed.
fn header(changes: &Value) -> Value {
    let mut header = with(&json!({"alg": "RS256", "typ": "JWT", "kid": "rsa-1"}), changes);
    header.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    header
}

impl World {
    /// A token that would be good but for its header and its signature.
    fn odd(&self, changes: &Value, signer: Signer) -> String {
        self.issuer.token_with(header(changes), self.claims(), signer)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_without_a_signature_is_rejected() {
    let world = World::new().await;
    for algorithm in ["none", "None", "NONE", "nOnE", ""] {
        for id in [json!("rsa-1"), json!(null)] {
            let changes = json!({"alg": algorithm, "kid": id});
            world.refused(&world.odd(&changes, Signer::None), REJECTED, algorithm).await;
            world.refused(&world.odd(&changes, Signer::Rsa("RS256")), REJECTED, algorithm).await;
        }
    }
    world.refused(&world.odd(&json!({}), Signer::None), REJECTED, "only said to be signed").await;
    world.works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_public_key_is_no_secret() {
    let world = World::new().await;
    for secret in world.issuer.public_key_texts() {
        for id in [json!("rsa-1"), json!(null)] {
            for algorithm in ["HS256", "RS256"] {
                let changes = json!({"alg": algorithm, "kid": id});
                let token = world.odd(&changes, Signer::Hmac(secret.clone()));
                world.refused(&token, REJECTED, algorithm).await;
            }
        }
    }
    // Not even if the issuer publishes a secret.
    let secret = json!({"kty": "oct", "kid": "hmac", "alg": "HS256", "use": "sig", "k": "c2VjcmV0"});
    world.issuer.publish(vec![secret]);
    let changes = json!({"alg": "HS256", "kid": "hmac"});
    world.refused(&world.odd(&changes, Signer::Hmac(b"secret".to_vec())), REJECTED, "oct").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_good_for_its_own_algorithm_only() {
    let world = World::new().await;
    let cases = [
        (json!({"alg": "ES256", "kid": "rsa-1"}), Signer::Ec("ES256")),
        (json!({"alg": "ES256", "kid": "rsa-1"}), Signer::Rsa("RS256")),
        (json!({"alg": "RS256", "kid": "ec-1"}), Signer::Rsa("RS256")),
        (json!({"alg": "RS256", "kid": "ec-1"}), Signer::Ec("ES256")),
        (json!({"alg": "ES384", "kid": "ec-1"}), Signer::Ec("ES256")),
        (json!({"alg": "ES384", "kid": "ec-1"}), Signer::Ec("ES384")),
        // The key says that it is for RS256.
        (json!({"alg": "RS512"}), Signer::Rsa("RS512")),
        (json!({"alg": "PS256"}), Signer::Rsa("PS256")),
        // What was said is not what was done.
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
        let what = format!("{changes} {signer:?}");
        world.refused(&world.odd(&changes, signer), REJECTED, &what).await;
    }
    let good = world.odd(&json!({"alg": "ES256", "kid": "ec-1"}), Signer::Ec("ES256"));
    assert_eq!(world.exchange(&good).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_and_addresses_inside_a_token_are_not_looked_at() {
    let world = World::new().await;
    // Another issuer, whose certificate is even trusted.
    let intruder = Issuer::start();
    std::fs::write(&world.bundle, world.issuer.ca_pem() + &intruder.ca_pem()).unwrap();
    let jwk = with(&intruder.rsa_jwk(), &json!({"kid": "rsa-1"}));
    let offers = [
        json!({ "jwk": jwk }),
        json!({"jku": intruder.jwks_uri()}),
        json!({"x5u": intruder.jwks_uri()}),
        json!({"x5c": ["MIIB"]}),
        json!({"jwk": jwk, "jku": intruder.jwks_uri(), "x5u": intruder.jwks_uri(), "x5c": ["MIIB"]}),
    ];
    for offer in &offers {
        for id in [json!("rsa-1"), json!("unknown"), json!(null)] {
            let changes = with(offer, &json!({ "kid": id }));
            let forged = intruder.token_with(header(&changes), world.claims(), Signer::Rsa("RS256"));
            world.refused(&forged, REJECTED, &changes.to_string()).await;
        }
        // Nor do they spoil a token that is signed as it should be.
        let answer = world.exchange(&world.odd(offer, Signer::Rsa("RS256"))).await;
        assert_eq!(answer.status, 200, "{offer}: {}", answer.text);
    }
    assert_eq!(intruder.fetches(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_must_be_understood_and_is_not_is_rejected() {
    let world = World::new().await;
    for changes in [
        json!({"crit": ["exp"]}),
        json!({"crit": []}),
        json!({"crit": ["b64"], "b64": false}),
        json!({"kid": 7}),
        json!({"kid": ["rsa-1"]}),
    ] {
        world.refused(&world.odd(&changes, Signer::Rsa("RS256")), REJECTED, &changes.to_string()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_id_that_does_not_exist_is_rejected() {
    let world = World::new().await;
    for id in ["rsa-2", "RSA-1", "rsa-1 ", "", "ec-1"] {
        let token = world.odd(&json!({ "kid": id }), Signer::Rsa("RS256"));
        world.refused(&token, REJECTED, id).await;
    }
    world.works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_key_id_there_must_be_no_choice() {
    let world = World::new().await;
    let token = || world.odd(&json!({"kid": null}), Signer::Rsa("RS256"));
    let answer = world.exchange(&token()).await;
    assert_eq!(answer.status, 200, "one key fits: {}", answer.text);

    let another = World::new().await;
    let jwk = another.issuer.rsa_jwk();
    another
        .issuer
        .publish(vec![with(&jwk, &json!({"kid": "a"})), with(&world.issuer.rsa_jwk(), &json!({"kid": "b"}))]);
    let token = another.odd(&json!({"kid": null}), Signer::Rsa("RS256"));
    another.refused(&token, REJECTED, "two keys fit").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_time_of_a_token_is_looked_at_without_leeway() {
    let world = World::new().await;
    let time = now();
    let cases = [
        (json!({"exp": time - 1.0}), "expired a second ago"),
        (json!({"exp": (time - 3600.0) as u64}), "expired an hour ago"),
        (json!({"exp": 0}), "expired at the beginning of time"),
        (json!({"exp": -1}), "expired before"),
        (json!({"exp": null}), "without an end"),
        (json!({"exp": (time + 300.0).to_string()}), "an end that is a text"),
        (json!({"exp": [time + 300.0]}), "an end that is a list"),
        (json!({"exp": true}), "an end that is none"),
        (json!({"nbf": time + 60.0}), "not good yet"),
        (json!({"nbf": (time + 60.0) as u64}), "not good yet"),
        (json!({"nbf": (time - 60.0).to_string()}), "a beginning that is a text"),
    ];
    for (changes, what) in cases {
        world.refused(&world.token_but(&changes), REJECTED, what).await;
    }
    for good in [
        json!({"exp": time + 300.5}),
        json!({"nbf": time - 1.0}),
        json!({"nbf": (time - 1.0) as u64}),
        json!({"iat": time + 3600.0}),
        json!({"iat": "yesterday"}),
    ] {
        let answer = world.exchange(&world.token_but(&good)).await;
        assert_eq!(answer.status, 200, "{good}: {}", answer.text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_must_be_meant_for_us() {
    let world = World::new().await;
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
        let token = world.token_but(&json!({ "aud": audience }));
        world.refused(&token, REJECTED, &audience.to_string()).await;
    }
    for good in [json!(["cloud"]), json!(["other", "cloud"])] {
        let answer = world.exchange(&world.token_but(&json!({ "aud": good }))).await;
        assert_eq!(answer.status, 200, "{good}: {}", answer.text);
    }
    world.change_forge(&json!({"audience": "elsewhere"})).await;
    world.refused(&world.token(), REJECTED, "the audience has changed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_issuer_is_known_by_its_exact_url() {
    let world = World::new().await;
    let url = world.issuer.url();
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
        let token = world.token_but(&json!({ "iss": issuer }));
        world.refused(&token, UNTRUSTED, &issuer.to_string()).await;
    }
    assert_eq!(world.issuer.fetches(), 0, "nobody is asked about a stranger");
    // Nor is a slash of ours forgiven.
    world.change_forge(&json!({"issuer_url": format!("{url}/")})).await;
    world.refused(&world.token(), UNTRUSTED, "without the slash").await;
    let answer = world.exchange(&world.token_but(&json!({"iss": format!("{url}/")}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_token_names_no_issuer() {
    let world = World::new().await;
    let good = world.token();
    let parts: Vec<&str> = good.split('.').collect();
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
        world.refused(&token, UNTRUSTED, &token).await;
    }
    // Whether these name somebody is not said; they are refused.
    for token in [
        format!("{}.{}", parts[0], parts[1]),
        format!("{good}."),
        format!("{good}.{}", parts[2]),
        format!("{good}="),
        format!("{good} "),
        format!(" {good}"),
        format!("{good}\n"),
        format!(".{}.{}", parts[1], parts[2]),
        format!("e30.{}.{}", parts[1], parts[2]),
        format!("bnVsbA.{}.{}", parts[1], parts[2]),
    ] {
        let answer = world.exchange(&token).await;
        assert!([UNTRUSTED, REJECTED].contains(&refusal(&answer)), "{token}: {}", answer.text);
    }
    assert_eq!(world.minted().await, 0);
    assert_eq!(world.exchange(&good).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_whose_words_were_changed_is_rejected() {
    let world = World::new().await;
    let (first, second) = (world.token_but(&json!({"ref": "other"})), world.token());
    let (first, second): (Vec<_>, Vec<_>) = (first.split('.').collect(), second.split('.').collect());
    let swapped = format!("{}.{}.{}", first[0], second[1], first[2]);
    world.refused(&swapped, REJECTED, "the signature of another token").await;
    let flipped = if second[2].starts_with('A') { "B" } else { "A" };
    let damaged = format!("{}.{}.{flipped}{}", second[0], second[1], &second[2][1..]);
    world.refused(&damaged, REJECTED, "a bit of the signature").await;
    let short = format!("{}.{}.{}", second[0], second[1], &second[2][..40]);
    world.refused(&short, REJECTED, "half a signature").await;
    let none = format!("{}.{}.", second[0], second[1]);
    world.refused(&none, REJECTED, "no signature").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_issuer_cannot_speak_for_another() {
    let world = World::new().await;
    let other = Issuer::start();
    std::fs::write(&world.bundle, world.issuer.ca_pem() + &other.ca_pem()).unwrap();
    let body = json!({"name": "other", "issuer_url": other.url(), "jwks_uri": other.jwks_uri(), "audience": "cloud"});
    let made = crate::networks::post(&world.cluster, &world.admin, "/auth/issuers", body).await;
    assert_eq!(made.status, 200, "{}", made.text);
    // Trusted as well, but these are not its own words.
    world.refused(&other.token(world.claims()), REJECTED, "signed by the other").await;
    let own = with(&world.claims(), &json!({"iss": other.url()}));
    world.refused(&world.issuer.token(own), REJECTED, "signed in the other's name").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_trusts_nobody_refuses_everything() {
    let world = World::without_issuer(None, Issuer::start(), &[]).await;
    for token in [world.token(), "x".into()] {
        assert_eq!(refusal(&world.exchange(&token).await), UNTRUSTED);
    }
    assert_eq!(world.issuer.fetches(), 0);
}
