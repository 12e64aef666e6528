//! Nodes that do not check in: the state of their instances, deletion, evacuation, and their return.

use std::path::Path;
use std::time::Duration;

use axum::http::Method;
use muster_control::operations::Fault;
use muster_control::{objects, reconcile};
use muster_test_cluster::{ApiResponse, Cluster};
use muster_types::ids::InstanceId;
use muster_types::instance::FencingPolicy;
use muster_types::node::{NodeApi as _, NodeReport};
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use crate::instances::{create, text};

/// A cluster with an instance on `sim-1`.
pub(crate) struct LostHost {
    pub(crate) cluster: Cluster,
    pub(crate) token: String,
    pub(crate) instance: Value,
}

impl LostHost {
    pub(crate) async fn new(request: &Value) -> Self {
        Self::with(request, "10.0.0.0/24", &[]).await
    }

    pub(crate) async fn with(request: &Value, netblock: &str, settings: &[(&str, &str)]) -> Self {
        let defaults = [
            ("NODE_CHECKIN_MAXIMUM", "100"),
            ("BLOB_REPLICATION_FACTOR", "2"),
            ("CLEANER_DELAY", "1000"),
            ("IP_DELETION_HALO_DURATION", "0"),
        ];
        let cluster = Cluster::with(&[&defaults[..], settings].concat(), None).await;
        let token = cluster.token("system").await;
        let network = json!({"name": "blue", "netblock": netblock});
        let created = cluster.call(&token, Method::POST, "/networks", Some(network)).await;
        assert_eq!(created.status, 200, "{}", created.text);
        cluster.settle().await;
        let mut overrides =
            json!({"placed_on": "sim-1", "network": [{"network_uuid": "blue", "float": true}]});
        for (key, value) in request.as_object().unwrap() {
            overrides[key] = value.clone();
        }
        let instance = create(&cluster, &token, "web", &overrides).await;
        Self { cluster, token, instance }
    }

    pub(crate) fn path(&self, suffix: &str) -> String {
        format!("/instances/{}{suffix}", text(&self.instance, "uuid"))
    }

    pub(crate) fn id(&self) -> InstanceId {
        text(&self.instance, "uuid").parse().unwrap()
    }

    pub(crate) async fn call(&self, method: Method, path: &str, body: Option<Value>) -> ApiResponse {
        self.cluster.call(&self.token, method, path, body).await
    }

    pub(crate) async fn show(&self) -> Value {
        self.call(Method::GET, &self.path(""), None).await.body
    }

    pub(crate) async fn evacuate(&self) -> ApiResponse {
        self.call(Method::POST, "/nodes/sim-1/evacuate", Some(json!({"dead": true}))).await
    }

    /// Evacuates the instance, and returns its record.
    pub(crate) async fn evacuate_to_other_node(&self) -> Value {
        let evacuated = self.evacuate().await;
        let record = &evacuated.body[0];
        assert_eq!(
            (text(record, "outcome"), text(record, "node")),
            ("evacuating", "sim-2"),
            "{}",
            evacuated.text
        );
        self.cluster.settle().await;
        let record = self.show().await;
        assert_eq!((text(&record, "state"), text(&record, "node")), ("created", "sim-2"), "{record}");
        for field in ["uuid", "name", "interfaces"] {
            assert_eq!(record[field], self.instance[field], "{field}");
        }
        assert_eq!(record["generation"], 2);
        record
    }

    /// Sets the fencing leases of all VMs and of those with self-fencing that a lost node has reported last, and lets some time
    /// pass.
    pub(crate) async fn set_leases(
        &self,
        node: &str,
        fencing_lease: Option<f64>,
        instance_fencing_lease: Option<f64>,
    ) {
        let (app, node) = (&self.cluster.app, self.cluster.node_named(node));
        let report = node.report().await.unwrap();
        let report = NodeReport { fencing_lease, instance_fencing_lease, ..report };
        let reported = muster_store::transaction!(app.store, |tx| {
            Ok(muster_store::nodes::set_report(tx, node.identity().id, &report).await?)
        });
        reported.unwrap();
        self.pass_minute().await;
    }

    /// Lets a minute pass by the clock of the maintainer.
    async fn pass_minute(&self) {
        self.cluster.app.silences.advance(Duration::from_secs(60));
        reconcile::node_watch::run(&self.cluster.app).await.unwrap();
    }

    /// Lets the lost node check in again, and returns the directories in its `lost+found`.
    pub(crate) async fn return_host(&self) -> Vec<String> {
        reconcile::checkin::join(&self.cluster.app).await.unwrap();
        self.lost_found(1)
    }

