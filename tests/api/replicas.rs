//! Replicas of the disks of instances, on simulated nodes.

use axum::http::Method;
use muster_control::reconcile;
use muster_node::SimulationScript;
use serde_json::{Value, json};

use crate::instances::{instance_request, text};
use crate::lost_hosts::LostHost;

async fn with_replica(request: &Value) -> LostHost {
    let settings = [("REPLICA_INTERVAL", "3600"), ("SCHEDULER_CACHE_TIMEOUT", "0")];
    let mut overrides = json!({"replicas": 1, "disk": [{"size": 3}]});
    for (key, value) in request.as_object().unwrap() {
        overrides[key] = value.clone();
    }
    LostHost::with(&overrides, "10.0.0.0/24", &settings).await
}

impl LostHost {
    async fn reconcile_replicas(&self) {
        reconcile::replicas::run_once(&self.cluster.app).await.unwrap();
    }

    fn replica_files(&self) -> Vec<String> {
        let mut files = self.cluster.files_in("");
        files.retain(|name| name.ends_with(".replica"));
        files
    }

    async fn disk_capacity(&self) -> (i64, i64) {
        let committed = self.cluster.committed_capacity().await;
        let disk = |node| committed.get(node).map_or(0, |capacity| capacity.2);
        (disk("sim-1"), disk("sim-2"))
    }

