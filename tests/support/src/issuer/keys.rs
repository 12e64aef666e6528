//! The keys of an issuer: generated, published, signed with.

use aws_lc_rs::encoding::{AsDer as _, PublicKeyX509Der};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::{KeyPair as RsaKeyPair, KeySize};
use aws_lc_rs::signature::{self, EcdsaKeyPair, KeyPair as _, RsaEncoding};
use aws_lc_rs::{digest, hmac};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};

/// What a token is signed with, whatever its header says.
#[derive(Debug, Clone)]
pub enum Signer {
    /// The RSA key: `RS256` to `PS512`.
    Rsa(&'static str),
    /// The EC key of the algorithm's curve: `ES256` to `ES512`.
    Ec(&'static str),
    /// A secret, as HS256 does.
    Hmac(Vec<u8>),
    /// Nothing: the signature is empty.
    None,
}

/// One set of keys, of which two are published.
#[derive(Debug)]
pub(super) struct Keys {
    pub(super) number: usize,
    rsa: RsaKeyPair,
    /// By the names of their curves.
    ec: [(&'static str, EcdsaKeyPair); 3],
}

impl Keys {
    /// The set of that number: its keys are called `rsa-1`, `ec-1` and so on.
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

    /// What is published of the keys that every issuer has.
    pub(super) fn published(&self) -> Vec<Value> {
        let mut ec = self.ec_jwk("ES256");
        ec["kid"] = json!(format!("ec-{}", self.number));
        let mut rsa = self.rsa_jwk();
        rsa["kid"] = json!(self.rsa_id());
        rsa["alg"] = json!("RS256");
        ec["alg"] = json!("ES256");
        vec![rsa, ec]
    }

    /// The RSA key, without an id and for every algorithm.
    pub(super) fn rsa_jwk(&self) -> Value {
        let (modulus, exponent) = numbers(self.rsa.public_key().as_ref());
        json!({"kty": "RSA", "use": "sig", "n": text(modulus), "e": text(exponent)})
    }

    /// The key of the algorithm's curve, without an id.
    pub(super) fn ec_jwk(&self, algorithm: &str) -> Value {
        let (curve, key) = self.curve(algorithm);
        // A point as it is written uncompressed: 4, then both halves.
        let (x, y) = key.public_key().as_ref()[1..].split_at(key.public_key().as_ref().len() / 2);
        json!({"kty": "EC", "use": "sig", "crv": curve, "x": text(x), "y": text(y)})
    }

    /// The public RSA key in the spellings that a careless verifier would take as a secret.
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

    /// A token of any header and content.
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

/// A text that no other call gives.
pub(super) fn fresh() -> String {
    let mut bytes = [0; 16];
    aws_lc_rs::rand::fill(&mut bytes).expect("random bytes");
    text(digest::digest(&digest::SHA256, &bytes).as_ref())
}

fn text(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// Modulus and exponent of a public key: a sequence of two integers.
fn numbers(der: &[u8]) -> (&[u8], &[u8]) {
    let (sequence, _) = element(der);
    let (modulus, rest) = element(sequence);
    let (exponent, _) = element(rest);
    (without_sign(modulus), without_sign(exponent))
}

/// The content of the first element, and what follows it.
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

/// A positive integer may begin with a zero that only says so.
fn without_sign(number: &[u8]) -> &[u8] {
    number.strip_prefix(&[0]).unwrap_or(number)
}
