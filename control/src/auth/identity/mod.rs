//! Verification of identity tokens from trusted issuers with the issuer's published keys.
//!
//! `token.rs` parses tokens, `key_set.rs` parses keys and verifies signatures, `jwks.rs` caches the keys of each
//! issuer, `download.rs` fetches them, `ca_bundle.rs` loads the CA certificates for that. Tokens and responses of
//! issuers are untrusted input. See docs/decisions/0024 and docs/decisions/0029.

mod algorithm;
mod ca_bundle;
mod download;
mod jwks;
mod key_set;
#[cfg(test)]
mod tests;
mod token;

use std::fmt;
use std::sync::Arc;

use muster_types::issuer::IssuerTerms;
use muster_types::settings::Settings;

use crate::events::Events;
use crate::fetch::address::AddressFilter;
use ca_bundle::CaBundle;
use jwks::JwksCache;
pub use key_set::KeySet;
use key_set::Verdict;
use muster_store::issuers::IssuerRow;
pub use token::Identity;
use token::{CheckedToken, Token};

/// Why a token was not accepted. The texts are for logs and events, not for the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdentityError {
    /// The token is not valid, or its issuer's keys are not available.
    Token(String),
    /// FEDERATION_JWKS_CA_BUNDLE cannot be loaded.
    CaBundle(String),
}

/// Returns the `iss` claim of a token without verifying it.
#[must_use]
pub fn unverified_issuer(token: &str) -> Option<String> {
    token::issuer(token)
}

/// Verifies a token at the Unix time `now` with the given keys, without network access.
pub fn verify_with(
    keys: &KeySet,
    terms: &IssuerTerms,
    token: &str,
    now: f64,
) -> Result<Identity, IdentityError> {
    let checked = check(token, terms, now)?;
    match keys.verify(&checked.token) {
        Verdict::Signed => Ok(checked.into_identity()),
        Verdict::Rejected(why) => Err(IdentityError::Token(why.into())),
        Verdict::UnknownKey => Err(IdentityError::Token("issuer has no such key".into())),
    }
}

/// Parses a token and checks its claims. Its signature is not verified yet.
fn check<'a>(token: &'a str, terms: &IssuerTerms, now: f64) -> Result<CheckedToken<'a>, IdentityError> {
    let token = Token::parse(token).map_err(|why| IdentityError::Token(why.into()))?;
    token.check(terms, now).map_err(|why| IdentityError::Token(why.into()))
}

/// Verifies identity tokens with keys that it fetches from their issuers.
pub struct IdentityVerifier {
    ca_bundle: Arc<CaBundle>,
    jwks: JwksCache,
}

impl fmt::Debug for IdentityVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdentityVerifier").finish_non_exhaustive()
    }
}

impl IdentityVerifier {
    /// Creates a verifier, which records failed fetches as events of their issuer. Logs an error if FEDERATION_JWKS_CA_BUNDLE cannot be loaded.
    #[must_use]
    pub fn new(settings: &Settings, events: &Events) -> Self {
        let networks = &settings.federation_jwks_allowed_networks;
        let filter =
            AddressFilter::new("FEDERATION_JWKS_ALLOWED_NETWORKS", networks, &settings.http_proxy_server)
                .for_requests_within(jwks::fetch_timeout(settings));
        let ca_bundle = Arc::new(CaBundle::new(settings, filter.clone()));
        let jwks = JwksCache::new(settings, Arc::clone(&ca_bundle), filter, events.clone());
        Self { ca_bundle, jwks }
    }

    /// Verifies a token of `issuer` at the Unix time `now`. Checks the claims before it fetches keys.
    pub async fn verify(&self, issuer: &IssuerRow, token: &str, now: f64) -> Result<Identity, IdentityError> {
        let roots = self.ca_bundle.current().await.map_err(IdentityError::CaBundle)?;
        let checked = check(token, &issuer.terms, now)?;
        self.jwks.verify(issuer, &checked.token, roots).await.map_err(IdentityError::Token)?;
        Ok(checked.into_identity())
    }
}
