//! Hosts that return, are lost again, or continue with stale information while their instances are evacuated.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::http::Method;
use muster_control::objects::instance::evacuate;
use muster_control::objects::instance::power::{self, PowerAction};
use muster_control::operations::Fault;
use muster_control::{objects, reconcile};
use muster_store::{operations, transaction};
use muster_test_cluster::{caller, wait_for};
use muster_types::ids::{BlobId, InstanceId};
use muster_types::node::NodeApi as _;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::operation::OperationType;
use muster_types::vm::VmPower;
use serde_json::{Value, json};

use crate::instances::{create, text};
use crate::lost_hosts::LostHost;

const RESTART_ELSEWHERE: &str =
    r#"{"disposable": true, "restart": "elsewhere", "fencing": "self", "placed_on": "sim-1"}"#;

impl LostHost {
    async fn execute(&self, sql: &str) {
        transaction!(self.cluster.app.store, |tx| { Ok(tx.execute(sql, &[]).await?) }).unwrap();
    }

    /// Returns the node and the generation of the instance, which must be created.
    async fn placement(&self) -> (String, i64) {
        let record = self.show().await;
        assert_eq!((text(&record, "state"), text(&record, "power_state")), ("created", "on"), "{record}");
        (text(&record, "node").to_owned(), record["generation"].as_i64().unwrap())
    }

