//! Mesh probes: nodes that do not reach their peers.

use std::net::{Ipv4Addr, SocketAddr};

use axum::http::Method;
use axum::response::Response;
use muster_control::exposition::ExpositionFormat;
use muster_control::objects::metrics::cluster_metrics;
use muster_control::reconcile::mesh::MeshProbes;
use muster_store::{nodes, transaction};
use muster_test_cluster::Cluster;
use muster_types::ids::NodeId;
use muster_types::node::{NodeApi as _, NodeIdentity, NodeReport, NodeState};
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use serde_json::{Value, json};

use crate::networks::{cluster, create_network};
use crate::remote::remote_daemon;

/// A node of another daemon.
struct Remote<'a> {
    cluster: &'a Cluster,
    system: String,
    identity: NodeIdentity,
}

impl<'a> Remote<'a> {
    async fn new(cluster: &'a Cluster, identity: NodeIdentity, address: SocketAddr) -> Self {
        let report = NodeReport { node_address: Some(address), ..NodeReport::default() };
        transaction!(cluster.app.store, |tx| {
            nodes::insert(tx, &identity).await?;
            Ok(nodes::set_report(tx, identity.id, &report).await?)
        })
        .unwrap();
        Self { cluster, system: cluster.token("system").await, identity }
    }

    async fn check_in(&self) {
        transaction!(self.cluster.app.store, |tx| {
            let values = [muster_types::time::now().into(), self.identity.id.into()];
            Ok(tx.execute("UPDATE nodes SET lastseen = ? WHERE uuid = ?", &values).await?)
        })
        .unwrap();
    }

    /// Runs passes before each of which the node checks in.
    async fn pass(&self, probes: &mut MeshProbes, count: usize) {
        for _ in 0..count {
            self.check_in().await;
            probes.pass(&self.cluster.app).await.unwrap();
        }
    }

    /// Returns why the node of the cluster's own daemon is degraded.
    async fn degraded(&self) -> Value {
        let response = self.cluster.call(&self.system, Method::GET, "/nodes/sim-1", None).await;
        response.body["degraded"]["reason"].clone()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_reaches_none_of_its_peers_gets_no_instances() {
    let (cluster, token) = cluster(&[]).await;
    let network = create_network(&cluster, &token, json!({"name": "lan", "netblock": "10.0.0.0/24"})).await;
    let app = &cluster.app;
    let identity =
        NodeIdentity { id: NodeId::new(), name: "remote".into(), ..cluster.node.identity().clone() };
    // The port is closed when the listener is dropped.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let remote = Remote::new(&cluster, identity.clone(), closed).await;

    let mut probes = MeshProbes::default();
    for _ in 0..6 {
        probes.pass(app).await.unwrap();
    }
    assert_eq!(remote.degraded().await, json!(null), "a peer that does not check in may be dead");
    let mut probes = MeshProbes::default();
    remote.pass(&mut probes, 3).await;
    assert_eq!(remote.degraded().await, json!(null), "single failures do not count");
    // Published immediately, not with the next report.
    remote.pass(&mut probes, 1).await;
    let reason = remote.degraded().await;
    assert!(reason.as_str().unwrap().contains("none of the nodes remote"), "{reason}");
    let metrics = cluster_metrics(app, ExpositionFormat::Prometheus).await.unwrap();
    assert!(metrics.contains("\ncluster_node_degraded{node=\"sim-1\"} 1"), "{metrics}");
    assert!(metrics.contains("\ncluster_node_degraded{node=\"remote\"} 0"), "{metrics}");
    let request = json!({"name": "web", "cpus": 1, "memory": 1024, "disk": [{"size": 1}], "network": []});
    let refused = cluster.call(&token, Method::POST, "/instances", Some(request)).await;
    assert_eq!(refused.status, 507, "{}", refused.text);
    let network = ObjectRef::new(ObjectType::Network, network);
    assert!(cluster.messages(&network).await.contains(&"node became degraded".to_owned()));

    // A node whose only peer is known to be dead is not degraded.
    let row = nodes::get(&*app.store, &NameOrId::Id(identity.id)).await.unwrap().unwrap();
    transaction!(app.store, |tx| { Ok(nodes::set_state(tx, &row, NodeState::Missing).await?) }).unwrap();
    probes.pass(app).await.unwrap();
    assert_eq!(remote.degraded().await, json!(null));
    assert!(cluster.messages(&network).await.contains(&"node recovered from its degradation".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_reaches_only_the_daemons_of_its_peers_is_degraded() {
    let (cluster, _) = cluster(&[]).await;
    let id = NodeId::new();
    let (address, received) = remote_daemon(&cluster, id, |_| Response::default()).await;
    // No host has the address, and packets to it are not sent.
    let identity = NodeIdentity {
        id,
        name: "remote".into(),
        ip: Ipv4Addr::BROADCAST,
        simulated: false,
        ..cluster.node.identity().clone()
    };
    let remote = Remote::new(&cluster, identity.clone(), address).await;
    let mut probes = MeshProbes::default();
    remote.pass(&mut probes, 4).await;
    let reason = remote.degraded().await;
    assert!(reason.as_str().is_some_and(|reason| reason.contains("the mesh addresses")), "{reason}");

    // Nothing listens there, but the host replies.
    let identity = NodeIdentity { ip: Ipv4Addr::new(127, 0, 0, 9), ..identity };
    transaction!(cluster.app.store, |tx| { Ok(nodes::set_identity(tx, &identity).await?) }).unwrap();
    remote.pass(&mut probes, 1).await;
    assert_eq!(remote.degraded().await, json!(null));
    assert!(!received.lock().is_empty(), "its daemon responds");
}
