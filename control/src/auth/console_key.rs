//! The Ed25519 key that signs tokens for the console proxy. Every node of the cluster has the same key.
//! See docs/decisions/0020.

use std::os::unix::fs::MetadataExt as _;

use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair as _};
use aws_lc_rs::{digest, hmac};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use muster_types::key::Secret;
use serde_json::{Value, json};

/// The DER prefix of a `SubjectPublicKeyInfo` with the 32 bytes of an Ed25519 public key.
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// A signing key with its key ID.
#[derive(Debug)]
pub struct ConsoleKey {
    pair: Ed25519KeyPair,
    kid: String,
    public_pem: String,
    /// Unix time of the key file; 0 for a derived key.
    created: i64,
}

impl ConsoleKey {
    /// Loads the key that KERBSIDE_SIGNING_KEY names: `auto` derives it from the cluster's seed, any other value is the
    /// path of a PEM file, and an empty value disables it.
    pub fn load(setting: &str, seed: &Secret) -> Result<Option<Self>, String> {
        match setting {
            "" => Ok(None),
            "auto" => {
                let key = hmac::Key::new(hmac::HMAC_SHA256, seed.expose().as_bytes());
                let secret = hmac::sign(&key, b"signs the tokens of the console proxy");
                let pair = Ed25519KeyPair::from_seed_unchecked(secret.as_ref());
                Ok(Some(Self::new(pair.map_err(|error| error.to_string())?, 0)))
            }
            path => {
                let failed = |error: &dyn std::fmt::Display| format!("{path}: {error}");
                let pem = std::fs::read_to_string(path).map_err(|error| failed(&error))?;
                let body: String = pem.lines().filter(|line| !line.starts_with("-----")).collect();
                let der = STANDARD.decode(body.trim()).map_err(|error| failed(&error))?;
                let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&der);
                let pair = pair.map_err(|_| failed(&"not an Ed25519 private key in PKCS#8"))?;
                let metadata = std::fs::metadata(path).map_err(|error| failed(&error))?;
                Ok(Some(Self::new(pair, metadata.mtime())))
            }
        }
    }

    fn new(pair: Ed25519KeyPair, created: i64) -> Self {
        let public = pair.public_key().as_ref();
        let der: Vec<u8> = SPKI_PREFIX.iter().chain(public).copied().collect();
        let public_pem =
            format!("-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n", STANDARD.encode(&der));
        let hash = digest::digest(&digest::SHA256, &der);
        let kid = hex::encode(&hash.as_ref()[..8]);
        Self { pair, kid, public_pem, created }
    }

    #[must_use]
    pub fn kid(&self) -> &str {
        &self.kid
    }

    /// Returns a signed JWT with these claims.
    #[must_use]
    pub fn sign(&self, claims: &Value) -> String {
        let header = json!({ "alg": "EdDSA", "typ": "JWT", "kid": self.kid });
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let mut token = format!("{}.{}", part(&header), part(claims));
        let signature = self.pair.sign(token.as_bytes());
        token.push('.');
        URL_SAFE_NO_PAD.encode_string(signature.as_ref(), &mut token);
        token
    }

    /// Returns the public key in the format in which the proxy reads it.
    #[must_use]
    pub fn public(&self) -> Value {
        json!({
            "active_kid": self.kid,
            "keys": [{
                "kid": self.kid,
                "alg": "EdDSA",
                "pem": self.public_pem,
                "public_pem": self.public_pem,
                "created": self.created,
            }],
        })
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::{ED25519, UnparsedPublicKey};

    use super::*;

    #[test]
    fn derived_key_is_deterministic_and_verifies_its_tokens() {
        let seed = Secret::new("a seed");
        let key = ConsoleKey::load("auto", &seed).unwrap().unwrap();
        let again = ConsoleKey::load("auto", &seed).unwrap().unwrap();
        assert_eq!(key.public(), again.public());
        let token = key.sign(&json!({ "aud": "https://console" }));
        let (signed, signature) = token.rsplit_once('.').unwrap();
        let pem = key.public()["keys"][0]["pem"].as_str().unwrap().to_owned();
        let body: String = pem.lines().filter(|line| !line.starts_with("-----")).collect();
        let der = STANDARD.decode(body).unwrap();
        let public = UnparsedPublicKey::new(&ED25519, &der[SPKI_PREFIX.len()..]);
        public.verify(signed.as_bytes(), &URL_SAFE_NO_PAD.decode(signature).unwrap()).unwrap();
    }

    #[test]
    fn distinguishes_no_key_from_unreadable_file() {
        let seed = Secret::new("a seed");
        assert!(ConsoleKey::load("", &seed).unwrap().is_none());
        assert!(
            ConsoleKey::load("/nonexistent/key.pem", &seed).unwrap_err().contains("/nonexistent/key.pem")
        );
    }
}
