//! The keys of backups, as texts that people copy. See docs/decisions/0097.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::digest;
use serde::{Deserialize, Serialize};

use crate::key::Secret;

/// The length of a key in bytes.
pub const KEY_BYTES: usize = 32;
/// The length of the checksum that follows a key, in bytes. A backup for a mistyped recipient could never be decrypted.
const CHECKSUM_BYTES: usize = 4;

const RECIPIENT_PREFIX: &str = "backup-recipient-";
const PRIVATE_KEY_PREFIX: &str = "backup-key-";

/// Where the contents of the blobs of a backup are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BlobMode {
    /// In the storage of the hosts only.
    Reference,
    /// In the backup.
    Include,
}

/// The public key that backups are encrypted for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BackupRecipient(pub [u8; KEY_BYTES]);

impl fmt::Display for BackupRecipient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&encode(RECIPIENT_PREFIX, &self.0))
    }
}

impl fmt::Debug for BackupRecipient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for BackupRecipient {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with(PRIVATE_KEY_PREFIX) {
            return Err("this is the private key: the recipient begins with backup-recipient-".to_owned());
        }
        decode(RECIPIENT_PREFIX, text).map(Self)
    }
}

/// The private key that decrypts backups.
#[derive(Clone, PartialEq, Eq)]
pub struct BackupPrivateKey(pub [u8; KEY_BYTES]);

impl BackupPrivateKey {
    /// Returns the text of the key.
    #[must_use]
    pub fn to_secret(&self) -> Secret {
        Secret::new(encode(PRIVATE_KEY_PREFIX, &self.0))
    }
}

impl fmt::Debug for BackupPrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BackupPrivateKey(…)")
    }
}

impl FromStr for BackupPrivateKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with(RECIPIENT_PREFIX) {
            return Err("this is a recipient: the private key begins with backup-key-".to_owned());
        }
        decode(PRIVATE_KEY_PREFIX, text).map(Self)
    }
}

fn checksum(prefix: &str, key: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let hash = digest::digest(&digest::SHA256, &[prefix.as_bytes(), key].concat());
    std::array::from_fn(|at| hash.as_ref()[at])
}

fn encode(prefix: &str, key: &[u8; KEY_BYTES]) -> String {
    let hex: String = key.iter().chain(&checksum(prefix, key)).map(|byte| format!("{byte:02x}")).collect();
    format!("{prefix}{hex}")
}

fn decode(prefix: &str, text: &str) -> Result<[u8; KEY_BYTES], String> {
    let invalid =
        || format!("it is not {prefix} and {} hexadecimal digits", 2 * (KEY_BYTES + CHECKSUM_BYTES));
    let digits = text.strip_prefix(prefix).ok_or_else(invalid)?.as_bytes();
    if digits.len() != 2 * (KEY_BYTES + CHECKSUM_BYTES) || !digits.iter().all(u8::is_ascii_hexdigit) {
        return Err(invalid());
    }
    let byte = |at: usize| {
        let digits = std::str::from_utf8(&digits[2 * at..2 * at + 2]).unwrap_or_default();
        u8::from_str_radix(digits, 16).unwrap_or_default()
    };
    let key: [u8; KEY_BYTES] = std::array::from_fn(byte);
    let found: [u8; CHECKSUM_BYTES] = std::array::from_fn(|at| byte(KEY_BYTES + at));
    if found == checksum(prefix, &key) {
        Ok(key)
    } else {
        Err("its checksum is wrong: a digit differs".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_survive_being_copied_and_mistakes_are_noticed() {
        let recipient = BackupRecipient([7; KEY_BYTES]);
        let text = recipient.to_string();
        assert_eq!(text.parse(), Ok(recipient));
        for at in RECIPIENT_PREFIX.len()..text.len() {
            let mut wrong = text.clone().into_bytes();
            wrong[at] = if wrong[at] == b'0' { b'1' } else { b'0' };
            let wrong = String::from_utf8(wrong).unwrap();
            assert!(wrong.parse::<BackupRecipient>().unwrap_err().contains("checksum"), "{wrong}");
        }
        let private = BackupPrivateKey([9; KEY_BYTES]);
        let secret = private.to_secret();
        assert_eq!(secret.expose().parse(), Ok(private.clone()));
        assert_eq!(format!("{private:?}"), "BackupPrivateKey(…)");
        assert!(secret.expose().parse::<BackupRecipient>().unwrap_err().contains("private key"));
        assert!(text.parse::<BackupPrivateKey>().unwrap_err().contains("recipient"));
        for wrong in ["", "backup-recipient-", "backup-recipient-00", &text[1..], &format!("{text}0")] {
            assert!(wrong.parse::<BackupRecipient>().is_err(), "{wrong}");
        }
    }
}
