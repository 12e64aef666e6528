//! Fails, repeats and interrupts every step of every operation, and asserts that nothing is orphaned.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod instances;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::http::Method;
use muster_control::objects::claim::ClaimRequest;
use muster_control::operations::{Fault, IMPLEMENTATIONS, Implementation, Step, Undo, Worker};
use muster_control::queue::{Lane, NewOperation, Operation, OperationKind};
use muster_control::{App, objects, reconcile};
use muster_store::operations::OperationRow;
use muster_store::{Retry, addresses, claims, keys, metadata, namespaces, operations, rules, trusts};
use muster_test_cluster::{Cluster, caller};
use muster_testing::web_server::{Reply, WebServer};
use muster_types::Error;
use muster_types::address::AddressType;
use muster_types::artifact::{ArtifactState, ArtifactType};
use muster_types::network::{FLOATING_NETWORK_ID, NetworkState};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::operation::{OperationHandle, OperationState, OperationType};
use serde::{Deserialize, Serialize};
use serde_json::json;

const FAST_SETTINGS: &[(&str, &str)] = &[
    ("CLUSTER_OP_LEASE", "1"),
    ("CLEANER_DELAY", "0"),
    // One more than the number of steps of the longest operation.
    ("CLUSTER_OP_MAX_ATTEMPTS", "7"),
    ("BLOB_DELETION_DELAY", "0"),
    ("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.0/8"),
];

/// Creates a cluster in which the namespace `doomed` has every kind of object that a namespace can own.
async fn cluster() -> Cluster {
    let cluster = Cluster::with(FAST_SETTINGS, None).await;
    for name in ["doomed", "friend"] {
        cluster.create_namespace(name).await;
    }
    let app = &cluster.app;
    cluster.key(&caller(), "doomed", "one").await;
    cluster.key(&caller(), "doomed", "two").await;
    objects::trust::add(app, &caller(), "doomed", "friend").await.unwrap();
    objects::trust::add(app, &caller(), "friend", "doomed").await.unwrap();
    let (one, hour) = (Some(json!(1)), Some(json!(3600)));
    let claim = ClaimRequest {
        limit_cpus: one.clone(),
        limit_memory_mb: one.clone(),
        limit_disk_gb: one,
        expires_in_seconds: hour,
        dry_run: None,
    };
    objects::claim::create(app, &caller(), "doomed", &claim).await.unwrap();
    let object = ObjectRef::namespace("doomed");
    objects::metadata::set(app, &caller(), &object, Some("k"), Some(json!("v"))).await.unwrap();
    add_rule(app).await;
    let webhook =
        objects::webhook::WebhookRequest { url: Some("https://hooks.invalid".into()), ..Default::default() };
    objects::webhook::create(app, &caller(), "doomed", "hook", webhook).await.unwrap();
    objects::webhook::test(app, &caller(), "doomed", "hook").await.unwrap();
    cluster
}

/// Adds a mapping rule to the namespace `doomed`.
async fn add_rule(app: &App) {
    let text = |text: &str| Some(json!(text));
    let issuer = objects::issuer::IssuerRequest {
        issuer_url: text("https://forge.example"),
        jwks_uri: text("https://forge.example/keys"),
        audience: text("cloud"),
    };
    objects::issuer::create(app, &caller(), text("forge").as_ref(), &issuer).await.unwrap();
    let rule = objects::rule::RuleRequest {
        issuer: text("forge"),
        bound_claims: Some(json!({"sub": "x"})),
        scopes: Some(json!(["node.read"])),
        key_ttl: Some(json!(60)),
        key_name_prefix: text("robot"),
    };
    objects::rule::create(app, &caller(), "doomed", text("deploy").as_ref(), &rule).await.unwrap();
}

/// A disk image of zeroes.
static IMAGE: [u8; 65536] = [0; 65536];

