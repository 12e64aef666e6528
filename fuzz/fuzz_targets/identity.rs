//! Identity tokens: whatever arrives as one is refused unless the issuer's key signed it and it is for us and for now,
//! and never panics. Nor does whatever an issuer publishes as its keys.

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

/// The issuer's key and somebody else's.
static OWN: LazyLock<EcdsaKeyPair> = LazyLock::new(pair);
static OTHER: LazyLock<EcdsaKeyPair> = LazyLock::new(pair);

static KEYS: LazyLock<KeySet> = LazyLock::new(|| {
    KeySet::read(json!({ "keys": [public(&OWN)] }).to_string().as_bytes()).expect("a set of keys")
});

static TERMS: LazyLock<IssuerTerms> = LazyLock::new(|| IssuerTerms {
    issuer_url: ISSUER.into(),
    jwks_uri: "https://issuer.example/keys".into(),
    audience: AUDIENCE.into(),
});

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    /// Any text.
    Text { now: f64, token: &'a str },
    /// Three parts, the last a right signature of the others.
    Signed { now: f64, header: &'a [u8], claims: &'a [u8] },
    /// The right header and signature around claims that are nearly right.
    Claims { now: f64, exp: f64, nbf: Option<f64>, audience: Vec<Option<&'a str>>, id: &'a str },
    /// Right claims that somebody else signed, and any members in the header.
    Forged { now: f64, members: Vec<(&'a str, &'a str)>, brings_key: bool },
    /// A good one with a byte changed.
    Damaged { at: u16, byte: u8 },
    /// What an issuer publishes.
    Keys(&'a [u8]),
    /// The issuer's key, with some members changed.
    Key(Vec<(&'a str, &'a str)>),
}

fuzz_target!(|input: Input| {
    match input {
        Input::Text { now, token } => {
            let _ = unverified_issuer(token);
            assert!(verify_with(&KEYS, &TERMS, token, now).is_err(), "a token out of thin air");
        }
        Input::Signed { now, header, claims } => check(now, &signed(&OWN, header, claims)),
        Input::Claims { now, exp, nbf, audience, id } => {
            let audience: Vec<_> = audience.iter().map(|word| word.unwrap_or(AUDIENCE)).collect();
            let mut claims = json!({"iss": ISSUER, "aud": audience, "exp": exp, "jti": id});
            if let Some(nbf) = nbf {
                claims["nbf"] = json!(nbf);
            }
            check(now, &signed(&OWN, HEADER.as_bytes(), claims.to_string().as_bytes()));
        }
        Input::Forged { now, members, brings_key } => {
            let mut header = json!({"alg": "ES256", "kid": "own"});
            for (name, value) in members {
                header[name] = json!(value);
            }
            if brings_key {
                header["jwk"] = public(&OTHER);
            }
            let token = signed(&OTHER, header.to_string().as_bytes(), good().to_string().as_bytes());
            assert!(verify_with(&KEYS, &TERMS, &token, now).is_err(), "a forged token is taken: {token}");
        }
        Input::Damaged { at, byte } => {
            let token = signed(&OWN, HEADER.as_bytes(), good().to_string().as_bytes());
            assert!(verify_with(&KEYS, &TERMS, &token, 1000.0).is_ok(), "a good token is refused");
            let mut token = token.into_bytes();
            let at = usize::from(at) % token.len();
            if token[at] != byte {
                token[at] = byte;
                let text = String::from_utf8_lossy(&token);
                assert!(
                    verify_with(&KEYS, &TERMS, &text, 1000.0).is_err(),
                    "a changed token is taken: {text}"
                );
            }
        }
        Input::Keys(body) => {
            if let Ok(keys) = KeySet::read(body) {
                let token = signed(&OWN, HEADER.as_bytes(), good().to_string().as_bytes());
                assert!(verify_with(&keys, &TERMS, &token, 1000.0).is_err(), "a key out of thin air");
            }
        }
        Input::Key(members) => {
            let mut key = public(&OWN);
            for (name, value) in members {
                key[name] = json!(value);
            }
            let keys = KeySet::read(json!({ "keys": [key] }).to_string().as_bytes()).expect("a set of keys");
            let token = signed(&OTHER, HEADER.as_bytes(), good().to_string().as_bytes());
            assert!(verify_with(&keys, &TERMS, &token, 1000.0).is_err(), "a changed key verifies all");
        }
    }
});

/// Verifies; what is taken must be of the issuer, for us and for now.
fn check(now: f64, token: &str) {
    let Ok(identity) = verify_with(&KEYS, &TERMS, token, now) else { return };
    assert!(now < identity.expires, "not the time of {identity:?}: {now}");
    assert!(identity.claims.get("nbf").is_none_or(|nbf| nbf.as_f64().is_some_and(|nbf| nbf <= now)));
    assert_eq!(identity.claims["iss"], ISSUER);
    let audience = &identity.claims["aud"];
    assert!(audience == AUDIENCE || audience.as_array().is_some_and(|all| all.contains(&json!(AUDIENCE))));
    assert!((1..=128).contains(&identity.token_id.chars().count()));
    assert_eq!(unverified_issuer(token).as_deref(), Some(ISSUER));
}

fn good() -> Value {
    json!({"iss": ISSUER, "aud": AUDIENCE, "exp": 2000, "jti": "1"})
}

fn pair() -> EcdsaKeyPair {
    EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).expect("a key")
}

fn public(pair: &EcdsaKeyPair) -> Value {
    let (x, y) = pair.public_key().as_ref()[1..].split_at(32);
    json!({"kty": "EC", "crv": "P-256", "kid": "own", "x": BASE64.encode(x), "y": BASE64.encode(y)})
}

fn signed(pair: &EcdsaKeyPair, header: &[u8], claims: &[u8]) -> String {
    let text = format!("{}.{}", BASE64.encode(header), BASE64.encode(claims));
    let signature = pair.sign(&SystemRandom::new(), text.as_bytes()).expect("a signature");
    format!("{text}.{}", BASE64.encode(signature.as_ref()))
}
