//! Consoles for browsers: tickets, and the WebSockets that they open.

use std::pin::pin;
use std::time::Duration;

use axum::http::Method;
use futures_util::FutureExt as _;
use muster_client::{Client, Credentials, Error};
use muster_control::auth::Caller;
use muster_control::auth::tokens::TokenSubject;
use muster_control::objects;
use muster_control::objects::instance::console::register;
use muster_control::objects::key::unix_seconds;
use muster_store::Retry;
use muster_test_cluster::{ApiResponse, Cluster, caller};
use muster_types::key::Secret;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::session::ConsoleKind;
use muster_websocket::{RelayEnd, Role, relay};
use reqwest::Upgraded;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::instances::consoles::serve;
use crate::instances::{create, text};
use crate::networks::cluster;
use crate::scopes::scoped_token;

const TIMEOUT: Duration = Duration::from_secs(60);

async fn create_ticket(cluster: &Cluster, token: &str, instance: &Value, kind: &str) -> ApiResponse {
    let path = format!("/instances/{}/console-tickets", text(instance, "uuid"));
    cluster.call(token, Method::POST, &path, Some(json!({"kind": kind}))).await
}

/// Returns a new ticket.
async fn ticket(cluster: &Cluster, token: &str, instance: &Value, kind: &str) -> String {
    let response = create_ticket(cluster, token, instance, kind).await;
    assert_eq!(response.status, 200, "{}", response.text);
    let lifetime = response.body["expires"].as_f64().unwrap() - muster_types::time::now();
    assert!((10.0..=30.0).contains(&lifetime), "{lifetime}");
    assert_eq!(text(&response.body, "path"), format!("/instances/{}/console-socket", text(instance, "uuid")));
    text(&response.body, "ticket").to_owned()
}

/// Requests the WebSocket of a console.
async fn open(server: &str, instance: &Value, ticket: &str, origin: Option<&str>) -> reqwest::Response {
    let url = format!("{server}/instances/{}/console-socket", text(instance, "uuid"));
    let mut request = reqwest::Client::new().get(url);
    for (name, value) in [
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("sec-websocket-protocol", &*format!("binary, muster-ticket.{ticket}")),
    ] {
        request = request.header(name, value);
    }
    if let Some(origin) = origin {
        request = request.header("origin", origin);
    }
    request.send().await.unwrap()
}

/// Sends bytes in one frame.
async fn send(socket: &mut Upgraded, bytes: &[u8]) {
    let mask = [1, 2, 3, 4];
    let mut frame = vec![0x82, 0x80 | 126];
    frame.extend(u16::try_from(bytes.len()).unwrap().to_be_bytes());
    frame.extend(mask);
    frame.extend(bytes.iter().enumerate().map(|(index, byte)| byte ^ mask[index % 4]));
    socket.write_all(&frame).await.unwrap();
}

/// Returns the bytes of the next frame, or `None` if the server closes the connection.
async fn receive(socket: &mut Upgraded) -> Option<Vec<u8>> {
    let (first, second) = (socket.read_u8().await.unwrap(), socket.read_u8().await.unwrap());
    let length = match second {
        126 => usize::from(socket.read_u16().await.unwrap()),
        length => usize::from(length),
    };
    let mut payload = vec![0; length];
    socket.read_exact(&mut payload).await.unwrap();
    match first {
        0x82 => Some(payload),
        0x88 => None,
        other => panic!("{other:x}"),
    }
}

