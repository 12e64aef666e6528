//! Draining of simulated nodes.

use std::time::Duration;

use axum::http::Method;
use muster_control::objects::node_drain;
use muster_control::reconcile;
use muster_node::SimulationScript;
use muster_test_cluster::{ApiResponse, Cluster, wait_for};
use muster_types::Error;
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use serde_json::{Value, json};

use crate::artifacts::upload;
use crate::instances::{create, instance_request, text};

struct Drain {
    cluster: Cluster,
    token: String,
}

impl Drain {
    async fn new() -> Self {
        let cluster = Cluster::with(&[("CLUSTER_OP_LEASE", "1")], None).await;
        let token = cluster.token("system").await;
        Self { cluster, token }
    }

    async fn call(&self, method: Method, path: &str, body: Option<Value>) -> ApiResponse {
        self.cluster.call(&self.token, method, path, body).await
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let response = self.call(Method::POST, path, Some(body)).await;
        assert_eq!(response.status, 200, "{path}: {}", response.text);
        response.body
    }

    async fn get(&self, path: &str) -> Value {
        self.call(Method::GET, path, None).await.body
    }

    /// Creates an instance on `sim-1`.
    async fn create(&self, name: &str, overrides: Value) -> Value {
        let mut overrides = overrides;
        overrides["placed_on"] = "sim-1".into();
        create(&self.cluster, &self.token, name, &overrides).await
    }

    /// Returns the name, the outcome and the new node of each instance, by name.
    fn outcomes(record: &Value) -> Vec<(&str, &str, &Value)> {
        let instances = record["instances"].as_array().unwrap().iter();
        let mut outcomes: Vec<_> =
            instances.map(|item| (text(item, "name"), text(item, "outcome"), &item["node"])).collect();
        outcomes.sort_by_key(|(name, ..)| *name);
        outcomes
    }

    /// Drains `sim-1`, and returns the operation when it has ended.
    async fn drain(&self, body: Value) -> Value {
        let record = self.post("/nodes/sim-1/drain", body).await;
        self.cluster.settle().await;
        self.get(&format!("/clusteroperations/node_op/{}", text(&record["operation"], "op_uuid"))).await
    }

    async fn show(&self, instance: &Value) -> Value {
        self.get(&format!("/instances/{}", text(instance, "uuid"))).await
    }

