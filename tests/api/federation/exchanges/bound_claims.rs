//! Matching of token claims against the bound claims of a rule.

use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use super::{CLAIMS_MISMATCH, Fixture};

#[tokio::test(flavor = "multi_thread")]
async fn every_bound_claim_must_be_a_matching_string() {
    let fixture = Fixture::new().await;
    let mismatches = [
        json!(null),
        json!("other"),
        json!("repo:x "),
        json!("repo:X"),
        json!("repo:"),
        json!("repo:x/y"),
        json!(""),
        json!(["repo:x"]),
        json!(["repo:x", "main"]),
        json!([]),
        json!({"sub": "repo:x"}),
        json!(7),
        json!(true),
    ];
    for value in mismatches {
        let token = fixture.token_with_claims(&json!({ "sub": value }));
        fixture.assert_refused(&token, CLAIMS_MISMATCH, &value.to_string()).await;
    }
    fixture.assert_exchange_succeeds().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn matches_one_of_several_values() {
    let fixture = Fixture::new().await;
    for good in ["main", "next"] {
        let response = fixture.exchange(&fixture.token_with_claims(&json!({ "ref": good }))).await;
        assert_eq!(response.status, 200, "{good}: {}", response.text);
    }
    for bad in [json!("other"), json!("main,next"), json!(["main"]), json!(["main", "next"]), json!(null)] {
        fixture
            .assert_refused(
                &fixture.token_with_claims(&json!({ "ref": bad })),
                CLAIMS_MISMATCH,
                &bad.to_string(),
            )
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_do_not_match_strings() {
    let fixture = Fixture::new().await;
    fixture.add_rule("numbers", &json!({"bound_claims": {"number": "7", "flag": ["true"]}})).await;
    let exchange = async |claims: Value| {
        let response = fixture.exchange_with_rule(&fixture.token_with_claims(&claims), "ci", "numbers").await;
        (response.status.as_u16(), response.body["error"].as_str().unwrap_or_default().to_owned())
    };
    let refused = (CLAIMS_MISMATCH.0, CLAIMS_MISMATCH.1.to_owned());
    assert_eq!(exchange(json!({"number": 7, "flag": "true"})).await, refused);
    assert_eq!(exchange(json!({"number": 7.0, "flag": "true"})).await, refused);
    assert_eq!(exchange(json!({"number": "7", "flag": true})).await, refused);
    assert_eq!(exchange(json!({"number": "7", "flag": "true"})).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn registered_claims_can_be_bound() {
    let fixture = Fixture::new().await;
    let url = fixture.issuer.url();
    fixture.add_rule("own", &json!({"bound_claims": {"iss": url, "aud": "cloud"}})).await;
    assert_eq!(fixture.exchange_with_rule(&fixture.token(), "ci", "own").await.status, 200);
    let list = fixture.token_with_claims(&json!({"aud": ["cloud"]}));
    let response = fixture.exchange_with_rule(&list, "ci", "own").await;
    assert_eq!(super::status_and_error(&response), CLAIMS_MISMATCH, "a list never matches");
}

#[tokio::test(flavor = "multi_thread")]
async fn mismatch_detail_is_only_in_events_of_the_rule() {
    let fixture = Fixture::new().await;
    let token = fixture.token_with_claims(&json!({"ref": "a secret branch"}));
    let response = fixture.exchange(&token).await;
    assert_eq!(super::status_and_error(&response), CLAIMS_MISMATCH);
    let absent = fixture.exchange(&fixture.token_with_claims(&json!({"ref": null}))).await;
    assert_eq!(absent.body["error"], response.body["error"], "the response does not reveal the reason");
    assert!(!response.text.contains("ref\""), "{}", response.text);

    let rule =
        crate::networks::get(&fixture.cluster, &fixture.admin, "/auth/namespaces/ci/rules/deploy").await.body;
    let object = ObjectRef::new(ObjectType::Rule, rule["uuid"].as_str().unwrap());
    let events = fixture.cluster.events(&object).await;
    let refused: Vec<_> = events.iter().filter(|e| e.message == "federated exchange refused").collect();
    assert_eq!(refused.len(), 2);
    for event in refused {
        assert_eq!(
            (event.event_type.as_str(), &event.extra["reason"]),
            ("audit", &json!("claims do not match"))
        );
        let detail = event.extra["detail"].to_string();
        assert!(detail.contains("ref"), "{detail}");
        let text = json!(event.extra).to_string();
        assert!(!token.split('.').any(|part| text.contains(part)), "{text}");
    }
}
