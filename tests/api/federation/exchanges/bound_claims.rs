//! Whom a rule takes.

use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use super::{NO_MATCH, World};

#[tokio::test(flavor = "multi_thread")]
async fn every_bound_claim_must_be_there_as_a_text() {
    let world = World::new().await;
    let other = [
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
    for value in other {
        let token = world.token_but(&json!({ "sub": value }));
        world.refused(&token, NO_MATCH, &value.to_string()).await;
    }
    world.works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_several_texts_is_enough() {
    let world = World::new().await;
    for good in ["main", "next"] {
        let answer = world.exchange(&world.token_but(&json!({ "ref": good }))).await;
        assert_eq!(answer.status, 200, "{good}: {}", answer.text);
    }
    for bad in [json!("other"), json!("main,next"), json!(["main"]), json!(["main", "next"]), json!(null)] {
        world.refused(&world.token_but(&json!({ "ref": bad })), NO_MATCH, &bad.to_string()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_are_no_texts() {
    let world = World::new().await;
    world.add_rule("numbers", &json!({"bound_claims": {"number": "7", "flag": ["true"]}})).await;
    let exchange = async |claims: Value| {
        let answer = world.exchange_by(&world.token_but(&claims), "ci", "numbers").await;
        (answer.status.as_u16(), answer.body["error"].as_str().unwrap_or_default().to_owned())
    };
    let refused = (NO_MATCH.0, NO_MATCH.1.to_owned());
    assert_eq!(exchange(json!({"number": 7, "flag": "true"})).await, refused);
    assert_eq!(exchange(json!({"number": 7.0, "flag": "true"})).await, refused);
    assert_eq!(exchange(json!({"number": "7", "flag": true})).await, refused);
    assert_eq!(exchange(json!({"number": "7", "flag": "true"})).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_claims_that_every_token_has_can_be_bound() {
    let world = World::new().await;
    let url = world.issuer.url();
    world.add_rule("own", &json!({"bound_claims": {"iss": url, "aud": "cloud"}})).await;
    assert_eq!(world.exchange_by(&world.token(), "ci", "own").await.status, 200);
    let list = world.token_but(&json!({"aud": ["cloud"]}));
    let answer = world.exchange_by(&list, "ci", "own").await;
    assert_eq!(super::refusal(&answer), NO_MATCH, "a list never matches");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_owner_of_the_rule_is_told_why() {
    let world = World::new().await;
    let token = world.token_but(&json!({"ref": "a secret branch"}));
    let answer = world.exchange(&token).await;
    assert_eq!(super::refusal(&answer), NO_MATCH);
    let absent = world.exchange(&world.token_but(&json!({"ref": null}))).await;
    assert_eq!(absent.text, answer.text, "one answer for every reason");
    assert!(!answer.text.contains("ref\""), "{}", answer.text);

    let rule =
        crate::networks::get(&world.cluster, &world.admin, "/auth/namespaces/ci/rules/deploy").await.body;
    let object = ObjectRef::new(ObjectType::Rule, rule["uuid"].as_str().unwrap());
    let events = world.cluster.events(&object).await;
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
