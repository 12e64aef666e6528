//! Concurrent creation of instances, and lists of many instances.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::http::Method;
use muster_store::Retry;
use muster_store::instances::{self, NewInstance};
use muster_test_cluster::Cluster;
use muster_types::capacity::Capacity;
use muster_types::ids::InstanceId;
use muster_types::instance::InstanceState;
use serde_json::{Value, json};

use super::{instance_request, text};
use crate::networks::{create_network, get};

/// The size of each of two nodes, which together fit 30 instances: five threads overcommitted by three.
const NODE_SIZE: (u64, u64, u64) = (5, 65536, 1024);
const SETTINGS: &[(&str, &str)] = &[("IP_DELETION_HALO_DURATION", "0")];

async fn assert_fifty_creates_fill_capacity(url: Option<&str>) {
    let cluster = Arc::new(Cluster::sized(url, SETTINGS, NODE_SIZE).await);
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    let network_id =
        create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/26"})).await;
    // Of 61 addresses 40 remain.
    for host in 10..31 {
        let address_path = format!("/networks/{network_id}/addresses/10.0.0.{host}");
        assert_eq!(cluster.call(&token, Method::POST, &address_path, None).await.status, 200);
    }
    let calls: Vec<_> = (0..50)
        .map(|number| {
            let (cluster, token) = (Arc::clone(&cluster), token.clone());
            let body =
                instance_request(&format!("n{number}"), &json!({"network": [{"network_uuid": "blue"}]}));
            tokio::spawn(async move { cluster.call(&token, Method::POST, "/instances", Some(body)).await })
        })
        .collect();
    let (mut created, mut refused) = (0, 0);
    for call in calls {
        let response = call.await.unwrap();
        match response.status.as_u16() {
            200 => created += 1,
            507 => {
                refused += 1;
                let stage = text(&response.body, "stage");
                assert!(["sufficient_idle_cpu", "capacity_guard"].contains(&stage), "{}", response.text);
                assert_eq!(response.body["transient"], true);
            }
            _ => panic!("{}", response.text),
        }
    }
    assert_eq!((created, refused), (30, 20));
    cluster.settle().await;

    let list = get(&cluster, &token, "/instances").await.body;
    let in_state = |state: &str| -> Vec<&Value> {
        list.as_array().unwrap().iter().filter(|item| text(item, "state") == state).collect()
    };
    assert_eq!((in_state("created").len(), in_state("error").len()), (30, 20));
    for failed in in_state("error") {
        assert!(text(failed, "error_message").starts_with("scheduling failed: "), "{failed}");
        assert_eq!((&failed["node"], &failed["interfaces"]), (&Value::Null, &json!([])));
    }
    assert_eq!(cluster.vms().len(), 30);

    // The committed capacity of each node is the sum of its instances and within its limits.
    let mut committed: BTreeMap<String, (i64, i64, i64)> = BTreeMap::new();
    let rows = instances::of_namespace(&*cluster.app.store, "ci").await.unwrap();
    for row in rows.iter().filter(|row| row.node.is_some()) {
        let node = cluster.app.nodes.iter().find(|node| Some(node.identity().id) == row.node).unwrap();
        let node_total = committed.entry(node.identity().name.clone()).or_default();
        *node_total = (
            node_total.0 + row.committed.cpus,
            node_total.1 + row.committed.memory_mb,
            node_total.2 + row.committed.disk_gb,
        );
    }
    assert_eq!(cluster.committed_capacity().await, committed);
    assert!(committed.values().all(|node_total| *node_total == (15, 15 * 512, 15)), "{committed:?}");

    // Thirty addresses are allocated; those of the failed instances are released.
    let addresses = get(&cluster, &token, &format!("/networks/{network_id}/addresses")).await.body;
    let used = addresses.as_array().unwrap().iter().filter(|item| text(item, "type") == "instance");
    assert_eq!(used.count(), 30);
    assert_eq!(cluster.count_rows("hardware_addresses", "1 = 1").await, 30);
    let ports: Vec<i64> = in_state("created")
        .iter()
        .flat_map(|item| {
            ["console_port", "vdi_port", "vdi_tls_port"].map(|port| item[port].as_i64().unwrap())
        })
        .collect();
    assert_eq!((ports.len(), cluster.count_rows("instance_ports", "1 = 1").await), (90, 90));

    let all = Some(json!({"confirm": true}));
    let deleted = cluster.call(&token, Method::DELETE, "/instances", all).await.body;
    assert_eq!(deleted.as_array().unwrap().len(), 50);
    cluster.settle().await;
    assert_eq!(get(&cluster, &token, "/instances").await.body, json!([]));
    assert!(cluster.vms().is_empty());
    assert!(cluster.committed_capacity().await.values().all(|promised| *promised == (0, 0, 0)));
    assert_eq!(cluster.count_rows("addresses", "kind = 'instance'").await, 0);
    for table in ["instance_ports", "hardware_addresses"] {
        assert_eq!(cluster.count_rows(table, "1 = 1").await, 0, "{table}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_creates_use_exactly_the_capacity() {
    assert_fifty_creates_fill_capacity(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_creates_use_exactly_the_capacity_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => assert_fifty_creates_fill_capacity(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}

/// Deletes a node while instances are being placed.
async fn assert_no_placement_on_deleted_node(url: Option<&str>) {
    let cluster = Arc::new(Cluster::sized(url, SETTINGS, (16, 65536, 1024)).await);
    let token = cluster.token("system").await;
    let create = |number: usize| {
        let (cluster, token) = (Arc::clone(&cluster), token.clone());
        let body = instance_request(&format!("n{number}"), &json!({}));
        tokio::spawn(async move { cluster.call(&token, Method::POST, "/instances", Some(body)).await.status })
    };
    // Fills the node cache, which the deletion makes stale.
    assert_eq!(create(0).await.unwrap(), 200);
    let before: Vec<_> = (1..15).map(create).collect();
    cluster.lose_node("sim-2").await;
    let deleted = cluster.call(&token, Method::DELETE, "/nodes/sim-2", Some(json!({"dead": true}))).await;
    assert_eq!(deleted.body["state"], "deleted", "{}", deleted.text);
    let after: Vec<_> = (15..20).map(create).collect();
    for call in before.into_iter().chain(after) {
        assert_eq!(call.await.unwrap(), 200);
    }
    cluster.settle().await;
    let list = get(&cluster, &token, "/instances").await.body;
    assert_eq!(list.as_array().unwrap().len(), 20);
    for item in list.as_array().unwrap() {
        match text(item, "state") {
            "created" => assert_eq!(text(item, "node"), "sim-1", "{item}"),
            "error" => assert_eq!(text(item, "error_message"), "node sim-2 was deleted", "{item}"),
            _ => panic!("{item}"),
        }
    }
    assert_eq!(cluster.committed_capacity().await["sim-2"], (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn places_nothing_on_node_deleted_concurrently() {
    assert_no_placement_on_deleted_node(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn places_nothing_on_node_deleted_concurrently_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => assert_no_placement_on_deleted_node(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_many_instances_in_one_document() {
    let (cluster, token) = crate::networks::cluster(&[]).await;
    let created = super::create(&cluster, &token, "first", &json!({})).await;
    let first = instances::get(&*cluster.app.store, super::id(&created)).await.unwrap().unwrap();
    let mut tx = cluster.app.store.begin().await.unwrap();
    for number in 0..1200 {
        let new = NewInstance {
            id: InstanceId::new(),
            name: format!("n{number}"),
            namespace: "ci".into(),
            state: InstanceState::Error,
            error_message: None,
            spec: first.spec.clone(),
            node: None,
            committed: Capacity::default(),
        };
        instances::insert(&mut tx, &new).await.unwrap();
    }
    tx.finish(Ok(()), &mut Retry::default()).await.unwrap().unwrap();
    let list = get(&cluster, &token, "/instances").await;
    let ids: BTreeSet<&str> = list.body.as_array().unwrap().iter().map(|item| text(item, "uuid")).collect();
    assert_eq!((ids.len(), list.body.as_array().unwrap().len()), (1201, 1201));
    assert!(ids.contains(text(&created, "uuid")));
}
