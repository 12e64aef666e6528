//! Runs the instance lifecycle with a fault injected at each step of each instance operation.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use axum::http::Method;
use muster_control::operations::{Fault, IMPLEMENTATIONS};
use muster_control::queue::OperationKind;
use muster_control::reconcile;
use muster_store::Retry;
use muster_test_cluster::{Cluster, wait_for};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::operation::OperationType;
use serde_json::{Value, json};

use crate::FAST_SETTINGS;

/// Returns whether an operation targets an instance, or instances of nodes.
pub(crate) fn targets_instance(kind: &OperationKind) -> bool {
    match kind.operation_type {
        OperationType::Instance
        | OperationType::InstanceInterface
        | OperationType::InstanceSnapshot
        | OperationType::Node => true,
        OperationType::Namespace
        | OperationType::Network
        | OperationType::ArtifactFetch
        | OperationType::ImageCache => false,
    }
}

/// Returns every step of every instance operation together with the operation's name, because two operations share a
/// step name.
fn every_step() -> Vec<(&'static str, &'static str)> {
    let kinds = IMPLEMENTATIONS.iter().map(|implementation| implementation.kind);
    let kinds = kinds.filter(targets_instance);
    kinds.flat_map(|kind| kind.steps.iter().map(move |step| (kind.name, *step))).collect()
}

/// A cluster with a network and an uploaded image.
struct Fixture {
    cluster: Cluster,
    token: String,
    network: String,
    /// The storage that the nodes share and instances use, if any.
    shared_storage: Option<tempfile::TempDir>,
}

impl Fixture {
    async fn new() -> Self {
        Self::with_storage(None).await
    }

    async fn with_storage(shared_storage: Option<tempfile::TempDir>) -> Self {
        let mut settings = FAST_SETTINGS.to_vec();
        settings.extend([("IP_DELETION_HALO_DURATION", "0"), ("BLOB_REPLICATION_FACTOR", "2")]);
        let path = shared_storage.as_ref().map(|storage| storage.path().to_str().unwrap());
        settings.extend(path.map(|path| ("SHARED_STORAGE", path)));
        let cluster = Cluster::with(&settings, None).await;
        let token = cluster.token("system").await;
        let mut fixture = Self { cluster, token, network: String::new(), shared_storage };
        let network = fixture.post("/networks", json!({"name": "net", "netblock": "10.0.0.0/24"})).await;
        network["uuid"].as_str().unwrap().clone_into(&mut fixture.network);
        let upload = fixture.post("/upload", json!({})).await["uuid"].clone();
        let path = format!("/upload/{}", upload.as_str().unwrap());
        fixture.cluster.send(&fixture.token, Method::POST, &path, vec![5; 30_000]).await;
        fixture.post("/artifacts/upload/img", json!({"upload_uuid": upload})).await;
        fixture.cluster.settle().await;
        fixture
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let response = self.cluster.call(&self.token, Method::POST, path, Some(body)).await;
        assert_eq!(response.status, 200, "{path}: {}", response.text);
        response.body
    }

    async fn delete(&self, path: &str) {
        let response = self.cluster.call(&self.token, Method::DELETE, path, None).await;
        assert!(response.status.is_success(), "{path}: {}", response.text);
    }

    async fn get(&self, path: &str) -> Value {
        self.cluster.call(&self.token, Method::GET, path, None).await.body
    }

    /// Queues the creation of an instance and returns its path.
    async fn create_instance(&self, name: &str) -> String {
        let body = json!({
            "name": name, "cpus": 1, "memory": 512, "uefi": true,
            "disk": [{"base": "sf://upload/system/img"}, {"size": 1}],
            "network": [{"network_uuid": self.network, "float": true}],
            "storage": if self.shared_storage.is_some() { "shared" } else { "local" },
        });
        format!("/instances/{}", self.post("/instances", body).await["uuid"].as_str().unwrap())
    }

    async fn assert_state(&self, path: &str, state: &str) -> Value {
        let record = self.get(path).await;
        assert_eq!(record["state"], state, "{record}");
        record
    }

