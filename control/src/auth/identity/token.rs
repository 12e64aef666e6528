//! Parses identity tokens (JWTs) and checks their claims. Key references in the header are ignored, and no claim is
//! trusted before the signature is verified.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use muster_types::issuer::IssuerTerms;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::algorithm::Algorithm;
use muster_store::sha256;

/// The maximum length of a `jti` claim that is used as the ID of a token, in characters.
const MAX_TOKEN_ID_CHARS: usize = 128;

/// The verified claims of a token.
#[derive(Debug, Clone, PartialEq)]
pub struct Identity {
    pub claims: Map<String, Value>,
    /// Unix time at which the token expires.
    pub expires: f64,
    /// Identifies the token among all tokens of its issuer, so that a rule accepts it only once.
    pub token_id: String,
}

/// A parsed token whose signature is not verified.
#[derive(Debug)]
pub(super) struct Token<'a> {
    /// The signed part: header and claims.
    pub(super) signed: &'a str,
    pub(super) signature: Vec<u8>,
    pub(super) algorithm: Algorithm,
    /// The ID of the issuer's key that signed it.
    pub(super) key_id: Option<String>,
    claims: Map<String, Value>,
}

/// A token whose claims are acceptable, provided that its signature is valid.
#[derive(Debug)]
pub(super) struct CheckedToken<'a> {
    pub(super) token: Token<'a>,
    expires: f64,
}

impl<'a> Token<'a> {
    pub(super) fn parse(token: &'a str) -> Result<Self, &'static str> {
        let (header, claims, signature) = split(token).ok_or("token does not have three parts")?;
        let signed = &token[..header.len() + 1 + claims.len()];
        let header = decode_object(header).ok_or("token header is malformed")?;
        let claims = decode_object(claims).ok_or("token claims are malformed")?;
        let signature = BASE64.decode(signature).map_err(|_| "token signature is malformed")?;
        if header.contains_key("crit") || header.get("b64").is_some_and(|value| value != &Value::Bool(true)) {
            return Err("token requires an unsupported extension");
        }
        let algorithm = header.get("alg").and_then(Value::as_str).and_then(Algorithm::from_name);
        let algorithm = algorithm.ok_or("token algorithm is not allowed")?;
        let key_id = match header.get("kid") {
            None => None,
            Some(Value::String(id)) => Some(id.clone()),
            Some(_) => return Err("token key ID is not a string"),
        };
        Ok(Self { signed, signature, algorithm, key_id, claims })
    }

    /// Checks issuer, audience and validity period.
    pub(super) fn check(self, terms: &IssuerTerms, now: f64) -> Result<CheckedToken<'a>, &'static str> {
        if self.claims.get("iss").and_then(Value::as_str) != Some(&terms.issuer_url) {
            return Err("token issuer does not match");
        }
        if !self.claims.get("aud").is_some_and(|audience| includes_audience(audience, &terms.audience)) {
            return Err("token audience does not match");
        }
        let expires = self.claims.get("exp").and_then(Value::as_f64).filter(|time| time.is_finite());
        let expires = expires.ok_or("token has no valid exp claim")?;
        // Written so that a `now` that is not a number is rejected.
        let is_alive = now < expires;
        if !is_alive {
            return Err("token has expired");
        }
        match self.claims.get("nbf").map(Value::as_f64) {
            None => {}
            Some(Some(begins)) if begins <= now => {}
            Some(Some(_)) => return Err("token is not valid yet"),
            Some(None) => return Err("token has an invalid nbf claim"),
        }
        Ok(CheckedToken { token: self, expires })
    }
}

impl CheckedToken<'_> {
    /// Returns the claims. Call it after the signature is verified.
    pub(super) fn into_identity(self) -> Identity {
        let Token { signed, claims, .. } = self.token;
        let jti = claims.get("jti").and_then(Value::as_str);
        let jti = jti.filter(|id| (1..=MAX_TOKEN_ID_CHARS).contains(&id.chars().count()));
        // The hash excludes the signature, because a token can have several valid ones.
        let token_id = jti.map_or_else(|| format!("sha256:{}", sha256(signed)), str::to_owned);
        Identity { claims, expires: self.expires, token_id }
    }
}

/// Returns the issuer that a token names, if the token can be parsed.
pub(super) fn issuer(token: &str) -> Option<String> {
    let (_, claims, _) = split(token)?;
    decode_object(claims)?.get("iss")?.as_str().map(str::to_owned)
}

/// Splits a token into header, claims and signature.
fn split(token: &str) -> Option<(&str, &str, &str)> {
    let mut parts = token.split('.');
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(header), Some(claims), Some(signature), None) => Some((header, claims, signature)),
        _ => None,
    }
}

/// Decodes a base64 encoded JSON object.
fn decode_object(part: &str) -> Option<Map<String, Value>> {
    let bytes = BASE64.decode(part).ok()?;
    serde_json::from_slice(&bytes).ok().map(|UniqueMembers(members)| members)
}

fn includes_audience(audience: &Value, expected: &str) -> bool {
    match audience {
        Value::String(audience) => audience == expected,
        Value::Array(all) => {
            all.iter().all(Value::is_string) && all.iter().any(|audience| audience.as_str() == Some(expected))
        }
        _ => false,
    }
}

/// A JSON object without duplicate members, which parsers interpret differently.
struct UniqueMembers(Map<String, Value>);

impl<'de> Deserialize<'de> for UniqueMembers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueMembers(Map::new()))
    }
}

impl<'de> Visitor<'de> for UniqueMembers {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some((name, value)) = map.next_entry::<String, Value>()? {
            if self.0.insert(name, value).is_some() {
                return Err(A::Error::custom("duplicate member"));
            }
        }
        Ok(self)
    }
}
