//! Addresses of networks: reserved, given, floating, routed, resting.

use std::collections::BTreeSet;

use axum::http::Method;
use muster_control::objects::interface::{NewInterface, WantedAddress};
use muster_control::reconcile;
use muster_store::addresses;
use muster_types::ids::InstanceId;
use muster_types::network::FLOATING_NETWORK_ID;
use serde_json::{Value, json};

use crate::harness::wait_for;
use crate::networks::{cluster, delete, get, id, network, object, post};

#[tokio::test(flavor = "multi_thread")]
async fn addresses_are_reserved_and_released_with_the_right_answers() {
    let (cluster, token) = cluster(&[]).await;
    let id = network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/24"})).await;
    let path = |address: &str| format!("/networks/n/addresses/{address}");
    let comment = json!({"comment": "the printer"});
    let answer = post(&cluster, &token, &path("10.0.0.9"), comment.clone()).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    for (field, value) in [
        ("address", json!("10.0.0.9")),
        ("type", json!("manual")),
        ("reservation_type", json!("manual")),
        ("comment", json!("the printer")),
        ("user", json!(["network", id])),
        ("user_type", json!("network")),
        ("user_uuid", json!(id)),
        ("ipam_uuid", json!(id)),
    ] {
        assert_eq!(answer.body[field], value, "{field}");
    }
    let status = async |method: Method, address: &str, body: Option<Value>| {
        cluster.call(&token, method, &path(address), body).await.status.as_u16()
    };
    assert_eq!(status(Method::POST, "10.0.0.9", None).await, 409, "also one you hold");
    assert_eq!(status(Method::POST, "10.0.0.1", None).await, 409, "the gateway");
    assert_eq!(status(Method::POST, "10.0.1.1", None).await, 400, "outside");
    assert_eq!(status(Method::POST, "banana", None).await, 400);
    assert_eq!(status(Method::POST, "::1", None).await, 400);
    assert_eq!(status(Method::POST, "10.0.0.10", Some(json!({"comment": "x".repeat(256)}))).await, 400);
    assert_eq!(status(Method::POST, "10.0.0.10", Some(json!({"comment": 7}))).await, 400);
    assert_eq!(status(Method::POST, "10.0.0.10", Some(json!({"comment": "é".repeat(255)}))).await, 200);
    assert_eq!(status(Method::DELETE, "10.0.0.1", None).await, 403);
    assert_eq!(status(Method::DELETE, "10.0.0.77", None).await, 404);
    assert_eq!(status(Method::DELETE, "10.0.0.9", None).await, 200);
    assert_eq!(status(Method::DELETE, "10.0.0.9", None).await, 404);
    let list = get(&cluster, &token, "/networks/n/addresses").await.body;
    let kinds: Vec<&str> = list.as_array().unwrap().iter().map(|a| a["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["network", "gateway", "deletion-halo", "manual", "broadcast"]);
    assert_eq!((&list[2]["user"], &list[2]["user_uuid"]), (&json!([]), &Value::Null));
    assert_eq!(status(Method::POST, "10.0.0.9", Some(comment)).await, 200, "one that rests may be taken");
    let events = cluster.events(&object(&id)).await;
    let reserved = events.iter().find(|event| event.message == "address reserved").unwrap();
    assert_eq!(reserved.extra["comment"], "the printer");
    delete(&cluster, &token, "/networks/n").await;
    assert_eq!(status(Method::POST, "10.0.0.20", None).await, 406, "it is going");
    cluster.settle().await;
    let path = format!("/networks/{id}/addresses/10.0.0.20");
    assert_eq!(cluster.call(&token, Method::POST, &path, None).await.status, 406);
    assert_eq!(cluster.call(&token, Method::DELETE, &path, None).await.status, 406);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_is_reserved_before_the_network_is_made() {
    let (cluster, token) = cluster(&[]).await;
    let answer = post(&cluster, &token, "/networks", json!({"name": "n", "netblock": "10.0.0.0/29"})).await;
    assert_eq!(answer.body["state"], "initial");
    assert_eq!(cluster.call(&token, Method::POST, "/networks/n/addresses/10.0.0.3", None).await.status, 200);
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_network_fills_up_and_rested_addresses_come_back() {
    let (cluster, token) = cluster(&[("IP_DELETION_HALO_DURATION", "1")]).await;
    let network = network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/29"})).await;
    let mut given = BTreeSet::new();
    let mut last = None;
    for _ in 0..5 {
        let row = cluster.interface(&network, "ci", "host", 2).await;
        assert!(given.insert(row.ipv4.unwrap()), "given twice");
        last = Some(row);
    }
    let new = |address| NewInterface {
        network: id(&network),
        instance: InstanceId::new(),
        namespace: "ci".into(),
        hostname: "late".into(),
        node: None,
        mac: None,
        address,
        float: false,
        model: "virtio".into(),
        order: 0,
    };
    let refused = cluster.try_interface(&new(WantedAddress::Any)).await.unwrap_err();
    assert!(
        matches!(&refused, muster_types::Error::InsufficientCapacity(text) if text == "No free addresses on network")
    );
    // Without an address there is always room.
    assert_eq!(cluster.try_interface(&new(WantedAddress::None)).await.unwrap().ipv4, None);
    let gone = last.unwrap();
    cluster.delete_interface(gone.id).await;
    let again = wait_for("the address to have rested", async || {
        cluster.try_interface(&new(WantedAddress::Any)).await.ok()
    })
    .await;
    assert_eq!(again.ipv4, gone.ipv4);
    let taken = new(WantedAddress::Exactly(again.ipv4.unwrap()));
    assert!(matches!(cluster.try_interface(&taken).await, Err(muster_types::Error::Conflict(_))));
    let outside = new(WantedAddress::Exactly("10.9.9.9".parse().unwrap()));
    assert!(matches!(cluster.try_interface(&outside).await, Err(muster_types::Error::Invalid(_))));
    let double = NewInterface { mac: Some(again.mac), ..new(WantedAddress::None) };
    let refused = cluster.try_interface(&double).await.unwrap_err();
    assert!(refused.to_string().contains("macaddress"), "{refused}");
    let rested = reconcile::quarantine::run(&cluster.app).await.unwrap();
    assert_eq!(rested, 0, "the one that rested was taken");
}

#[tokio::test(flavor = "multi_thread")]
async fn interfaces_float_and_stop_floating() {
    let (cluster, token) = cluster(&[]).await;
    let network = network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/24"})).await;
    let row = cluster.interface(&network, "ci", "web", 1).await;
    let path = |verb: &str| format!("/interfaces/{}/{verb}", row.id);
    assert_eq!(cluster.call(&token, Method::POST, &path("float"), None).await.body, Value::Null);
    let shown = get(&cluster, &token, &format!("/interfaces/{}", row.id)).await.body;
    let floating = shown["floating"].as_str().unwrap().parse().unwrap();
    // The call waited for the network node.
    let router = cluster.node.network_plans().pop().unwrap().router.unwrap();
    assert_eq!(router.egress.floating, [(floating, row.ipv4.unwrap())]);
    assert_eq!(cluster.call(&token, Method::POST, &path("float"), None).await.status, 409);
    let held = addresses::get(&*cluster.app.store, FLOATING_NETWORK_ID, floating).await.unwrap().unwrap();
    assert_eq!(held.user.unwrap().id, row.id.to_string());
    assert_eq!(cluster.call(&token, Method::POST, &path("defloat"), None).await.status, 200);
    assert_eq!(cluster.call(&token, Method::POST, &path("defloat"), None).await.status, 200);
    assert!(cluster.node.network_plans().pop().unwrap().router.unwrap().egress.floating.is_empty());
    let rests = addresses::get(&*cluster.app.store, FLOATING_NETWORK_ID, floating).await.unwrap().unwrap();
    assert_eq!((rests.kind.as_str(), rests.user), ("deletion-halo", None));
    let item = json!({"value": "b"});
    let path = format!("/interfaces/{}/metadata/a", row.id);
    assert_eq!(cluster.call(&token, Method::PUT, &path, Some(item)).await.status, 200);
    assert_eq!(get(&cluster, &token, &format!("/interfaces/{}", row.id)).await.body["metadata"]["a"], "b");
    for path in ["/interfaces/banana", "/interfaces/9d1c3a52-5b3a-4a39-8c07-0a8d7d1b2c11"] {
        assert_eq!(get(&cluster, &token, path).await.body["error"], "interface not found");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn addresses_are_routed_and_unrouted() {
    let (cluster, token) = cluster(&[]).await;
    let body = |name: &str| json!({"name": name, "netblock": "10.0.0.0/24"});
    network(&cluster, &token, body("n")).await;
    network(&cluster, &token, body("m")).await;
    let answer = cluster.call(&token, Method::POST, "/networks/n/route", None).await;
    let address = answer.body.as_str().expect("a bare string").to_owned();
    let routed: Vec<String> =
        cluster.node.network_plans().iter().flat_map(|p| &p.routed).map(ToString::to_string).collect();
    assert_eq!(routed, std::slice::from_ref(&address));
    let shown = get(&cluster, &token, "/networks/n").await.body;
    assert_eq!(shown["references_from"]["routed_address"][0]["relationship_value"], address);
    let unroute = async |path: String| {
        let answer = cluster.call(&token, Method::DELETE, &path, None).await;
        (answer.status.as_u16(), answer.body["error"].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(
        unroute(format!("/networks/m/route/{address}")).await,
        (403, "address not routed by this network".into())
    );
    assert_eq!(unroute("/networks/n/route/192.168.20.250".into()).await, (404, "address not routed".into()));
    assert_eq!(unroute("/networks/n/route/10.0.0.7".into()).await, (404, "address not routed".into()));
    assert_eq!(unroute("/networks/n/route/banana".into()).await.0, 400);
    assert_eq!(unroute(format!("/networks/n/route/{address}")).await.0, 200);
    assert!(cluster.node.network_plans().iter().all(|plan| plan.routed.is_empty()));
    assert_eq!(unroute(format!("/networks/n/route/{address}")).await.0, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_floating_network_is_said_plainly() {
    let (cluster, token) = cluster(&[("FLOATING_NETWORK", "172.30.0.0/29")]).await;
    let body = |name: &str| json!({"name": name, "netblock": "10.0.0.0/24"});
    for name in ["a", "b", "c", "d", "e"] {
        network(&cluster, &token, body(name)).await;
    }
    let answer = cluster.call(&token, Method::POST, "/networks/a/route", None).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.body["error"]),
        (507, &json!("No free addresses on network"))
    );
    network(&cluster, &token, body("f")).await;
    let shown = get(&cluster, &token, "/networks/f").await.body;
    assert_eq!(
        (&shown["state"], &shown["error_message"]),
        (&json!("error"), &json!("Unable to allocate floating gateway IP"))
    );
    assert_eq!(cluster.call(&token, Method::POST, "/networks/f/addresses/10.0.0.9", None).await.status, 406);
    assert_eq!(delete(&cluster, &token, "/networks/f").await.status, 202);
    cluster.settle().await;
    assert_eq!(get(&cluster, &token, "/networks").await.body.as_array().unwrap().len(), 5);
}
