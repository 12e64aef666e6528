//! The keys that an issuer publishes as a JWK set, and the verification of tokens with them.
//!
//! A key matches a token if it has the token's key ID, is meant for signatures, has the type and curve of the token's
//! algorithm, and does not name another algorithm. A token without a key ID is verified if exactly one key matches its
//! algorithm. Other members of a set are skipped.

use aws_lc_rs::signature::{ParsedPublicKey, RsaPublicKeyComponents};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use serde_json::Value;

use super::algorithm::{Algorithm, KeyType};
use super::token::Token;

/// The maximum number of keys in a set.
const MAX_KEYS: usize = 100;
/// The allowed sizes of an RSA modulus, in bits.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=8192;
/// The maximum length of an RSA exponent. Longer ones only make the verification slower.
const MAX_EXPONENT_BYTES: usize = 4;

/// The result of verifying a token with a set of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Signed,
    /// The token is not valid, and a newer set would not change that.
    Rejected(&'static str),
    /// The key is not in this set. A newer set may have it.
    UnknownKey,
}

#[derive(Debug)]
struct Key {
    id: Option<String>,
    /// The parsed key for each algorithm that it supports.
    parsed: Vec<(Algorithm, ParsedPublicKey)>,
}

impl Key {
    fn for_algorithm(&self, algorithm: Algorithm) -> Option<&ParsedPublicKey> {
        self.parsed.iter().find(|(supported, _)| *supported == algorithm).map(|(_, key)| key)
    }

    /// Parses a member of a set. Returns `None` if it is not a key that can sign tokens.
    fn parse(member: &Value) -> Option<Self> {
        let id = match member.get("kid") {
            None => None,
            Some(id) => Some(id.as_str()?.to_owned()),
        };
        if member.get("use").is_some_and(|purpose| purpose != "sig") {
            return None;
        }
        if let Some(operations) = member.get("key_ops")
            && !operations.as_array()?.iter().any(|operation| operation == "verify")
        {
            return None;
        }
        let declared = member.get("alg");
        let allowed =
            Algorithm::ALL.iter().filter(|(name, _)| declared.is_none_or(|declared| declared == name));
        let parsed: Vec<_> = allowed
            .filter_map(|(_, algorithm)| Some((*algorithm, parse_public_key(member, *algorithm)?)))
            .collect();
        (!parsed.is_empty()).then_some(Self { id, parsed })
    }
}

/// The keys that an issuer publishes.
#[derive(Debug, Default)]
pub struct KeySet(Vec<Key>);

impl KeySet {
    /// Parses a JWK set.
    pub fn parse(body: &[u8]) -> Result<Self, &'static str> {
        let set: Value = serde_json::from_slice(body).map_err(|_| "key set is not valid JSON")?;
        let members = set.get("keys").and_then(Value::as_array).ok_or("key set has no array \"keys\"")?;
        if members.len() > MAX_KEYS {
            return Err("key set has too many keys");
        }
        Ok(Self(members.iter().filter_map(Key::parse).collect()))
    }

    /// Returns the number of keys that can sign tokens.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Verifies that one of the keys signed a token.
    pub(super) fn verify(&self, token: &Token<'_>) -> Verdict {
        let is_signed =
            |key: &ParsedPublicKey| key.verify_sig(token.signed.as_bytes(), &token.signature).is_ok();
        let Some(id) = &token.key_id else {
            let mut matching = self.0.iter().filter_map(|key| key.for_algorithm(token.algorithm));
            return match (matching.next(), matching.next()) {
                (Some(_), Some(_)) => Verdict::Rejected("token has no key ID and several keys match"),
                (Some(key), None) if is_signed(key) => Verdict::Signed,
                // Without a key ID, a forged token looks like one that a new key has signed.
                _ => Verdict::UnknownKey,
            };
        };
        let mut same_id = self.0.iter().filter(|key| key.id.as_ref() == Some(id)).peekable();
        if same_id.peek().is_none() {
            return Verdict::UnknownKey;
        }
        let mut matching = same_id.filter_map(|key| key.for_algorithm(token.algorithm)).peekable();
        if matching.peek().is_none() {
            return Verdict::Rejected("token algorithm does not match its key");
        }
        if matching.any(is_signed) {
            Verdict::Signed
        } else {
            Verdict::Rejected("token signature is invalid")
        }
    }
}

/// Parses a member of a set as a key for an algorithm. Returns `None` if it is not one.
fn parse_public_key(member: &Value, algorithm: Algorithm) -> Option<ParsedPublicKey> {
    let text = |name: &str| member.get(name).and_then(Value::as_str);
    let bytes = |name: &str| BASE64.decode(text(name)?).ok();
    match (algorithm.key_type(), text("kty")?) {
        (KeyType::Rsa(parameters), "RSA") => {
            let (n, e) = (bytes("n")?, bytes("e")?);
            let (n, e) = (without_leading_zeros(&n), without_leading_zeros(&e));
            let is_odd = |number: &[u8]| number.last().is_some_and(|byte| byte % 2 == 1);
            let is_sane = RSA_BITS.contains(&bit_length(n)) && is_odd(n) && is_odd(e) && e != [1];
            if !is_sane || e.len() > MAX_EXPONENT_BYTES {
                return None;
            }
            RsaPublicKeyComponents { n, e }.to_parsed_public_key(parameters).ok()
        }
        (KeyType::Ec { curve, coordinate_bytes, verification }, "EC") if text("crv")? == curve => {
            let (x, y) = (bytes("x")?, bytes("y")?);
            if x.len() != coordinate_bytes || y.len() != coordinate_bytes {
                return None;
            }
            // An uncompressed point.
            ParsedPublicKey::new(verification, [&[4], x.as_slice(), y.as_slice()].concat()).ok()
        }
        _ => None,
    }
}

fn without_leading_zeros(number: &[u8]) -> &[u8] {
    let zeros = number.iter().take_while(|byte| **byte == 0).count();
    &number[zeros..]
}

fn bit_length(number: &[u8]) -> usize {
    number.first().map_or(0, |first| number.len() * 8 - first.leading_zeros() as usize)
}
