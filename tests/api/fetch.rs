//! Fetching images from an untrusted web server.

use std::time::Duration;

use axum::http::Method;
use muster_test_cluster::{Cluster, wait_for};
use muster_testing::issuer::{Certificate, Issuer};
use muster_testing::web_server::{ReceivedRequest, Reply, RequestHandler, WebServer};
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use crate::networks::{get, post};

const FAST_SETTINGS: &[(&str, &str)] = &[
    ("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.1"),
    ("IMAGE_STALL_TIMEOUT", "1"),
    ("CLUSTER_OP_LEASE", "1"),
    ("CLUSTER_OP_MAX_ATTEMPTS", "1"),
    ("MAX_IMAGE_SIZE_GB", "0.01"),
];

async fn cluster() -> (Cluster, String) {
    crate::networks::cluster(FAST_SETTINGS).await
}

/// Fetches an artifact, waits until the fetch ended, and returns its record.
async fn fetch(cluster: &Cluster, token: &str, url: &str) -> Value {
    let response = post(cluster, token, "/artifacts", json!({"url": url})).await;
    assert_eq!(response.status, 200, "{}", response.text);
    cluster.settle().await;
    get(cluster, token, &format!("/artifacts/{}", response.body["uuid"].as_str().unwrap())).await.body
}

async fn bytes(cluster: &Cluster, token: &str, record: &Value) -> Vec<u8> {
    cluster.download_until_error(token, record["blob_uuid"].as_str().unwrap()).await
}

/// Returns content without repeating parts.
fn content(seed: u8) -> Vec<u8> {
    (0..400_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8 ^ seed).collect()
}

