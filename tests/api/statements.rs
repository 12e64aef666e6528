//! The number of SQL statements of a request, with those of its authentication: each is a round trip to MariaDB. The
//! statements of transactions count, too, including their beginning and end.

use axum::http::Method;
use muster_control::objects;
use muster_test_cluster::{Cluster, caller};
use serde_json::{Value, json};

/// The maximum number of statements of a request for one object.
const MAX_STATEMENTS: u64 = 3;
/// The maximum number of statements of a list.
const MAX_LIST_STATEMENTS: u64 = 6;

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

async fn create(cluster: &Cluster, token: &str, path: &str, body: Value) -> Value {
    let response = cluster.call(token, Method::POST, path, Some(body)).await;
    assert_eq!(response.status, 200, "{path}: {}", response.text);
    response.body
}

fn id(record: &Value) -> String {
    record["uuid"].as_str().unwrap().to_owned()
}

/// A cluster with the namespace `alpha`, which trusts `gamma`.
struct Fixture {
    cluster: Cluster,
    /// Tokens of `alpha`, `gamma` and `system`.
    own: String,
    trusted: String,
    system: String,
}

impl Fixture {
    async fn new(url: Option<&str>) -> Self {
        let cluster = Cluster::sized(url, &[], (64, 1 << 20, 1 << 12)).await;
        for name in ["alpha", "gamma"] {
            cluster.create_namespace(name).await;
        }
        objects::trust::add(&cluster.app, &caller(), "alpha", "gamma").await.unwrap();
        let own = cluster.token("alpha").await;
        let trusted = cluster.token("gamma").await;
        let system = cluster.token("system").await;
        Self { cluster, own, trusted, system }
    }

    /// Creates objects of each type in `alpha`, and returns the record of the instance.
    async fn create_objects(&self, number: u8) -> Value {
        let (cluster, own, system) = (&self.cluster, &self.own, &self.system);
        let network = json!({"netblock": format!("10.{number}.0.0/24"), "name": format!("n{number}")});
        let network = id(&create(cluster, own, "/networks", network).await);
        cluster.settle_networks().await;
        let instance = json!({
            "name": format!("i{number}"), "cpus": 1, "memory": 64,
            "disk": [{"size": 1, "base": null, "bus": null, "type": "disk"}],
            "network": [{"network_uuid": network}], "metadata": {"number": number},
        });
        let instance = create(cluster, own, "/instances", instance).await;
        create(cluster, system, "/auth/namespaces", json!({"namespace": format!("s{number}")})).await;
        let issuer = format!("issuer{number}");
        create(cluster, system, "/auth/issuers", crate::federation::issuer_request(&issuer)).await;
        let rule = crate::federation::rule_request(&format!("rule{number}"), &issuer);
        create(cluster, own, "/auth/namespaces/alpha/rules", rule).await;
        let key = json!({"key_name": format!("k{number}")});
        create(cluster, own, "/auth/namespaces/alpha/keys", key).await;
        let name = format!("artifact{number}");
        crate::artifacts::upload(cluster, own, &name, name.as_bytes()).await;
        cluster.settle().await;
        crate::agent::wait_for_agent_state(cluster, own, &id(&instance), "ready").await
    }
}

