//! Instances with disks on storage that nodes share, on simulated nodes.

use std::path::{Path, PathBuf};

use axum::http::Method;
use muster_control::reconcile;
use muster_node::SimulationScript;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::instances::{instance_request, text};
use crate::lost_hosts::LostHost;

/// A cluster with shared storage and an instance on `sim-1` whose disks are there.
struct SharedHost {
    host: LostHost,
    storage: TempDir,
}

impl SharedHost {
    async fn new() -> Self {
        let storage = tempfile::tempdir().unwrap();
        let path = storage.path().to_str().unwrap().to_owned();
        let request = json!({"storage": "shared"});
        let settings = [("SHARED_STORAGE", path.as_str()), ("SCHEDULER_CACHE_TIMEOUT", "0")];
        let host = LostHost::with(&request, "10.0.0.0/24", &settings).await;
        Self { host, storage }
    }

    fn marker(&self) -> PathBuf {
        self.storage.path().join("muster-storage.json")
    }

    fn disk_dir(&self) -> PathBuf {
        self.storage.path().join("instances").join(text(&self.host.instance, "uuid"))
    }

    /// Writes to the disks as a guest would.
    fn write_data(&self) {
        std::fs::write(self.disk_dir().join("disks"), "data of the guest").unwrap();
    }

    fn read_data(&self) -> String {
        std::fs::read_to_string(self.disk_dir().join("disks")).unwrap()
    }

    /// Mounts another directory on `sim-2`, or nothing, and lets all nodes report.
    async fn mount_on_second(&self, path: Option<&Path>) {
        self.host.cluster.other.set_shared_storage(path);
        reconcile::checkin::join(&self.host.cluster.app).await.unwrap();
    }

    async fn node(&self, name: &str) -> Value {
        self.host.call(Method::GET, &format!("/nodes/{name}"), None).await.body
    }

    async fn delete(&self) {
        let deleted = self.host.call(Method::DELETE, &self.host.path(""), None).await;
        assert!(deleted.status.is_success(), "{}", deleted.text);
    }

