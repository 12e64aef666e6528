//! Logging in, tokens, and what ends them.

use axum::http::Method;
use muster_control::objects;
use muster_test_cluster::{Cluster, caller};
use muster_types::object::ObjectRef;
use serde_json::json;

async fn error(cluster: &Cluster, token: &str, path: &str) -> (u16, String) {
    let answer = cluster.call(token, Method::GET, path, None).await;
    (answer.status.as_u16(), answer.body["error"].as_str().unwrap_or_default().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_answers_a_token_and_refusals_name_the_reason() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("system").await;
    let path = "/auth/namespaces/ci/keys";
    let added =
        cluster.call(&token, Method::POST, path, Some(json!({"key_name": "mine", "key": "hunter2"}))).await;
    assert_eq!(added.body, json!("mine"));
    let generated = cluster.call(&token, Method::POST, path, Some(json!({"key_name": "made"}))).await.body;
    for secret in ["hunter2", generated["key"].as_str().unwrap()] {
        let answer =
            cluster.call("", Method::POST, "/auth", Some(json!({"namespace": "ci", "key": secret}))).await;
        assert_eq!(answer.status, 200);
        assert_eq!((&answer.body["token_type"], &answer.body["expires_in"]), (&json!("Bearer"), &json!(900)));
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
        // Another namespace's secret is no secret here.
        (json!({"namespace": "system", "key": "hunter2"}), 401, "unauthorized"),
    ] {
        let answer = cluster.call("", Method::POST, "/auth", Some(body.clone())).await;
        assert_eq!((answer.status.as_u16(), &answer.body["error"]), (status, &json!(text)), "{body}");
    }
    let messages = cluster.messages(&ObjectRef::namespace("ci")).await;
    assert_eq!(messages.iter().filter(|m| *m == "token created from key").count(), 2);
    assert_eq!(messages.iter().filter(|m| *m == "attempt to use incorrect namespace key").count(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_good_token_is_told_why() {
    let cluster = Cluster::new().await;
    let missing = "Missing Authorization Header";
    assert_eq!(error(&cluster, "", "/auth/namespaces").await, (401, missing.into()));
    assert_eq!(
        error(&cluster, "x.y.z", "/auth/namespaces").await,
        (401, "invalid JWT in Authorization header".into())
    );
    let old = cluster.app.tokens.create(1000, "system", "deploy", "x", None);
    assert_eq!(error(&cluster, &old, "/auth/namespaces").await, (401, "Signature has expired".into()));
    for (header, text) in [
        (
            "Basic abc",
            "Missing 'Bearer' type in 'Authorization' header. Expected 'Authorization: Bearer <JWT>'",
        ),
        ("Bearer", "Bad Authorization header. Expected 'Authorization: Bearer <JWT>'"),
        ("Bearer a b", "Bad Authorization header. Expected 'Authorization: Bearer <JWT>'"),
    ] {
        let request = axum::http::Request::get("/nodes").header("authorization", header);
        let answer = cluster.request(request.body(axum::body::Body::empty()).unwrap()).await;
        assert_eq!((answer.status.as_u16(), &answer.body["error"]), (401, &json!(text)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_dies_with_its_key_its_key_s_change_and_its_namespace() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let gone = (401, String::new());

    let token = cluster.token("ci").await;
    assert_eq!(error(&cluster, &token, "/auth/namespaces").await.0, 200);
    let second = cluster.token("ci").await;
    assert_eq!(error(&cluster, &token, "/auth/namespaces").await, gone, "the key was rotated");
    assert_eq!(error(&cluster, &second, "/auth/namespaces").await.0, 200);
    objects::key::delete(&cluster.app, &caller(), "ci", "test").await.unwrap();
    assert_eq!(error(&cluster, &second, "/auth/namespaces").await, gone, "the key was deleted");

    let third = cluster.token("ci").await;
    objects::namespace::delete(&cluster.app, &caller(), "ci").await.unwrap();
    assert_eq!(error(&cluster, &third, "/auth/namespaces").await, gone, "the namespace was deleted");
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
async fn an_expired_key_stops_working_at_once_and_is_swept_after_its_grace() {
    let cluster = Cluster::with(&[("NAMESPACE_KEY_REAP_GRACE", "60"), ("CLEANER_DELAY", "0")], None).await;
    let app = &cluster.app;
    cluster.create_namespace("ci").await;
    let now = muster_types::time::now();
    let put = async |name: &str, expiry: f64| cluster.expiring_key("ci", name, expiry).await;
    let lives = put("lives", now + 3600.0).await;
    let young = put("young", now - 1.0).await;
    put("old", now - 61.0).await;
    assert!(objects::key::log_in(app, "ci", &lives, "r").await.is_ok());
    assert!(objects::key::log_in(app, "ci", &young, "r").await.is_err());
    assert_eq!(objects::key::list(app, &caller(), "ci").await.unwrap(), ["lives"]);

    assert_eq!(muster_control::reconcile::key_sweep::run(app).await.unwrap(), 1);
    muster_control::reconcile::cleaner::run(app).await.unwrap();
    let left = muster_store::keys::of_namespace(&*app.store, "ci", 10).await.unwrap();
    let mut names: Vec<_> = left.into_iter().map(|key| key.name).collect();
    names.sort_unstable();
    assert_eq!(names, ["lives", "young"], "only the one past its grace is gone");
    let messages = cluster.messages(&ObjectRef::namespace("ci")).await;
    assert!(messages.iter().any(|m| m == "expired key deleted"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grace_of_zero_disables_the_sweep() {
    let cluster = Cluster::with(&[("NAMESPACE_KEY_REAP_GRACE", "0")], None).await;
    cluster.expiring_key("system", "old", 1.0).await;
    assert_eq!(muster_control::reconcile::key_sweep::run(&cluster.app).await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_secret_token_hash_or_nonce_is_in_any_event() {
    let cluster = Cluster::with(&[("API_REQUEST_EVENTS_FOR_READS", "true")], None).await;
    let token = cluster.token("system").await;
    let key = json!({"key_name": "k", "key": "a very particular secret"});
    cluster.call(&token, Method::POST, "/auth/namespaces/system/keys", Some(key)).await;
    let login = json!({"namespace": "system", "key": "a very particular secret"});
    let made = cluster.call("", Method::POST, "/auth", Some(login)).await;
    let query = "/auth/namespaces?key=a%20very%20particular%20secret";
    cluster.call(&token, Method::GET, query, None).await;
    // A login that went astray, as with a wrong base URL.
    let astray = json!({"namespace": "system", "key": "a very particular secret"});
    cluster.call("", Method::POST, "/api/auth", Some(astray)).await;
    cluster.events(&ObjectRef::namespace("system")).await;
    let rows = cluster.app.store.query("SELECT message, extra FROM events", &[]).await.unwrap();
    assert!(rows.len() > 10);
    let hashes = cluster.app.store.query("SELECT hash, nonce FROM namespace_keys", &[]).await.unwrap();
    let mut forbidden =
        vec!["particular".to_owned(), token, made.body["access_token"].as_str().unwrap().to_owned()];
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
async fn a_flood_of_bad_logins_does_not_hold_up_other_calls() {
    let cluster = std::sync::Arc::new(Cluster::new().await);
    let token = cluster.token("system").await;
    let flood: Vec<_> = (0..300)
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
    let others = started.elapsed();
    let mut refused = 0;
    for login in flood {
        match login.await.unwrap() {
            401 => {}
            503 => refused += 1,
            other => panic!("{other}"),
        }
    }
    // 300 logins one after the other take seconds; those beyond the queue are told to come back.
    assert!(refused > 0, "the queue is bounded");
    assert!(others < started.elapsed() / 2, "20 reads took {others:?} of {:?}", started.elapsed());
}
