//! From the first start to the last trace: power, hosts that go down, failures, deletion.

use axum::http::Method;
use muster_control::reconcile;
use muster_node::{GuestScript, SimulationScript};
use serde_json::{Value, json};

use super::{act, create, id, object, path, refusal, settled, show, text, try_create};
use crate::harness::{Cluster, wait_for};
use crate::networks::{cluster, delete, get, network};

async fn wait_for_power(cluster: &Cluster, token: &str, record: &Value, power: &str) -> Value {
    wait_for(&format!("power {power}"), async || {
        let record = show(cluster, token, record).await;
        (text(&record, "power_state") == power).then_some(record)
    })
    .await
}

/// Why the power changed last, as the events tell it.
async fn reason(cluster: &Cluster, record: &Value) -> (String, Value) {
    let events = cluster.events(&object(record)).await;
    let event = events.into_iter().find(|event| event.message.starts_with("power state is now")).unwrap();
    (event.message, event.extra["reason"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_is_switched_paused_and_rebooted() {
    let (cluster, token) = cluster(&[]).await;
    // Its agent never says anything.
    let guest = GuestScript { ready_after: None, ..GuestScript::default() };
    for node in [&cluster.node, &cluster.other] {
        node.set_script(SimulationScript { guest: guest.clone(), ..SimulationScript::default() });
    }
    let record = settled(&cluster, &token, "www", &json!({})).await;
    let off = |verb: &str| format!("Invalid lifecycle state: you cannot {verb} a powered off instance");
    let ports = record["console_port"].clone();
    for (verb, status, why, power, agent) in [
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
        ("rebootsoft", 409, off("reboot"), "off", "not ready (instance powered off)"),
        ("reboothard", 409, off("reboot"), "off", "not ready (instance powered off)"),
        ("pause", 409, off("pause"), "off", "not ready (instance powered off)"),
        ("unpause", 409, off("unpause"), "off", "not ready (instance powered off)"),
        ("poweron", 200, String::new(), "on", "not ready (no contact)"),
    ] {
        let answer = act(&cluster, &token, &record, verb).await;
        assert_eq!(refusal(&answer), (status, why.as_str()), "{verb}");
        if status == 200 {
            assert_eq!(answer.text, "null\n");
        }
        let now = show(&cluster, &token, &record).await;
        assert_eq!((text(&now, "power_state"), text(&now, "agent_state")), (power, agent), "after {verb}");
        assert_eq!((text(&now, "state"), &now["console_port"]), ("created", &ports));
    }
    let messages = cluster.messages(&object(&record)).await;
    for verb in ["poweron", "poweroff", "pause", "unpause", "soft reboot", "hard reboot"] {
        assert!(messages.contains(&format!("{verb} request from REST API")), "{verb}: {messages:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_ends_is_noticed_with_the_reason() {
    let (cluster, token) = cluster(&[]).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let node = cluster.node_named(text(&record, "node"));
    node.power_off(id(&record), "the guest switched itself off");
    let seen = wait_for_power(&cluster, &token, &record, "off").await;
    assert_eq!(
        (text(&seen, "state"), text(&seen, "agent_state")),
        ("created", "not ready (instance powered off)")
    );
    let told = reason(&cluster, &record).await;
    assert_eq!(told, ("power state is now off".into(), json!("the guest switched itself off")));
    assert_eq!(act(&cluster, &token, &record, "poweron").await.status, 200);
    assert_eq!(show(&cluster, &token, &record).await["power_state"], "on");

    node.crash(id(&record), "signal 11");
    wait_for_power(&cluster, &token, &record, "crashed").await;
    assert_eq!(reason(&cluster, &record).await, ("power state is now crashed".into(), json!("signal 11")));
    let refused = act(&cluster, &token, &record, "pause").await;
    assert_eq!(refusal(&refused).1, "Invalid lifecycle state: you cannot pause a powered off instance");
    assert_eq!(act(&cluster, &token, &record, "poweron").await.status, 200);
    assert_eq!(show(&cluster, &token, &record).await["power_state"], "on");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_on_when_its_host_went_down_is_started_again() {
    let (cluster, token) = cluster(&[]).await;
    network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let at = |more: Value| {
        let mut more = more;
        more["placed_on"] = json!("sim-2");
        more
    };
    let on = create(&cluster, &token, "on", &at(json!({"network": [{"network_uuid": "blue"}]}))).await;
    let off = create(&cluster, &token, "off", &at(json!({}))).await;
    let ended = create(&cluster, &token, "ended", &at(json!({}))).await;
    let paused = create(&cluster, &token, "paused", &at(json!({}))).await;
    act(&cluster, &token, &off, "poweroff").await;
    act(&cluster, &token, &paused, "pause").await;
    cluster.other.power_off(id(&ended), "halt");
    wait_for_power(&cluster, &token, &ended, "off").await;
    cluster.other.lose_all_vms();
    for record in [&on, &paused] {
        wait_for("the start to be queued", async || {
            let messages = cluster.messages(&object(record)).await;
            messages.contains(&"the host went down with it, it is started again".to_owned()).then_some(())
        })
        .await;
    }
    reconcile::vms::run_once(&cluster.app).await.unwrap();
    cluster.settle().await;
    for (record, power) in [(&on, "on"), (&paused, "on"), (&off, "off"), (&ended, "off")] {
        let now = show(&cluster, &token, record).await;
        assert_eq!(
            (text(&now, "power_state"), text(&now, "state")),
            (power, "created"),
            "{}",
            record["name"]
        );
    }
    let starts = get(&cluster, &token, &path(&on, "/clusteroperations?all=true")).await.body;
    let starts: Vec<_> =
        starts.as_array().unwrap().iter().filter(|one| one["tasks"] == json!(["instance_start"])).collect();
    assert_eq!(starts.len(), 1, "once is enough");

    // One that cannot be started again says so.
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
    let (_, why) = reason(&cluster, &on).await;
    assert!(why.as_str().unwrap().starts_with("it could not be started again: no firmware"), "{why}");
    cluster.other.set_script(SimulationScript::default());
    assert_eq!(act(&cluster, &token, &on, "poweron").await.status, 200);
    assert_eq!(show(&cluster, &token, &on).await["power_state"], "on");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_that_cannot_be_made_ends_in_error_with_the_reason_and_has_nothing() {
    let (cluster, token) = cluster(&[("IP_DELETION_HALO_DURATION", "0")]).await;
    network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let more = json!({"placed_on": "sim-1", "network": [{"network_uuid": "blue", "float": true}]});
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
        let record = settled(&cluster, &token, name, &more).await;
        assert_eq!(text(&record, "state"), "error", "{record}");
        assert!(text(&record, "error_message").contains("no such model"), "{record}");
        assert_eq!((&record["interfaces"], &record["console_port"]), (&json!([]), &Value::Null));
        let events = cluster.events(&object(&record)).await;
        let failed = events.iter().find(|event| event.message == "state is now creating-error").unwrap();
        assert!(failed.extra["reason"].as_str().unwrap().contains("no such model"), "{failed:?}");
        assert!(events.iter().any(|event| event.message == "state is now error"));
        assert!(cluster.vms().is_empty());
        assert_eq!(cluster.promised().await["sim-1"], (0, 0, 0));
        assert_eq!(cluster.count("addresses", "kind IN ('instance', 'floating')").await, 0);
        for verb in ["poweron", "poweroff", "pause", "snapshot"] {
            let answer = act(&cluster, &token, &record, verb).await;
            let why = format!("instance {} is not ready (error)", text(&record, "uuid"));
            assert_eq!(refusal(&answer), (406, why.as_str()), "{verb}");
        }
        let plug = json!({"network_uuid": "blue"});
        let answer = cluster.call(&token, Method::POST, &path(&record, "/interfaces"), Some(plug)).await;
        assert_eq!(refusal(&answer), (406, "instance in invalid state for hot plug"));
        // It still has to be deleted.
        assert_eq!(delete(&cluster, &token, &path(&record, "")).await.status, 200);
        cluster.settle().await;
        assert_eq!(show(&cluster, &token, &record).await["state"], "deleted");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_instance_gives_everything_back_and_is_forgotten_after_the_delay() {
    let (cluster, token) = cluster(&[("CLEANER_DELAY", "0")]).await;
    let net = network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let more = json!({"network": [{"network_uuid": "blue", "float": true}], "metadata": {"k": "v"}});
    let record = create(&cluster, &token, "www", &more).await;
    let going = delete(&cluster, &token, "/instances/www").await;
    assert_eq!((going.status.as_u16(), text(&going.body, "state")), (200, "delete-wait"));
    let again = delete(&cluster, &token, "/instances/www").await;
    assert_eq!(
        (again.status.as_u16(), &again.body["last_cluster_operation"]),
        (200, &going.body["last_cluster_operation"])
    );
    assert_eq!(act(&cluster, &token, &record, "poweron").await.status, 406);
    cluster.settle().await;
    let gone = show(&cluster, &token, &record).await;
    assert_eq!((text(&gone, "state"), text(&gone, "power_state")), ("deleted", "off"));
    assert_eq!((&gone["interfaces"], &gone["console_port"]), (&json!([]), &Value::Null));
    assert!(cluster.vms().is_empty());
    assert_eq!(cluster.promised().await[text(&record, "node")], (0, 0, 0));
    assert_eq!(cluster.count("instance_ports", "1 = 1").await, 0);
    let addresses = get(&cluster, &token, &format!("/networks/{net}/addresses")).await.body;
    let types: Vec<&str> = addresses.as_array().unwrap().iter().map(|one| text(one, "type")).collect();
    assert!(types.contains(&"deletion-halo") && !types.contains(&"instance"), "{types:?}");
    assert_eq!(refusal(&delete(&cluster, &token, &path(&record, "")).await), (404, "instance not found"));
    assert_eq!(get(&cluster, &token, "/instances/www").await.status, 404);

    cluster.messages(&object(&record)).await;
    reconcile::cleaner::run(&cluster.app).await.unwrap();
    assert_eq!(refusal(&get(&cluster, &token, &path(&record, "")).await), (404, "instance not found"));
    assert_eq!(cluster.count("metadata", "object_type = 'instance'").await, 0);
    assert!(cluster.messages(&object(&record)).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_deleted_while_it_is_made_is_never_started() {
    let (cluster, token) = cluster(&[]).await;
    network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let record =
        try_create(&cluster, &token, "www", &json!({"network": [{"network_uuid": "blue"}]})).await.body;
    let why = format!("instance {} is not ready (initial)", text(&record, "uuid"));
    assert_eq!(refusal(&act(&cluster, &token, &record, "poweron").await), (406, why.as_str()));
    assert_eq!(delete(&cluster, &token, &path(&record, "")).await.status, 200);
    cluster.settle().await;
    assert_eq!(show(&cluster, &token, &record).await["state"], "deleted");
    assert!(cluster.vms().is_empty());
    let all = get(&cluster, &token, &path(&record, "/clusteroperations?all=true")).await.body;
    let states: Vec<&str> = all.as_array().unwrap().iter().map(|one| text(one, "state")).collect();
    assert_eq!(states, ["complete", "abort"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn all_instances_of_a_namespace_are_deleted_only_when_that_is_meant() {
    let (cluster, token) = cluster(&[]).await;
    cluster.create_namespace("beta").await;
    let (beta, system) = (cluster.token("beta").await, cluster.token("system").await);
    let gone = create(&cluster, &token, "gone", &json!({})).await;
    delete(&cluster, &token, &path(&gone, "")).await;
    cluster.settle().await;
    let mine = create(&cluster, &token, "mine", &json!({})).await;
    let failed = try_create(&cluster, &token, "failed", &json!({"cpus": 500})).await;
    assert_eq!(failed.status, 507);
    let theirs = create(&cluster, &beta, "theirs", &json!({})).await;
    let all =
        async |token: &str, body: Value| cluster.call(token, Method::DELETE, "/instances", Some(body)).await;
    for (who, body, status, why) in [
        (&token, json!({}), 400, "parameter confirm is not set true"),
        (&token, json!({"confirm": false}), 400, "parameter confirm is not set true"),
        (&token, json!({"confirm": true, "namespace": "beta"}), 401, "you cannot delete other namespaces"),
        (&token, json!({"confirm": true, "namespace": "system"}), 401, "you cannot delete other namespaces"),
        (&system, json!({"confirm": true}), 400, "system user must specify parameter namespace"),
        (&system, json!({"confirm": true, "namespace": "absent"}), 404, "namespace not found"),
    ] {
        assert_eq!(refusal(&all(who, body.clone()).await), (status, why), "{body}");
    }
    let list = all(&token, json!({"confirm": true})).await.body;
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), 2, "those that are there, failed or not");
    assert!(list.contains(&mine["uuid"]) && !list.contains(&gone["uuid"]));
    cluster.settle().await;
    assert_eq!(show(&cluster, &token, &mine).await["state"], "deleted");
    assert_eq!(show(&cluster, &beta, &theirs).await["state"], "created");
    assert_eq!(all(&token, json!({"confirm": true})).await.body, json!([]));
    let own = create(&cluster, &system, "own", &json!({})).await;
    let list = all(&system, json!({"confirm": true, "namespace": "system"})).await.body;
    assert_eq!(list.as_array().unwrap().len(), 2, "system means everybody");
    cluster.settle().await;
    assert_eq!(show(&cluster, &system, &own).await["state"], "deleted");
    assert!(cluster.vms().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_no_record_explains_is_left_alone_and_one_whose_record_is_gone_is_removed() {
    let (cluster, token) = cluster(&[("CLEANER_DELAY", "0")]).await;
    let kept = create(&cluster, &token, "kept", &json!({"placed_on": "sim-1"})).await;
    let stray = create(&cluster, &token, "stray", &json!({"placed_on": "sim-1"})).await;
    let dead = create(&cluster, &token, "dead", &json!({"placed_on": "sim-1"})).await;
    let mut tx = cluster.app.store.begin().await.unwrap();
    let change = |sql: &'static str, record: &Value| (sql, text(record, "uuid").to_owned());
    for (sql, id) in [
        change("DELETE FROM instances WHERE uuid = ?", &stray),
        change("UPDATE instances SET state = 'deleted' WHERE uuid = ?", &dead),
    ] {
        tx.execute(sql, &[id.into()]).await.unwrap();
    }
    tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
    reconcile::vms::run_once(&cluster.app).await.unwrap();
    let mut left = cluster.node.vm_ids();
    left.sort_unstable();
    let mut expected = [id(&kept), id(&stray)];
    expected.sort_unstable();
    assert_eq!(left, expected);
    let node = muster_types::object::ObjectRef::new(
        muster_types::object::ObjectType::Node,
        cluster.app.nodes[0].identity().id,
    );
    let messages = cluster.messages(&node).await;
    assert!(messages.contains(&"ignored a VM without a record".to_owned()), "{messages:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_whose_operation_vanished_is_brought_to_an_end() {
    let (cluster, token) = cluster(&[]).await;
    let making = try_create(&cluster, &token, "making", &json!({})).await.body;
    let going = create_then_delete(&cluster, &token).await;
    let mut tx = cluster.app.store.begin().await.unwrap();
    tx.execute("DELETE FROM operations WHERE state = 'queued'", &[]).await.unwrap();
    tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
    reconcile::instance_watch::run(&cluster.app).await.unwrap();
    cluster.settle().await;
    let record = show(&cluster, &token, &making).await;
    assert_eq!(
        (text(&record, "state"), text(&record, "error_message")),
        ("error", "its creation ended without a result")
    );
    assert_eq!(show(&cluster, &token, &going).await["state"], "deleted");
    assert!(cluster.vms().is_empty());
    assert!(cluster.promised().await.values().all(|promised| *promised == (0, 0, 0)));
}

/// An instance whose deletion is queued.
async fn create_then_delete(cluster: &Cluster, token: &str) -> Value {
    let record = try_create(cluster, token, "going", &json!({})).await.body;
    assert_eq!(delete(cluster, token, &path(&record, "")).await.status, 200);
    record
}
