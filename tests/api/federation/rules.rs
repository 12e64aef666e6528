//! Which tokens can be exchanged for which keys.

use axum::http::Method;
use muster_control::{objects, reconcile};
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use super::{cluster, put, refusal, rule, with};
use crate::harness::{Cluster, caller};
use crate::networks::{delete, get, post};
use crate::scopes::scoped;

const RULES: &str = "/auth/namespaces/ci/rules";
const DEPLOY: &str = "/auth/namespaces/ci/rules/deploy";

fn object(record: &Value) -> ObjectRef {
    ObjectRef::new(ObjectType::Rule, record["uuid"].as_str().unwrap())
}

/// A rule's terms as they are asked for.
fn terms(changes: &Value) -> Value {
    let mut body = with(&rule("deploy", "forge"), changes);
    body.as_object_mut().unwrap().remove("name");
    body
}

/// A cluster with the issuer `forge` and the namespace `ci`, and the administrator's token.
async fn with_namespace(settings: &[(&str, &str)]) -> (Cluster, String) {
    let (cluster, token) = cluster(settings).await;
    cluster.create_namespace("ci").await;
    (cluster, token)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_is_created_shown_listed_changed_and_deleted() {
    let (cluster, _) = with_namespace(&[]).await;
    let token = cluster.token("ci").await;
    assert_eq!(get(&cluster, &token, RULES).await.body, json!([]));
    let created = post(&cluster, &token, RULES, rule("deploy", "forge")).await;
    let more = json!({"state": "created", "version": 1, "metadata": {}, "namespace": "ci"});
    let mut expected = with(&rule("deploy", "forge"), &more);
    expected["uuid"] = created.body["uuid"].clone();
    assert_eq!((created.status.as_u16(), &created.body), (200, &expected));
    let other = post(&cluster, &token, RULES, rule("a / é", "forge")).await.body;
    assert_eq!(get(&cluster, &token, &format!("{RULES}/a%20%2F%20%C3%A9")).await.body, other);
    assert_eq!(get(&cluster, &token, DEPLOY).await.body, expected);
    assert_eq!(get(&cluster, &token, RULES).await.body, json!([other, expected]));
    assert_eq!(
        refusal(&post(&cluster, &token, RULES, rule("deploy", "forge")).await),
        (409, "rule already exists")
    );

    let new = terms(&json!({"bound_claims": {"aud": ["x"]}, "scopes": ["*"], "key_ttl": 86400}));
    let updated = put(&cluster, &token, DEPLOY, new.clone()).await;
    assert_eq!((updated.status.as_u16(), &updated.body), (200, &with(&expected, &new)));
    assert_eq!(get(&cluster, &token, DEPLOY).await.body, updated.body);

    cluster.events(&object(&expected)).await;
    let events = get(&cluster, &token, &format!("{DEPLOY}/events")).await;
    assert_eq!((&events.body[0]["message"], events.status.as_u16()), (&json!("updated mapping rule"), 200));
    let deleted = delete(&cluster, &token, DEPLOY).await;
    assert_eq!(
        (deleted.status.as_u16(), &deleted.body),
        (200, &with(&updated.body, &json!({"state": "deleted"})))
    );
    let absent = (404, "rule not found");
    assert_eq!(refusal(&get(&cluster, &token, DEPLOY).await), absent);
    assert_eq!(refusal(&delete(&cluster, &token, DEPLOY).await), absent);
    assert_eq!(refusal(&put(&cluster, &token, DEPLOY, new).await), absent);
    let again = post(&cluster, &token, RULES, rule("deploy", "forge")).await;
    assert_ne!(again.body["uuid"], expected["uuid"], "the name is free at once");

    let events = cluster.events(&object(&expected)).await;
    let told: Vec<_> =
        events.iter().rev().map(|event| (event.event_type.as_str(), event.message.as_str())).collect();
    assert_eq!(
        told,
        [
            ("audit", "db record created"),
            ("mutate", "updated mapping rule"),
            ("audit", "delete mapping rule request from REST API")
        ]
    );
    assert!(events.iter().all(|event| event.extra["keyname"] == "test"));
    assert!(events.iter().all(|event| event.extra["caller-namespace"] == "ci"));
    assert_eq!(events[1].extra["scopes"], json!(["*"]));
    let events = cluster.events(&ObjectRef::namespace("ci")).await;
    let asked = events.iter().filter(|event| event.message == "create mapping rule request from REST API");
    assert_eq!(asked.map(|event| event.extra["rule"].clone()).filter(|rule| *rule == "deploy").count(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_a_rule_is_refused_in_order() {
    let (cluster, token) = with_namespace(&[]).await;
    post(&cluster, &token, RULES, rule("deploy", "forge")).await;
    let missing = "missing required field(s): issuer, bound_claims, scopes, key_ttl, key_name_prefix";
    let answer = post(&cluster, &token, RULES, json!({"name": "x"})).await;
    assert_eq!(refusal(&answer), (400, missing));
    let names = [
        (json!({"name": null, "issuer": null}), "no name specified"),
        (json!({"name": "", "issuer": null}), "no name specified"),
        (json!({"name": ["x"], "issuer": null}), "name is not a valid string"),
        (json!({"name": "x".repeat(256)}), "name is not a valid string"),
        (json!({"name": "."}), "name: must not be a dot segment"),
    ];
    let fields = [
        (json!({"bound_claims": null, "issuer": 7}), "missing required field(s): bound_claims"),
        (
            json!({"key_name_prefix": null, "scopes": null, "issuer": null}),
            "missing required field(s): issuer, scopes, key_name_prefix",
        ),
        (json!({"issuer": "", "bound_claims": 7}), "issuer must be a non-empty string"),
        (json!({"issuer": 7}), "issuer must be a non-empty string"),
        (json!({"issuer": "nobody", "bound_claims": {}}), "no trusted issuer named \"nobody\""),
        (json!({"bound_claims": ["sub"], "scopes": 7}), "bound_claims must be an object"),
        (
            json!({"bound_claims": {}, "scopes": 7}),
            "a rule must bind at least one claim, otherwise it accepts every identity the issuer will ever vouch for",
        ),
        (
            json!({"bound_claims": {"sub": 7}, "scopes": 7}),
            "the matcher for claim \"sub\" must be a string or a list of strings, not a number",
        ),
        (
            json!({"bound_claims": {"sub": ["a", ""]}}),
            "the matcher for claim \"sub\" must contain only non-empty strings",
        ),
        (json!({"scopes": "artifact.*", "key_ttl": 0}), "scopes must be a list of strings"),
        (
            json!({"scopes": [], "key_ttl": 0}),
            "a rule must grant at least one scope; a key without scopes permits nothing",
        ),
        (json!({"scopes": [""], "key_ttl": 0}), "scopes must be non-empty strings"),
        (json!({"key_ttl": true, "key_name_prefix": ""}), "key_ttl must be an integer number of seconds"),
        (json!({"key_ttl": "600"}), "key_ttl must be an integer number of seconds"),
        (
            json!({"key_ttl": 0, "key_name_prefix": ""}),
            "key_ttl must be positive; keys created by a rule must expire",
        ),
        (
            json!({"key_ttl": 86401}),
            "key_ttl may not exceed 86400 seconds; exchange another token to get a new key",
        ),
        (json!({"key_name_prefix": ""}), "key_name_prefix must be a non-empty string"),
        (
            json!({"key_name_prefix": "_service_key_x"}),
            "\"_service_key_x\" is reserved for keys the cluster mints for itself",
        ),
        (json!({"extra": 1}), "extra: not declared by this endpoint"),
    ];
    for (changes, text) in names.iter().chain(&fields) {
        // The name is taken, which is looked at last.
        let answer = post(&cluster, &token, RULES, with(&rule("deploy", "forge"), changes)).await;
        assert_eq!(refusal(&answer), (400, *text), "{changes}");
    }
    for (changes, text) in &fields {
        assert_eq!(refusal(&put(&cluster, &token, DEPLOY, terms(changes)).await), (400, *text), "{changes}");
        // What is malformed is so before it is absent.
        let absent = put(&cluster, &token, &format!("{RULES}/absent"), terms(changes)).await;
        assert_eq!(refusal(&absent), (400, *text), "{changes}");
    }
    let list = get(&cluster, &token, RULES).await.body;
    assert_eq!(list.as_array().unwrap().len(), 1);
    assert_eq!(list[0]["key_ttl"], 600);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_that_is_trusted_makes_changes_and_deletes_rules() {
    let (cluster, _) = with_namespace(&[]).await;
    for name in ["friend", "stranger"] {
        cluster.create_namespace(name).await;
    }
    objects::trust::add(&cluster.app, &caller(), "ci", "friend").await.unwrap();
    let friend = cluster.token("friend").await;
    let made = post(&cluster, &friend, RULES, rule("deploy", "forge")).await.body;
    assert_eq!(put(&cluster, &friend, DEPLOY, terms(&json!({"key_ttl": 1}))).await.status, 200);
    let events = cluster.events(&object(&made)).await;
    assert_eq!(events[0].extra["caller-namespace"], "friend");

    let stranger = cluster.token("stranger").await;
    let absent = (404, "namespace not found");
    assert_eq!(refusal(&get(&cluster, &stranger, RULES).await), absent);
    assert_eq!(refusal(&get(&cluster, &stranger, DEPLOY).await), absent);
    assert_eq!(refusal(&post(&cluster, &stranger, RULES, json!({})).await), absent);
    assert_eq!(refusal(&put(&cluster, &stranger, DEPLOY, json!({})).await), absent);
    assert_eq!(refusal(&delete(&cluster, &stranger, DEPLOY).await), absent);
    assert_eq!(refusal(&get(&cluster, &stranger, "/auth/namespaces/nowhere/rules").await), absent);
    // Trust is not mutual.
    let token = cluster.token("ci").await;
    assert_eq!(refusal(&get(&cluster, &token, "/auth/namespaces/friend/rules").await), absent);
    assert_eq!(delete(&cluster, &friend, DEPLOY).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scoped_caller_gives_only_what_it_holds() {
    let (cluster, admin) = with_namespace(&[]).await;
    let token = scoped(&cluster, "ci", &["rule.*", "artifact.*", "blob.read", "odd"]).await;
    let excess = "a rule cannot grant scopes you do not hold: ";
    for (scopes, refused) in [
        (json!(["artifact.*", "artifact.read", "artifact.anything", "blob.read", "odd", "rule.write"]), ""),
        (json!(["blob.write", "artifact.read", "*", "blob.*", "blob.write"]), "*, blob.*, blob.write"),
        (json!(["node.read", "cluster-admin", "artifacts.read"]), "artifacts.read, cluster-admin, node.read"),
        (json!(["odd.read", "artifact"]), "artifact, odd.read"),
    ] {
        let body = rule("deploy", "forge");
        let answer = post(&cluster, &token, RULES, with(&body, &json!({ "scopes": scopes }))).await;
        if refused.is_empty() {
            assert_eq!(answer.status, 200, "{}", answer.text);
            continue;
        }
        let text = format!("{excess}{refused}");
        assert_eq!(refusal(&answer), (403, text.as_str()), "{scopes}");
        let answer = put(&cluster, &token, DEPLOY, terms(&json!({ "scopes": scopes }))).await;
        assert_eq!(refusal(&answer), (403, text.as_str()), "{scopes}");
    }
    // After what is missing, before what is malformed.
    let body = json!({"scopes": ["node.read", 7], "issuer": 7, "bound_claims": {}, "key_ttl": 0, "key_name_prefix": ""});
    assert_eq!(
        refusal(&put(&cluster, &token, DEPLOY, body.clone()).await),
        (403, &*format!("{excess}node.read"))
    );
    let missing = put(&cluster, &token, DEPLOY, with(&body, &json!({"issuer": null}))).await;
    assert_eq!(refusal(&missing), (400, "missing required field(s): issuer"));
    let empty = put(&cluster, &token, DEPLOY, terms(&json!({"scopes": [""]}))).await;
    assert_eq!(refusal(&empty), (400, "scopes must be non-empty strings"));
    // Who is not scoped gives what it likes, also what means nothing.
    let any = json!({"scopes": ["*", "cluster-admin", "of.the.future"]});
    assert_eq!(put(&cluster, &admin, DEPLOY, terms(&any)).await.status, 200);
    let everything = scoped(&cluster, "ci", &["*"]).await;
    assert_eq!(put(&cluster, &everything, DEPLOY, terms(&any)).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_have_scopes_of_their_own() {
    let (cluster, _) = with_namespace(&[]).await;
    let not_scoped = (403, "token is not scoped for this operation");
    let token = scoped(&cluster, "ci", &["auth.*", "rule.read"]).await;
    assert_eq!(get(&cluster, &token, RULES).await.status, 200);
    assert_eq!(refusal(&post(&cluster, &token, RULES, rule("deploy", "forge")).await), not_scoped);
    assert_eq!(refusal(&put(&cluster, &token, DEPLOY, json!({})).await), not_scoped);
    assert_eq!(refusal(&delete(&cluster, &token, DEPLOY).await), not_scoped);
    let token = scoped(&cluster, "ci", &["auth.*"]).await;
    assert_eq!(refusal(&get(&cluster, &token, RULES).await), not_scoped);
    let token = scoped(&cluster, "ci", &["rule.delete"]).await;
    assert_eq!(refusal(&delete(&cluster, &token, DEPLOY).await), (404, "rule not found"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_of_system_does_not_go_unseen() {
    let (cluster, token) = with_namespace(&[]).await;
    let message = "mapping rule targets the system namespace";
    let made = post(&cluster, &token, "/auth/namespaces/system/rules", rule("root", "forge")).await;
    assert_eq!(made.status, 200, "{}", made.text);
    let path = "/auth/namespaces/system/rules/root";
    assert_eq!(put(&cluster, &token, path, terms(&json!({"scopes": ["*"]}))).await.status, 200);
    let events = cluster.events(&object(&made.body)).await;
    let warnings: Vec<_> = events.iter().filter(|event| event.message == message).collect();
    assert_eq!(warnings.len(), 2, "when it is made and when it is changed");
    assert!(warnings.iter().all(|event| event.event_type == "audit" && event.extra["issuer"] == "forge"));
    assert_eq!(warnings[0].extra["scopes"], json!(["*"]));
    assert_eq!(warnings[1].extra["bound_claims"], made.body["bound_claims"]);

    let other = post(&cluster, &token, RULES, rule("deploy", "forge")).await.body;
    assert!(!cluster.messages(&object(&other)).await.contains(&message.to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_go_with_their_namespace_and_deleted_ones_with_the_cleaner() {
    let (cluster, token) = with_namespace(&[("CLEANER_DELAY", "0")]).await;
    post(&cluster, &token, RULES, rule("deploy", "forge")).await;
    let gone = post(&cluster, &token, RULES, rule("gone", "forge")).await.body;
    delete(&cluster, &token, &format!("{RULES}/gone")).await;
    assert!(!cluster.events(&object(&gone)).await.is_empty());
    reconcile::cleaner::run(&cluster.app).await.unwrap();
    assert_eq!(cluster.count("rules", "1 = 1").await, 1);
    assert!(cluster.events(&object(&gone)).await.is_empty());

    cluster.call(&token, Method::DELETE, "/auth/namespaces/ci", None).await;
    assert_eq!(refusal(&get(&cluster, &token, DEPLOY).await), (404, "namespace not found"));
    cluster.settle().await;
    assert_eq!(cluster.count("rules", "state = 'created'").await, 0);
    cluster.messages(&ObjectRef::namespace("ci")).await;
    reconcile::cleaner::run(&cluster.app).await.unwrap();
    cluster.settle().await;
    assert_eq!(cluster.count("rules", "1 = 1").await, 0);
    cluster.create_namespace("ci").await;
    assert_eq!(get(&cluster, &token, RULES).await.body, json!([]), "who takes the name inherits nothing");
}
