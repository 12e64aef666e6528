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
        "namespaces",
        "namespace_keys",
        "trusts",
        "namespace_claims",
        "rules",
        "issuers",
        "webhooks",
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
    let item = json!({"key": "k", "value": "v", "dry_run": true});
    let unsupported = post(&cluster, &system, "/auth/namespaces/ci/metadata", &item).await;
    assert_eq!(unsupported.status, 400, "it is not silently created");
    cluster.settle_networks().await;
}

/// Returns the creations of administration, and a field of each response.
fn administration() -> Vec<(&'static str, Value, &'static str, Value)> {
    vec![
        (
            "/auth/namespaces",
            json!({"namespace": "new", "key_name": "k", "key": "a secret"}),
            "keys",
            json!(["k"]),
        ),
        (
            "/auth/issuers",
            json!({"name": "forge", "issuer_url": "https://forge.example", "jwks_uri": "https://forge.example/keys",
                "audience": "muster"}),
            "name",
            json!("forge"),
        ),
        (
            "/auth/namespaces/ci/trust",
            json!({"external_namespace": "friend"}),
            "trust",
            json!({"full": ["system", "friend"]}),
        ),
        (
            "/auth/namespaces/ci/rules",
            json!({"name": "deploy", "issuer": "present", "bound_claims": {"repository": "example/web"},
                "scopes": ["instance.read"], "key_ttl": 900, "key_name_prefix": "deploy"}),
            "name",
            json!("deploy"),
        ),
        (
            "/auth/namespaces/ci/claims",
            json!({"limit_cpus": 1, "limit_memory_mb": 64, "limit_disk_gb": 1, "expires_in_seconds": 3600}),
            "limit_cpus",
            json!(1),
        ),
        (
            "/auth/namespaces/ci/webhooks",
            json!({"name": "chat", "url": "https://192.0.32.8/hook"}),
            "secret",
            Value::Null,
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn checks_namespaces_keys_and_their_settings() {
    let cluster = Cluster::sized(None, &[], (4, 4096, 100)).await;
    cluster.create_namespace("ci").await;
    let system = cluster.token("system").await;
    let issuer = json!({"name": "present", "issuer_url": "https://present.example", "audience": "muster",
        "jwks_uri": "https://present.example/keys"});
    assert_eq!(post(&cluster, &system, "/auth/issuers", &issuer).await.status, 200);
    let (before, events_before) = (rows(&cluster).await, events(&cluster).await);
    for (path, body, field, expected) in administration() {
        let mut dry = body.clone();
        dry["dry_run"] = json!(true);
        for _ in 0..2 {
            let response = post(&cluster, &system, path, &dry).await;
            assert_eq!(response.status, 200, "{path}: {}", response.text);
            assert_eq!(response.body[field], expected, "{path}: {}", response.text);
        }
    }
    let keys = "/auth/namespaces/ci/keys";
    let key = post(&cluster, &system, keys, &json!({"key_name": "robot", "dry_run": true})).await;
    assert_eq!((key.status.as_u16(), &key.body), (200, &json!("robot")), "without a secret");
    assert_eq!(rows(&cluster).await, before);
    assert_eq!(events(&cluster).await, events_before);

    // Everything can be created afterwards, and is then refused in both ways.
    for (path, body, ..) in administration() {
        let response = post(&cluster, &system, path, &body).await;
        assert_eq!(response.status, 200, "{path}: {}", response.text);
        if path.ends_with("/trust") {
            continue;
        }
        let mut dry = body.clone();
        dry["dry_run"] = json!(true);
        let (again, checked) =
            (post(&cluster, &system, path, &body).await, post(&cluster, &system, path, &dry).await);
        assert!((400..500).contains(&again.status.as_u16()), "{path}: {}", again.text);
        assert_eq!((checked.status, &checked.body["error"]), (again.status, &again.body["error"]), "{path}");
    }
    let supplied = json!({"key_name": "robot", "key": "the first secret"});
    assert_eq!(post(&cluster, &system, keys, &supplied).await.status, 200);
    let replacement = json!({"key_name": "robot", "key": "the other secret", "dry_run": true});
    for method in [Method::POST, Method::PUT] {
        let checked = cluster.call(&system, method, keys, Some(replacement.clone())).await;
        assert_eq!((checked.status.as_u16(), &checked.body), (200, &json!("robot")), "{}", checked.text);
    }
    for (secret, status) in [("the first secret", 200), ("the other secret", 401)] {
        let login = post(&cluster, "", "/auth", &json!({"namespace": "ci", "key": secret})).await;
        assert_eq!(login.status, status, "{secret}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn checks_an_additional_interface() {
    let cluster = Cluster::sized(None, &[], (4, 4096, 100)).await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    let network =
        post(&cluster, &token, "/networks", &json!({"name": "lan", "netblock": "10.0.0.0/24"})).await.body;
    cluster.settle_networks().await;
    let body = json!({"name": "web", "cpus": 1, "memory": 64, "disk": [{"size": 1}], "network": []});
    let instance = post(&cluster, &token, "/instances", &body).await.body;
    let path = format!("/instances/{}/interfaces", instance["uuid"].as_str().unwrap());
    let before = rows(&cluster).await;
    let dry = json!({"network_uuid": network["uuid"], "address": "10.0.0.9", "dry_run": true});
    for _ in 0..2 {
        let response = post(&cluster, &token, &path, &dry).await;
        assert_eq!(
            (response.status.as_u16(), &response.body["ipv4"]),
            (200, &json!("10.0.0.9")),
            "{}",
            response.text
        );
    }
    assert_eq!(rows(&cluster).await, before);
    let absent = json!({"network_uuid": "absent", "dry_run": true});
    assert_eq!(post(&cluster, &token, &path, &absent).await.status, 404);
    cluster.allow_unfinished_operations("the instance is being created");
}
