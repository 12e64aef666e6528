//! What all requests share: ids, slashes, bodies, methods, limits.

use axum::body::Body;
use axum::http::{Method, Request};
use muster_test_cluster::Cluster;
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn the_root_page_lists_only_what_works() {
    let cluster = Cluster::new().await;
    let page = cluster.call("", Method::GET, "/", None).await;
    assert_eq!(page.headers["content-type"], "text/html; charset=utf-8");
    for word in [
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
        assert!(page.text.contains(word), "{word}");
    }
    for word in ["cluster-cacert", "vdi-console-proxy"] {
        assert!(!page.text.contains(word), "{word}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn both_slash_forms_and_a_double_slash_reach_the_same_route() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    for path in ["/auth/namespaces", "/auth/namespaces/", "//auth/namespaces", "/auth/namespaces?"] {
        assert_eq!(cluster.call(&token, Method::GET, path, None).await.status, 200, "{path}");
    }
    assert_eq!(cluster.call("", Method::GET, "/apidocs/", None).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_paths_and_wrong_methods_are_answered_in_json() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    for path in ["/auth/namespaces/%ff", "/nodes/%fe", "/apidocs/%ff", "/clusteroperations/%ff/chain"] {
        let answer = cluster.call(&token, Method::GET, path, None).await;
        assert_eq!((answer.status.as_u16(), &answer.body["status"]), (404, &json!(404)), "{path}");
    }
    let nowhere = cluster.call("", Method::GET, "/nowhere", None).await;
    assert_eq!((nowhere.status.as_u16(), &nowhere.body["status"]), (404, &json!(404)));
    let wrong = cluster.call("", Method::PATCH, "/auth/namespaces", None).await;
    assert_eq!(wrong.status, 405);
    assert_eq!(wrong.body, json!({"message": "The method is not allowed for the requested URL."}));
    let allow = wrong.headers["allow"].to_str().unwrap();
    assert!(allow.contains("GET") && allow.contains("POST"), "{allow}");
    let options = cluster.call("", Method::OPTIONS, "/auth/namespaces", None).await;
    assert_eq!((options.status.as_u16(), options.text.as_str()), (200, ""));
    assert!(options.headers.contains_key("allow"));
    assert_eq!(cluster.call("", Method::HEAD, "/livez", None).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_id_is_echoed_or_made() {
    let cluster = Cluster::new().await;
    let request = Request::get("/nowhere").header("x-request-id", "mine-7").body(Body::empty()).unwrap();
    assert_eq!(cluster.request(request).await.headers["x-request-id"], "mine-7");
    let made = cluster.call("", Method::GET, "/", None).await;
    assert_eq!(made.headers["x-request-id"].len(), 36);
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_bodies_are_refused_where_one_is_needed_and_ignored_elsewhere() {
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
        let answer = cluster.send(&token, Method::POST, "/auth/namespaces", body.clone()).await;
        assert_eq!(answer.status, 400, "{}", answer.text);
        let answer = cluster.send(&token, Method::GET, "/auth/namespaces", body).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
    }
    let list = cluster.send(&token, Method::GET, "/auth/namespaces", b"[1]".to_vec()).await;
    assert_eq!(
        (list.status.as_u16(), &list.body["error"]),
        (400, &json!("the request body must be a JSON object"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn validation_can_be_relaxed() {
    for (mode, status) in [("enforce", 400), ("warn", 200), ("off", 200)] {
        let cluster = Cluster::with(&[("API_VALIDATION_MODE", mode)], None).await;
        let token = cluster.token("system").await;
        let answer =
            cluster.call(&token, Method::GET, "/auth/namespaces", Some(json!({"surprise": 1}))).await;
        assert_eq!(answer.status, status, "{mode}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_is_bounded_before_it_is_read_and_needs_its_length() {
    let cluster = Cluster::with(&[("API_MAX_REQUEST_BODY_BYTES", "100")], None).await;
    for (length, path, status) in [(100, "/auth", 400), (101, "/auth", 413), (101, "/nowhere", 413)] {
        let answer = cluster.send("", Method::POST, path, vec![b'x'; length]).await;
        assert_eq!(answer.status, status, "{length} {path}");
    }
    let announced =
        Request::post("/auth").header("content-length", "99999999999").body(Body::from("{}")).unwrap();
    assert_eq!(cluster.request(announced).await.status, 413);
    let unannounced = Request::post("/auth").body(Body::from("{}")).unwrap();
    let answer = cluster.request(unannounced).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.body["error"]),
        (411, &json!("a content-length is required"))
    );
}
