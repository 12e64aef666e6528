//! Mapping rules: which identity tokens of an issuer can be exchanged for which keys of a namespace.
//! See docs/decisions/0024 and 0025.
//!
//! ```text
//! created ──delete, also of its namespace──▶ deleted ──cleaner──▶ (row removed)
//! ```

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::RuleId;
use crate::object::string_enum;
use crate::{Error, Result, key};

/// The maximum lifetime of a key created by a rule, in seconds.
pub const MAX_KEY_TTL_SECONDS: i64 = 86_400;

const MAX_CLAIMS: usize = 32;
const MAX_CLAIM_NAME_LENGTH: usize = 128;
const MAX_VALUES: usize = 64;
const MAX_VALUE_LENGTH: usize = 512;
const MAX_SCOPES: usize = 64;
const MAX_SCOPE_LENGTH: usize = 128;
const MAX_PREFIX_LENGTH: usize = 64;

string_enum! {
    /// The lifecycle of a rule.
    RuleState { Created = "created", Deleted = "deleted" }
}

impl RuleState {
    /// Returns whether a rule may change from this state to `next`.
    #[must_use]
    pub fn can_transition_to(self, next: Self) -> bool {
        match (self, next) {
            (Self::Created, Self::Deleted) => true,
            (Self::Created, Self::Created) | (Self::Deleted, Self::Created | Self::Deleted) => false,
        }
    }
}

/// The accepted values of a token's claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
#[schema(as = Matcher)]
pub enum ClaimMatcher {
    /// Exactly this value.
    Exact(String),
    /// Any of these values.
    AnyOf(Vec<String>),
}

/// The required claims of a token, by claim name.
pub type BoundClaims = BTreeMap<String, ClaimMatcher>;

/// The tokens that a rule accepts and the keys that it grants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleTerms {
    /// The name of the issuer whose tokens are accepted.
    pub issuer: String,
    pub bound_claims: BoundClaims,
    /// The scopes of the keys.
    pub scopes: Vec<String>,
    /// The lifetime of the keys in seconds.
    pub key_ttl: i64,
    /// The prefix of the names of the keys.
    pub key_name_prefix: String,
}

/// A rule as the API returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RuleRecord {
    /// UUID of the rule.
    pub uuid: RuleId,
    /// The state of the rule.
    pub state: RuleState,
    /// The version of the record format; released clients expect it.
    pub version: i64,
    /// User-defined metadata: any JSON values by key.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    /// The namespace whose keys the rule creates.
    pub namespace: String,
    /// The name of the rule, unique in its namespace.
    pub name: String,
    /// The name of the issuer whose tokens are accepted. The issuer may have been deleted.
    pub issuer: String,
    /// The required claims of a token, by claim name: a string, or a list of accepted strings.
    pub bound_claims: BTreeMap<String, ClaimMatcher>,
    /// The scopes of the keys.
    pub scopes: Vec<String>,
    /// The lifetime of the keys in seconds.
    pub key_ttl: i64,
    /// The prefix of the names of the keys.
    pub key_name_prefix: String,
}

fn invalid<T>(text: impl Into<String>) -> Result<T> {
    Err(Error::Invalid(text.into()))
}

/// Returns whether a text has between 1 and `max` characters.
fn has_valid_length(text: &str, max: usize) -> bool {
    !text.is_empty() && text.chars().count() <= max
}

/// Checks the name of an issuer. The issuer need not exist.
pub fn check_issuer(value: &Value) -> Result<String> {
    match value {
        Value::String(name) if !name.is_empty() => Ok(name.clone()),
        _ => invalid("issuer must be a non-empty string"),
    }
}

/// Checks the required claims. A rule must require at least one.
pub fn check_bound_claims(value: &Value) -> Result<BoundClaims> {
    let Value::Object(claims) = value else { return invalid("bound_claims must be an object") };
    if claims.is_empty() {
        return invalid(
            "a rule must bind at least one claim, otherwise it accepts every identity the issuer will ever vouch for",
        );
    }
    if claims.len() > MAX_CLAIMS {
        return invalid(format!("a rule may bind at most {MAX_CLAIMS} claims"));
    }
    claims.iter().map(|(claim, value)| Ok((claim.clone(), check_matcher(claim, value)?))).collect()
}

