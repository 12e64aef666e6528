//! Behaviour common to all requests: ids, slashes, bodies, methods and limits.

use axum::body::Body;
use axum::http::{Method, Request};
use muster_test_cluster::Cluster;
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn root_page_lists_supported_features_only() {
    let cluster = Cluster::new().await;
    let page = cluster.call("", Method::GET, "/", None).await;
    assert_eq!(page.headers["content-type"], "text/html; charset=utf-8");
    for feature in [
        "generated-key-secrets",
        "trusted-issuers",
        "mapping-rules",
        "federated-exchange",
        "scope-enforcement",
        "namespace-claims",
        "events-by-type",
        "get-cluster-operations",
        "node-get",
        "blob-search-by-hash",
        "instance-screenshot",
        "cluster-cacert",
        "hot-plug-interface",
        "agentoperations-crud",
        "instance-agentoperations-all",
        "agentoperations-put-with-mode",
        "instance-put-blob",
        "instance-execute",
        "instance-get",
        "include-queued-agent-operations",
        "agentoperation-deadlines",
    ] {
        assert!(page.text.contains(feature), "{feature}");
    }
    assert!(!page.text.contains("vdi-console-proxy"));
}

#[tokio::test(flavor = "multi_thread")]
async fn trailing_and_double_slashes_reach_the_same_route() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    for path in ["/auth/namespaces", "/auth/namespaces/", "//auth/namespaces", "/auth/namespaces?"] {
        assert_eq!(cluster.call(&token, Method::GET, path, None).await.status, 200, "{path}");
    }
    assert_eq!(cluster.call("", Method::GET, "/apidocs/", None).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_paths_and_methods_return_json_errors() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    for path in ["/auth/namespaces/%ff", "/nodes/%fe", "/apidocs/%ff", "/clusteroperations/%ff/chain"] {
        let response = cluster.call(&token, Method::GET, path, None).await;
        assert_eq!((response.status.as_u16(), &response.body["status"]), (404, &json!(404)), "{path}");
    }
    let unknown_path = cluster.call("", Method::GET, "/nowhere", None).await;
    assert_eq!((unknown_path.status.as_u16(), &unknown_path.body["status"]), (404, &json!(404)));
    let wrong_method = cluster.call("", Method::PATCH, "/auth/namespaces", None).await;
    assert_eq!(wrong_method.status, 405);
    assert_eq!(wrong_method.body["error"], json!("The method is not allowed for the requested URL."));
    assert_eq!(wrong_method.body["status"], json!(405));
    let allow = wrong_method.headers["allow"].to_str().unwrap();
    assert!(allow.contains("GET") && allow.contains("POST"), "{allow}");
    let options = cluster.call("", Method::OPTIONS, "/auth/namespaces", None).await;
    assert_eq!((options.status.as_u16(), options.text.as_str()), (200, ""));
    assert!(options.headers.contains_key("allow"));
    assert_eq!(cluster.call("", Method::HEAD, "/livez", None).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn request_id_is_echoed_or_generated() {
    let cluster = Cluster::new().await;
    let request = Request::get("/nowhere").header("x-request-id", "mine-7").body(Body::empty()).unwrap();
    assert_eq!(cluster.request(request).await.headers["x-request-id"], "mine-7");
    let generated = cluster.call("", Method::GET, "/", None).await;
    assert_eq!(generated.headers["x-request-id"].len(), 36);
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_unreadable_body_only_where_one_is_required() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let deep = format!("{}{}", "[".repeat(50_000), "]".repeat(50_000));
    let nested = format!("{{\"namespace\": {}}}", "{\"a\":".repeat(50_000));
    for body in [
        b"{".to_vec(),
        b"\xff\xfe".to_vec(),
        deep.into_bytes(),
        nested.into_bytes(),
        b"{\"namespace\":1e999}".to_vec(),
    ] {
        let response = cluster.send(&token, Method::POST, "/auth/namespaces", body.clone()).await;
        assert_eq!(response.status, 400, "{}", response.text);
        let response = cluster.send(&token, Method::GET, "/auth/namespaces", body).await;
        assert_eq!(response.status, 200, "{}", response.text);
    }
    let array_body = cluster.send(&token, Method::GET, "/auth/namespaces", b"[1]".to_vec()).await;
    assert_eq!(
        (array_body.status.as_u16(), &array_body.body["error"]),
        (400, &json!("the request body must be a JSON object"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn validation_mode_can_be_relaxed() {
    for (mode, status) in [("enforce", 400), ("warn", 200), ("off", 200)] {
        let cluster = Cluster::with(&[("API_VALIDATION_MODE", mode)], None).await;
        let token = cluster.token("system").await;
        let response =
            cluster.call(&token, Method::GET, "/auth/namespaces", Some(json!({"surprise": 1}))).await;
        assert_eq!(response.status, status, "{mode}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_body_by_content_length_before_reading_it() {
    let cluster = Cluster::with(&[("API_MAX_REQUEST_BODY_BYTES", "100")], None).await;
    let token = cluster.token("system").await;
    for (token, length, path, status) in [
        ("", 100, "/auth", 400),
        ("", 101, "/auth", 413),
        (&token, 100, "/auth/namespaces", 400),
        (&token, 101, "/auth/namespaces", 413),
        ("", 101, "/auth/namespaces", 401),
        ("", 101, "/nowhere", 404),
    ] {
        let response = cluster.send(token, Method::POST, path, vec![b'x'; length]).await;
        assert_eq!(response.status, status, "{length} {path}");
    }
    let announced =
        Request::post("/auth").header("content-length", "99999999999").body(Body::from("{}")).unwrap();
    assert_eq!(cluster.request(announced).await.status, 413);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_body_without_token_more_strictly() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    for (token, path, length, status) in [
        ("", "/auth", 8192, 400),
        ("", "/auth", 8193, 413),
        (token.as_str(), "/auth/namespaces", 1 << 20, 400),
        (&token, "/auth/namespaces", (1 << 20) + 1, 413),
    ] {
        for with_length in [true, false] {
            let mut request = Request::post(path).header("authorization", format!("Bearer {token}"));
            if with_length {
                request = request.header("content-length", length);
            }
            let response = cluster.request(request.body(Body::from(vec![b'x'; length])).unwrap()).await;
            assert_eq!(response.status, status, "{path} {length} {with_length}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn checks_token_before_body_arrives() {
    let cluster = Cluster::new().await;
    for path in ["/instances", "/auth/namespaces", "/nowhere", "/upload/x"] {
        let pending = Body::from_stream(futures_util::stream::pending::<Result<Vec<u8>, std::io::Error>>());
        let request = Request::post(path).header("content-length", 1 << 20).body(pending).unwrap();
        let response = tokio::time::timeout(std::time::Duration::from_secs(20), cluster.request(request));
        let status = response.await.expect("a response before the body").status;
        assert_eq!(status, if path == "/nowhere" { 404 } else { 401 }, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn body_without_content_length_is_accepted() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let request = Request::post("/auth/namespaces")
        .header("authorization", format!("Bearer {token}"))
        .body(Body::from(json!({"namespace": "chunked"}).to_string()))
        .unwrap();
    let response = cluster.request(request).await;
    assert_eq!((response.status.as_u16(), &response.body["name"]), (200, &json!("chunked")));
    let login = Request::post("/auth").body(Body::from(r#"{"namespace": "absent", "key": "x"}"#)).unwrap();
    assert_eq!(cluster.request(login).await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_too_long_secret_as_wrong_one() {
    let cluster = Cluster::new().await;
    for length in [1024, 1025, 7000] {
        let body = json!({"namespace": "system", "key": "x".repeat(length)});
        let response = cluster.call("", Method::POST, "/auth", Some(body)).await;
        assert_eq!((response.status.as_u16(), &response.body["error"]), (401, &json!("unauthorized")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn error_bodies_contain_the_request_id() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    for (token, method, path, status) in [
        ("", Method::GET, "/nowhere", 404),
        ("", Method::GET, "/instances", 401),
        ("", Method::PATCH, "/instances", 405),
        ("", Method::POST, "/auth", 400),
        (&token, Method::GET, "/instances/absent", 404),
    ] {
        let response = cluster.call(token, method, path, None).await;
        let id = response.headers["x-request-id"].to_str().unwrap();
        assert_eq!((response.status.as_u16(), &response.body["request_id"]), (status, &json!(id)), "{path}");
        assert!(response.body["error"].is_string() && response.body["status"] == json!(status), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn html_pages_have_security_headers() {
    let cluster = Cluster::new().await;
    for path in ["/", "/apidocs"] {
        let page = cluster.call("", Method::GET, path, None).await;
        let header = |name: &str| page.headers[name].to_str().unwrap();
        assert!(header("content-type").starts_with("text/html"), "{path}");
        assert!(header("content-security-policy").contains("frame-ancestors 'none'"), "{path}");
        assert_eq!(
            (header("x-content-type-options"), header("x-frame-options")),
            ("nosniff", "DENY"),
            "{path}"
        );
    }
}
