//! Unit tests of federated exchanges.

use muster_types::ids::IssuerId;
use muster_types::issuer::{IssuerState, IssuerTerms};
use muster_types::rule::RuleState;

use super::*;

fn issuer() -> IssuerRow {
    let terms = IssuerTerms {
        issuer_url: "https://forge.example".into(),
        jwks_uri: "https://forge.example/keys".into(),
        audience: "cloud".into(),
    };
    IssuerRow { id: IssuerId::new(), name: "forge".into(), state: IssuerState::Created, terms }
}

fn rule(bound_claims: &Value) -> RuleRow {
    let terms = RuleTerms {
        issuer: "forge".into(),
        bound_claims: check_bound_claims(bound_claims).unwrap(),
        scopes: vec!["artifact.*".into()],
        key_ttl: 600,
        key_name_prefix: "ci".into(),
    };
    let (id, state) = (RuleId::new(), RuleState::Created);
    RuleRow { id, namespace: "ns".into(), name: "deploy".into(), state, terms }
}

fn identity(claims: Value) -> Identity {
    let Value::Object(claims) = claims else { panic!("claims are an object") };
    Identity { claims, expires: now() + 60.0, token_id: "t".into() }
}

fn outcome(rule: RuleRow, claims: Value) -> Result<Map<String, Value>, Refusal> {
    let found = FoundRule { id: rule.id, row: Some(rule) };
    evaluate(found, &issuer(), &identity(claims)).map(|grant| grant.claims)
}

#[test]
fn claims_match_whole_strings_only() {
    let bound = json!({"sub": "repo:x", "ref": ["main", "next"]});
    for (claims, detail) in [
        (json!({"sub": "repo:x"}), "claim \"ref\" is absent"),
        (json!({"sub": "repo:x", "ref": null}), "claim \"ref\" is not a string"),
        (json!({"sub": "repo:x", "ref": ["main"]}), "claim \"ref\" is not a string"),
        (json!({"sub": "repo:x", "ref": 7}), "claim \"ref\" is not a string"),
        (json!({"sub": "repo:x", "ref": "mai"}), "claim \"ref\" has another value"),
        (json!({"sub": "repo:x", "ref": "Main"}), "claim \"ref\" has another value"),
        (json!({"sub": "repo:x ", "ref": "main"}), "claim \"sub\" has another value"),
        (json!({}), "claim \"ref\" is absent, claim \"sub\" is absent"),
    ] {
        let refused = outcome(rule(&bound), claims.clone()).unwrap_err();
        assert_eq!(refused, refusal("claims do not match", detail), "{claims}");
    }
    let claims = json!({"sub": "repo:x", "ref": "next", "aud": "cloud"});
    let granted = outcome(rule(&bound), claims).unwrap();
    assert_eq!(Value::Object(granted), json!({"sub": "repo:x", "ref": "next"}), "only the bound claims");
}

#[test]
fn rejects_rule_with_invalid_terms() {
    type Damage = fn(&mut RuleTerms);
    let damages: [Damage; 8] = [
        |terms| terms.bound_claims.clear(),
        |terms| terms.bound_claims.extend([("sub".to_owned(), ClaimMatcher::AnyOf(vec![]))]),
        |terms| terms.bound_claims.extend([("sub".to_owned(), ClaimMatcher::Exact(String::new()))]),
        |terms| terms.scopes.clear(),
        |terms| terms.scopes.push(String::new()),
        |terms| terms.key_ttl = 0,
        |terms| terms.key_ttl = 86_401,
        |terms| terms.key_name_prefix = "_service_key".into(),
    ];
    for (at, damage) in damages.into_iter().enumerate() {
        let mut rule = rule(&json!({"sub": "x"}));
        damage(&mut rule.terms);
        let refused = outcome(rule, json!({"sub": "x"})).unwrap_err();
        assert_eq!(refused.reason, "rule is unusable", "damage {at}");
    }
    let unread = FoundRule { id: RuleId::new(), row: None };
    let refused = evaluate(unread, &issuer(), &identity(json!({"sub": "x"}))).unwrap_err();
    assert_eq!(refused.reason, "rule is unusable");
}

#[test]
fn rejects_token_of_another_issuer() {
    let mut rule = rule(&json!({"sub": "x"}));
    rule.terms.issuer = "Forge".into();
    let refused = outcome(rule, json!({"sub": "another"})).unwrap_err();
    assert_eq!(refused.reason, "wrong issuer", "checked before the claims");
}

#[test]
fn computes_minute_and_seconds_until_its_end() {
    for (time, expected) in
        [(0.0, (0, 60)), (59.0, (0, 1)), (59.999, (0, 1)), (60.0, (1, 60)), (61.5, (1, 59))]
    {
        assert_eq!(minute_at(time), expected, "{time}");
    }
}

#[test]
fn treats_fields_that_are_not_strings_as_missing() {
    for value in [None, Some(json!(null)), Some(json!("")), Some(json!(7)), Some(json!(["x"]))] {
        let refused = required("token", value.as_ref()).unwrap_err();
        assert_eq!(refused.to_string(), "no token specified", "{value:?}");
    }
    assert_eq!(required("token", Some(&json!("x"))).unwrap(), "x");
}

#[test]
fn removes_control_characters_and_secrets_from_logs() {
    assert_eq!(printable("a\n\u{1b}[31mb\u{9b}c", 4), "a[31");
    let request = ExchangeRequest { token: Some(json!("secret")), ..ExchangeRequest::default() };
    assert!(!format!("{request:?}").contains("secret"));
}

#[test]
fn provenance_names_rule_issuer_and_claims() {
    let rule = rule(&json!({"sub": "x"}));
    let claims = json!({"sub": "x", "email": "private", "jti": "t"});
    let found = FoundRule { id: rule.id, row: Some(rule.clone()) };
    let identity = identity(claims);
    let grant = evaluate(found, &issuer(), &identity).unwrap();
    let expected = json!({
        "source": "federated", "rule": rule.id.to_string(), "rule_name": "deploy", "issuer": "forge",
        "claims": {"sub": "x"}, "jti": "t", "sub": "x",
    });
    assert_eq!(provenance(&grant, &identity), expected);
}
