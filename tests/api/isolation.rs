//! What one namespace can do to another.

use std::collections::BTreeSet;

use axum::http::Method;
use muster_control::objects;
use muster_test_cluster::{Cluster, caller};
use muster_testing::web_server::{Reply, WebServer};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

use crate::artifacts::try_upload;
use crate::instances::{create, create_and_settle, text};
use crate::networks::{get, post};

const TENANTS: [&str; 3] = ["blue", "green", "red"];

/// A cluster with namespaces that fetches `debian:12` from a site of the test.
async fn cluster_with_site(site: &str) -> Cluster {
    let settings = [
        ("IMAGE_DOWNLOAD_URL", site),
        ("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.1"),
        ("IMAGE_STALL_TIMEOUT", "1"),
        ("CLUSTER_OP_MAX_ATTEMPTS", "1"),
    ];
    let cluster = Cluster::with(&settings, None).await;
    for name in TENANTS {
        cluster.create_namespace(name).await;
    }
    cluster
}

fn with_base(base: &str) -> Value {
    json!({"disk": [{"base": base}]})
}

#[tokio::test(flavor = "multi_thread")]
async fn upload_of_trusting_namespace_does_not_replace_fetched_image() {
    let web = WebServer::new(|_, _| Reply::ok(&[4; 5000])).await;
    let cluster = cluster_with_site(&web.url("/site")).await;
    let (blue, red) = (cluster.token("blue").await, cluster.token("red").await);
    post(&cluster, &blue, "/auth/namespaces/blue/trust", json!({"external_namespace": "red"})).await;
    for base in ["debian:12".to_owned(), web.url("/full.img")] {
        let poisoned = try_upload(&cluster, &blue, "x", &[6; 5000], json!({"source_url": base})).await;
        assert_eq!(poisoned.status, 200, "{}", poisoned.text);
        let record = create(&cluster, &red, "victim", &with_base(&base)).await;
        assert_ne!(record["disks"][0]["blob_uuid"], poisoned.body["blob_uuid"], "{base}");
        // An explicit reference works.
        let explicit = format!("sf://artifact/{}", text(&poisoned.body, "uuid"));
        let record = create(&cluster, &red, "chosen", &with_base(&explicit)).await;
        assert_eq!(record["disks"][0]["blob_uuid"], poisoned.body["blob_uuid"], "{base}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn upload_never_stands_for_the_content_of_its_url() {
    let web = WebServer::new(|request, _| match request.path.as_str() {
        "/present" => Reply::ok(&[4; 5000]),
        _ => Reply::status(404),
    })
    .await;
    let cluster = cluster_with_site(&web.url("/site")).await;
    let (red, system) = (cluster.token("red").await, cluster.token("system").await);
    for (number, (owner, shared)) in [(&red, false), (&system, true)].into_iter().enumerate() {
        for (path, state) in [("/present", "created"), ("/absent", "error")] {
            let url = web.url(path);
            let fields = json!({"source_url": url, "shared": shared});
            let uploaded = try_upload(&cluster, owner, "x", &[6; 5000], fields).await;
            assert_eq!(uploaded.status, 200, "{}", uploaded.text);
            let name = format!("n{number}");
            let record = create_and_settle(&cluster, &red, &name, &with_base(&url)).await;
            assert_eq!(text(&record, "state"), state, "{record}");
            assert_ne!(record["disks"][0]["blob_uuid"], uploaded.body["blob_uuid"]);
        }
        let deleted = cluster.call(&red, Method::DELETE, "/artifacts", Some(json!({"confirm": true}))).await;
        assert_eq!(deleted.status, 200, "{}", deleted.text);
    }
}

/// The objects of one name: in some namespaces, and with `system`, an artifact that `system` shares.
fn name_of(owners: &[&str]) -> String {
    format!("in-{}", owners.join("-"))
}

/// Creates an artifact, a network, an instance and a label for each subset of the owners, with the same name in all of
/// them.
async fn create_objects(cluster: &Cluster) -> Vec<Vec<&'static str>> {
    let owners = ["blue", "green", "red", "system"];
    let subset =
        |bits: usize| (0..4).filter(move |bit| bits >> bit & 1 == 1).map(|bit| owners[bit]).collect();
    let subsets: Vec<Vec<&str>> = (1..16).map(subset).collect();
    for owner in owners {
        let token = cluster.token(owner).await;
        for subset in subsets.iter().filter(|subset| subset.contains(&owner)) {
            let name = name_of(subset);
            let content = format!("{owner}/{name}");
            let fields = json!({"shared": owner == "system"});
            let artifact = try_upload(cluster, &token, &name, content.as_bytes(), fields).await;
            assert_eq!(artifact.status, 200, "{}", artifact.text);
            let network = json!({"name": name, "netblock": "10.0.0.0/24"});
            assert_eq!(post(cluster, &token, "/networks", network).await.status, 200);
            let label = json!({"blob_uuid": artifact.body["blob_uuid"]});
            assert_eq!(post(cluster, &token, &format!("/label/{name}"), label).await.status, 200);
            if subset.len() < 3 {
                create(cluster, &token, &name, &json!({})).await;
            }
        }
    }
    subsets
}

/// Checks what every name means to a tenant.
async fn check_names(cluster: &Cluster, tenant: &str, subsets: &[Vec<&str>]) -> Result<(), TestCaseError> {
    let token = cluster.token(tenant).await;
    for subset in subsets {
        let name = name_of(subset);
        let own = subset.contains(&tenant).then_some(tenant);
        let shared = subset.contains(&"system").then_some("system");
        for (path, expected) in [
            (format!("/artifacts/{name}"), own.or(shared)),
            (format!("/artifacts/{name}/versions"), own.or(shared)),
            (format!("/networks/{name}"), own),
            (format!("/networks/{name}/addresses"), own),
            (format!("/label/{name}"), own),
            (format!("/instances/{name}"), own.filter(|_| subset.len() < 3)),
        ] {
            let response = get(cluster, &token, &path).await;
            let expected_status = if expected.is_some() { 200 } else { 404 };
            prop_assert_eq!(
                response.status.as_u16(),
                expected_status,
                "{} of {}: {}",
                path,
                tenant,
                response.text
            );
            if let Some(namespace) = response.body.get("namespace") {
                prop_assert_eq!(namespace.as_str(), expected, "{} of {}", path, tenant);
            }
        }
    }
    Ok(())
}

/// Checks that a tenant boots the content of the site.
async fn check_base(cluster: &Cluster, tenant: &str, uploads: &[Value]) -> Result<(), TestCaseError> {
    let token = cluster.token(tenant).await;
    let record = create(cluster, &token, "boot", &with_base("debian:12")).await;
    prop_assert!(!uploads.contains(&record["disks"][0]["blob_uuid"]), "{}", record);
    let path = format!("/instances/{}", text(&record, "uuid"));
    cluster.call(&token, Method::DELETE, &path, None).await;
    cluster.settle().await;
    Ok(())
}

#[test]
fn no_combination_of_trusts_changes_what_a_name_means() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let web = runtime.block_on(WebServer::new(|_, _| Reply::ok(&[4; 5000])));
    let cluster = runtime.block_on(cluster_with_site(&web.url("/site")));
    let (subsets, uploads) = runtime.block_on(async {
        let subsets = create_objects(&cluster).await;
        let mut uploads = Vec::new();
        for (byte, tenant) in (10..).zip(TENANTS) {
            let token = cluster.token(tenant).await;
            let fields = json!({"source_url": "debian:12"});
            let uploaded = try_upload(&cluster, &token, "debian", &[byte; 5000], fields).await;
            uploads.push(uploaded.body["blob_uuid"].clone());
        }
        cluster.settle().await;
        (subsets, uploads)
    });
    let pairs: Vec<(&str, &str)> = TENANTS
        .iter()
        .flat_map(|from| TENANTS.iter().filter(move |to| *to != from).map(move |to| (*from, *to)))
        .collect();
    let trusts = prop::collection::btree_set(prop::sample::select(pairs.clone()), 0..=pairs.len());
    let mut runner = TestRunner::new(Config { cases: 12, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&trusts, |trusts| {
        let trusts: BTreeSet<(&str, &str)> = trusts;
        runtime.block_on(async {
            for (from, to) in &pairs {
                if trusts.contains(&(*from, *to)) {
                    objects::trust::add(&cluster.app, &caller(), from, to).await.unwrap();
                } else {
                    objects::trust::remove(&cluster.app, &caller(), from, to).await.unwrap();
                }
            }
            for tenant in TENANTS {
                check_names(&cluster, tenant, &subsets).await?;
                check_base(&cluster, tenant, &uploads).await?;
            }
            Ok(())
        })
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    let _guard = runtime.enter();
    drop((cluster, web));
}

#[tokio::test(flavor = "multi_thread")]
async fn blob_metadata_and_events_belong_to_the_namespace_that_wrote_them() {
    let web = WebServer::new(|_, _| Reply::status(404)).await;
    let cluster = cluster_with_site(&web.url("/site")).await;
    let (blue, red) = (cluster.token("blue").await, cluster.token("red").await);
    let (green, system) = (cluster.token("green").await, cluster.token("system").await);
    let mine = try_upload(&cluster, &blue, "x", b"same bytes", json!({})).await.body;
    let theirs = try_upload(&cluster, &red, "y", b"same bytes", json!({})).await.body;
    let blob = text(&mine, "blob_uuid");
    assert_eq!(text(&theirs, "blob_uuid"), blob);
    let path = format!("/blobs/{blob}/metadata");
    let set = async |token: &str, key: &str, value: &str| {
        let response = post(&cluster, token, &path, json!({"key": key, "value": value})).await;
        assert_eq!(response.status, 200, "{}", response.text);
    };
    set(&blue, "owner", "blue team").await;
    set(&red, "owner", "red team").await;
    set(&system, "owner", "operator").await;
    let remove = async |token: &str, key: &str| {
        let path = format!("{path}/{key}");
        assert_eq!(cluster.call(token, Method::DELETE, &path, None).await.status, 200);
    };
    remove(&green, "owner").await;
    let check = async |token: &str, expected: Value| {
        assert_eq!(get(&cluster, token, &path).await.body, expected);
        assert_eq!(get(&cluster, token, &format!("/blobs/{blob}")).await.body["metadata"], expected);
    };
    check(&blue, json!({"owner": "blue team"})).await;
    check(&red, json!({"owner": "red team"})).await;
    check(&green, json!({})).await;
    check(&system, json!({"owner": "operator", "blue/owner": "blue team", "red/owner": "red team"})).await;
    let values = async |token: &str| -> Vec<Value> {
        cluster.settle().await;
        let events = muster_test_cluster::wait_for("the events to be stored", async || {
            (cluster.app.events.depth() == 0).then_some(())
        });
        events.await;
        let list = get(&cluster, token, &format!("/blobs/{blob}/events")).await.body;
        let list = list.as_array().unwrap().iter().map(|event| event["extra"]["value"].clone());
        list.filter(|value| !value.is_null()).collect()
    };
    assert_eq!(values(&blue).await, ["blue team"]);
    assert_eq!(values(&red).await, ["red team"]);
    assert_eq!(values(&green).await, [""; 0]);
    assert_eq!(values(&system).await.len(), 3);
    remove(&blue, "owner").await;
    remove(&blue, "red%2Fowner").await;
    remove(&system, "red%2Fowner").await;
    check(&blue, json!({})).await;
    check(&red, json!({})).await;
    check(&system, json!({"owner": "operator"})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upload_of_known_content_does_not_reveal_its_age_or_uses() {
    let web =
        WebServer::new(|_, _| Reply::ok(&[7; 5000]).with("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT"))
            .await;
    let cluster = cluster_with_site(&web.url("/site")).await;
    let (blue, red) = (cluster.token("blue").await, cluster.token("red").await);
    let record = create(&cluster, &blue, "www", &with_base(&web.url("/x.img"))).await;
    let blob = text(&record["disks"][0], "blob_uuid");
    let path = format!("/blobs/{blob}");
    get(&cluster, &blue, &format!("{path}/data")).await;
    let original = get(&cluster, &blue, &path).await.body;
    assert_eq!(original["reference_count"], 2, "{original}");
    assert!(original["last_used"].is_number() && original["modified"].is_string(), "{original}");
    let before = muster_types::time::now();
    let uploaded = try_upload(&cluster, &red, "y", &[7; 5000], json!({})).await.body;
    assert_eq!(text(&uploaded, "blob_uuid"), blob);
    assert_eq!(uploaded["blobs"]["1"]["reference_count"], 1);
    let fresh = try_upload(&cluster, &red, "z", &[8; 5000], json!({})).await.body;
    let events = async |blob: &str| {
        muster_test_cluster::wait_for("the events to be stored", async || {
            (cluster.app.events.depth() == 0).then_some(())
        })
        .await;
        let list = get(&cluster, &red, &format!("/blobs/{blob}/events")).await.body;
        list.as_array().unwrap().iter().map(|event| event["message"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(events(blob).await, events(text(&fresh, "blob_uuid")).await);
    let check = async || {
        let seen = get(&cluster, &red, &path).await.body;
        assert!(seen["fetched_at"].as_f64().unwrap() >= before, "{seen}");
        assert_eq!((&seen["modified"], &seen["last_used"]), (&Value::Null, &Value::Null), "{seen}");
        seen["reference_count"].clone()
    };
    assert_eq!(check().await, 1);
    // Not after the artifact is deleted either, and the first namespace sees nothing of the second.
    cluster.call(&red, Method::DELETE, "/artifacts/y", None).await;
    assert_eq!(check().await, 0);
    let mut records = [get(&cluster, &blue, &path).await.body, original];
    for record in &mut records {
        // Now, because an instance of the first namespace uses it.
        let last_used = record.as_object_mut().unwrap().remove("last_used");
        assert!(last_used.is_some_and(|time| time.is_number()));
    }
    assert_eq!(records[0], records[1]);
    // A namespace that only knows the id learns nothing about its age.
    let other = get(&cluster, &cluster.token("green").await, &path).await.body;
    let times = (&other["fetched_at"], &other["modified"], &other["last_used"], &other["reference_count"]);
    assert_eq!(times, (&json!(0.0), &Value::Null, &Value::Null, &json!(0)), "{other}");
}
