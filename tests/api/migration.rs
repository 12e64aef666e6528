//! Migration between simulated nodes.

use std::time::Duration;

use axum::http::Method;
use muster_control::reconcile;
use muster_node::SimulationScript;
use muster_test_cluster::{ApiResponse, Cluster, wait_for};
use muster_types::ids::InstanceId;
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use crate::instances::{create, text};

/// A cluster with an instance on `sim-1`.
struct Migration {
    cluster: Cluster,
    token: String,
    instance: Value,
}

impl Migration {
    async fn new() -> Self {
        let cluster =
            Cluster::with(&[("BLOB_REPLICATION_FACTOR", "2"), ("CLUSTER_OP_LEASE", "1")], None).await;
        let token = cluster.token("system").await;
        let network = json!({"name": "blue", "netblock": "10.0.0.0/24"});
        let created = cluster.call(&token, Method::POST, "/networks", Some(network)).await;
        assert_eq!(created.status, 200, "{}", created.text);
        cluster.settle().await;
        let overrides = json!({"placed_on": "sim-1", "network": [{"network_uuid": "blue"}]});
        let instance = create(&cluster, &token, "web", &overrides).await;
        Self { cluster, token, instance }
    }

    fn id(&self) -> InstanceId {
        text(&self.instance, "uuid").parse().unwrap()
    }

    async fn post(&self, call: &str, body: Value) -> ApiResponse {
        let path = format!("/instances/{}{call}", self.id());
        self.cluster.call(&self.token, Method::POST, &path, Some(body)).await
    }

    /// Requests a migration, and returns the path of its operation.
    async fn request(&self, body: Value) -> String {
        let response = self.post("/migrate", body).await;
        assert_eq!(response.status, 202, "{}", response.text);
        format!("/clusteroperations/node_inst_op/{}", text(&response.body, "uuid"))
    }

    async fn get(&self, path: &str) -> Value {
        self.cluster.call(&self.token, Method::GET, path, None).await.body
    }

    async fn show(&self) -> Value {
        self.get(&format!("/instances/{}", self.id())).await
    }

    /// Returns whether the plan of the network has a port for the instance, on each node.
    fn ports(&self) -> [bool; 2] {
        [&self.cluster.node, &self.cluster.other]
            .map(|node| node.network_plans().iter().any(|plan| !plan.ports.is_empty()))
    }

    async fn messages(&self) -> Vec<String> {
        self.cluster.messages(&ObjectRef::new(ObjectType::Instance, self.id())).await
    }

    /// Asserts that the instance is on its first node, and nothing of it on the other.
    async fn assert_unchanged(&self) {
        let record = self.show().await;
        for field in ["node", "generation", "power_state", "interfaces", "console_port", "agent_state"] {
            assert_eq!(record[field], self.instance[field], "{field}");
        }
        reconcile::vms::run_once(&self.cluster.app).await.unwrap();
        assert_eq!((self.cluster.node.vm_ids(), self.cluster.other.vm_ids()), (vec![self.id()], vec![]));
        let capacity = self.cluster.committed_capacity().await;
        assert_eq!(
            (capacity["sim-1"], capacity.get("sim-2").copied().unwrap_or_default()),
            ((1, 512, 1), (0, 0, 0))
        );
        assert_eq!(self.cluster.count_rows("instance_migrations", "1 = 1").await, 0);
        assert_eq!(self.cluster.count_rows("instance_ports", "1 = 1").await, 3);
        wait_for("the network to be removed from the target", async || {
            (self.ports() == [true, false]).then_some(())
        })
        .await;
    }

    /// Updates one row of the database.
    async fn update(&self, sql: &'static str, values: &[muster_store::Value]) {
        let mut tx = self.cluster.app.store.begin().await.unwrap();
        let updated = tx.execute(sql, values).await.unwrap();
        assert_eq!(updated, 1);
        tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
    }

    /// Changes the version of QEMU that a node has reported.
    async fn report_qemu_version(&self, node: &str, version: &str) {
        let sql = "UPDATE nodes SET report = REPLACE(report, '\"accelerator\"', ?) WHERE name = ?";
        let version = format!("\"qemu_version\":\"{version}\",\"accelerator\"");
        self.update(sql, &[version.into(), node.into()]).await;
    }

