//! `dry_run`: creations that are only checked.

use axum::http::Method;
use muster_store::Read as _;
use muster_test_cluster::{ApiResponse, Cluster};
use serde_json::{Value, json};

async fn post(cluster: &Cluster, token: &str, path: &str, body: &Value) -> ApiResponse {
    cluster.call(token, Method::POST, path, Some(body.clone())).await
}

/// Returns the number of rows of the tables that creations write to.
async fn rows(cluster: &Cluster) -> Vec<i64> {
    let mut counts = Vec::new();
    for table in [
        "networks",
        "instances",
        "artifacts",
        "operations",
        "interfaces",
        "addresses",
        "hardware_addresses",
        "metadata",
        "object_references",
        "node_claims",
    ] {
        let sql = format!("SELECT COUNT(*) FROM {table}");
        counts.push((&*cluster.app.store).fetch_one(&sql, &[]).await.unwrap());
    }
    counts
}

/// Returns the number of events, except those of API requests and of the caller's token.
async fn events(cluster: &Cluster) -> i64 {
    muster_test_cluster::wait_for("events to be drained", async || {
        (cluster.app.events.depth() == 0).then_some(())
    })
    .await;
    let sql = "SELECT COUNT(*) FROM event_links WHERE object_type NOT IN ('api-requests', 'namespace')";
    (&*cluster.app.store).fetch_one(sql, &[]).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn returns_what_would_be_created_and_writes_nothing() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    let network = json!({"name": "n", "netblock": "10.0.0.0/24"});
    let id = post(&cluster, &token, "/networks", &network).await.body["uuid"].clone();
    cluster.settle_networks().await;
    let (before, events_before) = (rows(&cluster).await, events(&cluster).await);
    let instance = json!({
        "name": "web", "cpus": 1, "memory": 512, "disk": [{"size": 1}], "metadata": {"tags": ["a"]},
        "network": [{"network_uuid": id, "address": "10.0.0.5", "float": true}],
    });
    for (path, body) in [
        ("/networks", network.clone()),
        ("/instances", instance.clone()),
        ("/artifacts", json!({"url": "https://images.invalid/image.qcow2"})),
    ] {
        let mut dry = body.clone();
        dry["dry_run"] = json!(true);
        for _ in 0..2 {
            let response = post(&cluster, &token, path, &dry).await;
            assert_eq!(response.status, 200, "{path}: {}", response.text);
            let record = &response.body;
            assert_eq!(
                (&record["namespace"], &record["last_cluster_operation"]),
                (&json!("ci"), &Value::Null)
            );
            let absent = format!("{path}/{}", record["uuid"].as_str().unwrap());
            assert_eq!(cluster.call(&token, Method::GET, &absent, None).await.status, 404, "{path}");
            if path == "/instances" {
                assert!(record["node"].is_string(), "it was placed: {record}");
                assert_eq!(record["metadata"], body["metadata"]);
                assert_eq!(record["interfaces"][0]["ipv4"], "10.0.0.5");
                assert!(record["interfaces"][0]["floating"].is_string());
            }
        }
    }
    assert_eq!(rows(&cluster).await, before);
    assert_eq!(events(&cluster).await, events_before);
    // The address and the capacity are still free.
    let created = post(&cluster, &token, "/instances", &instance).await;
    assert_eq!(created.status, 200, "{}", created.text);
    cluster.allow_unfinished_operations("the instance is being created");
}

#[tokio::test(flavor = "multi_thread")]
async fn fails_as_the_creation_would() {
    let cluster = Cluster::sized(None, &[], (4, 4096, 100)).await;
    cluster.create_namespace("ci").await;
    let (system, token) = (cluster.token("system").await, cluster.token("ci").await);
    let before = rows(&cluster).await;
    for (path, body, status) in [
        ("/networks", json!({"name": "n", "netblock": "10.0.0.0"}), 400),
        ("/networks", json!({"name": "n", "netblock": "10.0.0.0/24", "namespace": "system"}), 401),
        ("/instances", json!({"name": "web", "cpus": 1, "memory": 512}), 400),
        ("/instances", json!({"name": "web", "cpus": 1, "memory": 1 << 24, "disk": [{"size": 1}]}), 507),
        (
            "/instances",
            json!({"name": "w", "cpus": 1, "memory": 1, "disk": [{"size": 1}], "namespace": "system"}),
            404,
        ),
        ("/artifacts", json!({"url": "ftp://192.0.2.1/image"}), 400),
    ] {
        let mut dry = body.clone();
        dry["dry_run"] = json!(true);
        let response = post(&cluster, &token, path, &dry).await;
        assert_eq!(response.status, status, "{path} {body}: {}", response.text);
        assert!(response.body.get("instance_uuid").is_none(), "no failed instance is kept");
    }
    assert_eq!(rows(&cluster).await, before);
    let quota = "/auth/namespaces/ci/quotas/networks";
    cluster.call(&system, Method::PUT, quota, Some(json!({"limit": 1}))).await;
    let network = |dry_run: bool| json!({"name": "n", "netblock": "10.0.0.0/24", "dry_run": dry_run});
    assert_eq!(post(&cluster, &token, "/networks", &network(true)).await.status, 200);
    assert_eq!(post(&cluster, &token, "/networks", &network(false)).await.status, 200);
    let exceeded = post(&cluster, &token, "/networks", &network(true)).await;
    assert_eq!(exceeded.status, 403, "{}", exceeded.text);
    let invalid = post(&cluster, &token, "/networks", &json!({"dry_run": "maybe"})).await;
    assert_eq!(
        (invalid.status.as_u16(), invalid.text.contains("dry_run: Not a valid boolean.")),
        (400, true)
    );
    let unsupported =
        post(&cluster, &system, "/auth/namespaces", &json!({"namespace": "x", "dry_run": true})).await;
    assert_eq!(unsupported.status, 400, "it is not silently created");
    cluster.settle_networks().await;
}
