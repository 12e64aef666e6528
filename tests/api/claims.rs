//! Capacity claims: what is reserved for a namespace and withheld from others.

use std::sync::Arc;

use axum::http::Method;
use muster_control::reconcile;
use muster_test_cluster::{ApiResponse, Cluster, wait_for};
use muster_types::ids::ClaimId;
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use crate::instances::{create_and_settle, instance_request};
use crate::networks::{delete, get, post};

/// The size of each of two nodes, which together can commit 12 CPUs, 393216 MB and 10240 GB.
const NODE_SIZE: (u64, u64, u64) = (2, 65536, 1024);
const CI_CLAIMS: &str = "/auth/namespaces/ci/claims";

/// Creates a cluster with the namespaces `ci` and `other`, and tokens of `system`, `ci` and `other`.
async fn cluster(url: Option<&str>) -> (Cluster, [String; 3]) {
    let cluster = Cluster::sized(url, &[], NODE_SIZE).await;
    for name in ["ci", "other"] {
        cluster.create_namespace(name).await;
    }
    let tokens = [cluster.token("system").await, cluster.token("ci").await, cluster.token("other").await];
    (cluster, tokens)
}

fn claim_request(cpus: i64, memory: i64, disk: i64) -> Value {
    json!({"limit_cpus": cpus, "limit_memory_mb": memory, "limit_disk_gb": disk, "expires_in_seconds": 3600})
}

/// Creates a claim and returns its record.
async fn create_claim(cluster: &Cluster, token: &str, path: &str, body: Value) -> Value {
    let response = post(cluster, token, path, body).await;
    assert_eq!(response.status, 200, "{}", response.text);
    response.body
}

fn path(claim: &Value) -> String {
    let part = |key: &str| claim[key].as_str().unwrap().to_owned();
    format!("/auth/namespaces/{}/claims/{}", part("namespace"), part("uuid"))
}

async fn put(cluster: &Cluster, token: &str, claim: &Value, body: Value) -> ApiResponse {
    cluster.call(token, Method::PUT, &path(claim), Some(body)).await
}

/// Returns the usage of a claim: CPUs, MB, GB.
async fn claim_usage(cluster: &Cluster, token: &str, claim: &Value) -> [i64; 3] {
    let record = get(cluster, token, &path(claim)).await.body;
    ["used_cpus", "used_memory_mb", "used_disk_gb"].map(|field| record[field].as_i64().unwrap())
}

fn status_and_error(response: &ApiResponse) -> (u16, &str) {
    (response.status.as_u16(), response.body["error"].as_str().unwrap_or_default())
}

async fn try_create(cluster: &Cluster, token: &str, name: &str, cpus: i64) -> ApiResponse {
    post(cluster, token, "/instances", instance_request(name, &json!({"cpus": cpus}))).await
}

fn namespace_ref(name: &str) -> ObjectRef {
    ObjectRef::namespace(name)
}

