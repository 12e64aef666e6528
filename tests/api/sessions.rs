//! Browser sessions: tickets, the cookie, and requests that other pages cause.

use axum::body::Body;
use axum::http::{Method, Request};
use muster_control::objects;
use muster_store::Retry;
use muster_test_cluster::{ApiResponse, Cluster, ORIGIN, caller};
use muster_types::object::ObjectRef;
use serde_json::{Value, json};

use crate::scopes::scoped_token;

const HOST: &str = "cloud.example:13000";
const OWN_ORIGIN: &str = "http://cloud.example:13000";

/// Returns a new ticket of a caller.
async fn ticket(cluster: &Cluster, token: &str) -> String {
    let response = cluster.call(token, Method::POST, "/auth/login-tickets", None).await;
    assert_eq!(response.status, 200, "{}", response.text);
    let expires = response.body["expires"].as_f64().unwrap() - muster_types::time::now();
    assert!((30.0..=60.0).contains(&expires), "{expires}");
    response.body["ticket"].as_str().unwrap().to_owned()
}

async fn open(cluster: &Cluster, body: Value) -> ApiResponse {
    cluster.call("", Method::POST, "/auth/session", Some(body)).await
}

/// Opens a session and returns its token.
async fn session(cluster: &Cluster, token: &str) -> String {
    let ticket = ticket(cluster, token).await;
    let response = open(cluster, json!({"ticket": ticket})).await;
    assert_eq!(response.status, 200, "{}", response.text);
    cookie_token(&response)
}

/// Returns the token of the cookie that a response sets.
fn cookie_token(response: &ApiResponse) -> String {
    let cookie = response.headers["set-cookie"].to_str().unwrap();
    let (token, attributes) = cookie.strip_prefix("muster_session=").unwrap().split_once("; ").unwrap();
    let mut attributes: Vec<&str> = attributes.split("; ").collect();
    attributes.retain(|attribute| !attribute.starts_with("Max-Age="));
    assert_eq!(attributes, ["Path=/", "HttpOnly", "SameSite=Strict"], "{cookie}");
    assert!(!response.text.contains(token), "a script could read it");
    token.to_owned()
}

