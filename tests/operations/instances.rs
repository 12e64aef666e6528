//! The whole life of instances, with a fault at each step of each of their operations.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use axum::http::Method;
use muster_control::operations::{Fault, IMPLEMENTATIONS};
use muster_control::queue::OperationKind;
use muster_control::reconcile;
use muster_store::Retry;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::operation::OperationType;
use serde_json::{Value, json};

use crate::QUICK;
use crate::harness::{Cluster, wait_for};

/// Whether an operation is about an instance.
pub(crate) fn is_about_one(kind: &OperationKind) -> bool {
    match kind.operation_type {
        OperationType::Instance | OperationType::InstanceInterface | OperationType::InstanceSnapshot => true,
        OperationType::Namespace
        | OperationType::Network
        | OperationType::ArtifactFetch
        | OperationType::ImageCache => false,
    }
}

/// Every step of every operation on instances, with the operation: two of them have a step of the same name.
fn every_step() -> Vec<(&'static str, &'static str)> {
    let kinds = IMPLEMENTATIONS.iter().map(|implementation| implementation.kind);
    let kinds = kinds.filter(is_about_one);
    kinds.flat_map(|kind| kind.steps.iter().map(move |step| (kind.name, *step))).collect()
}

/// A cluster, and what is on it.
struct Stage {
    cluster: Cluster,
    token: String,
    network: String,
}