    fn set_script(&self, migration_duration: Duration, migration_error: Option<&str>) {
        let migration_error = migration_error.map(str::to_owned);
        self.cluster.node.set_script(SimulationScript {
            migration_duration,
            migration_error,
            ..SimulationScript::default()
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn instance_moves_with_its_capacity_ports_and_networks() {
    let migration = Migration::new().await;
    let operation = migration.request(json!({"target": "sim-2", "downtime_limit_ms": 100})).await;
    wait_for("the network to be on both nodes", async || (migration.ports() == [true, true]).then_some(()))
        .await;
    let capacity = migration.cluster.committed_capacity().await;
    assert_eq!((capacity["sim-1"], capacity["sim-2"]), ((1, 512, 1), (1, 512, 1)), "reserved on both");
    for (call, body) in
        [("/migrate", json!({})), ("/snapshot", json!({})), ("/interfaces", json!({"network_uuid": "blue"}))]
    {
        let refused = migration.post(call, body).await;
        assert_eq!(refused.status, 409, "{call}: {}", refused.text);
        assert!(refused.text.contains("is being migrated"), "{}", refused.text);
    }
    migration.cluster.settle().await;
    assert_eq!(migration.get(&operation).await["state"], "complete");
    let record = migration.show().await;
    assert_eq!((&record["node"], &record["generation"]), (&json!("sim-2"), &json!(2)), "{record}");
    for field in ["uuid", "name", "power_state", "interfaces", "disks"] {
        assert_eq!(record[field], migration.instance[field], "{field}");
    }
    let (cluster, id) = (&migration.cluster, migration.id());
    assert_eq!((cluster.node.vm_ids(), cluster.other.vm_ids()), (vec![], vec![id]));
    let plan = cluster.other.vm_plan(id).unwrap();
    assert_eq!((plan.generation, json!(plan.ports.console)), (2, record["console_port"].clone()));
    let capacity = cluster.committed_capacity().await;
    assert_eq!((capacity["sim-1"], capacity["sim-2"]), ((0, 0, 0), (1, 512, 1)));
    assert_eq!(cluster.count_rows("instance_ports", "1 = 1").await, 3);
    wait_for("the network to be only on the target", async || {
        (migration.ports() == [false, true]).then_some(())
    })
    .await;
    wait_for("the agent to be ready", async || {
        (migration.show().await["agent_state"] == "ready").then_some(())
    })
    .await;
    let messages = migration.messages().await;
    for message in [
        "migration request from REST API",
        "moved to the target of its migration",
        "migrated to another node",
    ] {
        assert!(messages.contains(&message.to_owned()), "{message}: {messages:?}");
    }
    reconcile::vms::run_once(&cluster.app).await.unwrap();
    assert_eq!(cluster.other.vm_ids(), [id]);
}

#[tokio::test(flavor = "multi_thread")]
async fn instance_can_be_migrated_as_soon_as_it_is_created() {
    let migration = Migration::new().await;
    // The creation is not marked as finished yet.
    let sql = "UPDATE operations SET state = ?, lease_expires = ? WHERE name = 'create_instance'";
    migration.update(sql, &["executing".into(), (muster_types::time::now() + 3600.0).into()]).await;
    migration.request(json!({})).await;
    migration.update(sql, &["complete".into(), 0.0.into()]).await;
    migration.cluster.settle().await;
    assert_eq!(migration.show().await["node"], "sim-2");
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_migration_changes_nothing() {
    let migration = Migration::new().await;
    migration.set_script(Duration::ZERO, Some("the cable is unplugged"));
    let operation = migration.request(json!({})).await;
    migration.cluster.settle().await;
    let ended = migration.get(&operation).await;
    assert_eq!(ended["state"], "error", "{ended}");
    assert!(text(&ended["error_report"], "message").contains("the cable is unplugged"), "{ended}");
    migration.assert_unchanged().await;
    let messages = migration.messages().await;
    assert!(
        messages.contains(&"migration failed, the instance stays on its node".to_owned()),
        "{messages:?}"
    );
    // The next one uses another generation.
    migration.set_script(Duration::ZERO, None);
    migration.request(json!({})).await;
    migration.cluster.settle().await;
    let record = migration.show().await;
    assert_eq!((&record["node"], &record["generation"]), (&json!("sim-2"), &json!(3)), "{record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn migration_can_be_cancelled_until_the_instance_moves() {
    let migration = Migration::new().await;
    let refused = migration.post("/migrate/cancel", json!({})).await;
    assert_eq!(refused.status, 409, "{}", refused.text);
    migration.set_script(Duration::from_secs(60), None);
    let operation = migration.request(json!({})).await;
    let cancel = async {
        wait_for("the migration to copy", async || {
            migration.get(&operation).await["progress"]["total"].as_i64()
        })
        .await;
        let cancelled = migration.post("/migrate/cancel", json!({})).await;
        assert_eq!(cancelled.status, 200, "{}", cancelled.text);
    };
    tokio::join!(migration.cluster.settle(), cancel);
    let ended = migration.get(&operation).await;
    assert!(text(&ended["error_report"], "message").contains("cancelled"), "{ended}");
    migration.assert_unchanged().await;
    // A migration that has not begun is cancelled, too.
    let operation = migration.request(json!({})).await;
    migration.post("/migrate/cancel", json!({})).await;
    migration.cluster.settle().await;
    assert_eq!(migration.get(&operation).await["state"], "abort");
    migration.assert_unchanged().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn crash_or_deletion_during_migration_ends_it() {
    let migration = Migration::new().await;
    migration.set_script(Duration::from_secs(60), None);
    let operation = migration.request(json!({})).await;
    let delete = async {
        wait_for("the migration to copy", async || {
            migration.get(&operation).await["progress"]["total"].as_i64()
        })
        .await;
        let path = format!("/instances/{}", migration.id());
        let deleted = migration.cluster.call(&migration.token, Method::DELETE, &path, None).await;
        assert!(deleted.status.is_success(), "{}", deleted.text);
        migration.cluster.node.crash(migration.id(), "it was killed");
    };
    tokio::join!(migration.cluster.settle(), delete);
    let record = migration.show().await;
    assert_eq!(record["state"], "deleted", "{record}");
    reconcile::vms::run_once(&migration.cluster.app).await.unwrap();
    assert!(migration.cluster.vms().is_empty());
    assert!(migration.cluster.committed_capacity().await.values().all(|used| *used == (0, 0, 0)));
    assert_eq!(migration.cluster.count_rows("instance_ports", "1 = 1").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn migration_without_operation_is_ended() {
    let migration = Migration::new().await;
    migration.request(json!({})).await;
    let mut tx = migration.cluster.app.store.begin().await.unwrap();
    tx.execute("DELETE FROM operations WHERE state = 'queued'", &[]).await.unwrap();
    tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
    reconcile::instance_watch::run(&migration.cluster.app).await.unwrap();
    migration.assert_unchanged().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_what_cannot_be_migrated() {
    let migration = Migration::new().await;
    let cases = [
        (json!({"target": "sim-1"}), 409, "is on node sim-1 already"),
        (json!({"target": "nowhere"}), 404, "node"),
        (json!({"downtime_limit_ms": 0}), 400, "downtime_limit_ms"),
        (json!({"bandwidth_limit_mbps": 0}), 400, "bandwidth_limit_mbps"),
    ];
    for (body, status, reason) in cases {
        let refused = migration.post("/migrate", body.clone()).await;
        assert_eq!(refused.status, status, "{body}: {}", refused.text);
        assert!(refused.text.contains(reason), "{body}: {}", refused.text);
    }
    migration.cluster.lose_node("sim-2").await;
    let refused = migration.post("/migrate", json!({})).await;
    assert!(!refused.status.is_success(), "{}", refused.text);
    reconcile::checkin::join(&migration.cluster.app).await.unwrap();
    // QEMU of another version has other devices, unless only the minor release differs.
    migration.report_qemu_version("sim-1", "10.0.2").await;
    migration.report_qemu_version("sim-2", "9.2.1").await;
    for body in [json!({}), json!({"target": "sim-2"})] {
        let refused = migration.post("/migrate", body).await;
        assert_eq!(refused.status, 409, "{}", refused.text);
        for part in ["node sim-1 has QEMU 10.0.2", "node sim-2 has QEMU 9.2.1", "--stop"] {
            assert!(refused.text.contains(part), "{part}: {}", refused.text);
        }
    }
    assert_eq!(migration.cluster.count_rows("instance_migrations", "1 = 1").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn instance_that_is_off_moves_and_stays_off() {
    let migration = Migration::new().await;
    assert!(migration.post("/poweroff", json!({})).await.status.is_success());
    let operation = migration.request(json!({})).await;
    let refused = migration.post("/poweron", json!({})).await;
    assert_eq!(refused.status, 409, "{}", refused.text);
    assert!(refused.text.contains("is being migrated"), "{}", refused.text);
    migration.cluster.settle().await;
    assert_eq!(migration.get(&operation).await["state"], "complete");
    let record = migration.show().await;
    assert_eq!((&record["node"], &record["power_state"]), (&json!("sim-2"), &json!("off")), "{record}");
    let (cluster, id) = (&migration.cluster, migration.id());
    assert_eq!((cluster.node.vm_ids(), cluster.other.vm_ids()), (vec![], vec![id]));
    reconcile::vms::run_once(&cluster.app).await.unwrap();
    assert!(migration.post("/poweron", json!({})).await.status.is_success());
    assert_eq!(migration.show().await["power_state"], "on");
}

#[tokio::test(flavor = "multi_thread")]
async fn instance_is_powered_off_and_started_on_the_target_by_request() {
    let migration = Migration::new().await;
    let cluster = &migration.cluster;
    migration.report_qemu_version("sim-1", "10.0.2").await;
    migration.report_qemu_version("sim-2", "9.2.1").await;
    let operation = migration.request(json!({"stop": true})).await;
    cluster.settle().await;
    assert_eq!(migration.get(&operation).await["state"], "complete");
    let record = migration.show().await;
    assert_eq!((&record["node"], &record["power_state"]), (&json!("sim-2"), &json!("on")), "{record}");
    assert_eq!((cluster.node.vm_ids(), cluster.other.vm_ids()), (vec![], vec![migration.id()]));

    // After a failure it is started where it was.
    let migration_error = Some("the cable is unplugged".to_owned());
    cluster.other.set_script(SimulationScript { migration_error, ..SimulationScript::default() });
    let operation = migration.request(json!({"stop": true})).await;
    cluster.settle().await;
    assert_eq!(migration.get(&operation).await["state"], "error");
    let record = migration.show().await;
    assert_eq!((&record["node"], &record["power_state"]), (&json!("sim-2"), &json!("on")), "{record}");
    let messages = migration.messages().await;
    assert_eq!(messages.iter().filter(|text| *text == "starting the VM after its migration").count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_target_ends_the_migration() {
    let migration = Migration::new().await;
    let operation = migration.request(json!({})).await;
    migration.cluster.lose_node("sim-2").await;
    reconcile::instance_watch::run(&migration.cluster.app).await.unwrap();
    migration.cluster.settle().await;
    assert_eq!(migration.get(&operation).await["state"], "abort");
    migration.assert_unchanged().await;
    let messages = migration.messages().await;
    assert!(
        messages.contains(&"migration failed, the instance stays on its node".to_owned()),
        "{messages:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn refusal_names_why_no_other_node_takes_the_instance() {
    let migration = Migration::new().await;
    migration.cluster.start_maintenance("sim-2").await;
    let refused = migration.post("/migrate", json!({})).await;
    assert_eq!(refused.status, 507, "{}", refused.text);
    let expected = "no other node can take the instance: node sim-2: it is in maintenance";
    assert!(refused.text.contains(expected), "{}", refused.text);
    migration.cluster.lose_node("sim-2").await;
    let refused = migration.post("/migrate", json!({})).await;
    assert_eq!(refused.status, 507, "{}", refused.text);
    assert!(refused.text.contains("node sim-2: its state is missing"), "{}", refused.text);

    // As if the cluster had a single node.
    migration.update("UPDATE nodes SET state = 'deleted' WHERE name = ?", &["sim-2".into()]).await;
    let refused = migration.post("/migrate", json!({})).await;
    assert_eq!(refused.status, 409, "{}", refused.text);
    let expected = "no other node can take the instance: sim-1 is the only node that runs instances";
    assert!(refused.text.contains(expected), "{}", refused.text);
    assert_eq!(migration.show().await["node"], "sim-1");
}
