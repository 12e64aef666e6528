//! Behaviour common to all requests: ids, slashes, bodies, methods and limits.

use std::sync::Arc;
use std::task::Poll;

use axum::body::Body;
use axum::http::{Method, Request};
use bytes::Bytes;
use muster_control::auth::{Caller, RequestDeadline};
use muster_control::objects::upload;
use muster_test_cluster::{Cluster, caller};
use muster_types::time::now;
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
    cluster.allow_undocumented_requests("a body that is not needed is ignored");
    let token = cluster.token("system").await;
    let deep = format!("{}{}", "[".repeat(4000), "]".repeat(4000));
    let nested = format!("{{\"namespace\": {}}}", "{\"a\":".repeat(1500));
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
async fn deletion_rejects_a_body_that_is_not_an_object() {
    let (cluster, token) = crate::networks::cluster(&[]).await;
    cluster.allow_undocumented_requests("null counts as no body");
    let instance = crate::instances::create(&cluster, &token, "kept", &json!({})).await;
    crate::networks::create_network(&cluster, &token, json!({"name": "n", "netblock": "10.1.0.0/24"})).await;
    let one = format!("/instances/{}", instance["uuid"].as_str().unwrap());
    for path in ["/instances", "/networks", "/artifacts", one.as_str()] {
        for body in ["{bad", "[]", "0", "false", "\"\"", "namespace=ee", "[1]"] {
            let response = cluster.send(&token, Method::DELETE, path, body.into()).await;
            assert_eq!(response.status, 400, "{path} {body}: {}", response.text);
        }
    }
    cluster.settle().await;
    assert_eq!(crate::instances::show(&cluster, &token, &instance).await["state"], "created");
    assert_eq!(cluster.send(&token, Method::DELETE, &one, b"null".into()).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_bodies_of_one_namespace_do_not_stop_others() {
    let cluster = Arc::new(Cluster::with(&[("API_MAX_BODY_MEMORY_MB", "4")], None).await);
    for name in ["red", "blue"] {
        cluster.create_namespace(name).await;
    }
    let (red, blue) = (cluster.token("red").await, cluster.token("blue").await);
    let mut responses = vec![];
    for _ in 0..8 {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let (mut sender, mut is_first) = (Some(sender), true);
        // The last byte never arrives. It is requested after the others are stored, or after they are rejected.
        let parts = futures_util::stream::poll_fn(move |_| {
            if std::mem::take(&mut is_first) {
                return Poll::Ready(Some(Ok::<_, std::io::Error>(vec![b'x'; (1 << 20) - 1])));
            }
            sender.take().map(|sender| sender.send(()));
            Poll::Pending
        });
        let request = Request::post("/instances").header("authorization", format!("Bearer {red}"));
        let request = request.body(Body::from_stream(parts)).unwrap();
        let caller = Arc::clone(&cluster);
        responses.push(tokio::spawn(async move { caller.request(request).await }));
        receiver.await.unwrap();
    }
    let (rejected, _, pending) = futures_util::future::select_all(responses).await;
    let large = json!({"key": "k", "value": "x".repeat(200 << 10)});
    let written = cluster.call(&blue, Method::POST, "/auth/namespaces/blue/metadata", Some(large)).await;
    let login = json!({"namespace": "blue", "key": "wrong"});
    let login = cluster.call("", Method::POST, "/auth", Some(login)).await;
    let read = cluster.send(&red, Method::GET, "/instances", vec![b' '; 8193]).await;
    // The cluster ends with the last request.
    for request in pending {
        request.abort();
        let _ = request.await;
    }
    assert_eq!(rejected.unwrap().status, 503, "the namespace has used its share");
    assert_eq!(written.status, 200, "{}", written.text);
    assert_eq!(login.status, 401, "{}", login.text);
    assert_eq!(read.status, 413, "calls that only select objects have small bodies");
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
async fn browsers_do_not_guess_the_type_of_any_response() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    for (token, method, path) in [
        ("", Method::GET, "/"),
        ("", Method::GET, "/healthz"),
        ("", Method::GET, "/openapi.json"),
        ("", Method::GET, "/apidocs/start.js"),
        ("", Method::GET, "/ui/main.js"),
        ("", Method::GET, "/instances"),
        (&token, Method::GET, "/instances"),
        (&token, Method::GET, "/instances/absent"),
        ("", Method::OPTIONS, "/instances"),
        ("", Method::POST, "/absent"),
    ] {
        let response = cluster.call(token, method, path, None).await;
        let header = response.headers.get("x-content-type-options").map(|value| value.to_str().unwrap());
        assert_eq!(header, Some("nosniff"), "{path}: {}", response.status);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn html_pages_have_security_headers() {
    let cluster = Cluster::new().await;
    for path in ["/", "/apidocs", "/ui/"] {
        let page = cluster.call("", Method::GET, path, None).await;
        let header = |name: &str| page.headers[name].to_str().unwrap();
        assert!(header("content-type").starts_with("text/html"), "{path}");
        let policy = header("content-security-policy");
        assert!(policy.contains("frame-ancestors 'none'") && !policy.contains("unsafe"), "{path}: {policy}");
        assert_eq!(
            (header("x-content-type-options"), header("x-frame-options")),
            ("nosniff", "DENY"),
            "{path}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn upload_does_not_change_after_its_caller_has_given_up() {
    let cluster = Cluster::new().await;
    let app = &cluster.app;
    let (waiting, mut abandoned) = (caller(), caller());
    abandoned.deadline = RequestDeadline::new(Some(now() - 1.0), None);
    let record = upload::create(app, &waiting).await.unwrap();
    let row = upload::find(app, &waiting, &record.uuid.to_string()).await.unwrap();
    let node = app.nodes.iter().find(|node| node.identity().id == row.node).unwrap();
    let append = async |caller: &Caller| {
        let data = futures_util::stream::iter([Ok(Bytes::from_static(b"data"))]);
        upload::append(app, caller, node, &row, None, None, Box::pin(data)).await
    };
    append(&abandoned).await.unwrap_err();
    assert_eq!(append(&waiting).await.unwrap(), 4);
    upload::truncate(app, &abandoned, node, &row, 0).await.unwrap_err();
    assert_eq!(upload::get(app, node, &row).await.unwrap().size, 4);
}
