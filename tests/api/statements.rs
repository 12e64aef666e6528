//! The number of SQL statements of a request: each is a round trip to MariaDB.

use axum::http::Method;
use muster_test_cluster::Cluster;
use serde_json::json;

/// Returns the number of statements of a GET. Periodic tasks may add some, so the smallest of several counts.
async fn statements(cluster: &Cluster, token: &str, path: &str) -> u64 {
    let mut smallest = u64::MAX;
    for _ in 0..8 {
        let before = cluster.app.store.statement_count();
        let response = cluster.call(token, Method::GET, path, None).await;
        assert_eq!(response.status, 200, "{path}: {}", response.text);
        smallest = smallest.min(cluster.app.store.statement_count() - before);
    }
    smallest
}

async fn create(cluster: &Cluster, token: &str, path: &str, body: serde_json::Value) -> serde_json::Value {
    let response = cluster.call(token, Method::POST, path, Some(body)).await;
    assert_eq!(response.status, 200, "{path}: {}", response.text);
    response.body
}

/// Creates one object of each type and returns the id of the network and of the instance.
async fn create_objects(cluster: &Cluster, token: &str, number: u8) -> (String, String) {
    let network = json!({"netblock": format!("10.{number}.0.0/24"), "name": format!("n{number}"), "provide_nat": false});
    let network = create(cluster, token, "/networks", network).await;
    cluster.settle().await;
    let network = network["uuid"].as_str().unwrap().to_owned();
    let instance = json!({
        "name": format!("i{number}"), "cpus": 1, "memory": 64,
        "disk": [{"size": 1, "base": null, "bus": null, "type": "disk"}],
        "network": [{"network_uuid": network}], "metadata": {"number": number},
    });
    let instance = create(cluster, token, "/instances", instance).await;
    create(cluster, token, "/auth/namespaces", json!({"namespace": format!("s{number}")})).await;
    cluster.settle().await;
    (network, instance["uuid"].as_str().unwrap().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_need_few_statements_however_many_objects_there_are() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let (network, instance) = create_objects(&cluster, &token, 1).await;
    for (path, limit) in [
        (format!("/networks/{network}"), 3),
        (format!("/instances/{instance}"), 7),
        ("/nodes/sim-1".into(), 4),
        ("/auth/namespaces/s1".into(), 6),
    ] {
        let count = statements(&cluster, &token, &path).await;
        assert!(count <= limit, "{path}: {count} statements");
    }
    let lists = ["/networks", "/instances", "/nodes", "/auth/namespaces", "/artifacts", "/blobs"];
    let mut before = Vec::new();
    for path in lists {
        before.push(statements(&cluster, &token, path).await);
    }
    for number in 2..5 {
        create_objects(&cluster, &token, number).await;
    }
    for (path, before) in lists.into_iter().zip(before) {
        let after = statements(&cluster, &token, path).await;
        assert!(after <= before && after <= 9, "{path}: {before} statements, then {after}");
    }
}
