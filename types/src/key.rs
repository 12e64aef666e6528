//! Key secrets: the layout of generated ones and the rules for names and supplied secrets.
//!
//! A generated secret is `sfk_`, 32 random characters and 6 checksum characters. The checksum is the
//! CRC-32 of the first 36 characters in base 62, so that scanners can tell a real one from a lookalike.

use std::fmt;

use crate::{Error, Result};

/// Every generated secret starts with this, and no supplied one may.
pub const SECRET_PREFIX: &str = "sfk_";
/// Name prefix of keys that the cluster makes for itself.
pub const RESERVED_NAME_PREFIX: &str = "_service_key";
/// Longest secret that a caller may choose, in characters.
pub const MAX_SECRET_LENGTH: usize = 72;

const ALPHABET: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
const RANDOM: usize = 32;
const CHECKSUM: usize = 6;

/// A secret in the clear. Its `Debug` and `Display` show nothing.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// A fresh generated secret.
    #[must_use]
    pub fn generate() -> Self {
        let mut text = format!("{SECRET_PREFIX}{}", random_alphanumeric(RANDOM));
        text.push_str(&checksum(&text));
        Self(text)
    }

    /// The secret itself: for hashing, and for the one answer that shows it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether it claims to be generated.
    #[must_use]
    pub fn has_prefix(&self) -> bool {
        self.0.starts_with(SECRET_PREFIX)
    }

    /// Whether it is a well-formed generated secret.
    #[must_use]
    pub fn is_generated(&self) -> bool {
        let text = self.0.as_bytes();
        let body = SECRET_PREFIX.len() + RANDOM;
        text.len() == body + CHECKSUM
            && self.has_prefix()
            && text[SECRET_PREFIX.len()..].iter().all(u8::is_ascii_alphanumeric)
            && checksum(&self.0[..body]).as_bytes() == &text[body..]
    }

    /// Refuses a secret that a caller may not choose.
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

/// `length` random characters of the 62 that secrets and nonces are made of.
#[must_use]
pub fn random_alphanumeric(length: usize) -> String {
    let mut text = String::with_capacity(length);
    let mut bytes = [0u8; 64];
    while text.len() < length {
        aws_lc_rs::rand::fill(&mut bytes).expect("the operating system's random numbers");
        // 248 is the largest multiple of 62 in a byte: taking only what is below it keeps every character as likely.
        let usable = bytes.iter().filter(|b| **b < 248).take(length - text.len());
        text.extend(usable.map(|b| char::from(ALPHABET[usize::from(b % 62)])));
    }
    text
}

fn checksum(text: &str) -> String {
    let mut rest = crc32fast::hash(text.as_bytes());
    let mut digits = [b'A'; CHECKSUM];
    for digit in digits.iter_mut().rev() {
        *digit = ALPHABET[(rest % 62) as usize];
        rest /= 62;
    }
    digits.iter().map(|d| char::from(*d)).collect()
}

/// Whether a name is kept for keys that the cluster makes for itself.
#[must_use]
pub fn is_reserved_name(name: &str) -> bool {
    name == "service_key" || name.starts_with(RESERVED_NAME_PREFIX)
}

/// Refuses a key name that is missing, reserved, or cannot be stored.
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
    fn a_generated_secret_is_recognised_and_differs_each_time() {
        let (a, b) = (Secret::generate(), Secret::generate());
        assert!(a.is_generated() && b.is_generated());
        assert_eq!(a.expose().len(), 42);
        assert_ne!(a, b);
    }

    #[test]
    fn a_damaged_generated_secret_is_not_recognised() {
        let text = Secret::generate().expose().to_owned();
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = if bytes[at] == b'x' { b'y' } else { b'x' };
            assert!(!Secret::new(String::from_utf8(bytes).unwrap()).is_generated(), "position {at}");
        }
    }

    #[test]
    fn a_supplied_secret_may_not_look_generated_or_be_longer_than_we_hash() {
        assert!(matches!(Secret::new("sfk_mine").check_supplied(), Err(Error::Invalid(_))));
        assert!(matches!(Secret::new("x".repeat(73)).check_supplied(), Err(Error::TooLong(_))));
        assert!(Secret::new("é".repeat(72)).check_supplied().is_ok());
    }

    #[test]
    fn debug_output_never_shows_a_secret() {
        assert_eq!(format!("{:?}", Secret::new("hunter2")), "Secret(…)");
    }

    proptest! {
        #[test]
        fn any_text_can_be_tested_without_panicking(text in "\\PC{0,60}") {
            let _ = Secret::new(format!("sfk_{text}")).is_generated();
            let _ = Secret::new(text).is_generated();
        }
    }
}
