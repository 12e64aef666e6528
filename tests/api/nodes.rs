//! Nodes: who is there, how they are, and what becomes of the silent.

use axum::http::Method;
use muster_control::{objects, reconcile};
use muster_test_cluster::{Cluster, caller};
use muster_types::node::NodeState;
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_found_by_name_and_id_with_its_resources() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let list = cluster.call(&token, Method::GET, "/nodes", None).await.body;
    let node = &list[0];
    for field in [
        "uuid",
        "name",
        "fqdn",
        "ip",
        "state",
        "metadata",
        "version",
        "lastseen",
        "release",
        "is_hypervisor",
        "is_network_node",
        "is_database_node",
        "is_etcd_master",
        "is_eventlog_node",
        "is_cluster_maintainer",
        "spice_server_cert_subject",
        "references_to",
        "references_from",
    ] {
        assert!(node.get(field).is_some(), "{field}: {node}");
    }
    assert_eq!(
        (&node["name"], &node["state"], &node["simulated"]),
        (&json!("sim-1"), &json!("created"), &json!(true))
    );
    for reference in [node["name"].as_str().unwrap(), node["uuid"].as_str().unwrap()] {
        let shown = cluster.call(&token, Method::GET, &format!("/nodes/{reference}"), None).await.body;
        assert_eq!(&shown, node);
    }
    assert_eq!(
        cluster.call(&token, Method::GET, "/nodes/absent", None).await.body["error"],
        "node not found"
    );

    cluster.events(&ObjectRef::new(ObjectType::Node, node["uuid"].as_str().unwrap())).await;
    let query = json!({"event_type": "resources", "limit": 1});
    let resources = cluster.call(&token, Method::GET, "/nodes/sim-1/events", Some(query)).await.body;
    assert!(resources[0]["extra"]["cpu_max"].as_u64().unwrap() > 0, "{resources}");
    let metrics = cluster.call(&token, Method::GET, "/nodes/sim-1/processmetrics", None).await.body;
    assert!(metrics["process_cpu_fraction_muster"].is_number(), "{metrics}");
    let resources = cluster.call(&token, Method::GET, "/admin/resources", None).await.body;
    assert!(resources["per_node"]["sim-1"]["ram_max"].as_f64().unwrap() > 0.0);
    assert!(resources["total"]["cpu_available"].as_f64().unwrap() > 0.0);

    let set =
        cluster.call(&token, Method::PUT, "/nodes/sim-1/metadata/rack", Some(json!({"value": "r1"}))).await;
    assert_eq!(set.text, "null\n");
    assert_eq!(
        cluster.call(&token, Method::GET, "/nodes/sim-1", None).await.body["metadata"],
        json!({"rack": "r1"})
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_node_goes_missing_then_to_error_and_comes_back_by_checking_in() {
    let cluster = Cluster::with(&[("NODE_CHECKIN_MAXIMUM", "1")], None).await;
    let app = &cluster.app;
    let state = async || objects::node::find(app, "sim-1").await.unwrap().state;
    let silent = async |seconds: f64| {
        let mut tx = app.store.begin().await.unwrap();
        let seen = muster_types::time::now() - seconds;
        tx.execute("UPDATE nodes SET lastseen = ?", &[seen.into()]).await.unwrap();
        tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
        reconcile::node_watch::run(app).await.unwrap();
    };
    silent(0.0).await;
    assert_eq!(state().await, NodeState::Created);
    silent(2.0).await;
    assert_eq!(state().await, NodeState::Missing);
    silent(11.0).await;
    assert_eq!(state().await, NodeState::Error);
    reconcile::checkin::join(app).await.unwrap();
    assert_eq!(state().await, NodeState::Created);
    reconcile::checkin::leave(app).await;
    assert_eq!(state().await, NodeState::Stopped);
    silent(100.0).await;
    assert_eq!(state().await, NodeState::Stopped, "who said goodbye is not missed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_node_does_not_come_back() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let deleted = cluster.call(&token, Method::DELETE, "/nodes/sim-1", None).await;
    assert_eq!((deleted.status.as_u16(), &deleted.body["state"]), (200, &json!("deleted")));
    let refused = reconcile::checkin::join(&cluster.app).await.unwrap_err().to_string();
    assert!(refused.contains("was deleted from the cluster"), "{refused}");
    assert_eq!(objects::node::find(&cluster.app, "sim-1").await.unwrap().state, NodeState::Deleted);
    objects::node::delete(&cluster.app, &caller(), "sim-1").await.unwrap();
    // The machine, made anew, may have its name again.
    let identity = cluster.app.nodes[0].identity().clone();
    let anew = muster_types::node::NodeIdentity { id: muster_types::ids::NodeId::new(), ..identity };
    objects::node::join(&cluster.app, &anew).await.unwrap();
    assert_eq!(objects::node::find(&cluster.app, "sim-1").await.unwrap().state, NodeState::Created);
    assert_eq!(objects::node::list(&cluster.app).await.unwrap().len(), 3);
}
