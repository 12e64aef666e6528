//! Quotas: each limit is exact, also for concurrent requests, and only rejects new objects.

use std::sync::Arc;

use axum::http::Method;
use muster_test_cluster::{ApiResponse, Cluster};
use muster_testing::web_server::{Reply, WebServer};
use serde_json::{Value, json};

use crate::instances::instance_request;
use crate::networks::{delete, get, post};

const QUOTAS: &str = "/auth/namespaces/ci/quotas";

/// Creates a cluster with the namespace `ci`, and tokens of `system` and `ci`.
async fn cluster(url: Option<&str>, settings: &[(&str, &str)]) -> (Cluster, [String; 2]) {
    let cluster = Cluster::sized(url, settings, (16, 65536, 1024)).await;
    cluster.create_namespace("ci").await;
    let tokens = [cluster.token("system").await, cluster.token("ci").await];
    (cluster, tokens)
}

async fn set(cluster: &Cluster, system: &str, name: &str, limit: i64) {
    let path = format!("{QUOTAS}/{name}");
    let response = cluster.call(system, Method::PUT, &path, Some(json!({"limit": limit}))).await;
    assert_eq!(response.status, 200, "{}", response.text);
    assert_eq!(response.body["is_default"], false);
}

/// Returns the usage and the limit.
async fn quota(cluster: &Cluster, token: &str, name: &str) -> (i64, Value) {
    let list = get(cluster, token, QUOTAS).await.body;
    let record = list.as_array().unwrap().iter().find(|record| record["name"] == name).unwrap();
    (record["used"].as_i64().unwrap(), record["limit"].clone())
}

async fn used(cluster: &Cluster, token: &str, name: &str) -> i64 {
    quota(cluster, token, name).await.0
}

fn assert_refused(response: &ApiResponse, name: &str, limit: i64, used: i64, requested: i64) {
    assert_eq!(response.status, 403, "{}", response.text);
    let detail = format!("{name} (limit {limit}, used {used}, requested {requested})");
    assert!(response.body["error"].as_str().unwrap().contains(&detail), "{}", response.text);
}

fn assert_created(response: &ApiResponse) -> String {
    assert_eq!(response.status, 200, "{}", response.text);
    response.body["uuid"].as_str().unwrap_or_default().to_owned()
}

fn network(name: &str, nat: bool) -> Value {
    json!({"name": name, "netblock": "10.0.0.0/24", "provide_nat": nat})
}

