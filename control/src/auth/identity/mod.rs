//! Identity tokens of issuers that the cluster trusts: read, and verified with the issuer's own keys.
//!
//! `token.rs` reads a token, `signature.rs` knows keys, `jwks.rs` keeps those of each issuer, `download.rs` fetches them,
//! `authorities.rs` knows whom to believe meanwhile. Tokens and what issuers answer are hostile until the opposite is
//! shown.

mod authorities;
mod download;
mod jwks;
#[cfg(test)]
mod jwks_tests;
mod signature;
mod token;
#[cfg(test)]
mod token_tests;

use std::fmt;
use std::sync::Arc;

use muster_types::issuer::IssuerTerms;
use muster_types::settings::Settings;
use serde_json::{Map, Value};

use crate::fetch::address::Guard;
use authorities::Authorities;
use jwks::Jwks;
use muster_store::issuers::IssuerRow;
pub use signature::KeySet;
use signature::Verdict;
use token::Token;

/// What a verified token says.
#[derive(Debug, Clone, PartialEq)]
pub struct Identity {
    pub claims: Map<String, Value>,
    /// Unix time from which on the token is worth nothing.
    pub expires: f64,
    /// Names the token among all of its issuer: each is good for one exchange by a rule.
    pub token_id: String,
}

/// Why a token was not accepted. The texts are for the log, never for the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// The token, or the keys to verify it with, are not good.
    Token(String),
    /// The operator's own authorities cannot be read.
    Authorities(String),
}

/// The `iss` of a token that nobody has verified yet. Asks nobody.
#[must_use]
pub fn unverified_issuer(token: &str) -> Option<String> {
    token::issuer(token)
}

/// Verifies a token at the Unix time `now` with keys that are at hand. Asks nobody.
pub fn verify_with(keys: &KeySet, terms: &IssuerTerms, token: &str, now: f64) -> Result<Identity, Refused> {
    let token = read(token, terms, now)?;
    match keys.verify(&token) {
        Verdict::Signed => Ok(token.identity()),
        Verdict::Refused(why) => Err(Refused::Token(why.into())),
        Verdict::Unknown => Err(Refused::Token("the issuer has no such key".into())),
    }
}

/// A token that would be good if it were signed.
fn read<'a>(token: &'a str, terms: &IssuerTerms, now: f64) -> Result<Token<'a>, Refused> {
    let token = Token::read(token).map_err(|why| Refused::Token(why.into()))?;
    token.check(terms, now).map_err(|why| Refused::Token(why.into()))?;
    Ok(token)
}

/// Verifies identity tokens.
pub struct Identities {
    authorities: Arc<Authorities>,
    jwks: Jwks,
}

impl fmt::Debug for Identities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identities").finish_non_exhaustive()
    }
}

impl Identities {
    /// Says in the log if the operator's authorities cannot be used.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        let words = &settings.federation_jwks_allowed_networks;
        let guard = Guard::new("FEDERATION_JWKS_ALLOWED_NETWORKS", words, &settings.http_proxy_server);
        let authorities = Arc::new(Authorities::new(settings, guard.clone()));
        let jwks = Jwks::new(settings, Arc::clone(&authorities), guard);
        Self { authorities, jwks }
    }

    /// Verifies a token of `issuer` at the Unix time `now`. What can be said without the issuer's keys is said
    /// without asking for them.
    pub async fn verify(&self, issuer: &IssuerRow, token: &str, now: f64) -> Result<Identity, Refused> {
        let trust = self.authorities.current().await.map_err(Refused::Authorities)?;
        let token = read(token, &issuer.terms, now)?;
        self.jwks.verify(issuer, &token, trust).await?;
        Ok(token.identity())
    }
}
