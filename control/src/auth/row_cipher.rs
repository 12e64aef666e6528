//! Encrypts texts that are kept in the database: responses that may contain new secrets, and secrets of webhooks. See
//! docs/decisions/0088 and 0089.

use std::fmt;

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;
use muster_types::key::Secret;
use muster_types::{Error, Result};

/// What a cipher is used for. Each purpose has its own key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CipherPurpose {
    Responses,
    WebhookSecrets,
}

impl CipherPurpose {
    /// Returns the text that the key is derived from. It never changes.
    fn label(self) -> &'static [u8] {
        match self {
            Self::Responses => b"muster idempotent responses 1",
            Self::WebhookSecrets => b"muster webhook secrets 1",
        }
    }
}

/// Encrypts and decrypts texts with a key that is derived from the seed of the cluster, which never reaches the database.
pub struct RowCipher {
    key: RandomizedNonceKey,
}

impl fmt::Debug for RowCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RowCipher")
    }
}

impl RowCipher {
    #[must_use]
    pub fn new(seed: &Secret, purpose: CipherPurpose) -> Self {
        let master = hmac::Key::new(hmac::HMAC_SHA256, seed.expose().as_bytes());
        let derived = hmac::sign(&master, purpose.label());
        let key = RandomizedNonceKey::new(&AES_256_GCM, derived.as_ref());
        Self { key: key.expect("an HMAC-SHA256 is as long as a key of AES-256") }
    }

    /// Encrypts a text. It can be decrypted only for the same row.
    pub fn seal(&self, row: &str, text: &str) -> Result<String> {
        let mut sealed = text.as_bytes().to_vec();
        let nonce = self.key.seal_in_place_append_tag(Aad::from(row), &mut sealed);
        let nonce = nonce.map_err(|_| Error::Internal("failed to encrypt a text".into()))?;
        Ok(BASE64.encode([&nonce.as_ref()[..], &sealed].concat()))
    }

    /// Decrypts a text. Returns `None` if it was changed, or belongs to another row or cluster.
    #[must_use]
    pub fn open(&self, row: &str, sealed: &str) -> Option<String> {
        let bytes = BASE64.decode(sealed).ok()?;
        let (nonce, sealed) = bytes.split_at_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let mut sealed = sealed.to_vec();
        let opened = self.key.open_in_place(nonce, Aad::from(row), &mut sealed).ok()?;
        String::from_utf8(opened.to_vec()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_only_own_rows_of_the_cluster() {
        let cipher = RowCipher::new(&Secret::new("seed"), CipherPurpose::Responses);
        let sealed = cipher.seal("row", "sfk_secret").unwrap();
        assert!(!sealed.contains("sfk_"));
        assert_ne!(sealed, cipher.seal("row", "sfk_secret").unwrap(), "a new nonce");
        assert_eq!(cipher.open("row", &sealed).as_deref(), Some("sfk_secret"));
        assert_eq!(cipher.open("other", &sealed), None);
        for (seed, purpose) in [("other", CipherPurpose::Responses), ("seed", CipherPurpose::WebhookSecrets)]
        {
            assert_eq!(RowCipher::new(&Secret::new(seed), purpose).open("row", &sealed), None);
        }
        for damaged in ["", "x", "AAAA", &sealed[..sealed.len() - 4]] {
            assert_eq!(cipher.open("row", damaged), None, "{damaged}");
        }
    }
}
