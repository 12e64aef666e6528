//! Rebalancing of simulated nodes, which have 48 vCPUs each.

use std::time::Duration;

use axum::http::Method;
use muster_control::objects;
use muster_node::SimulationScript;
use muster_test_cluster::{ApiResponse, Cluster, wait_for};
use muster_types::object::ObjectRef;
use serde_json::{Value, json};

use crate::instances::{create, text};

struct Rebalance {
    cluster: Cluster,
    token: String,
}

impl Rebalance {
    async fn new() -> Self {
        Self::with(&[]).await
    }

    async fn with(settings: &[(&str, &str)]) -> Self {
        let settings = [&[("CLUSTER_OP_LEASE", "1")], settings].concat();
        let cluster = Cluster::with(&settings, None).await;
        let token = cluster.token("system").await;
        Self { cluster, token }
    }

    async fn call(&self, body: Value) -> ApiResponse {
        self.cluster.call(&self.token, Method::POST, "/admin/rebalance", Some(body)).await
    }

    async fn request(&self, body: Value) -> Value {
        let response = self.call(body).await;
        assert_eq!(response.status, 200, "{}", response.text);
        response.body
    }

    /// Rebalances the cluster, and returns the plan and the operation when it has ended.
    async fn run(&self, body: Value) -> (Value, Value) {
        let plan = self.request(body).await;
        self.cluster.settle().await;
        let path = format!("/clusteroperations/node_op/{}", text(&plan["operation"], "op_uuid"));
        let operation = self.get(&path).await;
        (plan, operation)
    }

    async fn get(&self, path: &str) -> Value {
        self.cluster.call(&self.token, Method::GET, path, None).await.body
    }

    /// Creates an instance with 8 vCPUs, a sixth of a node.
    async fn create_on(&self, node: &str, name: &str, overrides: Value) -> Value {
        let mut overrides = overrides;
        overrides["placed_on"] = node.into();
        if overrides["cpus"].is_null() {
            overrides["cpus"] = 8.into();
        }
        create(&self.cluster, &self.token, name, &overrides).await
    }

    /// Creates instances with 8 vCPUs on `sim-1`.
    async fn create_many(&self, names: &[&str]) -> Vec<Value> {
        let mut created = Vec::new();
        for name in names {
            created.push(self.create_on("sim-1", name, json!({})).await);
        }
        created
    }

    /// Returns the number of vCPUs that are committed on each node.
    async fn committed_cpus(&self) -> [i64; 2] {
        let capacity = self.cluster.committed_capacity().await;
        ["sim-1", "sim-2"].map(|node| capacity.get(node).map_or(0, |(cpus, ..)| *cpus))
    }

    async fn node_of(&self, instance: &Value) -> Value {
        self.get(&format!("/instances/{}", text(instance, "uuid"))).await["node"].clone()
    }
}