    /// Runs every instance operation, then deletes the instances.
    async fn run_lifecycle(&self) {
        let cluster = &self.cluster;
        let path = self.create_instance("one").await;
        cluster.settle().await;
        let record = self.assert_state(&path, "created").await;
        assert_eq!(record["power_state"], "on");

        self.post(&format!("{path}/interfaces"), json!({"network_uuid": self.network, "float": true})).await;
        cluster.settle().await;
        let interfaces = self.get(&format!("{path}/interfaces")).await;
        assert!(interfaces.as_array().unwrap().iter().all(|item| item["state"] == "created"), "{interfaces}");
        assert_eq!(interfaces.as_array().unwrap().len(), 2);

        let snapshots = self.post(&format!("{path}/snapshot"), json!({"all": true, "thin": true})).await;
        cluster.settle().await;
        let list = self.get(&format!("{path}/snapshot")).await;
        for (device, snapshot) in snapshots.as_object().unwrap() {
            let listed =
                list.as_array().unwrap().iter().find(|item| item["blob_uuid"] == snapshot["blob_uuid"]);
            assert_eq!(listed.map(|item| &item["state"]), Some(&json!("created")), "{device}: {list}");
        }

        // Disks on shared storage are not migrated.
        if self.shared_storage.is_none() {
            self.migrate(&path).await;
            self.drain(&path).await;
            self.rebalance().await;
        }

        let object = ObjectRef::new(ObjectType::Instance, record["uuid"].as_str().unwrap());
        cluster.node.lose_all_vms();
        cluster.other.lose_all_vms();
        wait_for("the start to be queued", async || {
            let messages = cluster.messages(&object).await;
            messages.contains(&"restarting the VM after its host went down".to_owned()).then_some(())
        })
        .await;
        cluster.settle().await;
        let record = self.assert_state(&path, "created").await;
        assert_eq!(record["power_state"], "on");

        self.evacuate(&path).await;

        let lost = self.create_instance("lost").await;
        self.delete_queued_operations().await;
        reconcile::instance_watch::run(&cluster.app).await.unwrap();
        cluster.settle().await;
        let record = self.assert_state(&lost, "error").await;
        assert_eq!(record["error_message"], "its creation ended without a result");

        self.delete(&path).await;
        self.delete(&lost).await;
        cluster.settle().await;
        self.assert_state(&path, "deleted").await;
        self.assert_state(&lost, "deleted").await;
    }

    /// Migrates an instance to the other node.
    async fn migrate(&self, path: &str) {
        let before = self.get(path).await;
        let response =
            self.cluster.call(&self.token, Method::POST, &format!("{path}/migrate"), Some(json!({}))).await;
        assert_eq!(response.status, 202, "{}", response.text);
        self.cluster.settle().await;
        let after = self.assert_state(path, "created").await;
        assert_eq!((&after["power_state"], &after["generation"]), (&json!("on"), &json!(2)), "{after}");
        assert_eq!(after["interfaces"], before["interfaces"]);
        assert_ne!(after["node"], before["node"]);
        assert_eq!(self.cluster.vms().len(), 1);
    }

    /// Drains the node of an instance, and lets it get new instances again.
    async fn drain(&self, path: &str) {
        let node = self.get(path).await["node"].as_str().unwrap().to_owned();
        let drained = self.post(&format!("/nodes/{node}/drain"), json!({})).await;
        assert_eq!(drained["instances"][0]["outcome"], "migrate", "{drained}");
        self.cluster.settle().await;
        let after = self.assert_state(path, "created").await;
        assert_ne!(after["node"], node.as_str());
        self.post(&format!("/nodes/{node}/undrain"), json!({})).await;
    }

