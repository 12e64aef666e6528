//! Why instances, networks and operations are in their state.

use axum::http::Method;
use muster_test_cluster::{Cluster, wait_for};
use muster_types::event::{Event, EventType};
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use super::{create, create_network, path, post_action, text, try_create};
use crate::networks::{cluster, get};

/// Waits until an explanation, whose events are written with a delay, is as expected.
async fn wait_for_explanation(
    cluster: &Cluster,
    token: &str,
    path: &str,
    is_expected: impl Fn(&Value) -> bool,
) -> Value {
    wait_for(&format!("the explanation of {path}"), async || {
        let response = get(cluster, token, path).await;
        assert_eq!(response.status, 200, "{}", response.text);
        Some(response.body).filter(&is_expected)
    })
    .await
}

fn commands(explanation: &Value) -> Vec<&str> {
    let steps = explanation["next"].as_array().unwrap();
    steps.iter().filter_map(|step| step["command"].as_str()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn explains_a_running_and_a_stopped_instance() {
    let (cluster, token) = cluster(&[]).await;
    let web = create(&cluster, &token, "web", &json!({})).await;
    let explain = path(&web, "/explain");
    let is_placed = |explanation: &Value| explanation["placement"] != json!([]);
    let explanation = wait_for_explanation(&cluster, &token, &explain, is_placed).await;
    let node = text(&web, "node");
    assert_eq!(
        (&explanation["object_type"], &explanation["name"], &explanation["state"], &explanation["waits_for"]),
        (&json!("instance"), &json!("web"), &json!("on"), &json!([]))
    );
    assert_eq!(explanation["since"], web["power_state_since"]);
    assert!(text(&explanation, "why").contains(&format!("it runs on {node}")), "{explanation}");
    let uuid = text(&web, "uuid");
    assert_eq!(commands(&explanation), [format!("muster console {uuid}")]);
    let chosen: Vec<&Value> =
        explanation["placement"].as_array().unwrap().iter().filter(|node| node["chosen"] == true).collect();
    assert!(chosen.len() == 1 && chosen[0]["node"] == node, "{explanation}");

    assert_eq!(post_action(&cluster, &token, &web, "poweroff").await.status, 200);
    let is_off = |explanation: &Value| explanation["state"] == "off";
    let explanation = wait_for_explanation(&cluster, &token, &explain, is_off).await;
    assert_eq!(commands(&explanation), [format!("muster instance poweron {uuid}")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn periodic_events_do_not_displace_the_reason() {
    let (cluster, token) = cluster(&[]).await;
    let web = create(&cluster, &token, "web", &json!({})).await;
    let explain = path(&web, "/explain");
    let is_placed = |explanation: &Value| explanation["placement"] != json!([]);
    let before = wait_for_explanation(&cluster, &token, &explain, is_placed).await;
    let object = ObjectRef::new(ObjectType::Instance, text(&web, "uuid"));
    // More than an explanation reads.
    let usage: Vec<Event> = (0..300).map(|_| Event::new(EventType::Usage, object.clone(), "usage")).collect();
    muster_store::events::insert(&cluster.app.store, &usage).await.unwrap();
    let after = get(&cluster, &token, &explain).await.body;
    assert_eq!((&after["why"], &after["placement"]), (&before["why"], &before["placement"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn explains_why_no_node_was_suitable() {
    let (cluster, token) = cluster(&[]).await;
    let refused = try_create(&cluster, &token, "large", &json!({"memory": 60_000_000})).await;
    assert_eq!(refused.status, 507, "{}", refused.text);
    let all = cluster.call(&token, Method::GET, "/instances", Some(json!({"all": true}))).await.body;
    let large = all.as_array().unwrap().iter().find(|record| record["name"] == "large").unwrap();
    let is_refused = |explanation: &Value| explanation["next"].as_array().unwrap().len() == 2;
    let explanation = wait_for_explanation(&cluster, &token, &path(large, "/explain"), is_refused).await;
    assert!(text(&explanation, "why").starts_with("it failed: "), "{explanation}");
    assert_eq!(explanation["next"][0]["text"], "request less, or let an administrator add a larger node");
    let nodes = explanation["placement"].as_array().unwrap();
    assert!(!nodes.is_empty(), "{explanation}");
    for node in nodes {
        assert_eq!(
            (&node["chosen"], &node["stage"]),
            (&json!(false), &json!("sufficient_idle_memory")),
            "{node}"
        );
        assert!(!text(node, "reason").is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn explains_what_a_new_instance_waits_for() {
    let (cluster, token) = cluster(&[]).await;
    create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let record =
        try_create(&cluster, &token, "web", &json!({"network": [{"network_uuid": "blue"}]})).await.body;
    let explanation = get(&cluster, &token, &path(&record, "/explain")).await.body;
    assert_eq!(explanation["state"], "initial");
    let awaited = &explanation["waits_for"][0];
    assert_eq!((&awaited["object_type"], &awaited["state"]), (&json!("clusteroperation"), &json!("queued")));
    let operations = get(&cluster, &token, &path(&record, "/clusteroperations")).await.body;
    let operation = format!(
        "/clusteroperations/{}/{}/explain",
        text(&operations[0], "operation_type"),
        text(awaited, "uuid")
    );
    let explained = get(&cluster, &token, &operation).await.body;
    assert_eq!((&explained["state"], &explained["name"]), (&json!("queued"), &json!(null)));
    assert!(text(&explained, "why").contains("it waits for"), "{explained}");
    cluster.settle().await;
    assert_eq!(get(&cluster, &token, &operation).await.body["state"], "complete");
}

#[tokio::test(flavor = "multi_thread")]
async fn explains_networks_to_their_namespace_only() {
    let (cluster, token) = cluster(&[]).await;
    cluster.create_namespace("other").await;
    let other = cluster.token("other").await;
    create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let is_dated = |explanation: &Value| explanation["since"].is_number();
    let explanation = wait_for_explanation(&cluster, &token, "/networks/blue/explain", is_dated).await;
    assert_eq!(
        (&explanation["state"], &explanation["why"], &explanation["waits_for"]),
        (&json!("created"), &json!("it is set up on every node that needs it"), &json!([]))
    );
    let uuid = text(&explanation, "uuid").to_owned();
    for reference in ["blue", &uuid] {
        let response = get(&cluster, &other, &format!("/networks/{reference}/explain")).await;
        assert_eq!(response.status, 404, "{}", response.text);
    }
    let web = create(&cluster, &token, "web", &json!({})).await;
    assert_eq!(get(&cluster, &other, &path(&web, "/explain")).await.status, 404);
    // A trust lets the other namespace see the instance, but not its operations and placement.
    let trust = json!({"external_namespace": "other"});
    let granted = cluster.call(&token, Method::POST, "/auth/namespaces/ci/trust", Some(trust)).await;
    assert_eq!(granted.status, 200, "{}", granted.text);
    assert_eq!(get(&cluster, &other, &path(&web, "")).await.status, 200);
    assert_eq!(get(&cluster, &other, &path(&web, "/explain")).await.status, 404);
}
