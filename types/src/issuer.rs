//! Trusted issuers, whose identity tokens can be exchanged for keys. See docs/decisions/0024 and 0025.
//!
//! ```text
//! created ──delete──▶ deleted ──cleaner──▶ (row removed)
//! ```

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::IssuerId;
use crate::object::{check_path_segment, string_enum};
use crate::{Error, Result};

/// The maximum length of the name of an issuer or a rule, in characters.
const MAX_NAME_LENGTH: usize = 255;
/// The maximum length of a URL or audience, in characters.
const MAX_FIELD_LENGTH: usize = 1024;

/// The message of the status event after keys were fetched, the first time or after a failure.
pub const KEYS_FETCHED: &str = "fetched the issuer's keys";
/// The message of the status event after a failed fetch, whose `extra` has the `reason`.
pub const KEY_FETCH_FAILED: &str = "failed to fetch the issuer's keys";

string_enum! {
    /// The lifecycle of an issuer.
    IssuerState { Created = "created", Deleted = "deleted" }
}

impl IssuerState {
    /// Returns whether an issuer may change from this state to `next`.
    #[must_use]
    pub fn can_transition_to(self, next: Self) -> bool {
        match (self, next) {
            (Self::Created, Self::Deleted) => true,
            (Self::Created, Self::Created) | (Self::Deleted, Self::Created | Self::Deleted) => false,
        }
    }
}

/// How tokens of an issuer are verified.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IssuerTerms {
    /// The exact `iss` claim of the issuer's tokens.
    pub issuer_url: String,
    /// The URL of the key set that verifies the tokens.
    pub jwks_uri: String,
    /// The required `aud` claim.
    pub audience: String,
}

/// An issuer as the API returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct IssuerRecord {
    /// UUID of the issuer.
    pub uuid: IssuerId,
    /// The state of the issuer.
    pub state: IssuerState,
    /// The version of the record format; released clients expect it.
    pub version: i64,
    /// User-defined metadata: any JSON values by key.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    /// The name by which mapping rules refer to the issuer.
    pub name: String,
    /// The exact `iss` claim of the issuer's tokens.
    pub issuer_url: String,
    /// The URL of the key set that verifies the tokens.
    pub jwks_uri: String,
    /// The required `aud` claim.
    pub audience: String,
}

/// Checks the name of a new issuer or rule.
pub fn check_name(name: Option<&Value>) -> Result<&str> {
    let name = match name {
        None => return Err(Error::Invalid("no name specified".into())),
        Some(Value::String(name)) if name.is_empty() => {
            return Err(Error::Invalid("no name specified".into()));
        }
        Some(Value::String(name)) => name,
        Some(_) => return Err(Error::Invalid("name is not a valid string".into())),
    };
    if name.chars().count() > MAX_NAME_LENGTH || name.chars().any(char::is_control) {
        return Err(Error::Invalid("name is not a valid string".into()));
    }
    check_path_segment("name", name)?;
    Ok(name)
}

/// Checks a text field of an issuer.
pub fn check_field(field: &str, value: Option<&Value>) -> Result<String> {
    let text = match value {
        None => return Err(Error::Invalid(format!("no {field} specified"))),
        Some(Value::String(text)) => text,
        Some(_) => return Err(Error::Invalid(format!("{field} is not a string"))),
    };
    if text.is_empty() {
        return Err(Error::Invalid(format!("no {field} specified")));
    }
    if text.chars().count() > MAX_FIELD_LENGTH {
        return Err(Error::TooLong(format!("{field} cannot be longer than {MAX_FIELD_LENGTH} characters")));
    }
    Ok(text.clone())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text<T: std::fmt::Debug>(outcome: Result<T>) -> String {
        outcome.unwrap_err().to_string()
    }

    #[test]
    fn rejects_names_that_cannot_be_stored_or_be_path_segments() {
        for (name, why) in [
            (json!(""), "no name specified"),
            (json!(7), "name is not a valid string"),
            (json!(["a"]), "name is not a valid string"),
            (json!("é".repeat(256)), "name is not a valid string"),
            (json!("a\nb"), "name is not a valid string"),
            (json!(".."), "name: must not be a dot segment"),
        ] {
            assert_eq!(text(check_name(Some(&name))), why, "{name}");
        }
        assert_eq!(text(check_name(None)), "no name specified");
        assert_eq!(check_name(Some(&json!("é".repeat(255)))).unwrap(), "é".repeat(255));
    }

    #[test]
    fn limits_fields_by_characters_not_bytes() {
        assert!(check_field("audience", Some(&json!("é".repeat(1024)))).is_ok());
        let long = check_field("audience", Some(&json!("é".repeat(1025))));
        assert!(matches!(&long, Err(Error::TooLong(_))));
        assert_eq!(text(long), "audience cannot be longer than 1024 characters");
        assert_eq!(text(check_field("audience", Some(&json!("")))), "no audience specified");
        assert_eq!(text(check_field("audience", Some(&json!(7)))), "audience is not a string");
    }

    #[test]
    fn deleted_is_a_terminal_state() {
        assert!(IssuerState::Created.can_transition_to(IssuerState::Deleted));
        assert!(!IssuerState::Deleted.can_transition_to(IssuerState::Created));
    }
}