/// Checks the requests for single objects, by the owner, by a trusted namespace and by `system`.
async fn check_objects(fixture: &Fixture, instance: &Value) {
    let Fixture { cluster, own, trusted, system } = fixture;
    let interface = instance["interfaces"][0]["uuid"].as_str().unwrap().to_owned();
    let network = instance["interfaces"][0]["network_uuid"].as_str().unwrap().to_owned();
    let operation = &instance["last_cluster_operation"];
    let (operation_type, operation) = (
        operation["op_type"].as_str().unwrap().to_owned(),
        operation["op_uuid"].as_str().unwrap().to_owned(),
    );
    let instance = id(instance);
    let artifact = crate::artifacts::upload(cluster, own, "image", b"content").await;
    let blob = artifact["blob_uuid"].as_str().unwrap().to_owned();
    create(cluster, own, "/label/lab", json!({"blob_uuid": blob})).await;
    let upload = id(&cluster.call(own, Method::POST, "/upload", None).await.body);
    let execute = format!("/instances/{instance}/agent/execute");
    let agent_operation = id(&create(cluster, own, &execute, json!({"command_line": "true"})).await);
    let claim =
        json!({"limit_cpus": 1, "limit_memory_mb": 1, "limit_disk_gb": 1, "expires_in_seconds": 3600});
    let claim = id(&create(cluster, system, "/auth/namespaces/alpha/claims", claim).await);
    cluster.settle().await;
    let everyone: &[&String] = &[own, trusted, system];
    let owners: &[&String] = &[own, system];
    let mut excess = Vec::new();
    for (path, tokens) in [
        (format!("/networks/{network}"), everyone),
        (format!("/networks/{network}/metadata"), everyone),
        (format!("/networks/{network}/events"), everyone),
        ("/networks/n1".to_owned(), &[own]),
        (format!("/instances/{instance}"), everyone),
        (format!("/instances/{instance}/events"), everyone),
        (format!("/instances/{instance}/explain"), owners),
        (format!("/networks/{network}/explain"), owners),
        (format!("/clusteroperations/{operation_type}/{operation}/explain"), owners),
        ("/instances/i1".to_owned(), &[own]),
        (format!("/interfaces/{interface}"), everyone),
        (format!("/artifacts/{}", id(&artifact)), everyone),
        ("/artifacts/image".to_owned(), &[own]),
        ("/label/alpha/lab".to_owned(), everyone),
        (format!("/blobs/{blob}"), everyone),
        (format!("/blobs/{blob}/metadata"), everyone),
        (format!("/upload/{upload}"), owners),
        (format!("/clusteroperations/{operation_type}/{operation}"), owners),
        (format!("/agentoperations/{agent_operation}"), everyone),
        ("/auth/namespaces/alpha".to_owned(), everyone),
        ("/auth/namespaces/alpha/keys/k1".to_owned(), everyone),
        ("/auth/namespaces/alpha/rules/rule1".to_owned(), everyone),
        (format!("/auth/namespaces/alpha/claims/{claim}"), &[system]),
        ("/auth/issuers/issuer1".to_owned(), &[system]),
        ("/nodes/sim-1".to_owned(), &[system]),
    ] {
        for token in tokens {
            let count = statements(cluster, token, &path).await;
            if count > MAX_STATEMENTS {
                excess.push(format!("{path}: {count}"));
            }
        }
    }
    assert!(excess.is_empty(), "more than {MAX_STATEMENTS} statements:\n{}", excess.join("\n"));
}

/// Checks that lists of many objects need as many statements as lists of few.
async fn check_lists(fixture: &Fixture) {
    let lists = [
        "/networks",
        "/instances",
        "/artifacts",
        "/blobs",
        "/nodes",
        "/auth/namespaces",
        "/auth/issuers",
        "/auth/namespaces/alpha/keys",
        "/auth/namespaces/alpha/rules",
        "/auth/namespaces/alpha/claims",
        "/auth/namespaces/alpha/quotas",
        "/instances/i1/interfaces",
        "/instances/i1/agentoperations",
        "/networks/n1/interfaces",
        "/networks/n1/addresses",
        "/artifacts/artifact1/versions",
    ];
    let Fixture { cluster, own, system, .. } = fixture;
    let token = |path: &str| match path {
        "/blobs" | "/nodes" | "/auth/issuers" | "/auth/namespaces/alpha/claims" => system,
        _ => own,
    };
    for number in 2..4 {
        fixture.create_objects(number).await;
    }
    let mut before = Vec::new();
    for path in lists {
        before.push(statements(cluster, token(path), path).await);
    }
    for number in 4..31 {
        fixture.create_objects(number).await;
    }
    for (path, before) in lists.into_iter().zip(before) {
        let after = statements(cluster, token(path), path).await;
        assert!(
            after <= before && after <= MAX_LIST_STATEMENTS,
            "{path}: {before} statements for few objects, {after} for many"
        );
    }
}

async fn check(url: Option<&str>) {
    let fixture = Fixture::new(url).await;
    let instance = fixture.create_objects(1).await;
    check_objects(&fixture, &instance).await;
    check_lists(&fixture).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_need_few_statements_however_many_objects_there_are() {
    check(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_need_few_statements_on_mariadb() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    check(Some(&url)).await;
}
