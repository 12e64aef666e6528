//! Mesh probes: nodes that do not reach their peers.

use axum::http::Method;
use muster_control::reconcile::{checkin, mesh::MeshProbes};
use muster_store::{nodes, transaction};
use muster_types::ids::NodeId;
use muster_types::node::{NodeApi as _, NodeIdentity, NodeReport, NodeState};
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use serde_json::{Value, json};

use crate::networks::{cluster, create_network};

#[tokio::test(flavor = "multi_thread")]
async fn node_that_reaches_none_of_its_peers_gets_no_instances() {
    let (cluster, token) = cluster(&[]).await;
    let system = cluster.token("system").await;
    let network = create_network(&cluster, &token, json!({"name": "lan", "netblock": "10.0.0.0/24"})).await;
    let app = &cluster.app;
    let identity =
        NodeIdentity { id: NodeId::new(), name: "remote".into(), ..cluster.node.identity().clone() };
    // The port is closed when the listener is dropped.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let report = NodeReport { node_address: Some(closed), ..NodeReport::default() };
    transaction!(app.store, |tx| {
        nodes::insert(tx, &identity).await?;
        Ok(nodes::set_report(tx, identity.id, &report).await?)
    })
    .unwrap();

    let mut probes = MeshProbes::default();
    let degraded = async || -> Value {
        checkin::join(app).await.unwrap();
        cluster.call(&system, Method::GET, "/nodes/sim-1", None).await.body["degraded"].clone()
    };
    for _ in 0..4 {
        probes.pass(app).await.unwrap();
    }
    assert_eq!(degraded().await, json!(null), "single failures do not count");
    probes.pass(app).await.unwrap();
    let reason = degraded().await["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("none of the nodes remote"), "{reason}");
    let request = json!({"name": "web", "cpus": 1, "memory": 1024, "disk": [{"size": 1}], "network": []});
    let refused = cluster.call(&token, Method::POST, "/instances", Some(request)).await;
    assert_eq!(refused.status, 507, "{}", refused.text);
    let network = ObjectRef::new(ObjectType::Network, network);
    assert!(cluster.messages(&network).await.contains(&"node became degraded".to_owned()));

    // A node whose only peer is known to be dead is not degraded.
    let row = nodes::get(&*app.store, &NameOrId::Id(identity.id)).await.unwrap().unwrap();
    transaction!(app.store, |tx| { Ok(nodes::set_state(tx, &row, NodeState::Missing).await?) }).unwrap();
    probes.pass(app).await.unwrap();
    assert_eq!(degraded().await, json!(null));
    assert!(cluster.messages(&network).await.contains(&"node recovered from its degradation".to_owned()));
}
