//! Placement of instances, and records of instances that cannot be placed.

use muster_test_cluster::{Cluster, caller};
use serde_json::{Value, json};

use super::{create, object, path, show, status_and_error, text, try_create};
use crate::networks::{cluster, create_network, delete, get};

/// Returns the record of an instance that could not be created.
async fn failed_instance(cluster: &Cluster, token: &str, name: &str) -> Value {
    get(cluster, token, &format!("/instances/{name}")).await.body
}

#[tokio::test(flavor = "multi_thread")]
async fn unplaceable_instance_reports_stage_and_keeps_record() {
    let (cluster, token) = cluster(&[]).await;
    create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let too_large = ": no node is large enough for this instance";
    for (name, overrides, stage, transient, detail) in [
        ("wide", json!({"cpus": 17}), "cpu_max_per_instance", false, ""),
        ("fat", json!({"memory": 100_000}), "sufficient_idle_memory", false, too_large),
        ("long", json!({"disk": [{"size": 900}, {"size": 900}]}), "sufficient_free_disk", false, too_large),
    ] {
        let mut overrides = overrides;
        overrides["network"] = json!([{"network_uuid": "blue", "float": true}]);
        let response = try_create(&cluster, &token, name, &overrides).await;
        let error = format!("No nodes remaining at scheduling stage {stage}{detail}");
        assert_eq!(status_and_error(&response), (507, error.as_str()));
        assert_eq!(
            (&response.body["stage"], &response.body["transient"]),
            (&json!(stage), &json!(transient))
        );
        let retry_after = response.headers.get("retry-after").map(|value| value.to_str().unwrap());
        assert_eq!(retry_after, transient.then_some("15"));

        let record = failed_instance(&cluster, &token, name).await;
        assert_eq!(
            (&response.body["instance_uuid"], &response.body["instance_state"]),
            (&record["uuid"], &json!("error"))
        );
        assert_eq!((text(&record, "state"), &record["node"]), ("error", &Value::Null), "{record}");
        assert_eq!(text(&record, "error_message"), format!("scheduling failed: {error}"));
        assert_eq!(record["interfaces"], json!([]));
        let events = cluster.events(&object(&record)).await;
        let aborted = format!("schedule has no candidates at stage {stage}, aborting");
        assert!(events.iter().any(|event| event.message == aborted), "{events:?}");
        let stage_event =
            events.iter().find(|event| event.message == format!("schedule at stage {stage}")).unwrap();
        for node in ["sim-1", "sim-2"] {
            assert!(
                stage_event.extra["dropped"][node].is_string(),
                "every dropped node has a reason: {stage_event:?}"
            );
        }
    }
    assert_eq!(cluster.count_rows("addresses", "kind IN ('instance', 'floating')").await, 0);
    assert_eq!(cluster.count_rows("instances", "claimed_cpus > 0").await, 0);
    assert!(cluster.committed_capacity().await.values().all(|promised| *promised == (0, 0, 0)));
    let record = failed_instance(&cluster, &token, "wide").await;
    assert_eq!(delete(&cluster, &token, &path(&record, "")).await.status, 200);
    cluster.settle().await;
    assert_eq!(show(&cluster, &token, &record).await["state"], "deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn places_instances_on_freed_capacity() {
    // CPUs are overcommitted by a factor of three.
    let cluster = Cluster::sized(None, &[], (1, 65536, 1024)).await;
    let token = cluster.token("system").await;
    let mut created = Vec::new();
    for number in 0..6 {
        created.push(create(&cluster, &token, &format!("n{number}"), &json!({})).await);
    }
    assert!(cluster.committed_capacity().await.values().all(|promised| *promised == (3, 1536, 3)));
    let response = try_create(&cluster, &token, "late", &json!({})).await;
    let error = "No nodes remaining at scheduling stage sufficient_idle_cpu";
    assert_eq!((status_and_error(&response), &response.body["transient"]), ((507, error), &json!(true)));
    delete(&cluster, &token, &path(&created[2], "")).await;
    let response = try_create(&cluster, &token, "early", &json!({})).await;
    assert_eq!(response.status, 507, "the deletion has not run yet");
    cluster.settle().await;
    let node = create(&cluster, &token, "then", &json!({})).await["node"].clone();
    assert_eq!(node, created[2]["node"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn places_on_node_requested_by_name_or_id() {
    let (cluster, token) = cluster(&[]).await;
    let second = cluster.app.nodes[1].identity().id.to_string();
    for (name, requested) in [("by-name", "sim-2"), ("by-id", second.as_str())] {
        let record = create(&cluster, &token, name, &json!({"placed_on": requested})).await;
        assert_eq!((text(&record, "node"), text(&record, "requested_placement")), ("sim-2", "sim-2"));
    }
    let response = try_create(&cluster, &token, "wide", &json!({"placed_on": "sim-2", "cpus": 17})).await;
    assert_eq!(response.body["stage"], "cpu_max_per_instance", "a requested node must have capacity as well");
    muster_control::reconcile::checkin::leave(&cluster.app).await;
    let response = try_create(&cluster, &token, "late", &json!({"placed_on": "sim-2"})).await;
    assert_eq!(status_and_error(&response), (404, "Specified node sim-2 not ready"));
    let response = try_create(&cluster, &token, "nowhere", &json!({})).await;
    assert_eq!(response.status, 507, "{}", response.text);
    assert_eq!(
        (&response.body["stage"], &response.body["transient"]),
        (&json!("pre_schedule"), &json!(false))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn placement_follows_affinity() {
    let (cluster, token) = cluster(&[]).await;
    let tags = json!({"placed_on": "sim-2", "metadata": {"tags": ["db", "ssd"]}});
    create(&cluster, &token, "db", &tags).await;
    let with_affinity = |affinity: Value| json!({"metadata": {"affinity": affinity}});
    for (number, (affinity, node)) in [
        (json!({"require_with_tag": ["db", "ssd"]}), "sim-2"),
        (json!({"require_without_tag": ["db"]}), "sim-1"),
        (json!({"prefer_with_tag": ["db"]}), "sim-2"),
        (json!({"prefer_without_tag": ["ssd"]}), "sim-1"),
        (json!({"db": 1}), "sim-2"),
        (json!({"db": "-100"}), "sim-1"),
        (json!({"prefer_without_tag": ["db"], "require_with_tag": ["db"]}), "sim-2"),
    ]
    .into_iter()
    .enumerate()
    {
        let record = create(&cluster, &token, &format!("n{number}"), &with_affinity(affinity.clone())).await;
        assert_eq!(text(&record, "node"), node, "{affinity}");
    }
    // A preference need not be satisfied.
    create(&cluster, &token, "lonely", &with_affinity(json!({"prefer_with_tag": ["absent"]}))).await;
    for (name, affinity, error) in [
        (
            "both",
            json!({"require_with_tag": ["db"], "require_without_tag": ["ssd"]}),
            "['db'], require_without_tag=['ssd']",
        ),
        ("none", json!({"require_with_tag": ["absent"]}), "['absent'], require_without_tag=[]"),
    ] {
        let response = try_create(&cluster, &token, name, &with_affinity(affinity)).await;
        let error =
            format!("No nodes remaining at scheduling stage affinity_constraints: require_with_tag={error}");
        assert_eq!(status_and_error(&response), (409, error.as_str()));
        let record = failed_instance(&cluster, &token, name).await;
        assert_eq!(
            (text(&record, "state"), text(&record, "error_message")),
            ("error", format!("scheduling failed: {error}").as_str())
        );
    }
    // Instances of other namespaces do not count.
    cluster.create_namespace("beta").await;
    let beta = cluster.token("beta").await;
    assert_eq!(
        try_create(&cluster, &beta, "x", &with_affinity(json!({"require_with_tag": ["db"]}))).await.status,
        409
    );
    // Tags set later apply to later placements.
    let first = create(&cluster, &beta, "first", &json!({"placed_on": "sim-1"})).await;
    let tags = json!({"key": "tags", "value": ["late"]});
    crate::networks::post(&cluster, &beta, &path(&first, "/metadata"), tags).await;
    let record =
        create(&cluster, &beta, "second", &with_affinity(json!({"require_with_tag": ["late"]}))).await;
    assert_eq!(text(&record, "node"), "sim-1");
    delete(&cluster, &beta, &path(&first, "")).await;
    cluster.settle().await;
    let record = create(
        &cluster,
        &beta,
        "third",
        &with_affinity(json!({"require_without_tag": ["late"], "prefer_with_tag": ["late"]})),
    )
    .await;
    assert_eq!(text(&record, "state"), "created", "deleted instances do not count");
}

#[tokio::test(flavor = "multi_thread")]
async fn unavailable_address_leaves_record_without_addresses() {
    let (cluster, token) = cluster(&[]).await;
    let green_network =
        create_network(&cluster, &token, json!({"name": "green", "netblock": "10.1.0.0/24"})).await;
    let small_network = create_network(
        &cluster,
        &token,
        json!({"name": "small", "netblock": "10.2.0.0/29", "provide_nat": false}),
    )
    .await;
    let with_address = |address: &str| json!({"network": [{"network_uuid": "small"}, {"network_uuid": "green", "address": address, "float": true}]});
    let first = create(&cluster, &token, "first", &with_address("10.1.0.9")).await;
    let before = (cluster.committed_capacity().await, cluster.count_rows("addresses", "1 = 1").await);
    let macs = cluster.count_rows("hardware_addresses", "1 = 1").await;
    for (name, address) in [("second", "10.1.0.9"), ("router", "10.1.0.1")] {
        let response = try_create(&cluster, &token, name, &with_address(address)).await;
        assert_eq!(status_and_error(&response), (409, format!("address {address} in use").as_str()));
        let record = failed_instance(&cluster, &token, name).await;
        let error = format!("failed to reserve an IP on network {green_network}: address {address} in use");
        assert_eq!((text(&record, "state"), text(&record, "error_message")), ("error", error.as_str()));
        assert_eq!((&record["node"], &record["interfaces"]), (&Value::Null, &json!([])));
    }
    assert_eq!((cluster.committed_capacity().await, cluster.count_rows("addresses", "1 = 1").await), before);
    assert_eq!(cluster.count_rows("hardware_addresses", "1 = 1").await, macs);

    // The network has five addresses, one of which the first instance uses.
    for number in 0..4 {
        create(
            &cluster,
            &token,
            &format!("n{number}"),
            &json!({"network": [{"network_uuid": small_network}]}),
        )
        .await;
    }
    let response =
        try_create(&cluster, &token, "late", &json!({"network": [{"network_uuid": "small"}]})).await;
    assert_eq!(status_and_error(&response), (507, "No free addresses on network"));
    assert!(response.body.get("stage").is_none() && response.body.get("transient").is_none());
    let record = failed_instance(&cluster, &token, "late").await;
    assert_eq!(text(&record, "error_message"), "cannot allocate address: No free addresses on network");

    let mac = first["interfaces"][0]["macaddr"].clone();
    let overrides = json!({"network": [{"network_uuid": "green", "macaddress": mac}]});
    let response = try_create(&cluster, &token, "twin", &overrides).await;
    assert_eq!(
        status_and_error(&response),
        (409, format!("macaddress: {} is already in use", mac.as_str().unwrap()).as_str())
    );
    // A quarantined address can be requested explicitly.
    delete(&cluster, &token, &path(&first, "")).await;
    cluster.settle().await;
    let reused = create(
        &cluster,
        &token,
        "again",
        &json!({"network": [{"network_uuid": "green", "address": "10.1.0.9"}]}),
    )
    .await;
    assert_eq!(reused["interfaces"][0]["ipv4"], "10.1.0.9");
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_of_deleted_node_end_in_error_and_keep_only_their_addresses() {
    let (cluster, token) = cluster(&[("IP_DELETION_HALO_DURATION", "0")]).await;
    create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let on = |node: &str| json!({"placed_on": node, "network": [{"network_uuid": "blue", "float": true}]});
    let lost = create(&cluster, &token, "lost", &on("sim-2")).await;
    let kept = create(&cluster, &token, "kept", &on("sim-1")).await;
    let queued = try_create(&cluster, &token, "queued", &on("sim-2")).await.body;
    cluster.lose_node("sim-2").await;
    muster_control::objects::node::delete(&cluster.app, &caller(), "sim-2", true).await.unwrap();
    let vm = text(&lost, "uuid").parse().unwrap();
    cluster.allow_vm_without_instance(vm, "nothing is removed from the host of a deleted node");
    cluster.settle().await;
    for record in [&lost, &queued] {
        let record = show(&cluster, &token, record).await;
        assert_eq!(
            (text(&record, "state"), text(&record, "error_message")),
            ("error", "node sim-2 was deleted")
        );
        assert_eq!((&record["node"], record["interfaces"].as_array().unwrap().len()), (&Value::Null, 1));
        assert_eq!((&record["console_port"], &record["power_state"]), (&Value::Null, &json!("unknown")));
    }
    assert_eq!(show(&cluster, &token, &kept).await["state"], "created");
    assert_eq!(cluster.count_rows("addresses", "kind = 'instance'").await, 3);
    assert_eq!(cluster.count_rows("instances", "claimed_cpus > 0").await, 1);
    for record in [&lost, &queued] {
        assert_eq!(delete(&cluster, &token, &path(record, "")).await.status, 200);
    }
    cluster.settle().await;
    assert_eq!(cluster.count_rows("instances", "state = 'deleted'").await, 2);
    assert_eq!(cluster.count_rows("addresses", "kind = 'instance'").await, 1);
    assert_eq!(cluster.count_rows("addresses", "kind = 'floating'").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_instance_is_removed_after_cleaner_delay() {
    for (delay, left) in [("3600", 1), ("0", 0)] {
        let (cluster, token) = cluster(&[("CLEANER_DELAY", delay)]).await;
        let refused = try_create(&cluster, &token, "wide", &json!({"cpus": 17, "metadata": {"a": 1}})).await;
        assert_eq!(refused.status, 507, "{}", refused.text);
        create(&cluster, &token, "placed", &json!({})).await;
        muster_control::reconcile::cleaner::run(&cluster.app).await.unwrap();
        assert_eq!(cluster.count_rows("instances", "name = 'wide'").await, left, "{delay}");
        assert_eq!(cluster.count_rows("metadata", "1 = 1").await, left, "{delay}");
        assert_eq!(cluster.count_rows("instances", "name = 'placed'").await, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn places_instances_of_a_missing_node_again_unless_their_creation_has_started() {
    let (cluster, token) = cluster(&[]).await;
    create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let app = &cluster.app;
    let request = json!({"network": [{"network_uuid": "blue"}], "disk": [{"size": 8}]});
    let waiting = try_create(&cluster, &token, "waiting", &request).await.body;
    let node = text(&waiting, "node").to_owned();
    let other = if node == "sim-1" { "sim-2" } else { "sim-1" };
    let pinned = try_create(&cluster, &token, "pinned", &json!({"placed_on": node})).await.body;

    let sql = "UPDATE nodes SET lastseen = lastseen - 700 WHERE name = ?";
    let silenced =
        muster_store::transaction!(app.store, |tx| { Ok(tx.execute(sql, &[node.as_str().into()]).await?) });
    assert_eq!(silenced.unwrap(), 1);
    let response = try_create(&cluster, &token, "refused", &json!({"placed_on": node})).await;
    assert_eq!(response.body["stage"], "pre_schedule", "{}", response.text);
    for _ in 0..2 {
        muster_control::reconcile::node_watch::run(app).await.unwrap();
    }
    let moved = show(&cluster, &token, &waiting).await;
    assert_eq!((text(&moved, "node"), text(&moved, "state")), (other, "initial"), "{moved}");
    assert_eq!(text(&show(&cluster, &token, &pinned).await, "node"), node);
    let committed = cluster.committed_capacity().await;
    assert_eq!((committed[other], committed[&node]), ((1, 512, 8), (1, 512, 1)), "{committed:?}");

    // The node returns, and creates the instance that was requested there.
    muster_control::reconcile::checkin::check_in(app).await.unwrap();
    cluster.settle().await;
    for (record, node) in [(&waiting, other), (&pinned, node.as_str())] {
        let created = show(&cluster, &token, record).await;
        assert_eq!((text(&created, "state"), text(&created, "node")), ("created", node), "{created}");
        let id = text(record, "uuid").parse().unwrap();
        assert!(cluster.node_named(node).vm_ids().contains(&id));
    }
}
