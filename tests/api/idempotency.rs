//! `Idempotency-Key`: repeated requests are executed once.

use axum::body::Body;
use axum::http::{Method, Request};
use muster_control::reconcile::cleaner;
use muster_store::{Read as _, params, transaction};
use muster_test_cluster::{ApiResponse, Cluster, caller};
use muster_types::object::ObjectRef;
use serde_json::{Value, json};

use crate::scopes::scoped_token;

async fn post(cluster: &Cluster, token: &str, path: &str, key: &str, body: &Value) -> ApiResponse {
    let mut request = Request::builder().method(Method::POST).uri(path).header("idempotency-key", key);
    if !token.is_empty() {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let body = if body.is_null() { String::new() } else { body.to_string() };
    cluster.request(request.body(Body::from(body)).unwrap()).await
}

fn network(name: &str) -> Value {
    json!({"name": name, "netblock": "10.0.0.0/24", "provide_dhcp": true})
}

fn is_replayed(response: &ApiResponse) -> bool {
    response.headers.get("idempotency-replayed").is_some_and(|value| value == "true")
}

async fn count(cluster: &Cluster, token: &str) -> usize {
    cluster.call(token, Method::GET, "/networks", None).await.body.as_array().unwrap().len()
}

/// Changes the rows of all keys.
async fn update_keys(cluster: &Cluster, assignments: &str) {
    let sql = format!("UPDATE idempotency_keys SET {assignments}");
    let updated = transaction!(cluster.app.store, |tx| { Ok(tx.execute(&sql, &[]).await?) }).unwrap();
    assert!(updated > 0);
}

async fn tenant(cluster: &Cluster, name: &str) -> String {
    cluster.create_namespace(name).await;
    cluster.token(name).await
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_request_is_executed_once() {
    let mut cluster = Cluster::new().await;
    let token = tenant(&cluster, "ci").await;
    let first = post(&cluster, &token, "/networks", "k 1", &network("n")).await;
    assert_eq!(first.status, 200, "{}", first.text);
    assert!(!is_replayed(&first));
    let second = post(&cluster, &token, "/networks", "k 1", &network("n")).await;
    assert!(is_replayed(&second));
    assert_eq!((second.status, &second.text), (first.status, &first.text));
    assert_eq!(second.headers["content-type"], first.headers["content-type"]);
    assert_ne!(second.headers["x-request-id"], first.headers["x-request-id"]);
    assert_eq!(count(&cluster, &token).await, 1);
    // Another daemon on the same database knows the key, too.
    cluster.kill().await;
    cluster.start();
    let third = post(&cluster, &token, "/networks", "k 1", &network("n")).await;
    assert!(is_replayed(&third));
    assert_eq!((third.text, count(&cluster, &token).await), (first.text, 1));
    let other = post(&cluster, &token, "/networks", "k 2", &network("n")).await;
    assert!(!is_replayed(&other));
    assert_eq!(count(&cluster, &token).await, 2);
    cluster.settle_networks().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn key_belongs_to_one_request() {
    let cluster = Cluster::new().await;
    let token = tenant(&cluster, "ci").await;
    let first = post(&cluster, &token, "/networks", "k", &network("n")).await;
    let id = first.body["uuid"].as_str().unwrap();
    let route = format!("/networks/{id}/route");
    for (path, body) in
        [("/networks", network("m")), ("/networks?namespace=ci", network("n")), (route.as_str(), Value::Null)]
    {
        let response = post(&cluster, &token, path, "k", &body).await;
        assert_eq!(response.status, 422, "{path}: {}", response.text);
        let error = response.body["error"].as_str().unwrap();
        assert!(error.starts_with("Idempotency-Key: was used for another request"), "{error}");
    }
    assert_eq!(count(&cluster, &token).await, 1);
    cluster.settle_networks().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_that_failed_without_a_change_can_be_corrected() {
    let cluster = Cluster::new().await;
    let token = tenant(&cluster, "ci").await;
    let wrong = json!({"name": "n", "netblock": "10.0.0.0"});
    for _ in 0..2 {
        let response = post(&cluster, &token, "/networks", "k", &wrong).await;
        assert_eq!(response.status, 400);
        assert!(!is_replayed(&response));
    }
    assert_eq!(post(&cluster, &token, "/networks", "k", &network("n")).await.status, 200);
    assert!(is_replayed(&post(&cluster, &token, "/networks", "k", &network("n")).await));
    cluster.settle_networks().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_do_not_share_keys() {
    let cluster = Cluster::new().await;
    let (ci, other) = (tenant(&cluster, "ci").await, tenant(&cluster, "other").await);
    let own = post(&cluster, &ci, "/networks", "k", &network("n")).await;
    let foreign = post(&cluster, &other, "/networks", "k", &network("n")).await;
    assert!(!is_replayed(&foreign));
    assert_ne!(own.body["uuid"], foreign.body["uuid"]);
    // Another key of the same namespace, and the same key with another secret.
    let secret = cluster.key(&caller(), "ci", "second").await;
    let log_in = async |secret| {
        muster_control::objects::key::log_in(&cluster.app, "ci", secret, muster_test_cluster::ORIGIN)
            .await
            .unwrap()
    };
    let second = post(&cluster, &log_in(&secret).await, "/networks", "k", &network("n")).await;
    assert!(!is_replayed(&second));
    let secret = cluster.key(&caller(), "ci", "second").await;
    let replaced = post(&cluster, &log_in(&secret).await, "/networks", "k", &network("n")).await;
    assert!(!is_replayed(&replaced));
    assert_eq!((count(&cluster, &ci).await, count(&cluster, &other).await), (3, 1));
    cluster.settle_networks().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scopes_are_checked_before_a_response_is_repeated() {
    let cluster = Cluster::new().await;
    let token = tenant(&cluster, "ci").await;
    assert_eq!(post(&cluster, &token, "/networks", "k", &network("n")).await.status, 200);
    assert_eq!(post(&cluster, "", "/networks", "k", &network("n")).await.status, 401);
    let reader = scoped_token(&cluster, "ci", &["network.read"]).await;
    assert_eq!(post(&cluster, &reader, "/networks", "k", &network("n")).await.status, 403);
    cluster.settle_networks().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_many_concurrent_requests_is_executed() {
    let cluster = Cluster::new().await;
    let token = tenant(&cluster, "ci").await;
    let body = network("n");
    let calls = (0..20).map(|_| post(&cluster, &token, "/networks", "k", &body));
    let responses = futures_util::future::join_all(calls).await;
    for response in &responses {
        match response.status.as_u16() {
            200 => {}
            409 => {
                assert!(response.text.contains("the same request is running"), "{}", response.text);
                let seconds: u64 = response.headers["retry-after"].to_str().unwrap().parse().unwrap();
                assert!((1..=10).contains(&seconds), "{seconds}");
            }
            _ => panic!("{}", response.text),
        }
    }
    let executed = responses.iter().filter(|response| response.status == 200 && !is_replayed(response));
    assert_eq!(executed.count(), 1);
    assert_eq!(count(&cluster, &token).await, 1);
    cluster.settle_networks().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_of_a_lost_daemon_is_repeated_only_if_it_changed_nothing() {
    let cluster = Cluster::new().await;
    let token = tenant(&cluster, "ci").await;
    let repeat = async || post(&cluster, &token, "/networks", "k", &network("n")).await;
    let first = repeat().await;
    assert_eq!(first.status, 200);
    let id = first.headers["x-request-id"].to_str().unwrap();
    // Killed after the change, before the response was stored.
    update_keys(&cluster, "state = 'changed', response = '', leased_until = 0").await;
    let lost = repeat().await;
    assert_eq!(lost.status, 409);
    assert!(lost.text.contains("its response was lost") && lost.text.contains(id), "{}", lost.text);
    assert!(!lost.headers.contains_key("retry-after"), "retrying does not help");
    assert_eq!(count(&cluster, &token).await, 1);
    // Killed before the change: others wait until its lease expires.
    update_keys(&cluster, "state = 'running', leased_until = expires").await;
    let running = repeat().await;
    assert_eq!((running.status.as_u16(), running.headers.contains_key("retry-after")), (409, true));
    assert_eq!(count(&cluster, &token).await, 1);
    update_keys(&cluster, "leased_until = 0").await;
    let executed = repeat().await;
    assert_eq!(executed.status, 200);
    assert!(!is_replayed(&executed));
    assert_eq!(count(&cluster, &token).await, 2);
    assert!(is_replayed(&repeat().await));
    // A response that cannot be decrypted, for example after the seed of the cluster was replaced.
    update_keys(&cluster, "response = 'AAAA'").await;
    assert_eq!(repeat().await.status, 409);
    cluster.settle_networks().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stored_responses_do_not_reveal_secrets() {
    let cluster = Cluster::new().await;
    let system = cluster.token("system").await;
    let path = "/auth/namespaces/system/keys";
    let first = post(&cluster, &system, path, "k", &json!({"key_name": "generated"})).await;
    let secret = first.body["key"].as_str().unwrap();
    assert!(secret.starts_with("sfk_"), "{}", first.text);
    let second = post(&cluster, &system, path, "k", &json!({"key_name": "generated"})).await;
    assert!(is_replayed(&second));
    assert_eq!(second.body["key"], secret, "the secret is not lost with the first response");
    let sql = "SELECT response FROM idempotency_keys";
    let stored: Vec<String> = (&*cluster.app.store).fetch(sql, &[]).await.unwrap();
    assert_eq!(stored.len(), 1);
    assert!(stored[0].len() > 40 && !stored[0].contains(secret));
    for event in cluster.events(&ObjectRef::namespace("system")).await {
        assert!(!json!(event.extra).to_string().contains(secret));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_invalid_keys_and_requests_that_cannot_be_repeated() {
    let cluster = Cluster::new().await;
    let token = tenant(&cluster, "ci").await;
    for key in ["", &"x".repeat(256), "tab\tkey"] {
        let response = post(&cluster, &token, "/networks", key, &network("n")).await;
        assert_eq!(response.status, 400, "{key:?}");
        let error = response.body["error"].as_str().unwrap();
        assert_eq!(error, "Idempotency-Key: must have 1 to 255 printable ASCII characters");
    }
    let twice = Request::builder()
        .method(Method::POST)
        .uri("/networks")
        .header("authorization", format!("Bearer {token}"))
        .header("idempotency-key", "a")
        .header("idempotency-key", "b");
    let twice = cluster.request(twice.body(Body::from(network("n").to_string())).unwrap()).await;
    assert_eq!((twice.status.as_u16(), twice.text.contains("more than once")), (400, true));
    let upload = cluster.call(&token, Method::POST, "/upload", None).await.body;
    let chunk = format!("/upload/{}", upload["uuid"].as_str().unwrap());
    let response = post(&cluster, &token, &chunk, "k", &json!("data")).await;
    assert_eq!((response.status.as_u16(), response.text.contains("`offset`")), (400, true));
    assert_eq!(count(&cluster, &token).await, 0);
    // A login changes nothing, and is executed each time.
    let secret = cluster.key(&caller(), "ci", "login").await;
    let login = json!({"namespace": "ci", "key": secret.expose()});
    assert_eq!(post(&cluster, "", "/auth", "k", &login).await.status, 200);
    assert_eq!(
        post(&cluster, "", "/auth", "k", &json!({"namespace": "ci", "key": "wrong"})).await.status,
        401
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn number_of_keys_is_limited_and_expired_ones_are_removed() {
    let cluster = Cluster::new().await;
    let (ci, other) = (tenant(&cluster, "ci").await, tenant(&cluster, "other").await);
    assert_eq!(post(&cluster, &ci, "/networks", "k", &network("n")).await.status, 200);
    for batch in 0..20 {
        transaction!(cluster.app.store, |tx| {
            for n in 0..500 {
                let sql = "INSERT INTO idempotency_keys (hash, namespace, request_hash, request_id, state, owner, \
                           leased_until, response, expires) SELECT ?, namespace, request_hash, request_id, state, \
                           owner, leased_until, response, expires FROM idempotency_keys WHERE namespace = 'ci' LIMIT 1";
                tx.execute(sql, params![format!("{batch}-{n}")]).await?;
            }
            Ok(())
        })
        .unwrap();
    }
    let refused = post(&cluster, &ci, "/networks", "new", &network("n")).await;
    assert_eq!(refused.status, 429, "{}", refused.text);
    let seconds: u64 = refused.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=3600).contains(&seconds));
    assert!(is_replayed(&post(&cluster, &ci, "/networks", "k", &network("n")).await), "a known key");
    assert_eq!(post(&cluster, &other, "/networks", "new", &network("n")).await.status, 200);
    update_keys(&cluster, "expires = 1").await;
    let again = post(&cluster, &ci, "/networks", "k", &network("n")).await;
    assert_eq!((again.status.as_u16(), is_replayed(&again)), (200, false), "it has expired");
    while cleaner::run(&cluster.app).await.unwrap() {}
    let left: i64 =
        (&*cluster.app.store).fetch_one("SELECT COUNT(*) FROM idempotency_keys", &[]).await.unwrap();
    assert_eq!(left, 1);
    cluster.settle_networks().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_with_a_token_documents_the_header() {
    let cluster = Cluster::new().await;
    let document: Value = serde_json::from_str(cluster.service.openapi()).unwrap();
    let mut without = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        let operation = &item["post"];
        if !operation.is_object() || operation.get("security").is_none() {
            continue;
        }
        let parameters = operation["parameters"].as_array().unwrap();
        if !parameters.iter().any(|parameter| parameter["name"] == "Idempotency-Key") {
            without.push(path.as_str());
        }
    }
    assert_eq!(
        without,
        [
            "/instances/{instance_ref}/agent/terminal",
            "/instances/{instance_ref}/migration",
            "/upload/{upload_uuid}"
        ]
    );
}
