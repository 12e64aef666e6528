//! The keys of an issuer.

use aws_lc_rs::encoding::{AsDer as _, PublicKeyX509Der};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::{KeyPair as RsaKeyPair, KeySize};
use aws_lc_rs::signature::{self, EcdsaKeyPair, KeyPair as _, RsaEncoding};
use aws_lc_rs::{digest, hmac};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};

/// The key that signs a token, independent of its header.
#[derive(Debug, Clone)]
pub enum Signer {
    /// The RSA key: `RS256` to `PS512`.
    Rsa(&'static str),
    /// The EC key of the algorithm's curve: `ES256` to `ES512`.
    Ec(&'static str),
    /// A shared secret, by HS256.
    Hmac(Vec<u8>),
    /// No key: the signature is empty.
    None,
}

/// A set of keys, of which two are published.
#[derive(Debug)]
pub(super) struct Keys {
    pub(super) number: usize,
    rsa: RsaKeyPair,
    /// By the name of the curve.
    ec: [(&'static str, EcdsaKeyPair); 3],
}

impl Keys {
    /// Generates the set with this number, whose keys have the IDs `rsa-NUMBER` and `ec-NUMBER`.
    pub(super) fn generate(number: usize) -> Self {
        let curve = |name, algorithm| (name, EcdsaKeyPair::generate(algorithm).expect("an EC key"));
        Self {
            number,
            rsa: RsaKeyPair::generate(KeySize::Rsa2048).expect("an RSA key"),
            ec: [
                curve("P-256", &signature::ECDSA_P256_SHA256_FIXED_SIGNING),
                curve("P-384", &signature::ECDSA_P384_SHA384_FIXED_SIGNING),
                curve("P-521", &signature::ECDSA_P521_SHA512_FIXED_SIGNING),
            ],
        }
    }

    pub(super) fn rsa_id(&self) -> String {
        format!("rsa-{}", self.number)
    }

    /// Returns the published keys as JWKs.
    pub(super) fn published(&self) -> Vec<Value> {
        let mut ec = self.ec_jwk("ES256");
        ec["kid"] = json!(format!("ec-{}", self.number));
        let mut rsa = self.rsa_jwk();
        rsa["kid"] = json!(self.rsa_id());
        rsa["alg"] = json!("RS256");
        ec["alg"] = json!("ES256");
        vec![rsa, ec]
    }

    /// Returns the RSA key as JWK, without an ID and algorithm.
    pub(super) fn rsa_jwk(&self) -> Value {
        let (modulus, exponent) = numbers(self.rsa.public_key().as_ref());
        json!({"kty": "RSA", "use": "sig", "n": text(modulus), "e": text(exponent)})
    }

    /// Returns the key of the algorithm's curve as JWK, without an ID.
    pub(super) fn ec_jwk(&self, algorithm: &str) -> Value {
        let (curve, key) = self.curve(algorithm);
        // An uncompressed point: 4, then both coordinates.
        let (x, y) = key.public_key().as_ref()[1..].split_at(key.public_key().as_ref().len() / 2);
        json!({"kty": "EC", "use": "sig", "crv": curve, "x": text(x), "y": text(y)})
    }

    /// Returns the public RSA key in the encodings that a vulnerable verifier would accept as an HMAC secret.
    pub(super) fn public_texts(&self) -> Vec<Vec<u8>> {
        let key = self.rsa.public_key();
        let der: PublicKeyX509Der<'_> = key.as_der().expect("a public key");
        let encoded = STANDARD.encode(der.as_ref());
        let lines: Vec<_> = encoded.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
        let pem = format!("-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----", lines.join("\n"));
        let (modulus, _) = numbers(key.as_ref());
        vec![
            format!("{pem}\n").into_bytes(),
            pem.into_bytes(),
            der.as_ref().to_vec(),
            key.as_ref().to_vec(),
            modulus.to_vec(),
            text(modulus).into_bytes(),
        ]
    }

    /// Returns a signed token.
    pub(super) fn token(&self, header: &Value, claims: &Value, signer: &Signer) -> String {
        let message =
            format!("{}.{}", text(header.to_string().as_bytes()), text(claims.to_string().as_bytes()));
        let signature = self.sign(message.as_bytes(), signer);
        format!("{message}.{}", text(&signature))
    }

    fn sign(&self, message: &[u8], signer: &Signer) -> Vec<u8> {
        match signer {
            Signer::Rsa(algorithm) => {
                let encoding: &'static dyn RsaEncoding = match *algorithm {
                    "RS256" => &signature::RSA_PKCS1_SHA256,
                    "RS384" => &signature::RSA_PKCS1_SHA384,
                    "RS512" => &signature::RSA_PKCS1_SHA512,
                    "PS256" => &signature::RSA_PSS_SHA256,
                    "PS384" => &signature::RSA_PSS_SHA384,
                    "PS512" => &signature::RSA_PSS_SHA512,
                    other => panic!("no RSA algorithm is called {other}"),
                };
                let mut signature = vec![0; self.rsa.public_modulus_len()];
                self.rsa.sign(encoding, &SystemRandom::new(), message, &mut signature).expect("a signature");
                signature
            }
            Signer::Ec(algorithm) => {
                let (_, key) = self.curve(algorithm);
                key.sign(&SystemRandom::new(), message).expect("a signature").as_ref().to_vec()
            }
            Signer::Hmac(secret) => {
                let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
                hmac::sign(&key, message).as_ref().to_vec()
            }
            Signer::None => vec![],
        }
    }

    fn curve(&self, algorithm: &str) -> &(&'static str, EcdsaKeyPair) {
        match algorithm {
            "ES256" => &self.ec[0],
            "ES384" => &self.ec[1],
            "ES512" => &self.ec[2],
            other => panic!("no EC algorithm is called {other}"),
        }
    }
}

/// Returns a unique text.
pub(super) fn fresh() -> String {
    let mut bytes = [0; 16];
    aws_lc_rs::rand::fill(&mut bytes).expect("random bytes");
    text(digest::digest(&digest::SHA256, &bytes).as_ref())
}

fn text(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// Returns modulus and exponent of a public key, which is a DER sequence of two integers.
fn numbers(der: &[u8]) -> (&[u8], &[u8]) {
    let (sequence, _) = element(der);
    let (modulus, rest) = element(sequence);
    let (exponent, _) = element(rest);
    (without_sign(modulus), without_sign(exponent))
}

/// Returns the content of the first DER element, and the bytes after it.
fn element(der: &[u8]) -> (&[u8], &[u8]) {
    let (length, start) = match der[1] {
        short @ 0..=0x7f => (usize::from(short), 2),
        long => {
            let end = 2 + usize::from(long & 0x7f);
            (der[2..end].iter().fold(0, |length, byte| length << 8 | usize::from(*byte)), end)
        }
    };
    (&der[start..start + length], &der[start + length..])
}

/// Strips the leading zero of a positive DER integer.
fn without_sign(number: &[u8]) -> &[u8] {
    number.strip_prefix(&[0]).unwrap_or(number)
}
