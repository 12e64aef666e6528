//! Invitations of new hosts: the token that an administrator passes to a host, and the settings that the host gets for it.
//!
//! The token contains a secret that only the cluster and the host know. The host proves that it has the secret, and the
//! settings are encrypted with it. So the exchange is safe over any connection, and neither side needs a certificate of
//! the other. See docs/decisions/0056.

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::key::Secret;

const PREFIX: &str = "mjt_";

/// An invitation in API responses.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct InvitationRecord {
    /// The token for `muster node join` on the new host. It can be used once.
    pub token: String,
    /// Unix time after which the token is invalid.
    pub expires: f64,
}

/// The response to a host that has used its invitation.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RedeemedInvitation {
    /// The settings of the cluster, encrypted with the secret of the token.
    pub sealed: String,
}

/// What an invited host needs to join the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinSettings {
    pub database_url: Secret,
    pub auth_secret_seed: Secret,
}

/// The parts of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvitationToken {
    /// The URL of the API that issued it.
    pub api_url: String,
    pub id: String,
    secret: Secret,
}

#[derive(Serialize, Deserialize)]
struct TokenDocument {
    u: String,
    i: String,
    s: String,
}

#[derive(Serialize, Deserialize)]
struct SettingsDocument {
    database_url: String,
    auth_secret_seed: String,
}

fn sign(secret: &Secret, purpose: &str) -> hmac::Tag {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret.expose().as_bytes()), purpose.as_bytes())
}

impl InvitationToken {
    /// Creates the token of an invitation. Its secret follows from its id and the seed of the cluster.
    #[must_use]
    pub fn new(api_url: &str, id: &str, seed: &Secret) -> Self {
        let secret = BASE64.encode(sign(seed, &format!("muster node invitation 1 {id}")));
        Self { api_url: api_url.to_owned(), id: id.to_owned(), secret: Secret::new(secret) }
    }

    /// Returns the token as text.
    #[must_use]
    pub fn to_text(&self) -> String {
        let (u, i, s) = (self.api_url.clone(), self.id.clone(), self.secret.expose().to_owned());
        let document = serde_json::to_string(&TokenDocument { u, i, s }).unwrap_or_default();
        format!("{PREFIX}{}", BASE64.encode(document))
    }

    /// Parses a token.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        let invalid = "is not a token of `muster node invite`";
        let encoded = text.trim().strip_prefix(PREFIX).ok_or(invalid)?;
        let document = BASE64.decode(encoded).map_err(|_| invalid)?;
        let TokenDocument { u, i, s } = serde_json::from_slice(&document).map_err(|_| invalid)?;
        Ok(Self { api_url: u, id: i, secret: Secret::new(s) })
    }

    /// Returns the proof that a host has the token.
    #[must_use]
    pub fn proof(&self) -> String {
        BASE64.encode(sign(&self.secret, "muster join request 1"))
    }

    /// Returns whether a host that sent `proof` has the token.
    #[must_use]
    pub fn verify(&self, proof: &str) -> bool {
        aws_lc_rs::constant_time::verify_slices_are_equal(proof.as_bytes(), self.proof().as_bytes()).is_ok()
    }

    fn encryption_key(&self) -> Option<RandomizedNonceKey> {
        RandomizedNonceKey::new(&AES_256_GCM, sign(&self.secret, "muster join settings 1").as_ref()).ok()
    }

    /// Encrypts the settings for the host that has the token. `None` if the host lacks random numbers.
    #[must_use]
    pub fn seal(&self, settings: &JoinSettings) -> Option<String> {
        let document = SettingsDocument {
            database_url: settings.database_url.expose().to_owned(),
            auth_secret_seed: settings.auth_secret_seed.expose().to_owned(),
        };
        let mut sealed = serde_json::to_vec(&document).ok()?;
        let nonce = self.encryption_key()?.seal_in_place_append_tag(Aad::from(&self.id), &mut sealed).ok()?;
        Some(BASE64.encode([&nonce.as_ref()[..], &sealed].concat()))
    }

    /// Decrypts the settings. `None` if the sender does not know the secret of the token.
    #[must_use]
    pub fn open(&self, sealed: &str) -> Option<JoinSettings> {
        let bytes = BASE64.decode(sealed).ok()?;
        let (nonce, sealed) = bytes.split_at_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let mut sealed = sealed.to_vec();
        let opened = self.encryption_key()?.open_in_place(nonce, Aad::from(&self.id), &mut sealed).ok()?;
        let document: SettingsDocument = serde_json::from_slice(opened).ok()?;
        Some(JoinSettings {
            database_url: Secret::new(document.database_url),
            auth_secret_seed: Secret::new(document.auth_secret_seed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_host_with_the_token_reads_the_settings() {
        let seed = Secret::new("the seed of the cluster");
        let token = InvitationToken::new("http://10.0.0.1:13000", "an id", &seed);
        let host = InvitationToken::parse(&token.to_text()).unwrap();
        assert_eq!(host, token);
        assert!(token.verify(&host.proof()));
        let settings = JoinSettings { database_url: Secret::new("mysql://u:p@h/d"), auth_secret_seed: seed };
        let sealed = token.seal(&settings).unwrap();
        assert_eq!(host.open(&sealed), Some(settings));

        let other = InvitationToken::new("http://10.0.0.1:13000", "an id", &Secret::new("another seed"));
        assert!(!token.verify(&other.proof()));
        assert_eq!(other.open(&sealed), None);
        assert!(InvitationToken::parse("mjt_x").is_err() && InvitationToken::parse("").is_err());
    }
}