    async fn power_on(&self, node: usize, id: InstanceId) -> Option<VmPower> {
        self.cluster.app.nodes[node - 1].vms().power(id).await.unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn evacuation_does_not_affect_instances_of_a_host_that_has_returned() {
    let host = LostHost::new(&json!({})).await;
    let overrides = json!({"placed_on": "sim-1", "network": [{"network_uuid": "blue"}]});
    let doomed = create(&host.cluster, &host.token, "doomed", &overrides).await;
    let doomed = format!("/instances/{}", text(&doomed, "uuid"));
    assert!(host.call(Method::DELETE, &doomed, None).await.status.is_success());
    host.cluster.lose_node("sim-1").await;
    let app = &host.cluster.app;
    let lost = objects::node::find(app, "sim-1").await.unwrap();
    host.return_host().await;

    let records = evacuate::evacuate(app, &caller(), &lost, true).await.unwrap();
    assert_eq!(records.len(), 2);
    for record in records {
        assert_eq!(record.reason, "node sim-1 is alive again", "{record:?}");
    }
    reconcile::vms::run_once(app).await.unwrap();
    assert_eq!(host.placement().await, ("sim-1".to_owned(), 1));
    let record = host.call(Method::GET, &doomed, None).await.body;
    assert_eq!(text(&record, "state"), "delete-wait", "{record}");
    assert_eq!(record["interfaces"].as_array().unwrap().len(), 1, "its VM is still running");
    host.cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_to_the_former_node_does_not_start_the_vm_again() {
    let host = LostHost::new(&json!({"disposable": true})).await;
    host.cluster.lose_node("sim-1").await;
    host.evacuate_to_other_node().await;
    // The former host reboots, and its daemon has not learned of the evacuation.
    host.cluster.node.lose_all_vms();
    let app = &host.cluster.app;
    let started = power::apply(app, &caller(), &app.nodes[0], host.id(), PowerAction::On).await;
    let error = started.unwrap_err().to_string();
    assert!(error.contains("was placed again"), "{error}");
    assert_eq!(host.power_on(1, host.id()).await, Some(VmPower::Lost));
    assert_eq!(host.power_on(2, host.id()).await, Some(VmPower::On));
    host.return_host().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operation_that_was_frozen_during_an_evacuation_does_not_start_the_vm() {
    let host = LostHost::new(&json!({"disposable": true})).await;
    let (app, worker) = (&host.cluster.app, Arc::clone(&host.cluster.worker));
    let body = json!({"name": "db", "cpus": 1, "memory": 64, "disk": [{"size": 1}], "network": [], "placed_on": "sim-1"});
    let created = host.call(Method::POST, "/instances", Some(body)).await.body;
    let id: InstanceId = text(&created, "uuid").parse().unwrap();
    let lock = app.instance_locks.lock(id).await;
    let frozen = tokio::spawn(async move { worker.run_once().await });
    wait_for("the operation to wait", async || app.instance_locks.is_awaited(&id).then_some(())).await;
    host.cluster.lose_node("sim-1").await;
    let evacuated = host.evacuate().await;
    assert!(evacuated.text.contains("evacuating"), "{}", evacuated.text);
    drop(lock);
    frozen.await.unwrap().unwrap();
    assert_eq!(host.power_on(1, id).await, None);
    host.cluster.settle().await;
    assert_eq!(host.power_on(1, id).await, None);
    assert_eq!(host.power_on(2, id).await, Some(VmPower::On));
    host.return_host().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn vm_of_the_current_generation_replaces_a_stale_one_while_a_pass_waits() {
    let host = LostHost::new(&json!({})).await;
    let (id, node) = (host.id(), Arc::clone(&host.cluster.node));
    let app = Arc::clone(&host.cluster.app);
    let lock = app.instance_locks.lock(id).await;
    host.execute("UPDATE instances SET generation = 2").await;
    let pass_app = Arc::clone(&app);
    let pass = tokio::spawn(async move { reconcile::vms::run_once(&pass_app).await });
    wait_for("the pass to find the stale VM", async || app.instance_locks.is_awaited(&id).then_some(()))
        .await;
    let mut plan = node.vm_plan(id).unwrap();
    plan.generation = 2;
    node.vms().remove(id).await.unwrap();
    node.vms().build(&plan).await.unwrap();
    node.vms().start(&plan).await.unwrap();
    drop(lock);
    pass.await.unwrap().unwrap();
    assert_eq!(host.lost_found(1), Vec::<String>::new());
    assert_eq!(host.power_on(1, id).await, Some(VmPower::On));
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_evacuation_keeps_disks_of_earlier_generations() {
    let settings = [("CLUSTER_OP_MAX_ATTEMPTS", "1")];
    let host = LostHost::with(&json!({"disposable": true}), "10.0.0.0/24", &settings).await;
    host.cluster.lose_node("sim-1").await;
    host.evacuate().await;
    let plan = host.cluster.node.vm_plan(host.id()).unwrap();
    host.cluster.other.vms().build(&plan).await.unwrap();
    host.cluster.worker.inject(|row, _| (row.name == "evacuate_instance").then_some(Fault::Fail));
    host.cluster.settle().await;
    let record = host.show().await;
    assert_eq!(text(&record, "state"), "error", "{record}");
    assert_eq!(
        record["interfaces"], host.instance["interfaces"],
        "the VM on the lost host has its addresses"
    );
    reconcile::vms::run_once(&host.cluster.app).await.unwrap();
    assert_eq!(host.lost_found(2), [text(&host.instance, "uuid")]);
    host.return_host().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn instance_whose_evacuation_ended_without_a_result_keeps_its_addresses() {
    let host = LostHost::new(&json!({"disposable": true})).await;
    host.cluster.lose_node("sim-1").await;
    host.evacuate().await;
    host.execute("DELETE FROM operations WHERE state = 'queued'").await;
    reconcile::instance_watch::run(&host.cluster.app).await.unwrap();
    host.cluster.settle().await;
    let record = host.show().await;
    assert_eq!((text(&record, "state"), &record["node"]), ("error", &Value::Null), "{record}");
    assert_eq!(
        record["interfaces"], host.instance["interfaces"],
        "the VM on the lost host has its addresses"
    );
    host.return_host().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_of_a_deleted_node_end() {
    let host = LostHost::new(&json!({})).await;
    let app = &host.cluster.app;
    let node = app.nodes[0].identity().id;
    assert!(host.call(Method::DELETE, &host.path(""), None).await.status.is_success());
    host.cluster.lose_node("sim-1").await;
    // Its daemon has begun to delete the instance.
    host.execute("UPDATE operations SET state = 'executing', holder = 'x', lease_expires = 1e12 WHERE state = 'queued'")
        .await;
    let conversion = operations::NewOperation {
        operation_type: OperationType::ImageCache,
        name: "convert_image",
        tasks: vec!["image_convert"],
        arguments: json!({"node": node}),
        depends_on: vec![],
        namespace: None,
        target: ObjectRef::new(ObjectType::Blob, BlobId::new()),
        request_id: None,
        node: Some(node),
        trace: None,
    };
    let enqueue = async || {
        transaction!(app.store, |tx| { Ok(operations::insert(tx, &conversion).await?) }).unwrap();
    };
    enqueue().await;
    let deleted = host.call(Method::DELETE, "/nodes/sim-1", Some(json!({"dead": true}))).await;
    assert_eq!(deleted.body["state"], "deleted", "{}", deleted.text);
    assert_eq!(text(&host.show().await, "state"), "deleted");
    assert_eq!(operations::unfinished(&*app.store).await.unwrap(), 0);
    // Queued concurrently with the deletion.
    enqueue().await;
    reconcile::instance_watch::run(app).await.unwrap();
    assert_eq!(operations::unfinished(&*app.store).await.unwrap(), 0);
    reconcile::checkin::join(app).await.unwrap_err();
}

/// Restarts the instance from the lost `sim-1` on `sim-2`, which is lost, too, before the evacuation is complete.
async fn lose_second_host(host: &LostHost, fault: Option<Fault>) {
    host.cluster.lose_node("sim-1").await;
    host.set_leases("sim-1", None, Some(30.0)).await;
    assert_eq!(text(&host.show().await, "node"), "sim-2");
    if let Some(fault) = fault {
        let injected = AtomicBool::new(false);
        host.cluster.worker.inject(move |_, name| {
            (name == "instance_start" && !injected.swap(true, Ordering::Relaxed)).then_some(fault)
        });
        host.cluster.worker.run_once().await.unwrap();
    }
    host.return_host().await;
    host.cluster.lose_node("sim-2").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn instance_restarts_elsewhere_when_its_second_host_is_lost_before_the_evacuation_began() {
    let host = LostHost::new(&serde_json::from_str(RESTART_ELSEWHERE).unwrap()).await;
    lose_second_host(&host, None).await;
    for _ in 0..2 {
        reconcile::node_watch::run(&host.cluster.app).await.unwrap();
    }
    host.cluster.settle().await;
    assert_eq!(host.placement().await, ("sim-1".to_owned(), 2));
    host.return_host().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn instance_restarts_elsewhere_when_its_second_host_is_lost_during_the_evacuation() {
    let host = LostHost::new(&serde_json::from_str(RESTART_ELSEWHERE).unwrap()).await;
    lose_second_host(&host, Some(Fault::Fail)).await;
    for _ in 0..2 {
        reconcile::node_watch::run(&host.cluster.app).await.unwrap();
    }
    assert_eq!(text(&host.show().await, "node"), "sim-2", "its VM may be running");
    host.set_leases("sim-2", None, Some(30.0)).await;
    host.cluster.settle().await;
    assert_eq!(host.placement().await, ("sim-1".to_owned(), 3));
    host.return_host().await;
}
