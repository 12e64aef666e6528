//! Tokens: whatever arrives as one is refused unless it was signed with our seed, and never panics.

#![no_main]

use std::sync::LazyLock;

use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use muster_control::auth::tokens::Tokens;
use muster_types::key::Secret;

const SEED: &str = "a seed that only this fuzzer uses";
const MINUTES: u64 = 15;

static TOKENS: LazyLock<Tokens> = LazyLock::new(|| Tokens::new(&Secret::new(SEED), "fuzz", MINUTES));

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    /// Any text.
    Text { now: u64, token: &'a str },
    /// Three parts, the last a right signature of the others.
    Signed { now: u64, header: &'a [u8], claims: &'a [u8] },
    /// The right header and signature around claims that are nearly right.
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
    /// One of ours.
    Ours {
        now: u64,
        later: u32,
        namespace: &'a str,
        key: &'a str,
        nonce: &'a str,
        scopes: Option<Vec<String>>,
    },
    /// One of ours with a byte changed.
    Damaged { at: u16, byte: u8 },
}

fuzz_target!(|input: Input| {
    match input {
        Input::Text { now, token } => assert!(TOKENS.verify(now, token).is_err(), "a token out of thin air"),
        Input::Signed { now, header, claims } => check(now, &signed(&BASE64.encode(header), claims)),
        Input::Claims { now, iat, nbf, exp, kind, namespace, key, more } => {
            let claims = serde_json::json!({
                "fresh": false, "iat": iat, "nbf": nbf, "exp": exp, "jti": "x", "type": kind,
                "sub": [namespace, key], "iss": "fuzz", "nonce": more, "scopes": [more],
            });
            check(
                now,
                &signed(&BASE64.encode(r#"{"alg":"HS256","typ":"JWT"}"#), claims.to_string().as_bytes()),
            );
        }
        Input::Ours { now, later, namespace, key, nonce, scopes } => {
            let token = TOKENS.create(now, namespace, key, nonce, scopes.as_deref());
            let at = now.saturating_add(later.into());
            // Longer than any header may be: refused, however right.
            let in_time = at < now.saturating_add(MINUTES * 60) && token.len() <= 16 << 10;
            match TOKENS.verify(at, &token) {
                Ok(claims) => {
                    assert!(in_time, "a dead token lives");
                    assert_eq!((claims.sub.0.as_str(), claims.sub.1.as_str()), (namespace, key));
                    assert_eq!((claims.nonce.as_deref(), claims.scopes), (Some(nonce), scopes));
                }
                Err(refused) => assert!(!in_time, "a good token is refused: {refused:?}"),
            }
        }
        Input::Damaged { at, byte } => {
            let mut token = TOKENS.create(1000, "ci", "deploy", "n0nce", None).into_bytes();
            let at = usize::from(at) % token.len();
            if token[at] != byte {
                token[at] = byte;
                let text = String::from_utf8_lossy(&token);
                assert!(TOKENS.verify(1000, &text).is_err(), "a changed token is taken: {text}");
            }
        }
    }
});

/// Verifies; what is taken must be for now and for access.
fn check(now: u64, token: &str) {
    if let Ok(claims) = TOKENS.verify(now, token) {
        assert_eq!(claims.kind, "access");
        assert!(claims.nbf <= now && now < claims.exp, "not the time of {claims:?}: {now}");
    }
}

fn signed(header: &str, claims: &[u8]) -> String {
    let text = format!("{header}.{}", BASE64.encode(claims));
    let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, SEED.as_bytes()), text.as_bytes());
    format!("{text}.{}", BASE64.encode(signature.as_ref()))
}