    async fn wait_until_deleted(&self) {
        self.host.cluster.settle().await;
        assert_eq!(text(&self.host.show().await, "state"), "deleted");
        assert!(!self.disk_dir().exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn evacuated_instance_has_the_content_of_its_shared_disks() {
    let shared = SharedHost::new().await;
    let host = &shared.host;
    let storage = shared.node("sim-1").await["shared_storage"].clone();
    assert_eq!((&storage["problem"], &storage["path"]), (&json!(null), &json!(shared.storage.path())));
    assert_eq!(shared.node("sim-2").await["shared_storage"]["uuid"], storage["uuid"]);
    assert_eq!(
        (text(&host.instance, "storage"), &host.instance["storage_uuid"]),
        ("shared", &storage["uuid"])
    );
    assert_eq!(host.cluster.committed_capacity().await["sim-1"].2, 0, "its disks are not on the node");
    shared.write_data();
    let path = format!("/instances/{}/migrate", text(&host.instance, "uuid"));
    let refused = host.call(Method::POST, &path, Some(json!({}))).await;
    assert_eq!(refused.status, 409, "{}", refused.text);
    assert!(text(&refused.body, "error").contains("shared storage"), "{}", refused.text);

    host.cluster.lose_node("sim-1").await;
    let record = host.evacuate_to_other_node().await;
    assert_eq!(text(&record, "power_state"), "on");
    assert_eq!(record["storage_uuid"], storage["uuid"]);
    assert_eq!(shared.read_data(), "data of the guest");

    // The host returns: the VM that it had moves to lost+found, the disks stay.
    assert_eq!(host.return_host().await.len(), 1);
    reconcile::vms::run_once(&host.cluster.app).await.unwrap();
    assert_eq!(shared.read_data(), "data of the guest");
    assert_eq!(host.cluster.vms(), [host.id()]);
    shared.delete().await;
    shared.wait_until_deleted().await;
    assert_eq!(host.cluster.committed_capacity().await["sim-2"], (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_with_consent_restarts_an_instance_with_shared_disks_elsewhere() {
    let shared = SharedHost::new().await;
    let host = &shared.host;
    shared.write_data();
    let drain = async |body: Value| {
        let drained = host.call(Method::POST, "/nodes/sim-1/drain", Some(body)).await;
        assert_eq!(drained.status, 200, "{}", drained.text);
        host.cluster.settle().await;
        drained.body["instances"][0].clone()
    };
    let blocked = drain(json!({"dry_run": true})).await;
    assert_eq!(blocked["outcome"], "blocked", "{blocked}");
    assert!(text(&blocked, "reason").contains("shared storage"), "{blocked}");

    // A failure leaves the disks to the source.
    let script =
        SimulationScript { migration_error: Some("the cable is unplugged".into()), ..Default::default() };
    host.cluster.node.set_script(script);
    let path = format!("/instances/{}/migrate", text(&host.instance, "uuid"));
    let requested = host.call(Method::POST, &path, Some(json!({"stop": true}))).await;
    assert_eq!(requested.status, 202, "{}", requested.text);
    host.cluster.settle().await;
    let record = host.show().await;
    assert_eq!((&record["node"], &record["power_state"]), (&json!("sim-1"), &json!("on")), "{record}");
    host.cluster.node.set_script(SimulationScript::default());

    let moved = drain(json!({"stop": true})).await;
    assert_eq!((&moved["outcome"], &moved["node"]), (&json!("restart"), &json!("sim-2")), "{moved}");
    let record = host.show().await;
    assert_eq!((&record["node"], &record["power_state"]), (&json!("sim-2"), &json!("on")), "{record}");
    assert_eq!(shared.read_data(), "data of the guest");
    reconcile::vms::run_once(&host.cluster.app).await.unwrap();
    assert_eq!(shared.read_data(), "data of the guest");
    let capacity = host.cluster.committed_capacity().await;
    assert_eq!((capacity["sim-1"], capacity["sim-2"].2), ((0, 0, 0), 0), "{capacity:?}");
    shared.delete().await;
    shared.wait_until_deleted().await;
    assert_eq!(host.cluster.committed_capacity().await["sim-2"], (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn node_without_the_storage_gets_no_instances_that_need_it() {
    let shared = SharedHost::new().await;
    let host = &shared.host;
    let registered = shared.node("sim-1").await["shared_storage"]["uuid"].clone();
    let request = instance_request("db", &json!({"storage": "shared", "placed_on": "sim-2"}));
    let refuse = async |reason: &str| {
        let refused = host.call(Method::POST, "/instances", Some(request.clone())).await;
        assert_eq!((refused.status.as_u16(), &refused.body["stage"]), (507, &json!("shared_storage")));
        assert!(text(&refused.body, "error").contains(reason), "{}", refused.text);
    };
    shared.mount_on_second(None).await;
    assert_eq!(shared.node("sim-2").await["shared_storage"], json!(null));
    refuse("node sim-2: it has no shared storage (SHARED_STORAGE)").await;

    // The path exists, but nothing is mounted there.
    let unmounted = tempfile::tempdir().unwrap();
    shared.mount_on_second(Some(unmounted.path())).await;
    let node = shared.node("sim-2").await;
    assert_eq!(node["shared_storage"]["uuid"], json!(null), "{node}");
    let reason = format!("is not the storage {}, which other nodes have", registered.as_str().unwrap());
    assert!(text(&node["limits"], "shared-storage").contains(&reason), "{node}");
    refuse(&reason).await;
    assert_eq!(std::fs::read_dir(unmounted.path()).unwrap().count(), 0, "nothing is written there");

    host.cluster.lose_node("sim-1").await;
    let waiting = host.evacuate().await;
    assert_eq!(text(&waiting.body[0], "outcome"), "waiting", "{}", waiting.text);
    assert!(text(&waiting.body[0], "reason").contains(&reason), "{}", waiting.text);
    host.return_host().await;
    shared.mount_on_second(Some(shared.storage.path())).await;
    host.cluster.lose_node("sim-1").await;
    host.evacuate_to_other_node().await;
    host.return_host().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_node_leaves_shared_disks_until_the_instance_is_deleted() {
    let shared = SharedHost::new().await;
    let host = &shared.host;
    shared.write_data();
    host.cluster.lose_node("sim-1").await;
    let deleted = host.call(Method::DELETE, "/nodes/sim-1", Some(json!({"dead": true}))).await;
    assert_eq!(deleted.body["state"], "deleted", "{}", deleted.text);
    assert_eq!(text(&host.show().await, "state"), "error");
    let refused = reconcile::checkin::join(&host.cluster.app).await.unwrap_err().to_string();
    assert!(refused.contains("was deleted from the cluster"), "{refused}");
    assert_eq!(host.lost_found(1), [text(&host.instance, "uuid")]);
    assert_eq!(shared.read_data(), "data of the guest");
    shared.delete().await;
    shared.wait_until_deleted().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_on_a_dead_node_continues_on_another_one() {
    let shared = SharedHost::new().await;
    let host = &shared.host;
    host.cluster.lose_node("sim-1").await;
    shared.delete().await;
    assert_eq!(text(&host.show().await, "state"), "delete-wait");
    let evacuated = host.evacuate().await;
    assert_eq!(text(&evacuated.body[0], "outcome"), "deleted", "{}", evacuated.text);
    shared.wait_until_deleted().await;
    host.return_host().await;
    reconcile::vms::run_once(&host.cluster.app).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn storage_that_vanished_is_reported_and_nothing_uses_the_empty_directory() {
    let shared = SharedHost::new().await;
    let host = &shared.host;
    let power = async |action: &str| host.call(Method::POST, &host.path(action), None).await;
    assert_eq!(power("/poweroff").await.status, 200);
    let saved = shared.storage.path().join("saved");
    std::fs::rename(shared.marker(), &saved).unwrap();
    let refused = power("/poweron").await;
    assert_eq!(refused.status, 406, "{}", refused.text);
    assert!(refused.text.contains("is not mounted at"), "{}", refused.text);
    reconcile::checkin::join(&host.cluster.app).await.unwrap();
    for node in ["sim-1", "sim-2"] {
        let node = shared.node(node).await;
        assert!(text(&node["limits"], "shared-storage").contains("mount it there"), "{node}");
    }
    assert!(!shared.marker().exists());
    shared.delete().await;
    host.cluster.worker.run_once().await.unwrap();
    assert_eq!(text(&host.show().await, "state"), "delete-wait", "it waits for the storage");

    std::fs::rename(&saved, shared.marker()).unwrap();
    reconcile::checkin::join(&host.cluster.app).await.unwrap();
    assert_eq!(shared.node("sim-1").await["limits"], json!({}));
    shared.wait_until_deleted().await;
}
