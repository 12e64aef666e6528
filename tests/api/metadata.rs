//! Metadata of the objects that have no other tests of it.

use axum::http::Method;
use muster_control::reconcile;
use muster_test_cluster::{Cluster, caller};
use serde_json::{Value, json};

use crate::federation::{issuer_request, rule_request};
use crate::instances::{create, text};
use crate::networks::{cluster, create_network, delete, get, post};

/// Sets keys of an object, compares them with its record, and deletes one.
async fn check_metadata(cluster: &Cluster, token: &str, path: &str) {
    let metadata = format!("{path}/metadata");
    let values = json!({"zero": 0, "no": false, "text": "", "list": [], "map": {}, "null": null,
        "deep": {"a": [null]}});
    for (key, value) in values.as_object().unwrap() {
        let item = Some(json!({"value": value}));
        let response = cluster.call(token, Method::PUT, &format!("{metadata}/{key}"), item).await;
        assert_eq!((response.status.as_u16(), response.text.as_str()), (200, "null\n"), "{path} {key}");
    }
    let absent = cluster.call(token, Method::PUT, &format!("{metadata}/zero"), Some(json!({}))).await;
    assert_eq!(
        (absent.status.as_u16(), &absent.body["error"]),
        (400, &json!("no value specified")),
        "{path}"
    );
    assert_eq!(get(cluster, token, &metadata).await.body, values, "{path}");
    assert_eq!(get(cluster, token, path).await.body["metadata"], values, "{path}");
    let posted = post(cluster, token, &metadata, json!({"key": "more", "value": 0.5})).await;
    assert_eq!(posted.status, 200, "{}", posted.text);
    assert_eq!(delete(cluster, token, &format!("{metadata}/deep")).await.status, 200);
    let left: Value = get(cluster, token, &metadata).await.body;
    assert!(left.get("deep").is_none() && left["more"] == 0.5, "{left}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_object_has_metadata_until_it_is_removed() {
    let (cluster, token) = cluster(&[("CLEANER_DELAY", "0")]).await;
    let system = cluster.token("system").await;
    cluster.key(&caller(), "ci", "robot").await;
    assert_eq!(post(&cluster, &system, "/auth/issuers", issuer_request("forge")).await.status, 200);
    let rules = "/auth/namespaces/ci/rules";
    assert_eq!(post(&cluster, &token, rules, rule_request("deploy", "forge")).await.status, 200);
    let limits =
        json!({"limit_cpus": 1, "limit_memory_mb": 1, "limit_disk_gb": 1, "expires_in_seconds": 3600});
    let claim = post(&cluster, &system, "/auth/namespaces/ci/claims", limits).await.body;
    let claim = format!("/auth/namespaces/ci/claims/{}", text(&claim, "uuid"));
    let upload = cluster.call(&token, Method::POST, "/upload", None).await.body;
    let upload = format!("/upload/{}", text(&upload, "uuid"));
    let network = create_network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/24"})).await;
    let operations = get(&cluster, &token, &format!("/networks/{network}/clusteroperations")).await.body;
    let operation = format!("/clusteroperations/net_op/{}", text(&operations[0], "uuid"));
    let instance = create(&cluster, &token, "www", &json!({})).await;
    let instance = format!("/instances/{}", text(&instance, "uuid"));
    let execute = json!({"command_line": "true"});
    let started = post(&cluster, &token, &format!("{instance}/agent/execute"), execute).await.body;
    let agent_operation = format!("/agentoperations/{}", text(&started, "uuid"));

    let (key, rule) = ("/auth/namespaces/ci/keys/robot", "/auth/namespaces/ci/rules/deploy");
    for (token, path) in [
        (&system, "/auth/issuers/forge"),
        (&token, rule),
        (&token, key),
        (&system, &claim),
        (&token, &upload),
        (&token, &operation),
        (&token, &agent_operation),
    ] {
        check_metadata(&cluster, token, path).await;
    }
    let listed = get(&cluster, &token, rules).await.body;
    assert_eq!(listed[0]["metadata"]["more"], 0.5, "{listed}");

    // A new key of the same name does not get the metadata of the deleted one.
    assert_eq!(delete(&cluster, &token, key).await.status, 200);
    cluster.key(&caller(), "ci", "robot").await;
    assert_eq!(get(&cluster, &token, key).await.body["metadata"], json!({}));

    for (token, path) in [(&system, "/auth/issuers/forge"), (&token, rule), (&token, key), (&system, &claim)]
    {
        assert_eq!(delete(&cluster, token, path).await.status, 200, "{path}");
    }
    assert_eq!(cluster.count_rows("metadata", "object_type = 'namespace_claim'").await, 0);
    let artifact = json!({"upload_uuid": upload.trim_start_matches("/upload/")});
    let sent = cluster.send(&token, Method::POST, &upload, b"content".to_vec()).await;
    assert_eq!(sent.status, 200, "{}", sent.text);
    assert_eq!(post(&cluster, &token, "/artifacts/upload/x", artifact).await.status, 200);
    assert_eq!(delete(&cluster, &token, &agent_operation).await.status, 200);
    for path in [instance.as_str(), &format!("/networks/{network}")] {
        delete(&cluster, &token, path).await;
    }
    cluster.settle().await;
    reconcile::storage::run_once(&cluster.app).await.unwrap();
    while reconcile::cleaner::run(&cluster.app).await.unwrap() {}
    cluster.settle().await;
    assert_eq!(cluster.count_rows("metadata", "1 = 1").await, 0);
}