    /// Returns the directories in the `lost+found` of the node with a number.
    pub(crate) fn lost_found(&self, node: usize) -> Vec<String> {
        let entries = |path: &Path| std::fs::read_dir(path).into_iter().flatten().flatten();
        let path = self.cluster.directory().join(format!("{node}/lost+found"));
        let dates = entries(&path).map(|entry| entry.path());
        let directories = dates.flat_map(|date| entries(&date)).inspect(|entry| {
            assert!(entry.path().join("README").exists(), "{entry:?}");
        });
        directories.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    async fn messages(&self) -> Vec<String> {
        self.cluster.messages(&ObjectRef::new(ObjectType::Instance, self.id())).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_of_missing_node_are_unknown_until_it_returns() {
    let host = LostHost::new(&json!({})).await;
    assert!(host.instance["power_state_since"].as_f64().unwrap() > 1e9, "{}", host.instance);
    host.cluster.lose_node("sim-1").await;
    let record = host.show().await;
    assert_eq!(
        (text(&record, "power_state"), text(&record, "agent_state")),
        ("unknown", "unknown"),
        "{record}"
    );
    assert!(record["power_state_since"].as_f64() > host.instance["power_state_since"].as_f64(), "{record}");
    let events = host.cluster.events(&ObjectRef::new(ObjectType::Instance, host.id())).await;
    let event = events.iter().find(|event| event.message == "power state is now unknown").unwrap();
    let reason = event.extra["reason"].as_str().unwrap();
    assert!(reason.contains("node sim-1 has not checked in since 20"), "{reason}");
    for verb in ["poweroff", "reboothard", "snapshot"] {
        let body = (verb == "snapshot").then(|| json!({}));
        let refused = host.call(Method::POST, &host.path(&format!("/{verb}")), body).await;
        assert!(refused.status == 503 && refused.text.contains("node sim-1"), "{}", refused.text);
    }
    for (call, body) in [
        ("/interfaces", json!({"network_uuid": "blue"})),
        ("/agent/execute", json!({"command_line": "true"})),
        ("/agent/get", json!({"path": "/etc/motd"})),
        ("/agent/put", json!({"blob_uuid": host.id().to_string(), "path": "/etc/motd"})),
    ] {
        let refused = host.call(Method::POST, &host.path(call), Some(body)).await;
        assert!(refused.status == 503 && refused.text.contains("node sim-1"), "{call}: {}", refused.text);
    }
    assert!(host.return_host().await.is_empty());
    reconcile::vms::run_once(&host.cluster.app).await.unwrap();
    let record = host.show().await;
    assert_eq!((text(&record, "power_state"), text(&record, "agent_state")), ("on", "ready"), "{record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_of_stopped_daemon_are_unknown_after_the_checkin_maximum() {
    let host = LostHost::new(&json!({})).await;
    reconcile::checkin::leave(&host.cluster.app).await;
    reconcile::node_watch::run(&host.cluster.app).await.unwrap();
    assert_eq!(text(&host.show().await, "power_state"), "on");
    host.cluster.lose_node("sim-1").await;
    assert_eq!(text(&host.show().await, "power_state"), "unknown");
    host.return_host().await;
    reconcile::vms::run_once(&host.cluster.app).await.unwrap();
    assert_eq!(text(&host.show().await, "power_state"), "on");
}

#[tokio::test(flavor = "multi_thread")]
async fn node_with_instances_is_only_deleted_if_declared_dead() {
    let host = LostHost::new(&json!({})).await;
    let delete = async |body| host.call(Method::DELETE, "/nodes/sim-1", body).await;
    for body in [None, Some(json!({"force": true})), Some(json!({"dead": true}))] {
        let refused = delete(body).await;
        assert!(
            refused.status == 409 && refused.text.contains("is alive and has 1 instance: web"),
            "{}",
            refused.text
        );
    }
    host.cluster.lose_node("sim-1").await;
    let refused = delete(None).await;
    assert_eq!(refused.status, 409, "{}", refused.text);
    for part in [
        "has not checked in since",
        "web",
        "muster node evacuate sim-1 --dead",
        "muster node delete sim-1 --dead",
    ] {
        assert!(refused.text.contains(part), "{part}: {}", refused.text);
    }
    let deleted = delete(Some(json!({"dead": true}))).await;
    assert_eq!(deleted.body["state"], "deleted", "{}", deleted.text);
    let record = host.show().await;
    assert_eq!(
        (text(&record, "state"), text(&record, "power_state"), text(&record, "error_message")),
        ("error", "unknown", "node sim-1 was deleted")
    );
    assert_eq!(record["interfaces"], host.instance["interfaces"], "its addresses stay reserved");

    // The host returns: its daemon stops the VM, keeps its files, and exits with the explanation.
    reconcile::storage::run_once(&host.cluster.app).await.unwrap();
    let refused = reconcile::checkin::join(&host.cluster.app).await.unwrap_err().to_string();
    assert!(refused.contains("was deleted from the cluster") && refused.contains("lost+found"), "{refused}");
    assert_eq!(host.lost_found(1), [text(&host.instance, "uuid")]);
    assert!(host.cluster.vms().is_empty());
    assert!(host.messages().await.contains(&"stale VM stopped and moved to lost+found".to_owned()));

    let reserved = "kind IN ('instance', 'floating')";
    assert_eq!(host.cluster.count_rows("addresses", reserved).await, 2);
    assert!(host.call(Method::DELETE, &host.path(""), None).await.status.is_success());
    host.cluster.settle().await;
    assert_eq!(text(&host.show().await, "state"), "deleted");
    assert_eq!(host.cluster.count_rows("addresses", reserved).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn evacuates_disposable_instance_and_returning_host_does_not_run_it_again() {
    let host = LostHost::new(&json!({"disposable": true})).await;
    let refused = host.evacuate().await;
    assert!(refused.status == 409 && refused.text.contains("is alive"), "{}", refused.text);
    host.cluster.lose_node("sim-1").await;
    let refused = host.call(Method::POST, "/nodes/sim-1/evacuate", Some(json!({}))).await;
    assert!(refused.status == 409 && refused.text.contains("--dead"), "{}", refused.text);
    let record = host.evacuate_to_other_node().await;
    assert_eq!(text(&record, "power_state"), "on");
    assert_eq!(host.evacuate().await.body, json!([]), "a repeated request has nothing to do");
    assert_eq!(host.cluster.committed_capacity().await["sim-1"], (0, 0, 0));

    assert_eq!(host.cluster.vms().len(), 2, "the lost host still runs its VM");
    assert_eq!(host.return_host().await, [text(&host.instance, "uuid")]);
    assert_eq!(host.cluster.vms(), [host.id()]);
    assert_eq!(text(&host.show().await, "power_state"), "on");
    let messages = host.messages().await;
    for message in ["evacuation from dead node sim-1: evacuating", "stale VM stopped and moved to lost+found"]
    {
        assert!(messages.contains(&message.to_owned()), "{message}: {messages:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn evacuates_from_latest_snapshots_with_a_live_copy() {
    let host = LostHost::new(&json!({})).await;
    let snapshots = host.call(Method::POST, &host.path("/snapshot"), Some(json!({"all": true}))).await;
    host.cluster.settle().await;
    reconcile::storage::run_once(&host.cluster.app).await.unwrap();
    let powered_off = host.call(Method::POST, &host.path("/poweroff"), None).await;
    assert_eq!(powered_off.status, 200, "{}", powered_off.text);
    host.cluster.lose_node("sim-1").await;
    let record = host.evacuate_to_other_node().await;
    assert_eq!(record["disks"][0]["blob_uuid"], snapshots.body["vda"]["blob_uuid"], "{record}");
    assert_eq!(text(&record, "power_state"), "off", "it was off before");
    let powered_on = host.call(Method::POST, &host.path("/poweron"), None).await;
    assert_eq!(powered_on.status, 200, "{}", powered_on.text);
    assert_eq!(host.return_host().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn instance_without_snapshot_fails_and_keeps_its_disks_in_lost_found() {
    let host = LostHost::new(&json!({})).await;
    host.cluster.lose_node("sim-1").await;
    let evacuated = host.evacuate().await;
    let record = &evacuated.body[0];
    assert_eq!(text(record, "outcome"), "error", "{}", evacuated.text);
    let record = host.show().await;
    assert_eq!(
        (text(&record, "state"), text(&record, "error_message")),
        ("error", "node sim-1 is dead: no snapshot and not disposable")
    );
    assert_eq!(record["interfaces"], host.instance["interfaces"]);
    assert_eq!(host.return_host().await, [text(&host.instance, "uuid")]);
    // Two passes: a VM is removed if the second one finds it again.
    reconcile::vms::run_once(&host.cluster.app).await.unwrap();
    assert_eq!(host.lost_found(1).len(), 1);
    assert!(host.cluster.vms().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn instance_stays_on_dead_node_while_no_other_node_has_capacity() {
    let host = LostHost::new(&json!({"disposable": true})).await;
    for node in ["sim-1", "sim-2"] {
        host.cluster.lose_node(node).await;
    }
    let evacuated = host.evacuate().await;
    assert_eq!(text(&evacuated.body[0], "outcome"), "waiting", "{}", evacuated.text);
    let record = host.show().await;
    assert_eq!((text(&record, "state"), text(&record, "node")), ("created", "sim-1"), "{record}");
    assert_eq!(record["generation"], 1);
    assert!(host.return_host().await.is_empty());
}

/// Two instances on `sim-1`, by id: evacuating the first one fails, because its metadata is not as the API requires.
async fn lost_host_with_failing_evacuation(request: &Value) -> (LostHost, [Value; 2]) {
    let host = LostHost::new(request).await;
    let mut overrides = request.clone();
    overrides["placed_on"] = json!("sim-1");
    let other = create(&host.cluster, &host.token, "db", &overrides).await;
    let mut instances = [host.instance.clone(), other];
    instances.sort_by_key(|instance| text(instance, "uuid").to_owned());
    let broken = muster_store::transaction!(host.cluster.app.store, |tx| {
        let (id, affinity) = (text(&instances[0], "uuid"), json!("not a dictionary"));
        Ok(muster_store::metadata::set(tx, ObjectType::Instance, id, "affinity", &affinity).await?)
    });
    broken.unwrap();
    host.cluster.lose_node("sim-1").await;
    (host, instances)
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_evacuation_of_one_instance_does_not_affect_the_others() {
    let (host, [first, second]) = lost_host_with_failing_evacuation(&json!({"disposable": true})).await;
    let evacuated = host.evacuate().await;
    assert_eq!(evacuated.status, 200, "{}", evacuated.text);
    let records = evacuated.body.as_array().unwrap();
    let outcomes: Vec<_> = records.iter().map(|record| (&record["name"], text(record, "outcome"))).collect();
    assert_eq!(
        outcomes,
        [(&first["name"], "waiting"), (&second["name"], "evacuating")],
        "{}",
        evacuated.text
    );
    assert!(text(&records[0], "reason").contains("affinity"), "{}", evacuated.text);
    host.cluster.settle().await;
    host.return_host().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_restart_of_one_instance_does_not_affect_the_others() {
    let request = json!({"disposable": true, "restart": "elsewhere", "fencing": "self"});
    let (host, instances) = lost_host_with_failing_evacuation(&request).await;
    host.set_leases("sim-1", None, Some(30.0)).await;
    host.cluster.settle().await;
    for (instance, node) in instances.iter().zip(["sim-1", "sim-2"]) {
        let path = format!("/instances/{}", text(instance, "uuid"));
        let record = host.call(Method::GET, &path, None).await.body;
        assert_eq!(text(&record, "node"), node, "{record}");
    }
    host.return_host().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn places_waiting_instances_again_however_long_their_node_is_missing() {
    let cluster = Cluster::with(&[("NODE_CHECKIN_MAXIMUM", "100")], None).await;
    let token = cluster.token("system").await;
    // Nothing runs their creation yet. The older ones must stay on their node.
    let request = async |name: &str, placed_on: Option<&str>| {
        let mut body = json!({"name": name, "cpus": 1, "memory": 64, "disk": [{"size": 1}], "network": []});
        if let Some(node) = placed_on {
            body["placed_on"] = json!(node);
        }
        let created = cluster.call(&token, Method::POST, "/instances", Some(body)).await;
        assert_eq!(created.status, 200, "{}", created.text);
        created.body
    };
    for number in 0..21 {
        request(&format!("pinned-{number}"), Some("sim-1")).await;
    }
    cluster.lose_node("sim-2").await;
    let waiting = request("web", None).await;
    assert_eq!(text(&waiting, "node"), "sim-1", "{waiting}");
    cluster.lose_node("sim-1").await;
    reconcile::node_watch::run(&cluster.app).await.unwrap();
    let states = async |node: &str| {
        let path = format!("/nodes/{node}");
        text(&cluster.call(&token, Method::GET, &path, None).await.body, "state").to_owned()
    };
    assert_eq!(states("sim-1").await, "error");
    // Another node gets capacity.
    let other = cluster.app.nodes[1].identity().id;
    objects::node::revive(&cluster.app, other).await.unwrap();
    let checked_in = muster_store::transaction!(cluster.app.store, |tx| {
        tx.execute(
            "UPDATE nodes SET lastseen = ? WHERE uuid = ?",
            &[muster_types::time::now().into(), other.into()],
        )
        .await?;
        Ok(())
    });
    checked_in.unwrap();
    reconcile::node_watch::run(&cluster.app).await.unwrap();
    let path = format!("/instances/{}", text(&waiting, "uuid"));
    let placed = cluster.call(&token, Method::GET, &path, None).await.body;
    assert_eq!(text(&placed, "node"), "sim-2", "{placed}");
    reconcile::checkin::join(&cluster.app).await.unwrap();
    cluster.settle().await;
}

/// Loses `sim-2` while the creation of an instance there is interrupted after some steps, and returns the record of the instance.
async fn lose_node_during_creation(fault: Fault, at: &'static str) -> (Cluster, Value) {
    let cluster = Cluster::with(&[("NODE_CHECKIN_MAXIMUM", "100"), ("CLUSTER_OP_LEASE", "1")], None).await;
    let token = cluster.token("system").await;
    let network = json!({"name": "blue", "netblock": "10.0.0.0/24"});
    assert_eq!(cluster.call(&token, Method::POST, "/networks", Some(network)).await.status, 200);
    cluster.settle().await;
    // The scheduler chooses the other node.
    cluster.call(&token, Method::POST, "/nodes/sim-1/maintenance", Some(json!({}))).await;
    let body = json!({
        "name": "web", "cpus": 1, "memory": 64, "disk": [{"size": 1}], "network": [{"network_uuid": "blue"}],
    });
    let created = cluster.call(&token, Method::POST, "/instances", Some(body)).await.body;
    assert_eq!(text(&created, "node"), "sim-2", "{created}");
    cluster.call(&token, Method::POST, "/nodes/sim-1/undrain", Some(json!({}))).await;
    cluster.worker.inject(move |_, step| (step == at).then_some(fault));
    cluster.worker.run_once().await.unwrap();
    cluster.worker.inject(|_, _| None);
    // The lease of the worker expires.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    cluster.lose_node("sim-2").await;
    // It becomes missing, then failed.
    for _ in 0..2 {
        reconcile::node_watch::run(&cluster.app).await.unwrap();
    }
    let path = format!("/instances/{}", text(&created, "uuid"));
    let placed = cluster.call(&token, Method::GET, &path, None).await.body;
    (cluster, placed)
}

#[tokio::test(flavor = "multi_thread")]
async fn places_instances_again_whose_vm_was_not_started() {
    // The worker stopped while it prepared the networks.
    let (cluster, placed) = lose_node_during_creation(Fault::Die, "network_ensure_mesh").await;
    assert_eq!(text(&placed, "node"), "sim-1", "{placed}");
    cluster.settle().await;
    let token = cluster.token("system").await;
    let path = format!("/instances/{}", text(&placed, "uuid"));
    let created = cluster.call(&token, Method::GET, &path, None).await.body;
    assert_eq!((text(&created, "state"), text(&created, "node")), ("created", "sim-1"), "{created}");
    reconcile::checkin::join(&cluster.app).await.unwrap();

    // It failed while it started the VM, which may exist.
    let (cluster, placed) = lose_node_during_creation(Fault::Die, "instance_start").await;
    assert_eq!(text(&placed, "node"), "sim-2", "{placed}");
    reconcile::checkin::join(&cluster.app).await.unwrap();
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_elsewhere_requires_self_fencing() {
    let cluster = Cluster::with(&[], None).await;
    let token = cluster.token("system").await;
    let request = async |changes: Value| {
        let mut body =
            json!({"name": "web", "cpus": 1, "memory": 1024, "disk": [{"size": 1}], "network": []});
        body.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        cluster.call(&token, Method::POST, "/instances", Some(body)).await
    };
    for changes in [json!({"restart": "elsewhere"}), json!({"restart": "elsewhere", "fencing": "none"})] {
        let refused = request(changes).await;
        assert_eq!(refused.status, 400, "{}", refused.text);
        for part in ["restart: ", "Set fencing to \\\"self\\\"", "FENCING = self on every node"] {
            assert!(refused.text.contains(part), "{part}: {}", refused.text);
        }
    }
    cluster.allow_undocumented_requests("an invalid policy");
    let refused = request(json!({"fencing": "stonith"})).await;
    assert!(refused.status == 400 && refused.text.contains("fencing: "), "{}", refused.text);
    for (fencing, restart) in
        [(json!("self"), "elsewhere"), (json!("none"), "manual"), (json!(null), "manual")]
    {
        let created = request(json!({"fencing": fencing, "restart": restart})).await;
        assert_eq!(created.status, 200, "{}", created.text);
        assert_eq!((&created.body["fencing"], text(&created.body, "restart")), (&fencing, restart));
    }
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restarts_elsewhere_only_from_a_host_that_has_fenced_itself() {
    let policies = json!({"disposable": true, "restart": "elsewhere", "fencing": "self"});
    let host = LostHost::new(&policies).await;
    assert_eq!((text(&host.instance, "restart"), text(&host.instance, "fencing")), ("elsewhere", "self"));
    host.cluster.lose_node("sim-1").await;
    host.cluster.settle().await;
    assert_eq!(text(&host.show().await, "node"), "sim-1", "its VM may still be running");
    host.set_leases("sim-1", Some(30.0), None).await;
    assert_eq!(text(&host.show().await, "node"), "sim-1", "a lease of other VMs");
    host.set_leases("sim-1", None, Some(1e7)).await;
    assert_eq!(text(&host.show().await, "node"), "sim-1", "its lease has not expired");
    // By the clock of the database the last check-in is always long ago.
    host.cluster.lose_node("sim-1").await;
    host.set_leases("sim-1", None, Some(70.0)).await;
    assert_eq!(text(&host.show().await, "node"), "sim-1", "the maintainer has seen it for a minute");
    host.pass_minute().await;
    host.cluster.settle().await;
    let record = host.show().await;
    assert_eq!(
        (text(&record, "node"), text(&record, "state"), text(&record, "power_state")),
        ("sim-2", "created", "on"),
        "{record}"
    );
    assert_eq!(host.return_host().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn returning_node_has_no_fencing_lease_until_it_reports_one() {
    let host = LostHost::new(&json!({})).await;
    let app = &host.cluster.app;
    let node = app.nodes[0].identity();
    let report =
        NodeReport { fencing_lease: Some(30.0), instance_fencing_lease: Some(30.0), ..NodeReport::default() };
    muster_store::transaction!(app.store, |tx| {
        Ok(muster_store::nodes::set_report(tx, node.id, &report).await?)
    })
    .unwrap();
    muster_control::objects::node_join::join(app, node).await.unwrap();
    let row = muster_control::objects::node::find(app, "sim-1").await.unwrap();
    assert_eq!((row.report.fencing_lease, row.report.instance_fencing_lease), (None, None));
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_of_an_instance_can_be_replaced() {
    let host = LostHost::new(&json!({"fencing": "self", "restart": "elsewhere", "disposable": true})).await;
    let update = async |body: Value| host.call(Method::PUT, &host.path("/fencing"), Some(body)).await;
    let of_vm = async || host.cluster.app.nodes[0].vms().list().await.unwrap()[0].fencing;
    assert_eq!(of_vm().await, FencingPolicy::Own);
    let refused = update(json!({"fencing": "none", "restart": "elsewhere"})).await;
    assert!(refused.status == 400 && refused.text.contains("requires self-fencing"), "{}", refused.text);
    for (body, fencing, restart, of_vm_now) in [
        (json!({}), json!(null), "manual", FencingPolicy::None),
        (json!({"fencing": "self"}), json!("self"), "manual", FencingPolicy::Own),
        (json!({"fencing": "none"}), json!("none"), "manual", FencingPolicy::None),
        (json!({"fencing": "self", "restart": "elsewhere"}), json!("self"), "elsewhere", FencingPolicy::Own),
    ] {
        let updated = update(body).await;
        assert_eq!(updated.status, 200, "{}", updated.text);
        let record = host.show().await;
        assert_eq!((&record["fencing"], text(&record, "restart")), (&fencing, restart));
        assert_eq!(of_vm().await, of_vm_now);
    }
    assert!(host.messages().await.contains(&"fencing request from REST API".to_owned()));

    // The node gives the VM the policy of its instance, whatever an interrupted request left.
    host.cluster.app.nodes[0].vms().set_fencing(host.id(), FencingPolicy::None).await.unwrap();
    reconcile::vms::run_once(&host.cluster.app).await.unwrap();
    assert_eq!(of_vm().await, FencingPolicy::Own);

    host.cluster.lose_node("sim-1").await;
    let refused = update(json!({"fencing": "none"})).await;
    assert!(refused.status == 503 && refused.text.contains("node sim-1"), "{}", refused.text);
}
