//! Finding instances: by name and id, in which namespace, by whom.

use axum::http::Method;
use muster_control::objects;
use serde_json::{Value, json};

use super::{create, path, refusal, show, text, try_create};
use crate::harness::{Cluster, caller};
use crate::networks::{cluster, delete, get, network, post};

fn names(list: &Value) -> Vec<&str> {
    let mut names: Vec<&str> = list.as_array().unwrap().iter().map(|one| text(one, "name")).collect();
    names.sort_unstable();
    names
}

async fn get_in(cluster: &Cluster, token: &str, reference: &str, namespace: &str) -> crate::harness::Answer {
    let body = Some(json!({"namespace": namespace}));
    cluster.call(token, Method::GET, &format!("/instances/{reference}"), body).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_is_found_by_name_while_only_one_has_it_and_always_by_id() {
    let (cluster, token) = cluster(&[]).await;
    let first = create(&cluster, &token, "www", &json!({})).await;
    let bare = text(&first, "uuid").replace('-', "");
    for spelling in [text(&first, "uuid"), "www", &bare, &text(&first, "uuid").to_uppercase()] {
        let answer = get(&cluster, &token, &format!("/instances/{spelling}")).await;
        assert_eq!(answer.body["uuid"], first["uuid"], "{spelling}");
    }
    let second = create(&cluster, &token, "www", &json!({})).await;
    let why = "multiple instances have the name \"www\" in namespace \"ci\"";
    assert_eq!(refusal(&get(&cluster, &token, "/instances/www").await), (400, why));
    assert_eq!(refusal(&delete(&cluster, &token, "/instances/www").await), (400, why));
    delete(&cluster, &token, &path(&first, "")).await;
    cluster.settle().await;
    assert_eq!(get(&cluster, &token, "/instances/www").await.body["uuid"], second["uuid"]);
    assert_eq!(show(&cluster, &token, &first).await["state"], "deleted", "until the cleaner comes");
    for absent in ["/instances/absent", "/instances/7f1b7f9e-8d4e-4a5e-9a55-0c5d1d7f1c11"] {
        assert_eq!(refusal(&get(&cluster, &token, absent).await), (404, "instance not found"));
    }
    assert_eq!(get(&cluster, &token, "/instances").await.body.as_array().unwrap().len(), 1);
    let all = cluster.call(&token, Method::GET, "/instances", Some(json!({"all": true}))).await.body;
    assert_eq!(all.as_array().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_namespace_of_a_look_up_can_be_named() {
    let (cluster, token) = cluster(&[]).await;
    cluster.create_namespace("beta").await;
    let (beta, system) = (cluster.token("beta").await, cluster.token("system").await);
    let mine = create(&cluster, &token, "www", &json!({})).await;
    let theirs = create(&cluster, &beta, "www", &json!({})).await;
    let why = "multiple instances have the name \"www\" in namespace \"system\"";
    assert_eq!(
        refusal(&get(&cluster, &system, "/instances/www").await),
        (400, why),
        "system looks everywhere"
    );
    assert_eq!(get_in(&cluster, &system, "www", "beta").await.body["uuid"], theirs["uuid"]);
    assert_eq!(get_in(&cluster, &system, text(&mine, "uuid"), "ci").await.status, 200);
    for (who, reference, namespace) in [
        (&system, text(&mine, "uuid"), "beta"),
        (&system, "www", "absent"),
        (&token, "www", "beta"),
        (&token, text(&theirs, "uuid"), "beta"),
    ] {
        let answer = get_in(&cluster, who, reference, namespace).await;
        assert_eq!(refusal(&answer), (404, "instance not found"), "{reference} in {namespace}");
    }
    let at = path(&theirs, "");
    let wrong = cluster.call(&system, Method::DELETE, &at, Some(json!({"namespace": "ci"}))).await;
    assert_eq!(wrong.status, 404);
    let right = cluster.call(&system, Method::DELETE, &at, Some(json!({"namespace": "beta"}))).await;
    assert_eq!(right.status, 200);
    assert_eq!(
        names(&get(&cluster, &system, "/instances").await.body),
        ["www", "www"],
        "being deleted is not deleted"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn trust_reads_and_creates_and_changes_nothing() {
    let (cluster, token) = cluster(&[]).await;
    for name in ["friend", "stranger"] {
        cluster.create_namespace(name).await;
    }
    objects::trust::add(&cluster.app, &caller(), "ci", "friend").await.unwrap();
    let (friend, stranger) = (cluster.token("friend").await, cluster.token("stranger").await);
    network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    assert_eq!(get(&cluster, &friend, "/instances/www").await.body["uuid"], record["uuid"]);
    assert_eq!(names(&get(&cluster, &friend, "/instances").await.body), ["www"]);
    assert_eq!(names(&get(&cluster, &stranger, "/instances").await.body), [""; 0]);
    assert_eq!(get(&cluster, &friend, &path(&record, "/consoledata")).await.status, 200);
    for answer in [
        delete(&cluster, &friend, &path(&record, "")).await,
        post(&cluster, &friend, &path(&record, "/poweroff"), json!({})).await,
        post(&cluster, &friend, &path(&record, "/interfaces"), json!({"network_uuid": "blue"})).await,
        post(&cluster, &friend, &path(&record, "/metadata"), json!({"key": "k", "value": 1})).await,
        get(&cluster, &friend, &path(&record, "/vdiconsolehelper")).await,
        get(&cluster, &stranger, &path(&record, "")).await,
    ] {
        assert_eq!(refusal(&answer), (404, "instance not found"));
    }

    // What is made in a namespace that trusts the caller is that namespace's, and so are its networks.
    let there = json!({"namespace": "ci", "network": [{"network_uuid": "blue"}]});
    let made = create(&cluster, &friend, "gift", &there).await;
    assert_eq!(text(&made, "namespace"), "ci");
    assert_eq!(delete(&cluster, &friend, &path(&made, "")).await.status, 404);
    assert_eq!(delete(&cluster, &token, &path(&made, "")).await.status, 200);
    let refused = try_create(&cluster, &stranger, "gift", &json!({"namespace": "ci"})).await;
    assert_eq!(refusal(&refused), (404, "namespace not found"));
    let refused = try_create(&cluster, &token, "gift", &json!({"namespace": "friend"})).await;
    assert_eq!(refusal(&refused), (404, "namespace not found"), "trust has a direction");
    let own = json!({"network": [{"network_uuid": "blue"}]});
    assert_eq!(refusal(&try_create(&cluster, &friend, "own", &own).await), (404, "network blue not found"));
    let system = cluster.token("system").await;
    assert_eq!(create(&cluster, &system, "admin", &json!({"namespace": "ci"})).await["namespace"], "ci");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_with_instances_is_not_deleted_and_takes_failed_ones_along() {
    let (cluster, token) = cluster(&[]).await;
    let system = cluster.token("system").await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let refused = delete(&cluster, &system, "/auth/namespaces/ci").await;
    assert_eq!(refusal(&refused), (400, "you cannot delete a namespace with instances"));
    delete(&cluster, &token, &path(&record, "")).await;
    let refused = delete(&cluster, &system, "/auth/namespaces/ci").await;
    assert_eq!(refusal(&refused), (400, "you cannot delete a namespace with instances"), "it is still going");
    cluster.settle().await;
    let failed = try_create(&cluster, &token, "huge", &json!({"cpus": 1000})).await;
    assert_eq!(failed.status, 507, "{}", failed.text);
    assert_eq!(delete(&cluster, &system, "/auth/namespaces/ci").await.status, 200);
    cluster.settle().await;
    assert_eq!(cluster.count("instances", "state <> 'deleted'").await, 0);
    assert_eq!(show(&cluster, &system, &record).await["state"], "deleted");
}
