//! Mapping rules: which tokens of an issuer can be exchanged for which keys of a namespace.
//!
//! ```text
//! created ──delete, or with its namespace──▶ deleted ──cleaner──▶ (row gone)
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::RuleId;
use crate::object::string_enum;
use crate::{Error, Result, key};

/// Longest life of a key that is made by a rule, in seconds.
pub const MAX_KEY_TTL_SECONDS: i64 = 86_400;

const MOST_CLAIMS: usize = 32;
const LONGEST_CLAIM: usize = 128;
const MOST_VALUES: usize = 64;
const LONGEST_VALUE: usize = 512;
const MOST_SCOPES: usize = 64;
const LONGEST_SCOPE: usize = 128;
const LONGEST_PREFIX: usize = 64;

string_enum! {
    /// The life of a rule.
    RuleState { Created = "created", Deleted = "deleted" }
}

impl RuleState {
    /// Whether a rule may go from here to `next`.
    #[must_use]
    pub fn can_transition_to(self, next: Self) -> bool {
        match (self, next) {
            (Self::Created, Self::Deleted) => true,
            (Self::Created, Self::Created) | (Self::Deleted, Self::Created | Self::Deleted) => false,
        }
    }
}

/// What a claim of a token must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum ClaimMatcher {
    /// This.
    Exact(String),
    /// One of these.
    AnyOf(Vec<String>),
}

/// What a token must claim, by the claim's name.
pub type BoundClaims = BTreeMap<String, ClaimMatcher>;

/// What a rule accepts and what it gives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RuleTerms {
    /// Name of the issuer whose tokens are accepted.
    pub issuer: String,
    pub bound_claims: BoundClaims,
    /// What the keys may be used for.
    pub scopes: Vec<String>,
    /// Seconds that the keys live.
    pub key_ttl: i64,
    /// How the names of the keys begin.
    pub key_name_prefix: String,
}

/// A rule as the API answers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RuleRecord {
    pub uuid: RuleId,
    pub state: RuleState,
    pub version: i64,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    pub namespace: String,
    pub name: String,
    /// Name of the issuer whose tokens are accepted. It need not exist any more.
    pub issuer: String,
    /// What a token must claim, by the claim's name: a string, or one of a list of strings.
    pub bound_claims: BTreeMap<String, ClaimMatcher>,
    /// What the keys may be used for.
    pub scopes: Vec<String>,
    /// Seconds that the keys live.
    pub key_ttl: i64,
    /// How the names of the keys begin.
    pub key_name_prefix: String,
}

fn invalid<T>(text: impl Into<String>) -> Result<T> {
    Err(Error::Invalid(text.into()))
}

/// Whether a text has between 1 and so many characters.
fn fits(text: &str, longest: usize) -> bool {
    !text.is_empty() && text.chars().count() <= longest
}

/// The name of an issuer, which may or may not exist.
pub fn check_issuer(value: &Value) -> Result<String> {
    match value {
        Value::String(name) if !name.is_empty() => Ok(name.clone()),
        _ => invalid("issuer must be a non-empty string"),
    }
}

/// What a token must claim. A rule that asks for nothing is refused.
pub fn check_bound_claims(value: &Value) -> Result<BoundClaims> {
    let Value::Object(claims) = value else { return invalid("bound_claims must be an object") };
    if claims.is_empty() {
        return invalid(
            "a rule must bind at least one claim, otherwise it accepts every identity the issuer will ever vouch for",
        );
    }
    if claims.len() > MOST_CLAIMS {
        return invalid(format!("a rule may bind at most {MOST_CLAIMS} claims"));
    }
    claims.iter().map(|(claim, value)| Ok((claim.clone(), check_matcher(claim, value)?))).collect()
}

