//! Responses compressed with gzip, and which are not.

use std::io::Read as _;

use axum::body::Body;
use axum::http::response::Parts;
use axum::http::{Method, Request};
use muster_test_cluster::Cluster;
use serde_json::{Value, json};

/// Calls the API and returns the head of the response and its bytes.
async fn call(cluster: &Cluster, token: &str, path: &str, accept_encoding: &str) -> (Parts, Vec<u8>) {
    let mut request = Request::builder().method(Method::GET).uri(path);
    if !token.is_empty() {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    if !accept_encoding.is_empty() {
        request = request.header("accept-encoding", accept_encoding);
    }
    let request = request.body(Body::empty()).unwrap();
    let (head, body) = cluster.service.call(request, ([127, 0, 0, 1], 1).into()).await.into_parts();
    (head, axum::body::to_bytes(body, usize::MAX).await.unwrap().to_vec())
}

fn decompress(bytes: &[u8]) -> Vec<u8> {
    let mut decompressed = Vec::new();
    flate2::read::GzDecoder::new(bytes).read_to_end(&mut decompressed).unwrap();
    decompressed
}

/// Asserts that a response is compressed if and only if the client accepts it, with the same content.
async fn assert_compressed(cluster: &Cluster, token: &str, path: &str) {
    let (plain_head, plain) = call(cluster, token, path, "").await;
    assert_eq!(plain_head.status, 200, "{path}");
    assert!(!plain_head.headers.contains_key("content-encoding"), "{path}");
    assert_eq!(plain_head.headers["vary"], "accept-encoding", "{path}");
    let (head, compressed) = call(cluster, token, path, "gzip, deflate").await;
    assert_eq!(head.headers["content-encoding"], "gzip", "{path}");
    assert_eq!(head.headers["vary"], "accept-encoding", "{path}");
    assert!(!head.headers.contains_key("content-length"), "{path}");
    assert!(compressed.len() < plain.len() / 2, "{path}: {} of {}", compressed.len(), plain.len());
    assert!(decompress(&compressed) == plain, "{path}");
    let (refused, bytes) = call(cluster, token, path, "gzip;q=0, br").await;
    assert!(!refused.headers.contains_key("content-encoding") && bytes == plain, "{path}");
}

#[tokio::test(flavor = "multi_thread")]
async fn compresses_documents_for_clients_that_accept_it() {
    let cluster = Cluster::new().await;
    for path in ["/openapi.json", "/ui/", "/ui/main.js", "/ui/style.css", "/apidocs/swagger-ui.css"] {
        assert_compressed(&cluster, "", path).await;
    }
    // Compressed bytes have another tag, with which clients can still validate them.
    let (plain, _) = call(&cluster, "", "/ui/main.js", "").await;
    let (compressed, _) = call(&cluster, "", "/ui/main.js", "gzip").await;
    let tag = |head: &Parts| head.headers["etag"].to_str().unwrap().to_owned();
    assert_eq!(tag(&compressed), format!("W/{}", tag(&plain)));
    let request = Request::builder().uri("/ui/main.js").header("if-none-match", tag(&compressed));
    let request = request.header("accept-encoding", "gzip").body(Body::empty()).unwrap();
    let response = cluster.service.call(request, ([127, 0, 0, 1], 1).into()).await;
    assert_eq!(response.status(), 304);
}

#[tokio::test(flavor = "multi_thread")]
async fn compresses_lists_of_one_namespace() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    for n in 0..5 {
        let body = json!({"name": format!("net-{n}"), "netblock": format!("10.{n}.0.0/24")});
        assert_eq!(cluster.call(&token, Method::POST, "/networks", Some(body)).await.status, 200);
    }
    assert_compressed(&cluster, &token, "/networks").await;
    let (small, _) = call(&cluster, &token, "/instances", "gzip").await;
    assert!(!small.headers.contains_key("content-encoding"), "an empty list is small");
    let (missing, text) = call(&cluster, &token, &format!("/networks/{}", "x".repeat(3000)), "gzip").await;
    assert_eq!(missing.status, 404);
    assert!(serde_json::from_slice::<Value>(&text).is_ok(), "errors are not compressed");
}

#[tokio::test(flavor = "multi_thread")]
async fn does_not_compress_secrets_together_with_the_text_of_others() {
    let cluster = Cluster::new().await;
    for name in ["ci", "other"] {
        cluster.create_namespace(name).await;
    }
    let (system, ci) = (cluster.token("system").await, cluster.token("ci").await);
    let create = async |namespace: &str, token: &str| {
        for n in 0..5 {
            let body = json!({"name": format!("{namespace}-{n}"), "netblock": format!("10.{n}.0.0/24")});
            assert_eq!(cluster.call(token, Method::POST, "/networks", Some(body)).await.status, 200);
        }
    };
    create("ci", &ci).await;
    let is_compressed = async |token: &str| {
        call(&cluster, token, "/networks", "gzip").await.0.headers.contains_key("content-encoding")
    };
    assert!(is_compressed(&ci).await);
    assert!(!is_compressed(&system).await, "it sees the objects of all namespaces");
    // A namespace that another one trusts sees the objects of both.
    let trust = json!({"external_namespace": "ci"});
    let trusted = cluster.call(&system, Method::POST, "/auth/namespaces/other/trust", Some(trust)).await;
    assert_eq!(trusted.status, 200, "{}", trusted.text);
    assert!(!is_compressed(&ci).await);
    // The response to a change may contain a new secret.
    let body = json!({"name": "n", "netblock": "10.9.0.0/24", "provide_dhcp": true}).to_string();
    let request = Request::builder()
        .method(Method::POST)
        .uri("/networks")
        .header("authorization", format!("Bearer {}", cluster.token("other").await))
        .header("accept-encoding", "gzip")
        .body(Body::from(body))
        .unwrap();
    let response = cluster.service.call(request, ([127, 0, 0, 1], 1).into()).await;
    assert_eq!(response.status(), 200);
    assert!(!response.headers().contains_key("content-encoding"));
}

#[tokio::test(flavor = "multi_thread")]
async fn does_not_compress_streams_of_events() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    let request = Request::builder()
        .uri("/events/stream")
        .header("authorization", format!("Bearer {token}"))
        .header("accept-encoding", "gzip")
        .body(Body::empty())
        .unwrap();
    let response = cluster.service.call(request, ([127, 0, 0, 1], 1).into()).await;
    assert_eq!(response.status(), 200);
    assert!(!response.headers().contains_key("content-encoding"));
}