fn check_matcher(claim: &str, value: &Value) -> Result<ClaimMatcher> {
    if !has_valid_length(claim, MAX_CLAIM_NAME_LENGTH) {
        return invalid(format!("the name of a claim must have 1 to {MAX_CLAIM_NAME_LENGTH} characters"));
    }
    let reject = |why: String| invalid(format!("the matcher for claim \"{claim}\" {why}"));
    let values = match value {
        Value::String(_) => std::slice::from_ref(value),
        Value::Array(values) => values,
        Value::Null => return reject("must be a string or a list of strings, not a null".into()),
        Value::Bool(_) => return reject("must be a string or a list of strings, not a boolean".into()),
        Value::Number(_) => return reject("must be a string or a list of strings, not a number".into()),
        Value::Object(_) => return reject("must be a string or a list of strings, not a object".into()),
    };
    if values.is_empty() {
        return reject("must contain at least one string".into());
    }
    if values.len() > MAX_VALUES {
        return reject(format!("may contain at most {MAX_VALUES} strings"));
    }
    let mut texts = Vec::with_capacity(values.len());
    for value in values {
        match value {
            Value::String(text) if text.is_empty() => {
                return reject("must contain only non-empty strings".into());
            }
            Value::String(text) if !has_valid_length(text, MAX_VALUE_LENGTH) => {
                return reject(format!("may contain only strings of at most {MAX_VALUE_LENGTH} characters"));
            }
            Value::String(text) => texts.push(text.clone()),
            _ => return reject("must contain only non-empty strings".into()),
        }
    }
    // A list with one element stays a list, so that the API returns it as it was sent.
    Ok(match value {
        Value::String(text) => ClaimMatcher::Exact(text.clone()),
        _ => ClaimMatcher::AnyOf(texts),
    })
}

/// Checks the scopes of the keys. Unknown scopes are accepted.
pub fn check_scopes(value: &Value) -> Result<Vec<String>> {
    let Value::Array(values) = value else { return invalid("scopes must be a list of strings") };
    if values.is_empty() {
        return invalid("a rule must grant at least one scope; a key without scopes permits nothing");
    }
    if values.len() > MAX_SCOPES {
        return invalid(format!("a rule may grant at most {MAX_SCOPES} scopes"));
    }
    let mut scopes = Vec::with_capacity(values.len());
    for value in values {
        match value {
            Value::String(scope) if has_valid_length(scope, MAX_SCOPE_LENGTH) => scopes.push(scope.clone()),
            Value::String(scope) if !scope.is_empty() => {
                return invalid(format!("scopes may have at most {MAX_SCOPE_LENGTH} characters"));
            }
            _ => return invalid("scopes must be non-empty strings"),
        }
    }
    Ok(scopes)
}

/// Checks the lifetime of the keys in seconds.
pub fn check_key_ttl(value: &Value) -> Result<i64> {
    let whole = value.as_i64().or_else(|| value.as_u64().map(|_| i64::MAX));
    match whole {
        None => invalid("key_ttl must be an integer number of seconds"),
        Some(seconds) if seconds < 1 => {
            invalid("key_ttl must be positive; keys created by a rule must expire")
        }
        Some(seconds) if seconds > MAX_KEY_TTL_SECONDS => invalid(format!(
            "key_ttl may not exceed {MAX_KEY_TTL_SECONDS} seconds; exchange another token to get a new key"
        )),
        Some(seconds) => Ok(seconds),
    }
}

/// Checks the prefix of the names of the keys.
pub fn check_key_name_prefix(value: &Value) -> Result<String> {
    let Value::String(prefix) = value else { return invalid("key_name_prefix must be a non-empty string") };
    if prefix.is_empty() {
        return invalid("key_name_prefix must be a non-empty string");
    }
    if !has_valid_length(prefix, MAX_PREFIX_LENGTH) {
        return invalid(format!("key_name_prefix may have at most {MAX_PREFIX_LENGTH} characters"));
    }
    if prefix.chars().any(char::is_control) {
        return invalid("key_name_prefix must not contain control characters");
    }
    if key::is_reserved_name(prefix) {
        return invalid(format!("\"{prefix}\" is reserved for keys the cluster mints for itself"));
    }
    Ok(prefix.clone())
}
