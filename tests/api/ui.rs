//! The files of the web UI.

use axum::body::Body;
use axum::http::{Method, Request};
use muster_test_cluster::Cluster;

/// Requests a path with a header and returns the head of the response and the length of its body.
async fn get(cluster: &Cluster, path: &str, header: (&str, &str)) -> (axum::http::response::Parts, usize) {
    let request = Request::builder().uri(path).header(header.0, header.1).body(Body::empty()).unwrap();
    let response = cluster.service.call(request, ([127, 0, 0, 1], 1).into()).await;
    let (head, body) = response.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    (head, body.len())
}

#[tokio::test(flavor = "multi_thread")]
async fn redirects_browsers_from_the_root_to_the_ui() {
    let cluster = Cluster::new().await;
    let browser = ("accept", "text/html,application/xhtml+xml,*/*;q=0.8");
    let (head, _) = get(&cluster, "/", browser).await;
    assert_eq!((head.status.as_u16(), head.headers["location"].to_str().unwrap()), (303, "ui/"));
    assert_eq!(head.headers["vary"], "accept");
    for accept in ["*/*", "application/json"] {
        let (head, _) = get(&cluster, "/", ("accept", accept)).await;
        assert_eq!(head.status, 200, "{accept}");
    }
    let (head, _) = get(&cluster, "/ui", browser).await;
    assert_eq!((head.status.as_u16(), head.headers["location"].to_str().unwrap()), (303, "ui/"));
}

#[tokio::test(flavor = "multi_thread")]
async fn serves_files_with_their_types_and_validators() {
    let cluster = Cluster::new().await;
    for (path, content_type) in [
        ("/ui/", "text/html; charset=utf-8"),
        ("/ui/main.js", "text/javascript; charset=utf-8"),
        ("/ui/style.css", "text/css; charset=utf-8"),
        ("/ui/icon.svg", "image/svg+xml"),
        ("/ui/vendor/novnc/core/rfb.js", "text/javascript; charset=utf-8"),
    ] {
        let (head, length) = get(&cluster, path, ("accept", "*/*")).await;
        let header = |name: &str| head.headers[name].to_str().unwrap();
        assert_eq!((head.status.as_u16(), header("content-type")), (200, content_type), "{path}");
        assert_eq!(
            (header("cache-control"), header("x-content-type-options")),
            ("no-cache", "nosniff"),
            "{path}"
        );
        let policy = header("content-security-policy");
        assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{path}: {policy}");
        assert!(length > 0, "{path}");
        let (again, length) = get(&cluster, path, ("if-none-match", header("etag"))).await;
        assert_eq!((again.status.as_u16(), length), (304, 0), "{path}");
        let (other, _) = get(&cluster, path, ("if-none-match", "\"other\"")).await;
        assert_eq!(other.status, 200, "{path}");
    }
    for path in ["/ui/absent.js", "/ui/vendor/SHA256SUMS", "/ui/vendor/preact/LICENSE", "/ui/..%2fREADME.md"]
    {
        assert_eq!(cluster.call("", Method::GET, path, None).await.status, 404, "{path}");
    }
}
