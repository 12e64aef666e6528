//! Management of mapping rules.

use axum::http::Method;
use muster_control::{objects, reconcile};
use muster_test_cluster::{Cluster, caller};
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use super::{cluster, merge, put, rule_request, status_and_error};
use crate::networks::{delete, get, post};
use crate::scopes::scoped_token;

const RULES: &str = "/auth/namespaces/ci/rules";
const DEPLOY: &str = "/auth/namespaces/ci/rules/deploy";

fn object(record: &Value) -> ObjectRef {
    ObjectRef::new(ObjectType::Rule, record["uuid"].as_str().unwrap())
}

/// Returns the request body that updates a rule.
fn update_request(changes: &Value) -> Value {
    let mut body = merge(&rule_request("deploy", "forge"), changes);
    body.as_object_mut().unwrap().remove("name");
    body
}

/// Creates a cluster with the issuer `forge` and the namespace `ci`, and returns it with the administrator's token.
async fn with_namespace(settings: &[(&str, &str)]) -> (Cluster, String) {
    let (cluster, token) = cluster(settings).await;
    cluster.create_namespace("ci").await;
    (cluster, token)
}

#[tokio::test(flavor = "multi_thread")]
async fn creates_shows_lists_updates_and_deletes_rule() {
    let (cluster, _) = with_namespace(&[]).await;
    let token = cluster.token("ci").await;
    assert_eq!(get(&cluster, &token, RULES).await.body, json!([]));
    let created = post(&cluster, &token, RULES, rule_request("deploy", "forge")).await;
    let generated = json!({"state": "created", "version": 1, "metadata": {}, "namespace": "ci"});
    let mut expected = merge(&rule_request("deploy", "forge"), &generated);
    expected["uuid"] = created.body["uuid"].clone();
    assert_eq!((created.status.as_u16(), &created.body), (200, &expected));
    let other = post(&cluster, &token, RULES, rule_request("a / é", "forge")).await.body;
    assert_eq!(get(&cluster, &token, &format!("{RULES}/a%20%2F%20%C3%A9")).await.body, other);
    assert_eq!(get(&cluster, &token, DEPLOY).await.body, expected);
    assert_eq!(get(&cluster, &token, RULES).await.body, json!([other, expected]));
    assert_eq!(
        status_and_error(&post(&cluster, &token, RULES, rule_request("deploy", "forge")).await),
        (409, "rule already exists")
    );

    let update = update_request(&json!({"bound_claims": {"aud": ["x"]}, "scopes": ["*"], "key_ttl": 86400}));
    let updated = put(&cluster, &token, DEPLOY, update.clone()).await;
    assert_eq!((updated.status.as_u16(), &updated.body), (200, &merge(&expected, &update)));
    assert_eq!(get(&cluster, &token, DEPLOY).await.body, updated.body);

    cluster.events(&object(&expected)).await;
    let events = get(&cluster, &token, &format!("{DEPLOY}/events")).await;
    assert_eq!((&events.body[0]["message"], events.status.as_u16()), (&json!("updated mapping rule"), 200));
    let deleted = delete(&cluster, &token, DEPLOY).await;
    assert_eq!(
        (deleted.status.as_u16(), &deleted.body),
        (200, &merge(&updated.body, &json!({"state": "deleted"})))
    );
    let not_found = (404, "rule not found");
    assert_eq!(status_and_error(&get(&cluster, &token, DEPLOY).await), not_found);
    assert_eq!(status_and_error(&delete(&cluster, &token, DEPLOY).await), not_found);
    assert_eq!(status_and_error(&put(&cluster, &token, DEPLOY, update).await), not_found);
    let recreated = post(&cluster, &token, RULES, rule_request("deploy", "forge")).await;
    assert_ne!(recreated.body["uuid"], expected["uuid"], "the name is free immediately");

    let events = cluster.events(&object(&expected)).await;
    let recorded: Vec<_> =
        events.iter().rev().map(|event| (event.event_type.as_str(), event.message.as_str())).collect();
    assert_eq!(
        recorded,
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
    let create_events =
        events.iter().filter(|event| event.message == "create mapping rule request from REST API");
    assert_eq!(
        create_events.map(|event| event.extra["rule"].clone()).filter(|rule| *rule == "deploy").count(),
        3
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn validates_rule_fields_in_order() {
    let (cluster, token) = with_namespace(&[]).await;
    post(&cluster, &token, RULES, rule_request("deploy", "forge")).await;
    let missing = "missing required field(s): issuer, bound_claims, scopes, key_ttl, key_name_prefix";
    let response = post(&cluster, &token, RULES, json!({"name": "x"})).await;
    assert_eq!(status_and_error(&response), (400, missing));
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
        // The name is in use, which is checked last.
        let response = post(&cluster, &token, RULES, merge(&rule_request("deploy", "forge"), changes)).await;
        assert_eq!(status_and_error(&response), (400, *text), "{changes}");
    }
    for (changes, text) in &fields {
        assert_eq!(
            status_and_error(&put(&cluster, &token, DEPLOY, update_request(changes)).await),
            (400, *text),
            "{changes}"
        );
        // Validation comes before the lookup.
        let absent = put(&cluster, &token, &format!("{RULES}/absent"), update_request(changes)).await;
        assert_eq!(status_and_error(&absent), (400, *text), "{changes}");
    }
    let list = get(&cluster, &token, RULES).await.body;
    assert_eq!(list.as_array().unwrap().len(), 1);
    assert_eq!(list[0]["key_ttl"], 600);
}

#[tokio::test(flavor = "multi_thread")]
async fn trusted_namespace_creates_updates_and_deletes_rules() {
    let (cluster, _) = with_namespace(&[]).await;
    for name in ["friend", "stranger"] {
        cluster.create_namespace(name).await;
    }
    objects::trust::add(&cluster.app, &caller(), "ci", "friend").await.unwrap();
    let friend = cluster.token("friend").await;
    let created = post(&cluster, &friend, RULES, rule_request("deploy", "forge")).await.body;
    assert_eq!(put(&cluster, &friend, DEPLOY, update_request(&json!({"key_ttl": 1}))).await.status, 200);
    let events = cluster.events(&object(&created)).await;
    assert_eq!(events[0].extra["caller-namespace"], "friend");

    let stranger = cluster.token("stranger").await;
    let not_found = (404, "namespace not found");
    assert_eq!(status_and_error(&get(&cluster, &stranger, RULES).await), not_found);
    assert_eq!(status_and_error(&get(&cluster, &stranger, DEPLOY).await), not_found);
    assert_eq!(status_and_error(&post(&cluster, &stranger, RULES, json!({})).await), not_found);
    assert_eq!(status_and_error(&put(&cluster, &stranger, DEPLOY, json!({})).await), not_found);
    assert_eq!(status_and_error(&delete(&cluster, &stranger, DEPLOY).await), not_found);
    assert_eq!(
        status_and_error(&get(&cluster, &stranger, "/auth/namespaces/nowhere/rules").await),
        not_found
    );
    // Trust is not mutual.
    let token = cluster.token("ci").await;
    assert_eq!(status_and_error(&get(&cluster, &token, "/auth/namespaces/friend/rules").await), not_found);
    assert_eq!(delete(&cluster, &friend, DEPLOY).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn scoped_caller_grants_only_its_own_scopes() {
    let (cluster, admin) = with_namespace(&[]).await;
    let token = scoped_token(&cluster, "ci", &["rule.*", "artifact.*", "blob.read", "odd"]).await;
    let error_prefix = "a rule cannot grant scopes you do not hold: ";
    for (scopes, missing_scopes) in [
        (json!(["artifact.*", "artifact.read", "artifact.anything", "blob.read", "odd", "rule.write"]), ""),
        (json!(["blob.write", "artifact.read", "*", "blob.*", "blob.write"]), "*, blob.*, blob.write"),
        (json!(["node.read", "cluster-admin", "artifacts.read"]), "artifacts.read, cluster-admin, node.read"),
        (json!(["odd.read", "artifact"]), "artifact, odd.read"),
    ] {
        let body = rule_request("deploy", "forge");
        let response = post(&cluster, &token, RULES, merge(&body, &json!({ "scopes": scopes }))).await;
        if missing_scopes.is_empty() {
            assert_eq!(response.status, 200, "{}", response.text);
            continue;
        }
        let text = format!("{error_prefix}{missing_scopes}");
        assert_eq!(status_and_error(&response), (403, text.as_str()), "{scopes}");
        let response = put(&cluster, &token, DEPLOY, update_request(&json!({ "scopes": scopes }))).await;
        assert_eq!(status_and_error(&response), (403, text.as_str()), "{scopes}");
    }
    // Scopes are checked after missing fields and before malformed ones.
    let body = json!({"scopes": ["node.read", 7], "issuer": 7, "bound_claims": {}, "key_ttl": 0, "key_name_prefix": ""});
    assert_eq!(
        status_and_error(&put(&cluster, &token, DEPLOY, body.clone()).await),
        (403, &*format!("{error_prefix}node.read"))
    );
    let missing_issuer = put(&cluster, &token, DEPLOY, merge(&body, &json!({"issuer": null}))).await;
    assert_eq!(status_and_error(&missing_issuer), (400, "missing required field(s): issuer"));
    let empty = put(&cluster, &token, DEPLOY, update_request(&json!({"scopes": [""]}))).await;
    assert_eq!(status_and_error(&empty), (400, "scopes must be non-empty strings"));
    // An unscoped caller can grant any scope, including unknown ones.
    let any_scopes = json!({"scopes": ["*", "cluster-admin", "of.the.future"]});
    assert_eq!(put(&cluster, &admin, DEPLOY, update_request(&any_scopes)).await.status, 200);
    let everything = scoped_token(&cluster, "ci", &["*"]).await;
    assert_eq!(put(&cluster, &everything, DEPLOY, update_request(&any_scopes)).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_require_their_own_scopes() {
    let (cluster, _) = with_namespace(&[]).await;
    let not_scoped = (403, "token is not scoped for this operation");
    let token = scoped_token(&cluster, "ci", &["auth.*", "rule.read"]).await;
    assert_eq!(get(&cluster, &token, RULES).await.status, 200);
    assert_eq!(
        status_and_error(&post(&cluster, &token, RULES, rule_request("deploy", "forge")).await),
        not_scoped
    );
    assert_eq!(status_and_error(&put(&cluster, &token, DEPLOY, json!({})).await), not_scoped);
    assert_eq!(status_and_error(&delete(&cluster, &token, DEPLOY).await), not_scoped);
    let token = scoped_token(&cluster, "ci", &["auth.*"]).await;
    assert_eq!(status_and_error(&get(&cluster, &token, RULES).await), not_scoped);
    let token = scoped_token(&cluster, "ci", &["rule.delete"]).await;
    assert_eq!(status_and_error(&delete(&cluster, &token, DEPLOY).await), (404, "rule not found"));
}

#[tokio::test(flavor = "multi_thread")]
async fn warns_about_rules_of_system_namespace() {
    let (cluster, token) = with_namespace(&[]).await;
    let message = "mapping rule targets the system namespace";
    let created =
        post(&cluster, &token, "/auth/namespaces/system/rules", rule_request("root", "forge")).await;
    assert_eq!(created.status, 200, "{}", created.text);
    let path = "/auth/namespaces/system/rules/root";
    assert_eq!(put(&cluster, &token, path, update_request(&json!({"scopes": ["*"]}))).await.status, 200);
    let events = cluster.events(&object(&created.body)).await;
    let warnings: Vec<_> = events.iter().filter(|event| event.message == message).collect();
    assert_eq!(warnings.len(), 2, "on creation and on update");
    assert!(warnings.iter().all(|event| event.event_type == "audit" && event.extra["issuer"] == "forge"));
    assert_eq!(warnings[0].extra["scopes"], json!(["*"]));
    assert_eq!(warnings[1].extra["bound_claims"], created.body["bound_claims"]);

    let other = post(&cluster, &token, RULES, rule_request("deploy", "forge")).await.body;
    assert!(!cluster.messages(&object(&other)).await.contains(&message.to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn deletes_rules_with_namespace_and_cleans_deleted_ones() {
    let (cluster, token) = with_namespace(&[("CLEANER_DELAY", "0")]).await;
    post(&cluster, &token, RULES, rule_request("deploy", "forge")).await;
    let deleted = post(&cluster, &token, RULES, rule_request("gone", "forge")).await.body;
    delete(&cluster, &token, &format!("{RULES}/gone")).await;
    assert!(!cluster.events(&object(&deleted)).await.is_empty());
    reconcile::cleaner::run(&cluster.app).await.unwrap();
    assert_eq!(cluster.count_rows("rules", "1 = 1").await, 1);
    assert!(cluster.events(&object(&deleted)).await.is_empty());

    cluster.call(&token, Method::DELETE, "/auth/namespaces/ci", None).await;
    assert_eq!(status_and_error(&get(&cluster, &token, DEPLOY).await), (404, "namespace not found"));
    cluster.settle().await;
    assert_eq!(cluster.count_rows("rules", "state = 'created'").await, 0);
    cluster.messages(&ObjectRef::namespace("ci")).await;
    reconcile::cleaner::run(&cluster.app).await.unwrap();
    cluster.settle().await;
    assert_eq!(cluster.count_rows("rules", "1 = 1").await, 0);
    cluster.create_namespace("ci").await;
    assert_eq!(
        get(&cluster, &token, RULES).await.body,
        json!([]),
        "a new namespace of the same name has no rules"
    );
}
