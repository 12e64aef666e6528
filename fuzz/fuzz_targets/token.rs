//! Fuzzes access tokens: no input panics, and a token is accepted only if it is signed with the secret seed.

#![no_main]

use std::sync::LazyLock;

use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use muster_control::auth::tokens::AccessTokens;
use muster_types::key::Secret;

const SEED: &str = "a seed that only this fuzzer uses";
const MINUTES: u64 = 15;

static TOKENS: LazyLock<AccessTokens> = LazyLock::new(|| AccessTokens::new(&Secret::new(SEED), "fuzz", MINUTES));

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    /// Arbitrary text.
    Text { now: u64, token: &'a str },
    /// An arbitrary header and claims with a valid signature.
    Signed { now: u64, header: &'a [u8], claims: &'a [u8] },
    /// A valid header and signature with plausible claims.
    Claims {
        now: u64,
        iat: u64,
        nbf: u64,
        exp: u64,
        kind: &'a str,
        namespace: &'a str,
        key: &'a str,
        more: &'a str,
    },
    /// A valid token.
    Valid {
        now: u64,
        later: u32,
        namespace: &'a str,
        key: &'a str,
        nonce: &'a str,
        scopes: Option<Vec<String>>,
    },
    /// A valid token with one changed byte.
    Damaged { at: u16, byte: u8 },
}

fuzz_target!(|input: Input| {
    match input {
        Input::Text { now, token } => {
            assert!(TOKENS.verify(now, token).is_err(), "accepted an arbitrary token")
        }
        Input::Signed { now, header, claims } => check(now, &sign_token(&BASE64.encode(header), claims)),
        Input::Claims { now, iat, nbf, exp, kind, namespace, key, more } => {
            let claims = serde_json::json!({
                "fresh": false, "iat": iat, "nbf": nbf, "exp": exp, "jti": "x", "type": kind,
                "sub": [namespace, key], "iss": "fuzz", "nonce": more, "scopes": [more],
            });
            check(
                now,
                &sign_token(&BASE64.encode(r#"{"alg":"HS256","typ":"JWT"}"#), claims.to_string().as_bytes()),
            );
        }
        Input::Valid { now, later, namespace, key, nonce, scopes } => {
            let token = TOKENS.create(now, namespace, key, nonce, scopes.as_deref());
            let at = now.saturating_add(later.into());
            // Longer tokens than a header may be are rejected.
            let is_valid = at < now.saturating_add(MINUTES * 60) && token.len() <= 16 << 10;
            match TOKENS.verify(at, &token) {
                Ok(claims) => {
                    assert!(is_valid, "accepted an expired token");
                    assert_eq!((claims.sub.0.as_str(), claims.sub.1.as_str()), (namespace, key));
                    assert_eq!((claims.nonce.as_deref(), claims.scopes), (Some(nonce), scopes));
                }
                Err(error) => assert!(!is_valid, "rejected a valid token: {error:?}"),
            }
        }
        Input::Damaged { at, byte } => {
            let mut token = TOKENS.create(1000, "ci", "deploy", "n0nce", None).into_bytes();
            let at = usize::from(at) % token.len();
            if token[at] != byte {
                token[at] = byte;
                let text = String::from_utf8_lossy(&token);
                assert!(TOKENS.verify(1000, &text).is_err(), "accepted a changed token: {text}");
            }
        }
    }
});

/// Verifies a token. If it is accepted, it must be an access token within its validity period.
fn check(now: u64, token: &str) {
    if let Ok(claims) = TOKENS.verify(now, token) {
        assert_eq!(claims.kind, "access");
        assert!(claims.nbf <= now && now < claims.exp, "{claims:?} are not valid at {now}");
    }
}

fn sign_token(header: &str, claims: &[u8]) -> String {
    let text = format!("{header}.{}", BASE64.encode(claims));
    let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, SEED.as_bytes()), text.as_bytes());
    format!("{text}.{}", BASE64.encode(signature.as_ref()))
}