fn error(record: &Value) -> &str {
    record["error_message"].as_str().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn fetches_revalidates_and_versions_image() {
    let (cluster, token) = cluster().await;
    let web = WebServer::new(|request, number| {
        let (tag, body) = if number < 2 { ("\"one\"", content(1)) } else { ("\"two\"", content(2)) };
        match request.header("if-none-match") {
            Some(cached) if cached == tag => Reply::status(304),
            _ => Reply::ok(&body).with("ETag", tag).with("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT"),
        }
    })
    .await;
    let url = web.url("/images/small.img");
    let response = post(&cluster, &token, "/artifacts", json!({"url": url})).await.body;
    assert_eq!(
        (&response["state"], &response["index"], &response["blobs"]),
        (&json!("initial"), &json!(0), &json!({}))
    );
    assert_eq!((&response["name"], &response["source_url"]), (&json!("small.img"), &json!(url)));
    assert!(response.get("blob_uuid").is_none());
    let handle = &response["last_cluster_operation"];
    assert_eq!(handle["op_type"], "artifact_fetch_op");
    let path = format!("/clusteroperations/artifact_fetch_op/{}", handle["op_uuid"].as_str().unwrap());
    cluster.settle().await;
    assert_eq!(get(&cluster, &token, &path).await.body["tasks"], json!(["image_fetch"]));
    let artifact = get(&cluster, &token, "/artifacts/small.img").await.body;
    assert_eq!((&artifact["state"], &artifact["index"]), (&json!("created"), &json!(1)));
    assert_eq!(bytes(&cluster, &token, &artifact).await, content(1));
    let blob =
        get(&cluster, &token, &format!("/blobs/{}", artifact["blob_uuid"].as_str().unwrap())).await.body;
    assert_eq!(blob["modified"], "Wed, 21 Oct 2015 07:28:00 GMT");

    let same = fetch(&cluster, &token, &url).await;
    assert_eq!((&same["uuid"], &same["index"]), (&artifact["uuid"], &json!(1)), "304");
    let newer = fetch(&cluster, &token, &url).await;
    assert_eq!((&newer["uuid"], &newer["index"]), (&artifact["uuid"], &json!(2)));
    assert_eq!(bytes(&cluster, &token, &newer).await, content(2));
    assert_eq!(web.requests().len(), 3);
    let messages =
        cluster.messages(&ObjectRef::new(ObjectType::Artifact, artifact["uuid"].as_str().unwrap())).await;
    for message in ["version added", "the source has nothing new"] {
        assert!(messages.iter().any(|m| m == message), "{messages:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn compares_content_of_source_without_validators() {
    let (cluster, token) = cluster().await;
    let web = WebServer::new(|_, _| Reply::ok(&content(1))).await;
    assert_eq!(fetch(&cluster, &token, &web.url("/x")).await["index"], 1);
    assert_eq!(fetch(&cluster, &token, &web.url("/x")).await["index"], 1);
    // Last-Modified and the length suffice to detect an unchanged source.
    let web =
        WebServer::new(|_, _| Reply::ok(&content(1)).with("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT"))
            .await;
    fetch(&cluster, &token, &web.url("/y")).await;
    let again = fetch(&cluster, &token, &web.url("/y")).await;
    assert_eq!((&again["index"], error(&again)), (&json!(1), ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_source_keeps_cached_version() {
    let (cluster, token) = cluster().await;
    let web =
        WebServer::new(|_, number| if number == 0 { Reply::ok(&content(1)) } else { Reply::status(404) })
            .await;
    fetch(&cluster, &token, &web.url("/x")).await;
    let kept = fetch(&cluster, &token, &web.url("/x")).await;
    assert_eq!((&kept["state"], &kept["index"]), (&json!("created"), &json!(1)));
    assert_eq!(error(&kept), "127.0.0.1 responded with 404 Not Found");
    assert_eq!(bytes(&cluster, &token, &kept).await, content(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn resumes_interrupted_or_stalled_fetch() {
    let (cluster, token) = cluster().await;
    for stall in [false, true] {
        let web = WebServer::new(move |requests: &ReceivedRequest, number| {
            let tagged = |reply: Reply| Reply { stall, ..reply.with("ETag", "\"one\"") };
            match (requests.range_start(), number) {
                (None, _) => tagged(Reply::ok(&content(1)).cut(150_000)),
                (Some(start), 1) => tagged(Reply::part(&content(1), start).cut(100_000)),
                (Some(start), _) => Reply::part(&content(1), start).with("ETag", "\"one\""),
            }
        })
        .await;
        let artifact = fetch(&cluster, &token, &web.url("/x")).await;
        assert_eq!(artifact["state"], "created", "{}", error(&artifact));
        assert_eq!(bytes(&cluster, &token, &artifact).await, content(1));
        let requests = web.requests();
        assert_eq!((requests.len(), requests[1].header("if-range")), (3, Some("\"one\"")));
        assert!(requests[2].range_start() > requests[1].range_start(), "{requests:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn never_mixes_content_of_two_versions() {
    let (cluster, token) = cluster().await;
    // The content changes after the connection broke: the second response is all of the new content.
    let web = WebServer::new(|_, number| match number {
        0 => Reply::ok(&content(1)).with("ETag", "\"one\"").cut(150_000),
        _ => Reply::ok(&content(2)).with("ETag", "\"two\""),
    })
    .await;
    let artifact = fetch(&cluster, &token, &web.url("/x")).await;
    assert_eq!(bytes(&cluster, &token, &artifact).await, content(2));
    // Without a validator the fetch is not resumed.
    let web = WebServer::new(|request: &ReceivedRequest, number| match (request.range_start(), number) {
        (None, 0) => Reply::ok(&content(1)).cut(150_000),
        (None, _) => Reply::ok(&content(2)),
        (Some(start), _) => Reply::part(&content(2), start),
    })
    .await;
    let artifact = fetch(&cluster, &token, &web.url("/y")).await;
    assert_eq!(bytes(&cluster, &token, &artifact).await, content(2));
    // A server that ignores If-Range is detected by the ETag of the partial response.
    let web = WebServer::new(|request: &ReceivedRequest, number| match (request.range_start(), number) {
        (None, 0) => Reply::ok(&content(1)).with("ETag", "\"one\"").cut(150_000),
        (Some(start), _) => Reply::part(&content(2), start).with("ETag", "\"two\""),
        (None, _) => Reply::ok(&content(2)).with("ETag", "\"two\""),
    })
    .await;
    let artifact = fetch(&cluster, &token, &web.url("/heedless")).await;
    assert_eq!(bytes(&cluster, &token, &artifact).await, content(2));
    // A response with a different range than requested is discarded.
    let web = WebServer::new(|request: &ReceivedRequest, number| match (request.range_start(), number) {
        (None, 0) => Reply::ok(&content(1)).with("ETag", "\"one\"").cut(150_000),
        (Some(_), _) => Reply::part(&content(1), 1000).with("ETag", "\"one\""),
        (None, _) => Reply::ok(&content(1)).with("ETag", "\"one\""),
    })
    .await;
    let artifact = fetch(&cluster, &token, &web.url("/z")).await;
    assert_eq!(bytes(&cluster, &token, &artifact).await, content(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_error_for_misbehaving_server() {
    let (cluster, token) = cluster().await;
    let cases: Vec<(&str, RequestHandler)> = vec![
        // The announced length is larger than the body.
        (
            "closed the connection early",
            Box::new(|_, _| Reply::ok(&content(1)).with("Content-Length", "999999")),
        ),
        ("127.0.0.1 does not respond", Box::new(|_, _| Reply::default())),
        ("larger than the 0.01 GB", Box::new(|_, _| Reply::ok(&vec![1; 11_000_000]))),
        (
            "larger than the 0.01 GB",
            Box::new(|_, _| Reply { without_length: true, ..Reply::ok(&vec![1; 11_000_000]) }),
        ),
        (
            "larger than the 0.01 GB",
            Box::new(|_, _| Reply::ok(b"x").with("Content-Length", "99999999999999")),
        ),
        ("127.0.0.1 responded with 500", Box::new(|_, _| Reply::status(500))),
        ("127.0.0.1 responded with 403", Box::new(|_, _| Reply::status(403))),
        ("too many redirects", Box::new(|_, _| Reply::status(302).with("Location", "/again"))),
        (
            "at a loopback address",
            Box::new(|_, _| Reply::status(302).with("Location", "http://127.0.0.2:9/x")),
        ),
        (
            "at a link-local address",
            Box::new(|_, _| Reply::status(307).with("Location", "http://169.254.169.254/")),
        ),
        ("at a loopback address", Box::new(|_, _| Reply::status(301).with("Location", "http://[::1]:9/x"))),
        (
            "URL that is not allowed",
            Box::new(|_, _| Reply::status(302).with("Location", "file:///etc/passwd")),
        ),
        ("an invalid URL", Box::new(|_, _| Reply::status(302))),
    ];
    for (number, (reason, handler)) in cases.into_iter().enumerate() {
        let web = WebServer::new(handler).await;
        let record = fetch(&cluster, &token, &web.url(&format!("/{number}"))).await;
        assert_eq!(record["state"], "error", "{reason}");
        assert!(error(&record).contains(reason), "{reason}: {}", error(&record));
        assert!(web.requests().len() <= 6, "{reason}: {} requests", web.requests().len());
        assert_eq!(record["blobs"], json!({}));
    }
    let drafts = std::fs::read_dir(cluster.directory().join("1/drafts")).unwrap().count();
    assert_eq!(drafts, 0, "failed fetches leave no drafts");
}

#[tokio::test(flavor = "multi_thread")]
async fn error_names_the_host_that_cannot_be_resolved_or_reached() {
    let (cluster, token) = cluster().await;
    let record = fetch(&cluster, &token, "http://images.invalid/x").await;
    assert_eq!(error(&record), "cannot resolve the host name images.invalid");
    // No process listens on the port of a closed socket.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let record = fetch(&cluster, &token, &format!("http://{closed}/x")).await;
    assert_eq!(error(&record), "cannot connect to 127.0.0.1");
}

#[tokio::test(flavor = "multi_thread")]
async fn fetch_from_silent_server_ends_in_error_with_its_name() {
    let settings = [("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.1"), ("IMAGE_STALL_TIMEOUT", "600")];
    let (cluster, token) = crate::networks::cluster(&settings).await;
    // The kernel accepts connections, and nobody answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/x", silent.local_addr().unwrap());
    let fetched = tokio::time::timeout(Duration::from_secs(60), fetch(&cluster, &token, &url)).await;
    assert_eq!(error(&fetched.expect("within 30 seconds")), "127.0.0.1 does not respond");
}

#[tokio::test(flavor = "multi_thread")]
async fn error_of_unreachable_host_does_not_blame_its_server() {
    let settings = [("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.1"), ("IMAGE_STALL_TIMEOUT", "600")];
    let (cluster, token) = crate::networks::cluster(&settings).await;
    // The kernel ignores connections beyond the backlog, as if packets were lost.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(0).unwrap();
    let address = listener.local_addr().unwrap();
    let mut connections = Vec::new();
    while let Ok(connection) =
        tokio::time::timeout(Duration::from_secs(2), tokio::net::TcpStream::connect(address)).await
    {
        connections.push(connection.unwrap());
    }
    let url = format!("http://{address}/x");
    let fetched = tokio::time::timeout(Duration::from_secs(60), fetch(&cluster, &token, &url)).await;
    assert_eq!(error(&fetched.expect("within 30 seconds")), "cannot connect to 127.0.0.1");
}

#[tokio::test(flavor = "multi_thread")]
async fn error_of_untrusted_server_names_its_certificate() {
    let (cluster, token) = cluster().await;
    for certificate in [Certificate::Good, Certificate::SelfSigned, Certificate::SelfSignedAuthority] {
        let server = Issuer::start_with(certificate);
        let record = fetch(&cluster, &token, &server.jwks_uri()).await;
        let reason = "the certificate of localhost is not issued by a trusted certificate authority";
        assert_eq!((record["state"].as_str(), error(&record)), (Some("error"), reason), "{certificate:?}");
        assert_eq!(server.fetches(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_host_name_of_loopback_address() {
    let settings = [("IMAGE_FETCH_ALLOWED_NETWORKS", "10.0.0.0/8"), ("CLUSTER_OP_MAX_ATTEMPTS", "1")];
    let (cluster, token) = crate::networks::cluster(&settings).await;
    let web = WebServer::new(|_, _| Reply::ok(b"the inside")).await;
    let record = fetch(&cluster, &token, &format!("http://localhost:{}/x", web.address.port())).await;
    assert_eq!(record["state"], "error");
    assert!(error(&record).contains("localhost is at a loopback address"), "{}", error(&record));
    assert!(web.requests().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn follows_redirect() {
    let (cluster, token) = cluster().await;
    let web = WebServer::new(|request: &ReceivedRequest, _| match request.path.as_str() {
        "/moved" => Reply::status(302).with("Location", "/here"),
        _ => Reply::ok(&content(1)),
    })
    .await;
    let artifact = fetch(&cluster, &token, &web.url("/moved")).await;
    assert_eq!(artifact["state"], "created", "{}", error(&artifact));
    assert_eq!(artifact["source_url"], web.url("/moved"));
}

#[tokio::test(flavor = "multi_thread")]
async fn resolves_image_names_from_setting() {
    let web = WebServer::new(|_, _| Reply::ok(&content(1))).await;
    let names = format!("tiny=http://{}/tiny debian:*=http://{}/deb/{{version}}", web.address, web.address);
    let settings = [("IMAGE_NAMES", names.as_str()), ("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.1")];
    let (cluster, token) = crate::networks::cluster(&settings).await;
    let artifact = fetch(&cluster, &token, "debian:12").await;
    assert_eq!(
        (&artifact["state"], &artifact["name"], &artifact["source_url"]),
        (&json!("created"), &json!("debian:12"), &json!("debian:12"))
    );
    fetch(&cluster, &token, "tiny").await;
    let paths: Vec<String> = web.requests().into_iter().map(|request| request.path).collect();
    assert_eq!(paths, ["/deb/12", "/tiny"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn refetches_deleted_version() {
    let (cluster, token) = cluster().await;
    let web = WebServer::new(|request: &ReceivedRequest, number| match request.header("if-none-match") {
        Some("\"two\"") => Reply::status(304),
        _ if number == 0 => Reply::ok(&content(1)).with("ETag", "\"one\""),
        _ => Reply::ok(&content(2)).with("ETag", "\"two\""),
    })
    .await;
    fetch(&cluster, &token, &web.url("/x")).await;
    assert_eq!(fetch(&cluster, &token, &web.url("/x")).await["index"], 2);
    assert_eq!(cluster.call(&token, Method::DELETE, "/artifacts/x/versions/2", None).await.body["index"], 1);
    let refetched = fetch(&cluster, &token, &web.url("/x")).await;
    assert_eq!(refetched["index"], 3);
    assert_eq!(bytes(&cluster, &token, &refetched).await, content(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_source_blocks_nothing_and_ends_with_its_artifact() {
    let (cluster, token) = cluster().await;
    // Fast enough not to stall, and endless.
    let web =
        WebServer::new(|_, _| Reply { without_length: true, stall: true, ..Reply::ok(&vec![1; 70_000]) })
            .await;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let workers = tokio::spawn(std::sync::Arc::clone(&cluster.worker).run(stopped));
    let mut paths = Vec::new();
    for number in 0..12 {
        let body = json!({"url": web.url(&format!("/{number}"))});
        let artifact = post(&cluster, &token, "/artifacts", body).await.body;
        paths.push(format!("/artifacts/{}", artifact["uuid"].as_str().unwrap()));
    }
    wait_for("all fetch workers to be busy", async || (web.requests().len() >= 8).then_some(())).await;
    let body = json!({"name": "net", "netblock": "10.0.0.0/24"});
    let network = post(&cluster, &token, "/networks", body).await.body;
    let network = format!("/networks/{}", network["uuid"].as_str().unwrap());
    wait_for("the network to be created", async || {
        (get(&cluster, &token, &network).await.body["state"] == "created").then_some(())
    })
    .await;
    for path in &paths {
        assert_eq!(cluster.call(&token, Method::DELETE, path, None).await.status, 200);
    }
    wait_for("the fetches to end", async || {
        let unfinished = muster_store::operations::unfinished(&*cluster.app.store).await.unwrap();
        (unfinished == 0).then_some(())
    })
    .await;
    stop.send_replace(true);
    workers.await.unwrap();
    assert!(cluster.files_in("1/drafts").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn artifact_deleted_during_fetch_leaves_no_blob() {
    let (cluster, token) = cluster().await;
    let web = WebServer::new(|_, _| Reply::ok(&content(1))).await;
    let artifact = post(&cluster, &token, "/artifacts", json!({"url": web.url("/x")})).await.body;
    let path = format!("/artifacts/{}", artifact["uuid"].as_str().unwrap());
    assert_eq!(cluster.call(&token, Method::DELETE, &path, None).await.body["state"], "deleted");
    cluster.settle().await;
    assert_eq!(get(&cluster, &token, &path).await.body["state"], "deleted");
    let rows = cluster.app.store.query("SELECT COUNT(*) FROM blobs", &[]).await.unwrap();
    assert_eq!(rows[0].scalar::<i64>().unwrap(), 0);
}