    async fn node_messages(&self) -> Vec<String> {
        let node = self.cluster.app.nodes[0].identity().id;
        self.cluster.messages(&ObjectRef::new(ObjectType::Node, node)).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn drained_node_has_no_instances_and_can_be_deleted() {
    let drain = Drain::new().await;
    let mut instances = Vec::new();
    for name in ["a", "b", "c"] {
        instances.push(drain.create(name, json!({})).await);
    }
    drain.post(&format!("/instances/{}/poweroff", text(&instances[2], "uuid")), json!({})).await;
    let refused = drain.call(Method::DELETE, "/nodes/sim-1", None).await;
    assert_eq!(refused.status, 409, "{}", refused.text);
    assert!(refused.text.contains("muster node drain sim-1"), "{}", refused.text);

    // A forecast changes nothing.
    let before = drain.cluster.committed_capacity().await;
    let forecast = drain.post("/nodes/sim-1/drain", json!({"dry_run": true})).await;
    let target = json!("sim-2");
    let expected = [("a", "migrate", &target), ("b", "migrate", &target), ("c", "copy", &target)];
    assert_eq!(Drain::outcomes(&forecast), expected, "{forecast}");
    assert_eq!(forecast["operation"], json!(null));
    assert_eq!(drain.cluster.committed_capacity().await, before);
    assert_eq!(drain.get("/nodes/sim-1").await["cordon"], json!(null));

    let operation = drain.drain(json!({})).await;
    assert_eq!(operation["state"], "complete", "{operation}");
    for (instance, power) in instances.iter().zip(["on", "on", "off"]) {
        let record = drain.show(instance).await;
        assert_eq!((&record["node"], &record["power_state"]), (&json!("sim-2"), &json!(power)), "{record}");
    }
    let capacity = drain.cluster.committed_capacity().await;
    assert_eq!((capacity["sim-1"], capacity["sim-2"]), ((0, 0, 0), (3, 1536, 3)));
    let cordon = drain.get("/nodes/sim-1").await["cordon"].clone();
    assert_eq!((&cordon["reason"], &cordon["stop"]), (&json!("drain"), &json!(false)), "{cordon}");
    let messages = drain.node_messages().await;
    for message in ["drain request from REST API", "drained"] {
        assert!(messages.contains(&message.to_owned()), "{message}: {messages:?}");
    }

    // Nothing new is placed on it, and the reason is recorded.
    let refused = instance_request("d", &json!({"placed_on": "sim-1"}));
    let refused = drain.call(Method::POST, "/instances", Some(refused)).await;
    assert_eq!(refused.status, 507, "{}", refused.text);
    let instance = ObjectRef::new(ObjectType::Instance, text(&refused.body, "instance_uuid"));
    let events = drain.cluster.events(&instance).await;
    assert!(events.iter().any(|event| format!("{event:?}").contains("it is being drained")), "{events:?}");
    let deleted = drain.call(Method::DELETE, "/nodes/sim-1", None).await;
    assert_eq!(deleted.status, 200, "{}", deleted.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn instance_that_cannot_be_migrated_live_stays_unless_it_may_be_stopped() {
    let drain = Drain::new().await;
    let slow = drain.create("slow", json!({"disk": [{"size": 1, "bus": "nvme"}]})).await;
    let web = drain.create("web", json!({})).await;
    let forecast = drain.post("/nodes/sim-1/drain", json!({"dry_run": true})).await;
    let (nowhere, target) = (json!(null), json!("sim-2"));
    assert_eq!(Drain::outcomes(&forecast), [("slow", "blocked", &nowhere), ("web", "migrate", &target)]);
    let operation = drain.drain(json!({})).await;
    assert_eq!(operation["state"], "error", "{operation}");
    let message = text(&operation["error_report"], "message");
    assert!(message.contains("slow") && message.contains("nvme") && message.contains("--stop"), "{message}");
    assert_eq!(drain.show(&web).await["node"], "sim-2");
    let record = drain.show(&slow).await;
    assert_eq!((&record["node"], &record["power_state"]), (&json!("sim-1"), &json!("on")), "{record}");

    let forecast = drain.post("/nodes/sim-1/drain", json!({"dry_run": true, "stop": true})).await;
    assert_eq!(Drain::outcomes(&forecast), [("slow", "restart", &target)]);
    let operation = drain.drain(json!({"stop": true})).await;
    assert_eq!(operation["state"], "complete", "{operation}");
    drain.cluster.settle().await;
    let record = drain.show(&slow).await;
    assert_eq!((&record["node"], &record["power_state"]), (&json!("sim-2"), &json!("on")), "{record}");
    let events = drain.cluster.events(&ObjectRef::new(ObjectType::Instance, text(&slow, "uuid"))).await;
    assert!(
        events.iter().any(|event| format!("{event:?}").contains("the guest switched itself off")),
        "it was shut down: {events:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn undrain_cancels_a_drain() {
    let drain = Drain::new().await;
    let web = drain.create("web", json!({})).await;
    let migration_duration = Duration::from_secs(60);
    drain.cluster.node.set_script(SimulationScript { migration_duration, ..SimulationScript::default() });
    let record = drain.post("/nodes/sim-1/drain", json!({})).await;
    let cancel = async {
        wait_for("the instance to be migrated", async || {
            let operations = drain
                .get(&format!(
                    "/clusteroperations?target_object_type=instance&target_uuid={}",
                    text(&web, "uuid")
                ))
                .await;
            operations.as_array()?.iter().find_map(|item| item["progress"]["total"].as_i64())
        })
        .await;
        let node = drain.post("/nodes/sim-1/undrain", json!({})).await;
        assert_eq!(node["cordon"], json!(null), "{node}");
    };
    tokio::join!(drain.cluster.settle(), cancel);
    let path = format!("/clusteroperations/node_op/{}", text(&record["operation"], "op_uuid"));
    assert_eq!(drain.get(&path).await["state"], "complete");
    let record = drain.show(&web).await;
    assert_eq!((&record["node"], &record["power_state"]), (&json!("sim-1"), &json!("on")), "{record}");
    assert!(!drain.node_messages().await.contains(&"drained".to_owned()));
    assert_eq!(drain.cluster.count_rows("instance_migrations", "1 = 1").await, 0);
    drain.create("next", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_migration_of_a_drain_begins_after_it_was_cancelled() {
    let drain = Drain::new().await;
    let web = drain.create("web", json!({})).await;
    let (app, id) = (&drain.cluster.app, text(&web, "uuid").parse().unwrap());
    drain.post("/nodes/sim-1/drain", json!({})).await;
    let row = muster_store::instances::get(&*app.store, id).await.unwrap().unwrap();
    let node = muster_store::nodes::get(&*app.store, &NameOrId::Id(row.node.unwrap())).await.unwrap();
    let cordon = node.unwrap().cordon.unwrap();
    drain.post("/nodes/sim-1/undrain", json!({})).await;
    // A daemon that read the cordon before continues.
    for again in [false, true] {
        if again {
            drain.post("/nodes/sim-1/drain", json!({"stop": true})).await;
        }
        let begun = node_drain::migrate_instance(app, &row, &cordon).await;
        assert!(matches!(begun, Err(Error::NotReady(_))), "{begun:?}");
        assert_eq!(drain.cluster.count_rows("instance_migrations", "1 = 1").await, 0);
    }
    drain.post("/nodes/sim-1/undrain", json!({})).await;
    drain.cluster.settle().await;
    assert_eq!(drain.show(&web).await["node"], "sim-1");
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_cannot_hold_up_a_drain() {
    let drain = Drain::new().await;
    drain.cluster.create_namespace("blue").await;
    let token = drain.cluster.token("blue").await;
    let web = create(&drain.cluster, &token, "web", &json!({})).await;
    let node = text(&web, "node").to_owned();
    let set_state = async |state: &'static str, lease_expires: f64| {
        let mut tx = drain.cluster.app.store.begin().await.unwrap();
        let sql = "UPDATE operations SET name = 'snapshot_instance', state = ?, lease_expires = ? \
                   WHERE name IN ('create_instance', 'snapshot_instance')";
        assert_eq!(tx.execute(sql, &[state.into(), lease_expires.into()]).await.unwrap(), 1);
        tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
    };
    // A snapshot is being taken. The migration begins nevertheless, so that no other one follows.
    set_state("executing", muster_types::time::now() + 3600.0).await;
    let refused = drain.call(Method::POST, &format!("/instances/{}/migrate", text(&web, "uuid")), None).await;
    assert_eq!(refused.status, 406, "{}", refused.text);
    let record = drain.post(&format!("/nodes/{node}/drain"), json!({})).await;
    let hold_up = async {
        wait_for("the migration to begin", async || {
            let begun = drain.cluster.count_rows("instance_migrations", "1 = 1").await;
            (begun == 1).then_some(())
        })
        .await;
        for call in ["snapshot", "poweroff", "migrate/cancel"] {
            let path = format!("/instances/{}/{call}", text(&web, "uuid"));
            let refused = drain.cluster.call(&token, Method::POST, &path, Some(json!({}))).await;
            assert_eq!(refused.status, 409, "{call}: {}", refused.text);
            assert!(refused.text.contains("is being migrated"), "{}", refused.text);
        }
        assert_eq!(drain.show(&web).await["node"], node);
        set_state("complete", 0.0).await;
    };
    tokio::join!(drain.cluster.settle(), hold_up);
    let path = format!("/clusteroperations/node_op/{}", text(&record["operation"], "op_uuid"));
    assert_eq!(drain.get(&path).await["state"], "complete");
    let record = drain.show(&web).await;
    assert_ne!(record["node"], node, "{record}");
    assert_eq!(record["power_state"], "on", "{record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn node_in_maintenance_keeps_its_instances_and_gets_no_new_ones() {
    let drain = Drain::new().await;
    let web = drain.create("web", json!({})).await;
    let node = drain.post("/nodes/sim-1/maintenance", json!({})).await;
    assert_eq!(node["cordon"]["reason"], "maintenance", "{node}");
    let next = create(&drain.cluster, &drain.token, "next", &json!({})).await;
    assert_eq!(next["node"], "sim-2");
    assert_eq!(drain.show(&web).await["node"], "sim-1");
    drain.post("/nodes/sim-1/undrain", json!({})).await;
    drain.create("last", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forecast_counts_the_capacity_of_all_instances() {
    let drain = Drain::new().await;
    // A node has 48 vCPUs.
    for name in ["a", "b", "c"] {
        drain.create(name, json!({"cpus": 16})).await;
    }
    create(&drain.cluster, &drain.token, "other", &json!({"cpus": 16, "placed_on": "sim-2"})).await;
    let forecast = drain.post("/nodes/sim-1/drain", json!({"dry_run": true})).await;
    let mut outcomes: Vec<&str> =
        Drain::outcomes(&forecast).into_iter().map(|(_, outcome, _)| outcome).collect();
    outcomes.sort_unstable();
    assert_eq!(outcomes, ["blocked", "migrate", "migrate"], "{forecast}");
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_node_cannot_be_drained() {
    let drain = Drain::new().await;
    drain.cluster.lose_node("sim-1").await;
    let refused = drain.call(Method::POST, "/nodes/sim-1/drain", Some(json!({}))).await;
    assert_eq!(refused.status, 409, "{}", refused.text);
    assert!(refused.text.contains("muster node evacuate sim-1 --dead"), "{}", refused.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn drained_node_leaves_a_copy_of_every_blob() {
    let drain = Drain::new().await;
    let artifact = upload(&drain.cluster, &drain.token, "image", b"content").await;
    let blob = text(&artifact, "blob_uuid");
    let (node, path) = ("/nodes/sim-1", format!("/blobs/{blob}"));
    drain.post("/nodes/sim-1/maintenance", json!({})).await;
    let refused = drain.call(Method::DELETE, node, None).await;
    assert_eq!(refused.status, 409, "{}", refused.text);
    assert!(refused.text.contains(blob) && refused.text.contains("muster node drain"), "{}", refused.text);
    assert_eq!(drain.get(&path).await["locations"], json!(["sim-1"]));

    let operation = drain.post("/nodes/sim-1/drain", json!({})).await["operation"].clone();
    drain.cluster.worker.run_once().await.unwrap();
    let state =
        async || drain.get(&format!("/clusteroperations/node_op/{}", text(&operation, "op_uuid"))).await;
    assert_ne!(state().await["state"], "complete", "no other node has a copy");
    let copy = async {
        wait_for("a copy of the blob", async || {
            reconcile::storage::run_once(&drain.cluster.app).await.unwrap();
            (drain.get(&path).await["locations"] == json!(["sim-1", "sim-2"])).then_some(())
        })
        .await;
    };
    tokio::join!(drain.cluster.settle(), copy);
    assert_eq!(state().await["state"], "complete");
    let deleted = drain.call(Method::DELETE, node, None).await;
    assert_eq!(deleted.status, 200, "{}", deleted.text);
    assert_eq!(drain.get(&path).await["locations"], json!(["sim-2"]));
    assert_eq!(drain.cluster.download_until_error(&drain.token, blob).await, b"content");
    // Nothing else can store it.
    let operation = drain.post("/nodes/sim-2/drain", json!({})).await["operation"].clone();
    drain.cluster.settle().await;
    let ended = drain.get(&format!("/clusteroperations/node_op/{}", text(&operation, "op_uuid"))).await;
    assert!(text(&ended["error_report"], "message").contains(blob), "{ended}");
}

#[tokio::test(flavor = "multi_thread")]
async fn blobs_of_a_dead_node_have_an_event() {
    let drain = Drain::new().await;
    let artifact = upload(&drain.cluster, &drain.token, "image", b"content").await;
    drain.cluster.lose_node("sim-1").await;
    let deleted = drain.call(Method::DELETE, "/nodes/sim-1", Some(json!({"dead": true}))).await;
    assert_eq!(deleted.status, 200, "{}", deleted.text);
    let blob = ObjectRef::new(ObjectType::Blob, text(&artifact, "blob_uuid"));
    let messages = drain.cluster.messages(&blob).await;
    assert!(messages.contains(&"lost the last verified copy".to_owned()), "{messages:?}");
}
