//! Management of trusted issuers.

use muster_control::reconcile;
use muster_test_cluster::Cluster;
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use super::{cluster, issuer_request, merge, put, rule_request, status_and_error};
use crate::networks::{delete, get, post};
use crate::scopes::scoped_token;

const ISSUERS: &str = "/auth/issuers";
const FORGE: &str = "/auth/issuers/forge";

fn object(record: &Value) -> ObjectRef {
    ObjectRef::new(ObjectType::Issuer, record["uuid"].as_str().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn creates_shows_lists_updates_and_deletes_issuer() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    assert_eq!(get(&cluster, &token, ISSUERS).await.body, json!([]));
    let created = post(&cluster, &token, ISSUERS, issuer_request("forge")).await;
    let mut expected =
        merge(&issuer_request("forge"), &json!({"state": "created", "version": 1, "metadata": {}}));
    expected["uuid"] = created.body["uuid"].clone();
    assert_eq!((created.status.as_u16(), &created.body), (200, &expected));
    post(&cluster, &token, ISSUERS, merge(&issuer_request("odd"), &json!({"name": "a / é"}))).await;
    let special_name = get(&cluster, &token, "/auth/issuers/a%20%2F%20%C3%A9").await;
    assert_eq!(special_name.body["name"], "a / é");
    assert_eq!(get(&cluster, &token, FORGE).await.body, expected);
    assert_eq!(get(&cluster, &token, ISSUERS).await.body, json!([special_name.body, expected]));

    let update =
        json!({"issuer_url": "https://new.example/", "jwks_uri": "https://new.example", "audience": "é"});
    let updated = put(&cluster, &token, FORGE, update.clone()).await;
    assert_eq!((updated.status.as_u16(), &updated.body), (200, &merge(&expected, &update)));
    assert_eq!(get(&cluster, &token, FORGE).await.body, updated.body);
    let named = put(&cluster, &token, FORGE, merge(&update, &json!({"name": "forge"}))).await;
    assert_eq!(named.status, 200, "the name may be repeated in the body");

    cluster.events(&object(&expected)).await;
    let events = get(&cluster, &token, &format!("{FORGE}/events")).await;
    assert_eq!(
        (&events.body[0]["message"], events.status.as_u16()),
        (&json!("updated trusted issuer configuration"), 200)
    );
    let deleted = delete(&cluster, &token, FORGE).await;
    assert_eq!(
        (deleted.status.as_u16(), &deleted.body),
        (200, &merge(&updated.body, &json!({"state": "deleted"})))
    );
    let not_found = (404, "issuer not found");
    assert_eq!(status_and_error(&get(&cluster, &token, FORGE).await), not_found);
    assert_eq!(status_and_error(&delete(&cluster, &token, FORGE).await), not_found);
    assert_eq!(status_and_error(&put(&cluster, &token, FORGE, update).await), not_found);
    assert_eq!(get(&cluster, &token, ISSUERS).await.body, json!([special_name.body]));

    let events = cluster.events(&object(&expected)).await;
    let recorded: Vec<_> =
        events.iter().rev().map(|event| (event.event_type.as_str(), event.message.as_str())).collect();
    let update_event = ("mutate", "updated trusted issuer configuration");
    let delete_event = ("audit", "delete issuer request from REST API");
    assert_eq!(recorded, [("audit", "db record created"), update_event, update_event, delete_event]);
    assert!(events.iter().all(|event| event.extra["keyname"] == "test" && event.request_id.is_some()));
    assert_eq!(events[1].extra["jwks_uri"], "https://new.example");
}

#[tokio::test(flavor = "multi_thread")]
async fn validates_issuer_fields_in_order() {
    let (cluster, token) = cluster(&[]).await;
    let long = "é".repeat(1025);
    let name_cases = [
        (json!({"name": null, "audience": 7}), 400, "no name specified"),
        (json!({"name": ""}), 400, "no name specified"),
        (json!({"name": 7, "issuer_url": null}), 400, "name is not a valid string"),
        (json!({"name": "x".repeat(256)}), 400, "name is not a valid string"),
        (json!({"name": "a\u{7}"}), 400, "name is not a valid string"),
        (json!({"name": ".."}), 400, "name: must not be a dot segment"),
    ];
    let field_cases = [
        (json!({"issuer_url": null, "jwks_uri": null}), 400, "no issuer_url specified"),
        (json!({"issuer_url": "", "audience": null}), 400, "no issuer_url specified"),
        (json!({"issuer_url": 7, "jwks_uri": null}), 400, "issuer_url is not a string"),
        (json!({"issuer_url": long, "jwks_uri": 7}), 422, "issuer_url cannot be longer than 1024 characters"),
        (json!({"jwks_uri": null, "audience": null}), 400, "no jwks_uri specified"),
        (json!({"jwks_uri": ["https://x"]}), 400, "jwks_uri is not a string"),
        (
            json!({"jwks_uri": format!("https://{long}")}),
            422,
            "jwks_uri cannot be longer than 1024 characters",
        ),
        (json!({"jwks_uri": "http://x", "audience": null}), 400, "no audience specified"),
        (json!({"audience": true}), 400, "audience is not a string"),
        (json!({"audience": long}), 422, "audience cannot be longer than 1024 characters"),
        // The JWKS URI is validated before conflicts are checked.
        (
            json!({"jwks_uri": "http://x", "issuer_url": "https://forge.example"}),
            400,
            "jwks_uri must be https",
        ),
        (json!({"jwks_uri": "x/keys"}), 400, "jwks_uri must be https"),
        (json!({"extra": 1}), 400, "extra: not declared by this endpoint"),
    ];
    for (changes, status, text) in name_cases.iter().chain(&field_cases) {
        let response = post(&cluster, &token, ISSUERS, merge(&issuer_request("other"), changes)).await;
        assert_eq!(status_and_error(&response), (*status, *text), "{changes}");
    }
    for (changes, status, text) in &field_cases {
        let mut body = merge(&issuer_request("other"), changes);
        body.as_object_mut().unwrap().remove("name");
        let response = put(&cluster, &token, FORGE, body).await;
        assert_eq!(status_and_error(&response), (*status, *text), "{changes}");
    }
    let contradicting = put(&cluster, &token, FORGE, issuer_request("other")).await;
    assert_eq!(
        status_and_error(&contradicting),
        (400, "name: a body key of this name overwrote the URL path parameter")
    );
    assert_eq!(get(&cluster, &token, ISSUERS).await.body.as_array().unwrap().len(), 1);
    let at_the_limit =
        json!({"name": "é".repeat(255), "issuer_url": "é".repeat(1024), "audience": "é".repeat(1024)});
    assert_eq!(
        post(&cluster, &token, ISSUERS, merge(&issuer_request("other"), &at_the_limit)).await.status,
        200
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn issuers_have_unique_names_and_urls() {
    let (cluster, token) = cluster(&[]).await;
    let url_conflict = (409, "issuer forge is already configured for https://forge.example");
    let name_conflict = (409, "issuer already exists");
    let url = json!({"issuer_url": "https://forge.example"});
    assert_eq!(
        status_and_error(&post(&cluster, &token, ISSUERS, issuer_request("forge")).await),
        name_conflict
    );
    let other_url = merge(&issuer_request("forge"), &json!({"issuer_url": "https://other.example"}));
    assert_eq!(status_and_error(&post(&cluster, &token, ISSUERS, other_url).await), name_conflict);
    assert_eq!(
        status_and_error(&post(&cluster, &token, ISSUERS, merge(&issuer_request("other"), &url)).await),
        url_conflict
    );
    // URLs are compared exactly: a trailing slash makes a different issuer.
    let with_slash = merge(&issuer_request("other"), &json!({"issuer_url": "https://forge.example/"}));
    assert_eq!(post(&cluster, &token, ISSUERS, with_slash.clone()).await.status, 200);
    let other = "/auth/issuers/other";
    assert_eq!(status_and_error(&put(&cluster, &token, other, merge(&with_slash, &url)).await), url_conflict);
    assert_eq!(
        put(&cluster, &token, other, with_slash.clone()).await.status,
        200,
        "an issuer does not conflict with itself"
    );
    assert_eq!(get(&cluster, &token, other).await.body["issuer_url"], with_slash["issuer_url"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn recreated_issuer_replaces_deleted_one_in_rules() {
    let (cluster, token) = cluster(&[("CLEANER_DELAY", "0")]).await;
    cluster.create_namespace("ci").await;
    let rules = "/auth/namespaces/ci/rules";
    let created = post(&cluster, &token, rules, rule_request("deploy", "forge")).await.body;
    let deleted = delete(&cluster, &token, FORGE).await.body;
    // The existing rule is kept; new ones cannot be created.
    assert_eq!(get(&cluster, &token, &format!("{rules}/deploy")).await.body, created);
    let refused = post(&cluster, &token, rules, rule_request("next", "forge")).await;
    assert_eq!(status_and_error(&refused), (400, "no trusted issuer named \"forge\""));

    let recreated = post(&cluster, &token, ISSUERS, issuer_request("forge")).await;
    assert_eq!(recreated.status, 200, "name and URL are free immediately: {}", recreated.text);
    assert_ne!(recreated.body["uuid"], deleted["uuid"]);
    assert_eq!(post(&cluster, &token, rules, rule_request("next", "forge")).await.status, 200);
    assert_eq!(get(&cluster, &token, &format!("{rules}/deploy")).await.body["issuer"], "forge");
    let events = cluster.events(&object(&recreated.body)).await;
    assert_eq!(events[0].message, "replaced a deleted issuer of the same name");
    assert_eq!(events[0].extra["replaced"], deleted["uuid"]);

    reconcile::cleaner::run(&cluster.app).await.unwrap();
    assert_eq!(cluster.count_rows("issuers", "1 = 1").await, 1);
    assert!(cluster.events(&object(&deleted)).await.is_empty());
    assert_eq!(get(&cluster, &token, FORGE).await.body, recreated.body);
}

#[tokio::test(flavor = "multi_thread")]
async fn cleaner_keeps_deleted_issuer_until_delay_expires() {
    let (cluster, token) = cluster(&[]).await;
    delete(&cluster, &token, FORGE).await;
    reconcile::cleaner::run(&cluster.app).await.unwrap();
    assert_eq!(cluster.count_rows("issuers", "state = 'deleted'").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_creation_for_one_url_creates_one_issuer() {
    let cluster = std::sync::Arc::new(Cluster::new().await);
    let token = cluster.token("system").await;
    let mut tasks = Vec::new();
    for n in 0..6 {
        let (cluster, token) = (std::sync::Arc::clone(&cluster), token.clone());
        let body = merge(&issuer_request(&n.to_string()), &json!({"issuer_url": "https://forge.example"}));
        tasks.push(tokio::spawn(async move { post(&cluster, &token, ISSUERS, body).await.status.as_u16() }));
    }
    let mut statuses = Vec::new();
    for task in tasks {
        statuses.push(task.await.unwrap());
    }
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 409, 409, 409, 409, 409]);
}

#[tokio::test(flavor = "multi_thread")]
async fn issuers_require_admin_and_scope() {
    let (cluster, _) = cluster(&[]).await;
    let not_scoped = (403, "token is not scoped for this operation");
    let token = scoped_token(&cluster, "system", &["issuer.read", "cluster-admin", "auth.*", "rule.*"]).await;
    assert_eq!(get(&cluster, &token, ISSUERS).await.status, 200);
    assert_eq!(status_and_error(&post(&cluster, &token, ISSUERS, issuer_request("other")).await), not_scoped);
    assert_eq!(status_and_error(&put(&cluster, &token, FORGE, issuer_request("forge")).await), not_scoped);
    assert_eq!(status_and_error(&delete(&cluster, &token, FORGE).await), not_scoped);
    let token = scoped_token(&cluster, "system", &["issuer.*"]).await;
    let not_admin = (403, "token is not scoped for administrative operations");
    assert_eq!(status_and_error(&get(&cluster, &token, ISSUERS).await), not_admin);
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    assert_eq!(status_and_error(&get(&cluster, &token, ISSUERS).await), (401, "unauthorized"));
    assert_eq!(status_and_error(&get(&cluster, &token, FORGE).await), (401, "unauthorized"));
}