fn check_matcher(claim: &str, value: &Value) -> Result<ClaimMatcher> {
    if !fits(claim, LONGEST_CLAIM) {
        return invalid(format!("the name of a claim must have 1 to {LONGEST_CLAIM} characters"));
    }
    let refuse = |why: String| invalid(format!("the matcher for claim \"{claim}\" {why}"));
    let values = match value {
        Value::String(_) => std::slice::from_ref(value),
        Value::Array(values) => values,
        Value::Null => return refuse("must be a string or a list of strings, not a null".into()),
        Value::Bool(_) => return refuse("must be a string or a list of strings, not a boolean".into()),
        Value::Number(_) => return refuse("must be a string or a list of strings, not a number".into()),
        Value::Object(_) => return refuse("must be a string or a list of strings, not a object".into()),
    };
    if values.is_empty() {
        return refuse("must contain at least one string".into());
    }
    if values.len() > MOST_VALUES {
        return refuse(format!("may contain at most {MOST_VALUES} strings"));
    }
    let mut texts = Vec::with_capacity(values.len());
    for value in values {
        match value {
            Value::String(text) if text.is_empty() => {
                return refuse("must contain only non-empty strings".into());
            }
            Value::String(text) if !fits(text, LONGEST_VALUE) => {
                return refuse(format!("may contain only strings of at most {LONGEST_VALUE} characters"));
            }
            Value::String(text) => texts.push(text.clone()),
            _ => return refuse("must contain only non-empty strings".into()),
        }
    }
    // A list of one stays a list: it is answered as it was given.
    Ok(match value {
        Value::String(text) => ClaimMatcher::Exact(text.clone()),
        _ => ClaimMatcher::AnyOf(texts),
    })
}

/// What the keys may be used for. Scopes that mean nothing yet are taken.
pub fn check_scopes(value: &Value) -> Result<Vec<String>> {
    let Value::Array(values) = value else { return invalid("scopes must be a list of strings") };
    if values.is_empty() {
        return invalid(
            "a rule must grant at least one scope; a key without scopes could be used for nothing",
        );
    }
    if values.len() > MOST_SCOPES {
        return invalid(format!("a rule may grant at most {MOST_SCOPES} scopes"));
    }
    let mut scopes = Vec::with_capacity(values.len());
    for value in values {
        match value {
            Value::String(scope) if fits(scope, LONGEST_SCOPE) => scopes.push(scope.clone()),
            Value::String(scope) if !scope.is_empty() => {
                return invalid(format!("scopes may have at most {LONGEST_SCOPE} characters"));
            }
            _ => return invalid("scopes must be non-empty strings"),
        }
    }
    Ok(scopes)
}

/// Seconds that the keys live.
pub fn check_key_ttl(value: &Value) -> Result<i64> {
    let whole = value.as_i64().or_else(|| value.as_u64().map(|_| i64::MAX));
    match whole {
        None => invalid("key_ttl must be an integer number of seconds"),
        Some(seconds) if seconds < 1 => invalid("key_ttl must be positive; a key made by a rule has an end"),
        Some(seconds) if seconds > MAX_KEY_TTL_SECONDS => invalid(format!(
            "key_ttl may not exceed {MAX_KEY_TTL_SECONDS} seconds; whoever needs a key for longer exchanges another token"
        )),
        Some(seconds) => Ok(seconds),
    }
}

