//! Tags of records, `If-None-Match` and `If-Match`.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request};
use futures_util::stream;
use muster_test_cluster::{ApiResponse, Cluster};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};

use crate::scopes::scoped_token;

async fn call(
    cluster: &Cluster,
    token: &str,
    (method, path): (Method, &str),
    header: (&str, &str),
    body: Option<Value>,
) -> ApiResponse {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("authorization", format!("Bearer {token}"))
        .header(header.0, header.1);
    let body = body.map(|body| body.to_string()).unwrap_or_default();
    cluster.request(request.body(Body::from(body)).unwrap()).await
}

fn tag(response: &ApiResponse) -> String {
    response.headers["etag"].to_str().unwrap().to_owned()
}

async fn create_network(cluster: &Cluster, token: &str) -> String {
    let body = json!({"name": "n", "netblock": "10.0.0.0/24"});
    let created = cluster.call(token, Method::POST, "/networks", Some(body)).await;
    assert_eq!(created.status, 200, "{}", created.text);
    cluster.settle_networks().await;
    format!("/networks/{}", created.body["uuid"].as_str().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn unchanged_record_is_not_sent_again() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let path = create_network(&cluster, &token).await;
    let first = cluster.call(&token, Method::GET, &path, None).await;
    let (known, metadata) = (tag(&first), format!("{path}/metadata"));
    let again =
        async |tags: &str| call(&cluster, &token, (Method::GET, &path), ("if-none-match", tags), None).await;
    for tags in [known.clone(), format!("W/{known}"), format!("\"x\", {known}"), "*".into()] {
        let response = again(&tags).await;
        assert_eq!((response.status.as_u16(), response.text.as_str()), (304, ""), "{tags}");
        assert_eq!(tag(&response), known);
    }
    assert_eq!(again("\"other\"").await.status, 200);
    cluster.call(&token, Method::POST, &metadata, Some(json!({"key": "a", "value": "1"}))).await;
    let changed = again(&known).await;
    assert_eq!(changed.status, 200);
    assert_ne!(tag(&changed), known);
    let list = cluster.call(&token, Method::GET, "/networks", None).await;
    assert!(!list.headers.contains_key("etag"), "only records have tags");
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_only_the_version_that_the_caller_knows() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let path = create_network(&cluster, &token).await;
    let dns = format!("{path}/metadata");
    let old = tag(&cluster.call(&token, Method::GET, &path, None).await);
    cluster.call(&token, Method::POST, &dns, Some(json!({"key": "a", "value": "1"}))).await;
    let current = tag(&cluster.call(&token, Method::GET, &path, None).await);
    let delete =
        async |tags: &str| call(&cluster, &token, (Method::DELETE, &path), ("if-match", tags), None).await;
    for tags in [old.as_str(), "\"x\"", "", "not a tag"] {
        let stale = delete(tags).await;
        assert_eq!(stale.status, 412, "{tags}: {}", stale.text);
        assert_eq!(tag(&stale), current, "the current tag");
        assert!(stale.body["error"].as_str().unwrap().starts_with("If-Match: "), "{}", stale.text);
    }
    assert_eq!(cluster.call(&token, Method::GET, &path, None).await.body["state"], "created");
    // Metadata is a record of its own.
    let metadata = tag(&cluster.call(&token, Method::GET, &dns, None).await);
    let put = (Method::PUT, format!("{dns}/a"));
    let body = Some(json!({"value": "2"}));
    let stale = call(&cluster, &token, (put.0.clone(), &put.1), ("if-match", &current), body.clone()).await;
    assert_eq!(stale.status, 412);
    let changed = call(&cluster, &token, (put.0.clone(), &put.1), ("if-match", &metadata), body).await;
    assert_eq!(changed.status, 200, "{}", changed.text);
    let current = tag(&cluster.call(&token, Method::GET, &path, None).await);
    assert_eq!(delete(&format!("\"x\", W/{current}")).await.status, 202);
    let absent = call(&cluster, &token, (Method::DELETE, "/networks/absent"), ("if-match", "*"), None).await;
    assert_eq!(absent.status, 404);
    cluster.allow_unfinished_operations("the network is being deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_many_concurrent_changes_of_a_version_succeeds() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let path = create_network(&cluster, &token).await;
    let metadata = format!("{path}/metadata");
    let known = tag(&cluster.call(&token, Method::GET, &metadata, None).await);
    let bodies: Vec<Value> = (0..10).map(|n| json!({"key": format!("k{n}"), "value": "v"})).collect();
    let calls = bodies.iter().map(|body| {
        call(&cluster, &token, (Method::POST, &metadata), ("if-match", &known), Some(body.clone()))
    });
    let responses = futures_util::future::join_all(calls).await;
    let made = responses.iter().filter(|response| response.status == 200).count();
    let stale = responses.iter().filter(|response| response.status == 412).count();
    assert_eq!((made, stale), (1, 9));
}

#[tokio::test(flavor = "multi_thread")]
async fn change_through_another_daemon_is_seen_by_the_transaction() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let path = create_network(&cluster, &token).await;
    let metadata = format!("{path}/metadata");
    let known = tag(&cluster.call(&token, Method::GET, &metadata, None).await);
    // Two services share the database, but no locks.
    let (other, _) = muster_api::service(&cluster.app);
    let peer = "127.0.0.1:9".parse().unwrap();
    let post = |service: muster_api::Service, n: usize| {
        let request = Request::post(&metadata).header("authorization", format!("Bearer {token}"));
        let body = json!({"key": format!("k{n}"), "value": "v"}).to_string();
        let request = request.header("if-match", &known).body(Body::from(body)).unwrap();
        async move { service.call(request, peer).await.status().as_u16() }
    };
    let services = [cluster.service.clone(), other];
    let calls = (0..10).map(|n| post(services[n % 2].clone(), n));
    let statuses = futures_util::future::join_all(calls).await;
    let made = statuses.iter().filter(|status| **status == 200).count();
    let stale = statuses.iter().filter(|status| **status == 412).count();
    assert_eq!((made, stale), (1, 9), "{statuses:?}");
    let stored = cluster.call(&token, Method::GET, &metadata, None).await.body;
    assert_eq!(stored.as_object().unwrap().len(), 1, "{stored}");
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_conditional_uploads_do_not_delay_other_changes() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let path = create_network(&cluster, &token).await;
    let metadata = format!("{path}/metadata");
    cluster.create_namespace("ci").await;
    let uploader = cluster.token("ci").await;
    let started = Arc::new(Semaphore::new(0));
    let (end, ended) = watch::channel(());
    let mut uploads = Vec::new();
    for _ in 0..8 {
        let upload = cluster.call(&uploader, Method::POST, "/upload", None).await;
        let path = format!("/upload/{}", upload.body["uuid"].as_str().unwrap());
        let (started, mut ended) = (Arc::clone(&started), ended.clone());
        let data = stream::once(async move {
            started.add_permits(1);
            let _ = ended.changed().await;
            Ok::<_, Infallible>("data")
        });
        let request = Request::post(path).header("authorization", format!("Bearer {uploader}"));
        let request = request.header("if-match", "*").body(Body::from_stream(data)).unwrap();
        let service = cluster.service.clone();
        let peer = "127.0.0.1:9".parse().unwrap();
        uploads.push(tokio::spawn(async move { service.call(request, peer).await.status() }));
    }
    let timeout = Duration::from_secs(60);
    let all = tokio::time::timeout(timeout, started.acquire_many(8)).await;
    let _all = all.expect("every upload is received").unwrap();
    let body = Some(json!({"key": "a", "value": "1"}));
    let change = call(&cluster, &token, (Method::POST, &metadata), ("if-match", "*"), body);
    let changed = tokio::time::timeout(timeout, change).await.expect("the change does not wait");
    assert_eq!(changed.status, 200, "{}", changed.text);
    drop(end);
    for upload in uploads {
        assert_eq!(upload.await.unwrap(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn precondition_reveals_no_record_that_the_caller_may_not_read() {
    let cluster = Cluster::new().await;
    let system = cluster.token("system").await;
    let path = create_network(&cluster, &system).await;
    cluster.create_namespace("ci").await;
    let other = cluster.token("ci").await;
    for tags in ["*", "\"x\""] {
        let response = call(&cluster, &other, (Method::DELETE, &path), ("if-match", tags), None).await;
        assert_eq!(response.status, 404);
        assert!(!response.headers.contains_key("etag"));
    }
    let deleter = scoped_token(&cluster, "system", &["network.delete"]).await;
    let response = call(&cluster, &deleter, (Method::DELETE, &path), ("if-match", "*"), None).await;
    assert_eq!(response.status, 403, "it may not read the record");
    let list = call(&cluster, &system, (Method::POST, "/networks"), ("if-match", "*"), Some(json!({}))).await;
    assert_eq!((list.status.as_u16(), list.text.contains("If-Match: not supported")), (400, true));
}