impl Stage {
    async fn new() -> Self {
        let mut settings = QUICK.to_vec();
        settings.extend([("IP_DELETION_HALO_DURATION", "0"), ("BLOB_REPLICATION_FACTOR", "1")]);
        let cluster = Cluster::with(&settings, None).await;
        let token = cluster.token("system").await;
        let mut stage = Self { cluster, token, network: String::new() };
        let network = stage.post("/networks", json!({"name": "net", "netblock": "10.0.0.0/24"})).await;
        network["uuid"].as_str().unwrap().clone_into(&mut stage.network);
        let begun = stage.post("/upload", json!({})).await["uuid"].clone();
        let path = format!("/upload/{}", begun.as_str().unwrap());
        stage.cluster.send(&stage.token, Method::POST, &path, vec![5; 30_000]).await;
        stage.post("/artifacts/upload/img", json!({"upload_uuid": begun})).await;
        stage.cluster.settle().await;
        stage
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let answer = self.cluster.call(&self.token, Method::POST, path, Some(body)).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text);
        answer.body
    }

    async fn delete(&self, path: &str) {
        let answer = self.cluster.call(&self.token, Method::DELETE, path, None).await;
        assert!(answer.status.is_success(), "{path}: {}", answer.text);
    }

    async fn get(&self, path: &str) -> Value {
        self.cluster.call(&self.token, Method::GET, path, None).await.body
    }

    /// An instance that is to be made; its path.
    async fn order(&self, name: &str) -> String {
        let body = json!({
            "name": name, "cpus": 1, "memory": 512, "uefi": true,
            "disk": [{"base": "sf://upload/system/img"}, {"size": 1}],
            "network": [{"network_uuid": self.network, "float": true}],
        });
        format!("/instances/{}", self.post("/instances", body).await["uuid"].as_str().unwrap())
    }

    async fn expect(&self, path: &str, state: &str) -> Value {
        let record = self.get(path).await;
        assert_eq!(record["state"], state, "{record}");
        record
    }

    /// Everything that can be done with an instance is done, and everything is deleted again.
    async fn live(&self) {
        let cluster = &self.cluster;
        let path = self.order("one").await;
        cluster.settle().await;
        let record = self.expect(&path, "created").await;
        assert_eq!(record["power_state"], "on");

        self.post(&format!("{path}/interfaces"), json!({"network_uuid": self.network, "float": true})).await;
        cluster.settle().await;
        let interfaces = self.get(&format!("{path}/interfaces")).await;
        assert!(interfaces.as_array().unwrap().iter().all(|one| one["state"] == "created"), "{interfaces}");
        assert_eq!(interfaces.as_array().unwrap().len(), 2);

        let copies = self.post(&format!("{path}/snapshot"), json!({"all": true, "thin": true})).await;
        cluster.settle().await;
        let list = self.get(&format!("{path}/snapshot")).await;
        for (device, copy) in copies.as_object().unwrap() {
            let found = list.as_array().unwrap().iter().find(|one| one["blob_uuid"] == copy["blob_uuid"]);
            assert_eq!(found.map(|one| &one["state"]), Some(&json!("created")), "{device}: {list}");
        }

        let object = ObjectRef::new(ObjectType::Instance, record["uuid"].as_str().unwrap());
        cluster.node.lose_all_vms();
        cluster.other.lose_all_vms();
        wait_for("the start to be queued", async || {
            let messages = cluster.messages(&object).await;
            messages.contains(&"the host went down with it, it is started again".to_owned()).then_some(())
        })
        .await;
        cluster.settle().await;
        let record = self.expect(&path, "created").await;
        assert_eq!(record["power_state"], "on");

        let lost = self.order("lost").await;
        self.forget_operations().await;
        reconcile::instance_watch::run(&cluster.app).await.unwrap();
        cluster.settle().await;
        let record = self.expect(&lost, "error").await;
        assert_eq!(record["error_message"], "its creation ended without a result");

        self.delete(&path).await;
        self.delete(&lost).await;
        cluster.settle().await;
        self.expect(&path, "deleted").await;
        self.expect(&lost, "deleted").await;
    }

    /// What waits is forgotten, as if somebody had lost the rows.
    async fn forget_operations(&self) {
        let mut tx = self.cluster.app.store.begin().await.unwrap();
        tx.execute("DELETE FROM operations WHERE state = 'queued'", &[]).await.unwrap();
        tx.finish(Ok(()), &mut Retry::default()).await.unwrap().unwrap();
    }

    /// Deletes everything else, and checks that nothing of anything is left.
    async fn assert_nothing_left(&self) {
        let (cluster, app) = (&self.cluster, &self.cluster.app);
        assert!(cluster.vms().is_empty(), "{:?}", cluster.vms());
        assert!(cluster.promised().await.values().all(|promised| *promised == (0, 0, 0)));
        for (table, condition) in [
            ("instance_ports", "1 = 1"),
            ("hardware_addresses", "1 = 1"),
            ("interfaces", "state <> 'deleted'"),
            ("addresses", "kind IN ('instance', 'floating')"),
            ("object_references", "source_type = 'instance'"),
            ("instances", "state <> 'deleted' OR claimed_cpus > 0 OR console_port IS NOT NULL"),
        ] {
            assert_eq!(cluster.count(table, condition).await, 0, "{table}");
        }
        for artifact in self.get("/artifacts").await.as_array().unwrap() {
            self.delete(&format!("/artifacts/{}", artifact["uuid"].as_str().unwrap())).await;
        }
        self.delete(&format!("/networks/{}", self.network)).await;
        cluster.settle().await;
        reconcile::artifact_watch::delete_unused(app).await.unwrap();
        // What a deleted blob needed is needed no more.
        reconcile::artifact_watch::delete_unused(app).await.unwrap();
        reconcile::storage::run_once(app).await.unwrap();
        wait_for("everything to be forgotten", async || {
            // The last events reach the database, then the cleaner comes.
            cluster.messages(&ObjectRef::new(ObjectType::Network, &self.network)).await;
            reconcile::cleaner::run(app).await.unwrap();
            cluster.settle().await;
            (cluster.count("networks", "1 = 1").await == 1).then_some(())
        })
        .await;
        for table in ["instances", "interfaces", "artifacts", "blobs", "blob_contents", "blob_locations"] {
            assert_eq!(cluster.count(table, "1 = 1").await, 0, "{table}");
        }
        assert_eq!(cluster.count("metadata", "object_type = 'instance'").await, 0);
        assert!(cluster.node.network_plans().is_empty() && cluster.other.network_plans().is_empty());
        for folder in ["drafts", "blobs", "conversions", "work", "machines"] {
            for node in ["1", "2"] {
                let left = cluster.files_in(&format!("{node}/{folder}"));
                assert!(left.is_empty(), "{folder}: {left:?}");
            }
        }
    }
}

