//! Instance lifecycle: power, host failures, errors and deletion.

use axum::body::Body;
use axum::http::{Method, Request};
use muster_control::reconcile;
use muster_node::{GuestScript, SimulationScript};
use muster_store::transaction;
use muster_test_cluster::{Cluster, wait_for};
use serde_json::{Value, json};

use super::{
    create, create_and_settle, id, object, path, post_action, show, status_and_error, text, try_create,
};
use crate::networks::{cluster, create_network, delete, get};

async fn wait_for_power(cluster: &Cluster, token: &str, record: &Value, power: &str) -> Value {
    wait_for(&format!("power {power}"), async || {
        let record = show(cluster, token, record).await;
        (text(&record, "power_state") == power).then_some(record)
    })
    .await
}

/// Returns the message and reason of the last power state event.
async fn last_power_event(cluster: &Cluster, record: &Value) -> (String, Value) {
    let events = cluster.events(&object(record)).await;
    let event = events.into_iter().find(|event| event.message.starts_with("power state is now")).unwrap();
    (event.message, event.extra["reason"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn powers_pauses_and_reboots_instance() {
    let (cluster, token) = cluster(&[]).await;
    // The agent never responds.
    let guest = GuestScript { ready_after: None, ..GuestScript::default() };
    for node in [&cluster.node, &cluster.other] {
        node.set_script(SimulationScript { guest: guest.clone(), ..SimulationScript::default() });
    }
    let record = create_and_settle(&cluster, &token, "www", &json!({})).await;
    let powered_off_error =
        |verb: &str| format!("Invalid lifecycle state: you cannot {verb} a powered off instance");
    let ports = record["console_port"].clone();
    for (verb, status, error, power, agent) in [
        ("poweron", 200, String::new(), "on", "not ready (no contact)"),
        ("rebootsoft", 200, String::new(), "on", "not ready (no contact)"),
        ("reboothard", 200, String::new(), "on", "not ready (no contact)"),
        (
            "unpause",
            409,
            "Invalid lifecycle state: unpause failed after 1 attempts: the instance is not paused".into(),
            "on",
            "not ready (no contact)",
        ),
        ("pause", 200, String::new(), "paused", "not ready (instance paused)"),
        (
            "pause",
            409,
            "Invalid lifecycle state: pause failed after 1 attempts: the instance is paused".into(),
            "paused",
            "not ready (instance paused)",
        ),
        ("poweron", 200, String::new(), "paused", "not ready (instance paused)"),
        ("unpause", 200, String::new(), "on", "not ready (no contact)"),
        ("poweroff", 200, String::new(), "off", "not ready (instance powered off)"),
        ("poweroff", 200, String::new(), "off", "not ready (instance powered off)"),
        ("rebootsoft", 409, powered_off_error("reboot"), "off", "not ready (instance powered off)"),
        ("reboothard", 409, powered_off_error("reboot"), "off", "not ready (instance powered off)"),
        ("pause", 409, powered_off_error("pause"), "off", "not ready (instance powered off)"),
        ("unpause", 409, powered_off_error("unpause"), "off", "not ready (instance powered off)"),
        ("poweron", 200, String::new(), "on", "not ready (no contact)"),
    ] {
        let response = post_action(&cluster, &token, &record, verb).await;
        assert_eq!(status_and_error(&response), (status, error.as_str()), "{verb}");
        if status == 200 {
            assert_eq!(response.text, "null\n");
        }
        let current = show(&cluster, &token, &record).await;
        assert_eq!(
            (text(&current, "power_state"), text(&current, "agent_state")),
            (power, agent),
            "after {verb}"
        );
        assert_eq!((text(&current, "state"), &current["console_port"]), ("created", &ports));
    }
    let messages = cluster.messages(&object(&record)).await;
    for verb in ["poweron", "poweroff", "pause", "unpause", "soft reboot", "hard reboot"] {
        assert!(messages.contains(&format!("{verb} request from REST API")), "{verb}: {messages:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn conditional_reboot_does_not_fail_after_it_has_happened() {
    let (cluster, token) = cluster(&[]).await;
    // The agent never responds.
    let guest = GuestScript { ready_after: None, ..GuestScript::default() };
    for node in [&cluster.node, &cluster.other] {
        node.set_script(SimulationScript { guest: guest.clone(), ..SimulationScript::default() });
    }
    let record = create_and_settle(&cluster, &token, "www", &json!({})).await;
    let tag = get(&cluster, &token, &path(&record, "")).await.headers["etag"].clone();
    let lock = cluster.app.instance_locks.lock(id(&record)).await;
    let request =
        Request::post(path(&record, "/reboothard")).header("authorization", format!("Bearer {token}"));
    let sent = cluster.request(request.header("if-match", tag).body(Body::empty()).unwrap());
    let change = async {
        wait_for("the request to wait for the instance", async || {
            cluster.app.instance_locks.is_awaited(&id(&record)).then_some(())
        })
        .await;
        let sql = "UPDATE instances SET agent_state = 'ready'";
        transaction!(cluster.app.store, |tx| { Ok(tx.execute(sql, &[]).await?) }).unwrap();
        drop(lock);
    };
    let (response, ()) = tokio::join!(sent, change);
    assert_eq!(response.status, 200, "{}", response.text);
    assert_eq!(show(&cluster, &token, &record).await["agent_state"], "not ready (no contact)");
}

#[tokio::test(flavor = "multi_thread")]
async fn records_reason_when_guest_ends() {
    let (cluster, token) = cluster(&[]).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let node = cluster.node_named(text(&record, "node"));
    node.power_off(id(&record), "the guest switched itself off");
    let stopped = wait_for_power(&cluster, &token, &record, "off").await;
    assert_eq!(
        (text(&stopped, "state"), text(&stopped, "agent_state")),
        ("created", "not ready (instance powered off)")
    );
    let event = last_power_event(&cluster, &record).await;
    assert_eq!(event, ("power state is now off".into(), json!("the guest switched itself off")));
    assert_eq!(post_action(&cluster, &token, &record, "poweron").await.status, 200);
    assert_eq!(show(&cluster, &token, &record).await["power_state"], "on");

    node.crash(id(&record), "signal 11");
    wait_for_power(&cluster, &token, &record, "crashed").await;
    assert_eq!(
        last_power_event(&cluster, &record).await,
        ("power state is now crashed".into(), json!("signal 11"))
    );
    let refused = post_action(&cluster, &token, &record, "pause").await;
    assert_eq!(
        status_and_error(&refused).1,
        "Invalid lifecycle state: you cannot pause a powered off instance"
    );
    assert_eq!(post_action(&cluster, &token, &record, "poweron").await.status, 200);
    assert_eq!(show(&cluster, &token, &record).await["power_state"], "on");
}

#[tokio::test(flavor = "multi_thread")]
async fn restarts_instances_that_ran_when_their_host_went_down() {
    let (cluster, token) = cluster(&[]).await;
    create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let on_second_node = |overrides: Value| {
        let mut overrides = overrides;
        overrides["placed_on"] = json!("sim-2");
        overrides
    };
    let on =
        create(&cluster, &token, "on", &on_second_node(json!({"network": [{"network_uuid": "blue"}]}))).await;
    let off = create(&cluster, &token, "off", &on_second_node(json!({}))).await;
    let ended = create(&cluster, &token, "ended", &on_second_node(json!({}))).await;
    let paused = create(&cluster, &token, "paused", &on_second_node(json!({}))).await;
    post_action(&cluster, &token, &off, "poweroff").await;
    post_action(&cluster, &token, &paused, "pause").await;
    cluster.other.power_off(id(&ended), "halt");
    wait_for_power(&cluster, &token, &ended, "off").await;
    cluster.other.lose_all_vms();
    for record in [&on, &paused] {
        wait_for("the start to be queued", async || {
            let messages = cluster.messages(&object(record)).await;
            messages.contains(&"restarting the VM after its host went down".to_owned()).then_some(())
        })
        .await;
    }
    reconcile::vms::run_once(&cluster.app).await.unwrap();
    cluster.settle().await;
    for (record, power) in [(&on, "on"), (&paused, "on"), (&off, "off"), (&ended, "off")] {
        let current = show(&cluster, &token, record).await;
        assert_eq!(
            (text(&current, "power_state"), text(&current, "state")),
            (power, "created"),
            "{}",
            record["name"]
        );
    }
    let starts = get(&cluster, &token, &path(&on, "/clusteroperations?all=true")).await.body;
    let starts: Vec<_> =
        starts.as_array().unwrap().iter().filter(|item| item["tasks"] == json!(["instance_start"])).collect();
    assert_eq!(starts.len(), 1, "started only once");

    // A failed restart is reported.
    cluster.other.set_script(SimulationScript {
        start_error: Some("no firmware".into()),
        ..SimulationScript::default()
    });
    cluster.other.lose_all_vms();
    wait_for("the failure", async || {
        cluster.settle().await;
        (show(&cluster, &token, &on).await["power_state"] == "crashed").then_some(())
    })
    .await;
    let (_, restart_error) = last_power_event(&cluster, &on).await;
    assert!(
        restart_error.as_str().unwrap().starts_with("it could not be started again: no firmware"),
        "{restart_error}"
    );
    cluster.other.set_script(SimulationScript::default());
    assert_eq!(post_action(&cluster, &token, &on, "poweron").await.status, 200);
    assert_eq!(show(&cluster, &token, &on).await["power_state"], "on");
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_creation_ends_in_error_with_reason_and_without_resources() {
    let (cluster, token) = cluster(&[("IP_DELETION_HALO_DURATION", "0")]).await;
    create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let overrides = json!({"placed_on": "sim-1", "network": [{"network_uuid": "blue", "float": true}]});
    for (name, script) in [
        (
            "start",
            SimulationScript { start_error: Some("no such model".into()), ..SimulationScript::default() },
        ),
        (
            "build",
            SimulationScript { build_error: Some("no such model".into()), ..SimulationScript::default() },
        ),
    ] {
        cluster.node.set_script(script);
        let record = create_and_settle(&cluster, &token, name, &overrides).await;
        assert_eq!(text(&record, "state"), "error", "{record}");
        assert!(text(&record, "error_message").contains("no such model"), "{record}");
        assert_eq!((&record["interfaces"], &record["console_port"]), (&json!([]), &Value::Null));
        let events = cluster.events(&object(&record)).await;
        let failed = events.iter().find(|event| event.message == "state is now creating-error").unwrap();
        assert!(failed.extra["reason"].as_str().unwrap().contains("no such model"), "{failed:?}");
        assert!(events.iter().any(|event| event.message == "state is now error"));
        assert!(cluster.vms().is_empty());
        assert_eq!(cluster.committed_capacity().await["sim-1"], (0, 0, 0));
        assert_eq!(cluster.count_rows("addresses", "kind IN ('instance', 'floating')").await, 0);
        for verb in ["poweron", "poweroff", "pause", "snapshot"] {
            let response = post_action(&cluster, &token, &record, verb).await;
            let error = format!("instance {} is not ready (error)", text(&record, "uuid"));
            assert_eq!(status_and_error(&response), (406, error.as_str()), "{verb}");
        }
        let interface_request = json!({"network_uuid": "blue"});
        let response =
            cluster.call(&token, Method::POST, &path(&record, "/interfaces"), Some(interface_request)).await;
        assert_eq!(status_and_error(&response), (406, "instance in invalid state for hot plug"));
        // It can still be deleted.
        assert_eq!(delete(&cluster, &token, &path(&record, "")).await.status, 200);
        cluster.settle().await;
        assert_eq!(show(&cluster, &token, &record).await["state"], "deleted");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_instance_releases_resources_and_is_cleaned_after_delay() {
    let (cluster, token) = cluster(&[("CLEANER_DELAY", "0")]).await;
    let network_id =
        create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let overrides = json!({"network": [{"network_uuid": "blue", "float": true}], "metadata": {"k": "v"}});
    let record = create(&cluster, &token, "www", &overrides).await;
    let deleting = delete(&cluster, &token, "/instances/www").await;
    assert_eq!((deleting.status.as_u16(), text(&deleting.body, "state")), (200, "delete-wait"));
    let repeated = delete(&cluster, &token, "/instances/www").await;
    assert_eq!(
        (repeated.status.as_u16(), &repeated.body["last_cluster_operation"]),
        (200, &deleting.body["last_cluster_operation"])
    );
    assert_eq!(post_action(&cluster, &token, &record, "poweron").await.status, 406);
    cluster.settle().await;
    let deleted = show(&cluster, &token, &record).await;
    assert_eq!((text(&deleted, "state"), text(&deleted, "power_state")), ("deleted", "off"));
    assert_eq!((&deleted["interfaces"], &deleted["console_port"]), (&json!([]), &Value::Null));
    assert!(cluster.vms().is_empty());
    assert_eq!(cluster.committed_capacity().await[text(&record, "node")], (0, 0, 0));
    assert_eq!(cluster.count_rows("instance_ports", "1 = 1").await, 0);
    let addresses = get(&cluster, &token, &format!("/networks/{network_id}/addresses")).await.body;
    let types: Vec<&str> = addresses.as_array().unwrap().iter().map(|item| text(item, "type")).collect();
    assert!(types.contains(&"deletion-halo") && !types.contains(&"instance"), "{types:?}");
    assert_eq!(
        status_and_error(&delete(&cluster, &token, &path(&record, "")).await),
        (404, "instance not found")
    );
    assert_eq!(get(&cluster, &token, "/instances/www").await.status, 404);

    cluster.messages(&object(&record)).await;
    reconcile::cleaner::run(&cluster.app).await.unwrap();
    assert_eq!(
        status_and_error(&get(&cluster, &token, &path(&record, "")).await),
        (404, "instance not found")
    );
    assert_eq!(cluster.count_rows("metadata", "object_type = 'instance'").await, 0);
    assert!(cluster.messages(&object(&record)).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn instance_deleted_during_creation_is_never_started() {
    let (cluster, token) = cluster(&[]).await;
    create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let record =
        try_create(&cluster, &token, "www", &json!({"network": [{"network_uuid": "blue"}]})).await.body;
    let error = format!("instance {} is not ready (initial)", text(&record, "uuid"));
    assert_eq!(
        status_and_error(&post_action(&cluster, &token, &record, "poweron").await),
        (406, error.as_str())
    );
    assert_eq!(delete(&cluster, &token, &path(&record, "")).await.status, 200);
    cluster.settle().await;
    assert_eq!(show(&cluster, &token, &record).await["state"], "deleted");
    assert!(cluster.vms().is_empty());
    let all = get(&cluster, &token, &path(&record, "/clusteroperations?all=true")).await.body;
    let states: Vec<&str> = all.as_array().unwrap().iter().map(|item| text(item, "state")).collect();
    assert_eq!(states, ["complete", "abort"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn deletes_all_instances_of_one_namespace_only() {
    let (cluster, token) = cluster(&[]).await;
    cluster.create_namespace("beta").await;
    let (beta, system) = (cluster.token("beta").await, cluster.token("system").await);
    let deleted = create(&cluster, &token, "gone", &json!({})).await;
    delete(&cluster, &token, &path(&deleted, "")).await;
    cluster.settle().await;
    let mine = create(&cluster, &token, "mine", &json!({})).await;
    let failed = try_create(&cluster, &token, "failed", &json!({"cpus": 500})).await;
    assert_eq!(failed.status, 507);
    let beta_instance = create(&cluster, &beta, "theirs", &json!({})).await;
    let delete_all =
        async |token: &str, body: Value| cluster.call(token, Method::DELETE, "/instances", Some(body)).await;
    for (caller_token, body, status, error) in [
        (&token, json!({"confirm": false}), 400, "parameter confirm is not set true"),
        (&token, json!({"confirm": true, "namespace": "beta"}), 401, "you cannot delete other namespaces"),
        (&token, json!({"confirm": true, "namespace": "system"}), 401, "you cannot delete other namespaces"),
        (&system, json!({"confirm": true, "namespace": "absent"}), 404, "namespace not found"),
    ] {
        assert_eq!(
            status_and_error(&delete_all(caller_token, body.clone()).await),
            (status, error),
            "{body}"
        );
    }
    // Clients other than the released one send no body.
    let list = cluster.call(&token, Method::DELETE, "/instances/", None).await.body;
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), 2, "all existing instances, including failed ones");
    assert!(list.contains(&mine["uuid"]) && !list.contains(&deleted["uuid"]));
    cluster.settle().await;
    assert_eq!(show(&cluster, &token, &mine).await["state"], "deleted");
    assert_eq!(show(&cluster, &beta, &beta_instance).await["state"], "created");
    assert_eq!(delete_all(&token, json!({"confirm": true})).await.body, json!([]));
    let own = create(&cluster, &system, "own", &json!({})).await;
    let list = delete_all(&system, json!({"confirm": true, "namespace": "system"})).await.body;
    assert_eq!(list, json!([own["uuid"]]), "system stands for itself only");
    cluster.settle().await;
    let own = create(&cluster, &system, "own", &json!({})).await;
    assert_eq!(delete_all(&system, json!({})).await.body, json!([own["uuid"]]));
    cluster.settle().await;
    assert_eq!(cluster.vms(), [id(&beta_instance)]);
    let list = delete_all(&system, json!({"namespace": "beta"})).await.body;
    assert_eq!(list, json!([beta_instance["uuid"]]));
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keeps_vm_without_record_and_removes_vm_of_deleted_instance() {
    let (cluster, token) = cluster(&[("CLEANER_DELAY", "0")]).await;
    let kept = create(&cluster, &token, "kept", &json!({"placed_on": "sim-1"})).await;
    let without_record = create(&cluster, &token, "stray", &json!({"placed_on": "sim-1"})).await;
    let deleted = create(&cluster, &token, "dead", &json!({"placed_on": "sim-1"})).await;
    let mut tx = cluster.app.store.begin().await.unwrap();
    let change = |sql: &'static str, record: &Value| (sql, text(record, "uuid").to_owned());
    for (sql, id) in [
        change("DELETE FROM instances WHERE uuid = ?", &without_record),
        change("UPDATE instances SET state = 'deleted' WHERE uuid = ?", &deleted),
    ] {
        tx.execute(sql, &[id.into()]).await.unwrap();
    }
    tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
    reconcile::vms::run_once(&cluster.app).await.unwrap();
    let mut remaining = cluster.node.vm_ids();
    remaining.sort_unstable();
    let mut expected = [id(&kept), id(&without_record)];
    expected.sort_unstable();
    assert_eq!(remaining, expected);
    let node = muster_types::object::ObjectRef::new(
        muster_types::object::ObjectType::Node,
        cluster.app.nodes[0].identity().id,
    );
    let messages = cluster.messages(&node).await;
    assert!(messages.contains(&"ignored a VM without a record".to_owned()), "{messages:?}");
    cluster.allow_vm_without_instance(id(&without_record), "only an operator removes it");
}

#[tokio::test(flavor = "multi_thread")]
async fn finishes_instance_whose_operation_was_lost() {
    let (cluster, token) = cluster(&[]).await;
    let creating = try_create(&cluster, &token, "making", &json!({})).await.body;
    let deleting = create_then_delete(&cluster, &token).await;
    let mut tx = cluster.app.store.begin().await.unwrap();
    tx.execute("DELETE FROM operations WHERE state = 'queued'", &[]).await.unwrap();
    tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
    reconcile::instance_watch::run(&cluster.app).await.unwrap();
    cluster.settle().await;
    let record = show(&cluster, &token, &creating).await;
    assert_eq!(
        (text(&record, "state"), text(&record, "error_message")),
        ("error", "its creation ended without a result")
    );
    assert_eq!(show(&cluster, &token, &deleting).await["state"], "deleted");
    assert!(cluster.vms().is_empty());
    assert!(cluster.committed_capacity().await.values().all(|promised| *promised == (0, 0, 0)));
}

/// Creates an instance and queues its deletion.
async fn create_then_delete(cluster: &Cluster, token: &str) -> Value {
    let record = try_create(cluster, token, "going", &json!({})).await.body;
    assert_eq!(delete(cluster, token, &path(&record, "")).await.status, 200);
    record
}