/// Receives until the bytes end with a text.
async fn receive_until(socket: &mut Upgraded, end: &[u8]) {
    let mut received = Vec::new();
    while !received.ends_with(end) {
        received.extend(receive(socket).await.expect("more output"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ticket_opens_the_serial_console_once() {
    let (cluster, token) = cluster(&[]).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let server = serve(&cluster).await;
    let unused = create_ticket(&cluster, &token, &record, "serial").await.body;
    assert_eq!(unused["password"], Value::Null);
    let ticket = ticket(&cluster, &token, &record, "serial").await;
    let response = open(&server, &record, &ticket, Some(&server)).await;
    assert_eq!(response.status(), 101);
    assert_eq!(response.headers()["sec-websocket-accept"], "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    assert_eq!(response.headers()["sec-websocket-protocol"], "binary");
    let mut socket = response.upgrade().await.unwrap();
    receive_until(&mut socket, b"www login: ").await;
    let bytes: Vec<u8> = (0..=255).collect();
    send(&mut socket, &bytes).await;
    receive_until(&mut socket, &bytes).await;
    assert_eq!(open(&server, &record, &ticket, None).await.status(), 401, "it was used");

    let object = ObjectRef::new(ObjectType::Instance, text(&record, "uuid"));
    let events = cluster.events(&object).await;
    let created = events.iter().find(|event| event.message == "console ticket created").unwrap();
    assert_eq!((&created.extra["caller"], &created.extra["kind"]), (&json!("ci"), &json!("serial")));
    let opened = events.iter().find(|event| event.message == "console request from REST API").unwrap();
    assert_eq!((&opened.extra["caller"], &opened.extra["source"]), (&json!("ci"), &json!("127.0.0.1")));
    let rows = cluster.app.store.query("SELECT * FROM events", &[]).await.unwrap();
    let stored =
        format!("{rows:?} {:?}", cluster.app.store.query("SELECT * FROM tickets", &[]).await.unwrap());
    for secret in [ticket.as_str(), text(&unused, "ticket")] {
        assert!(!stored.contains(secret));
    }
    let off = cluster
        .call(&token, Method::POST, &format!("/instances/{}/poweroff", text(&record, "uuid")), None)
        .await;
    assert_eq!(off.status, 200, "{}", off.text);
    let refused = open(&server, &record, text(&unused, "ticket"), None).await;
    assert_eq!(refused.status(), 409, "the instance is off");
    assert_eq!(create_ticket(&cluster, &token, &record, "serial").await.status, 409);
}

#[tokio::test(flavor = "multi_thread")]
async fn ticket_opens_the_display_of_its_kind() {
    let (cluster, token) = cluster(&[]).await;
    let server = serve(&cluster).await;
    for (vdi, kind, other) in [("vnc", "vnc", "spice"), ("spice", "spice", "vnc")] {
        let video = json!({"video": {"model": "vga", "memory": 16384, "vdi": vdi}});
        let record = create(&cluster, &token, vdi, &video).await;
        let refused = create_ticket(&cluster, &token, &record, other).await;
        assert_eq!(refused.status, 409, "{}", refused.text);
        let created = create_ticket(&cluster, &token, &record, kind).await;
        let password = text(&created.body, "password");
        let helper = format!("/instances/{}/vdiconsolehelper", text(&record, "uuid"));
        let helper = cluster.call(&token, Method::GET, &helper, None).await.text;
        assert!(helper.contains(&format!("\npassword={password}\n")), "{helper}");
        let response = open(&server, &record, text(&created.body, "ticket"), None).await;
        assert_eq!(response.status(), 101);
        let mut socket = response.upgrade().await.unwrap();
        receive_until(&mut socket, b"RFB 003.008\n").await;
        send(&mut socket, b"RFB 003.008\n").await;
        receive_until(&mut socket, b"RFB 003.008\n").await;
        let object = ObjectRef::new(ObjectType::Instance, text(&record, "uuid"));
        let events = cluster.events(&object).await;
        assert!(events.iter().any(|event| event.message == "display request from REST API"));
        let stored = format!("{:?}", cluster.app.store.query("SELECT * FROM events", &[]).await.unwrap());
        assert!(!stored.contains(password), "the event of the request has no password");
    }
    let record = create(&cluster, &token, "www", &json!({})).await;
    for body in [json!({}), json!({"kind": "screen"}), json!({"kind": 7})] {
        let path = format!("/instances/{}/console-tickets", text(&record, "uuid"));
        assert_eq!(cluster.call(&token, Method::POST, &path, Some(body.clone())).await.status, 400, "{body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_foreign_origins_callers_and_tickets() {
    let (cluster, token) = cluster(&[]).await;
    cluster.create_namespace("other").await;
    let other = cluster.token("other").await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let neighbour = create(&cluster, &other, "neighbour", &json!({})).await;
    let server = serve(&cluster).await;
    assert_eq!(create_ticket(&cluster, &other, &record, "serial").await.status, 404, "of another namespace");
    let reader = scoped_token(&cluster, "ci", &["instance.read", "instance.write"]).await;
    assert_eq!(create_ticket(&cluster, &reader, &record, "serial").await.status, 403, "without the scope");
    let limited = scoped_token(&cluster, "ci", &["instance.console"]).await;
    let response = open(&server, &record, &ticket(&cluster, &limited, &record, "serial").await, None).await;
    assert_eq!(response.status(), 101);

    let own = ticket(&cluster, &token, &record, "serial").await;
    for origin in ["http://evil.example", "null", "http://127.0.0.1", &format!("{server}.evil.example")] {
        assert_eq!(open(&server, &record, &own, Some(origin)).await.status(), 403, "{origin}");
    }
    let response = open(&server, &record, &own, Some(&server)).await;
    assert_eq!(response.status(), 101, "a refused origin does not use the ticket");
    let own = ticket(&cluster, &token, &record, "serial").await;
    assert_eq!(open(&server, &neighbour, &own, None).await.status(), 401, "of another instance");
    for wrong in ["", "x", &"x".repeat(32), &token] {
        assert_eq!(open(&server, &record, wrong, None).await.status(), 401, "{wrong}");
    }
    // A ticket for a session is not one for a console, and the other way round.
    let login = cluster.call(&token, Method::POST, "/auth/login-tickets", None).await.body;
    assert_eq!(open(&server, &record, text(&login, "ticket"), None).await.status(), 401);
    let console = ticket(&cluster, &token, &record, "serial").await;
    let session = cluster.call("", Method::POST, "/auth/session", Some(json!({"ticket": console}))).await;
    assert_eq!(session.status, 401);

    let expired = ticket(&cluster, &token, &record, "serial").await;
    let mut tx = cluster.app.store.begin().await.unwrap();
    tx.execute("UPDATE tickets SET expires = expires - 31", &[]).await.unwrap();
    tx.finish(Ok(()), &mut Retry::default()).await.unwrap().unwrap();
    assert_eq!(open(&server, &record, &expired, None).await.status(), 401);
    let revoked = ticket(&cluster, &token, &record, "serial").await;
    cluster.token("ci").await;
    assert_eq!(open(&server, &record, &revoked, None).await.status(), 401, "its key was replaced");
    let path = format!("/instances/{}/console-socket", text(&record, "uuid"));
    let plain = cluster.call(&token, Method::GET, &path, None).await;
    assert_eq!(plain.status, 400, "not a WebSocket");
}

#[tokio::test(flavor = "multi_thread")]
async fn client_uses_a_ticket_once_and_only_in_its_namespace() {
    let (cluster, token) = cluster(&[]).await;
    cluster.create_namespace("other").await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let server = serve(&cluster).await;
    let clients = ["ci", "other"].map(|namespace| {
        let key = Secret::new(format!("the secret of {namespace}"));
        Client::new(Credentials { namespace: namespace.into(), key, apiurl: server.clone() }).unwrap()
    });
    let administrator = cluster.token("system").await;
    for namespace in ["ci", "other"] {
        let body = json!({"key_name": "cli", "key": format!("the secret of {namespace}")});
        let path = format!("/auth/namespaces/{namespace}/keys");
        let added = cluster.call(&administrator, Method::POST, &path, Some(body)).await;
        assert_eq!(added.status, 200, "{}", added.text);
    }
    let [client, foreign] = clients;
    let id = text(&record, "uuid");
    let refused = foreign.create_console_ticket(id, ConsoleKind::Serial).await.unwrap_err();
    assert!(refused.is_not_found(), "{refused}");
    let ticket = client.create_console_ticket(id, ConsoleKind::Serial).await.unwrap().value().unwrap();
    let socket = client.open_console_socket(&ticket).await.unwrap();
    let (mut user, relayed) = tokio::io::duplex(64);
    let relaying = tokio::spawn(relay(socket, relayed, Role::Client));
    let mut received = Vec::new();
    while !received.ends_with(b"www login: ") {
        assert!(user.read_buf(&mut received).await.unwrap() > 0);
    }
    let reused = client.open_console_socket(&ticket).await.unwrap_err();
    assert!(matches!(&reused, Error::NotAllowed { message, .. } if message.contains("ticket")), "{reused}");
    let mut elsewhere = client.create_console_ticket(id, ConsoleKind::Serial).await.unwrap().value().unwrap();
    elsewhere.path = "@evil.example/".into();
    let refused = client.open_console_socket(&elsewhere).await.unwrap_err();
    assert!(matches!(refused, Error::UnexpectedResponse { .. }), "{refused}");
    let off = cluster.call(&token, Method::POST, &format!("/instances/{id}/poweroff"), None).await;
    assert_eq!(off.status, 200, "{}", off.text);
    assert_eq!(relaying.await.unwrap(), RelayEnd::Closed);
}

/// Returns the token of a browser session of `ci` that ends in some seconds.
async fn short_session(cluster: &Cluster, seconds: u64) -> String {
    let nonce = "SELECT nonce FROM namespace_keys WHERE namespace = 'ci' AND name = 'test'";
    let nonce: String = cluster.app.store.query(nonce, &[]).await.unwrap()[0].scalar().unwrap();
    let subject = TokenSubject { namespace: "ci", key: "test", nonce: &nonce, scopes: None };
    cluster.app.tokens.create_session(unix_seconds(), unix_seconds() + seconds, subject)
}

#[tokio::test(flavor = "multi_thread")]
async fn consoles_end_with_the_session_and_the_key_that_opened_them() {
    let (cluster, token) = cluster(&[]).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let server = serve(&cluster).await;
    let open_socket = async |token: &str| {
        let ticket = ticket(&cluster, token, &record, "serial").await;
        let response = open(&server, &record, &ticket, None).await;
        assert_eq!(response.status(), 101);
        let mut socket = response.upgrade().await.unwrap();
        receive_until(&mut socket, b"www login: ").await;
        socket
    };
    let open_plain = async |token: &str| {
        let request =
            reqwest::Client::new().get(format!("{server}/instances/{}/console", text(&record, "uuid")));
        let request = request.header("connection", "Upgrade").header("upgrade", "muster-console");
        let response = request.bearer_auth(token).send().await.unwrap();
        assert_eq!(response.status(), 101);
        let mut stream = response.upgrade().await.unwrap();
        assert!(stream.read(&mut [0; 256]).await.unwrap() > 0);
        stream
    };
    let session = short_session(&cluster, 20).await;
    let (mut of_session, mut plain_of_session) = (open_socket(&session).await, open_plain(&session).await);
    let (mut of_key, mut plain_of_key) = (open_socket(&token).await, open_plain(&token).await);
    // As for a request that a daemon of an earlier release has forwarded.
    let without_nonce = Caller { namespace: "ci".into(), key_name: "test".into(), nonce: None, ..caller() };
    let mut without_nonce = pin!(register(&cluster.app, &without_nonce).ended());
    tokio::time::timeout(TIMEOUT, async {
        while receive(&mut of_session).await.is_some() {}
        while plain_of_session.read(&mut [0; 256]).await.is_ok_and(|size| size > 0) {}
    })
    .await
    .expect("the consoles of the session end");
    send(&mut of_key, b"still open").await;
    receive_until(&mut of_key, b"still open").await;
    assert!(without_nonce.as_mut().now_or_never().is_none());

    objects::key::delete(&cluster.app, &caller(), "ci", "test").await.unwrap();
    tokio::time::timeout(TIMEOUT, async {
        while receive(&mut of_key).await.is_some() {}
        while plain_of_key.read(&mut [0; 256]).await.is_ok_and(|size| size > 0) {}
        without_nonce.await;
    })
    .await
    .expect("the consoles of the key end");
}

#[tokio::test(flavor = "multi_thread")]
async fn ticket_runs_a_command_with_a_terminal() {
    let (cluster, token) = cluster(&[]).await;
    let server = serve(&cluster).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let path = format!("/instances/{}", text(&record, "uuid"));
    muster_test_cluster::wait_for("the agent", async || {
        let record = cluster.call(&token, Method::GET, &path, None).await.body;
        (record["agent_state"] == "ready").then_some(())
    })
    .await;
    let tickets = format!("{path}/console-tickets");
    let terminal =
        json!({"kind": "terminal", "command_line": "top", "term": "dumb", "rows": 40, "columns": 100});
    let created = cluster.call(&token, Method::POST, &tickets, Some(terminal.clone())).await;
    assert_eq!((created.status.as_u16(), &created.body["password"]), (200, &Value::Null), "{}", created.text);
    let response = open(&server, &record, text(&created.body, "ticket"), None).await;
    assert_eq!(response.status(), 101);
    let mut socket = response.upgrade().await.unwrap();
    let greeting = b"top in dumb\r\n40 100\r\n";
    receive_until(
        &mut socket,
        &[&[0, 0, u8::try_from(greeting.len()).unwrap()], greeting.as_slice()].concat(),
    )
    .await;
    send(&mut socket, b"\x00\x00\x01\x03").await;
    receive_until(&mut socket, &[2, 0, 4, 0, 0, 0, 130]).await;
    assert_eq!(receive(&mut socket).await, None, "the session has ended");

    for (body, status) in [
        (json!({"kind": "terminal"}), 400),
        (json!({"kind": "terminal", "command_line": ""}), 400),
        (json!({"kind": "terminal", "command_line": "top", "term": "a b"}), 400),
        (json!({"kind": "serial", "command_line": "top"}), 400),
    ] {
        let response = cluster.call(&token, Method::POST, &tickets, Some(body.clone())).await;
        assert_eq!(response.status, status, "{body}: {}", response.text);
    }
    for (scopes, status) in [
        (["instance.console", "instance.read"], 403),
        (["instance.execute", "instance.read"], 403),
        (["instance.console", "instance.execute"], 200),
    ] {
        let limited = scoped_token(&cluster, "ci", &scopes).await;
        let response = cluster.call(&limited, Method::POST, &tickets, Some(terminal.clone())).await;
        assert_eq!(response.status, status, "{scopes:?}: {}", response.text);
    }
}
