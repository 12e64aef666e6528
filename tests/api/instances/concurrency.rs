//! Many creates at once never get more than there is, and many instances are listed as one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::http::Method;
use muster_store::Retry;
use muster_store::instances::{self, NewInstance};
use muster_types::capacity::Capacity;
use muster_types::ids::InstanceId;
use muster_types::instance::InstanceState;
use serde_json::{Value, json};

use super::{small, text};
use crate::harness::Cluster;
use crate::networks::{get, network};

/// The nodes have room for thirty: three processors are promised for each of five threads.
const SIZE: (u64, u64, u64) = (5, 65536, 1024);
const SETTINGS: &[(&str, &str)] = &[("IP_DELETION_HALO_DURATION", "0")];

async fn fifty_at_once(url: Option<&str>) {
    let cluster = Arc::new(Cluster::sized(url, SETTINGS, SIZE).await);
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    let net = network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/26"})).await;
    // 61 addresses are there, 40 are left.
    for host in 10..31 {
        let at = format!("/networks/{net}/addresses/10.0.0.{host}");
        assert_eq!(cluster.call(&token, Method::POST, &at, None).await.status, 200);
    }
    let calls: Vec<_> = (0..50)
        .map(|number| {
            let (cluster, token) = (Arc::clone(&cluster), token.clone());
            let body = small(&format!("n{number}"), &json!({"network": [{"network_uuid": "blue"}]}));
            tokio::spawn(async move { cluster.call(&token, Method::POST, "/instances", Some(body)).await })
        })
        .collect();
    let (mut taken, mut refused) = (0, 0);
    for call in calls {
        let answer = call.await.unwrap();
        match answer.status.as_u16() {
            200 => taken += 1,
            507 => {
                refused += 1;
                let stage = text(&answer.body, "stage");
                assert!(["sufficient_idle_cpu", "capacity_guard"].contains(&stage), "{}", answer.text);
                assert_eq!(answer.body["transient"], true);
            }
            _ => panic!("{}", answer.text),
        }
    }
    assert_eq!((taken, refused), (30, 20));
    cluster.settle().await;

    let list = get(&cluster, &token, "/instances").await.body;
    let in_state = |state: &str| -> Vec<&Value> {
        list.as_array().unwrap().iter().filter(|one| text(one, "state") == state).collect()
    };
    assert_eq!((in_state("created").len(), in_state("error").len()), (30, 20));
    for failed in in_state("error") {
        assert!(text(failed, "error_message").starts_with("scheduling failed: "), "{failed}");
        assert_eq!((&failed["node"], &failed["interfaces"]), (&Value::Null, &json!([])));
    }
    assert_eq!(cluster.vms().len(), 30);

    // Each ledger is the sum of its instances, and within what its node has.
    let mut sums: BTreeMap<String, (i64, i64, i64)> = BTreeMap::new();
    let rows = instances::of_namespace(&*cluster.app.store, Some("ci")).await.unwrap();
    for row in rows.iter().filter(|row| row.node.is_some()) {
        let node = cluster.app.nodes.iter().find(|node| Some(node.identity().id) == row.node).unwrap();
        let sum = sums.entry(node.identity().name.clone()).or_default();
        *sum = (sum.0 + row.committed.cpus, sum.1 + row.committed.memory_mb, sum.2 + row.committed.disk_gb);
    }
    assert_eq!(cluster.promised().await, sums);
    assert!(sums.values().all(|sum| *sum == (15, 15 * 512, 15)), "{sums:?}");

    // Thirty addresses are used, each once; those of the others are free.
    let addresses = get(&cluster, &token, &format!("/networks/{net}/addresses")).await.body;
    let used = addresses.as_array().unwrap().iter().filter(|one| text(one, "type") == "instance");
    assert_eq!(used.count(), 30);
    assert_eq!(cluster.count("hardware_addresses", "1 = 1").await, 30);
    let ports: Vec<i64> = in_state("created")
        .iter()
        .flat_map(|one| ["console_port", "vdi_port", "vdi_tls_port"].map(|port| one[port].as_i64().unwrap()))
        .collect();
    assert_eq!((ports.len(), cluster.count("instance_ports", "1 = 1").await), (90, 90));

    let all = Some(json!({"confirm": true}));
    let going = cluster.call(&token, Method::DELETE, "/instances", all).await.body;
    assert_eq!(going.as_array().unwrap().len(), 50);
    cluster.settle().await;
    assert_eq!(get(&cluster, &token, "/instances").await.body, json!([]));
    assert!(cluster.vms().is_empty());
    assert!(cluster.promised().await.values().all(|promised| *promised == (0, 0, 0)));
    assert_eq!(cluster.count("addresses", "kind = 'instance'").await, 0);
    for table in ["instance_ports", "hardware_addresses"] {
        assert_eq!(cluster.count(table, "1 = 1").await, 0, "{table}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn fifty_creates_at_once_get_exactly_what_is_there() {
    fifty_at_once(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn fifty_creates_at_once_get_exactly_what_is_there_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => fifty_at_once(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}

/// A node is deleted while instances are being placed, some of them on it.
async fn a_node_goes(url: Option<&str>) {
    let cluster = Arc::new(Cluster::sized(url, SETTINGS, (16, 65536, 1024)).await);
    let token = cluster.token("system").await;
    let create = |number: usize| {
        let (cluster, token) = (Arc::clone(&cluster), token.clone());
        let body = small(&format!("n{number}"), &json!({}));
        tokio::spawn(async move { cluster.call(&token, Method::POST, "/instances", Some(body)).await.status })
    };
    // What is known of the nodes is known now, and is old soon.
    assert_eq!(create(0).await.unwrap(), 200);
    let before: Vec<_> = (1..15).map(create).collect();
    let gone = cluster.call(&token, Method::DELETE, "/nodes/sim-2", None).await;
    assert_eq!(gone.body["state"], "deleted");
    let after: Vec<_> = (15..20).map(create).collect();
    for call in before.into_iter().chain(after) {
        assert_eq!(call.await.unwrap(), 200);
    }
    cluster.settle().await;
    let list = get(&cluster, &token, "/instances").await.body;
    assert_eq!(list.as_array().unwrap().len(), 20);
    for one in list.as_array().unwrap() {
        match text(one, "state") {
            "created" => assert_eq!(text(one, "node"), "sim-1", "{one}"),
            "error" => assert_eq!(text(one, "error_message"), "node sim-2 was deleted", "{one}"),
            _ => panic!("{one}"),
        }
    }
    assert_eq!(cluster.promised().await["sim-2"], (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_placed_on_a_node_that_goes_at_the_same_moment() {
    a_node_goes(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_placed_on_a_node_that_goes_at_the_same_moment_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => a_node_goes(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_of_many_instances_is_one_whole_document() {
    let (cluster, token) = crate::networks::cluster(&[]).await;
    let made = super::create(&cluster, &token, "first", &json!({})).await;
    let first = instances::get(&*cluster.app.store, super::id(&made)).await.unwrap().unwrap();
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
    let ids: BTreeSet<&str> = list.body.as_array().unwrap().iter().map(|one| text(one, "uuid")).collect();
    assert_eq!((ids.len(), list.body.as_array().unwrap().len()), (1201, 1201));
    assert!(ids.contains(text(&made, "uuid")));
}
