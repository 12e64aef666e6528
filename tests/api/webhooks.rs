//! Webhooks: what is sent to whom.

mod receivers;

use std::sync::Arc;

use aws_lc_rs::hmac;
use axum::http::Method;
use muster_control::reconcile;
use muster_store::transaction;
use muster_test_cluster::{ApiResponse, Cluster, caller, wait_for};
use muster_testing::web_server::{ReceivedRequest, Reply, WebServer};
use muster_types::event::{Event, EventType};
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use crate::networks::{create_network, delete, get, object, post};
use crate::scopes::scoped_token;

const HOOKS: &str = "/auth/namespaces/ci/webhooks";
const ALLOW_LOOPBACK: &[(&str, &str)] = &[("WEBHOOK_ALLOWED_NETWORKS", "127.0.0.1")];

/// A cluster with the namespace `ci` and a network in it.
struct Fixture {
    cluster: Cluster,
    token: String,
    network: String,
}

impl Fixture {
    async fn new() -> Self {
        Self::with(ALLOW_LOOPBACK).await
    }

    async fn with(settings: &[(&str, &str)]) -> Self {
        let (cluster, token) = crate::networks::cluster(settings).await;
        let network = create_network(&cluster, &token, json!({"name": "n", "netblock": "10.0.0.0/24"})).await;
        let fixture = Self { cluster, token, network };
        fixture.wait_until_drained().await;
        fixture
    }

    async fn wait_until_drained(&self) {
        let events = &self.cluster.app.events;
        wait_for("events to be stored", async || (events.depth() == 0).then_some(())).await;
    }

    /// Creates a webhook for events of networks, and returns its secret.
    async fn create(&self, name: &str, url: &str) -> String {
        let body = json!({"name": name, "url": url, "event_types": ["status"], "object_types": ["network"]});
        let response = post(&self.cluster, &self.token, HOOKS, body).await;
        assert_eq!(response.status, 200, "{}", response.text);
        response.body["secret"].as_str().unwrap().to_owned()
    }

    /// Records an event of the network.
    fn record(&self, message: &str) {
        self.cluster.app.events.record(Event::new(EventType::Status, object(&self.network), message));
    }

    /// Runs a pass of the maintainer with all recorded events.
    async fn run(&self) {
        self.wait_until_drained().await;
        reconcile::webhooks::run(&self.cluster.app).await.unwrap();
    }

    /// Records an event and sends it.
    async fn send(&self, message: &str) {
        self.record(message);
        self.run().await;
    }

    /// Lets the time of the next attempts come, and makes them.
    async fn retry(&self) {
        self.update("next_attempt = 0 WHERE state = 'pending'").await;
        self.run().await;
    }

    async fn update(&self, assignments: &str) {
        let sql = format!("UPDATE webhook_deliveries SET {assignments}");
        transaction!(self.cluster.app.store, |tx| { Ok(tx.execute(&sql, &[]).await?) }).unwrap();
    }

    async fn get(&self, path: &str) -> Value {
        let response = get(&self.cluster, &self.token, &format!("{HOOKS}/{path}")).await;
        assert_eq!(response.status, 200, "{}", response.text);
        response.body
    }

    async fn post(&self, path: &str) -> ApiResponse {
        self.cluster.call(&self.token, Method::POST, &format!("{HOOKS}/{path}"), None).await
    }

    /// Returns the deliveries of a webhook, newest first.
    async fn deliveries(&self, name: &str) -> Vec<Value> {
        self.get(&format!("{name}/deliveries")).await.as_array().unwrap().clone()
    }

    /// Returns the only delivery of a webhook.
    async fn delivery(&self, name: &str) -> Value {
        let mut deliveries = self.deliveries(name).await;
        assert_eq!(deliveries.len(), 1, "{deliveries:?}");
        deliveries.remove(0)
    }
}

async fn receiver(status: u16) -> WebServer {
    WebServer::new(move |_, _| Reply::status(status)).await
}