/// Fetches an image into the namespace `doomed` and deletes it.
async fn fetch_and_delete(cluster: &Cluster) {
    let app = &cluster.app;
    let web = WebServer::new(|request_head, _| match request_head.header("if-none-match") {
        Some(_) => Reply::status(304),
        None => Reply::ok(&IMAGE).with("ETag", "\"one\""),
    })
    .await;
    let request = objects::artifact::ArtifactRequest {
        name: None,
        namespace: Some("doomed".into()),
        artifact_type: ArtifactType::Image,
        source_url: web.url("/image"),
        shared: false,
        max_versions: 0,
    };
    let id = objects::artifact::fetch(app, &caller(), &request).await.unwrap().uuid.to_string();
    cluster.settle().await;
    let record = objects::artifact::get(app, &caller(), &id, None).await.unwrap();
    assert_eq!((record.state, record.index), (ArtifactState::Created, 1), "{record:?}");
    let object = ObjectRef::new(ObjectType::Artifact, &id);
    objects::metadata::set(app, &caller(), &object, Some("k"), Some(json!("v"))).await.unwrap();
    let blob = record.blob_uuid.unwrap().to_string();
    assert!(cluster.has_file(&format!("{blob}.qcow2")), "the image is converted to qcow2");
    objects::artifact::delete(app, &caller(), &id, None).await.unwrap();
    reconcile::artifact_watch::delete_unused(app).await.unwrap();
    reconcile::storage::run_once(app).await.unwrap();
    cluster.messages(&object).await;
    cluster.messages(&ObjectRef::new(ObjectType::Blob, &blob)).await;
}

/// Creates and deletes a network with every kind of dependent object, deletes the namespace `doomed`, and runs the
/// cleaner.
async fn delete_everything_and_clean(cluster: &Cluster) {
    let app = &cluster.app;
    let request = objects::network::NetworkRequest {
        name: Some("net".into()),
        netblock: Some("10.0.0.0/16".into()),
        provide_dns: Some(true),
        namespace: Some("doomed".into()),
        ..Default::default()
    };
    let network = objects::network::create(app, &caller(), request).await.unwrap().uuid.to_string();
    cluster.settle().await;
    let record = objects::network::get(app, &caller(), &network, None).await.unwrap();
    assert_eq!(record.state, NetworkState::Created, "{record:?}");
    assert!(record.floating_gateway.is_some());
    let interface = cluster.create_interface(&network, "doomed", "host", 2).await;
    let object = ObjectRef::new(ObjectType::Network, &network);
    objects::metadata::set(app, &caller(), &object, Some("k"), Some(json!("v"))).await.unwrap();
    objects::network::route(app, &caller(), &network).await.unwrap();
    objects::network::dns::set(app, &caller(), &network, Some("web"), Some("10.0.0.9")).await.unwrap();
    objects::address::reserve(app, &caller(), &network, "10.0.0.9", None).await.unwrap();
    cluster.delete_interface(interface.id).await;
    objects::network::delete(app, &caller(), &network, None).await.unwrap();
    cluster.settle().await;
    cluster.messages(&object).await;
    fetch_and_delete(cluster).await;
    objects::namespace::delete(&cluster.app, &caller(), "doomed").await.unwrap();
    cluster.settle().await;
    // Flushes events to the database before the cleaner runs.
    cluster.messages(&ObjectRef::namespace("doomed")).await;
    reconcile::cleaner::run(&cluster.app).await.unwrap();
    cluster.settle().await;
}

