//! Login, and the lifetime of tokens.

use axum::http::Method;
use muster_control::objects;
use muster_test_cluster::{Cluster, ORIGIN, caller};
use muster_types::object::ObjectRef;
use serde_json::json;

async fn error(cluster: &Cluster, token: &str, path: &str) -> (u16, String) {
    let response = cluster.call(token, Method::GET, path, None).await;
    (response.status.as_u16(), response.body["error"].as_str().unwrap_or_default().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn login_returns_token_or_names_the_error() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("system").await;
    let path = "/auth/namespaces/ci/keys";
    let added =
        cluster.call(&token, Method::POST, path, Some(json!({"key_name": "mine", "key": "hunter2"}))).await;
    assert_eq!(added.body, json!("mine"));
    let generated = cluster.call(&token, Method::POST, path, Some(json!({"key_name": "made"}))).await.body;
    for secret in ["hunter2", generated["key"].as_str().unwrap()] {
        let response =
            cluster.call("", Method::POST, "/auth", Some(json!({"namespace": "ci", "key": secret}))).await;
        assert_eq!(response.status, 200);
        assert_eq!(
            (&response.body["token_type"], &response.body["expires_in"]),
            (&json!("Bearer"), &json!(900))
        );
    }
    for (body, status, text) in [
        (json!({}), 400, "missing namespace in request"),
        (json!({"namespace": "ci"}), 400, "missing key in request"),
        (json!({"namespace": "ci", "key": 7}), 400, "key is not a string"),
        (json!({"namespace": 7, "key": "x"}), 400, "namespace: Not a valid string."),
        (json!({"namespace": "ci", "key": "x", "extra": 1}), 400, "extra: not declared by this endpoint"),
        (json!({"namespace": "nope", "key": "x"}), 404, "namespace not found"),
        (json!({"namespace": "ci", "key": "wrong"}), 401, "unauthorized"),
        (json!({"namespace": "ci", "key": ""}), 401, "unauthorized"),
        (json!({"namespace": "ci", "key": "sfk_lookalike"}), 401, "unauthorized"),
        // A key of another namespace is not accepted.
        (json!({"namespace": "system", "key": "hunter2"}), 401, "unauthorized"),
    ] {
        let response = cluster.call("", Method::POST, "/auth", Some(body.clone())).await;
        assert_eq!((response.status.as_u16(), &response.body["error"]), (status, &json!(text)), "{body}");
    }
    let messages = cluster.messages(&ObjectRef::namespace("ci")).await;
    assert_eq!(messages.iter().filter(|m| *m == "token created from key").count(), 2);
    assert_eq!(messages.iter().filter(|m| *m == "attempt to use incorrect namespace key").count(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_requests_without_valid_token() {
    let cluster = Cluster::new().await;
    let missing = "Missing Authorization Header";
    assert_eq!(error(&cluster, "", "/auth/namespaces").await, (401, missing.into()));
    assert_eq!(
        error(&cluster, "x.y.z", "/auth/namespaces").await,
        (401, "invalid JWT in Authorization header".into())
    );
    let expired = cluster.app.tokens.create(1000, "system", "deploy", "x", None);
    assert_eq!(error(&cluster, &expired, "/auth/namespaces").await, (401, "Signature has expired".into()));
    for (header, text) in [
        (
            "Basic abc",
            "Missing 'Bearer' type in 'Authorization' header. Expected 'Authorization: Bearer <JWT>'",
        ),
        ("Bearer", "Bad Authorization header. Expected 'Authorization: Bearer <JWT>'"),
        ("Bearer a b", "Bad Authorization header. Expected 'Authorization: Bearer <JWT>'"),
    ] {
        let request = axum::http::Request::get("/nodes").header("authorization", header);
        let response = cluster.request(request.body(axum::body::Body::empty()).unwrap()).await;
        assert_eq!((response.status.as_u16(), &response.body["error"]), (401, &json!(text)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn revokes_token_with_its_key_or_namespace() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let revoked = (401, String::new());

    let token = cluster.token("ci").await;
    assert_eq!(error(&cluster, &token, "/auth/namespaces").await.0, 200);
    let second = cluster.token("ci").await;
    assert_eq!(error(&cluster, &token, "/auth/namespaces").await, revoked, "the key was rotated");
    assert_eq!(error(&cluster, &second, "/auth/namespaces").await.0, 200);
    objects::key::delete(&cluster.app, &caller(), "ci", "test").await.unwrap();
    assert_eq!(error(&cluster, &second, "/auth/namespaces").await, revoked, "the key was deleted");

    let third = cluster.token("ci").await;
    objects::namespace::delete(&cluster.app, &caller(), "ci").await.unwrap();
    assert_eq!(error(&cluster, &third, "/auth/namespaces").await, revoked, "the namespace was deleted");
    let messages = cluster.messages(&ObjectRef::namespace("ci")).await;
    for expected in [
        "JWT token has incorrect nonce",
        "JWT token uses non-existent key",
        "JWT token is for deleted namespace",
    ] {
        assert!(messages.iter().any(|m| m == expected), "{expected}: {messages:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_key_fails_immediately_and_is_deleted_after_grace() {
    let cluster = Cluster::with(&[("NAMESPACE_KEY_REAP_GRACE", "60"), ("CLEANER_DELAY", "0")], None).await;
    let app = &cluster.app;
    cluster.create_namespace("ci").await;
    let now = muster_types::time::now();
    let create_key = async |name: &str, expiry: f64| cluster.expiring_key("ci", name, expiry).await;
    let valid = create_key("lives", now + 3600.0).await;
    let recently_expired = create_key("young", now - 1.0).await;
    create_key("old", now - 61.0).await;
    assert!(objects::key::log_in(app, "ci", &valid, ORIGIN).await.is_ok());
    assert!(objects::key::log_in(app, "ci", &recently_expired, ORIGIN).await.is_err());
    assert_eq!(objects::key::list(app, &caller(), "ci").await.unwrap(), ["lives"]);

    assert_eq!(muster_control::reconcile::key_sweep::run(app).await.unwrap(), 1);
    muster_control::reconcile::cleaner::run(app).await.unwrap();
    let remaining = muster_store::keys::of_namespace(&*app.store, "ci", 10).await.unwrap();
    let mut names: Vec<_> = remaining.into_iter().map(|key| key.name).collect();
    names.sort_unstable();
    assert_eq!(names, ["lives", "young"], "only the key past its grace period is deleted");
    let messages = cluster.messages(&ObjectRef::namespace("ci")).await;
    assert!(messages.iter().any(|m| m == "expired key deleted"));
}

#[tokio::test(flavor = "multi_thread")]
async fn zero_grace_disables_key_sweep() {
    let cluster = Cluster::with(&[("NAMESPACE_KEY_REAP_GRACE", "0")], None).await;
    cluster.expiring_key("system", "old", 1.0).await;
    assert_eq!(muster_control::reconcile::key_sweep::run(&cluster.app).await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_contain_no_secrets() {
    let cluster = Cluster::with(&[("API_REQUEST_EVENTS_FOR_READS", "true")], None).await;
    let token = cluster.token("system").await;
    let key = json!({"key_name": "k", "key": "a very particular secret"});
    cluster.call(&token, Method::POST, "/auth/namespaces/system/keys", Some(key)).await;
    let login = json!({"namespace": "system", "key": "a very particular secret"});
    let login_response = cluster.call("", Method::POST, "/auth", Some(login)).await;
    let query = "/auth/namespaces?key=a%20very%20particular%20secret";
    cluster.call(&token, Method::GET, query, None).await;
    // A login sent to an unknown path, as with a wrong base URL.
    let misdirected = json!({"namespace": "system", "key": "a very particular secret"});
    cluster.call("", Method::POST, "/api/auth", Some(misdirected)).await;
    cluster.events(&ObjectRef::namespace("system")).await;
    let rows = cluster.app.store.query("SELECT message, extra FROM events", &[]).await.unwrap();
    assert!(rows.len() > 10);
    let hashes = cluster.app.store.query("SELECT hash, nonce FROM namespace_keys", &[]).await.unwrap();
    let mut forbidden = vec![
        "particular".to_owned(),
        token,
        login_response.body["access_token"].as_str().unwrap().to_owned(),
    ];
    for row in hashes {
        let (hash, nonce) = row.read::<(String, String)>().unwrap();
        forbidden.extend([hash, nonce]);
    }
    for row in rows {
        let (message, extra) = row.read::<(String, String)>().unwrap();
        let text = format!("{message} {extra}");
        assert!(!forbidden.iter().any(|secret| text.contains(secret.as_str())), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_login_flood_does_not_delay_other_requests() {
    let cluster = std::sync::Arc::new(Cluster::new().await);
    let token = cluster.token("system").await;
    let logins: Vec<_> = (0..300)
        .map(|n| {
            let cluster = std::sync::Arc::clone(&cluster);
            tokio::spawn(async move {
                let body = json!({"namespace": "system", "key": format!("wrong {n}")});
                cluster.call("", Method::POST, "/auth", Some(body)).await.status.as_u16()
            })
        })
        .collect();
    let started = std::time::Instant::now();
    for _ in 0..20 {
        assert_eq!(cluster.call(&token, Method::GET, "/auth/namespaces", None).await.status, 200);
    }
    let reads_took = started.elapsed();
    let mut rejected = 0;
    for login in logins {
        match login.await.unwrap() {
            401 => {}
            429 => rejected += 1,
            other => panic!("{other}"),
        }
    }
    // 300 sequential logins take seconds; those beyond the queue are rejected.
    assert!(rejected > 0, "the queue is bounded");
    assert!(reads_took < started.elapsed() / 2, "20 reads took {reads_took:?} of {:?}", started.elapsed());
}
