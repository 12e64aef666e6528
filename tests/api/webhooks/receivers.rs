//! Receivers that are down, slow, broken or malicious, and daemons that stop while they send.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::http::Method;
use muster_control::reconcile;
use muster_store::transaction;
use muster_test_cluster::wait_for;
use muster_testing::web_server::{Reply, WebServer};
use muster_types::event::{Event, EventType};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::{Fixture, HOOKS, messages, receiver};
use crate::networks::{create_network, object, post};

#[tokio::test(flavor = "multi_thread")]
async fn failed_deliveries_are_retried_and_given_up() {
    let fixture = Fixture::new().await;
    let is_up = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&is_up);
    let server =
        WebServer::new(move |_, _| Reply::status(if switch.load(Ordering::Relaxed) { 200 } else { 503 }))
            .await;
    fixture.create("chat", &server.url("/")).await;
    let before = muster_types::time::now();
    fixture.send("first").await;
    let delivery = fixture.delivery("chat").await;
    assert_eq!((&delivery["state"], &delivery["attempts"]), (&json!("pending"), &json!(1)));
    assert_eq!((&delivery["response_status"], &delivery["finished"]), (&json!(503), &Value::Null));
    assert_eq!(delivery["error"], "the receiver responded with 503");
    let delay = delivery["next_attempt"].as_f64().unwrap() - before;
    assert!((9.9..60.0).contains(&delay), "{delay}");
    let webhook = fixture.get("chat").await;
    assert_eq!((&webhook["pending"], &webhook["last_error"]), (&json!(1), &delivery["error"]));
    // Not due yet.
    fixture.run().await;
    assert_eq!(server.requests().len(), 1);
    fixture.retry().await;
    assert_eq!(fixture.delivery("chat").await["attempts"], 2);
    is_up.store(true, Ordering::Relaxed);
    fixture.retry().await;
    let delivery = fixture.delivery("chat").await;
    assert_eq!((&delivery["state"], &delivery["attempts"]), (&json!("delivered"), &json!(3)));
    assert!(delivery["error"].is_null());
    let requests = server.requests();
    assert!(requests.iter().all(|request| request.body == requests[0].body), "the body stays the same");
    // The last attempt.
    is_up.store(false, Ordering::Relaxed);
    fixture.send("second").await;
    fixture.update("attempts = 10 WHERE state = 'pending'").await;
    fixture.retry().await;
    let delivery = &fixture.deliveries("chat").await[0];
    assert_eq!((&delivery["state"], &delivery["attempts"]), (&json!("failed"), &json!(11)));
    assert_eq!(fixture.get("chat").await["pending"], 0);
    fixture.retry().await;
    assert_eq!(server.requests().len(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn receivers_that_are_down_do_not_affect_others() {
    let fixture = Fixture::new().await;
    let unused = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = unused.local_addr().unwrap();
    drop(unused);
    let server = receiver(200).await;
    fixture.create("down", &format!("http://{address}/")).await;
    fixture.create("unresolved", "http://receiver.invalid/").await;
    fixture.create("up", &server.url("/")).await;
    fixture.send("one").await;
    fixture.send("two").await;
    assert_eq!(messages(&server), ["one", "two"]);
    for delivery in fixture.deliveries("down").await {
        assert_eq!((&delivery["state"], &delivery["attempts"]), (&json!("pending"), &json!(1)));
        assert_eq!(delivery["error"], "cannot connect to 127.0.0.1");
    }
    let error = fixture.deliveries("unresolved").await[0]["error"].clone();
    assert_eq!(error, "cannot resolve the host name receiver.invalid");
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_receivers_do_not_delay_other_webhooks() {
    let fixture = Fixture::new().await;
    let slow = receiver(0).await;
    let server = receiver(200).await;
    // More than are sent to at a time for one namespace.
    for number in 0..6 {
        fixture.create(&format!("slow{number}"), &slow.url("/")).await;
    }
    fixture.cluster.create_namespace("other").await;
    let other = fixture.cluster.token("other").await;
    let network = json!({"name": "n", "netblock": "10.0.0.0/24"});
    let network = create_network(&fixture.cluster, &other, network).await;
    let hook = json!({"name": "fast", "url": server.url("/"), "event_types": ["status"], "object_types": ["network"]});
    let created = post(&fixture.cluster, &other, "/auth/namespaces/other/webhooks", hook).await;
    assert_eq!(created.status, 200, "{}", created.text);
    fixture.wait_until_drained().await;
    fixture.record("to the slow ones");
    fixture.wait_until_drained().await;
    let started = Instant::now();
    let app = Arc::clone(&fixture.cluster.app);
    let pass = tokio::spawn(async move { reconcile::webhooks::run(&app).await });
    wait_for("the slow receivers", async || (slow.requests().len() == 4).then_some(())).await;
    // Also an event that is recorded while they wait.
    let event = Event::new(EventType::Status, object(&network), "to the fast one");
    fixture.cluster.app.events.record(event);
    let is_received = |message: &String| message == "to the fast one";
    wait_for("the fast receiver", async || messages(&server).iter().any(is_received).then_some(())).await;
    let elapsed = started.elapsed();
    assert!(elapsed < Duration::from_secs(10), "only after a slow receiver has timed out: {elapsed:?}");
    wait_for("the others", async || (slow.requests().len() >= 6).then_some(())).await;
    let mut ids: Vec<String> = Vec::new();
    for request in slow.requests() {
        ids.push(request.header("muster-delivery").unwrap().to_owned());
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 6, "each gets its turn");
    let failed = wait_for("a failure in the log", async || {
        let delivery = fixture.delivery("slow0").await;
        (delivery["attempts"] != 0).then_some(delivery)
    })
    .await;
    assert_eq!((&failed["state"], &failed["response_status"]), (&json!("pending"), &Value::Null));
    assert_eq!(failed["error"], "127.0.0.1 does not respond within 10 seconds");
    pass.abort();
    let _ = pass.await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_webhooks_leave_room_for_others_of_their_namespace() {
    let fixture = Fixture::new().await;
    let (slow, server) = (receiver(0).await, receiver(200).await);
    for number in 0..6 {
        fixture.create(&format!("slow{number}"), &slow.url("/")).await;
    }
    fixture.create("works", &server.url("/")).await;
    let failed = "UPDATE webhooks SET last_failed = 1 WHERE name <> 'works'";
    transaction!(fixture.cluster.app.store, |tx| { Ok(tx.execute(failed, &[]).await?) }).unwrap();
    fixture.record("to all");
    fixture.wait_until_drained().await;
    let app = Arc::clone(&fixture.cluster.app);
    let pass = tokio::spawn(async move { reconcile::webhooks::run(&app).await });
    wait_for("the others", async || (messages(&server) == ["to all"]).then_some(())).await;
    assert!(slow.requests().len() <= 2, "the rest waits for those that time out");
    pass.abort();
    let _ = pass.await;
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_receivers_are_failures_and_long_responses_are_not_read() {
    let fixture = Fixture::new().await;
    let garbage = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = garbage.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = garbage.accept().await {
            let _ = stream.read(&mut [0; 100]).await;
            let _ = stream.write_all(b"\x16\x03 this is not HTTP\r\n\r\n").await;
        }
    });
    fixture.create("garbage", &format!("http://{address}/")).await;
    let huge = WebServer::new(|_, _| Reply { stall: true, ..Reply::ok(&vec![b'x'; 32 << 20]) }).await;
    fixture.create("huge", &huge.url("/")).await;
    let endless = WebServer::new(|_, _| {
        Reply { without_length: true, stall: true, ..Reply::ok(b"more") }.slow(Duration::from_secs(600))
    })
    .await;
    fixture.create("endless", &endless.url("/")).await;
    let cut = WebServer::new(|_, _| Reply { status: 500, ..Reply::ok(b"sorry").cut(1) }).await;
    fixture.create("cut", &cut.url("/")).await;
    fixture.send("x").await;
    let garbage = fixture.delivery("garbage").await;
    assert_eq!((&garbage["state"], &garbage["response_status"]), (&json!("pending"), &Value::Null));
    assert_eq!(garbage["error"], "the request to 127.0.0.1 failed");
    for name in ["huge", "endless"] {
        assert_eq!(fixture.delivery(name).await["state"], "delivered", "{name}");
    }
    assert_eq!(fixture.delivery("cut").await["response_status"], 500);
}

#[tokio::test(flavor = "multi_thread")]
async fn redirects_are_not_followed() {
    let fixture = Fixture::new().await;
    let internal = receiver(200).await;
    for status in [301, 302, 303, 307, 308] {
        let target = internal.url("/secret");
        let server = WebServer::new(move |_, _| Reply::status(status).with("Location", &target)).await;
        fixture.create(&format!("to{status}"), &server.url("/")).await;
    }
    fixture.send("x").await;
    for status in [301, 302, 303, 307, 308] {
        let delivery = fixture.delivery(&format!("to{status}")).await;
        assert_eq!((&delivery["state"], &delivery["response_status"]), (&json!("pending"), &json!(status)));
        let expected = format!("the receiver responded with {status}, and redirects are not followed");
        assert_eq!(delivery["error"], expected);
    }
    assert!(internal.requests().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn private_addresses_are_refused_unless_allowed() {
    let fixture = Fixture::with(&[]).await;
    let server = receiver(200).await;
    for (url, kind) in [
        (server.url("/"), "127.0.0.1 is at a loopback"),
        ("http://[::1]/".into(), "[::1] is at a loopback"),
        ("http://10.1.2.3/".into(), "10.1.2.3 is at a private"),
        ("http://169.254.169.254/latest".into(), "169.254.169.254 is at a link-local"),
        ("http://2130706433/".into(), "127.0.0.1 is at a loopback"),
    ] {
        let response = post(&fixture.cluster, &fixture.token, HOOKS, json!({"name": "x", "url": url})).await;
        let expected = format!("url: {kind} address, which WEBHOOK_ALLOWED_NETWORKS does not allow");
        assert_eq!((response.status.as_u16(), &response.body["error"]), (400, &json!(expected)), "{url}");
    }
    for (url, why) in [
        ("ftp://hooks.example/", "must begin with http:// or https://"),
        ("https://user:pw@hooks.example/", "must not contain a user name or a password"),
        ("hooks", "is not a valid URL"),
    ] {
        let response = post(&fixture.cluster, &fixture.token, HOOKS, json!({"name": "x", "url": url})).await;
        assert_eq!((response.status.as_u16(), &response.body["error"]), (400, &json!(format!("url: {why}"))));
    }
    // The address of a name is checked when it is resolved for the request.
    let url = format!("http://localhost:{}/", server.address.port());
    fixture.create("local", &url).await;
    fixture.send("x").await;
    let delivery = fixture.delivery("local").await;
    let expected = "url: localhost is at a loopback address, which WEBHOOK_ALLOWED_NETWORKS does not allow";
    assert_eq!((&delivery["state"], &delivery["error"]), (&json!("pending"), &json!(expected)));
    assert!(server.requests().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_keeps_pending_deliveries_and_unread_events() {
    let mut fixture = Fixture::new().await;
    let is_up = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&is_up);
    let server =
        WebServer::new(move |_, _| Reply::status(if switch.load(Ordering::Relaxed) { 200 } else { 500 }))
            .await;
    fixture.create("chat", &server.url("/")).await;
    fixture.send("before").await;
    fixture.record("not queued yet");
    fixture.wait_until_drained().await;
    fixture.cluster.kill().await;
    fixture.cluster.start();
    is_up.store(true, Ordering::Relaxed);
    fixture.retry().await;
    assert_eq!(messages(&server)[0], "before");
    let mut sent = messages(&server)[1..].to_vec();
    sent.sort_unstable();
    assert_eq!(sent, ["before", "not queued yet"]);
    // A pass that is cancelled while it sends loses nothing.
    let stalling = receiver(0).await;
    let path = format!("{HOOKS}/chat");
    let update = async |url: &str| {
        let body = json!({"url": url, "event_types": ["status"], "object_types": ["network"]});
        assert_eq!(fixture.cluster.call(&fixture.token, Method::PUT, &path, Some(body)).await.status, 200);
    };
    update(&stalling.url("/")).await;
    fixture.record("cancelled");
    fixture.wait_until_drained().await;
    let app = Arc::clone(&fixture.cluster.app);
    let pass = tokio::spawn(async move { reconcile::webhooks::run(&app).await });
    wait_for("the request", async || (!stalling.requests().is_empty()).then_some(())).await;
    pass.abort();
    assert!(pass.await.unwrap_err().is_cancelled());
    update(&server.url("/")).await;
    fixture.run().await;
    assert_eq!(messages(&server).last().unwrap(), "cancelled");
    let (first, again) = (stalling.requests().remove(0), server.requests().pop().unwrap());
    assert_eq!(first.header("muster-delivery"), again.header("muster-delivery"));
}