    /// Moves one of two large instances to the other node, and deletes both.
    async fn rebalance(&self) {
        let mut paths = Vec::new();
        for name in ["large-1", "large-2"] {
            let body = json!({
                "name": name, "cpus": 16, "memory": 512, "disk": [{"size": 1}], "placed_on": "sim-1",
            });
            paths.push(format!(
                "/instances/{}",
                self.post("/instances", body).await["uuid"].as_str().unwrap()
            ));
        }
        self.cluster.settle().await;
        let plan = self.post("/admin/rebalance", json!({})).await;
        assert_eq!(plan["moves"].as_array().unwrap().len(), 1, "{plan}");
        self.cluster.settle().await;
        for path in &paths {
            let record = self.assert_state(path, "created").await;
            let is_moved = path.ends_with(plan["moves"][0]["instance_uuid"].as_str().unwrap());
            assert_eq!(record["node"], if is_moved { "sim-2" } else { "sim-1" }, "{record}");
            self.delete(path).await;
        }
        self.cluster.settle().await;
    }

    /// Evacuates an instance with snapshots from its node, which returns afterwards.
    async fn evacuate(&self, path: &str) {
        let cluster = &self.cluster;
        reconcile::storage::run_once(&cluster.app).await.unwrap();
        let before = self.get(path).await;
        let node = before["node"].as_str().unwrap();
        cluster.lose_node(node).await;
        let evacuated = self.post(&format!("/nodes/{node}/evacuate"), json!({"dead": true})).await;
        assert_eq!(evacuated[0]["outcome"], "evacuating", "{evacuated}");
        cluster.settle().await;
        let after = self.assert_state(path, "created").await;
        let generation = before["generation"].as_i64().unwrap() + 1;
        assert_eq!(
            (&after["power_state"], &after["generation"]),
            (&json!("on"), &json!(generation)),
            "{after}"
        );
        assert_eq!(after["interfaces"], before["interfaces"]);
        assert_ne!(after["node"], before["node"]);
        reconcile::checkin::join(&cluster.app).await.unwrap();
        assert_eq!(cluster.vms().len(), 1);
    }

    /// Deletes queued operations, as if their rows were lost.
    async fn delete_queued_operations(&self) {
        let mut tx = self.cluster.app.store.begin().await.unwrap();
        tx.execute("DELETE FROM operations WHERE state = 'queued'", &[]).await.unwrap();
        tx.finish(Ok(()), &mut Retry::default()).await.unwrap().unwrap();
    }

    /// Deletes the remaining objects and asserts that neither rows nor files are orphaned.
    async fn assert_no_orphans(&self) {
        let (cluster, app) = (&self.cluster, &self.cluster.app);
        assert!(cluster.vms().is_empty(), "{:?}", cluster.vms());
        if let Some(storage) = &self.shared_storage {
            assert_eq!(std::fs::read_dir(storage.path().join("instances")).unwrap().count(), 0);
        }
        assert!(cluster.committed_capacity().await.values().all(|promised| *promised == (0, 0, 0)));
        for (table, condition) in [
            ("instance_ports", "1 = 1"),
            ("instance_migrations", "1 = 1"),
            ("hardware_addresses", "1 = 1"),
            ("interfaces", "state <> 'deleted'"),
            ("addresses", "kind IN ('instance', 'floating')"),
            ("object_references", "source_type = 'instance'"),
            ("instances", "state <> 'deleted' OR claimed_cpus > 0 OR console_port IS NOT NULL"),
        ] {
            assert_eq!(cluster.count_rows(table, condition).await, 0, "{table}");
        }
        for artifact in self.get("/artifacts").await.as_array().unwrap() {
            self.delete(&format!("/artifacts/{}", artifact["uuid"].as_str().unwrap())).await;
        }
        self.delete(&format!("/networks/{}", self.network)).await;
        cluster.settle().await;
        reconcile::artifact_watch::delete_unused(app).await.unwrap();
        // The second pass deletes blobs that only deleted blobs depended on.
        reconcile::artifact_watch::delete_unused(app).await.unwrap();
        reconcile::storage::run_once(app).await.unwrap();
        wait_for("the cleaner to remove all rows", async || {
            // Flushes events to the database before the cleaner runs.
            cluster.messages(&ObjectRef::new(ObjectType::Network, &self.network)).await;
            reconcile::cleaner::run(app).await.unwrap();
            cluster.settle().await;
            (cluster.count_rows("networks", "1 = 1").await == 1).then_some(())
        })
        .await;
        for table in ["instances", "interfaces", "artifacts", "blobs", "blob_contents", "blob_locations"] {
            assert_eq!(cluster.count_rows(table, "1 = 1").await, 0, "{table}");
        }
        assert_eq!(cluster.count_rows("metadata", "object_type = 'instance'").await, 0);
        assert!(cluster.node.network_plans().is_empty() && cluster.other.network_plans().is_empty());
        for folder in ["drafts", "blobs", "conversions", "work", "machines"] {
            for node in ["1", "2"] {
                let remaining = cluster.files_in(&format!("{node}/{folder}"));
                assert!(remaining.is_empty(), "{folder}: {remaining:?}");
            }
        }
    }
}