    async fn replica_rows(&self) -> i64 {
        self.cluster.count_rows("instance_replicas", "1 = 1").await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_replicas_that_cannot_work() {
    let host = with_replica(&json!({})).await;
    for (request, field) in [
        (json!({"replicas": 2}), "replicas: 2"),
        (json!({"replicas": -1}), "replicas: -1"),
        (json!({"replicas": 1, "storage": "shared"}), "replicas: disks on shared storage"),
        (json!({"replicas": 1, "disposable": true}), "replicas: a disposable instance"),
        (json!({"replicas": 1, "disk": [{"base": "label:tiny"}]}), "disk[0].size"),
        (
            json!({"replicas": 1, "disk": [{"base": "label:disc", "type": "cdrom"}]}),
            "replicas: the instance has no disk",
        ),
    ] {
        let refused = host.call(Method::POST, "/instances", Some(instance_request("bad", &request))).await;
        assert_eq!(refused.status, 400, "{request}: {}", refused.text);
        assert!(text(&refused.body, "error").starts_with(field), "{request}: {}", refused.text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_is_placed_copied_and_removed_with_its_instance() {
    let host = with_replica(&json!({})).await;
    assert_eq!((&host.instance["replicas"], &host.instance["replica"]), (&json!(1), &json!(null)));
    assert_eq!(host.disk_capacity().await, (3, 0));
    host.reconcile_replicas().await;
    let replica = host.show().await["replica"].clone();
    assert_eq!((text(&replica, "node"), text(&replica, "state")), ("sim-2", "complete"), "{replica}");
    assert_eq!(replica["error"], json!(null));
    let complete = replica["last_complete"].as_f64().unwrap();
    assert!(complete > 1e9 && replica["seconds_behind"].as_i64().unwrap() < 60, "{replica}");
    assert_eq!(host.disk_capacity().await, (3, 3));
    assert_eq!(host.replica_files().len(), 1);

    assert_eq!(replica["bytes_behind"], json!(null), "its QEMU does not say it");

    // The next copy is due in an hour.
    let script = SimulationScript { replica_lag: Some(3 << 20), ..Default::default() };
    host.cluster.node.set_script(script);
    host.reconcile_replicas().await;
    let replica = host.show().await["replica"].clone();
    assert_eq!(replica["last_complete"].as_f64(), Some(complete));
    assert_eq!(replica["bytes_behind"], json!(3 << 20), "{replica}");

    // The last changes of an instance that is powered off are copied once.
    let off = host.call(Method::POST, &host.path("/poweroff"), None).await;
    assert!(off.status.is_success(), "{}", off.text);
    host.reconcile_replicas().await;
    let replica = host.show().await["replica"].clone();
    let last = replica["last_complete"].as_f64().unwrap();
    assert!(last > complete && replica["bytes_behind"] == json!(0), "{replica}");
    host.reconcile_replicas().await;
    assert_eq!(host.show().await["replica"]["last_complete"].as_f64(), Some(last));

    let deleted = host.call(Method::DELETE, &host.path(""), None).await;
    assert!(deleted.status.is_success(), "{}", deleted.text);
    host.cluster.settle().await;
    host.reconcile_replicas().await;
    assert_eq!((host.disk_capacity().await, host.replica_rows().await), ((0, 0), 0));
    assert!(host.replica_files().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn most_outdated_replicas_are_copied_first() {
    let host = with_replica(&json!({})).await;
    let request = json!({"replicas": 1, "disk": [{"size": 1}], "placed_on": "sim-1"});
    for name in ["b", "c", "d", "e", "f"] {
        let created = host.call(Method::POST, "/instances", Some(instance_request(name, &request))).await;
        assert_eq!(created.status, 200, "{}", created.text);
    }
    host.cluster.settle().await;
    // A pass copies four of the six.
    host.reconcile_replicas().await;
    let complete = async || host.cluster.count_rows("instance_replicas", "state = 'complete'").await;
    assert_eq!(complete().await, 4);
    // These are due again, but the others are served first.
    let mut tx = host.cluster.app.store.begin().await.unwrap();
    let sql = "UPDATE instance_replicas SET last_complete = last_complete - 7200";
    assert_eq!(tx.execute(sql, &[]).await.unwrap(), 4);
    tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
    host.reconcile_replicas().await;
    assert_eq!(complete().await, 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_copy_is_shown_and_the_replica_stays() {
    let host = with_replica(&json!({})).await;
    let script =
        SimulationScript { replica_error: Some("the cable is unplugged".into()), ..Default::default() };
    host.cluster.node.set_script(script);
    host.reconcile_replicas().await;
    let replica = host.show().await["replica"].clone();
    assert_eq!((text(&replica, "state"), text(&replica, "error")), ("initial", "the cable is unplugged"));
    assert_eq!(replica["seconds_behind"], json!(null));
    let why = host.call(Method::GET, &host.path("/explain"), None).await;
    assert!(why.text.contains("the cable is unplugged"), "{}", why.text);

    // Without a complete copy, the instance is lost with its host.
    host.cluster.node.set_script(SimulationScript::default());
    host.reconcile_replicas().await;
    let replica = host.show().await["replica"].clone();
    assert_eq!((text(&replica, "state"), &replica["error"]), ("complete", &json!(null)), "{replica}");
}

#[tokio::test(flavor = "multi_thread")]
async fn evacuated_instance_continues_from_its_replica() {
    let host = with_replica(&json!({"uefi": true})).await;
    host.reconcile_replicas().await;
    let complete = host.show().await["replica"]["last_complete"].as_f64().unwrap();
    host.cluster.lose_node("sim-1").await;
    let record = host.evacuate_to_other_node().await;
    assert_eq!(text(&record, "power_state"), "on");
    assert_eq!(record["disks"][0]["size"], 3);
    assert_eq!(host.disk_capacity().await, (0, 3), "the disk space of the replica is that of the instance");
    let object = muster_types::object::ObjectRef::new(muster_types::object::ObjectType::Instance, host.id());
    let events = host.cluster.events(&object).await;
    let event = events.iter().find(|event| event.message == "disks restored from the replica").unwrap();
    assert!((event.extra["time"].as_f64().unwrap() - complete).abs() < 0.001, "{:?}", event.extra);

    // The host returns, and gets the next replica.
    assert_eq!(host.return_host().await.len(), 1);
    host.reconcile_replicas().await;
    host.reconcile_replicas().await;
    let replica = host.show().await["replica"].clone();
    assert_eq!((text(&replica, "node"), text(&replica, "state")), ("sim-1", "complete"), "{replica}");
    assert_eq!((host.disk_capacity().await, host.replica_rows().await), ((3, 3), 1));
    assert_eq!(host.replica_files().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn fenced_instance_restarts_from_its_replica() {
    let host = with_replica(&json!({"restart": "elsewhere", "fencing": "self"})).await;
    host.reconcile_replicas().await;
    host.cluster.lose_node("sim-1").await;
    host.set_leases("sim-1", None, Some(4.0)).await;
    host.cluster.settle().await;
    let record = host.show().await;
    assert_eq!((text(&record, "state"), text(&record, "node")), ("created", "sim-2"), "{record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn instance_waits_for_the_node_of_its_replica() {
    let host = with_replica(&json!({})).await;
    host.reconcile_replicas().await;
    host.cluster.lose_node("sim-1").await;
    host.cluster.lose_node("sim-2").await;
    let evacuated = host.evacuate().await;
    let record = &evacuated.body[0];
    assert_eq!(text(record, "outcome"), "waiting", "{}", evacuated.text);
    assert!(text(record, "reason").contains("its replica is on node sim-2"), "{}", evacuated.text);
    assert_eq!(text(&host.show().await, "state"), "created");
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_moves_away_from_the_node_of_its_instance() {
    let host = with_replica(&json!({})).await;
    host.reconcile_replicas().await;
    let migrated = host.call(Method::POST, &host.path("/migrate"), Some(json!({"target": "sim-2"}))).await;
    assert!(migrated.status.is_success(), "{}", migrated.text);
    host.cluster.settle().await;
    assert_eq!(text(&host.show().await, "node"), "sim-2");
    host.reconcile_replicas().await;
    host.reconcile_replicas().await;
    let replica = host.show().await["replica"].clone();
    assert_eq!((text(&replica, "node"), text(&replica, "state")), ("sim-1", "complete"), "{replica}");
    assert_eq!((host.disk_capacity().await, host.replica_rows().await), ((3, 3), 1));
}
