//! Fuzzes identity tokens and key sets: no input panics, and a token is accepted only if the issuer has signed it and
//! its audience and validity period match.

#![no_main]

use std::sync::LazyLock;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use muster_control::auth::identity::{KeySet, unverified_issuer, verify_with};
use muster_types::issuer::IssuerTerms;
use serde_json::{Value, json};

const ISSUER: &str = "https://issuer.example";
const AUDIENCE: &str = "fuzz";
const HEADER: &str = r#"{"alg":"ES256","kid":"own"}"#;

/// The key of the issuer.
static ISSUER_KEY: LazyLock<EcdsaKeyPair> = LazyLock::new(generate_key);
/// A key of an attacker.
static OTHER_KEY: LazyLock<EcdsaKeyPair> = LazyLock::new(generate_key);

static KEYS: LazyLock<KeySet> = LazyLock::new(|| {
    KeySet::parse(json!({ "keys": [public_jwk(&ISSUER_KEY)] }).to_string().as_bytes())
        .expect("a valid key set")
});

static TERMS: LazyLock<IssuerTerms> = LazyLock::new(|| IssuerTerms {
    issuer_url: ISSUER.into(),
    jwks_uri: "https://issuer.example/keys".into(),
    audience: AUDIENCE.into(),
});

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    /// Arbitrary text.
    Text { now: f64, token: &'a str },
    /// An arbitrary header and claims with a valid signature.
    Signed { now: f64, header: &'a [u8], claims: &'a [u8] },
    /// A valid header and signature with plausible claims.
    Claims { now: f64, exp: f64, nbf: Option<f64>, audience: Vec<Option<&'a str>>, id: &'a str },
    /// Valid claims with an arbitrary header, signed by another key.
    Forged { now: f64, members: Vec<(&'a str, &'a str)>, has_embedded_key: bool },
    /// A valid token with one changed byte.
    Damaged { at: u16, byte: u8 },
    /// An arbitrary key set.
    Keys(&'a [u8]),
    /// The issuer's key with some changed members.
    Key(Vec<(&'a str, &'a str)>),
}

fuzz_target!(|input: Input| {
    match input {
        Input::Text { now, token } => {
            let _ = unverified_issuer(token);
            assert!(verify_with(&KEYS, &TERMS, token, now).is_err(), "accepted an arbitrary token");
        }
        Input::Signed { now, header, claims } => check(now, &sign_token(&ISSUER_KEY, header, claims)),
        Input::Claims { now, exp, nbf, audience, id } => {
            let audience: Vec<_> = audience.iter().map(|word| word.unwrap_or(AUDIENCE)).collect();
            let mut claims = json!({"iss": ISSUER, "aud": audience, "exp": exp, "jti": id});
            if let Some(nbf) = nbf {
                claims["nbf"] = json!(nbf);
            }
            check(now, &sign_token(&ISSUER_KEY, HEADER.as_bytes(), claims.to_string().as_bytes()));
        }
        Input::Forged { now, members, has_embedded_key } => {
            let mut header = json!({"alg": "ES256", "kid": "own"});
            for (name, value) in members {
                header[name] = json!(value);
            }
            if has_embedded_key {
                header["jwk"] = public_jwk(&OTHER_KEY);
            }
            let token =
                sign_token(&OTHER_KEY, header.to_string().as_bytes(), valid_claims().to_string().as_bytes());
            assert!(verify_with(&KEYS, &TERMS, &token, now).is_err(), "accepted a forged token: {token}");
        }
        Input::Damaged { at, byte } => {
            let token = sign_token(&ISSUER_KEY, HEADER.as_bytes(), valid_claims().to_string().as_bytes());
            assert!(verify_with(&KEYS, &TERMS, &token, 1000.0).is_ok(), "rejected a valid token");
            let mut token = token.into_bytes();
            let at = usize::from(at) % token.len();
            if token[at] != byte {
                token[at] = byte;
                let text = String::from_utf8_lossy(&token);
                assert!(
                    verify_with(&KEYS, &TERMS, &text, 1000.0).is_err(),
                    "accepted a changed token: {text}"
                );
            }
        }
        Input::Keys(body) => {
            if let Ok(keys) = KeySet::parse(body) {
                let token = sign_token(&ISSUER_KEY, HEADER.as_bytes(), valid_claims().to_string().as_bytes());
                assert!(
                    verify_with(&keys, &TERMS, &token, 1000.0).is_err(),
                    "an arbitrary key set verifies a token"
                );
            }
        }
        Input::Key(members) => {
            let mut key = public_jwk(&ISSUER_KEY);
            for (name, value) in members {
                key[name] = json!(value);
            }
            let keys =
                KeySet::parse(json!({ "keys": [key] }).to_string().as_bytes()).expect("a valid key set");
            let token = sign_token(&OTHER_KEY, HEADER.as_bytes(), valid_claims().to_string().as_bytes());
            assert!(
                verify_with(&keys, &TERMS, &token, 1000.0).is_err(),
                "a changed key verifies another signature"
            );
        }
    }
});

/// Verifies a token. If it is accepted, its issuer, audience and validity period must match.
fn check(now: f64, token: &str) {
    let Ok(identity) = verify_with(&KEYS, &TERMS, token, now) else { return };
    assert!(now < identity.expires, "{identity:?} is not valid at {now}");
    assert!(identity.claims.get("nbf").is_none_or(|nbf| nbf.as_f64().is_some_and(|nbf| nbf <= now)));
    assert_eq!(identity.claims["iss"], ISSUER);
    let audience = &identity.claims["aud"];
    assert!(audience == AUDIENCE || audience.as_array().is_some_and(|all| all.contains(&json!(AUDIENCE))));
    assert!((1..=128).contains(&identity.token_id.chars().count()));
    assert_eq!(unverified_issuer(token).as_deref(), Some(ISSUER));
}

fn valid_claims() -> Value {
    json!({"iss": ISSUER, "aud": AUDIENCE, "exp": 2000, "jti": "1"})
}

fn generate_key() -> EcdsaKeyPair {
    EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).expect("a key")
}

fn public_jwk(key: &EcdsaKeyPair) -> Value {
    let (x, y) = key.public_key().as_ref()[1..].split_at(32);
    json!({"kty": "EC", "crv": "P-256", "kid": "own", "x": BASE64.encode(x), "y": BASE64.encode(y)})
}

fn sign_token(key: &EcdsaKeyPair, header: &[u8], claims: &[u8]) -> String {
    let text = format!("{}.{}", BASE64.encode(header), BASE64.encode(claims));
    let signature = key.sign(&SystemRandom::new(), text.as_bytes()).expect("a signature");
    format!("{text}.{}", BASE64.encode(signature.as_ref()))
}