/// Lives a whole life with one fault at one step.
async fn survives(kind: &'static str, step: &'static str, fault: Fault) {
    let stage = Stage::new().await;
    let met = Arc::new(AtomicBool::new(false));
    let meet = Arc::clone(&met);
    stage.cluster.worker.inject(move |row, name| {
        let here = row.name == kind && name == step;
        (here && !meet.swap(true, Ordering::Relaxed)).then_some(fault)
    });
    stage.live().await;
    assert!(met.load(Ordering::Relaxed), "{kind} never came to {step}");
    stage.assert_nothing_left().await;
}

/// Lives wait for leases most of the time, so they are lived at once, each by a runtime of its own.
fn at_once<T: Send, L: Future<Output = ()>>(
    chances: impl IntoIterator<Item = T>,
    live: impl Fn(T) -> L + Copy + Send,
) {
    std::thread::scope(|scope| {
        for chance in chances {
            scope.spawn(move || {
                let runtime =
                    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
                runtime.unwrap().block_on(live(chance));
            });
        }
    });
}

#[test]
fn every_step_of_an_instance_may_fail_once() {
    at_once(every_step(), |(kind, step)| survives(kind, step, Fault::Fail));
}

#[test]
fn every_worker_may_die_after_every_step_of_an_instance() {
    at_once(every_step(), |(kind, step)| survives(kind, step, Fault::Die));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_step_of_an_instance_may_run_twice() {
    let stage = Stage::new().await;
    let seen: Mutex<Vec<(String, String)>> = Mutex::default();
    stage.cluster.worker.inject(move |row, name| {
        let mut seen = seen.lock().unwrap();
        let step = (row.name.clone(), name.to_owned());
        let first = !seen.contains(&step);
        seen.push(step);
        // Dying once after each step makes the next worker repeat that step.
        first.then_some(Fault::Die)
    });
    stage.live().await;
    stage.assert_nothing_left().await;
}

#[test]
fn an_instance_one_of_whose_first_steps_always_fails_ends_in_error_and_has_nothing() {
    let steps = ["instance_preflight", "network_ensure_mesh", "instance_start"];
    at_once(steps, |step: &'static str| async move {
        let stage = Stage::new().await;
        stage.cluster.worker.inject(move |_, name| (name == step).then_some(Fault::Fail));
        let path = stage.order("one").await;
        stage.cluster.settle().await;
        let record = stage.expect(&path, "error").await;
        assert!(record["error_message"].as_str().unwrap().contains("fault injected by a test"), "{record}");
        assert_eq!((&record["interfaces"], &record["console_port"]), (&json!([]), &Value::Null));
        stage.delete(&path).await;
        stage.cluster.settle().await;
        stage.expect(&path, "deleted").await;
        stage.assert_nothing_left().await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plug_and_a_copy_that_always_fail_do_not_touch_the_instance() {
    let stage = Stage::new().await;
    let path = stage.order("one").await;
    stage.cluster.settle().await;
    stage.cluster.worker.inject(|_, name| {
        ["hot_plug_instance_interface", "instance_snapshot"].contains(&name).then_some(Fault::Fail)
    });
    let plugged = stage.post(&format!("{path}/interfaces"), json!({"network_uuid": stage.network})).await;
    let copies = stage.post(&format!("{path}/snapshot"), json!({})).await;
    stage.cluster.settle().await;
    let record = stage.expect(&path, "created").await;
    assert_eq!(record["power_state"], "on", "{record}");
    assert_eq!(record["interfaces"].as_array().unwrap().len(), 1, "{record}");
    let gone = stage.get(&format!("/interfaces/{}", plugged["uuid"].as_str().unwrap())).await;
    assert_eq!(gone["state"], "deleted", "{gone}");
    let artifact =
        stage.get(&format!("/artifacts/{}", copies["vda"]["artifact_uuid"].as_str().unwrap())).await;
    assert_eq!(artifact["state"], "error", "{artifact}");
    assert!(artifact["error_message"].as_str().unwrap().contains("fault injected by a test"), "{artifact}");
    assert_eq!(stage.get(&format!("{path}/snapshot")).await, json!([]));
    let object = ObjectRef::new(ObjectType::Instance, record["uuid"].as_str().unwrap());
    let messages = stage.cluster.messages(&object).await;
    for message in ["failed to plug in interface", "failed to copy disks"] {
        assert!(messages.contains(&message.to_owned()), "{messages:?}");
    }
    stage.delete(&path).await;
    stage.cluster.settle().await;
    stage.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_that_failed_for_good_is_begun_again() {
    let stage = Stage::new().await;
    let path = stage.order("one").await;
    stage.cluster.settle().await;
    let failing = Arc::new(AtomicBool::new(true));
    let fails = Arc::clone(&failing);
    stage.cluster.worker.inject(move |_, name| {
        (name == "instance_power_off" && fails.load(Ordering::Relaxed)).then_some(Fault::Fail)
    });
    stage.delete(&path).await;
    stage.cluster.settle().await;
    stage.expect(&path, "delete-wait").await;
    failing.store(false, Ordering::Relaxed);
    reconcile::instance_watch::run(&stage.cluster.app).await.unwrap();
    stage.cluster.settle().await;
    stage.expect(&path, "deleted").await;
    stage.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn whatever_happens_to_instances_at_once_nothing_is_left_of_them() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let mut settings = QUICK.to_vec();
    settings.push(("IP_DELETION_HALO_DURATION", "0"));
    let cluster = Cluster::on(&url, tempfile::tempdir().unwrap(), &settings, None).await;
    let token = cluster.token("system").await;
    let mut stage = Stage { cluster, token, network: String::new() };
    let network = stage.post("/networks", json!({"name": "net", "netblock": "10.0.0.0/24"})).await;
    network["uuid"].as_str().unwrap().clone_into(&mut stage.network);
    stage.cluster.settle().await;
    let stop = tokio::sync::watch::Sender::new(false);
    let workers = tokio::spawn(Arc::clone(&stage.cluster.worker).run(stop.subscribe()));
    tokio::join!(
        use_up(&stage, 0),
        use_up(&stage, 1),
        use_up(&stage, 2),
        use_up(&stage, 3),
        use_up(&stage, 4),
        use_up(&stage, 5),
        use_up(&stage, 6),
        use_up(&stage, 7),
    );
    wait_for("the deletions", async || {
        (stage.cluster.count("instances", "state <> 'deleted'").await == 0).then_some(())
    })
    .await;
    stop.send_replace(true);
    workers.await.unwrap();
    stage.cluster.settle().await;
    assert!(stage.cluster.vms().is_empty());
    assert!(stage.cluster.promised().await.values().all(|promised| *promised == (0, 0, 0)));
    for (table, condition) in [
        ("instance_ports", "1 = 1"),
        ("hardware_addresses", "1 = 1"),
        ("addresses", "kind IN ('instance', 'floating')"),
    ] {
        assert_eq!(stage.cluster.count(table, condition).await, 0, "{table}");
    }
}

/// Makes instances and deletes them at any moment of their lives, while others do the same.
async fn use_up(stage: &Stage, number: usize) {
    for round in 0..4 {
        let body = json!({
            "name": format!("n{number}-{round}"), "cpus": 1, "memory": 64, "disk": [{"size": 1}],
            "network": [{"network_uuid": stage.network, "float": true}],
        });
        let made = stage.post("/instances", body).await;
        let path = format!("/instances/{}", made["uuid"].as_str().unwrap());
        let call = async |verb: &str, body: Value| {
            let path = format!("{path}/{verb}");
            // Too early or too late is said, and nothing else.
            let answer = stage.cluster.call(&stage.token, Method::POST, &path, Some(body)).await;
            assert!([200, 406, 409].contains(&answer.status.as_u16()), "{path}: {}", answer.text);
        };
        if number % 2 == round % 2 {
            wait_for("it to run", async || (stage.get(&path).await["state"] == "created").then_some(()))
                .await;
        }
        match number % 4 {
            0 => call("poweroff", json!({})).await,
            1 => call("interfaces", json!({"network_uuid": stage.network})).await,
            2 => call("reboothard", json!({})).await,
            _ => {}
        }
        stage.delete(&path).await;
    }
}
