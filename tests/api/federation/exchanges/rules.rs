//! Rules and namespaces that an exchange cannot be made by.

use std::sync::Arc;

use axum::http::Method;
use muster_test_cluster::wait_for;
use muster_testing::Issuer;
use muster_testing::issuer::Mode;
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::json;

use super::{NO_NAMESPACE, NO_RULE, UNTRUSTED, UNUSABLE, WRONG_ISSUER, World, refusal, with};
use crate::networks::{delete, get, post};

const DEPLOY: &str = "/auth/namespaces/ci/rules/deploy";

async fn unknown(url: Option<&str>) {
    let world = World::on(url, Issuer::start(), &[]).await;
    world.cluster.create_namespace("empty").await;
    let unknown = world.exchange_by(&world.token(), "ci", "absent").await;
    assert_eq!(refusal(&unknown), NO_RULE);
    for (namespace, rule) in [
        ("absent", "deploy"),
        ("empty", "deploy"),
        ("ci", "Deploy"),
        ("CI", "deploy"),
        ("ci ", "deploy"),
        ("ci", "deploy "),
        ("cı", "déploy"),
        ("ci", "%"),
    ] {
        let answer = world.exchange_by(&world.token(), namespace, rule).await;
        assert_eq!((answer.status, &answer.text), (unknown.status, &unknown.text), "{namespace:?} {rule:?}");
    }
    // Who cannot prove who he is does not learn even that.
    let answer = world.exchange_by(&world.token_but(&json!({"aud": "other"})), "ci", "absent").await;
    assert_eq!(refusal(&answer), super::REJECTED);
    assert_eq!(world.minted().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_namespace_is_an_unknown_rule() {
    unknown(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_namespace_is_an_unknown_rule_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => unknown(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_rule_is_none() {
    let world = World::new().await;
    let token = world.token();
    assert_eq!(delete(&world.cluster, &world.admin, DEPLOY).await.status, 200);
    world.refused(&token, NO_RULE, "deleted").await;
    world.add_rule("deploy", &json!({})).await;
    assert_eq!(world.exchange(&token).await.status, 200, "made again");
}

async fn damaged(url: Option<&str>) {
    let world = World::on(url, Issuer::start(), &[]).await;
    let damages = [
        ("bound_claims", "'{'"),
        ("bound_claims", "''"),
        ("bound_claims", "'null'"),
        ("bound_claims", "'{}'"),
        ("bound_claims", "'[]'"),
        ("bound_claims", "'{\"sub\": 7}'"),
        ("bound_claims", "'{\"sub\": []}'"),
        ("bound_claims", "'{\"sub\": \"repo:x\", \"ref\": [7]}'"),
        ("scopes", "''"),
        ("scopes", "'null'"),
        ("scopes", "'[]'"),
        ("scopes", "'\"*\"'"),
        ("scopes", "'[7]'"),
        ("key_ttl", "0"),
        ("key_ttl", "-5"),
    ];
    for (column, value) in damages {
        let what = format!("{column} = {value}");
        world.add_rule("damaged", &json!({})).await;
        world.execute(&format!("UPDATE rules SET {what} WHERE live_name = 'damaged'")).await;
        let answer = world.exchange_by(&world.token(), "ci", "damaged").await;
        assert_eq!(refusal(&answer), UNUSABLE, "{what}");
        world
            .execute("UPDATE rules SET state = 'deleted', live_name = NULL WHERE live_name = 'damaged'")
            .await;
    }
    assert_eq!(world.minted().await, 0);
    world.works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_rule_mints_nothing() {
    damaged(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_rule_mints_nothing_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => damaged(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_is_told_to_the_rule() {
    let world = World::new().await;
    let rule = get(&world.cluster, &world.admin, DEPLOY).await.body;
    world.execute("UPDATE rules SET scopes = '[]' WHERE live_name = 'deploy'").await;
    world.refused(&world.token(), UNUSABLE, "no scopes").await;
    world.execute("UPDATE rules SET scopes = '[\"*\"]' WHERE live_name = 'deploy'").await;
    world.works().await;
    let object = ObjectRef::new(ObjectType::Rule, rule["uuid"].as_str().unwrap());
    let events = world.cluster.events(&object).await;
    let refused: Vec<_> = events.iter().filter(|e| e.message == "federated exchange refused").collect();
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].extra["reason"], "rule is unusable");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_takes_the_tokens_of_its_own_issuer_only() {
    let world = World::new().await;
    let other = Issuer::start();
    std::fs::write(&world.bundle, world.issuer.ca_pem() + &other.ca_pem()).unwrap();
    let body = json!({"name": "other", "issuer_url": other.url(), "jwks_uri": other.jwks_uri(), "audience": "cloud"});
    assert_eq!(post(&world.cluster, &world.admin, "/auth/issuers", body).await.status, 200);
    world.add_rule("others", &json!({"issuer": "other"})).await;
    let theirs = other.token(with(&other.claims("cloud"), &json!({"ref": "main"})));
    world.refused(&theirs, WRONG_ISSUER, "the other's token").await;
    let answer = world.exchange_by(&world.token(), "ci", "others").await;
    assert_eq!(refusal(&answer), WRONG_ISSUER);
    assert_eq!(world.exchange_by(&theirs, "ci", "others").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_issuer_is_not_trusted_until_it_is_made_again() {
    let world = World::new().await;
    let token = world.token();
    world.works().await;
    assert_eq!(delete(&world.cluster, &world.admin, "/auth/issuers/forge").await.status, 200);
    world.refused(&token, UNTRUSTED, "deleted").await;
    let fetched = world.issuer.fetches();
    // Under another name it is not the one that the rule means.
    let other = with(&world.forge(), &json!({"name": "other"}));
    assert_eq!(post(&world.cluster, &world.admin, "/auth/issuers", other).await.status, 200);
    world.refused(&token, WRONG_ISSUER, "under another name").await;
    assert!(world.issuer.fetches() > fetched, "its keys are its own");
    assert_eq!(delete(&world.cluster, &world.admin, "/auth/issuers/other").await.status, 200);
    assert_eq!(post(&world.cluster, &world.admin, "/auth/issuers", world.forge()).await.status, 200);
    let answer = world.exchange(&token).await;
    assert_eq!(answer.status, 200, "the rule means the new one: {}", answer.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_that_is_gone_gets_no_keys() {
    let world = World::new().await;
    // Only the namespace is gone so far, not its rules.
    world.execute("UPDATE namespaces SET state = 'deleted' WHERE name = 'ci'").await;
    world.refused(&world.token(), NO_NAMESPACE, "gone").await;
    world.execute("UPDATE namespaces SET state = 'created' WHERE name = 'ci'").await;
    world.works().await;

    let token = world.token();
    world.cluster.call(&world.admin, Method::DELETE, "/auth/namespaces/ci", None).await;
    let answer = world.exchange(&token).await;
    assert!([NO_NAMESPACE, NO_RULE].contains(&refusal(&answer)), "{}", answer.text);
    world.cluster.settle().await;
    world.refused(&token, NO_RULE, "and its rules").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_deleted_while_keys_are_fetched_is_deleted() {
    for what in ["/auth/issuers/forge", DEPLOY, "/auth/namespaces/ci"] {
        let world = Arc::new(World::new().await);
        world.issuer.serve(Mode::Hang);
        let token = world.token();
        let asking = Arc::clone(&world);
        let exchange = tokio::spawn(async move { asking.exchange(&token).await });
        wait_for("the fetch", async || (world.issuer.fetches() > 0).then_some(())).await;
        let deleted = delete(&world.cluster, &world.admin, what).await;
        assert_eq!(deleted.status, 200, "{what}: {}", deleted.text);
        world.issuer.serve(Mode::Keys);
        let answer = exchange.await.unwrap();
        assert_eq!(answer.status, 401, "{what}: {}", answer.text);
        assert!(answer.text.contains("federated exchange refused: "), "{}", answer.text);
        assert_eq!(world.minted().await, 0, "{what}");
    }
}
