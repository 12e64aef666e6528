//! Where instances go, why some go nowhere, and what is left of those.

use muster_test_cluster::{Cluster, caller};
use serde_json::{Value, json};

use super::{create, object, path, refusal, show, text, try_create};
use crate::networks::{cluster, delete, get, network};

/// The record of the instance that could not be made.
async fn left_behind(cluster: &Cluster, token: &str, name: &str) -> Value {
    get(cluster, token, &format!("/instances/{name}")).await.body
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_that_fits_nowhere_says_at_which_stage_and_keeps_a_record() {
    let (cluster, token) = cluster(&[]).await;
    network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    for (name, more, stage, transient) in [
        ("wide", json!({"cpus": 17}), "cpu_max_per_instance", false),
        ("fat", json!({"memory": 100_000}), "sufficient_idle_memory", true),
        ("long", json!({"disk": [{"size": 900}, {"size": 900}]}), "sufficient_free_disk", true),
    ] {
        let mut more = more;
        more["network"] = json!([{"network_uuid": "blue", "float": true}]);
        let answer = try_create(&cluster, &token, name, &more).await;
        let why = format!("No nodes remaining at scheduling stage {stage}");
        assert_eq!(refusal(&answer), (507, why.as_str()));
        assert_eq!((&answer.body["stage"], &answer.body["transient"]), (&json!(stage), &json!(transient)));
        let again = answer.headers.get("retry-after").map(|value| value.to_str().unwrap());
        assert_eq!(again, transient.then_some("15"));

        let record = left_behind(&cluster, &token, name).await;
        assert_eq!((text(&record, "state"), &record["node"]), ("error", &Value::Null), "{record}");
        assert_eq!(text(&record, "error_message"), format!("scheduling failed: {why}"));
        assert_eq!(record["interfaces"], json!([]));
        let events = cluster.events(&object(&record)).await;
        let aborted = format!("schedule has no candidates at stage {stage}, aborting");
        assert!(events.iter().any(|event| event.message == aborted), "{events:?}");
        let at = events.iter().find(|event| event.message == format!("schedule at stage {stage}")).unwrap();
        for node in ["sim-1", "sim-2"] {
            assert!(at.extra["dropped"][node].is_string(), "each node has its reason: {at:?}");
        }
    }
    assert_eq!(cluster.count_rows("addresses", "kind IN ('instance', 'floating')").await, 0);
    assert_eq!(cluster.count_rows("instances", "claimed_cpus > 0").await, 0);
    assert!(cluster.committed_capacity().await.values().all(|promised| *promised == (0, 0, 0)));
    let record = left_behind(&cluster, &token, "wide").await;
    assert_eq!(delete(&cluster, &token, &path(&record, "")).await.status, 200);
    cluster.settle().await;
    assert_eq!(show(&cluster, &token, &record).await["state"], "deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn full_nodes_take_again_what_was_given_back() {
    // Three processors are promised for each that is there.
    let cluster = Cluster::sized(None, &[], (1, 65536, 1024)).await;
    let token = cluster.token("system").await;
    let mut made = Vec::new();
    for number in 0..6 {
        made.push(create(&cluster, &token, &format!("n{number}"), &json!({})).await);
    }
    assert!(cluster.committed_capacity().await.values().all(|promised| *promised == (3, 1536, 3)));
    let answer = try_create(&cluster, &token, "late", &json!({})).await;
    let why = "No nodes remaining at scheduling stage sufficient_idle_cpu";
    assert_eq!((refusal(&answer), &answer.body["transient"]), ((507, why), &json!(true)));
    delete(&cluster, &token, &path(&made[2], "")).await;
    let answer = try_create(&cluster, &token, "early", &json!({})).await;
    assert_eq!(answer.status, 507, "it is still there");
    cluster.settle().await;
    let node = create(&cluster, &token, "then", &json!({})).await["node"].clone();
    assert_eq!(node, made[2]["node"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_can_be_asked_for_by_name_and_id() {
    let (cluster, token) = cluster(&[]).await;
    let second = cluster.app.nodes[1].identity().id.to_string();
    for (name, place) in [("by-name", "sim-2"), ("by-id", second.as_str())] {
        let record = create(&cluster, &token, name, &json!({"placed_on": place})).await;
        assert_eq!((text(&record, "node"), text(&record, "requested_placement")), ("sim-2", "sim-2"));
    }
    let answer = try_create(&cluster, &token, "wide", &json!({"placed_on": "sim-2", "cpus": 17})).await;
    assert_eq!(answer.body["stage"], "cpu_max_per_instance", "it must have room like any other");
    muster_control::reconcile::checkin::leave(&cluster.app).await;
    let answer = try_create(&cluster, &token, "late", &json!({"placed_on": "sim-2"})).await;
    assert_eq!(refusal(&answer), (404, "Specified node sim-2 not ready"));
    let answer = try_create(&cluster, &token, "nowhere", &json!({})).await;
    assert_eq!(answer.status, 507, "{}", answer.text);
    assert_eq!((&answer.body["stage"], &answer.body["transient"]), (&json!("pre_schedule"), &json!(false)));
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_go_where_their_neighbours_are_or_are_not() {
    let (cluster, token) = cluster(&[]).await;
    let tags = json!({"placed_on": "sim-2", "metadata": {"tags": ["db", "ssd"]}});
    create(&cluster, &token, "db", &tags).await;
    let with = |affinity: Value| json!({"metadata": {"affinity": affinity}});
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
        let record = create(&cluster, &token, &format!("n{number}"), &with(affinity.clone())).await;
        assert_eq!(text(&record, "node"), node, "{affinity}");
    }
    // A wish may come to nothing.
    create(&cluster, &token, "lonely", &with(json!({"prefer_with_tag": ["absent"]}))).await;
    for (name, affinity, why) in [
        (
            "both",
            json!({"require_with_tag": ["db"], "require_without_tag": ["ssd"]}),
            "['db'], require_without_tag=['ssd']",
        ),
        ("none", json!({"require_with_tag": ["absent"]}), "['absent'], require_without_tag=[]"),
    ] {
        let answer = try_create(&cluster, &token, name, &with(affinity)).await;
        let why =
            format!("No nodes remaining at scheduling stage affinity_constraints: require_with_tag={why}");
        assert_eq!(refusal(&answer), (409, why.as_str()));
        let record = left_behind(&cluster, &token, name).await;
        assert_eq!(
            (text(&record, "state"), text(&record, "error_message")),
            ("error", format!("scheduling failed: {why}").as_str())
        );
    }
    // Those of other namespaces do not count.
    cluster.create_namespace("beta").await;
    let beta = cluster.token("beta").await;
    assert_eq!(
        try_create(&cluster, &beta, "x", &with(json!({"require_with_tag": ["db"]}))).await.status,
        409
    );
    // What is set later counts for those that come later.
    let first = create(&cluster, &beta, "first", &json!({"placed_on": "sim-1"})).await;
    let tags = json!({"key": "tags", "value": ["late"]});
    crate::networks::post(&cluster, &beta, &path(&first, "/metadata"), tags).await;
    let record = create(&cluster, &beta, "second", &with(json!({"require_with_tag": ["late"]}))).await;
    assert_eq!(text(&record, "node"), "sim-1");
    delete(&cluster, &beta, &path(&first, "")).await;
    cluster.settle().await;
    let record = create(
        &cluster,
        &beta,
        "third",
        &with(json!({"require_without_tag": ["late"], "prefer_with_tag": ["late"]})),
    )
    .await;
    assert_eq!(text(&record, "state"), "created", "who is gone is no neighbour");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_cannot_be_had_leaves_a_record_and_no_address() {
    let (cluster, token) = cluster(&[]).await;
    let green = network(&cluster, &token, json!({"name": "green", "netblock": "10.1.0.0/24"})).await;
    let small =
        network(&cluster, &token, json!({"name": "small", "netblock": "10.2.0.0/29", "provide_nat": false}))
            .await;
    let wants = |address: &str| json!({"network": [{"network_uuid": "small"}, {"network_uuid": "green", "address": address, "float": true}]});
    let first = create(&cluster, &token, "first", &wants("10.1.0.9")).await;
    let before = (cluster.committed_capacity().await, cluster.count_rows("addresses", "1 = 1").await);
    let macs = cluster.count_rows("hardware_addresses", "1 = 1").await;
    for (name, address) in [("second", "10.1.0.9"), ("router", "10.1.0.1")] {
        let answer = try_create(&cluster, &token, name, &wants(address)).await;
        assert_eq!(refusal(&answer), (409, format!("address {address} in use").as_str()));
        let record = left_behind(&cluster, &token, name).await;
        let why = format!("failed to reserve an IP on network {green}: address {address} in use");
        assert_eq!((text(&record, "state"), text(&record, "error_message")), ("error", why.as_str()));
        assert_eq!((&record["node"], &record["interfaces"]), (&Value::Null, &json!([])));
    }
    assert_eq!((cluster.committed_capacity().await, cluster.count_rows("addresses", "1 = 1").await), before);
    assert_eq!(cluster.count_rows("hardware_addresses", "1 = 1").await, macs);

    // Five addresses are there, and the first instance has one.
    for number in 0..4 {
        create(&cluster, &token, &format!("n{number}"), &json!({"network": [{"network_uuid": small}]})).await;
    }
    let answer = try_create(&cluster, &token, "late", &json!({"network": [{"network_uuid": "small"}]})).await;
    assert_eq!(refusal(&answer), (507, "No free addresses on network"));
    assert!(answer.body.get("stage").is_none() && answer.body.get("transient").is_none());
    let record = left_behind(&cluster, &token, "late").await;
    assert_eq!(text(&record, "error_message"), "cannot allocate address: No free addresses on network");

    let mac = first["interfaces"][0]["macaddr"].clone();
    let more = json!({"network": [{"network_uuid": "green", "macaddress": mac}]});
    let answer = try_create(&cluster, &token, "twin", &more).await;
    assert_eq!(
        refusal(&answer),
        (409, format!("macaddress: {} is already in use", mac.as_str().unwrap()).as_str())
    );
    // An address that merely rests may be asked for by name.
    delete(&cluster, &token, &path(&first, "")).await;
    cluster.settle().await;
    let again = create(
        &cluster,
        &token,
        "again",
        &json!({"network": [{"network_uuid": "green", "address": "10.1.0.9"}]}),
    )
    .await;
    assert_eq!(again["interfaces"][0]["ipv4"], "10.1.0.9");
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_of_a_deleted_node_are_in_error_and_give_everything_back() {
    let (cluster, token) = cluster(&[("IP_DELETION_HALO_DURATION", "0")]).await;
    network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let on = |node: &str| json!({"placed_on": node, "network": [{"network_uuid": "blue", "float": true}]});
    let lost = create(&cluster, &token, "lost", &on("sim-2")).await;
    let kept = create(&cluster, &token, "kept", &on("sim-1")).await;
    let queued = try_create(&cluster, &token, "queued", &on("sim-2")).await.body;
    muster_control::objects::node::delete(&cluster.app, &caller(), "sim-2").await.unwrap();
    cluster.settle().await;
    for record in [&lost, &queued] {
        let record = show(&cluster, &token, record).await;
        assert_eq!(
            (text(&record, "state"), text(&record, "error_message")),
            ("error", "node sim-2 was deleted")
        );
        assert_eq!((&record["node"], &record["interfaces"]), (&Value::Null, &json!([])));
        assert_eq!((&record["console_port"], &record["power_state"]), (&Value::Null, &json!("off")));
    }
    assert_eq!(show(&cluster, &token, &kept).await["state"], "created");
    assert_eq!(cluster.count_rows("addresses", "kind = 'instance'").await, 1);
    assert_eq!(cluster.count_rows("addresses", "kind = 'floating'").await, 1);
    assert_eq!(cluster.count_rows("instances", "claimed_cpus > 0").await, 1);
    for record in [&lost, &queued] {
        assert_eq!(delete(&cluster, &token, &path(record, "")).await.status, 200);
    }
    cluster.settle().await;
    assert_eq!(cluster.count_rows("instances", "state = 'deleted'").await, 2);
}