/// Asserts that no row or file of the namespace `doomed` remains.
async fn assert_namespace_removed(cluster: &Cluster) {
    let store = &*cluster.app.store;
    assert!(cluster.node.network_plans().is_empty() && cluster.other.network_plans().is_empty());
    for table in ["blobs", "blob_contents", "blob_locations", "artifacts", "uploads", "object_references"] {
        let rows = store.query(&format!("SELECT * FROM {table}"), &[]).await.unwrap();
        let remaining = rows.iter().filter(|row| !format!("{row:?}").contains("operation_target")).count();
        assert_eq!(remaining, 0, "{table}: {rows:?}");
    }
    for folder in ["drafts", "blobs", "conversions", "work"] {
        for node in ["1", "2"] {
            let remaining = cluster.files_in(&format!("{node}/{folder}"));
            assert!(remaining.is_empty(), "{folder}: {remaining:?}");
        }
    }
    for table in
        ["addresses", "address_blocks", "interfaces", "dns_entries", "node_networks", "hardware_addresses"]
    {
        let column = if table == "hardware_addresses" { "'x'" } else { "network_uuid" };
        let remaining = store
            .query(
                &format!("SELECT COUNT(*) FROM {table} WHERE {column} <> ?"),
                &[FLOATING_NETWORK_ID.into()],
            )
            .await;
        assert_eq!(remaining.unwrap()[0].scalar::<i64>().unwrap(), 0, "{table}");
    }
    let floating = addresses::page(store, FLOATING_NETWORK_ID, None, 300).await.unwrap();
    assert!(
        floating
            .iter()
            .all(|row| row.user.as_ref().is_none_or(|user| user.id == FLOATING_NETWORK_ID.to_string()))
    );
    let networks = store.query("SELECT COUNT(*) FROM networks", &[]).await.unwrap();
    assert_eq!(networks[0].scalar::<i64>().unwrap(), 1, "only the floating network remains");
    assert!(namespaces::get(store, "doomed").await.unwrap().is_none());
    assert!(keys::of_namespace(store, "doomed", 10).await.unwrap().is_empty());
    assert!(claims::list(store, "doomed").await.unwrap().is_empty());
    assert!(rules::of_namespace(store, "doomed", 10).await.unwrap().is_empty());
    assert_eq!(cluster.count_rows("event_links", "object_type = 'mapping_rule'").await, 0);
    assert_eq!(cluster.count_rows("webhooks", "1 = 1").await, 0);
    assert_eq!(cluster.count_rows("webhook_deliveries", "1 = 1").await, 0);
    assert!(metadata::get(store, ObjectType::Namespace, "doomed").await.unwrap().is_empty());
    assert!(namespaces::details(store, "doomed", "doomed").await.unwrap().trusts.is_empty());
    assert!(trusts::trusting(store, "doomed").await.unwrap().is_empty());
    for row in operations::of_target(store, &ObjectRef::namespace("doomed")).await.unwrap() {
        assert_eq!(row.state, OperationState::Complete, "{row:?}");
    }
    // The name can be reused, and the new namespace does not inherit old events.
    cluster.create_namespace("doomed").await;
    let messages = cluster.messages(&ObjectRef::namespace("doomed")).await;
    assert!(!messages.iter().any(|message| message.contains("operation")), "{messages:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn deletes_and_cleans_namespace() {
    let cluster = cluster().await;
    delete_everything_and_clean(&cluster).await;
    assert_namespace_removed(&cluster).await;
    let messages = cluster.messages(&ObjectRef::namespace("friend")).await;
    assert!(messages.contains(&"trust revoked, trusted namespace is gone".to_owned()), "{messages:?}");
}

/// Runs the scenario with one fault injected at one step.
async fn assert_survives_fault(step: &'static str, fault: Fault) {
    let cluster = cluster().await;
    let remaining = AtomicUsize::new(1);
    cluster
        .worker
        .inject(move |_, name| (name == step && remaining.swap(0, Ordering::Relaxed) == 1).then_some(fault));
    delete_everything_and_clean(&cluster).await;
    assert_namespace_removed(&cluster).await;
}

/// Returns every step of the operations that do not target instances.
fn every_step() -> impl Iterator<Item = &'static str> {
    let kinds = IMPLEMENTATIONS.iter().map(|implementation| implementation.kind);
    kinds.filter(|kind| !instances::targets_instance(kind)).flat_map(|kind| kind.steps.iter().copied())
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_survive_one_failure_at_every_step() {
    for step in every_step() {
        assert_survives_fault(step, Fault::Fail).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_survive_worker_death_after_every_step() {
    for step in every_step() {
        assert_survives_fault(step, Fault::Die).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn operation_steps_are_idempotent() {
    let cluster = cluster().await;
    let seen: Mutex<Vec<String>> = Mutex::default();
    cluster.worker.inject(move |_, name| {
        let mut seen = seen.lock().unwrap();
        let first = !seen.iter().any(|name_seen| name_seen == name);
        seen.push(name.to_owned());
        // A worker that dies after a step makes the next worker repeat it.
        first.then_some(Fault::Die)
    });
    delete_everything_and_clean(&cluster).await;
    assert_namespace_removed(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn permanently_failing_step_ends_in_error_report() {
    let cluster = cluster().await;
    cluster.worker.inject(|_, name| (name == "namespace_delete_trusts").then_some(Fault::Fail));
    objects::namespace::delete(&cluster.app, &caller(), "doomed").await.unwrap();
    cluster.settle().await;
    let rows = operations::of_target(&*cluster.app.store, &ObjectRef::namespace("doomed")).await.unwrap();
    assert_eq!((rows[0].state, rows[0].attempts), (OperationState::Error, 7));
    let report = rows[0].error_report.as_ref().unwrap();
    assert_eq!(report.details["step"], "namespace_delete_trusts");
    let messages = cluster.messages(&ObjectRef::namespace("doomed")).await;
    assert_eq!(messages.iter().filter(|m| *m == "operation will be tried again").count(), 6);
    assert!(messages.contains(&"operation failed".to_owned()));
}

static UNDONE: Mutex<Vec<&str>> = Mutex::new(Vec::new());

/// An operation whose last step fails, so that the first two are undone.
#[derive(Serialize, Deserialize)]
struct FailingLastStep {}

impl Operation for FailingLastStep {
    const KIND: OperationKind = OperationKind {
        operation_type: OperationType::Namespace,
        name: "refused",
        removes_target: false,
        lane: Lane::Quick,
        steps: &["first", "second", "third"],
    };
}

const FAILING_LAST_STEP: Implementation = Implementation::new(
    FailingLastStep::KIND,
    &[
        Step {
            name: "first",
            run: |_, _| Box::pin(async { Ok(()) }),
            undo: Undo::Run(|_, _| {
                Box::pin(async {
                    UNDONE
                        .lock()
                        .map(|mut undone| undone.push("first"))
                        .map_err(|_| Error::Internal(String::new()))
                })
            }),
        },
        Step {
            name: "second",
            run: |_, _| Box::pin(async { Ok(()) }),
            undo: Undo::Run(|_, _| {
                Box::pin(async {
                    UNDONE
                        .lock()
                        .map(|mut undone| undone.push("second"))
                        .map_err(|_| Error::Internal(String::new()))
                })
            }),
        },
        Step {
            name: "third",
            run: |_, _| Box::pin(async { Err(Error::Internal("a secret of the inside".into())) }),
            undo: Undo::NotNeeded("the step has no effect"),
        },
    ],
);

#[derive(Serialize, Deserialize)]
struct SingleStep {}

impl Operation for SingleStep {
    const KIND: OperationKind = OperationKind {
        operation_type: OperationType::Namespace,
        name: "fine",
        removes_target: false,
        lane: Lane::Quick,
        steps: &["only"],
    };
}

const SINGLE_STEP: Implementation = Implementation::new(
    SingleStep::KIND,
    &[Step {
        name: "only",
        run: |_, _| Box::pin(async { Ok(()) }),
        undo: Undo::NotNeeded("the step has no effect"),
    }],
);

async fn enqueue<P: Operation>(
    cluster: &Cluster,
    parameters: P,
    depends_on: Vec<OperationHandle>,
) -> OperationHandle {
    let mut tx = cluster.app.store.begin().await.unwrap();
    let mut new = NewOperation::new(ObjectRef::namespace("system"), Some("system".into()), parameters);
    new.depends_on = depends_on;
    let handle = new.enqueue(&mut tx).await.unwrap();
    tx.finish(Ok(()), &mut Retry::default()).await.unwrap().unwrap();
    handle
}

async fn row(cluster: &Cluster, handle: &OperationHandle) -> OperationRow {
    operations::get(&*cluster.app.store, handle.op_uuid).await.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_operation_is_undone_in_reverse_and_aborts_dependents() {
    let cluster = Cluster::with(FAST_SETTINGS, Some(vec![FAILING_LAST_STEP, SINGLE_STEP])).await;
    let parent = enqueue(&cluster, FailingLastStep {}, vec![]).await;
    let child = enqueue(&cluster, SingleStep {}, vec![parent.clone()]).await;
    let grandchild = enqueue(&cluster, SingleStep {}, vec![child.clone()]).await;
    let other = enqueue(&cluster, SingleStep {}, vec![]).await;
    let after_other = enqueue(&cluster, SingleStep {}, vec![other.clone()]).await;
    cluster.settle().await;
    assert_eq!(*UNDONE.lock().unwrap(), ["second", "first"]);
    let failed = row(&cluster, &parent).await;
    assert_eq!(failed.state, OperationState::Error);
    let report = failed.error_report.unwrap();
    assert!(!report.message.contains("secret of the inside"), "internal errors are not exposed");
    assert_eq!(row(&cluster, &child).await.state, OperationState::Abort);
    assert_eq!(row(&cluster, &grandchild).await.state, OperationState::Abort);
    assert_eq!(row(&cluster, &other).await.state, OperationState::Complete);
    assert_eq!(row(&cluster, &after_other).await.state, OperationState::Complete);
}

#[tokio::test(flavor = "multi_thread")]
async fn operation_that_kills_every_worker_ends_in_error() {
    let settings = [("CLUSTER_OP_LEASE", "1"), ("CLUSTER_OP_MAX_ATTEMPTS", "2")];
    let cluster = Cluster::with(&settings, Some(vec![SINGLE_STEP])).await;
    cluster.worker.inject(|_, _| Some(Fault::Die));
    let handle = enqueue(&cluster, SingleStep {}, vec![]).await;
    cluster.settle().await;
    let row = row(&cluster, &handle).await;
    assert_eq!(row.state, OperationState::Error);
    assert!(row.error_report.unwrap().message.contains("2 workers stopped"));
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_operation_stays_queued_and_blocks_nothing() {
    let cluster = Cluster::with(FAST_SETTINGS, Some(vec![FAILING_LAST_STEP])).await;
    let foreign = enqueue(&cluster, SingleStep {}, vec![]).await;
    let known = enqueue(&cluster, FailingLastStep {}, vec![]).await;
    muster_test_cluster::wait_for("the known operation to end", async || {
        cluster.worker.run_once().await.unwrap();
        row(&cluster, &known).await.state.is_final().then_some(())
    })
    .await;
    assert_eq!(row(&cluster, &foreign).await.state, OperationState::Queued);
    cluster.allow_unfinished_operations("no worker of this cluster knows the operation");
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_workers_run_each_operation_once() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    #[derive(Serialize, Deserialize)]
    struct Counted {}

    impl Operation for Counted {
        const KIND: OperationKind = OperationKind {
            operation_type: OperationType::Namespace,
            name: "counted",
            removes_target: false,
            lane: Lane::Quick,
            steps: &["count"],
        };
    }

    const COUNTED: Implementation = Implementation::new(
        Counted::KIND,
        &[Step {
            name: "count",
            run: |_, _| {
                Box::pin(async {
                    RUNS.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                })
            },
            undo: Undo::NotNeeded("the counter is only read by the test"),
        }],
    );
    let cluster = Cluster::with(&[], Some(vec![COUNTED])).await;
    for _ in 0..40 {
        enqueue(&cluster, Counted {}, vec![]).await;
    }
    let workers: Vec<_> = (0..4)
        .map(|_| {
            let worker = Worker::with(Arc::clone(&cluster.app), vec![COUNTED]);
            tokio::spawn(async move { while worker.run_once().await.unwrap() > 0 {} })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
    cluster.settle().await;
    assert_eq!(RUNS.load(Ordering::Relaxed), 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn removes_finished_operations_after_cleaner_delay() {
    let cluster = Cluster::with(FAST_SETTINGS, Some(vec![SINGLE_STEP])).await;
    let handle = enqueue(&cluster, SingleStep {}, vec![]).await;
    reconcile::cleaner::run(&cluster.app).await.unwrap();
    assert_eq!(row(&cluster, &handle).await.state, OperationState::Queued, "unfinished operations are kept");
    cluster.settle().await;
    reconcile::cleaner::run(&cluster.app).await.unwrap();
    assert!(operations::get(&*cluster.app.store, handle.op_uuid).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_float_and_interface_deletion_leak_no_address() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let cluster = Cluster::on(&url, tempfile::tempdir().unwrap(), FAST_SETTINGS, None).await;
    cluster.create_namespace("doomed").await;
    let request = objects::network::NetworkRequest {
        name: Some("net".into()),
        netblock: Some("10.0.0.0/24".into()),
        provide_nat: Some(false),
        namespace: Some("doomed".into()),
        ..Default::default()
    };
    let network = objects::network::create(&cluster.app, &caller(), request).await.unwrap().uuid.to_string();
    cluster.settle_networks().await;
    for _ in 0..25 {
        let id = cluster.create_interface(&network, "doomed", "host", 1).await.id;
        let app = Arc::clone(&cluster.app);
        let float = tokio::spawn(async move {
            for _ in 0..2 {
                // Conflicts with the deletion are expected.
                let _ = objects::interface::float(&app, &caller(), &id.to_string()).await;
                let _ = objects::interface::defloat(&app, &caller(), &id.to_string()).await;
                let _ = objects::interface::float(&app, &caller(), &id.to_string()).await;
            }
        });
        cluster.delete_interface(id).await;
        float.await.unwrap();
    }
    let allocated = addresses::page(&*cluster.app.store, FLOATING_NETWORK_ID, None, 300).await.unwrap();
    let leaked: Vec<_> = allocated.iter().filter(|row| row.kind == AddressType::Floating).collect();
    assert!(leaked.is_empty(), "{leaked:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn keeps_referenced_blobs_during_concurrent_deletion() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let cluster = Arc::new(Cluster::on(&url, tempfile::tempdir().unwrap(), FAST_SETTINGS, None).await);
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let sweeper = {
        let (cluster, stop) = (Arc::clone(&cluster), Arc::clone(&stop));
        tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                reconcile::artifact_watch::delete_unused(&cluster.app).await.unwrap();
                reconcile::storage::run_once(&cluster.app).await.unwrap();
            }
        })
    };
    let token = cluster.token("system").await;
    // Each task repeatedly uploads one of three contents and deletes the artifact.
    let users: Vec<_> = (0..6)
        .map(|number| {
            let (cluster, token) = (Arc::clone(&cluster), token.clone());
            tokio::spawn(async move { upload_and_delete(&cluster, &token, number).await })
        })
        .collect();
    for user in users {
        user.await.unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    sweeper.await.unwrap();
    // The remaining blobs are referenced, complete and readable; all others are deleted.
    let app = &cluster.app;
    let (remaining, _) = objects::artifact::list_page(app, &caller(), None).await.unwrap();
    assert_eq!(remaining.len(), 6);
    for artifact in remaining {
        let blob = artifact.blob_uuid.unwrap().to_string();
        let bytes = cluster.download_until_error(&token, &blob).await;
        assert_eq!(bytes.len(), 5000, "{artifact:?}");
    }
    let rows = app.store.query("SELECT COUNT(*) FROM blobs WHERE state = 'created'", &[]).await.unwrap();
    assert_eq!(rows[0].scalar::<i64>().unwrap(), 3);
}

async fn upload_and_delete(cluster: &Cluster, token: &str, number: u8) {
    for round in 0..12 {
        let content = vec![number % 3; 5000];
        let upload = cluster.call(token, Method::POST, "/upload", None).await.body["uuid"].clone();
        let path = format!("/upload/{}", upload.as_str().unwrap());
        cluster.send(token, Method::POST, &path, content).await;
        let name = format!("/artifacts/upload/n{number}");
        let mut tries = 0;
        let created = loop {
            tries += 1;
            let body = json!({"upload_uuid": upload, "artifact_type": "other"});
            let response = cluster.call(token, Method::POST, &name, Some(body)).await;
            if response.status == 200 {
                break response.body;
            }
            // Another task is storing or deleting the same content.
            assert_eq!(response.status, 503, "{}", response.text);
            assert!(tries < 2000, "{}", response.text);
        };
        if round < 11 {
            let path = format!("/artifacts/{}", created["uuid"].as_str().unwrap());
            assert_eq!(cluster.call(token, Method::DELETE, &path, None).await.status, 200);
        }
    }
}
