//! Nodes: lookup, state and deletion.

use axum::http::Method;
use muster_control::{objects, reconcile};
use muster_test_cluster::{Cluster, caller};
use muster_types::node::NodeState;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::vm::VmPower;
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn finds_node_by_name_or_id_with_its_resources() {
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
        let fetched = cluster.call(&token, Method::GET, &format!("/nodes/{reference}"), None).await.body;
        assert_eq!(&fetched, node);
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
async fn node_without_checkin_goes_missing_then_error_until_it_rejoins() {
    let cluster = Cluster::with(&[("NODE_CHECKIN_MAXIMUM", "1")], None).await;
    let app = &cluster.app;
    let state = async || objects::node::find(app, "sim-1").await.unwrap().state;
    let set_last_seen = async |seconds: f64| {
        let mut tx = app.store.begin().await.unwrap();
        let last_seen = muster_types::time::now() - seconds;
        tx.execute("UPDATE nodes SET lastseen = ?", &[last_seen.into()]).await.unwrap();
        tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
        reconcile::node_watch::run(app).await.unwrap();
    };
    set_last_seen(0.0).await;
    assert_eq!(state().await, NodeState::Created);
    set_last_seen(2.0).await;
    assert_eq!(state().await, NodeState::Missing);
    set_last_seen(11.0).await;
    assert_eq!(state().await, NodeState::Error);
    reconcile::checkin::join(app).await.unwrap();
    assert_eq!(state().await, NodeState::Created);
    reconcile::checkin::leave(app).await;
    assert_eq!(state().await, NodeState::Stopped);
    set_last_seen(100.0).await;
    assert_eq!(state().await, NodeState::Stopped, "a node that left is not reported missing");
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_node_cannot_rejoin() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let deleted = cluster.call(&token, Method::DELETE, "/nodes/sim-1", Some(json!({"force": true}))).await;
    assert_eq!((deleted.status.as_u16(), &deleted.body["state"]), (200, &json!("deleted")));
    let refused = reconcile::checkin::join(&cluster.app).await.unwrap_err().to_string();
    assert!(refused.contains("was deleted from the cluster"), "{refused}");
    assert_eq!(objects::node::find(&cluster.app, "sim-1").await.unwrap().state, NodeState::Deleted);
    objects::node::delete(&cluster.app, &caller(), "sim-1", false).await.unwrap();
    // A reinstalled host can join under the same name.
    let identity = cluster.app.nodes[0].identity().clone();
    let reinstalled = muster_types::node::NodeIdentity { id: muster_types::ids::NodeId::new(), ..identity };
    objects::node::join(&cluster.app, &reinstalled).await.unwrap();
    assert_eq!(objects::node::find(&cluster.app, "sim-1").await.unwrap().state, NodeState::Created);
    assert_eq!(objects::node::list(&cluster.app).await.unwrap().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_namespace_reads_the_display_authorities() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let created =
        cluster.call(&token, Method::POST, "/auth/namespaces", Some(json!({"namespace": "ci"}))).await;
    assert_eq!(created.status, 200, "{}", created.text);
    let response = cluster.call(&cluster.token("ci").await, Method::GET, "/admin/cacert", None).await;
    assert_eq!(response.status, 200, "{}", response.text);
    assert_eq!(response.headers["content-type"], "text/plain; charset=utf-8");
    assert_eq!(response.text.matches("BEGIN CERTIFICATE").count(), 1, "{}", response.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_is_alive_or_has_instances_is_only_deleted_by_force() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let app = &cluster.app;
    let request = json!({"placed_on": "sim-1"});
    let instance = crate::instances::create(&cluster, &token, "web", &request).await;
    let uuid = instance["uuid"].as_str().unwrap();
    let delete = async |body| cluster.call(&token, Method::DELETE, "/nodes/sim-1", body).await;
    let refused = delete(None).await;
    assert_eq!(refused.status, 409, "{}", refused.text);
    let reason = refused.body["error"].as_str().unwrap();
    assert!(reason.contains("is alive and has 1 instances: web") && reason.contains(uuid), "{reason}");

    // Neither without instances nor without a daemon alone.
    let other = cluster.call(&token, Method::DELETE, "/nodes/sim-2", None).await;
    assert!(other.status == 409 && !other.text.contains("instances:"), "{}", other.text);
    reconcile::checkin::leave(app).await;
    let refused = delete(None).await;
    assert!(refused.status == 409 && refused.text.contains("is not alive and has 1"), "{}", refused.text);
    let other = cluster.call(&token, Method::DELETE, "/nodes/sim-2", None).await;
    assert_eq!(other.status, 200, "{}", other.text);

    // The VM is stopped; its disks stay.
    assert_eq!(delete(Some(json!({"force": true}))).await.body["state"], "deleted");
    reconcile::vms::run_once(app).await.unwrap();
    reconcile::storage::run_once(app).await.unwrap();
    let node = app.nodes.iter().find(|node| node.identity().name == "sim-1").unwrap();
    let vms = node.vms().list().await.unwrap();
    assert_eq!(vms.len(), 1);
    assert!(matches!(vms[0].power, VmPower::Off { .. }), "{vms:?}");
    let record = cluster.call(&token, Method::GET, &format!("/instances/{uuid}"), None).await.body;
    assert_eq!(
        (&record["state"], &record["error_message"]),
        (&json!("error"), &json!("node sim-1 was deleted"))
    );
}