/// How the names of the keys begin.
pub fn check_key_name_prefix(value: &Value) -> Result<String> {
    let Value::String(prefix) = value else { return invalid("key_name_prefix must be a non-empty string") };
    if prefix.is_empty() {
        return invalid("key_name_prefix must be a non-empty string");
    }
    if !fits(prefix, LONGEST_PREFIX) {
        return invalid(format!("key_name_prefix may have at most {LONGEST_PREFIX} characters"));
    }
    if prefix.chars().any(char::is_control) {
        return invalid("key_name_prefix must not contain control characters");
    }
    if key::is_reserved_name(prefix) {
        return invalid(format!("\"{prefix}\" is reserved for keys the cluster mints for itself"));
    }
    Ok(prefix.clone())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text<T: std::fmt::Debug>(outcome: Result<T>) -> String {
        outcome.unwrap_err().to_string()
    }

    #[test]
    fn claims_are_bound_to_one_text_or_to_one_of_several() {
        let claims = json!({"sub": "repo:x", "ref": ["main", "next"], "one": ["alone"]});
        let bound = check_bound_claims(&claims).unwrap();
        assert_eq!(bound["sub"], ClaimMatcher::Exact("repo:x".into()));
        assert_eq!(bound["ref"], ClaimMatcher::AnyOf(vec!["main".into(), "next".into()]));
        assert_eq!(serde_json::to_value(&bound).unwrap(), claims, "answered as given");
    }

    #[test]
    fn a_matcher_that_could_match_too_much_or_nothing_is_refused() {
        let of = |value: Value| text(check_bound_claims(&json!({ "c": value })));
        let kind = |word: &str| {
            format!("the matcher for claim \"c\" must be a string or a list of strings, not a {word}")
        };
        assert_eq!(of(json!(7)), kind("number"));
        assert_eq!(of(json!(true)), kind("boolean"));
        assert_eq!(of(json!({})), kind("object"));
        assert_eq!(of(json!(null)), kind("null"));
        for value in [json!(""), json!([""]), json!(["a", 7]), json!([["a"]])] {
            assert_eq!(of(value), "the matcher for claim \"c\" must contain only non-empty strings");
        }
        assert_eq!(of(json!([])), "the matcher for claim \"c\" must contain at least one string");
        assert_eq!(of(json!(vec!["x"; 65])), "the matcher for claim \"c\" may contain at most 64 strings");
        assert_eq!(
            of(json!("é".repeat(513))),
            "the matcher for claim \"c\" may contain only strings of at most 512 characters"
        );
        assert!(check_bound_claims(&json!({ "c": vec!["é".repeat(512); 64] })).is_ok());
    }

    #[test]
    fn claims_are_counted_and_have_names() {
        let many = |count: usize| -> Value {
            Value::Object((0..count).map(|n| (format!("c{n}"), json!("x"))).collect())
        };
        assert!(check_bound_claims(&many(32)).is_ok());
        assert_eq!(text(check_bound_claims(&many(33))), "a rule may bind at most 32 claims");
        assert!(
            text(check_bound_claims(&many(0))).starts_with("a rule must bind at least one claim, otherwise")
        );
        assert_eq!(text(check_bound_claims(&json!(["c"]))), "bound_claims must be an object");
        let name = "the name of a claim must have 1 to 128 characters";
        assert_eq!(text(check_bound_claims(&json!({ "": "x" }))), name);
        assert_eq!(text(check_bound_claims(&json!({ "é".repeat(129): "x" }))), name);
    }

    #[test]
    fn scopes_are_a_list_of_words() {
        assert_eq!(check_scopes(&json!(["artifact.*", "of.the.future"])).unwrap().len(), 2);
        assert_eq!(text(check_scopes(&json!("artifact.*"))), "scopes must be a list of strings");
        assert!(text(check_scopes(&json!([]))).starts_with("a rule must grant at least one scope; "));
        assert_eq!(text(check_scopes(&json!([""]))), "scopes must be non-empty strings");
        assert_eq!(text(check_scopes(&json!(["a", 7]))), "scopes must be non-empty strings");
        assert_eq!(text(check_scopes(&json!(["é".repeat(129)]))), "scopes may have at most 128 characters");
        assert_eq!(text(check_scopes(&json!(vec!["a"; 65]))), "a rule may grant at most 64 scopes");
    }

    #[test]
    fn a_key_lives_a_whole_number_of_seconds_and_not_longer_than_a_day() {
        assert_eq!((check_key_ttl(&json!(1)).unwrap(), check_key_ttl(&json!(86_400)).unwrap()), (1, 86_400));
        for value in [json!(true), json!("60"), json!(1.5), json!(60.0), json!([60])] {
            assert_eq!(
                text(check_key_ttl(&value)),
                "key_ttl must be an integer number of seconds",
                "{value}"
            );
        }
        for value in [json!(0), json!(-1), json!(i64::MIN)] {
            assert!(text(check_key_ttl(&value)).starts_with("key_ttl must be positive; "), "{value}");
        }
        for value in [json!(86_401), json!(u64::MAX)] {
            let why = text(check_key_ttl(&value));
            assert!(why.starts_with("key_ttl may not exceed 86400 seconds; "), "{value}");
        }
    }

    #[test]
    fn names_of_keys_do_not_begin_like_those_of_the_cluster() {
        assert_eq!(check_key_name_prefix(&json!("ci")).unwrap(), "ci");
        assert!(check_key_name_prefix(&json!("é".repeat(64))).is_ok());
        for value in [json!(""), json!(7), json!(["ci"])] {
            assert_eq!(text(check_key_name_prefix(&value)), "key_name_prefix must be a non-empty string");
        }
        assert_eq!(
            text(check_key_name_prefix(&json!("x".repeat(65)))),
            "key_name_prefix may have at most 64 characters"
        );
        assert_eq!(
            text(check_key_name_prefix(&json!("a\tb"))),
            "key_name_prefix must not contain control characters"
        );
        for name in ["service_key", "_service_key", "_service_key_abc"] {
            assert_eq!(
                text(check_key_name_prefix(&json!(name))),
                format!("\"{name}\" is reserved for keys the cluster mints for itself")
            );
        }
    }

    #[test]
    fn a_deleted_rule_stays_deleted() {
        assert!(RuleState::Created.can_transition_to(RuleState::Deleted));
        assert!(!RuleState::Deleted.can_transition_to(RuleState::Created));
    }
}