fn names(plan: &Value) -> Vec<&str> {
    plan["moves"].as_array().unwrap().iter().map(|planned| text(planned, "name")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn full_node_gives_instances_to_an_empty_one() {
    let rebalance = Rebalance::new().await;
    let instances = rebalance.create_many(&["a", "b", "c", "d"]).await;
    let before = rebalance.cluster.committed_capacity().await;

    // A plan changes nothing.
    let planned = rebalance.request(json!({"dry_run": true})).await;
    assert_eq!(names(&planned).len(), 2, "{planned}");
    assert_eq!((&planned["operation"], &planned["reason"]), (&json!(null), &json!(null)), "{planned}");
    let spread = planned["spread"].as_f64().unwrap();
    assert!((spread - 2.0 / 3.0).abs() < 0.01 && planned["spread_after"] == json!(0.0), "{planned}");
    let first = &planned["moves"][0];
    assert_eq!((text(first, "source"), text(first, "target")), ("sim-1", "sim-2"), "{first}");
    assert_eq!(text(first, "reason"), "67 % of sim-1 are committed, and 0 % of sim-2");
    assert_eq!(rebalance.cluster.committed_capacity().await, before);
    assert_eq!(rebalance.cluster.count_rows("operations", "name = 'rebalance_cluster'").await, 0);

    let (plan, operation) = rebalance.run(json!({})).await;
    assert_eq!(plan["moves"], planned["moves"]);
    assert_eq!(operation["state"], "complete", "{operation}");
    assert_eq!(rebalance.committed_cpus().await, [16, 16]);
    for instance in &instances {
        let record = rebalance.get(&format!("/instances/{}", text(instance, "uuid"))).await;
        let is_moved = names(&plan).contains(&text(instance, "name"));
        let node = if is_moved { "sim-2" } else { "sim-1" };
        assert_eq!((&record["node"], &record["power_state"]), (&json!(node), &json!("on")), "{record}");
    }
    let messages = rebalance.cluster.messages(&ObjectRef::namespace("system")).await;
    assert!(messages.contains(&"rebalance request from REST API".to_owned()), "{messages:?}");

    // Nothing remains to be done, and the response says so.
    let plan = rebalance.request(json!({})).await;
    assert_eq!((&plan["moves"], &plan["operation"]), (&json!([]), &json!(null)), "{plan}");
    assert!(text(&plan, "reason").starts_with("the nodes are balanced"), "{plan}");
}

#[tokio::test(flavor = "multi_thread")]
async fn number_of_moves_is_bounded() {
    let rebalance = Rebalance::new().await;
    rebalance.create_many(&["a", "b", "c", "d"]).await;
    for invalid in [0, 101] {
        let refused = rebalance.call(json!({"max_moves": invalid})).await;
        assert_eq!(refused.status, 400, "{}", refused.text);
        assert!(refused.text.contains("max_moves"), "{}", refused.text);
    }
    let (plan, operation) = rebalance.run(json!({"max_moves": 1})).await;
    assert_eq!((names(&plan).len(), &operation["state"]), (1, &json!("complete")), "{plan}");
    assert!(plan["spread_after"].as_f64() > Some(0.2), "{plan}");
    assert_eq!(rebalance.committed_cpus().await, [24, 8]);
}

#[tokio::test(flavor = "multi_thread")]
async fn affinity_is_respected() {
    let rebalance = Rebalance::new().await;
    let near = json!({"metadata": {"tags": ["web"], "affinity": {"require_with_tag": ["db"]}}});
    let far = json!({"metadata": {"tags": ["job"], "affinity": {"require_without_tag": ["rival"]}}});
    let db = rebalance.create_on("sim-1", "db", json!({"metadata": {"tags": ["db"]}})).await;
    let web = rebalance.create_on("sim-1", "web", near).await;
    let job = rebalance.create_on("sim-1", "job", far).await;
    let rival = json!({"cpus": 1, "metadata": {"tags": ["rival"]}});
    rebalance.create_on("sim-2", "rival", rival).await;
    let plan = rebalance.request(json!({})).await;
    assert_eq!((&plan["moves"], &plan["operation"]), (&json!([]), &json!(null)), "{plan}");
    assert!(text(&plan, "reason").contains("no move of an instance improves that"), "{plan}");

    // An instance without affinity moves alone.
    let free = rebalance.create_on("sim-1", "free", json!({})).await;
    let (plan, operation) = rebalance.run(json!({})).await;
    assert_eq!((names(&plan), &operation["state"]), (vec!["free"], &json!("complete")), "{plan}");
    assert_eq!(rebalance.node_of(&free).await, "sim-2");
    for stayed in [&db, &web, &job] {
        assert_eq!(rebalance.node_of(stayed).await, "sim-1");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_of_other_namespaces_stay_free() {
    let rebalance = Rebalance::new().await;
    rebalance.create_many(&["a", "b", "c", "d"]).await;
    rebalance.cluster.create_namespace("ci").await;
    // 64 of the 96 vCPUs of the cluster are free. While an instance moves, it needs its capacity twice.
    let claim =
        json!({"limit_cpus": 60, "limit_memory_mb": 1, "limit_disk_gb": 1, "expires_in_seconds": 3600});
    let path = "/auth/namespaces/ci/claims";
    let claimed = rebalance.cluster.call(&rebalance.token, Method::POST, path, Some(claim)).await;
    assert_eq!(claimed.status, 200, "{}", claimed.text);
    let plan = rebalance.request(json!({})).await;
    assert_eq!((&plan["moves"], &plan["operation"]), (&json!([]), &json!(null)), "{plan}");
    assert!(text(&plan, "reason").contains("are claimed by other namespaces"), "{plan}");
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_that_cannot_be_migrated_live_stay() {
    let rebalance = Rebalance::new().await;
    let instances = rebalance.create_many(&["off"]).await;
    rebalance.create_on("sim-1", "slow", json!({"disk": [{"size": 1, "bus": "nvme"}]})).await;
    let path = format!("/instances/{}/poweroff", text(&instances[0], "uuid"));
    let off = rebalance.cluster.call(&rebalance.token, Method::POST, &path, Some(json!({}))).await;
    assert_eq!(off.status, 200, "{}", off.text);
    let plan = rebalance.request(json!({})).await;
    assert_eq!(plan["moves"], json!([]), "{plan}");
    let live = rebalance.create_on("sim-1", "live", json!({})).await;
    let (plan, operation) = rebalance.run(json!({})).await;
    assert_eq!((names(&plan), &operation["state"]), (vec!["live"], &json!("complete")), "{plan}");
    assert_eq!(rebalance.node_of(&live).await, "sim-2");
}

#[tokio::test(flavor = "multi_thread")]
async fn cordoned_node_takes_no_instance() {
    let rebalance = Rebalance::new().await;
    rebalance.create_many(&["a", "b", "c", "d"]).await;
    let cordon = async |request: &str| {
        let path = format!("/nodes/sim-2/{request}");
        let response = rebalance.cluster.call(&rebalance.token, Method::POST, &path, Some(json!({}))).await;
        assert_eq!(response.status, 200, "{}", response.text);
    };
    cordon("maintenance").await;
    let plan = rebalance.request(json!({})).await;
    assert_eq!((&plan["moves"], plan["nodes"].as_array().unwrap().len()), (&json!([]), 1), "{plan}");
    assert_eq!(text(&plan, "reason"), "fewer than two nodes can take instances");
    cordon("undrain").await;

    // A cordon after the request stops what has not started.
    let plan = rebalance.request(json!({})).await;
    assert_eq!(names(&plan).len(), 2, "{plan}");
    cordon("maintenance").await;
    rebalance.cluster.settle().await;
    let path = format!("/clusteroperations/node_op/{}", text(&plan["operation"], "op_uuid"));
    assert_eq!(rebalance.get(&path).await["state"], "complete");
    assert_eq!(rebalance.committed_cpus().await, [32, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_rebalancing_runs_at_a_time_and_a_failed_migration_is_reported() {
    let rebalance = Rebalance::new().await;
    let instances = rebalance.create_many(&["a", "b"]).await;
    let migration_duration = Duration::from_secs(60);
    rebalance.cluster.node.set_script(SimulationScript { migration_duration, ..SimulationScript::default() });
    let plan = rebalance.request(json!({})).await;
    assert_eq!(names(&plan).len(), 1, "{plan}");
    let refused = rebalance.call(json!({})).await;
    assert_eq!(refused.status, 409, "{}", refused.text);
    assert!(refused.text.contains("is being rebalanced"), "{}", refused.text);
    let moved = text(&plan["moves"][0], "instance_uuid");
    let cancel = async {
        wait_for("the instance to be migrated", async || {
            let path = format!("/clusteroperations?target_object_type=instance&target_uuid={moved}");
            let operations = rebalance.get(&path).await;
            operations.as_array()?.iter().find_map(|item| item["progress"]["total"].as_i64())
        })
        .await;
        // A migration in progress counts as complete.
        let plan = rebalance.request(json!({"dry_run": true})).await;
        assert_eq!((&plan["moves"], &plan["spread"]), (&json!([]), &json!(0.0)), "{plan}");
        let path = format!("/instances/{moved}/migrate/cancel");
        let response = rebalance.cluster.call(&rebalance.token, Method::POST, &path, Some(json!({}))).await;
        assert!(response.status.is_success(), "{}", response.text);
    };
    tokio::join!(rebalance.cluster.settle(), cancel);
    let path = format!("/clusteroperations/node_op/{}", text(&plan["operation"], "op_uuid"));
    let operation = rebalance.get(&path).await;
    assert_eq!(operation["state"], "error", "{operation}");
    let message = text(&operation["error_report"], "message");
    assert!(message.contains("1 instances stay on their node"), "{message}");
    for instance in &instances {
        assert_eq!(rebalance.node_of(instance).await, "sim-1");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn periodic_rebalancing_needs_its_setting() {
    let rebalance = Rebalance::new().await;
    rebalance.create_many(&["a", "b"]).await;
    objects::rebalance::run_periodically(&rebalance.cluster.app).await.unwrap();
    rebalance.cluster.settle().await;
    assert_eq!(rebalance.committed_cpus().await, [16, 0]);

    let rebalance = Rebalance::with(&[("REBALANCE_INTERVAL", "3600")]).await;
    rebalance.create_many(&["a", "b"]).await;
    let run = async || objects::rebalance::run_periodically(&rebalance.cluster.app).await.unwrap();
    run().await;
    // An unfinished rebalancing is not repeated.
    run().await;
    rebalance.cluster.settle().await;
    assert_eq!(rebalance.committed_cpus().await, [8, 8]);
    run().await;
    assert_eq!(rebalance.cluster.count_rows("operations", "name = 'rebalance_cluster'").await, 1);
    let messages = rebalance.cluster.messages(&ObjectRef::namespace("system")).await;
    assert!(messages.contains(&"periodic rebalancing of the cluster".to_owned()), "{messages:?}");
}
