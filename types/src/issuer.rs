//! Trusted issuers: whose tokens can be exchanged for keys, anywhere in the cluster.
//!
//! ```text
//! created ──delete──▶ deleted ──cleaner──▶ (row gone)
//! ```

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::IssuerId;
use crate::object::{check_path_segment, string_enum};
use crate::{Error, Result};

/// Longest name of an issuer or a rule, in characters.
const LONGEST_NAME: usize = 255;
/// Longest URL or audience, in characters.
const LONGEST_FIELD: usize = 1024;

string_enum! {
    /// The life of an issuer.
    IssuerState { Created = "created", Deleted = "deleted" }
}

impl IssuerState {
    /// Whether an issuer may go from here to `next`.
    #[must_use]
    pub fn can_transition_to(self, next: Self) -> bool {
        match (self, next) {
            (Self::Created, Self::Deleted) => true,
            (Self::Created, Self::Created) | (Self::Deleted, Self::Created | Self::Deleted) => false,
        }
    }
}

/// How tokens of an issuer are recognised.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct IssuerTerms {
    /// What a token must name as its issuer, to the letter.
    pub issuer_url: String,
    /// Where the keys are that sign its tokens.
    pub jwks_uri: String,
    /// Whom a token must be made for.
    pub audience: String,
}

/// An issuer as the API answers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct IssuerRecord {
    pub uuid: IssuerId,
    pub state: IssuerState,
    pub version: i64,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    pub name: String,
    /// What a token must name as its issuer, to the letter.
    pub issuer_url: String,
    /// Where the keys are that sign its tokens.
    pub jwks_uri: String,
    /// Whom a token must be made for.
    pub audience: String,
}

/// The name of a new issuer or rule, if it can be one.
pub fn check_name(name: Option<&Value>) -> Result<&str> {
    let name = match name {
        None => return Err(Error::Invalid("no name specified".into())),
        Some(Value::String(name)) if name.is_empty() => {
            return Err(Error::Invalid("no name specified".into()));
        }
        Some(Value::String(name)) => name,
        Some(_) => return Err(Error::Invalid("name is not a valid string".into())),
    };
    if name.chars().count() > LONGEST_NAME || name.chars().any(char::is_control) {
        return Err(Error::Invalid("name is not a valid string".into()));
    }
    check_path_segment("name", name)?;
    Ok(name)
}

/// A field of an issuer, if it can be stored.
pub fn check_field(field: &str, value: Option<&Value>) -> Result<String> {
    let text = match value {
        None => return Err(Error::Invalid(format!("no {field} specified"))),
        Some(Value::String(text)) => text,
        Some(_) => return Err(Error::Invalid(format!("{field} is not a string"))),
    };
    if text.is_empty() {
        return Err(Error::Invalid(format!("no {field} specified")));
    }
    if text.chars().count() > LONGEST_FIELD {
        return Err(Error::TooLong(format!("{field} cannot be longer than {LONGEST_FIELD} characters")));
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
    fn a_name_can_be_stored_and_be_part_of_a_path() {
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
    fn a_field_is_counted_in_characters() {
        assert!(check_field("audience", Some(&json!("é".repeat(1024)))).is_ok());
        let long = check_field("audience", Some(&json!("é".repeat(1025))));
        assert!(matches!(&long, Err(Error::TooLong(_))));
        assert_eq!(text(long), "audience cannot be longer than 1024 characters");
        assert_eq!(text(check_field("audience", Some(&json!("")))), "no audience specified");
        assert_eq!(text(check_field("audience", Some(&json!(7)))), "audience is not a string");
    }

    #[test]
    fn a_deleted_issuer_stays_deleted() {
        assert!(IssuerState::Created.can_transition_to(IssuerState::Deleted));
        assert!(!IssuerState::Deleted.can_transition_to(IssuerState::Created));
    }
}