#[tokio::test(flavor = "multi_thread")]
async fn creates_shows_lists_updates_and_deletes_claim() {
    let (cluster, [system, ..]) = cluster(None).await;
    assert_eq!(get(&cluster, &system, CI_CLAIMS).await.body, json!([]));
    let before = muster_types::time::now();
    let claim = create_claim(&cluster, &system, CI_CLAIMS, claim_request(4, 2048, 50)).await;
    let expected = json!({
        "uuid": claim["uuid"], "namespace": "ci", "state": "created", "coverage_state": "active", "limit_cpus": 4,
        "limit_memory_mb": 2048, "limit_disk_gb": 50, "used_cpus": 0, "used_memory_mb": 0, "used_disk_gb": 0,
        "expires_at": claim["expires_at"], "updated_at": claim["updated_at"], "version": 1, "metadata": {}
    });
    assert_eq!(claim, expected);
    let expiry = claim["expires_at"].as_f64().unwrap();
    assert!((before + 3600.0..before + 3660.0).contains(&expiry), "{expiry}");
    assert_eq!(get(&cluster, &system, &path(&claim)).await.body, claim);
    assert_eq!(get(&cluster, &system, CI_CLAIMS).await.body, json!([claim]));

    let updated = put(&cluster, &system, &claim, json!({"limit_cpus": 0, "limit_disk_gb": null})).await.body;
    assert_eq!((&updated["limit_cpus"], &updated["limit_disk_gb"]), (&json!(0), &json!(50)));
    assert_eq!(updated["expires_at"], claim["expires_at"], "omitted fields are unchanged");
    let updated = put(&cluster, &system, &claim, json!({"expires_in_seconds": 7200})).await.body;
    assert!(updated["expires_at"].as_f64().unwrap() > expiry + 3590.0, "{updated}");

    let object = ObjectRef::new(ObjectType::NamespaceClaim, claim["uuid"].as_str().unwrap());
    cluster.messages(&object).await;
    let events = get(&cluster, &system, &format!("{}/events?limit=2", path(&claim))).await.body;
    assert_eq!(events.as_array().unwrap().len(), 2);
    assert_eq!(events[0]["message"], "updated namespace claim");
    let audit = get(&cluster, &system, &format!("{}/events?event_type=audit", path(&claim))).await.body;
    let creation_event =
        audit.as_array().unwrap().iter().find(|event| event["message"] == "db record created");
    assert_eq!(creation_event.unwrap()["extra"]["limit_memory_mb"], 2048);

    let deleted = delete(&cluster, &system, &path(&claim)).await;
    assert_eq!(
        (deleted.status.as_u16(), &deleted.body),
        (200, &updated),
        "returns the record before deletion"
    );
    for verb in [Method::GET, Method::DELETE] {
        let not_found = cluster.call(&system, verb, &path(&claim), None).await;
        assert_eq!(status_and_error(&not_found), (404, "namespace claim not found"));
    }
    assert_eq!(get(&cluster, &system, CI_CLAIMS).await.body, json!([]));
    assert!(cluster.messages(&object).await.is_empty(), "its events are deleted");
    let events = cluster.events(&namespace_ref("ci")).await;
    let find = |message: &str| events.iter().find(|event| event.message == message).unwrap();
    find("create namespace claim request from REST API");
    find("delete namespace claim request from REST API");
    let returned = &find("namespace claim deleted, capacity returned").extra;
    assert_eq!((&returned["claim"], &returned["clamped"]), (&claim["uuid"], &json!(false)));
    let returned_fields =
        ["returned_cpus", "returned_memory_mb", "returned_disk_gb"].map(|field| returned[field].clone());
    assert_eq!(returned_fields, [json!(0), json!(2048), json!(50)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_invalid_claim_with_reason() {
    let (cluster, [system, ..]) = cluster(None).await;
    let with_field = |key: &str, value: Value| {
        let mut body = claim_request(1, 1, 1);
        body[key] = value;
        body
    };
    for key in ["limit_cpus", "limit_memory_mb", "limit_disk_gb", "expires_in_seconds"] {
        let response = post(&cluster, &system, CI_CLAIMS, with_field(key, Value::Null)).await;
        assert_eq!(status_and_error(&response), (400, format!("no {key} specified").as_str()));
        for wrong in [json!(true), json!("4"), json!(1.5), json!([1]), json!({})] {
            let response = post(&cluster, &system, CI_CLAIMS, with_field(key, wrong)).await;
            assert_eq!(status_and_error(&response), (400, format!("{key} is not an integer").as_str()));
        }
        let response = post(&cluster, &system, CI_CLAIMS, with_field(key, json!(-1))).await;
        let error = if key == "expires_in_seconds" {
            "expires_in_seconds must be positive".to_owned()
        } else {
            format!("{key} cannot be negative")
        };
        assert_eq!(status_and_error(&response), (400, error.as_str()));
    }
    let response = post(&cluster, &system, CI_CLAIMS, with_field("expires_in_seconds", json!(0))).await;
    assert_eq!(status_and_error(&response), (400, "expires_in_seconds must be positive"));
    let response = post(&cluster, &system, CI_CLAIMS, json!({})).await;
    assert_eq!(status_and_error(&response), (400, "no limit_cpus specified"));
    let response = post(&cluster, &system, CI_CLAIMS, with_field("owner", json!("me"))).await;
    assert_eq!(status_and_error(&response), (400, "owner: not declared by this endpoint"));
    assert_eq!(get(&cluster, &system, CI_CLAIMS).await.body, json!([]), "nothing is stored");

    let claim = create_claim(&cluster, &system, CI_CLAIMS, claim_request(1, 1, 1)).await;
    for (body, error) in [
        (json!({}), "no claim fields to update specified"),
        (json!({"limit_cpus": null}), "no claim fields to update specified"),
        (json!({"limit_cpus": false}), "limit_cpus is not an integer"),
        (json!({"limit_disk_gb": -7}), "limit_disk_gb cannot be negative"),
        (json!({"expires_in_seconds": 0}), "expires_in_seconds must be positive"),
        (json!({"expires_in_seconds": "soon"}), "expires_in_seconds is not an integer"),
    ] {
        assert_eq!(status_and_error(&put(&cluster, &system, &claim, body).await), (400, error));
    }
    let second = post(&cluster, &system, CI_CLAIMS, claim_request(1, 1, 1)).await;
    assert_eq!(status_and_error(&second), (409, "this namespace already holds an active claim"));
    let uuid = claim["uuid"].as_str().unwrap();
    for wrong in ["other".to_owned(), uuid[1..].to_owned(), ClaimId::new().to_string()] {
        for suffix in ["", "/events"] {
            let response = get(&cluster, &system, &format!("{CI_CLAIMS}/{wrong}{suffix}")).await;
            assert_eq!(status_and_error(&response), (404, "namespace claim not found"), "{wrong}{suffix}");
        }
    }
    let other_namespace = get(&cluster, &system, &format!("/auth/namespaces/other/claims/{uuid}")).await;
    assert_eq!(status_and_error(&other_namespace), (404, "namespace claim not found"));
    for path in
        ["/auth/namespaces/absent/claims".to_owned(), format!("/auth/namespaces/absent/claims/{uuid}")]
    {
        assert_eq!(status_and_error(&get(&cluster, &system, &path).await), (404, "namespace not found"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_claim_beyond_cluster_capacity() {
    let (cluster, [system, ci, other]) = cluster(None).await;
    let no_capacity = "the cluster does not have the capacity to promise this claim";
    let response = post(&cluster, &system, CI_CLAIMS, claim_request(13, 393_217, 10_240)).await;
    let error = format!(
        "{no_capacity}: cpus (limit 12, used 0, requested 13), memory_mb (limit 393216, used 0, requested 393217)"
    );
    assert_eq!(status_and_error(&response), (507, error.as_str()));
    let response = post(&cluster, &system, CI_CLAIMS, claim_request(0, 0, i64::MAX)).await;
    let error = format!("{no_capacity}: disk_gb (limit 10240, used 0, requested {})", i64::MAX);
    assert_eq!(status_and_error(&response), (507, error.as_str()));

    create_and_settle(&cluster, &other, "there", &json!({"cpus": 2})).await;
    create_and_settle(&cluster, &ci, "here", &json!({"cpus": 2})).await;
    let claim = create_claim(&cluster, &system, CI_CLAIMS, claim_request(7, 1024, 10)).await;
    assert_eq!(claim_usage(&cluster, &system, &claim).await, [2, 512, 1], "existing instances count");
    let other_claims = "/auth/namespaces/other/claims";
    let response = post(&cluster, &system, other_claims, claim_request(6, 0, 0)).await;
    let error = format!("{no_capacity}: cpus (limit 12, used 7, requested 6)");
    assert_eq!(
        status_and_error(&response),
        (507, error.as_str()),
        "five are available to it, including the two in use"
    );
    create_claim(&cluster, &system, other_claims, claim_request(5, 0, 0)).await;
    let response = put(&cluster, &system, &claim, json!({"limit_cpus": 8})).await;
    let error = format!("{no_capacity}: cpus (limit 12, used 5, requested 8)");
    assert_eq!(status_and_error(&response), (507, error.as_str()));
    assert_eq!(put(&cluster, &system, &claim, json!({"limit_memory_mb": 4096})).await.status, 200);

    let response = put(&cluster, &system, &claim, json!({"limit_cpus": 1, "limit_disk_gb": 0})).await;
    let error = "a claim cannot be shrunk below what it is already using: cpus (limit 7, used 2, requested 1), \
               disk_gb (limit 10, used 1, requested 0)";
    assert_eq!(status_and_error(&response), (409, error));
    assert_eq!(put(&cluster, &system, &claim, json!({"limit_cpus": 2})).await.status, 200);

    delete(&cluster, &system, &path(&claim)).await;
    reconcile::checkin::leave(&cluster.app).await;
    let response = post(&cluster, &system, CI_CLAIMS, claim_request(0, 0, 0)).await;
    let error = "the cluster capacity accounting is not available yet, please retry";
    assert_eq!(status_and_error(&response), (503, error));
}

#[tokio::test(flavor = "multi_thread")]
async fn withholds_claimed_capacity_and_charges_usage() {
    let (cluster, [system, ci, other]) = cluster(None).await;
    let claim = create_claim(&cluster, &system, CI_CLAIMS, claim_request(8, 4096, 100)).await;
    for name in ["a", "b"] {
        create_and_settle(&cluster, &other, name, &json!({"cpus": 2})).await;
    }
    let response = try_create(&cluster, &other, "c", 1).await;
    let error = "no node had capacity for this instance, 2 candidates refused it";
    assert_eq!(status_and_error(&response), (507, error));
    assert_eq!(
        (&response.body["stage"], &response.body["transient"]),
        (&json!("capacity_guard"), &json!(true))
    );
    let failed = get(&cluster, &other, "/instances/c").await.body;
    let object = ObjectRef::new(ObjectType::Instance, failed["uuid"].as_str().unwrap());
    let events = cluster.events(&object).await;
    let last = events.iter().find(|event| event.message == "schedule final candidates").unwrap();
    let reason =
        "8 of the 8 cpus that are free in the cluster are claimed by other namespaces, 1 are requested";
    assert_eq!(last.extra["refused"], json!({"sim-1": reason, "sim-2": reason}));

    let mut created = Vec::new();
    for number in 0..4 {
        created.push(create_and_settle(&cluster, &ci, &format!("n{number}"), &json!({"cpus": 2})).await);
        let times = number + 1;
        assert_eq!(claim_usage(&cluster, &system, &claim).await, [2 * times, 512 * times, times]);
    }
    assert_eq!(try_create(&cluster, &ci, "more", 1).await.status, 507, "the nodes have no free CPUs");
    let path_of = |record: &Value| format!("/instances/{}", record["uuid"].as_str().unwrap());
    delete(&cluster, &ci, &path_of(&created[0])).await;
    cluster.settle().await;
    assert_eq!(claim_usage(&cluster, &system, &claim).await, [6, 1536, 3]);
    assert_eq!(
        try_create(&cluster, &other, "d", 1).await.status,
        507,
        "freed capacity is reserved for the claim again"
    );

    // Beyond its claim a namespace uses unreserved capacity.
    delete(&cluster, &other, "/instances/a").await;
    cluster.settle().await;
    for name in ["x", "y"] {
        create_and_settle(&cluster, &ci, name, &json!({"cpus": 2})).await;
    }
    assert_eq!(claim_usage(&cluster, &system, &claim).await[0], 10, "two more than the claim");
    let grown = put(&cluster, &system, &claim, json!({"limit_cpus": 9})).await;
    assert_eq!(grown.status, 200, "the limit can grow towards the usage: {}", grown.text);
    cluster.call(&ci, Method::DELETE, "/instances", Some(json!({"confirm": true}))).await;
    cluster.settle().await;
    assert_eq!(claim_usage(&cluster, &system, &claim).await, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_claim_reserves_nothing_and_keeps_its_usage() {
    let (cluster, [system, ci, other]) = cluster(None).await;
    let claim = create_claim(&cluster, &system, CI_CLAIMS, claim_request(11, 0, 0)).await;
    create_and_settle(&cluster, &ci, "mine", &json!({"cpus": 2})).await;
    assert_eq!(try_create(&cluster, &other, "early", 2).await.status, 507);
    assert_eq!(put(&cluster, &system, &claim, json!({"expires_in_seconds": 1})).await.status, 200);
    let expired = wait_for("the claim to expire", async || {
        let record = get(&cluster, &system, &path(&claim)).await.body;
        (record["coverage_state"] == "expired").then_some(record)
    })
    .await;
    create_and_settle(&cluster, &other, "late", &json!({"cpus": 2})).await;
    delete(&cluster, &ci, "/instances/mine").await;
    cluster.settle().await;
    assert_eq!(
        get(&cluster, &system, &path(&claim)).await.body,
        expired,
        "usage of an expired claim is frozen"
    );
    assert_eq!(expired["used_cpus"], 2);
    let response = put(&cluster, &system, &claim, json!({"expires_in_seconds": 60})).await;
    let error = "this claim is no longer active and cannot be changed, delete it and create a new one";
    assert_eq!(status_and_error(&response), (409, error));
    let next = create_claim(&cluster, &system, CI_CLAIMS, claim_request(10, 0, 0)).await;
    assert_eq!(get(&cluster, &system, CI_CLAIMS).await.body, json!([expired, next]));
    assert_eq!(delete(&cluster, &system, &path(&claim)).await.body, expired);
    let events = cluster.events(&namespace_ref("ci")).await;
    let returned = events.iter().find(|event| event.message == "namespace claim deleted, capacity returned");
    assert_eq!(returned.unwrap().extra["returned_cpus"], 0, "an expired claim returns no capacity");
}

#[tokio::test(flavor = "multi_thread")]
async fn deletes_claims_with_their_namespace() {
    let (cluster, [system, _, other]) = cluster(None).await;
    let claim = create_claim(&cluster, &system, CI_CLAIMS, claim_request(12, 0, 0)).await;
    let object = ObjectRef::new(ObjectType::NamespaceClaim, claim["uuid"].as_str().unwrap());
    assert_eq!(try_create(&cluster, &other, "early", 2).await.status, 507);
    assert_eq!(delete(&cluster, &system, "/auth/namespaces/ci").await.status, 200);
    assert_eq!(status_and_error(&get(&cluster, &system, &path(&claim)).await), (404, "namespace not found"));
    create_and_settle(&cluster, &other, "late", &json!({"cpus": 2})).await;
    assert!(!cluster.messages(&object).await.is_empty());
    let mut tx = cluster.app.store.begin().await.unwrap();
    tx.execute("UPDATE namespaces SET updated = 1.0 WHERE name = 'ci'", &[]).await.unwrap();
    tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
    reconcile::cleaner::run(&cluster.app).await.unwrap();
    cluster.settle().await;
    assert_eq!(cluster.count_rows("namespace_claims", "1 = 1").await, 0);
    assert!(cluster.messages(&object).await.is_empty());
}

/// Creates claims for one namespace and instances of several namespaces concurrently.
async fn assert_claims_hold_concurrently(url: Option<&str>) {
    let (cluster, [system, ci, other]) = cluster(url).await;
    let cluster = Arc::new(cluster);
    let call = |token: &str, path: &str, body: Value| {
        let (cluster, token, path) = (Arc::clone(&cluster), token.to_owned(), path.to_owned());
        tokio::spawn(async move { post(&cluster, &token, &path, body).await })
    };
    let claims: Vec<_> = (0..6).map(|_| call(&system, CI_CLAIMS, claim_request(5, 0, 0))).collect();
    let first: Vec<_> = (0..10)
        .map(|n| call(&other, "/instances", instance_request(&format!("first-{n}"), &json!({}))))
        .collect();
    let (mut granted, mut placed) = (0, 0);
    for claim in claims {
        let response = claim.await.unwrap();
        match response.status.as_u16() {
            200 => granted += 1,
            409 => assert_eq!(response.body["error"], "this namespace already holds an active claim"),
            507 => {}
            _ => panic!("{}", response.text),
        }
    }
    for request in first {
        let response = request.await.unwrap();
        assert!([200, 507].contains(&response.status.as_u16()), "{}", response.text);
        placed += i64::from(response.status == 200);
    }
    assert!(granted <= 1, "a namespace has at most one active claim");
    assert!(placed + 5 * granted <= 12, "{placed} instances placed beside {granted} claims for five CPUs");
    assert_eq!(cluster.count_rows("namespace_claims", "1 = 1").await, granted);

    // From here on exactly one claim exists and seven CPUs remain for other namespaces.
    cluster.call(&other, Method::DELETE, "/instances", Some(json!({"confirm": true}))).await;
    cluster.settle().await;
    if granted == 0 {
        create_claim(&cluster, &system, CI_CLAIMS, claim_request(5, 0, 0)).await;
    }
    let other_requests: Vec<_> =
        (0..12).map(|n| call(&other, "/instances", instance_request(&format!("n{n}"), &json!({})))).collect();
    let ci_requests: Vec<_> =
        (0..5).map(|n| call(&ci, "/instances", instance_request(&format!("n{n}"), &json!({})))).collect();
    for request in ci_requests {
        let response = request.await.unwrap();
        assert_eq!(response.status, 200, "the claim guarantees capacity: {}", response.text);
    }
    let mut placed = 0;
    for request in other_requests {
        placed += i64::from(request.await.unwrap().status == 200);
    }
    assert_eq!(placed, 7);
    let claim = get(&cluster, &system, CI_CLAIMS).await.body[0].clone();
    assert_eq!(claim_usage(&cluster, &system, &claim).await, [5, 5 * 512, 5]);
    cluster.call(&ci, Method::DELETE, "/instances", Some(json!({"confirm": true}))).await;
    cluster.settle().await;
    assert_eq!(claim_usage(&cluster, &system, &claim).await, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claims_hold_under_concurrent_requests() {
    assert_claims_hold_concurrently(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claims_hold_under_concurrent_requests_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => assert_claims_hold_concurrently(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}
