//! The documentation that the API serves.

use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use muster_test_cluster::Cluster;

/// Requests a path with a header and returns the head of the response and its body.
async fn get(cluster: &Cluster, path: &str, header: (&str, &str)) -> (axum::http::response::Parts, Vec<u8>) {
    let request = Request::builder().uri(path).header(header.0, header.1).body(Body::empty()).unwrap();
    let response = cluster.service.call(request, ([127, 0, 0, 1], 1).into()).await;
    let (head, body) = response.into_parts();
    (head, axum::body::to_bytes(body, usize::MAX).await.unwrap().to_vec())
}

#[tokio::test(flavor = "multi_thread")]
async fn serves_pages_images_and_styles_without_a_token() {
    let cluster = Cluster::new().await;
    for (path, content_type) in [
        ("/docs/", "text/html; charset=utf-8"),
        ("/docs/cli.html", "text/html; charset=utf-8"),
        ("/docs/decisions/index.html", "text/html; charset=utf-8"),
        ("/docs/style.css", "text/css; charset=utf-8"),
        ("/docs/images/overview.png", "image/png"),
    ] {
        let (head, body) = get(&cluster, path, ("accept", "*/*")).await;
        let header = |name: &str| head.headers[name].to_str().unwrap();
        assert_eq!((head.status, header("content-type")), (StatusCode::OK, content_type), "{path}");
        assert_eq!(header("x-content-type-options"), "nosniff", "{path}");
        let policy = header("content-security-policy");
        assert!(policy.starts_with("default-src 'none'; style-src 'self';"), "{path}: {policy}");
        assert!(!policy.contains("script-src") && !policy.contains("unsafe"), "{path}: {policy}");
        assert!(!body.is_empty(), "{path}");
        let (again, body) = get(&cluster, path, ("if-none-match", header("etag"))).await;
        assert_eq!((again.status, body.len()), (StatusCode::NOT_MODIFIED, 0), "{path}");
        // The document describes it; the path of a file is one segment there.
        if !path.trim_start_matches("/docs/").contains('/') {
            assert_eq!(cluster.call("", Method::GET, path, None).await.status, StatusCode::OK, "{path}");
        }
    }
    let (head, _) = get(&cluster, "/docs", ("accept", "*/*")).await;
    assert_eq!((head.status.as_u16(), head.headers["location"].to_str().unwrap()), (303, "docs/"));
}

#[tokio::test(flavor = "multi_thread")]
async fn compressed_pages_have_a_few_kilobytes() {
    let cluster = Cluster::new().await;
    for path in ["/docs/", "/docs/cli.html", "/docs/hosts.html"] {
        let (head, body) = get(&cluster, path, ("accept-encoding", "gzip")).await;
        assert_eq!(head.headers["content-encoding"], "gzip", "{path}");
        assert!(body.len() < 16 << 10, "{path}: {} bytes", body.len());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn path_without_a_page_gets_the_list_of_pages() {
    let cluster = Cluster::new().await;
    for (path, link) in [
        ("/docs/absent.html", "href=\"up.html\""),
        ("/docs/decisions/absent", "href=\"../up.html\""),
        ("/docs/absent/", "href=\"../up.html\""),
    ] {
        let (head, body) = get(&cluster, path, ("accept", "text/html")).await;
        let body = String::from_utf8(body).unwrap();
        assert_eq!(head.status, StatusCode::NOT_FOUND, "{path}");
        assert!(body.contains("Page not found") && body.contains(link), "{path}: {body}");
        assert!(head.headers["content-security-policy"].to_str().unwrap().starts_with("default-src 'none'"));
    }
    for path in ["/docs/..%2fREADME.md", "/docs/openapi.json", "/docs/up.md"] {
        assert_eq!(cluster.call("", Method::GET, path, None).await.status, StatusCode::NOT_FOUND, "{path}");
    }
}
