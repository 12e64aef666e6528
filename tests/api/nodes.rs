//! Nodes: lookup, state and deletion.

use axum::http::Method;
use muster_control::exposition::ExpositionFormat;
use muster_control::{App, objects, reconcile};
use muster_store::leases::{self, LeaseOwner};
use muster_test_cluster::{Cluster, caller};
use muster_types::node::NodeState;
use muster_types::object::{ObjectRef, ObjectType};
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
        "clock_skew",
        "fencing_lease",
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
    assert_eq!((&node["epoch"], &node["is_active_network_node"]), (&json!(1), &json!(false)), "{node}");
    assert!(node["started"].as_f64().unwrap() > 1e9, "{node}");
    let owner = LeaseOwner { id: node["uuid"].as_str().unwrap().into(), ..LeaseOwner::new("sim-1") };
    leases::acquire(&cluster.app.store, leases::NETWORK_NODE_LEASE, &owner, 60.0).await.unwrap();
    let list = cluster.call(&token, Method::GET, "/nodes", None).await.body;
    let active: Vec<_> =
        list.as_array().unwrap().iter().map(|node| &node["is_active_network_node"]).collect();
    assert_eq!(active, [&json!(true), &json!(false)]);

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
    let cluster =
        Cluster::with(&[("NODE_CHECKIN_INTERVAL", "0.5"), ("NODE_CHECKIN_MAXIMUM", "1")], None).await;
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
async fn metrics_show_silence_and_clock_skew_unless_the_daemon_was_shut_down() {
    for is_stopped in [false, true] {
        let cluster = Cluster::new().await;
        let app = &cluster.app;
        let mut tx = app.store.begin().await.unwrap();
        let sql = "UPDATE nodes SET lastseen = lastseen - 500.0, clock_skew = -2.5";
        tx.execute(sql, &[]).await.unwrap();
        tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
        if is_stopped {
            reconcile::checkin::leave(app).await;
        }
        let text = objects::metrics::cluster_metrics(app, ExpositionFormat::Prometheus).await.unwrap();
        for line in [
            "cluster_node_silence_seconds{node=\"sim-1\"} 5",
            "cluster_node_clock_skew_seconds{node=\"sim-1\"} -2.5",
        ] {
            assert_eq!(text.contains(line), !is_stopped, "{line} of {text}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_drained_nodes_are_deleted_and_they_cannot_rejoin() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let delete = async |body| cluster.call(&token, Method::DELETE, "/nodes/sim-1", body).await;
    for body in [None, Some(json!({"force": true})), Some(json!({"dead": true}))] {
        let refused = delete(body).await;
        assert!(
            refused.status == 409 && refused.text.contains("node sim-1 is alive. Drain it first"),
            "{}",
            refused.text
        );
    }
    cluster.start_maintenance("sim-1").await;
    let deleted = delete(None).await;
    assert_eq!((deleted.status.as_u16(), &deleted.body["state"]), (200, &json!("deleted")));
    let refused = reconcile::checkin::join(&cluster.app).await.unwrap_err().to_string();
    assert!(refused.contains("was deleted from the cluster"), "{refused}");
    assert_eq!(objects::node::find(&cluster.app, "sim-1").await.unwrap().state, NodeState::Deleted);
    objects::node::delete(&cluster.app, &caller(), "sim-1", false).await.unwrap();
    // A reinstalled host can join under the same name.
    let identity = cluster.app.nodes[0].identity().clone();
    let reinstalled = muster_types::node::NodeIdentity { id: muster_types::ids::NodeId::new(), ..identity };
    objects::node_join::join(&cluster.app, &reinstalled).await.unwrap();
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
async fn repeated_deletion_of_node_releases_the_remaining_instances() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let app = &cluster.app;
    let instance = crate::instances::create(&cluster, &token, "web", &json!({"placed_on": "sim-1"})).await;
    // Simulates a daemon that was killed after it had marked the node as deleted.
    let row = objects::node::find(app, "sim-1").await.unwrap();
    let marked = muster_store::transaction!(app.store, |tx| {
        Ok(muster_store::nodes::set_state(tx, &row, NodeState::Deleted).await?)
    });
    assert!(marked.unwrap());
    let deleted = cluster.call(&token, Method::DELETE, "/nodes/sim-1", None).await;
    assert_eq!(deleted.status, 200, "{}", deleted.text);
    let path = format!("/instances/{}", instance["uuid"].as_str().unwrap());
    let record = cluster.call(&token, Method::GET, &path, None).await.body;
    assert_eq!((&record["state"], &record["node"]), (&json!("error"), &json!(null)), "{record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn daemon_without_members_rejects_requests_and_runs_nothing() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let app = &cluster.app;
    let delete = async |node: &str| {
        let path = format!("/nodes/{node}");
        cluster.start_maintenance(node).await;
        cluster.call(&token, Method::DELETE, &path, None).await
    };
    assert_eq!(delete("sim-2").await.status, 200);
    reconcile::checkin::check_in(app).await.unwrap();
    assert_eq!(cluster.call(&token, Method::GET, "/nodes", None).await.status, 200, "one node is a member");
    assert_eq!(objects::node::find(app, "sim-2").await.unwrap().state, NodeState::Deleted);
    assert_eq!(delete("sim-1").await.status, 200, "the daemon deletes its own last node");

    let error = reconcile::checkin::check_in(app).await.unwrap_err();
    assert!(matches!(error, muster_types::Error::StaleEpoch(_)), "{error}");
    let login = Some(json!({"namespace": "system", "key": "any"}));
    for (method, path, body) in
        [(Method::GET, "/nodes", None), (Method::POST, "/auth", login), (Method::GET, "/readyz", None)]
    {
        let response = cluster.call(&token, method, path, body).await;
        assert_eq!(response.status, 503, "{path}: {}", response.text);
        assert!(
            response.text.contains("was deleted, fenced or started by another daemon"),
            "{}",
            response.text
        );
    }
    assert_eq!(cluster.call("", Method::GET, "/livez", None).await.status, 200);
    assert_eq!(cluster.worker.run_once().await.unwrap(), 0);
    cluster.allow_unfinished_operations("no daemon runs them");
}

#[tokio::test(flavor = "multi_thread")]
async fn daemon_with_wrong_clock_creates_no_tokens_and_leases_nothing() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    cluster.create_namespace("ci").await;
    let membership = &cluster.app.store.membership;
    let key = cluster.key(&caller(), "system", "clock").await;
    let log_in = async || {
        let body = json!({"namespace": "system", "key": key.expose()});
        cluster.call("", Method::POST, "/auth", Some(body)).await
    };
    let deletion = cluster.call(&token, Method::DELETE, "/auth/namespaces/ci", None).await;
    assert_eq!(deletion.status, 200, "{}", deletion.text);
    let now = muster_types::time::now();
    membership.observe_clock(now, now - 300.0, now);
    let refused = log_in().await;
    assert_eq!(refused.status, 503);
    assert!(refused.text.contains("300.0 seconds ahead of that of the database"), "{}", refused.text);
    assert_eq!(cluster.worker.run_once().await.unwrap(), 0);
    assert_eq!(cluster.call(&token, Method::GET, "/nodes", None).await.status, 200, "everything else works");

    // The check-in measures the clock, and the next one shows it.
    for _ in 0..2 {
        reconcile::checkin::check_in(&cluster.app).await.unwrap();
    }
    assert_eq!(log_in().await.status, 200);
    let node = cluster.call(&token, Method::GET, "/nodes/sim-1", None).await.body;
    assert!(node["clock_skew"].as_f64().unwrap().abs() < 1.0, "{node}");
    let object = ObjectRef::new(ObjectType::Node, node["uuid"].as_str().unwrap());
    let messages = cluster.messages(&object).await;
    assert!(
        messages.iter().any(|text| text.contains("agrees with that of the database again")),
        "{messages:?}"
    );
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn second_daemon_of_a_node_is_rejected_while_the_first_checks_in() {
    let cluster = Cluster::with(&[("NODE_CHECKIN_INTERVAL", "1"), ("NODE_CHECKIN_MAXIMUM", "2")], None).await;
    let identity = cluster.app.nodes[0].identity();
    let App { store, settings, events, nodes, .. } = &*cluster.app;
    let seed = muster_types::key::Secret::new("a seed that only tests use");
    // A copied data directory has another lock file.
    let copy = App::new(store.clone(), settings.clone(), events.clone(), &seed, nodes.clone());
    let renamed = muster_types::node::NodeIdentity { name: "copy".into(), ..identity.clone() };
    let rejected = async {
        let error = objects::node_join::join(&copy, &renamed).await.unwrap_err().to_string();
        assert!(
            error.contains("another daemon already runs node sim-1") && error.contains("started 2"),
            "{error}"
        );
    };
    let check_ins = async {
        loop {
            reconcile::checkin::check_in(&cluster.app).await.unwrap();
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        () = rejected => {}
        () = check_ins => {}
    }
    // Without check-ins, the copy takes over after NODE_CHECKIN_MAXIMUM, under a new epoch.
    let epoch = objects::node::find(&copy, "sim-1").await.unwrap().epoch;
    objects::node_join::join(&copy, identity).await.unwrap();
    assert_eq!(objects::node::find(&copy, "sim-1").await.unwrap().epoch, epoch + 1);
}
