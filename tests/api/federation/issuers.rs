//! Whose tokens can be exchanged.

use muster_control::reconcile;
use muster_test_cluster::Cluster;
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use super::{cluster, issuer, put, refusal, rule, with};
use crate::networks::{delete, get, post};
use crate::scopes::scoped;

const ISSUERS: &str = "/auth/issuers";
const FORGE: &str = "/auth/issuers/forge";

fn object(record: &Value) -> ObjectRef {
    ObjectRef::new(ObjectType::Issuer, record["uuid"].as_str().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_issuer_is_created_shown_listed_changed_and_deleted() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    assert_eq!(get(&cluster, &token, ISSUERS).await.body, json!([]));
    let created = post(&cluster, &token, ISSUERS, issuer("forge")).await;
    let mut expected = with(&issuer("forge"), &json!({"state": "created", "version": 1, "metadata": {}}));
    expected["uuid"] = created.body["uuid"].clone();
    assert_eq!((created.status.as_u16(), &created.body), (200, &expected));
    post(&cluster, &token, ISSUERS, with(&issuer("odd"), &json!({"name": "a / é"}))).await;
    let odd = get(&cluster, &token, "/auth/issuers/a%20%2F%20%C3%A9").await;
    assert_eq!(odd.body["name"], "a / é");
    assert_eq!(get(&cluster, &token, FORGE).await.body, expected);
    assert_eq!(get(&cluster, &token, ISSUERS).await.body, json!([odd.body, expected]));

    let terms =
        json!({"issuer_url": "https://new.example/", "jwks_uri": "https://new.example", "audience": "é"});
    let updated = put(&cluster, &token, FORGE, terms.clone()).await;
    assert_eq!((updated.status.as_u16(), &updated.body), (200, &with(&expected, &terms)));
    assert_eq!(get(&cluster, &token, FORGE).await.body, updated.body);
    let named = put(&cluster, &token, FORGE, with(&terms, &json!({"name": "forge"}))).await;
    assert_eq!(named.status, 200, "what the path says may be said again");

    cluster.events(&object(&expected)).await;
    let events = get(&cluster, &token, &format!("{FORGE}/events")).await;
    assert_eq!(
        (&events.body[0]["message"], events.status.as_u16()),
        (&json!("updated trusted issuer configuration"), 200)
    );
    let deleted = delete(&cluster, &token, FORGE).await;
    assert_eq!(
        (deleted.status.as_u16(), &deleted.body),
        (200, &with(&updated.body, &json!({"state": "deleted"})))
    );
    let absent = (404, "issuer not found");
    assert_eq!(refusal(&get(&cluster, &token, FORGE).await), absent);
    assert_eq!(refusal(&delete(&cluster, &token, FORGE).await), absent);
    assert_eq!(refusal(&put(&cluster, &token, FORGE, terms).await), absent);
    assert_eq!(get(&cluster, &token, ISSUERS).await.body, json!([odd.body]));

    let events = cluster.events(&object(&expected)).await;
    let told: Vec<_> =
        events.iter().rev().map(|event| (event.event_type.as_str(), event.message.as_str())).collect();
    let changed = ("mutate", "updated trusted issuer configuration");
    let ended = ("audit", "delete issuer request from REST API");
    assert_eq!(told, [("audit", "db record created"), changed, changed, ended]);
    assert!(events.iter().all(|event| event.extra["keyname"] == "test" && event.request_id.is_some()));
    assert_eq!(events[1].extra["jwks_uri"], "https://new.example");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_an_issuer_is_refused_in_order() {
    let (cluster, token) = cluster(&[]).await;
    let long = "é".repeat(1025);
    let cases = [
        (json!({"name": null, "audience": 7}), 400, "no name specified"),
        (json!({"name": ""}), 400, "no name specified"),
        (json!({"name": 7, "issuer_url": null}), 400, "name is not a valid string"),
        (json!({"name": "x".repeat(256)}), 400, "name is not a valid string"),
        (json!({"name": "a\u{7}"}), 400, "name is not a valid string"),
        (json!({"name": ".."}), 400, "name: must not be a dot segment"),
    ];
    let of_fields = [
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
        // The address of the keys is looked at before what is taken.
        (
            json!({"jwks_uri": "http://x", "issuer_url": "https://forge.example"}),
            400,
            "jwks_uri must be https",
        ),
        (json!({"jwks_uri": "x/keys"}), 400, "jwks_uri must be https"),
        (json!({"extra": 1}), 400, "extra: not declared by this endpoint"),
    ];
    for (changes, status, text) in cases.iter().chain(&of_fields) {
        let answer = post(&cluster, &token, ISSUERS, with(&issuer("other"), changes)).await;
        assert_eq!(refusal(&answer), (*status, *text), "{changes}");
    }
    for (changes, status, text) in &of_fields {
        let mut body = with(&issuer("other"), changes);
        body.as_object_mut().unwrap().remove("name");
        let answer = put(&cluster, &token, FORGE, body).await;
        assert_eq!(refusal(&answer), (*status, *text), "{changes}");
    }
    let contradicting = put(&cluster, &token, FORGE, issuer("other")).await;
    assert_eq!(
        refusal(&contradicting),
        (400, "name: a body key of this name overwrote the URL path parameter")
    );
    assert_eq!(get(&cluster, &token, ISSUERS).await.body.as_array().unwrap().len(), 1);
    let at_the_limit =
        json!({"name": "é".repeat(255), "issuer_url": "é".repeat(1024), "audience": "é".repeat(1024)});
    assert_eq!(post(&cluster, &token, ISSUERS, with(&issuer("other"), &at_the_limit)).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn live_issuers_share_neither_a_name_nor_a_url() {
    let (cluster, token) = cluster(&[]).await;
    let taken = (409, "issuer forge is already configured for https://forge.example");
    let exists = (409, "issuer already exists");
    let url = json!({"issuer_url": "https://forge.example"});
    assert_eq!(refusal(&post(&cluster, &token, ISSUERS, issuer("forge")).await), exists);
    let elsewhere = with(&issuer("forge"), &json!({"issuer_url": "https://other.example"}));
    assert_eq!(refusal(&post(&cluster, &token, ISSUERS, elsewhere).await), exists);
    assert_eq!(refusal(&post(&cluster, &token, ISSUERS, with(&issuer("other"), &url)).await), taken);
    // To the letter: a slash more is another issuer.
    let slash = with(&issuer("other"), &json!({"issuer_url": "https://forge.example/"}));
    assert_eq!(post(&cluster, &token, ISSUERS, slash.clone()).await.status, 200);
    let other = "/auth/issuers/other";
    assert_eq!(refusal(&put(&cluster, &token, other, with(&slash, &url)).await), taken);
    assert_eq!(put(&cluster, &token, other, slash.clone()).await.status, 200, "its own URL is no hindrance");
    assert_eq!(get(&cluster, &token, other).await.body["issuer_url"], slash["issuer_url"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_issuer_made_again_under_its_name_is_the_one_that_rules_mean() {
    let (cluster, token) = cluster(&[("CLEANER_DELAY", "0")]).await;
    cluster.create_namespace("ci").await;
    let rules = "/auth/namespaces/ci/rules";
    let made = post(&cluster, &token, rules, rule("deploy", "forge")).await.body;
    let old = delete(&cluster, &token, FORGE).await.body;
    // The rule stays as it is; others cannot be made.
    assert_eq!(get(&cluster, &token, &format!("{rules}/deploy")).await.body, made);
    let refused = post(&cluster, &token, rules, rule("next", "forge")).await;
    assert_eq!(refusal(&refused), (400, "no trusted issuer named \"forge\""));

    let again = post(&cluster, &token, ISSUERS, issuer("forge")).await;
    assert_eq!(again.status, 200, "name and URL are free at once: {}", again.text);
    assert_ne!(again.body["uuid"], old["uuid"]);
    assert_eq!(post(&cluster, &token, rules, rule("next", "forge")).await.status, 200);
    assert_eq!(get(&cluster, &token, &format!("{rules}/deploy")).await.body["issuer"], "forge");
    let events = cluster.events(&object(&again.body)).await;
    assert_eq!(events[0].message, "replaced a deleted issuer of the same name");
    assert_eq!(events[0].extra["replaced"], old["uuid"]);

    reconcile::cleaner::run(&cluster.app).await.unwrap();
    assert_eq!(cluster.count_rows("issuers", "1 = 1").await, 1);
    assert!(cluster.events(&object(&old)).await.is_empty());
    assert_eq!(get(&cluster, &token, FORGE).await.body, again.body);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_issuer_is_removed_only_after_its_delay() {
    let (cluster, token) = cluster(&[]).await;
    delete(&cluster, &token, FORGE).await;
    reconcile::cleaner::run(&cluster.app).await.unwrap();
    assert_eq!(cluster.count_rows("issuers", "state = 'deleted'").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_issuers_for_one_url_one_is_made() {
    let cluster = std::sync::Arc::new(Cluster::new().await);
    let token = cluster.token("system").await;
    let mut tasks = Vec::new();
    for n in 0..6 {
        let (cluster, token) = (std::sync::Arc::clone(&cluster), token.clone());
        let body = with(&issuer(&n.to_string()), &json!({"issuer_url": "https://forge.example"}));
        tasks.push(tokio::spawn(async move { post(&cluster, &token, ISSUERS, body).await.status.as_u16() }));
    }
    let mut found = Vec::new();
    for task in tasks {
        found.push(task.await.unwrap());
    }
    found.sort_unstable();
    assert_eq!(found, [200, 409, 409, 409, 409, 409]);
}

#[tokio::test(flavor = "multi_thread")]
async fn issuers_are_for_administrators_with_the_scope() {
    let (cluster, _) = cluster(&[]).await;
    let not_scoped = (403, "token is not scoped for this operation");
    let token = scoped(&cluster, "system", &["issuer.read", "cluster-admin", "auth.*", "rule.*"]).await;
    assert_eq!(get(&cluster, &token, ISSUERS).await.status, 200);
    assert_eq!(refusal(&post(&cluster, &token, ISSUERS, issuer("other")).await), not_scoped);
    assert_eq!(refusal(&put(&cluster, &token, FORGE, issuer("forge")).await), not_scoped);
    assert_eq!(refusal(&delete(&cluster, &token, FORGE).await), not_scoped);
    let token = scoped(&cluster, "system", &["issuer.*"]).await;
    let not_admin = (403, "token is not scoped for administrative operations");
    assert_eq!(refusal(&get(&cluster, &token, ISSUERS).await), not_admin);
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    assert_eq!(refusal(&get(&cluster, &token, ISSUERS).await), (401, "unauthorized"));
    assert_eq!(refusal(&get(&cluster, &token, FORGE).await), (401, "unauthorized"));
}