fn body(request: &ReceivedRequest) -> Value {
    serde_json::from_slice(&request.body).unwrap()
}

fn messages(server: &WebServer) -> Vec<String> {
    let message = |request: &ReceivedRequest| body(request)["event"]["message"].as_str().unwrap().to_owned();
    server.requests().iter().map(message).collect()
}

/// Returns which of the signatures of a request belong to a secret.
fn matching_signatures(request: &ReceivedRequest, secret: &str) -> Vec<bool> {
    let timestamp = request.header("muster-timestamp").unwrap();
    let age = muster_types::time::now() - timestamp.parse::<f64>().unwrap();
    assert!((-1.0..300.0).contains(&age), "{age}");
    let signed = [timestamp.as_bytes(), b".", &request.body].concat();
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes()), &signed);
    let expected: String = tag.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let signatures = request.header("muster-signature").unwrap().split(',');
    signatures.map(|signature| signature == format!("v1={expected}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn sends_signed_events() {
    let fixture = Fixture::new().await;
    let server = receiver(204).await;
    let secret = fixture.create("chat", &server.url("/hook?room=7")).await;
    assert!(secret.starts_with("whsec_"));
    fixture.send("it works").await;
    let requests = server.requests();
    let request = &requests[0];
    assert_eq!((requests.len(), request.path.as_str()), (1, "/hook?room=7"));
    assert_eq!(request.header("content-type"), Some("application/json"));
    assert_eq!(matching_signatures(request, &secret), [true]);
    assert_eq!(matching_signatures(request, "whsec_other"), [false]);
    let sent = body(request);
    let delivery = fixture.delivery("chat").await;
    assert_eq!((&sent["delivery"], &sent["kind"]), (&delivery["uuid"], &json!("event")));
    assert_eq!(request.header("muster-delivery"), delivery["uuid"].as_str());
    assert_eq!((&sent["webhook"]["namespace"], &sent["webhook"]["name"]), (&json!("ci"), &json!("chat")));
    let event = &sent["event"];
    assert_eq!((&event["message"], &event["event_type"]), (&json!("it works"), &json!("status")));
    assert_eq!((&event["object_type"], &event["object_uuid"]), (&json!("network"), &json!(fixture.network)));
    assert_eq!((&event["namespace"], &event["event_uuid"]), (&json!("ci"), &delivery["event_uuid"]));
    assert_eq!((&delivery["state"], &delivery["attempts"]), (&json!("delivered"), &json!(1)));
    assert_eq!((&delivery["response_status"], &delivery["error"]), (&json!(204), &Value::Null));
    assert!(delivery["finished"].is_f64() && delivery["next_attempt"].is_null());
    let webhook = fixture.get("chat").await;
    assert!(webhook["last_delivered"].is_f64() && webhook["last_failed"].is_null(), "{webhook}");
    // Another pass reads the same events again, and sends nothing.
    fixture.run().await;
    assert_eq!(server.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn secret_is_returned_once_and_stored_encrypted() {
    let fixture = Fixture::new().await;
    let server = receiver(200).await;
    let secret = fixture.create("chat", &server.url("/")).await;
    fixture.send("x").await;
    assert!(fixture.get("chat").await["secret"].is_null());
    let list = get(&fixture.cluster, &fixture.token, HOOKS).await;
    assert!(!list.text.contains("whsec_"), "{}", list.text);
    let path = format!("{HOOKS}/chat");
    let update = json!({"url": server.url("/")});
    let updated = fixture.cluster.call(&fixture.token, Method::PUT, &path, Some(update)).await;
    assert_eq!(updated.status, 200, "{}", updated.text);
    assert!(updated.body["secret"].is_null() && !updated.text.contains("whsec_"));
    assert_eq!(fixture.cluster.count_rows("webhooks", "secret LIKE '%whsec_%'").await, 0);
    fixture.wait_until_drained().await;
    assert_eq!(fixture.cluster.count_rows("events", &format!("extra LIKE '%{secret}%'")).await, 0);
    let mut changes = fixture.cluster.messages(&ObjectRef::namespace("ci")).await;
    changes.retain(|message| message.starts_with("webhook"));
    assert_eq!(changes, ["webhook updated", "webhook created"]);
    let deleted = delete(&fixture.cluster, &fixture.token, &path).await;
    assert_eq!((deleted.status.as_u16(), &deleted.body["secret"]), (200, &Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn sends_only_what_the_filters_select() {
    let fixture = Fixture::new().await;
    let server = receiver(200).await;
    let create = async |name: &str, filters: Value| {
        let mut body = json!({"name": name, "url": server.url(&format!("/{name}"))});
        body.as_object_mut().unwrap().extend(filters.as_object().unwrap().clone());
        let response = post(&fixture.cluster, &fixture.token, HOOKS, body).await;
        assert_eq!(response.status, 200, "{}", response.text);
        response.body
    };
    let defaults = create("default", json!({})).await;
    assert_eq!(defaults["event_types"], json!(["audit", "mutate", "status"]));
    let types: Vec<&str> =
        defaults["object_types"].as_array().unwrap().iter().map(|kind| kind.as_str().unwrap()).collect();
    assert!(
        types.contains(&"instance") && !types.contains(&"node") && !types.contains(&"namespace"),
        "{types:?}"
    );
    create("usage", json!({"event_types": ["usage"], "object_types": ["network"]})).await;
    create("instances", json!({"object_types": ["instance"]})).await;
    create("prefix", json!({"object_types": ["network"], "message_prefix": "state"})).await;
    create("disabled", json!({"enabled": false})).await;
    let events = &fixture.cluster.app.events;
    events.record(Event::new(EventType::Status, object(&fixture.network), "state is now odd"));
    events.record(Event::new(EventType::Usage, object(&fixture.network), "traffic"));
    events.record(Event::new(EventType::Status, object(&fixture.network), "other"));
    // An event of two objects is sent once.
    let both = Event::new(EventType::Status, object(&fixture.network), "state of two");
    events.record(both.with_object(ObjectRef::namespace("ci")));
    fixture.run().await;
    let sent = |name: &str| {
        let path = format!("/{name}");
        let of_hook = server.requests().into_iter().filter(move |request| request.path == path);
        let message =
            |request: ReceivedRequest| body(&request)["event"]["message"].as_str().unwrap().to_owned();
        of_hook.map(message).collect::<Vec<_>>()
    };
    let defaults: Vec<String> = sent("default")
        .into_iter()
        .filter(|message| {
            ["state is now odd", "traffic", "other", "state of two"].contains(&message.as_str())
        })
        .collect();
    assert_eq!(defaults, ["state is now odd", "other", "state of two"]);
    assert_eq!(sent("usage"), ["traffic"]);
    assert_eq!(sent("prefix"), ["state is now odd", "state of two"]);
    assert!(sent("instances").is_empty() && sent("disabled").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn rotation_signs_with_both_secrets_for_a_while() {
    let fixture = Fixture::new().await;
    let server = receiver(200).await;
    let old = fixture.create("chat", &server.url("/")).await;
    let rotate = async |overlap: i64| {
        let path = format!("{HOOKS}/chat/rotate-secret");
        post(&fixture.cluster, &fixture.token, &path, json!({"overlap": overlap})).await
    };
    let rotated = rotate(3600).await;
    assert_eq!(rotated.status, 200, "{}", rotated.text);
    let new = rotated.body["secret"].as_str().unwrap().to_owned();
    assert_ne!(old, new);
    assert!(rotated.body["previous_secret_expires"].is_f64());
    fixture.send("both").await;
    let request = server.requests().pop().unwrap();
    assert_eq!(matching_signatures(&request, &new), [true, false]);
    assert_eq!(matching_signatures(&request, &old), [false, true]);
    // The overlap has ended.
    transaction!(fixture.cluster.app.store, |tx| {
        Ok(tx.execute("UPDATE webhooks SET previous_secret_expires = 1", &[]).await?)
    })
    .unwrap();
    assert!(fixture.get("chat").await["previous_secret_expires"].is_null());
    fixture.send("new").await;
    assert_eq!(matching_signatures(&server.requests().pop().unwrap(), &new), [true]);
    // A secret that has leaked ends immediately.
    let rotated = rotate(0).await;
    let newest = rotated.body["secret"].as_str().unwrap().to_owned();
    fixture.send("newest").await;
    assert_eq!(matching_signatures(&server.requests().pop().unwrap(), &newest), [true]);
    assert_eq!(rotate(-1).await.status, 400);
    assert_eq!(rotate(604_801).await.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn delivery_can_be_sent_again_and_tested() {
    let fixture = Fixture::new().await;
    let server = receiver(200).await;
    fixture.create("chat", &server.url("/")).await;
    fixture.send("x").await;
    let first = fixture.delivery("chat").await;
    let path = format!("chat/deliveries/{}/redeliver", first["uuid"].as_str().unwrap());
    let queued = fixture.post(&path).await;
    assert_eq!((queued.status.as_u16(), &queued.body["state"]), (200, &json!("pending")), "{}", queued.text);
    fixture.run().await;
    let requests = server.requests();
    assert_eq!(requests.len(), 2);
    assert_eq!(requests[0].header("muster-delivery"), requests[1].header("muster-delivery"));
    assert_eq!(requests[0].body, requests[1].body);
    assert_eq!(fixture.delivery("chat").await["state"], "delivered");
    let test = fixture.post("chat/test").await;
    assert_eq!((test.status.as_u16(), &test.body["state"]), (200, &json!("pending")), "{}", test.text);
    fixture.run().await;
    assert_eq!(body(&server.requests()[2])["kind"], "test");
    assert_eq!(fixture.deliveries("chat").await[0]["uuid"], test.body["uuid"]);
    for (path, status) in [
        ("chat/deliveries/nothing/redeliver", 404),
        ("chat/deliveries/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01/redeliver", 404),
        ("absent/test", 404),
    ] {
        assert_eq!(fixture.post(path).await.status, status, "{path}");
    }
    let disabled = json!({"url": server.url("/"), "enabled": false});
    let hook = format!("{HOOKS}/chat");
    let updated = fixture.cluster.call(&fixture.token, Method::PUT, &hook, Some(disabled)).await;
    assert_eq!((updated.status.as_u16(), &updated.body["enabled"]), (200, &json!(false)));
    assert_eq!(
        (fixture.post("chat/test").await.status, fixture.post(&path).await.status),
        (409.try_into().unwrap(), 409.try_into().unwrap())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_or_disabled_webhook_sends_nothing() {
    let fixture = Fixture::new().await;
    let server = receiver(500).await;
    for name in ["deleted", "disabled"] {
        fixture.create(name, &server.url("/")).await;
    }
    fixture.send("x").await;
    assert_eq!(server.requests().len(), 2);
    assert_eq!(delete(&fixture.cluster, &fixture.token, &format!("{HOOKS}/deleted")).await.status, 200);
    let path = format!("{HOOKS}/disabled");
    let set = async |enabled: bool| {
        let body = json!({"url": server.url("/"), "object_types": ["network"], "enabled": enabled});
        let response = fixture.cluster.call(&fixture.token, Method::PUT, &path, Some(body)).await;
        assert_eq!(response.status, 200, "{}", response.text);
    };
    set(false).await;
    fixture.record("while it is disabled");
    fixture.retry().await;
    assert_eq!(server.requests().len(), 2);
    assert_eq!(fixture.cluster.count_rows("webhook_deliveries", "1 = 1").await, 1);
    // Then the pending delivery is sent, but not what happened meanwhile.
    set(true).await;
    fixture.retry().await;
    assert_eq!(messages(&server), ["x", "x", "x"]);
    assert_eq!(get(&fixture.cluster, &fixture.token, &format!("{HOOKS}/deleted")).await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn other_tenants_see_nothing() {
    let fixture = Fixture::new().await;
    let server = receiver(200).await;
    fixture.create("chat", &server.url("/")).await;
    fixture.cluster.create_namespace("other").await;
    let other = fixture.cluster.token("other").await;
    fixture.cluster.create_namespace("trusted").await;
    muster_control::objects::trust::add(&fixture.cluster.app, &caller(), "ci", "trusted").await.unwrap();
    let trusted = fixture.cluster.token("trusted").await;
    let test = fixture.post("chat/test").await.body;
    let redeliver = format!("/chat/deliveries/{}/redeliver", test["uuid"].as_str().unwrap());
    let terms = json!({"url": "https://hooks.invalid"});
    for token in [&other, &trusted] {
        for (method, path, body) in [
            (Method::GET, "", None),
            (Method::POST, "", Some(json!({"name": "x", "url": "https://hooks.invalid"}))),
            (Method::GET, "/chat", None),
            (Method::PUT, "/chat", Some(terms.clone())),
            (Method::DELETE, "/chat", None),
            (Method::GET, "/chat/deliveries", None),
            (Method::POST, "/chat/test", None),
            (Method::POST, "/chat/rotate-secret", Some(json!({}))),
            (Method::POST, &redeliver, None),
        ] {
            let response = fixture.cluster.call(token, method.clone(), &format!("{HOOKS}{path}"), body).await;
            assert_eq!(response.status, 404, "{method} {path}: {}", response.text);
            assert_eq!(response.body["error"], "namespace not found");
        }
    }
    // A delivery belongs to its webhook.
    let hook = json!({"name": "own", "url": server.url("/own")});
    let path = "/auth/namespaces/other/webhooks";
    assert_eq!(post(&fixture.cluster, &other, path, hook).await.status, 200);
    let path = redeliver.replace("/chat", "/auth/namespaces/other/webhooks/own");
    assert_eq!(fixture.cluster.call(&other, Method::POST, &path, None).await.status, 404);
    fixture.send("an event of ci").await;
    let own = server.requests().into_iter().filter(|request| request.path == "/own");
    for request in own {
        assert_eq!(body(&request)["event"]["namespace"], "other");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn webhook_sends_only_what_its_creator_may_read() {
    let fixture = Fixture::new().await;
    let cluster = &fixture.cluster;
    let scoped = scoped_token(cluster, "ci", &["webhook.*", "network.read"]).await;
    let create = async |token: &str, path: &str, object_types: Value| {
        let body = json!({"name": "x", "url": "https://hooks.invalid", "object_types": object_types});
        post(cluster, token, path, body).await
    };
    let refused = create(&scoped, HOOKS, json!(["instance", "network"])).await;
    let expected = "a webhook cannot send events that need scopes you do not hold: instance.read";
    assert_eq!((refused.status.as_u16(), &refused.body["error"]), (403, &json!(expected)));
    let created = create(&scoped, HOOKS, Value::Null).await;
    assert_eq!((created.status.as_u16(), &created.body["object_types"]), (200, &json!(["network"])));
    for administrative in ["node", "namespace", "namespace_key"] {
        let refused = create(&fixture.token, HOOKS, json!([administrative])).await;
        let expected =
            format!("object_types: events of {administrative} are only sent by webhooks of system");
        assert_eq!((refused.status.as_u16(), &refused.body["error"]), (400, &json!(expected)));
    }
    assert_eq!(create(&fixture.token, HOOKS, json!([])).await.status, 400);
    assert_eq!(create(&fixture.token, HOOKS, json!(["odd"])).await.status, 400);
    let path = "/auth/namespaces/system/webhooks";
    let limited = scoped_token(cluster, "system", &["webhook.*", "node.read"]).await;
    let refused = create(&limited, path, json!(["node"])).await;
    assert_eq!(refused.body["error"], expected.replace("instance.read", "cluster-admin"));
    let server = receiver(200).await;
    let system = cluster.token("system").await;
    let hook =
        json!({"name": "nodes", "url": server.url("/"), "event_types": ["health"], "object_types": ["node"]});
    assert_eq!(post(cluster, &system, path, hook).await.status, 200);
    let node = cluster.app.nodes[0].identity().id;
    cluster.app.events.record(Event::new(
        EventType::Health,
        ObjectRef::new(ObjectType::Node, node),
        "too hot",
    ));
    fixture.run().await;
    assert_eq!(messages(&server), ["too hot"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn number_of_webhooks_and_pending_deliveries_is_limited() {
    let fixture = Fixture::new().await;
    // It does not respond, so that the first delivery is being sent.
    let server = receiver(0).await;
    for number in 0..10 {
        fixture.create(&format!("hook{number}"), &server.url("/")).await;
    }
    let refused = post(
        &fixture.cluster,
        &fixture.token,
        HOOKS,
        json!({"name": "eleventh", "url": "https://hooks.invalid"}),
    )
    .await;
    assert_eq!(refused.status, 403);
    assert!(refused.body["error"].as_str().unwrap().contains("webhooks (limit 10, used 10, requested 1)"));
    for number in 1..10 {
        let path = format!("{HOOKS}/hook{number}");
        assert_eq!(delete(&fixture.cluster, &fixture.token, &path).await.status, 200);
    }
    let duplicate = json!({"name": "hook0", "url": "https://hooks.invalid"});
    assert_eq!(post(&fixture.cluster, &fixture.token, HOOKS, duplicate).await.status, 409);
    for number in 0..1003 {
        fixture.record(&format!("event {number}"));
    }
    fixture.wait_until_drained().await;
    let app = Arc::clone(&fixture.cluster.app);
    let pass = tokio::spawn(async move { reconcile::webhooks::run(&app).await });
    let webhook = wait_for("deliveries to be dropped", async || {
        Some(fixture.get("hook0").await).filter(|webhook| webhook["dropped"] != 0)
    })
    .await;
    assert_eq!((&webhook["pending"], &webhook["dropped"]), (&json!(1000), &json!(3)));
    let deliveries = fixture.deliveries("hook0").await;
    let dropped: Vec<&Value> = deliveries.iter().filter(|delivery| delivery["state"] == "dropped").collect();
    assert_eq!(dropped.len(), 3);
    let expected = "the webhook had more than 1000 pending deliveries";
    assert!(dropped.iter().all(|delivery| delivery["error"] == expected));
    let drop = wait_for("the event", async || {
        let events = fixture.cluster.events(&ObjectRef::namespace("ci")).await;
        events.into_iter().find(|event| event.message.starts_with("dropped the oldest"))
    })
    .await;
    assert_eq!((&drop.extra["webhook"], &drop.extra["count"]), (&json!("hook0"), &json!(3)));
    pass.abort();
    let _ = pass.await;
}

#[tokio::test(flavor = "multi_thread")]
async fn old_deliveries_and_webhooks_of_deleted_namespaces_are_removed() {
    let fixture = Fixture::new().await;
    let server = receiver(200).await;
    fixture.create("chat", &server.url("/")).await;
    fixture.send("old").await;
    fixture.update("finished = finished - 260000").await;
    fixture.send("new").await;
    reconcile::webhooks::prune(&fixture.cluster.app).await.unwrap();
    assert_eq!(fixture.delivery("chat").await["message"], "new");
    transaction!(fixture.cluster.app.store, |tx| {
        Ok(tx.execute("UPDATE namespaces SET state = 'deleted' WHERE name = 'ci'", &[]).await?)
    })
    .unwrap();
    fixture.send("of a deleted namespace").await;
    assert_eq!(messages(&server), ["old", "new"]);
    reconcile::webhooks::prune(&fixture.cluster.app).await.unwrap();
    assert_eq!(fixture.cluster.count_rows("webhooks", "1 = 1").await, 0);
    assert_eq!(fixture.cluster.count_rows("webhook_deliveries", "1 = 1").await, 0);
}
