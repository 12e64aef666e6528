//! The addresses of instances on lost nodes: no other instance gets one while a VM may still use it.

use axum::http::Method;
use muster_control::objects::instance::fence;
use muster_control::reconcile;
use muster_store::{instances, nodes, transaction};
use muster_test_cluster::ApiResponse;
use muster_types::ids::NodeId;
use muster_types::node::{NodeApi as _, NodeIdentity};
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::time::now;
use serde_json::{Value, json};

use crate::instances::text;
use crate::lost_hosts::LostHost;

/// Returns the addresses of an instance, and its floating addresses.
fn addresses(instance: &Value) -> Vec<String> {
    let interfaces = instance["interfaces"].as_array().unwrap();
    let fields = interfaces.iter().flat_map(|interface| [&interface["ipv4"], &interface["floating"]]);
    fields.filter_map(|field| field.as_str().map(str::to_owned)).collect()
}

impl LostHost {
    /// Requests an instance on the other node with an address.
    async fn request_address(&self, address: &str) -> ApiResponse {
        let body = json!({
            "name": "other", "cpus": 1, "memory": 64, "disk": [{"size": 1}], "placed_on": "sim-2",
            "network": [{"network_uuid": "blue", "address": address}]
        });
        self.call(Method::POST, "/instances", Some(body)).await
    }

    async fn delete_instance(&self) {
        let deleted = self.call(Method::DELETE, &self.path(""), None).await;
        assert!(deleted.status.is_success(), "{}", deleted.text);
        self.cluster.settle().await;
        assert_eq!(text(&self.show().await, "state"), "deleted");
    }

    /// Returns the record of an address of the network that is not free.
    async fn address(&self, address: &str) -> Option<Value> {
        let list = self.call(Method::GET, "/networks/blue/addresses", None).await.body;
        list.as_array().unwrap().iter().find(|record| record["address"] == address).cloned()
    }

    async fn require_reserved(&self, address: &str) {
        let refused = self.request_address(address).await;
        assert_eq!(refused.status, 409, "{}", refused.text);
        let record = self.address(address).await.unwrap();
        assert_eq!((text(&record, "type"), text(&record, "user_type")), ("manual", "node"), "{record}");
        let comment = text(&record, "comment");
        assert!(
            comment.contains("node sim-1") && comment.contains(text(&self.instance, "uuid")),
            "{comment}"
        );
    }

