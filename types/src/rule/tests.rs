use serde_json::json;

use super::*;

fn text<T: std::fmt::Debug>(outcome: Result<T>) -> String {
    outcome.unwrap_err().to_string()
}

#[test]
fn accepts_strings_and_lists_as_matchers() {
    let claims = json!({"sub": "repo:x", "ref": ["main", "next"], "one": ["alone"]});
    let bound = check_bound_claims(&claims).unwrap();
    assert_eq!(bound["sub"], ClaimMatcher::Exact("repo:x".into()));
    assert_eq!(bound["ref"], ClaimMatcher::AnyOf(vec!["main".into(), "next".into()]));
    assert_eq!(serde_json::to_value(&bound).unwrap(), claims, "returned as sent");
}

#[test]
fn rejects_invalid_matchers() {
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
fn limits_number_and_names_of_claims() {
    let many = |count: usize| -> Value {
        Value::Object((0..count).map(|n| (format!("c{n}"), json!("x"))).collect())
    };
    assert!(check_bound_claims(&many(32)).is_ok());
    assert_eq!(text(check_bound_claims(&many(33))), "a rule may bind at most 32 claims");
    assert!(text(check_bound_claims(&many(0))).starts_with("a rule must bind at least one claim, otherwise"));
    assert_eq!(text(check_bound_claims(&json!(["c"]))), "bound_claims must be an object");
    let name = "the name of a claim must have 1 to 128 characters";
    assert_eq!(text(check_bound_claims(&json!({ "": "x" }))), name);
    assert_eq!(text(check_bound_claims(&json!({ "é".repeat(129): "x" }))), name);
}

#[test]
fn rejects_invalid_scopes() {
    assert_eq!(check_scopes(&json!(["artifact.*", "of.the.future"])).unwrap().len(), 2);
    assert_eq!(text(check_scopes(&json!("artifact.*"))), "scopes must be a list of strings");
    assert!(text(check_scopes(&json!([]))).starts_with("a rule must grant at least one scope; "));
    assert_eq!(text(check_scopes(&json!([""]))), "scopes must be non-empty strings");
    assert_eq!(text(check_scopes(&json!(["a", 7]))), "scopes must be non-empty strings");
    assert_eq!(text(check_scopes(&json!(["é".repeat(129)]))), "scopes may have at most 128 characters");
    assert_eq!(text(check_scopes(&json!(vec!["a"; 65]))), "a rule may grant at most 64 scopes");
}

#[test]
fn rejects_lifetimes_that_are_not_seconds_up_to_a_day() {
    assert_eq!((check_key_ttl(&json!(1)).unwrap(), check_key_ttl(&json!(86_400)).unwrap()), (1, 86_400));
    for value in [json!(true), json!("60"), json!(1.5), json!(60.0), json!([60])] {
        assert_eq!(text(check_key_ttl(&value)), "key_ttl must be an integer number of seconds", "{value}");
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
fn rejects_invalid_and_reserved_key_name_prefixes() {
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
fn deleted_is_a_terminal_state() {
    assert!(RuleState::Created.can_transition_to(RuleState::Deleted));
    assert!(!RuleState::Deleted.can_transition_to(RuleState::Created));
}
