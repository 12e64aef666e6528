//! Lookup of instances by name and id across namespaces.

use axum::http::Method;
use muster_control::objects;
use muster_test_cluster::{Cluster, caller};
use serde_json::{Value, json};

use super::{create, path, show, status_and_error, text, try_create};
use crate::networks::{cluster, create_network, delete, get, post};

fn names(list: &Value) -> Vec<&str> {
    let mut names: Vec<&str> = list.as_array().unwrap().iter().map(|item| text(item, "name")).collect();
    names.sort_unstable();
    names
}

async fn get_in(
    cluster: &Cluster,
    token: &str,
    reference: &str,
    namespace: &str,
) -> muster_test_cluster::ApiResponse {
    let body = Some(json!({"namespace": namespace}));
    cluster.call(token, Method::GET, &format!("/instances/{reference}"), body).await
}

#[tokio::test(flavor = "multi_thread")]
async fn finds_instance_by_unique_name_or_id() {
    let (cluster, token) = cluster(&[]).await;
    let first = create(&cluster, &token, "www", &json!({})).await;
    let bare = text(&first, "uuid").replace('-', "");
    for spelling in [text(&first, "uuid"), "www", &bare, &text(&first, "uuid").to_uppercase()] {
        let response = get(&cluster, &token, &format!("/instances/{spelling}")).await;
        assert_eq!(response.body["uuid"], first["uuid"], "{spelling}");
    }
    let second = create(&cluster, &token, "www", &json!({})).await;
    for response in
        [get(&cluster, &token, "/instances/www").await, delete(&cluster, &token, "/instances/www").await]
    {
        let (status, error) = status_and_error(&response);
        let expected = "multiple instances have the name \"www\" in namespace \"ci\": ";
        assert!(status == 400 && error.starts_with(expected), "{error}");
        for candidate in [&first, &second] {
            let expected = format!("{} (created, ", text(candidate, "uuid"));
            assert!(error.contains(&expected) && error.contains(" s old)"), "{error}");
        }
    }
    delete(&cluster, &token, &path(&first, "")).await;
    cluster.settle().await;
    assert_eq!(get(&cluster, &token, "/instances/www").await.body["uuid"], second["uuid"]);
    assert_eq!(show(&cluster, &token, &first).await["state"], "deleted", "visible until the cleaner runs");
    for absent in ["/instances/absent", "/instances/7f1b7f9e-8d4e-4a5e-9a55-0c5d1d7f1c11"] {
        assert_eq!(status_and_error(&get(&cluster, &token, absent).await), (404, "instance not found"));
    }
    assert_eq!(get(&cluster, &token, "/instances").await.body.as_array().unwrap().len(), 1);
    let all = cluster.call(&token, Method::GET, "/instances", Some(json!({"all": true}))).await.body;
    assert_eq!(all.as_array().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_create_does_not_keep_its_name() {
    let (cluster, token) = cluster(&[]).await;
    for _ in 0..2 {
        assert_eq!(try_create(&cluster, &token, "www", &json!({"cpus": 500})).await.status, 507);
    }
    let response = get(&cluster, &token, "/instances/www").await;
    let (status, error) = status_and_error(&response);
    assert!(status == 400 && error.contains(" (error, "), "{error}");
    let instance = create(&cluster, &token, "www", &json!({})).await;
    assert_eq!(get(&cluster, &token, "/instances/www").await.body["uuid"], instance["uuid"]);
    assert_eq!(delete(&cluster, &token, "/instances/www").await.status, 200);
    cluster.settle().await;
    assert_eq!(show(&cluster, &token, &instance).await["state"], "deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn lookup_accepts_a_namespace() {
    let (cluster, token) = cluster(&[]).await;
    cluster.create_namespace("beta").await;
    let (beta, system) = (cluster.token("beta").await, cluster.token("system").await);
    let mine = create(&cluster, &token, "www", &json!({})).await;
    let theirs = create(&cluster, &beta, "www", &json!({})).await;
    let expected = "multiple instances have the name \"www\", in namespaces \"beta\", \"ci\": specify the namespace or use \
                    a UUID: ";
    let response = get(&cluster, &system, "/instances/www").await;
    let (status, error) = status_and_error(&response);
    assert!(status == 400 && error.starts_with(expected), "system searches all namespaces: {error}");
    assert_eq!(get_in(&cluster, &system, "www", "beta").await.body["uuid"], theirs["uuid"]);
    assert_eq!(get_in(&cluster, &system, text(&mine, "uuid"), "ci").await.status, 200);
    for (caller_token, reference, namespace) in [
        (&system, text(&mine, "uuid"), "beta"),
        (&system, "www", "absent"),
        (&token, "www", "beta"),
        (&token, text(&theirs, "uuid"), "beta"),
    ] {
        let response = get_in(&cluster, caller_token, reference, namespace).await;
        assert_eq!(status_and_error(&response), (404, "instance not found"), "{reference} in {namespace}");
    }
    let instance_path = path(&theirs, "");
    let wrong = cluster.call(&system, Method::DELETE, &instance_path, Some(json!({"namespace": "ci"}))).await;
    assert_eq!(wrong.status, 404);
    let right =
        cluster.call(&system, Method::DELETE, &instance_path, Some(json!({"namespace": "beta"}))).await;
    assert_eq!(right.status, 200);
    assert_eq!(
        names(&get(&cluster, &system, "/instances").await.body),
        ["www", "www"],
        "instances being deleted are listed"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn trust_allows_reading_and_creating_but_not_changing() {
    let (cluster, token) = cluster(&[]).await;
    for name in ["friend", "stranger"] {
        cluster.create_namespace(name).await;
    }
    objects::trust::add(&cluster.app, &caller(), "ci", "friend").await.unwrap();
    let (friend, stranger) = (cluster.token("friend").await, cluster.token("stranger").await);
    create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    assert_eq!(
        get(&cluster, &friend, "/instances/www").await.status,
        404,
        "names refer to the own namespace"
    );
    assert_eq!(get(&cluster, &friend, "/instances/www?namespace=ci").await.body["uuid"], record["uuid"]);
    assert_eq!(names(&get(&cluster, &friend, "/instances").await.body), ["www"]);
    assert_eq!(names(&get(&cluster, &stranger, "/instances").await.body), [""; 0]);
    assert_eq!(get(&cluster, &friend, &path(&record, "/consoledata")).await.status, 200);
    for response in [
        delete(&cluster, &friend, &path(&record, "")).await,
        post(&cluster, &friend, &path(&record, "/poweroff"), json!({})).await,
        post(&cluster, &friend, &path(&record, "/interfaces"), json!({"network_uuid": "blue"})).await,
        post(&cluster, &friend, &path(&record, "/metadata"), json!({"key": "k", "value": 1})).await,
        get(&cluster, &friend, &path(&record, "/vdiconsolehelper")).await,
        get(&cluster, &stranger, &path(&record, "")).await,
    ] {
        assert_eq!(status_and_error(&response), (404, "instance not found"));
    }

    // An instance created in a trusting namespace belongs to that namespace and uses its networks.
    let in_ci = json!({"namespace": "ci", "network": [{"network_uuid": "blue"}]});
    let created = create(&cluster, &friend, "gift", &in_ci).await;
    assert_eq!(text(&created, "namespace"), "ci");
    assert_eq!(delete(&cluster, &friend, &path(&created, "")).await.status, 404);
    assert_eq!(delete(&cluster, &token, &path(&created, "")).await.status, 200);
    let refused = try_create(&cluster, &stranger, "gift", &json!({"namespace": "ci"})).await;
    assert_eq!(status_and_error(&refused), (404, "namespace not found"));
    let refused = try_create(&cluster, &token, "gift", &json!({"namespace": "friend"})).await;
    assert_eq!(status_and_error(&refused), (404, "namespace not found"), "trust is not mutual");
    let own = json!({"network": [{"network_uuid": "blue"}]});
    assert_eq!(
        status_and_error(&try_create(&cluster, &friend, "own", &own).await),
        (404, "network blue not found")
    );
    let system = cluster.token("system").await;
    assert_eq!(create(&cluster, &system, "admin", &json!({"namespace": "ci"})).await["namespace"], "ci");
}

#[tokio::test(flavor = "multi_thread")]
async fn namespace_deletion_requires_no_instances_except_failed_ones() {
    let (cluster, token) = cluster(&[]).await;
    let system = cluster.token("system").await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let refused = delete(&cluster, &system, "/auth/namespaces/ci").await;
    assert_eq!(status_and_error(&refused), (400, "you cannot delete a namespace with instances"));
    delete(&cluster, &token, &path(&record, "")).await;
    let refused = delete(&cluster, &system, "/auth/namespaces/ci").await;
    assert_eq!(
        status_and_error(&refused),
        (400, "you cannot delete a namespace with instances"),
        "the instance is still being deleted"
    );
    cluster.settle().await;
    let failed = try_create(&cluster, &token, "huge", &json!({"cpus": 1000})).await;
    assert_eq!(failed.status, 507, "{}", failed.text);
    assert_eq!(delete(&cluster, &system, "/auth/namespaces/ci").await.status, 200);
    cluster.settle().await;
    assert_eq!(cluster.count_rows("instances", "state <> 'deleted'").await, 0);
    assert_eq!(show(&cluster, &system, &record).await["state"], "deleted");
}