/// Runs the lifecycle with one fault injected at one step.
async fn assert_survives_fault(fixture: Fixture, kind: &'static str, step: &'static str, fault: Fault) {
    let injected = Arc::new(AtomicBool::new(false));
    let injected_by_hook = Arc::clone(&injected);
    fixture.cluster.worker.inject(move |row, name| {
        let at_step = row.name == kind && name == step;
        (at_step && !injected_by_hook.swap(true, Ordering::Relaxed)).then_some(fault)
    });
    fixture.run_lifecycle().await;
    assert!(injected.load(Ordering::Relaxed), "{kind} never reached {step}");
    fixture.assert_no_orphans().await;
}

/// Runs scenarios concurrently, each on its own runtime, because they mostly wait for leases to expire.
fn run_concurrently<T: Send, L: Future<Output = ()>>(
    scenarios: impl IntoIterator<Item = T>,
    run: impl Fn(T) -> L + Copy + Send,
) {
    std::thread::scope(|scope| {
        for scenario in scenarios {
            scope.spawn(move || {
                let runtime =
                    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
                runtime.unwrap().block_on(run(scenario));
            });
        }
    });
}

#[test]
fn instance_operations_survive_one_failure_at_every_step() {
    run_concurrently(every_step(), |(kind, step)| async move {
        assert_survives_fault(Fixture::new().await, kind, step, Fault::Fail).await;
    });
}

#[test]
fn instance_operations_survive_worker_death_after_every_step() {
    run_concurrently(every_step(), |(kind, step)| async move {
        assert_survives_fault(Fixture::new().await, kind, step, Fault::Die).await;
    });
}