/// Calls the API as a browser with a session does.
async fn browse(
    cluster: &Cluster,
    session: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
) -> ApiResponse {
    let mut request = Request::builder().method(method).uri(path).header("host", HOST);
    request = request.header("cookie", format!("theme=dark; muster_session={session}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    cluster.request(request.body(Body::empty()).unwrap()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn ticket_opens_a_session_once() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    let ticket = ticket(&cluster, &token).await;
    let opened = open(&cluster, json!({"ticket": ticket})).await;
    assert_eq!(opened.status, 200, "{}", opened.text);
    assert_eq!(opened.body["namespace"], "ci");
    let lifetime = opened.body["expires"].as_f64().unwrap() - muster_types::time::now();
    assert!((43000.0..=43200.0).contains(&lifetime), "{lifetime}");
    let session = cookie_token(&opened);
    let current = browse(&cluster, &session, "GET", "/auth/session", &[]).await;
    assert_eq!(current.body, opened.body);
    let expected =
        json!({"namespace": "ci", "key_name": "test", "scopes": null, "expires": opened.body["expires"]});
    assert_eq!(current.body, expected);
    // The ticket of a namespace opens no other namespace.
    assert_eq!(browse(&cluster, &session, "GET", "/auth/namespaces/system", &[]).await.status, 404);

    let unknown = "x".repeat(32);
    for ticket in [ticket.as_str(), &unknown, "", "short", &token] {
        let response = open(&cluster, json!({"ticket": ticket})).await;
        assert_eq!(response.status, 401, "{ticket}: {}", response.text);
        assert!(!response.headers.contains_key("set-cookie"));
    }
    let stored = cluster.count_rows("tickets", "1 = 1").await;
    assert_eq!(stored, 0, "a used ticket is removed");
    let messages = cluster.messages(&ObjectRef::namespace("ci")).await;
    for expected in ["login ticket created", "token created from login ticket"] {
        assert_eq!(messages.iter().filter(|message| *message == expected).count(), 1, "{expected}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_uses_of_a_ticket_open_one_session() {
    let cluster = std::sync::Arc::new(Cluster::new().await);
    let token = cluster.token("system").await;
    let ticket = ticket(&cluster, &token).await;
    let uses: Vec<_> = (0..20)
        .map(|_| {
            let (cluster, body) = (std::sync::Arc::clone(&cluster), json!({"ticket": ticket}));
            tokio::spawn(async move { open(&cluster, body).await.status.as_u16() })
        })
        .collect();
    let mut opened = 0;
    for status in uses {
        match status.await.unwrap() {
            200 => opened += 1,
            401 => {}
            other => panic!("{other}"),
        }
    }
    assert_eq!(opened, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_ticket_and_ticket_of_a_replaced_key_are_refused() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    let expired = ticket(&cluster, &token).await;
    let mut tx = cluster.app.store.begin().await.unwrap();
    tx.execute("UPDATE tickets SET expires = expires - 61", &[]).await.unwrap();
    tx.finish(Ok(()), &mut Retry::default()).await.unwrap().unwrap();
    assert_eq!(open(&cluster, json!({"ticket": expired})).await.status, 401);

    let revoked = ticket(&cluster, &token).await;
    let replaced = cluster.token("ci").await;
    assert_eq!(open(&cluster, json!({"ticket": revoked})).await.status, 401, "the key was replaced");
    let revoked = ticket(&cluster, &replaced).await;
    objects::key::delete(&cluster.app, &caller(), "ci", "test").await.unwrap();
    assert_eq!(open(&cluster, json!({"ticket": revoked})).await.status, 401, "the key was deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn unused_tickets_of_a_key_are_limited() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    for _ in 0..100 {
        ticket(&cluster, &token).await;
    }
    let response = cluster.call(&token, Method::POST, "/auth/login-tickets", None).await;
    assert_eq!(response.status, 429, "{}", response.text);
    assert!(response.headers.contains_key("retry-after"));
    let other = scoped_token(&cluster, "system", &["*"]).await;
    ticket(&cluster, &other).await;
    let mut tx = cluster.app.store.begin().await.unwrap();
    tx.execute("UPDATE tickets SET expires = expires - 1000", &[]).await.unwrap();
    tx.finish(Ok(()), &mut Retry::default()).await.unwrap().unwrap();
    ticket(&cluster, &token).await;
    muster_control::reconcile::cleaner::run(&cluster.app).await.unwrap();
    assert_eq!(cluster.count_rows("tickets", "1 = 1").await, 1, "expired tickets are removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn key_opens_a_session_and_errors_name_the_reason() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let secret = cluster.key(&caller(), "ci", "mine").await;
    let opened = open(&cluster, json!({"namespace": "ci", "key": secret.expose()})).await;
    assert_eq!((opened.status.as_u16(), &opened.body["key_name"]), (200, &json!("mine")), "{}", opened.text);
    let session = cookie_token(&opened);
    assert_eq!(browse(&cluster, &session, "GET", "/auth/namespaces/ci", &[]).await.status, 200);
    for (body, status) in [
        (json!({}), 400),
        (json!({"namespace": "ci"}), 400),
        (json!({"namespace": "nope", "key": "x"}), 404),
        (json!({"namespace": "ci", "key": "wrong"}), 401),
        (json!({"namespace": "system", "key": secret.expose()}), 401),
    ] {
        let response = open(&cluster, body.clone()).await;
        assert_eq!(response.status, status, "{body}: {}", response.text);
        assert!(!response.headers.contains_key("set-cookie"));
    }
    let in_url = format!("/auth/session?ticket={}", ticket(&cluster, &cluster.token("ci").await).await);
    let response = cluster.call("", Method::POST, &in_url, None).await;
    assert_eq!(response.status, 400, "{}", response.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn session_ends_with_its_key_and_with_the_session_before_it() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let first = session(&cluster, &cluster.token("ci").await).await;
    let ended = muster_types::time::now() + 3600.0;
    let expiring = cluster.expiring_key("ci", "short", ended).await;
    let opened = open(&cluster, json!({"namespace": "ci", "key": expiring.expose()})).await;
    assert!((opened.body["expires"].as_f64().unwrap() - ended).abs() < 2.0, "{}", opened.text);
    // A session that is opened from a session does not prolong it.
    let parent = cookie_token(&opened);
    let child = browse(&cluster, &parent, "POST", "/auth/login-tickets", &[("origin", OWN_ORIGIN)]).await;
    let child = open(&cluster, json!({"ticket": child.body["ticket"]})).await;
    assert_eq!(child.body["expires"], opened.body["expires"]);

    assert_eq!(browse(&cluster, &first, "GET", "/auth/session", &[]).await.status, 200);
    cluster.token("ci").await;
    assert_eq!(
        browse(&cluster, &first, "GET", "/auth/session", &[]).await.status,
        401,
        "the key was replaced"
    );
    objects::key::delete(&cluster.app, &caller(), "ci", "short").await.unwrap();
    assert_eq!(
        browse(&cluster, &parent, "GET", "/auth/session", &[]).await.status,
        401,
        "the key was deleted"
    );
    for bad in ["", "x.y.z"] {
        assert_eq!(browse(&cluster, bad, "GET", "/auth/session", &[]).await.status, 401, "{bad}");
    }
    let cleared = cluster.call("", Method::DELETE, "/auth/session", None).await;
    let cookie = cleared.headers["set-cookie"].to_str().unwrap();
    assert!(cookie.starts_with("muster_session=; Path=/; Max-Age=0;"), "{cookie}");
}

#[tokio::test(flavor = "multi_thread")]
async fn session_has_the_scopes_of_the_ticket_creator() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let token = scoped_token(&cluster, "ci", &["auth.read"]).await;
    let session = session(&cluster, &token).await;
    let current = browse(&cluster, &session, "GET", "/auth/session", &[]).await;
    assert_eq!(current.body["scopes"], json!(["auth.read"]));
    let own = &[("origin", OWN_ORIGIN)];
    assert_eq!(browse(&cluster, &session, "GET", "/auth/namespaces/ci", own).await.status, 200);
    assert_eq!(browse(&cluster, &session, "POST", "/networks", own).await.status, 403);
    let many: Vec<String> = (0..500).map(|n| format!("family-{n}.read")).collect();
    let token = scoped_token(&cluster, "ci", &many).await;
    let ticket = ticket(&cluster, &token).await;
    assert_eq!(open(&cluster, json!({"ticket": ticket})).await.status, 409, "the cookie would be too large");
}

#[tokio::test(flavor = "multi_thread")]
async fn other_pages_cannot_use_the_cookie() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    let session = session(&cluster, &token).await;
    let path = "/auth/namespaces/ci/keys";
    let foreign: &[&[(&str, &str)]] = &[
        &[],
        &[("origin", "http://evil.example")],
        &[("origin", "null")],
        &[("origin", "http://cloud.example:13001")],
        // A header that a page can set does not help.
        &[("referer", "http://cloud.example:13000/ui/"), ("x-requested-with", "XMLHttpRequest")],
    ];
    for headers in foreign {
        for (method, path) in [("POST", path), ("DELETE", "/auth/namespaces/ci/keys/test"), ("PUT", path)] {
            let response = browse(&cluster, &session, method, path, headers).await;
            assert_eq!(response.status, 403, "{method} {headers:?}: {}", response.text);
        }
        let upgrade = [*headers, &[("connection", "Upgrade"), ("upgrade", "websocket")]].concat();
        let response = browse(&cluster, &session, "GET", "/auth/session", &upgrade).await;
        assert_eq!(response.status, 403, "{upgrade:?}");
        assert_eq!(browse(&cluster, &session, "GET", "/auth/session", headers).await.status, 200);
    }
    assert_eq!(browse(&cluster, &session, "GET", "/auth/namespaces/ci/keys/test", &[]).await.status, 200);
    for origin in [OWN_ORIGIN, "https://cloud.example:13000"] {
        let headers = [("origin", origin)];
        assert_eq!(browse(&cluster, &session, "POST", "/auth/login-tickets", &headers).await.status, 200);
    }
    // A bearer token is not sent by browsers on their own.
    let authorization = format!("Bearer {token}");
    let headers = [("authorization", authorization.as_str()), ("origin", "http://evil.example")];
    assert_eq!(browse(&cluster, "", "POST", "/auth/login-tickets", &headers).await.status, 200);
    // A page cannot log its visitor in to the account of an attacker, or out.
    let ticket = ticket(&cluster, &token).await;
    for (method, body) in [("POST", json!({"ticket": ticket}).to_string()), ("DELETE", String::new())] {
        let request = Request::builder().method(method).uri("/auth/session").header("host", HOST);
        let request = request.header("origin", "http://evil.example").header("content-length", body.len());
        assert_eq!(cluster.request(request.body(Body::from(body)).unwrap()).await.status, 403, "{method}");
    }
    assert_eq!(open(&cluster, json!({"ticket": ticket})).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn cookie_is_secure_with_tls() {
    let settings = [("TLS_CERTIFICATE", "/certificate.pem"), ("TLS_PRIVATE_KEY", "/key.pem")];
    let cluster = Cluster::with(&settings, None).await;
    let token = cluster.token("system").await;
    let opened = open(&cluster, json!({"ticket": ticket(&cluster, &token).await})).await;
    assert!(opened.headers["set-cookie"].to_str().unwrap().ends_with("; SameSite=Strict; Secure"));
}

#[tokio::test(flavor = "multi_thread")]
async fn neither_events_nor_the_database_contain_tickets_or_sessions() {
    let cluster = Cluster::with(&[("API_REQUEST_EVENTS_FOR_READS", "true")], None).await;
    let token = cluster.token("system").await;
    let unused = ticket(&cluster, &token).await;
    let used = ticket(&cluster, &token).await;
    let session = cookie_token(&open(&cluster, json!({"ticket": used})).await);
    open(&cluster, json!({"ticket": used})).await;
    cluster.call("", Method::POST, "/api/auth/session", Some(json!({"ticket": unused}))).await;
    browse(&cluster, &session, "GET", "/auth/namespaces", &[]).await;
    browse(&cluster, &session, "POST", "/auth/namespaces", &[]).await;
    cluster.events(&ObjectRef::namespace("system")).await;
    for table in ["events", "tickets"] {
        let rows = cluster.app.store.query(&format!("SELECT * FROM {table}"), &[]).await.unwrap();
        assert!(!rows.is_empty(), "{table}");
        let text = format!("{rows:?}");
        for secret in [&unused, &used, &session, &token] {
            assert!(!text.contains(secret.as_str()), "{table}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn operator_gets_a_ticket_of_the_first_key_while_it_exists() {
    let cluster = Cluster::new().await;
    let ticket = objects::session::create_first_ticket(&cluster.app).await.unwrap().unwrap().ticket;
    let opened = open(&cluster, json!({"ticket": ticket})).await;
    assert_eq!((&opened.body["namespace"], &opened.body["key_name"]), (&json!("system"), &json!("deploy")));
    objects::key::delete(&cluster.app, &caller(), "system", "deploy").await.unwrap();
    assert_eq!(objects::session::create_first_ticket(&cluster.app).await.unwrap(), None);
    let secret = cluster.key(&caller(), "system", "other").await;
    assert!(objects::key::log_in(&cluster.app, "system", &secret, ORIGIN).await.is_ok());
}
