//! Key secrets: the format of generated secrets, and checks of names and supplied secrets.
//!
//! A generated secret is `sfk_`, 32 random characters and 6 checksum characters. The checksum is the
//! CRC-32 of the first 36 characters in base 62, so that secret scanners can verify a match.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::object::string_enum;
use crate::{Error, Result};

/// The prefix of generated secrets, which supplied secrets must not have.
pub const SECRET_PREFIX: &str = "sfk_";
/// The name prefix of keys that the cluster creates for itself.
pub const RESERVED_NAME_PREFIX: &str = "_service_key";
/// The maximum length of a supplied secret, in characters.
pub const MAX_SECRET_LENGTH: usize = 72;
/// The maximum length of any secret, such as one from the configuration, in bytes.
pub const MAX_SECRET_BYTES: usize = 1024;

const ALPHABET: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
const RANDOM_LENGTH: usize = 32;
const CHECKSUM_LENGTH: usize = 6;

string_enum! {
    /// The lifecycle of a namespace key.
    KeyState { Created = "created", Deleted = "deleted" }
}

/// A namespace key, without its secret.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct KeyRecord {
    /// The name of the key.
    pub key_name: String,
    /// Unix time at which the key expires; `null` if it does not.
    pub expiry: Option<f64>,
    /// The scopes that the key is limited to; `null` if it is unrestricted.
    pub scopes: Option<Vec<String>>,
    /// User-defined metadata: any JSON values by key.
    #[serde(default)]
    #[schema(value_type = Object, required)]
    pub metadata: Map<String, Value>,
}

/// A plaintext secret. Its `Debug` output is masked.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Generates a random secret.
    #[must_use]
    pub fn generate() -> Self {
        let mut text = format!("{SECRET_PREFIX}{}", random_alphanumeric(RANDOM_LENGTH));
        text.push_str(&checksum(&text));
        Self(text)
    }

    /// Returns the plaintext, for hashing and for the one response that contains it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Returns whether it has the prefix of generated secrets.
    #[must_use]
    pub fn has_prefix(&self) -> bool {
        self.0.starts_with(SECRET_PREFIX)
    }

    /// Returns whether it is a well-formed generated secret.
    #[must_use]
    pub fn is_generated(&self) -> bool {
        let text = self.0.as_bytes();
        let body = SECRET_PREFIX.len() + RANDOM_LENGTH;
        text.len() == body + CHECKSUM_LENGTH
            && self.has_prefix()
            && text[SECRET_PREFIX.len()..].iter().all(u8::is_ascii_alphanumeric)
            && checksum(&self.0[..body]).as_bytes() == &text[body..]
    }

    /// Returns whether a key can have this secret: it is not too long, and well-formed if it has the prefix of generated
    /// secrets.
    #[must_use]
    pub fn may_exist(&self) -> bool {
        self.0.len() <= MAX_SECRET_BYTES && (!self.has_prefix() || self.is_generated())
    }

    /// Checks a secret that a caller supplied.
    pub fn check_supplied(&self) -> Result<()> {
        if self.0.chars().count() > MAX_SECRET_LENGTH {
            return Err(Error::TooLong(format!("keys cannot be longer than {MAX_SECRET_LENGTH} characters")));
        }
        if self.has_prefix() {
            return Err(Error::Invalid(format!(
                "the {SECRET_PREFIX} prefix is reserved for cluster generated keys; omit the key entirely to have one \
                 generated for you"
            )));
        }
        Ok(())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Returns a string of random ASCII letters and digits.
#[must_use]
pub fn random_alphanumeric(length: usize) -> String {
    let mut text = String::with_capacity(length);
    let mut bytes = [0u8; 64];
    while text.len() < length {
        aws_lc_rs::rand::fill(&mut bytes).expect("the operating system provides random numbers");
        // 248 is the largest multiple of 62 in a byte: rejecting larger bytes avoids modulo bias.
        let usable = bytes.iter().filter(|b| **b < 248).take(length - text.len());
        text.extend(usable.map(|b| char::from(ALPHABET[usize::from(b % 62)])));
    }
    text
}

fn checksum(text: &str) -> String {
    let mut remaining = crc32fast::hash(text.as_bytes());
    let mut digits = [b'A'; CHECKSUM_LENGTH];
    for digit in digits.iter_mut().rev() {
        let index = usize::try_from(remaining % 62).expect("below 62");
        *digit = ALPHABET[index];
        remaining /= 62;
    }
    digits.iter().map(|d| char::from(*d)).collect()
}

/// Returns whether a name is reserved for keys that the cluster creates for itself.
#[must_use]
pub fn is_reserved_name(name: &str) -> bool {
    name == "service_key" || name.starts_with(RESERVED_NAME_PREFIX)
}

/// Checks the name of a new key. See docs/decisions/0008.
pub fn check_name(name: &str) -> Result<()> {
    if name.is_empty() {
        return Err(Error::Invalid("no key name specified".into()));
    }
    if is_reserved_name(name) {
        return Err(Error::Forbidden("illegal key name".into()));
    }
    if name.chars().count() > 255 {
        return Err(Error::Invalid("key_name: must be at most 255 characters".into()));
    }
    if name.chars().any(char::is_control) {
        return Err(Error::Invalid("key_name: must not contain control characters".into()));
    }
    crate::object::check_path_segment("key_name", name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn checksums_match_the_published_vectors() {
        assert_eq!(checksum(&format!("sfk_{}", "A".repeat(32))), "CAy6X0");
        assert_eq!(checksum("sfk_abcdefghijklmnopqrstuvwxyz012345"), "C8kiwE");
    }

    #[test]
    fn generates_distinct_well_formed_secrets() {
        let (a, b) = (Secret::generate(), Secret::generate());
        assert!(a.is_generated() && b.is_generated());
        assert_eq!(a.expose().len(), 42);
        assert_ne!(a, b);
    }

    #[test]
    fn rejects_generated_secret_with_any_character_changed() {
        let text = Secret::generate().expose().to_owned();
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = if bytes[at] == b'x' { b'y' } else { b'x' };
            assert!(!Secret::new(String::from_utf8(bytes).unwrap()).is_generated(), "position {at}");
        }
    }

    #[test]
    fn rejects_supplied_secret_with_reserved_prefix_or_excessive_length() {
        assert!(matches!(Secret::new("sfk_mine").check_supplied(), Err(Error::Invalid(_))));
        assert!(matches!(Secret::new("x".repeat(73)).check_supplied(), Err(Error::TooLong(_))));
        assert!(Secret::new("é".repeat(72)).check_supplied().is_ok());
    }

    #[test]
    fn debug_output_masks_secret() {
        assert_eq!(format!("{:?}", Secret::new("hunter2")), "Secret(…)");
    }

    proptest! {
        #[test]
        fn checking_arbitrary_text_does_not_panic(text in "\\PC{0,60}") {
            let _ = Secret::new(format!("sfk_{text}")).is_generated();
            let _ = Secret::new(text).is_generated();
        }
    }
}