async fn try_instance(cluster: &Cluster, token: &str, name: &str, more: Value) -> ApiResponse {
    post(cluster, token, "/instances", instance_request(name, &more)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_networks_until_one_is_deleted() {
    let (cluster, [system, ci]) = cluster(None, &[]).await;
    set(&cluster, &system, "networks", 2).await;
    let first = assert_created(&post(&cluster, &ci, "/networks", network("a", false)).await);
    assert_created(&post(&cluster, &ci, "/networks", network("b", false)).await);
    assert_refused(&post(&cluster, &ci, "/networks", network("c", false)).await, "networks", 2, 2, 1);
    cluster.settle_networks().await;
    delete(&cluster, &ci, &format!("/networks/{first}")).await;
    cluster.settle_networks().await;
    cluster.settle().await;
    assert_created(&post(&cluster, &ci, "/networks", network("c", false)).await);
    // `system` may create in the namespace, but not beyond its limit.
    let mut request = network("d", false);
    request["namespace"] = json!("ci");
    assert_refused(&post(&cluster, &system, "/networks", request).await, "networks", 2, 2, 1);
    cluster.settle_networks().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_floating_and_routed_addresses() {
    let (cluster, [system, ci]) = cluster(None, &[]).await;
    set(&cluster, &system, "floating_addresses", 3).await;
    set(&cluster, &system, "routed_addresses", 1).await;
    // A network with NAT has one address.
    let id = assert_created(&post(&cluster, &ci, "/networks", network("a", true)).await);
    cluster.settle_networks().await;
    let route = format!("/networks/{id}/route");
    assert_eq!(post(&cluster, &ci, &route, json!({})).await.status, 200);
    assert_refused(&post(&cluster, &ci, &route, json!({})).await, "routed_addresses", 1, 1, 1);
    let interface = cluster.create_interface(&id, "ci", "one", 1).await.id;
    let other = cluster.create_interface(&id, "ci", "two", 2).await.id;
    let float = |id| format!("/interfaces/{id}/float");
    assert_eq!(post(&cluster, &ci, &float(interface), json!({})).await.status, 200);
    assert_eq!(quota(&cluster, &ci, "floating_addresses").await, (3, json!(3)));
    let refused = post(&cluster, &ci, &float(other), json!({})).await;
    assert_refused(&refused, "floating_addresses", 3, 3, 1);
    let nat = post(&cluster, &ci, "/networks", network("b", true)).await;
    assert_refused(&nat, "floating_addresses", 3, 3, 1);
    let floating = json!({"network": [{"network_uuid": id, "float": true}]});
    let instance = try_instance(&cluster, &ci, "web", floating).await;
    assert_refused(&instance, "floating_addresses", 3, 3, 1);
    assert_eq!(cluster.count_rows("instances", "1 = 1").await, 0, "nothing of the instance remains");
    post(&cluster, &ci, &format!("/interfaces/{interface}/defloat"), json!({})).await;
    assert_eq!(post(&cluster, &ci, &float(other), json!({})).await.status, 200);
    for id in [interface, other] {
        cluster.delete_interface(id).await;
    }
    assert_eq!(used(&cluster, &ci, "floating_addresses").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_namespace_cannot_take_all_floating_addresses() {
    // Five addresses, of which half are two.
    let (cluster, [system, ci]) = cluster(None, &[("FLOATING_NETWORK", "192.168.20.0/29")]).await;
    assert_eq!(quota(&cluster, &ci, "floating_addresses").await, (0, json!(2)));
    assert_created(&post(&cluster, &ci, "/networks", network("a", true)).await);
    assert_created(&post(&cluster, &ci, "/networks", network("b", true)).await);
    assert_refused(
        &post(&cluster, &ci, "/networks", network("c", true)).await,
        "floating_addresses",
        2,
        2,
        1,
    );
    for name in ["a", "b", "c"] {
        assert_created(&post(&cluster, &system, "/networks", network(name, true)).await);
    }
    cluster.settle_networks().await;
    let quota = "/auth/namespaces/ci/quotas/floating_addresses";
    let unlimited = cluster.call(&system, Method::PUT, quota, Some(json!({"limit": null}))).await;
    assert_eq!((unlimited.status.as_u16(), &unlimited.body["limit"]), (200, &json!(null)));
    assert_eq!(cluster.call(&system, Method::PUT, quota, Some(json!({}))).await.status, 400);
    let path = "/auth/namespaces/system/quotas";
    let list = get(&cluster, &system, path).await.body;
    assert!(list.as_array().unwrap().iter().all(|record| record["limit"].is_null()), "{list}");
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_instances_and_their_resources() {
    let (cluster, [system, ci]) = cluster(None, &[]).await;
    assert_created(&try_instance(&cluster, &ci, "a", json!({"cpus": 2, "memory": 1000})).await);
    cluster.settle().await;
    for (name, limit, amount, more) in [
        ("cpus", 3, 2, json!({"cpus": 2})),
        ("memory_mb", 1500, 600, json!({"memory": 600})),
        ("disk_gb", 4, 9, json!({"disk": [{"size": 9, "type": "disk"}]})),
        ("instances", 1, 1, json!({})),
        // No node is large enough either, which is not what the caller has to know.
        ("cpus", 3, 1000, json!({"cpus": 1000})),
        ("instances", 1, 1, json!({"memory": 9_999_999})),
    ] {
        set(&cluster, &system, name, limit).await;
        let usage = used(&cluster, &ci, name).await;
        assert_refused(&try_instance(&cluster, &ci, "b", more).await, name, limit, usage, amount);
        set(&cluster, &system, name, 0).await;
    }
    assert_eq!(cluster.count_rows("instances", "name = 'b'").await, 0, "no record is kept");
    // A limit below the usage leaves the instance alone.
    set(&cluster, &system, "cpus", 1).await;
    assert_eq!(post(&cluster, &ci, "/instances/a/poweroff", json!({})).await.status, 200);
    assert_eq!(post(&cluster, &ci, "/instances/a/poweron", json!({})).await.status, 200);
    assert_refused(&try_instance(&cluster, &ci, "b", json!({})).await, "cpus", 1, 2, 1);
    delete(&cluster, &ci, "/instances/a").await;
    cluster.settle().await;
    assert_created(&try_instance(&cluster, &ci, "b", json!({})).await);
    cluster.settle().await;
    // An instance in error uses nothing.
    set(&cluster, &system, "cpus", 0).await;
    let huge = try_instance(&cluster, &ci, "huge", json!({"cpus": 1000})).await;
    assert_eq!(huge.status, 507, "{}", huge.text);
    assert_eq!(used(&cluster, &ci, "cpus").await, 1);
    assert_eq!(used(&cluster, &ci, "instances").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_keys_but_not_their_replacement() {
    let (cluster, [system, ci]) = cluster(None, &[]).await;
    let present = used(&cluster, &ci, "keys").await;
    set(&cluster, &system, "keys", present + 1).await;
    let keys = "/auth/namespaces/ci/keys";
    let key = |name: &str| json!({"key_name": name, "key": "a long enough secret"});
    assert_eq!(post(&cluster, &ci, keys, key("new")).await.status, 200);
    assert_refused(&post(&cluster, &ci, keys, key("next")).await, "keys", present + 1, present + 1, 1);
    assert_eq!(post(&cluster, &ci, keys, key("new")).await.status, 200, "replaced");
    delete(&cluster, &ci, &format!("{keys}/new")).await;
    assert_eq!(post(&cluster, &ci, keys, key("next")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_uploads_and_their_bytes_exactly() {
    let (cluster, [system, ci]) = cluster(None, &[]).await;
    set(&cluster, &system, "uploads", 2).await;
    set(&cluster, &system, "upload_bytes", 1000).await;
    let first = assert_created(&post(&cluster, &ci, "/upload", json!({})).await);
    let second = assert_created(&post(&cluster, &ci, "/upload", json!({})).await);
    assert_refused(&post(&cluster, &ci, "/upload", json!({})).await, "uploads", 2, 2, 1);
    let send = async |upload: &str, bytes: usize| {
        cluster.send(&ci, Method::POST, &format!("/upload/{upload}"), vec![7; bytes]).await
    };
    assert_eq!(send(&first, 600).await.body, 600);
    assert_refused(&send(&second, 500).await, "upload_bytes", 1000, 600, 500);
    assert_eq!(send(&second, 400).await.body, 400);
    assert_refused(&send(&first, 1).await, "upload_bytes", 1000, 1000, 1);
    assert_eq!(post(&cluster, &ci, &format!("/upload/{second}/truncate/100"), json!({})).await.status, 200);
    assert_eq!(used(&cluster, &ci, "upload_bytes").await, 700);
    assert_eq!(send(&first, 300).await.body, 900);
    // The upload counts until it is an artifact.
    let path = "/artifacts/upload/img";
    let created = post(&cluster, &ci, path, json!({"upload_uuid": first})).await;
    assert_eq!(created.status, 200, "{}", created.text);
    assert_eq!(used(&cluster, &ci, "upload_bytes").await, 100);
    assert_eq!(used(&cluster, &ci, "uploads").await, 1);
    assert_eq!(used(&cluster, &ci, "artifact_bytes").await, 900);
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_chunks_of_one_upload_do_not_exceed_the_limit() {
    let (cluster, [system, ci]) = cluster(None, &[]).await;
    set(&cluster, &system, "upload_bytes", 1000).await;
    let cluster = Arc::new(cluster);
    let upload = assert_created(&post(&cluster, &ci, "/upload", json!({})).await);
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let (cluster, ci, path) = (Arc::clone(&cluster), ci.clone(), format!("/upload/{upload}"));
            tokio::spawn(async move { cluster.send(&ci, Method::POST, &path, vec![7; 300]).await.status })
        })
        .collect();
    let mut accepted = 0;
    for task in tasks {
        accepted += usize::from(task.await.unwrap() == 200);
    }
    assert_eq!(accepted, 3);
    assert_eq!(get(&cluster, &ci, &format!("/upload/{upload}")).await.body["size"], 900);
    assert_eq!(used(&cluster, &ci, "upload_bytes").await, 900);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_the_bytes_of_artifacts() {
    let (cluster, [system, ci]) = cluster(None, &[]).await;
    set(&cluster, &system, "artifact_bytes", 1000).await;
    let artifact = crate::artifacts::upload(&cluster, &ci, "a", &[1; 800]).await;
    let second = assert_created(&post(&cluster, &ci, "/upload", json!({})).await);
    cluster.send(&ci, Method::POST, &format!("/upload/{second}"), vec![2; 201]).await;
    let request = json!({"upload_uuid": second});
    let refused = post(&cluster, &ci, "/artifacts/upload/b", request.clone()).await;
    assert_refused(&refused, "artifact_bytes", 1000, 800, 201);
    assert_eq!(used(&cluster, &ci, "uploads").await, 1, "the upload can be used later");
    delete(&cluster, &ci, &format!("/artifacts/{}", artifact["uuid"].as_str().unwrap())).await;
    assert_created(&post(&cluster, &ci, "/artifacts/upload/b", request).await);
    assert_eq!(used(&cluster, &ci, "artifact_bytes").await, 201);
    set(&cluster, &system, "artifact_bytes", 201).await;
    let url = json!({"url": "https://images.example/c.qcow2"});
    assert_refused(&post(&cluster, &ci, "/artifacts", url).await, "artifact_bytes", 201, 201, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_are_validated_reset_and_removed_with_their_namespace() {
    let (cluster, [system, ci]) = cluster(None, &[("QUOTA_NETWORKS", "7")]).await;
    assert_eq!(quota(&cluster, &ci, "networks").await, (0, json!(7)));
    set(&cluster, &system, "networks", 2).await;
    assert_eq!(quota(&cluster, &ci, "networks").await, (0, json!(2)));
    let path = format!("{QUOTAS}/networks");
    assert_eq!(delete(&cluster, &system, &path).await.body["limit"], 7);
    for (path, body) in [
        (path.clone(), json!({"limit": -1})),
        (path.clone(), json!({"limit": "many"})),
        (path, json!({})),
        (format!("{QUOTAS}/network"), json!({"limit": 1})),
    ] {
        let response = cluster.call(&system, Method::PUT, &path, Some(body)).await;
        assert_eq!(response.status, 400, "{path}: {}", response.text);
    }
    let own = cluster.call(&ci, Method::PUT, &format!("{QUOTAS}/keys"), Some(json!({"limit": 0}))).await;
    assert_eq!(own.status, 401, "a namespace cannot raise its own limits");
}

/// Creates networks and instances concurrently and checks that exactly as many exist as the limits allow.
async fn assert_limits_are_exact(url: Option<&str>) {
    let (cluster, [system, ci]) = cluster(url, &[]).await;
    set(&cluster, &system, "networks", 3).await;
    set(&cluster, &system, "cpus", 4).await;
    let cluster = Arc::new(cluster);
    let call = |path: &str, body: Value| {
        let (cluster, ci, path) = (Arc::clone(&cluster), ci.clone(), path.to_owned());
        tokio::spawn(async move { post(&cluster, &ci, &path, body).await.status.as_u16() })
    };
    let networks: Vec<_> = (0..10).map(|n| call("/networks", network(&format!("n{n}"), false))).collect();
    let instances: Vec<_> = (0..10)
        .map(|n| call("/instances", instance_request(&format!("i{n}"), &json!({"cpus": 1}))))
        .collect();
    for (tasks, expected) in [(networks, 3), (instances, 4)] {
        let mut created = 0;
        for task in tasks {
            match task.await.unwrap() {
                200 => created += 1,
                status => assert_eq!(status, 403),
            }
        }
        assert_eq!(created, expected);
    }
    assert_eq!(used(&cluster, &ci, "networks").await, 3);
    assert_eq!(used(&cluster, &ci, "cpus").await, 4);
    cluster.settle_networks().await;
    cluster.settle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn limits_are_exact_under_concurrent_requests() {
    assert_limits_are_exact(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn limits_are_exact_under_concurrent_requests_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => assert_limits_are_exact(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}

/// Returns an image for a disk of 3 GB.
async fn image_of_3_gb(cluster: &Cluster, token: &str) -> Vec<u8> {
    let disk = json!({"disk": [{"size": 3, "type": "disk"}]});
    let path = format!("/instances/{}", assert_created(&try_instance(cluster, token, "origin", disk).await));
    cluster.settle().await;
    let snapshots = post(cluster, token, &format!("{path}/snapshot"), json!({})).await.body;
    cluster.settle().await;
    let image = cluster.download_until_error(token, snapshots["vda"]["blob_uuid"].as_str().unwrap()).await;
    delete(cluster, token, &path).await;
    cluster.settle().await;
    image
}

/// Disks without a size count as soon as their images are fetched, in quotas, claims and on their nodes.
async fn assert_disks_of_fetched_images_count(url: Option<&str>) {
    let (cluster, [system, ci]) = cluster(url, &[("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.1")]).await;
    let image = image_of_3_gb(&cluster, &system).await;
    let web = WebServer::new(move |_, _| Reply::ok(&image)).await;
    let disk = json!({"disk": [{"base": web.url("/image"), "type": "disk"}]});
    let claim =
        json!({"limit_cpus": 8, "limit_memory_mb": 8000, "limit_disk_gb": 10, "expires_in_seconds": 3600});
    let claim = assert_created(&post(&cluster, &system, "/auth/namespaces/ci/claims", claim).await);
    set(&cluster, &system, "disk_gb", 5).await;
    for name in ["a", "b", "c"] {
        assert_created(&try_instance(&cluster, &ci, name, disk.clone()).await);
    }
    cluster.settle().await;
    let instances = get(&cluster, &ci, "/instances?all=true").await.body;
    let instances = instances.as_array().unwrap();
    let created: Vec<&Value> = instances.iter().filter(|record| record["state"] == "created").collect();
    assert_eq!((instances.len(), created.len()), (3, 1), "{instances:?}");
    for record in instances.iter().filter(|record| record["state"] != "created") {
        let reason = record["error_message"].as_str().unwrap_or_default();
        assert!(reason.contains("disk_gb (limit 5, used 3, requested 3)"), "{record}");
    }
    let disk_of_nodes =
        async || -> i64 { cluster.committed_capacity().await.values().map(|(_, _, disk_gb)| disk_gb).sum() };
    let claimed = async || -> i64 {
        let record = get(&cluster, &system, &format!("/auth/namespaces/ci/claims/{claim}")).await.body;
        record["used_disk_gb"].as_i64().unwrap()
    };
    assert_eq!((used(&cluster, &ci, "disk_gb").await, disk_of_nodes().await, claimed().await), (3, 3, 3));
    delete(&cluster, &ci, &format!("/instances/{}", created[0]["uuid"].as_str().unwrap())).await;
    cluster.settle().await;
    assert_eq!((used(&cluster, &ci, "disk_gb").await, disk_of_nodes().await, claimed().await), (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_without_size_count_with_their_images_on_sqlite() {
    assert_disks_of_fetched_images_count(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_without_size_count_with_their_images_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => assert_disks_of_fetched_images_count(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn image_that_is_too_large_for_the_node_puts_the_instance_into_error() {
    let (large, [system, _]) = cluster(None, &[]).await;
    let image = image_of_3_gb(&large, &system).await;
    let web = WebServer::new(move |_, _| Reply::ok(&image)).await;
    let settings = [("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.1")];
    let cluster = Cluster::sized(None, &settings, (16, 65536, 2)).await;
    let token = cluster.token("system").await;
    let disk = json!({"disk": [{"base": web.url("/image"), "type": "disk"}]});
    let id = assert_created(&try_instance(&cluster, &token, "big", disk).await);
    cluster.settle().await;
    let record = get(&cluster, &token, &format!("/instances/{id}")).await.body;
    let reason = record["error_message"].as_str().unwrap_or_default();
    assert!(record["state"] == "error" && reason.contains("need 3 GB"), "{record}");
    assert!(reason.contains("2.0 GB of disk are free") && reason.contains("Set the size"), "{reason}");
}
