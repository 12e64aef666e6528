//! A host that reaches the database but none of the other hosts.

use muster_test_cluster::enter_vm_namespaces;
use muster_testing::wait_for;
use reqwest::Method;
use serde_json::{Value, json};

use crate::cluster::{Direction, FaultCluster, HEAL_TIMEOUT, Link};

/// The number of instances without a requested node.
const INSTANCES: usize = 3;

#[test]
fn host_that_loses_its_mesh_gets_no_instances_until_it_recovers() {
    if !enter_vm_namespaces("mesh::host_that_loses_its_mesh_gets_no_instances_until_it_recovers") {
        return;
    }
    // No host may become missing while the processors are busy: missing hosts are neither probed nor probing.
    let settings = [("NODE_CHECKIN_MAXIMUM", "60"), ("NETWORK_NODE_LEASE", "6")];
    let Some(mut cluster) = FaultCluster::start(3, crate::IMAGE, false, &settings) else { return };
    let network = json!({ "name": "lan", "netblock": "10.0.0.0/24" });
    let network = create(&cluster, "/networks", &network);
    let placed_on = |node: &str| json!({ "placed_on": node, "network": [{ "network_uuid": network }] });
    create_instance(&cluster, &placed_on("m1"));

    // The first host is the active network node.
    cluster.cut(0, Link::Mesh, Direction::Both);
    let reason = wait_for("the host to be degraded", HEAL_TIMEOUT, || {
        degraded(&cluster, "m1")["reason"].as_str().map(str::to_owned)
    });
    // A host that checks in late on a busy machine is not probed.
    assert!(reason.contains("none of the nodes m2") || reason.contains("none of the nodes m3"), "{reason}");
    assert_eq!([degraded(&cluster, "m2"), degraded(&cluster, "m3")], [json!(null), json!(null)]);
    require_event(&cluster, &network, "node became degraded", |extra| {
        extra["node"] == "m1" && extra["reason"] == reason.as_str()
    });
    require_event(&cluster, &network, "gateway moved to another node", |extra| extra["from"] == "m1");
    let refused =
        cluster.client.call(1, Method::POST, "/instances", Some(&request(&placed_on("m1")))).unwrap();
    assert_eq!(refused.0, 507, "{}", refused.1);
    for _ in 0..INSTANCES {
        let record = create_instance(&cluster, &json!({}));
        assert_ne!(record["node"], "m1", "{record}");
    }

    cluster.restore_links();
    wait_for("the host to recover", HEAL_TIMEOUT, || degraded(&cluster, "m1").is_null().then_some(()));
    require_event(&cluster, &network, "node recovered from its degradation", |extra| extra["node"] == "m1");
    let record = create_instance(&cluster, &placed_on("m1"));
    assert_eq!(record["node"], "m1", "{record}");
    for collection in ["instances", "networks"] {
        let body = json!({ "confirm": true, "namespace": "system" });
        let deleted = cluster.client.call(1, Method::DELETE, &format!("/{collection}"), Some(&body)).unwrap();
        assert!(deleted.0 < 300, "{deleted:?}");
        cluster.wait_until_healthy();
    }
    for host in &mut cluster.hosts {
        host.stop_daemon();
    }
}

fn degraded(cluster: &FaultCluster, node: &str) -> Value {
    cluster.client.get(1, &format!("/nodes/{node}")).unwrap()["degraded"].clone()
}

fn request(changes: &Value) -> Value {
    let mut body = json!({ "name": "x", "cpus": 1, "memory": 128, "disk": [{ "size": 1 }], "network": [] });
    body.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    body
}

/// Creates an object, waits until it is ready, and returns its id.
fn create(cluster: &FaultCluster, collection: &str, body: &Value) -> String {
    let (status, record) = cluster.client.call(1, Method::POST, collection, Some(body)).unwrap();
    assert_eq!(status, 200, "{record}");
    let id = record["uuid"].as_str().unwrap().to_owned();
    wait_for("an object to be created", HEAL_TIMEOUT, || {
        let record = cluster.client.get(1, &format!("{collection}/{id}")).unwrap();
        assert_ne!(record["state"], "error", "{record}\n{}", cluster.logs());
        (record["state"] == "created").then_some(())
    });
    id
}

/// Creates an instance without an operating system and returns its record.
fn create_instance(cluster: &FaultCluster, changes: &Value) -> Value {
    let id = create(cluster, "/instances", &request(changes));
    cluster.client.get(1, &format!("/instances/{id}")).unwrap()
}

/// Waits for an event of the network.
fn require_event(cluster: &FaultCluster, network: &str, message: &str, is_expected: impl Fn(&Value) -> bool) {
    wait_for(&format!("the event {message}"), HEAL_TIMEOUT, || {
        let events = cluster.client.get(1, &format!("/networks/{network}/events?limit=1000")).unwrap();
        let mut events = events.as_array().unwrap().iter();
        events.any(|event| event["message"] == message && is_expected(&event["extra"])).then_some(())
    });
}