    async fn require_free(&self, address: &str) {
        assert_eq!(self.address(address).await, None);
        let created = self.request_address(address).await;
        assert_eq!(created.status, 200, "{}", created.text);
        self.cluster.settle().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn addresses_of_lost_instance_have_no_other_owner_until_its_host_is_back() {
    // The netblock has addresses for five instances.
    let host = LostHost::with(&json!({}), "10.0.0.0/29", &[]).await;
    let lost = addresses(&host.instance);
    assert_eq!(lost.len(), 2, "{}", host.instance);
    let cluster = &host.cluster;
    let mut count = 0;
    let mut fill = async |lost: &[String]| {
        // As many as there are addresses, at random, and the very address of the lost instance.
        let mut found = Vec::new();
        for _ in 0..6 {
            count += 1;
            let body = json!({
                "name": format!("filler-{count}"), "cpus": 1, "memory": 64, "disk": [{"size": 1}], "placed_on": "sim-2",
                "network": [{"network_uuid": "blue", "float": true}]
            });
            let created = host.call(Method::POST, "/instances", Some(body)).await;
            if created.status == 200 {
                found.push(created.body);
            }
        }
        assert!(!found.is_empty());
        for other in &found {
            let overlap: Vec<String> =
                addresses(other).into_iter().filter(|address| lost.contains(address)).collect();
            assert!(overlap.is_empty(), "{overlap:?}");
        }
        let refused = host.request_address(&lost[0]).await;
        assert_eq!(refused.status, 409, "{}", refused.text);
        cluster.settle().await;
        for other in found {
            let path = format!("/instances/{}", text(&other, "uuid"));
            assert!(host.call(Method::DELETE, &path, None).await.status.is_success());
        }
        cluster.settle().await;
        reconcile::quarantine::run(&cluster.app).await.unwrap();
    };
    cluster.lose_node("sim-1").await;
    fill(&lost).await;
    let evacuated = host.evacuate().await;
    assert_eq!(text(&evacuated.body[0], "outcome"), "error", "{}", evacuated.text);
    fill(&lost).await;
    let deleted = host.call(Method::DELETE, "/nodes/sim-1", Some(json!({"dead": true}))).await;
    assert_eq!(deleted.body["state"], "deleted", "{}", deleted.text);
    fill(&lost).await;
    assert_eq!(addresses(&host.show().await), lost);

    // The VM may still use its own address; the floating one was that of a network node.
    host.delete_instance().await;
    host.require_reserved(&lost[0]).await;
    fill(&lost[..1]).await;
    let refused = reconcile::checkin::join(&cluster.app).await.unwrap_err().to_string();
    assert!(refused.contains("was deleted from the cluster"), "{refused}");
    assert!(cluster.vms().is_empty());
    assert_eq!(host.address(&lost[0]).await, None);
    let network: muster_types::ids::NetworkId =
        text(&host.instance["interfaces"][0], "network_uuid").parse().unwrap();
    let messages = cluster.messages(&ObjectRef::new(ObjectType::Network, network)).await;
    assert!(messages.contains(&"address reservation released".to_owned()), "{messages:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn address_of_deleted_instance_is_reserved_until_its_former_host_is_back() {
    let host = LostHost::new(&json!({"disposable": true})).await;
    let lost = addresses(&host.instance);
    host.cluster.lose_node("sim-1").await;
    host.evacuate_to_other_node().await;
    host.delete_instance().await;
    host.require_reserved(&lost[0]).await;
    host.return_host().await;
    host.require_free(&lost[0]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn address_is_reserved_until_all_former_hosts_are_back() {
    let host = LostHost::with(&json!({"disposable": true}), "10.0.0.0/29", &[]).await;
    let lost = addresses(&host.instance);
    host.cluster.lose_node("sim-1").await;
    host.evacuate_to_other_node().await;
    // A third node is lost after the instance was evacuated to it, and both others have never been back.
    let ghost =
        NodeIdentity { id: NodeId::new(), name: "ghost".into(), ..host.cluster.node.identity().clone() };
    let app = &host.cluster.app;
    transaction!(app.store, |tx| {
        nodes::insert(tx, &ghost).await?;
        Ok(tx.execute("UPDATE nodes SET state = 'error', lastseen = 1.0 WHERE name = 'ghost'", &[]).await?)
    })
    .unwrap();
    let ghost_row = nodes::get(&*app.store, &NameOrId::Id(ghost.id)).await.unwrap().unwrap();
    let row = instances::get(&*app.store, host.id()).await.unwrap().unwrap();
    let unfenced = fence::with_unfenced(app, row, &ghost_row);
    let nodes: Vec<NodeId> = unfenced.spec.unfenced_vms().map(|vm| vm.node).collect();
    assert_eq!(nodes, [host.cluster.node.identity().id, ghost.id], "none is forgotten");
    transaction!(app.store, |tx| {
        Ok(instances::set_spec(tx, unfenced.id, &unfenced.spec, &unfenced.disks).await?)
    })
    .unwrap();

    host.delete_instance().await;
    host.require_reserved(&lost[0]).await;
    host.return_host().await;
    let record = host.address(&lost[0]).await.unwrap();
    assert!(text(&record, "comment").contains("node ghost"), "{record}");
    assert_eq!(host.request_address(&lost[0]).await.status, 409);
    // An operator who knows that the last host is off releases it.
    let path = format!("/networks/blue/addresses/{}", lost[0]);
    assert!(host.call(Method::DELETE, &path, None).await.status.is_success());
    host.require_free(&lost[0]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn address_of_instance_that_was_being_deleted_on_a_lost_node_is_reserved() {
    let host = LostHost::new(&json!({})).await;
    let lost = addresses(&host.instance);
    host.cluster.lose_node("sim-1").await;
    let deleted = host.call(Method::DELETE, &host.path(""), None).await;
    assert_eq!(text(&deleted.body, "state"), "delete-wait", "{}", deleted.text);
    let evacuated = host.evacuate().await;
    assert_eq!(text(&evacuated.body[0], "outcome"), "deleted", "{}", evacuated.text);
    host.require_reserved(&lost[0]).await;

    // An operator who knows that the host is off releases it.
    let path = format!("/networks/blue/addresses/{}", lost[0]);
    let released = host.call(Method::DELETE, &path, None).await;
    assert!(released.status.is_success(), "{}", released.text);
    host.require_free(&lost[0]).await;
    host.return_host().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn address_is_free_after_deletion_if_the_vm_was_certainly_stopped() {
    // The node returned before the deletion.
    let host = LostHost::new(&json!({})).await;
    let lost = addresses(&host.instance);
    host.cluster.lose_node("sim-1").await;
    host.evacuate().await;
    host.return_host().await;
    host.delete_instance().await;
    host.require_free(&lost[0]).await;

    // The lease of self-fencing has expired, or expires before the deletion ends.
    for remaining in [-100.0, 2.0] {
        let host = LostHost::new(&json!({"fencing": "self"})).await;
        let lost = addresses(&host.instance);
        host.cluster.lose_node("sim-1").await;
        let node = host.call(Method::GET, "/nodes/sim-1", None).await.body;
        // Ten seconds after the lease the VM has certainly stopped.
        let lease = now() - node["lastseen"].as_f64().unwrap() + remaining - 10.0;
        host.set_leases("sim-1", None, Some(lease)).await;
        let evacuated = host.evacuate().await;
        assert_eq!(text(&evacuated.body[0], "outcome"), "error", "{}", evacuated.text);
        host.delete_instance().await;
        host.require_free(&lost[0]).await;
        host.return_host().await;
    }
}
