//! Networks, their addresses and interfaces, on simulated nodes.

use axum::http::Method;
use muster_control::reconcile;
use muster_store::interfaces;
use muster_test_cluster::{ApiResponse, Cluster, wait_for};
use muster_types::ids::NetworkId;
use muster_types::network::FLOATING_NETWORK_ID;
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

/// Creates a cluster with the namespace `ci`, and returns it with a token of `ci`.
pub(crate) async fn cluster(settings: &[(&str, &str)]) -> (Cluster, String) {
    let cluster = Cluster::with(settings, None).await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    (cluster, token)
}

/// Creates a network, waits until it is `created`, and returns its id.
pub(crate) async fn create_network(cluster: &Cluster, token: &str, body: Value) -> String {
    let response = cluster.call(token, Method::POST, "/networks", Some(body)).await;
    assert_eq!(response.status, 200, "{}", response.text);
    assert_eq!(response.body["state"], "initial");
    cluster.settle_networks().await;
    response.body["uuid"].as_str().unwrap().to_owned()
}

pub(crate) async fn get(cluster: &Cluster, token: &str, path: &str) -> ApiResponse {
    cluster.call(token, Method::GET, path, None).await
}

pub(crate) async fn post(cluster: &Cluster, token: &str, path: &str, body: Value) -> ApiResponse {
    cluster.call(token, Method::POST, path, Some(body)).await
}

pub(crate) async fn delete(cluster: &Cluster, token: &str, path: &str) -> ApiResponse {
    cluster.call(token, Method::DELETE, path, None).await
}

pub(crate) fn object(id: &str) -> ObjectRef {
    ObjectRef::new(ObjectType::Network, id)
}

