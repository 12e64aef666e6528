//! Network addresses: reserved, allocated, floating, routed and quarantined.

use std::collections::BTreeSet;

use axum::http::Method;
use muster_control::objects::interface::{NewInterface, WantedAddress};
use muster_control::reconcile;
use muster_store::addresses;
use muster_test_cluster::wait_for;
use muster_types::ids::InstanceId;
use muster_types::network::FLOATING_NETWORK_ID;
use serde_json::{Value, json};

use crate::networks::{cluster, create_network, delete, get, id, object, post};

#[tokio::test(flavor = "multi_thread")]
async fn reserves_and_releases_addresses() {
    let (cluster, token) = cluster(&[]).await;
    let id = create_network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/24"})).await;
    let path = |address: &str| format!("/networks/n/addresses/{address}");
    let comment = json!({"comment": "the printer"});
    let response = post(&cluster, &token, &path("10.0.0.9"), comment.clone()).await;
    assert_eq!(response.status, 200, "{}", response.text);
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
        assert_eq!(response.body[field], value, "{field}");
    }
    let status = async |method: Method, address: &str, body: Option<Value>| {
        cluster.call(&token, method, &path(address), body).await.status.as_u16()
    };
    assert_eq!(status(Method::POST, "10.0.0.9", None).await, 409, "already reserved by the caller");
    assert_eq!(status(Method::POST, "10.0.0.1", None).await, 409, "the gateway");
    assert_eq!(status(Method::POST, "10.0.1.1", None).await, 400, "outside the netblock");
    assert_eq!(status(Method::POST, "banana", None).await, 400);
    assert_eq!(status(Method::POST, "::1", None).await, 400);
    assert_eq!(status(Method::POST, "10.0.0.10", Some(json!({"comment": "x".repeat(256)}))).await, 400);
    assert_eq!(status(Method::POST, "10.0.0.10", Some(json!({"comment": 7}))).await, 400);
    assert_eq!(status(Method::POST, "10.0.0.10", Some(json!({"comment": "é".repeat(255)}))).await, 200);
    assert_eq!(status(Method::DELETE, "10.0.0.1", None).await, 403);
    assert_eq!(status(Method::DELETE, "10.0.0.77", None).await, 403, "free");
    assert_eq!(status(Method::DELETE, "10.0.0.9", None).await, 200);
    assert_eq!(status(Method::DELETE, "10.0.0.9", None).await, 403, "quarantined");
    let list = get(&cluster, &token, "/networks/n/addresses").await.body;
    let kinds: Vec<&str> = list.as_array().unwrap().iter().map(|a| a["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["network", "gateway", "deletion-halo", "manual", "broadcast"]);
    assert_eq!((&list[2]["user"], &list[2]["user_uuid"]), (&json!([]), &Value::Null));
    assert_eq!(
        status(Method::POST, "10.0.0.9", Some(comment)).await,
        200,
        "a quarantined address can be reserved"
    );
    let events = cluster.events(&object(&id)).await;
    let reserved = events.iter().find(|event| event.message == "address reserved").unwrap();
    assert_eq!(reserved.extra["comment"], "the printer");
    delete(&cluster, &token, "/networks/n").await;
    assert_eq!(status(Method::POST, "10.0.0.20", None).await, 406, "the network is being deleted");
    cluster.settle().await;
    let path = format!("/networks/{id}/addresses/10.0.0.20");
    assert_eq!(cluster.call(&token, Method::POST, &path, None).await.status, 406);
    assert_eq!(cluster.call(&token, Method::DELETE, &path, None).await.status, 406);
}

#[tokio::test(flavor = "multi_thread")]
async fn reserves_address_before_network_is_created() {
    let (cluster, token) = cluster(&[]).await;
    let response = post(&cluster, &token, "/networks", json!({"name": "n", "netblock": "10.0.0.0/29"})).await;
    assert_eq!(response.body["state"], "initial");
    assert_eq!(cluster.call(&token, Method::POST, "/networks/n/addresses/10.0.0.3", None).await.status, 200);
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reuses_addresses_of_full_network_after_quarantine() {
    let (cluster, token) = cluster(&[("IP_DELETION_HALO_DURATION", "1")]).await;
    let network = create_network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/29"})).await;
    let mut allocated = BTreeSet::new();
    let mut last = None;
    for _ in 0..5 {
        let row = cluster.create_interface(&network, "ci", "host", 2).await;
        assert!(allocated.insert(row.ipv4.unwrap()), "allocated twice");
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
    let refused = cluster.try_create_interface(&new(WantedAddress::Any)).await.unwrap_err();
    assert!(
        matches!(&refused, muster_types::Error::InsufficientCapacity(text) if text == "No free addresses on network")
    );
    // An interface without an address needs no free address.
    assert_eq!(cluster.try_create_interface(&new(WantedAddress::None)).await.unwrap().ipv4, None);
    let deleted = last.unwrap();
    cluster.delete_interface(deleted.id).await;
    let reallocated = wait_for("the quarantine to end", async || {
        cluster.try_create_interface(&new(WantedAddress::Any)).await.ok()
    })
    .await;
    assert_eq!(reallocated.ipv4, deleted.ipv4);
    let in_use = new(WantedAddress::Exactly(reallocated.ipv4.unwrap()));
    assert!(matches!(cluster.try_create_interface(&in_use).await, Err(muster_types::Error::AddressInUse(_))));
    let outside = new(WantedAddress::Exactly("10.9.9.9".parse().unwrap()));
    assert!(matches!(cluster.try_create_interface(&outside).await, Err(muster_types::Error::Invalid(_))));
    let duplicate_mac = NewInterface { mac: Some(reallocated.mac), ..new(WantedAddress::None) };
    let refused = cluster.try_create_interface(&duplicate_mac).await.unwrap_err();
    assert!(refused.to_string().contains("macaddress"), "{refused}");
    let released = reconcile::quarantine::run(&cluster.app).await.unwrap();
    assert_eq!(released, 0, "the quarantined address is allocated again");
}

#[tokio::test(flavor = "multi_thread")]
async fn floats_and_defloats_interface() {
    let (cluster, token) = cluster(&[]).await;
    let network = create_network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/24"})).await;
    let row = cluster.create_interface(&network, "ci", "web", 1).await;
    let path = |verb: &str| format!("/interfaces/{}/{verb}", row.id);
    assert_eq!(cluster.call(&token, Method::POST, &path("float"), None).await.body, Value::Null);
    let fetched = get(&cluster, &token, &format!("/interfaces/{}", row.id)).await.body;
    let floating = fetched["floating"].as_str().unwrap().parse().unwrap();
    // The call returns after the network node applied the change.
    let router = cluster.node.network_plans().pop().unwrap().router.unwrap();
    assert_eq!(router.egress.floating, [(floating, row.ipv4.unwrap())]);
    assert_eq!(cluster.call(&token, Method::POST, &path("float"), None).await.status, 409);
    let allocated =
        addresses::get(&*cluster.app.store, FLOATING_NETWORK_ID, floating).await.unwrap().unwrap();
    assert_eq!(allocated.user.unwrap().id, row.id.to_string());
    assert_eq!(cluster.call(&token, Method::POST, &path("defloat"), None).await.status, 200);
    assert_eq!(cluster.call(&token, Method::POST, &path("defloat"), None).await.status, 200);
    assert!(cluster.node.network_plans().pop().unwrap().router.unwrap().egress.floating.is_empty());
    let quarantined =
        addresses::get(&*cluster.app.store, FLOATING_NETWORK_ID, floating).await.unwrap().unwrap();
    assert_eq!((quarantined.kind.as_str(), quarantined.user), ("deletion-halo", None));
    let item = json!({"value": "b"});
    let path = format!("/interfaces/{}/metadata/a", row.id);
    assert_eq!(cluster.call(&token, Method::PUT, &path, Some(item)).await.status, 200);
    assert_eq!(get(&cluster, &token, &format!("/interfaces/{}", row.id)).await.body["metadata"]["a"], "b");
    for path in ["/interfaces/banana", "/interfaces/9d1c3a52-5b3a-4a39-8c07-0a8d7d1b2c11"] {
        assert_eq!(get(&cluster, &token, path).await.body["error"], "interface not found");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_and_unroutes_addresses() {
    let (cluster, token) = cluster(&[]).await;
    let body = |name: &str| json!({"name": name, "netblock": "10.0.0.0/24"});
    create_network(&cluster, &token, body("n")).await;
    create_network(&cluster, &token, body("m")).await;
    let response = cluster.call(&token, Method::POST, "/networks/n/route", None).await;
    let address = response.body.as_str().expect("a bare string").to_owned();
    let routed: Vec<String> =
        cluster.node.network_plans().iter().flat_map(|p| &p.routed).map(ToString::to_string).collect();
    assert_eq!(routed, std::slice::from_ref(&address));
    let fetched = get(&cluster, &token, "/networks/n").await.body;
    assert_eq!(fetched["references_from"]["routed_address"][0]["relationship_value"], address);
    let unroute = async |path: String| {
        let response = cluster.call(&token, Method::DELETE, &path, None).await;
        (response.status.as_u16(), response.body["error"].as_str().unwrap_or_default().to_owned())
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
async fn full_floating_network_returns_507() {
    let settings = [("FLOATING_NETWORK", "172.30.0.0/29"), ("QUOTA_FLOATING_ADDRESSES", "0")];
    let (cluster, token) = cluster(&settings).await;
    let body = |name: &str| json!({"name": name, "netblock": "10.0.0.0/24"});
    for name in ["a", "b", "c", "d", "e"] {
        create_network(&cluster, &token, body(name)).await;
    }
    let response = cluster.call(&token, Method::POST, "/networks/a/route", None).await;
    assert_eq!(
        (response.status.as_u16(), &response.body["error"]),
        (507, &json!("No free addresses on network"))
    );
    create_network(&cluster, &token, body("f")).await;
    let fetched = get(&cluster, &token, "/networks/f").await.body;
    assert_eq!(
        (&fetched["state"], &fetched["error_message"]),
        (&json!("error"), &json!("Unable to allocate floating gateway IP"))
    );
    assert_eq!(cluster.call(&token, Method::POST, "/networks/f/addresses/10.0.0.9", None).await.status, 406);
    assert_eq!(delete(&cluster, &token, "/networks/f").await.status, 202);
    cluster.settle().await;
    assert_eq!(get(&cluster, &token, "/networks").await.body.as_array().unwrap().len(), 5);
}
