//! Hot plug of interfaces.

use axum::http::Method;
use muster_test_cluster::{ApiResponse, Cluster};
use serde_json::{Value, json};

use super::{create, id, object, path, post_action, show, status_and_error, text, try_create};
use crate::networks::{cluster, create_network, delete, get};

async fn plug(cluster: &Cluster, token: &str, record: &Value, body: Value) -> ApiResponse {
    cluster.call(token, Method::POST, &path(record, "/interfaces"), Some(body)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn hot_plugs_interface_in_both_request_forms_while_on_or_off() {
    let (cluster, token) = cluster(&[]).await;
    let network_id =
        create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let record = create(&cluster, &token, "www", &json!({"network": [{"network_uuid": "blue"}]})).await;
    let response = plug(
        &cluster,
        &token,
        &record,
        json!({"network_uuid": "blue", "address": "10.0.0.50", "float": true}),
    )
    .await;
    assert_eq!(response.status, 200, "{}", response.text);
    let interface = response.body;
    assert_eq!(
        (&interface["order"], &interface["ipv4"], &interface["state"]),
        (&json!(1), &json!("10.0.0.50"), &json!("initial"))
    );
    assert_eq!(
        (&interface["instance_uuid"], &interface["network_uuid"]),
        (&record["uuid"], &json!(network_id))
    );
    assert!(interface["floating"].is_string());
    let wrapped = json!({"network": {"network_uuid": network_id, "address": "none", "model": "e1000", "macaddress": "02:00:00:AA:bb:cc"}});
    let second = plug(&cluster, &token, &record, wrapped).await.body;
    assert_eq!(
        (&second["order"], &second["ipv4"], &second["model"]),
        (&json!(2), &Value::Null, &json!("e1000"))
    );
    assert_eq!(second["macaddr"].as_str().unwrap().to_lowercase(), "02:00:00:aa:bb:cc");
    cluster.settle().await;
    let list = get(&cluster, &token, &path(&record, "/interfaces")).await.body;
    assert_eq!(
        list.as_array().unwrap().iter().map(|item| item["order"].as_i64().unwrap()).collect::<Vec<_>>(),
        [0, 1, 2]
    );
    assert!(list.as_array().unwrap().iter().all(|item| item["state"] == "created"), "{list}");
    let node = cluster.node_named(text(&record, "node"));
    let nics = node.vm_plan(id(&record)).unwrap().nics;
    let macs: Vec<String> = nics.iter().map(|nic| nic.mac.to_string()).collect();
    assert_eq!(json!(macs), json!([list[0]["macaddr"], list[1]["macaddr"], list[2]["macaddr"]]));
    let messages = cluster.messages(&object(&record)).await;
    assert_eq!(messages.iter().filter(|message| *message == "interface was plugged in").count(), 2);
    assert!(messages.contains(&"hot plug request from REST API".to_owned()));
    let network_interfaces = get(&cluster, &token, "/networks/blue/interfaces").await.body;
    assert_eq!(network_interfaces.as_array().unwrap().len(), 3);

    post_action(&cluster, &token, &record, "poweroff").await;
    assert_eq!(plug(&cluster, &token, &record, json!({"network_uuid": network_id})).await.status, 200);
    cluster.settle().await;
    post_action(&cluster, &token, &record, "poweron").await;
    assert_eq!(node.vm_plan(id(&record)).unwrap().nics.len(), 4);
    let fetched = show(&cluster, &token, &record).await;
    assert_eq!(fetched["interfaces"][3]["state"], "created");
    // All interfaces are deleted with the instance.
    delete(&cluster, &token, &path(&record, "")).await;
    cluster.settle().await;
    assert_eq!(cluster.count_rows("interfaces", "state <> 'deleted'").await, 0);
    assert_eq!(cluster.count_rows("addresses", "kind IN ('instance', 'floating')").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn interface_plugged_in_before_first_start_is_attached_once() {
    let (cluster, token) = cluster(&[]).await;
    create_network(&cluster, &token, json!({"name": "blue", "netblock": "10.0.0.0/24"})).await;
    let record = try_create(&cluster, &token, "www", &json!({})).await.body;
    assert_eq!(plug(&cluster, &token, &record, json!({"network_uuid": "blue"})).await.body["order"], 0);
    cluster.settle().await;
    let fetched = show(&cluster, &token, &record).await;
    assert_eq!((text(&fetched, "state"), text(&fetched["interfaces"][0], "state")), ("created", "created"));
    let node = cluster.node_named(text(&fetched, "node"));
    assert_eq!(node.vm_plan(id(&fetched)).unwrap().nics.len(), 1, "plugged in exactly once");
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_invalid_hot_plug_before_lookup_without_side_effects() {
    let (cluster, token) = cluster(&[]).await;
    let blue = create_network(
        &cluster,
        &token,
        json!({"name": "blue", "netblock": "10.0.0.0/29", "provide_nat": false}),
    )
    .await;
    let record = create(
        &cluster,
        &token,
        "www",
        &json!({"network": [{"network_uuid": "blue", "address": "10.0.0.2"}]}),
    )
    .await;
    let absent = json!({"uuid": "7f1b7f9e-8d4e-4a5e-9a55-0c5d1d7f1c11"});
    for (body, error) in [
        (json!({}), "network specification is missing network_uuid"),
        (json!({"network": {}}), "network specification is missing network_uuid"),
        (json!({"network_uuid": null}), "network specification is missing network_uuid"),
        (json!({"network": "blue"}), "network specification should contain JSON objects"),
        (json!({"network_uuid": 3}), "network.network_uuid: Not a valid string."),
        (
            json!({"network_uuid": "blue", "macaddress": "x"}),
            "network.macaddress: String does not match expected pattern.",
        ),
        (
            json!({"network_uuid": "blue", "model": "a b"}),
            "network.model: String does not match expected pattern.",
        ),
        (
            json!({"network": {"network_uuid": "blue", "float": "maybe"}}),
            "network.float: Not a valid boolean.",
        ),
        (json!({"network": {"network_uuid": "blue", "vlan": 1}}), "network.vlan: Unknown field."),
        (json!({"network_uuid": "blue", "vlan": 1}), "vlan: not declared by this endpoint"),
    ] {
        for target in [&record, &absent] {
            assert_eq!(
                status_and_error(&plug(&cluster, &token, target, body.clone()).await),
                (400, error),
                "{body}"
            );
        }
    }
    let outside = "network specification requests an address outside the range of the network";
    for (body, status, error) in [
        (json!({"network_uuid": "absent"}), 404, "network absent not found"),
        (json!({"network_uuid": "blue", "address": "10.9.9.9"}), 400, outside),
        (json!({"network_uuid": "blue", "address": "10.0.0.2"}), 409, "address 10.0.0.2 in use"),
        (json!({"network_uuid": "blue", "address": "10.0.0.1"}), 409, "address 10.0.0.1 in use"),
    ] {
        assert_eq!(
            status_and_error(&plug(&cluster, &token, &record, body.clone()).await),
            (status, error),
            "{body}"
        );
    }
    assert_eq!(
        status_and_error(&plug(&cluster, &token, &absent, json!({"network_uuid": "blue"})).await),
        (404, "instance not found")
    );
    for _ in 0..4 {
        assert_eq!(plug(&cluster, &token, &record, json!({"network_uuid": blue})).await.status, 200);
    }
    assert_eq!(
        status_and_error(&plug(&cluster, &token, &record, json!({"network_uuid": blue})).await),
        (507, "No free addresses on network")
    );
    assert_eq!(cluster.count_rows("interfaces", "1 = 1").await, 5);
    cluster.settle().await;
    assert_eq!(show(&cluster, &token, &record).await["state"], "created", "the instance is unaffected");
    delete(&cluster, &token, &path(&record, "")).await;
    let refused = plug(&cluster, &token, &record, json!({"network_uuid": "blue"})).await;
    assert_eq!(status_and_error(&refused), (406, "instance in invalid state for hot plug"));
}