#[test]
fn operations_on_shared_disks_survive_faults() {
    // Disks on shared storage are not migrated.
    let is_migration = |kind: &str| kind.contains("migrat");
    let steps = every_step().into_iter().filter(|(kind, step)| {
        let uses_disks =
            ["instance_preflight", "instance_start", "instance_power_off", "instance_release"].contains(step);
        uses_disks && !is_migration(kind)
    });
    let scenarios = steps.flat_map(|(kind, step)| [Fault::Fail, Fault::Die].map(|fault| (kind, step, fault)));
    run_concurrently(scenarios, |(kind, step, fault)| async move {
        let fixture = Fixture::with_storage(Some(tempfile::tempdir().unwrap())).await;
        assert_survives_fault(fixture, kind, step, fault).await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn instance_operation_steps_are_idempotent() {
    let fixture = Fixture::new().await;
    let seen: Mutex<Vec<(String, String)>> = Mutex::default();
    fixture.cluster.worker.inject(move |row, name| {
        let mut seen = seen.lock().unwrap();
        let step = (row.name.clone(), name.to_owned());
        let first = !seen.contains(&step);
        seen.push(step);
        // A worker that dies after a step makes the next worker repeat it.
        first.then_some(Fault::Die)
    });
    fixture.run_lifecycle().await;
    fixture.assert_no_orphans().await;
}

#[test]
fn failing_creation_step_leaves_instance_in_error_without_resources() {
    let steps = ["instance_preflight", "network_ensure_mesh", "instance_start"];
    run_concurrently(steps, |step: &'static str| async move {
        let fixture = Fixture::new().await;
        fixture.cluster.worker.inject(move |_, name| (name == step).then_some(Fault::Fail));
        let path = fixture.create_instance("one").await;
        fixture.cluster.settle().await;
        let record = fixture.assert_state(&path, "error").await;
        assert!(record["error_message"].as_str().unwrap().contains("fault injected by a test"), "{record}");
        assert_eq!((&record["interfaces"], &record["console_port"]), (&json!([]), &Value::Null));
        fixture.delete(&path).await;
        fixture.cluster.settle().await;
        fixture.assert_state(&path, "deleted").await;
        fixture.assert_no_orphans().await;
    });
}

#[test]
fn failing_migration_step_leaves_instance_on_its_node() {
    let steps = [
        ("prepare_migration", "instance_preflight"),
        ("prepare_migration", "network_ensure_mesh"),
        ("prepare_migration", "instance_prepare_incoming"),
        ("migrate_instance", "instance_migrate"),
    ];
    run_concurrently(steps, |(kind, step): (&'static str, &'static str)| async move {
        let fixture = Fixture::new().await;
        let path = fixture.create_instance("one").await;
        fixture.cluster.settle().await;
        let before = fixture.assert_state(&path, "created").await;
        let capacity = fixture.cluster.committed_capacity().await;
        fixture
            .cluster
            .worker
            .inject(move |row, name| (row.name == kind && name == step).then_some(Fault::Fail));
        let response =
            fixture.cluster.call(&fixture.token, Method::POST, &format!("{path}/migrate"), None).await;
        assert_eq!(response.status, 202, "{}", response.text);
        fixture.cluster.settle().await;
        let after = fixture.assert_state(&path, "created").await;
        for field in ["node", "generation", "power_state", "interfaces", "console_port"] {
            assert_eq!(after[field], before[field], "{kind} {step}: {field}");
        }
        reconcile::vms::run_once(&fixture.cluster.app).await.unwrap();
        assert_eq!(fixture.cluster.vms().len(), 1, "{kind} {step}");
        let used = |capacity: std::collections::BTreeMap<String, (i64, i64, i64)>| -> Vec<_> {
            capacity.into_iter().filter(|(_, used)| *used != (0, 0, 0)).collect()
        };
        assert_eq!(used(fixture.cluster.committed_capacity().await), used(capacity), "{kind} {step}");
        assert_eq!(fixture.cluster.count_rows("instance_migrations", "1 = 1").await, 0);
        fixture.delete(&path).await;
        fixture.cluster.settle().await;
        fixture.assert_no_orphans().await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_hot_plug_and_snapshot_leave_instance_unchanged() {
    let fixture = Fixture::new().await;
    let path = fixture.create_instance("one").await;
    fixture.cluster.settle().await;
    fixture.cluster.worker.inject(|_, name| {
        ["hot_plug_instance_interface", "instance_snapshot"].contains(&name).then_some(Fault::Fail)
    });
    let plugged = fixture.post(&format!("{path}/interfaces"), json!({"network_uuid": fixture.network})).await;
    let snapshots = fixture.post(&format!("{path}/snapshot"), json!({})).await;
    fixture.cluster.settle().await;
    let record = fixture.assert_state(&path, "created").await;
    assert_eq!(record["power_state"], "on", "{record}");
    assert_eq!(record["interfaces"].as_array().unwrap().len(), 1, "{record}");
    let interface = fixture.get(&format!("/interfaces/{}", plugged["uuid"].as_str().unwrap())).await;
    assert_eq!(interface["state"], "deleted", "{interface}");
    let artifact =
        fixture.get(&format!("/artifacts/{}", snapshots["vda"]["artifact_uuid"].as_str().unwrap())).await;
    assert_eq!(artifact["state"], "error", "{artifact}");
    assert!(artifact["error_message"].as_str().unwrap().contains("fault injected by a test"), "{artifact}");
    assert_eq!(fixture.get(&format!("{path}/snapshot")).await, json!([]));
    let object = ObjectRef::new(ObjectType::Instance, record["uuid"].as_str().unwrap());
    let messages = fixture.cluster.messages(&object).await;
    for message in ["failed to plug in interface", "failed to copy disks"] {
        assert!(messages.contains(&message.to_owned()), "{messages:?}");
    }
    fixture.delete(&path).await;
    fixture.cluster.settle().await;
    fixture.assert_no_orphans().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_deletion_that_failed_permanently() {
    let fixture = Fixture::new().await;
    let path = fixture.create_instance("one").await;
    fixture.cluster.settle().await;
    let failing = Arc::new(AtomicBool::new(true));
    let fails_in_hook = Arc::clone(&failing);
    fixture.cluster.worker.inject(move |_, name| {
        (name == "instance_power_off" && fails_in_hook.load(Ordering::Relaxed)).then_some(Fault::Fail)
    });
    fixture.delete(&path).await;
    fixture.cluster.settle().await;
    fixture.assert_state(&path, "delete-wait").await;
    failing.store(false, Ordering::Relaxed);
    reconcile::instance_watch::run(&fixture.cluster.app).await.unwrap();
    fixture.cluster.settle().await;
    fixture.assert_state(&path, "deleted").await;
    fixture.assert_no_orphans().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_instance_operations_leak_no_resources() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let mut settings = FAST_SETTINGS.to_vec();
    settings.push(("IP_DELETION_HALO_DURATION", "0"));
    let cluster = Cluster::on(&url, tempfile::tempdir().unwrap(), &settings, None).await;
    let token = cluster.token("system").await;
    let mut fixture = Fixture { cluster, token, network: String::new(), shared_storage: None };
    let network = fixture.post("/networks", json!({"name": "net", "netblock": "10.0.0.0/24"})).await;
    network["uuid"].as_str().unwrap().clone_into(&mut fixture.network);
    fixture.cluster.settle().await;
    let stop = tokio::sync::watch::Sender::new(false);
    let workers = tokio::spawn(Arc::clone(&fixture.cluster.worker).run(stop.subscribe()));
    tokio::join!(
        churn_instances(&fixture, 0),
        churn_instances(&fixture, 1),
        churn_instances(&fixture, 2),
        churn_instances(&fixture, 3),
        churn_instances(&fixture, 4),
        churn_instances(&fixture, 5),
        churn_instances(&fixture, 6),
        churn_instances(&fixture, 7),
    );
    wait_for("the deletions", async || {
        (fixture.cluster.count_rows("instances", "state <> 'deleted'").await == 0).then_some(())
    })
    .await;
    stop.send_replace(true);
    workers.await.unwrap();
    fixture.cluster.settle().await;
    assert!(fixture.cluster.vms().is_empty());
    assert!(fixture.cluster.committed_capacity().await.values().all(|promised| *promised == (0, 0, 0)));
    for (table, condition) in [
        ("instance_ports", "1 = 1"),
        ("hardware_addresses", "1 = 1"),
        ("addresses", "kind IN ('instance', 'floating')"),
    ] {
        assert_eq!(fixture.cluster.count_rows(table, condition).await, 0, "{table}");
    }
}

/// Creates instances and deletes them in arbitrary states, concurrently with other workers.
async fn churn_instances(fixture: &Fixture, number: usize) {
    for round in 0..4 {
        let body = json!({
            "name": format!("n{number}-{round}"), "cpus": 1, "memory": 64, "disk": [{"size": 1}],
            "network": [{"network_uuid": fixture.network, "float": true}],
        });
        let created = fixture.post("/instances", body).await;
        let path = format!("/instances/{}", created["uuid"].as_str().unwrap());
        let call = async |verb: &str, body: Value| {
            let path = format!("{path}/{verb}");
            // Only state conflicts are acceptable errors.
            let response = fixture.cluster.call(&fixture.token, Method::POST, &path, Some(body)).await;
            assert!([200, 406, 409].contains(&response.status.as_u16()), "{path}: {}", response.text);
        };
        if number % 2 == round % 2 {
            wait_for("the instance to run", async || {
                (fixture.get(&path).await["state"] == "created").then_some(())
            })
            .await;
        }
        match number % 4 {
            0 => call("poweroff", json!({})).await,
            1 => call("interfaces", json!({"network_uuid": fixture.network})).await,
            2 => call("reboothard", json!({})).await,
            _ => {}
        }
        fixture.delete(&path).await;
    }
}
