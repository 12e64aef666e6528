//! A token as it arrives: three parts, two of them JSON. Nothing that it says of keys or of where to find them is
//! used, and nothing that it says at all is true before its signature was checked.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use muster_types::issuer::IssuerTerms;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::Identity;
use super::signature::Algorithm;
use muster_store::sha256;

/// Longest `jti` that names a token, in characters.
const LONGEST_ID: usize = 128;

/// A token that can be read.
#[derive(Debug)]
pub(super) struct Token<'a> {
    /// What the signature is of.
    pub(super) signed: &'a str,
    pub(super) signature: Vec<u8>,
    pub(super) algorithm: Algorithm,
    /// Which of the issuer's keys signed it.
    pub(super) key_id: Option<String>,
    claims: Map<String, Value>,
}

impl<'a> Token<'a> {
    pub(super) fn read(token: &'a str) -> Result<Self, &'static str> {
        let (header, claims, signature) = parts(token).ok_or("it does not have three parts")?;
        let signed = &token[..header.len() + 1 + claims.len()];
        let header = object(header).ok_or("its header cannot be read")?;
        let claims = object(claims).ok_or("its claims cannot be read")?;
        let signature = BASE64.decode(signature).map_err(|_| "its signature cannot be read")?;
        // Something that must be understood, and would not be.
        if header.contains_key("crit") || header.get("b64").is_some_and(|value| value != &Value::Bool(true)) {
            return Err("its header makes demands");
        }
        let algorithm = header.get("alg").and_then(Value::as_str).and_then(Algorithm::named);
        let algorithm = algorithm.ok_or("its algorithm is not allowed")?;
        let key_id = match header.get("kid") {
            None => None,
            Some(Value::String(id)) => Some(id.clone()),
            Some(_) => return Err("its key id is not a text"),
        };
        Ok(Self { signed, signature, algorithm, key_id, claims })
    }

    /// Whether it is of this issuer, for us and for now.
    pub(super) fn check(&self, terms: &IssuerTerms, now: f64) -> Result<(), &'static str> {
        if self.claims.get("iss").and_then(Value::as_str) != Some(&terms.issuer_url) {
            return Err("it names another issuer");
        }
        if !self.claims.get("aud").is_some_and(|audience| is_for(audience, &terms.audience)) {
            return Err("it is for another audience");
        }
        let expires = self.expires().ok_or("it does not say when it expires")?;
        let is_alive = now < expires;
        if !is_alive {
            return Err("it has expired");
        }
        match self.claims.get("nbf").map(Value::as_f64) {
            None => Ok(()),
            Some(Some(begins)) if begins <= now => Ok(()),
            Some(Some(_)) => Err("it is not valid yet"),
            Some(None) => Err("it does not say well since when it is valid"),
        }
    }

    fn expires(&self) -> Option<f64> {
        self.claims.get("exp").and_then(Value::as_f64).filter(|time| time.is_finite())
    }

    /// What it says, once that was verified.
    pub(super) fn identity(self) -> Identity {
        let own_id = self.claims.get("jti").and_then(Value::as_str);
        let own_id = own_id.filter(|id| (1..=LONGEST_ID).contains(&id.chars().count()));
        // Without the signature, which may be written in several ways.
        let token_id = own_id.map_or_else(|| format!("sha256:{}", sha256(self.signed)), str::to_owned);
        // Nothing that was checked expires never.
        let expires = self.expires().unwrap_or(0.0);
        Identity { claims: self.claims, expires, token_id }
    }
}

/// The issuer that a token names, if it can be read.
pub(super) fn issuer(token: &str) -> Option<String> {
    let (_, claims, _) = parts(token)?;
    object(claims)?.get("iss")?.as_str().map(str::to_owned)
}

/// Header, claims and signature.
fn parts(token: &str) -> Option<(&str, &str, &str)> {
    let mut parts = token.split('.');
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(header), Some(claims), Some(signature), None) => Some((header, claims, signature)),
        _ => None,
    }
}

/// The JSON object in a part.
fn object(part: &str) -> Option<Map<String, Value>> {
    let bytes = BASE64.decode(part).ok()?;
    serde_json::from_slice(&bytes).ok().map(|Members(members)| members)
}

fn is_for(audience: &Value, wanted: &str) -> bool {
    match audience {
        Value::String(audience) => audience == wanted,
        Value::Array(all) => {
            all.iter().all(Value::is_string) && all.iter().any(|audience| audience.as_str() == Some(wanted))
        }
        _ => false,
    }
}

/// An object with each member once: of two, somebody else might read the other one.
struct Members(Map<String, Value>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Members(Map::new()))
    }
}

impl<'de> Visitor<'de> for Members {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some((name, value)) = map.next_entry::<String, Value>()? {
            if self.0.insert(name, value).is_some() {
                return Err(A::Error::custom("a member twice"));
            }
        }
        Ok(self)
    }
}