pub(crate) fn id(text: &str) -> NetworkId {
    text.parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn creates_shows_and_deletes_network() {
    let (cluster, token) = cluster(&[]).await;
    let id = create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let fetched = get(&cluster, &token, "/networks/blue").await.body;
    assert_eq!(fetched["uuid"], id);
    assert_eq!(fetched["state"], "created");
    assert_eq!(fetched["vxid"], fetched["vxlan_id"]);
    assert!((1..=0xff_ffff).contains(&fetched["vxid"].as_i64().unwrap()));
    assert_eq!((&fetched["provide_dhcp"], &fetched["provide_dns"]), (&json!(true), &json!(false)));
    assert!(fetched["floating_gateway"].as_str().unwrap().starts_with("192.168.20."));
    let plan = cluster.node.network_plans().pop().unwrap();
    assert_eq!((plan.id.to_string(), plan.mtu), (id.clone(), 1450));
    assert!(plan.router.is_some() && cluster.other.network_plans().is_empty());

    let response = delete(&cluster, &token, "/networks/networks/blue").await;
    assert_eq!((response.status.as_u16(), &response.body["op_type"]), (202, &json!("net_op")));
    assert_eq!(
        delete(&cluster, &token, "/networks/blue").await.body,
        response.body,
        "the deletion in progress"
    );
    cluster.settle().await;
    let path = format!("/clusteroperations/net_op/{}", response.body["op_uuid"].as_str().unwrap());
    assert_eq!(get(&cluster, &token, &path).await.body["state"], "complete");
    assert_eq!(get(&cluster, &token, &format!("/networks/{id}")).await.body["state"], "deleted");
    assert_eq!(get(&cluster, &token, "/networks/blue").await.status, 404);
    assert_eq!(
        delete(&cluster, &token, &format!("/networks/{id}")).await.body["error"],
        "network is deleted"
    );
    assert!(cluster.node.network_plans().is_empty());
    assert_eq!(get(&cluster, &token, "/networks").await.body, json!([]));
    let all = cluster.call(&token, Method::GET, "/networks", Some(json!({"all": true}))).await.body;
    assert_eq!(all.as_array().unwrap().len(), 1);
    let messages = cluster.messages(&object(&id)).await;
    for message in ["creation request from REST API", "state is now created", "state is now deleted"] {
        assert!(messages.iter().any(|m| m == message), "{messages:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn applies_network_options() {
    let (cluster, token) =
        cluster(&[("MAX_HYPERVISOR_MTU", "1400"), ("NETWORK_CHECK_SENDERS", "false")]).await;
    cluster.allow_undocumented_requests("released clients send booleans in other forms");
    let body = json!({"name": "n", "netblock": "10.0.0.0/24", "provide_dhcp": false, "provide_nat": "no", "provide_dns": 1});
    create_network(&cluster, &token, body).await;
    let fetched = get(&cluster, &token, "/networks/n").await.body;
    assert_eq!(fetched["floating_gateway"], Value::Null);
    let plan = cluster.node.network_plans().pop().unwrap();
    let router = plan.router.unwrap();
    assert_eq!((router.dhcp, router.nat, router.dns), (false, false, true));
    assert_eq!((plan.mtu, plan.check_senders), (1350, false));
    assert_eq!(router.domain, "ci.shakenfist");
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_invalid_input_without_side_effects() {
    let (cluster, token) = cluster(&[]).await;
    let long = "x".repeat(256);
    for (body, expected) in [
        (json!({"netblock": "10.0.0.0/24"}), "name"),
        (json!({"name": "n"}), "netblock"),
        (json!({"name": "n", "netblock": "10.0.0.1/24"}), "host bits set"),
        (json!({"name": "n", "netblock": "10.0.0.0/30"}), "network is below minimum size of /29"),
        (json!({"name": "n", "netblock": "10.0.0.7"}), "network is below minimum size of /29"),
        (json!({"name": "n", "netblock": "0.0.0.0/0"}), "netblock"),
        (json!({"name": "n", "netblock": "2001:db8::/64"}), "netblock"),
        (json!({"name": "n", "netblock": "banana"}), "netblock"),
        (json!({"name": "n", "netblock": "10.0.0.0/24\n"}), "netblock"),
        (json!({"name": "n", "netblock": 7}), "netblock: Not a valid string."),
        (
            json!({"name": "n", "netblock": "192.168.0.0/16"}),
            "netblock: 192.168.0.0/16 overlaps the floating network",
        ),
        (json!({"name": "n", "netblock": "192.168.20.128/29"}), "overlaps"),
        (json!({"name": "n", "netblock": "127.0.0.0/8"}), "netblock"),
        (json!({"name": "n", "netblock": "224.0.0.0/24"}), "netblock"),
        (json!({"name": "", "netblock": "10.0.0.0/24"}), "name"),
        (json!({"name": "..", "netblock": "10.0.0.0/24"}), "name"),
        (json!({"name": "a/b", "netblock": "10.0.0.0/24"}), "name"),
        (json!({"name": "a\u{7}b", "netblock": "10.0.0.0/24"}), "name"),
        (json!({"name": " n", "netblock": "10.0.0.0/24"}), "name"),
        (json!({"name": long, "netblock": "10.0.0.0/24"}), "name"),
        (json!({"name": "networks", "netblock": "10.0.0.0/24"}), "name"),
        (json!({"name": "floating", "netblock": "10.0.0.0/24"}), "name"),
        (json!({"name": "9d1c3a52-5b3a-4a39-8c07-0a8d7d1b2c11", "netblock": "10.0.0.0/24"}), "name"),
        (
            json!({"name": "n", "netblock": "10.0.0.0/24", "provide_nat": "maybe"}),
            "provide_nat: Not a valid boolean.",
        ),
        (json!({"name": "n", "netblock": "10.0.0.0/24", "colour": 1}), "colour: not declared"),
    ] {
        let response = post(&cluster, &token, "/networks", body.clone()).await;
        let error = response.body["error"].as_str().unwrap_or_default().to_owned();
        assert!(response.status == 400 && error.contains(expected), "{body}: {} {error}", response.status);
    }
    let foreign = json!({"name": "n", "netblock": "10.0.0.0/24", "namespace": "system"});
    let response = post(&cluster, &token, "/networks", foreign).await;
    assert_eq!(response.status, 401);
    assert_eq!(response.body["error"], "only admins can create resources in a different namespace");
    let system = cluster.token("system").await;
    let absent = json!({"name": "n", "netblock": "10.0.0.0/24", "namespace": "absent"});
    assert_eq!(post(&cluster, &system, "/networks", absent).await.body["error"], "namespace not found");
    let rows = cluster.app.store.query("SELECT COUNT(*) FROM addresses", &[]).await.unwrap();
    assert_eq!(rows[0].scalar::<i64>().unwrap(), 3, "only addresses of the floating network");
    assert_eq!(get(&cluster, &system, "/networks").await.body, json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn accepts_unusual_names() {
    let (cluster, token) = cluster(&[]).await;
    for name in ["Grüße an alle", "a:b;c", "日本", "--", "100%", "x?y=z#"] {
        create_network(&cluster, &token, json!({"name": name, "netblock": "10.0.0.0/24"})).await;
        let path = format!("/networks/{}", percent_encode(name));
        assert_eq!(get(&cluster, &token, &path).await.body["name"], name);
    }
}

fn percent_encode(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn trust_does_not_change_what_names_refer_to() {
    let (cluster, token) = cluster(&[]).await;
    cluster.create_namespace("other").await;
    let (other, system) = (cluster.token("other").await, cluster.token("system").await);
    let body = || json!({"name": "n", "netblock": "10.0.0.0/24"});
    let mine = create_network(&cluster, &token, body()).await;
    assert_eq!(get(&cluster, &other, "/networks/n").await.body["error"], "network not found");
    assert_eq!(get(&cluster, &other, &format!("/networks/{mine}")).await.status, 404);
    assert_eq!(get(&cluster, &system, "/networks/n").await.body["uuid"], mine);
    let trust = json!({"external_namespace": "other"});
    post(&cluster, &token, "/auth/namespaces/ci/trust", trust).await;
    assert_eq!(get(&cluster, &other, "/networks/n").await.body["error"], "network not found");
    assert_eq!(get(&cluster, &other, "/networks/n?namespace=ci").await.body["uuid"], mine);
    assert_eq!(get(&cluster, &other, &format!("/networks/{mine}")).await.status, 200);
    assert_eq!(get(&cluster, &other, "/networks").await.body.as_array().unwrap().len(), 1);
    assert_eq!(delete(&cluster, &other, "/networks/n?namespace=ci").await.status, 404);
    let in_ci = json!({"name": "gift", "netblock": "10.0.0.0/24", "namespace": "ci"});
    assert_eq!(
        post(&cluster, &other, "/networks", in_ci).await.body["namespace"],
        "ci",
        "trust allows creation"
    );
    cluster.settle_networks().await;
    assert_eq!(
        delete(&cluster, &other, "/networks/gift?namespace=ci").await.status,
        404,
        "trust does not allow deletion"
    );
    let theirs = create_network(&cluster, &other, body()).await;
    assert_eq!(get(&cluster, &other, "/networks/n").await.body["uuid"], theirs);
    let response = get(&cluster, &system, "/networks/n").await;
    assert_eq!(response.status, 400);
    let error = response.body["error"].as_str().unwrap();
    assert!(error.starts_with("multiple networks have the name \"n\", in namespaces \"ci\", "), "{error}");
    let administrative = create_network(&cluster, &system, body()).await;
    assert_eq!(
        get(&cluster, &system, "/networks/n").await.body["uuid"],
        administrative,
        "its own comes first"
    );
    let within = |namespace: &str| Some(json!({ "namespace": namespace }));
    let response = cluster.call(&system, Method::GET, "/networks/n", within("ci")).await;
    assert_eq!(response.body["uuid"], mine);
    let path = format!("/networks/{mine}");
    assert_eq!(cluster.call(&system, Method::GET, &path, within("other")).await.status, 404);
    assert_eq!(cluster.call(&token, Method::GET, &path, within("other")).await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_nodes_with_interfaces_join_network() {
    let (cluster, token) = cluster(&[]).await;
    let network = create_network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/24"})).await;
    let row = cluster.create_interface(&network, "ci", "web", 2).await;
    let mac = row.mac;
    let plan =
        wait_for("the second node to join the network", async || cluster.other.network_plans().pop()).await;
    assert!(plan.router.is_none());
    assert_eq!(plan.peers, [cluster.app.nodes[0].identity().ip]);
    assert_eq!((plan.ports.len(), plan.ports[0].mac, plan.ports[0].address), (1, mac, row.ipv4));
    let router = wait_for("the router to have the lease", async || {
        let router = cluster.node.network_plans().pop()?.router?;
        (router.leases.len() == 1).then_some(router)
    })
    .await;
    assert_eq!((router.leases[0].mac, router.leases[0].name.as_str()), (mac, "web"));
    let list = get(&cluster, &token, "/networks/n/interfaces").await.body;
    assert_eq!(list[0]["uuid"], row.id.to_string());
    assert_eq!(list[0]["macaddr"], mac.to_string());
    assert_eq!(list[0]["version"], 3);
    cluster.delete_interface(row.id).await;
    wait_for("the second node to remove the network", async || {
        cluster.other.network_plans().is_empty().then_some(())
    })
    .await;
    assert_eq!(get(&cluster, &token, &format!("/interfaces/{}", row.id)).await.body["state"], "deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn adds_and_removes_dns_entries() {
    let (cluster, token) = cluster(&[]).await;
    create_network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/24", "provide_dns": true}))
        .await;
    let dns = async |method: Method, body: Value| {
        let response = cluster.call(&token, method, "/networks/n/dns", Some(body)).await;
        (response.status.as_u16(), response.body["error"].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(dns(Method::POST, json!({"name": "Web", "value": "10.0.0.9"})).await.0, 200);
    assert_eq!(dns(Method::POST, json!({"name": "web", "value": "10.0.0.10"})).await.0, 200);
    let names = || cluster.node.network_plans().pop().unwrap().router.unwrap().names;
    assert_eq!(names(), [("web".to_owned(), "10.0.0.10".parse().unwrap())]);
    for (body, status, expected) in [
        (json!({"name": "a\nserver=6.6.6.6", "value": "10.0.0.9"}), 406, "invalid DNS name"),
        (json!({"name": "a b", "value": "10.0.0.9"}), 406, "invalid DNS name"),
        (json!({"name": "web", "value": "banana"}), 400, "value"),
        (json!({"name": "web", "value": "::1"}), 400, "value"),
        (json!({"name": "web"}), 400, "value"),
        (json!({"value": "10.0.0.9"}), 400, "name"),
    ] {
        let (actual, error) = dns(Method::POST, body.clone()).await;
        assert!(actual == status && error.contains(expected), "{body}: {actual} {error}");
    }
    assert_eq!(dns(Method::DELETE, json!({"name": "unknown"})).await.0, 200);
    assert_eq!(dns(Method::DELETE, json!({"name": "web"})).await.0, 200);
    assert!(names().is_empty());
    create_network(&cluster, &token, json!({"name": "silent", "netblock": "10.0.0.0/24"})).await;
    let response =
        post(&cluster, &token, "/networks/silent/dns", json!({"name": "a", "value": "10.0.0.9"})).await;
    assert_eq!(
        (response.status.as_u16(), &response.body["error"]),
        (406, &json!("network does not provide DNS"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn validates_ping_and_returns_output_lines() {
    let (cluster, token) = cluster(&[]).await;
    create_network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/24"})).await;
    let response = get(&cluster, &token, "/networks/n/ping/10.0.0.1").await;
    assert!(response.body["stdout"].is_array() && response.body["stderr"].is_array(), "{}", response.text);
    let error = async |path: &str| get(&cluster, &token, path).await.body["error"].clone();
    assert_eq!(error("/networks/n/ping/banana").await, "invalid address");
    assert_eq!(error("/networks/n/ping/10.1.0.1").await, "ping request for address outside network block");
    let body = json!({"name": "new", "netblock": "10.0.0.0/24"});
    post(&cluster, &token, "/networks", body).await;
    assert_eq!(get(&cluster, &token, "/networks/new/ping/10.0.0.1").await.status, 406);
}

#[tokio::test(flavor = "multi_thread")]
async fn network_deletion_waits_for_interfaces() {
    let (cluster, token) = cluster(&[]).await;
    let network = create_network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/24"})).await;
    let row = cluster.create_interface(&network, "ci", "web", 2).await;
    let response = delete(&cluster, &token, "/networks/n").await;
    assert_eq!(response.status, 202);
    cluster.worker.run_once().await.unwrap();
    assert_eq!(get(&cluster, &token, "/networks/n").await.body["state"], "delete-wait");
    assert_eq!(cluster.other.network_plans().len(), 1, "the network is kept while it has interfaces");
    let list = get(&cluster, &token, &format!("/networks/{network}/clusteroperations?all=false")).await.body;
    assert_eq!((list.as_array().unwrap().len(), &list[0]["attempts"]), (1, &json!(0)));
    cluster.delete_interface(row.id).await;
    cluster.settle().await;
    assert_eq!(get(&cluster, &token, &format!("/networks/{network}")).await.body["state"], "deleted");
    assert!(cluster.other.network_plans().is_empty() && cluster.node.network_plans().is_empty());
    let operations = format!("/networks/{network}/clusteroperations");
    let all = get(&cluster, &token, &operations).await.body;
    assert_eq!(all.as_array().unwrap().len(), 2, "finished operations are listed: {all}");
    let unfinished = cluster.call(&token, Method::GET, &operations, Some(json!({"all": false}))).await.body;
    assert_eq!(unfinished, json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn deletes_all_networks_of_namespace() {
    let (cluster, token) = cluster(&[]).await;
    assert_eq!(delete(&cluster, &token, "/networks").await.body, json!([]));
    let mut ids = Vec::new();
    for name in ["a", "b", "c"] {
        ids.push(create_network(&cluster, &token, json!({"name": name, "netblock": "10.0.0.0/24"})).await);
    }
    let row = cluster.create_interface(&ids[0], "ci", "web", 1).await;
    let delete_all =
        async |token: &str, body: Value| cluster.call(token, Method::DELETE, "/networks", Some(body)).await;
    let response = delete_all(&token, json!({"confirm": false})).await;
    assert_eq!(
        (response.status.as_u16(), &response.body["error"]),
        (400, &json!("parameter confirm is not set true"))
    );
    let response = delete_all(&token, json!({"confirm": true, "namespace": "system"})).await;
    assert_eq!(
        (response.status.as_u16(), &response.body["error"]),
        (401, &json!("you cannot delete other namespaces"))
    );
    let system = cluster.token("system").await;
    let response = delete_all(&system, json!({"confirm": true, "namespace": "system"})).await;
    assert_eq!(
        (response.status.as_u16(), response.body),
        (202, json!([])),
        "only the namespace system is affected"
    );
    let response = delete_all(&token, json!({"confirm": true, "clean_wait": false})).await;
    let deletions = response.body.as_array().unwrap();
    assert_eq!((response.status.as_u16(), deletions.len()), (202, 3));
    for deletion in deletions {
        let path = format!("/clusteroperations/net_op/{}", deletion["op_uuid"].as_str().unwrap());
        assert_eq!(get(&cluster, &token, &path).await.body["target_uuid"], deletion["network_uuid"]);
        let waits = deletion["network_uuid"] == json!(ids[0]);
        let reason = waits.then_some("the network is deleted once its last interface is");
        assert_eq!(deletion["reason"].as_str(), reason, "{deletion}");
    }
    let again = delete_all(&system, json!({"confirm": true, "namespace": "ci", "clean_wait": true})).await;
    assert_eq!((again.status.as_u16(), again.body), (202, response.body));
    cluster.delete_interface(row.id).await;
    cluster.settle().await;
    assert_eq!(get(&cluster, &token, "/networks").await.body, json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn floating_network_has_no_namespace_and_cannot_be_deleted() {
    let (cluster, token) = cluster(&[]).await;
    let system = cluster.token("system").await;
    let path = format!("/networks/{FLOATING_NETWORK_ID}");
    assert_eq!(get(&cluster, &token, &path).await.status, 404);
    let fetched = get(&cluster, &system, &path).await.body;
    assert_eq!((&fetched["namespace"], &fetched["vxid"]), (&Value::Null, &json!(0)));
    let response = delete(&cluster, &system, &path).await;
    assert_eq!(
        (response.status.as_u16(), &response.body["error"]),
        (403, &json!("you cannot delete the floating network"))
    );
    for (method, suffix) in [(Method::POST, "route"), (Method::GET, "ping/192.168.20.1")] {
        assert_eq!(
            cluster.call(&system, method, &format!("{path}/{suffix}"), None).await.status,
            403,
            "{suffix}"
        );
    }
    assert_eq!(get(&cluster, &system, &format!("{path}/addresses")).await.body.as_array().unwrap().len(), 3);
    let reserve = format!("{path}/addresses/192.168.20.9");
    assert_eq!(cluster.call(&system, Method::POST, &reserve, None).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn node_failure_puts_network_into_error_with_reason() {
    let (cluster, token) = cluster(&[("CLUSTER_OP_LEASE", "1"), ("CLUSTER_OP_MAX_ATTEMPTS", "2")]).await;
    cluster.node.fail_networks(Some("the cable is out"));
    let response = post(&cluster, &token, "/networks", json!({"name": "n", "netblock": "10.0.0.0/24"})).await;
    let id = response.body["uuid"].as_str().unwrap().to_owned();
    cluster.settle().await;
    let fetched = get(&cluster, &token, "/networks/n").await.body;
    assert_eq!(fetched["state"], "error");
    let error = fetched["error_message"].as_str().unwrap();
    assert!(error.contains("sim-1") && error.contains("the cable is out"), "{error}");
    let response = cluster.call(&token, Method::POST, "/networks/n/route", None).await;
    assert_eq!(response.status, 406);
    cluster.node.fail_networks(None);
    delete(&cluster, &token, "/networks/n").await;
    cluster.settle().await;
    assert_eq!(get(&cluster, &token, &format!("/networks/{id}")).await.body["state"], "deleted");
    let messages = cluster.messages(&object(&id)).await;
    assert!(messages.iter().any(|m| m == "failed to apply network to a node"), "{messages:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_change_the_network_node_cannot_apply_and_retries_it() {
    let (cluster, token) = cluster(&[]).await;
    create_network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/24"})).await;
    cluster.node.fail_networks(Some("the cable is out"));
    let response = cluster.call(&token, Method::POST, "/networks/n/route", None).await;
    assert_eq!(response.status, 503);
    assert!(response.body["error"].as_str().unwrap().contains("the cable is out"), "{}", response.text);
    cluster.node.fail_networks(None);
    wait_for("the node to apply the change", async || {
        (cluster.node.network_plans().pop()?.routed.len() == 1).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_deletion_of_namespace_with_networks() {
    let (cluster, token) = cluster(&[]).await;
    let system = cluster.token("system").await;
    create_network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/24"})).await;
    let response = delete(&cluster, &system, "/auth/namespaces/ci").await;
    assert_eq!(response.status, 400);
    assert_eq!(response.body["error"], "you cannot delete a namespace with networks");
    delete(&cluster, &token, "/networks/n").await;
    cluster.settle().await;
    assert_eq!(delete(&cluster, &system, "/auth/namespaces/ci").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn records_network_usage_events() {
    let (cluster, token) = cluster(&[]).await;
    let id = create_network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/24"})).await;
    reconcile::network_usage::run(&cluster.app).await.unwrap();
    let events = cluster.events(&object(&id)).await;
    let usage = events.iter().find(|event| event.message == "usage").expect("a usage event");
    assert_eq!(usage.kind, "usage");
    for (direction, fields) in [
        ("rx", ["bytes", "dropped", "errors", "multicast", "over_errors", "packets"]),
        ("tx", ["bytes", "carrier_errors", "collisions", "dropped", "errors", "packets"]),
    ] {
        let actual: Vec<&String> = usage.extra[direction].as_object().unwrap().keys().collect();
        assert_eq!(actual, fields);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cleans_deleted_networks_and_their_dependents() {
    let (cluster, token) = cluster(&[("CLEANER_DELAY", "0")]).await;
    let network = create_network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/22"})).await;
    let row = cluster.create_interface(&network, "ci", "web", 1).await;
    post(&cluster, &token, &format!("/networks/{network}/metadata"), json!({"key": "a", "value": "b"})).await;
    cluster.delete_interface(row.id).await;
    delete(&cluster, &token, "/networks/n").await;
    cluster.settle().await;
    cluster.messages(&object(&network)).await;
    for _ in 0..2 {
        reconcile::cleaner::run(&cluster.app).await.unwrap();
        cluster.settle().await;
    }
    assert_eq!(get(&cluster, &token, &format!("/networks/{network}")).await.status, 404);
    for table in ["addresses", "address_blocks", "dns_entries", "node_networks", "interfaces"] {
        let sql = format!("SELECT COUNT(*) FROM {table} WHERE network_uuid <> '{FLOATING_NETWORK_ID}'");
        let rows = cluster.app.store.query(&sql, &[]).await.unwrap();
        assert_eq!(rows[0].scalar::<i64>().unwrap(), 0, "{table}");
    }
    assert!(interfaces::get(&*cluster.app.store, row.id).await.unwrap().is_none());
    let rows = cluster.app.store.query("SELECT COUNT(*) FROM metadata", &[]).await.unwrap();
    assert_eq!(rows[0].scalar::<i64>().unwrap(), 0);
}
