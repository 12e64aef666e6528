//! The user data of instances, which cloud-init reads.

use base64::Engine as _;
use muster_types::{Error, Result};

/// The maximum size of the user data.
const MAX_USER_DATA_BYTES: usize = 1 << 20;

/// Checks the user data of a request.
pub(super) fn check(user_data: Option<String>) -> Result<Option<String>> {
    let user_data = user_data.filter(|text| !text.is_empty());
    if let Some(text) = &user_data {
        if text.len() > MAX_USER_DATA_BYTES {
            return Err(Error::Invalid(format!("user_data: must be at most {MAX_USER_DATA_BYTES} bytes")));
        }
        decode(text).ok_or_else(|| Error::Invalid("user_data: Not valid base64.".into()))?;
    }
    Ok(user_data)
}

/// Decodes the user data, which some tools wrap into lines.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let text: String = text.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    base64::engine::general_purpose::STANDARD.decode(text).ok()
}
