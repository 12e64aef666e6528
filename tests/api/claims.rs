//! Capacity claims: what namespaces are promised, and what others may no longer take.

use std::sync::Arc;

use axum::http::Method;
use muster_control::reconcile;
use muster_types::ids::ClaimId;
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use crate::harness::{Answer, Cluster, wait_for};
use crate::instances::{settled, small};
use crate::networks::{delete, get, post};

/// Two nodes that may promise 12 processors, 393216 megabytes and 10240 gigabytes.
const SIZE: (u64, u64, u64) = (2, 65536, 1024);
const CI: &str = "/auth/namespaces/ci/claims";

/// A cluster with the namespaces `ci` and `other`, and the tokens of `system`, `ci` and `other`.
async fn cluster(url: Option<&str>) -> (Cluster, [String; 3]) {
    let cluster = Cluster::sized(url, &[], SIZE).await;
    for name in ["ci", "other"] {
        cluster.create_namespace(name).await;
    }
    let tokens = [cluster.token("system").await, cluster.token("ci").await, cluster.token("other").await];
    (cluster, tokens)
}

fn body(cpus: i64, memory: i64, disk: i64) -> Value {
    json!({"limit_cpus": cpus, "limit_memory_mb": memory, "limit_disk_gb": disk, "expires_in_seconds": 3600})
}

/// A claim that is granted; its record.
async fn granted(cluster: &Cluster, token: &str, path: &str, body: Value) -> Value {
    let answer = post(cluster, token, path, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.body
}

fn path(claim: &Value) -> String {
    let part = |key: &str| claim[key].as_str().unwrap().to_owned();
    format!("/auth/namespaces/{}/claims/{}", part("namespace"), part("uuid"))
}

async fn put(cluster: &Cluster, token: &str, claim: &Value, body: Value) -> Answer {
    cluster.call(token, Method::PUT, &path(claim), Some(body)).await
}

/// What is used of a claim: processors, megabytes, gigabytes.
async fn used(cluster: &Cluster, token: &str, claim: &Value) -> [i64; 3] {
    let record = get(cluster, token, &path(claim)).await.body;
    ["used_cpus", "used_memory_mb", "used_disk_gb"].map(|part| record[part].as_i64().unwrap())
}

fn refusal(answer: &Answer) -> (u16, &str) {
    (answer.status.as_u16(), answer.body["error"].as_str().unwrap_or_default())
}

async fn try_create(cluster: &Cluster, token: &str, name: &str, cpus: i64) -> Answer {
    post(cluster, token, "/instances", small(name, &json!({"cpus": cpus}))).await
}

fn on_namespace(name: &str) -> ObjectRef {
    ObjectRef::namespace(name)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_is_created_shown_listed_changed_and_deleted() {
    let (cluster, [system, ..]) = cluster(None).await;
    assert_eq!(get(&cluster, &system, CI).await.body, json!([]));
    let before = muster_types::time::now();
    let made = granted(&cluster, &system, CI, body(4, 2048, 50)).await;
    let expected = json!({
        "uuid": made["uuid"], "namespace": "ci", "state": "created", "coverage_state": "active", "limit_cpus": 4,
        "limit_memory_mb": 2048, "limit_disk_gb": 50, "used_cpus": 0, "used_memory_mb": 0, "used_disk_gb": 0,
        "expires_at": made["expires_at"], "updated_at": made["updated_at"], "version": 1, "metadata": {}
    });
    assert_eq!(made, expected);
    let end = made["expires_at"].as_f64().unwrap();
    assert!((before + 3600.0..before + 3660.0).contains(&end), "{end}");
    assert_eq!(get(&cluster, &system, &path(&made)).await.body, made);
    assert_eq!(get(&cluster, &system, CI).await.body, json!([made]));

    let changed = put(&cluster, &system, &made, json!({"limit_cpus": 0, "limit_disk_gb": null})).await.body;
    assert_eq!((&changed["limit_cpus"], &changed["limit_disk_gb"]), (&json!(0), &json!(50)));
    assert_eq!(changed["expires_at"], made["expires_at"], "what is not given stays");
    let changed = put(&cluster, &system, &made, json!({"expires_in_seconds": 7200})).await.body;
    assert!(changed["expires_at"].as_f64().unwrap() > end + 3590.0, "{changed}");

    let object = ObjectRef::new(ObjectType::NamespaceClaim, made["uuid"].as_str().unwrap());
    cluster.messages(&object).await;
    let events = get(&cluster, &system, &format!("{}/events?limit=2", path(&made))).await.body;
    assert_eq!(events.as_array().unwrap().len(), 2);
    assert_eq!(events[0]["message"], "updated namespace claim");
    let audit = get(&cluster, &system, &format!("{}/events?event_type=audit", path(&made))).await.body;
    let created = audit.as_array().unwrap().iter().find(|event| event["message"] == "db record created");
    assert_eq!(created.unwrap()["extra"]["limit_memory_mb"], 2048);

    let deleted = delete(&cluster, &system, &path(&made)).await;
    assert_eq!((deleted.status.as_u16(), &deleted.body), (200, &changed), "as it was");
    for verb in [Method::GET, Method::DELETE] {
        let gone = cluster.call(&system, verb, &path(&made), None).await;
        assert_eq!(refusal(&gone), (404, "namespace claim not found"));
    }
    assert_eq!(get(&cluster, &system, CI).await.body, json!([]));
    assert!(cluster.messages(&object).await.is_empty(), "its events went with it");
    let events = cluster.events(&on_namespace("ci")).await;
    let find = |message: &str| events.iter().find(|event| event.message == message).unwrap();
    find("create namespace claim request from REST API");
    find("delete namespace claim request from REST API");
    let returned = &find("namespace claim deleted, capacity returned").extra;
    assert_eq!((&returned["claim"], &returned["clamped"]), (&made["uuid"], &json!(false)));
    let parts =
        ["returned_cpus", "returned_memory_mb", "returned_disk_gb"].map(|part| returned[part].clone());
    assert_eq!(parts, [json!(0), json!(2048), json!(50)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_claim_is_told_why() {
    let (cluster, [system, ..]) = cluster(None).await;
    let with = |key: &str, value: Value| {
        let mut body = body(1, 1, 1);
        body[key] = value;
        body
    };
    for key in ["limit_cpus", "limit_memory_mb", "limit_disk_gb", "expires_in_seconds"] {
        let answer = post(&cluster, &system, CI, with(key, Value::Null)).await;
        assert_eq!(refusal(&answer), (400, format!("no {key} specified").as_str()));
        for wrong in [json!(true), json!("4"), json!(1.5), json!([1]), json!({})] {
            let answer = post(&cluster, &system, CI, with(key, wrong)).await;
            assert_eq!(refusal(&answer), (400, format!("{key} is not an integer").as_str()));
        }
        let answer = post(&cluster, &system, CI, with(key, json!(-1))).await;
        let why = if key == "expires_in_seconds" {
            "expires_in_seconds must be positive".to_owned()
        } else {
            format!("{key} cannot be negative")
        };
        assert_eq!(refusal(&answer), (400, why.as_str()));
    }
    let answer = post(&cluster, &system, CI, with("expires_in_seconds", json!(0))).await;
    assert_eq!(refusal(&answer), (400, "expires_in_seconds must be positive"));
    let answer = post(&cluster, &system, CI, json!({})).await;
    assert_eq!(refusal(&answer), (400, "no limit_cpus specified"));
    let answer = post(&cluster, &system, CI, with("owner", json!("me"))).await;
    assert_eq!(refusal(&answer), (400, "owner: not declared by this endpoint"));
    assert_eq!(get(&cluster, &system, CI).await.body, json!([]), "nothing was written");

    let claim = granted(&cluster, &system, CI, body(1, 1, 1)).await;
    for (body, why) in [
        (json!({}), "no claim fields to update specified"),
        (json!({"limit_cpus": null}), "no claim fields to update specified"),
        (json!({"limit_cpus": false}), "limit_cpus is not an integer"),
        (json!({"limit_disk_gb": -7}), "limit_disk_gb cannot be negative"),
        (json!({"expires_in_seconds": 0}), "expires_in_seconds must be positive"),
        (json!({"expires_in_seconds": "soon"}), "expires_in_seconds is not an integer"),
    ] {
        assert_eq!(refusal(&put(&cluster, &system, &claim, body).await), (400, why));
    }
    let second = post(&cluster, &system, CI, body(1, 1, 1)).await;
    assert_eq!(refusal(&second), (409, "this namespace already holds an active claim"));
    let uuid = claim["uuid"].as_str().unwrap();
    for wrong in ["other".to_owned(), uuid[1..].to_owned(), ClaimId::new().to_string()] {
        for rest in ["", "/events"] {
            let answer = get(&cluster, &system, &format!("{CI}/{wrong}{rest}")).await;
            assert_eq!(refusal(&answer), (404, "namespace claim not found"), "{wrong}{rest}");
        }
    }
    let elsewhere = get(&cluster, &system, &format!("/auth/namespaces/other/claims/{uuid}")).await;
    assert_eq!(refusal(&elsewhere), (404, "namespace claim not found"));
    for path in
        ["/auth/namespaces/absent/claims".to_owned(), format!("/auth/namespaces/absent/claims/{uuid}")]
    {
        assert_eq!(refusal(&get(&cluster, &system, &path).await), (404, "namespace not found"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_is_promised_than_there_is() {
    let (cluster, [system, ci, other]) = cluster(None).await;
    let no = "the cluster does not have the capacity to promise this claim";
    let answer = post(&cluster, &system, CI, body(13, 393_217, 10_240)).await;
    let why = format!(
        "{no}: cpus (limit 12, used 0, requested 13), memory_mb (limit 393216, used 0, requested 393217)"
    );
    assert_eq!(refusal(&answer), (507, why.as_str()));
    let answer = post(&cluster, &system, CI, body(0, 0, i64::MAX)).await;
    let why = format!("{no}: disk_gb (limit 10240, used 0, requested {})", i64::MAX);
    assert_eq!(refusal(&answer), (507, why.as_str()));

    settled(&cluster, &other, "there", &json!({"cpus": 2})).await;
    settled(&cluster, &ci, "here", &json!({"cpus": 2})).await;
    let claim = granted(&cluster, &system, CI, body(7, 1024, 10)).await;
    assert_eq!(used(&cluster, &system, &claim).await, [2, 512, 1], "what was there before counts");
    let theirs = "/auth/namespaces/other/claims";
    let answer = post(&cluster, &system, theirs, body(6, 0, 0)).await;
    let why = format!("{no}: cpus (limit 12, used 7, requested 6)");
    assert_eq!(refusal(&answer), (507, why.as_str()), "five are left for it, two of which it has");
    granted(&cluster, &system, theirs, body(5, 0, 0)).await;
    let answer = put(&cluster, &system, &claim, json!({"limit_cpus": 8})).await;
    let why = format!("{no}: cpus (limit 12, used 5, requested 8)");
    assert_eq!(refusal(&answer), (507, why.as_str()));
    assert_eq!(put(&cluster, &system, &claim, json!({"limit_memory_mb": 4096})).await.status, 200);

    let answer = put(&cluster, &system, &claim, json!({"limit_cpus": 1, "limit_disk_gb": 0})).await;
    let why = "a claim cannot be shrunk below what it is already using: cpus (limit 7, used 2, requested 1), \
               disk_gb (limit 10, used 1, requested 0)";
    assert_eq!(refusal(&answer), (409, why));
    assert_eq!(put(&cluster, &system, &claim, json!({"limit_cpus": 2})).await.status, 200);

    delete(&cluster, &system, &path(&claim)).await;
    reconcile::checkin::leave(&cluster.app).await;
    let answer = post(&cluster, &system, CI, body(0, 0, 0)).await;
    let why = "the cluster capacity accounting is not available yet, please retry";
    assert_eq!(refusal(&answer), (503, why));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_promised_is_kept_from_others_and_charged_when_it_is_used() {
    let (cluster, [system, ci, other]) = cluster(None).await;
    let claim = granted(&cluster, &system, CI, body(8, 4096, 100)).await;
    for name in ["a", "b"] {
        settled(&cluster, &other, name, &json!({"cpus": 2})).await;
    }
    let answer = try_create(&cluster, &other, "c", 1).await;
    let why = "no node had capacity for this instance, 2 candidates refused it";
    assert_eq!(refusal(&answer), (507, why));
    assert_eq!((&answer.body["stage"], &answer.body["transient"]), (&json!("capacity_guard"), &json!(true)));
    let left = get(&cluster, &other, "/instances/c").await.body;
    let object = ObjectRef::new(ObjectType::Instance, left["uuid"].as_str().unwrap());
    let events = cluster.events(&object).await;
    let last = events.iter().find(|event| event.message == "schedule final candidates").unwrap();
    let reason =
        "8 of the 8 cpus that are free in the cluster are claimed by other namespaces, 1 are requested";
    assert_eq!(last.extra["refused"], json!({"sim-1": reason, "sim-2": reason}));

    let mut mine = Vec::new();
    for number in 0..4 {
        mine.push(settled(&cluster, &ci, &format!("n{number}"), &json!({"cpus": 2})).await);
        let times = number + 1;
        assert_eq!(used(&cluster, &system, &claim).await, [2 * times, 512 * times, times]);
    }
    assert_eq!(try_create(&cluster, &ci, "more", 1).await.status, 507, "the nodes are full");
    let path_of = |record: &Value| format!("/instances/{}", record["uuid"].as_str().unwrap());
    delete(&cluster, &ci, &path_of(&mine[0])).await;
    cluster.settle().await;
    assert_eq!(used(&cluster, &system, &claim).await, [6, 1536, 3]);
    assert_eq!(try_create(&cluster, &other, "d", 1).await.status, 507, "it is promised again");

    // Beyond its claim a namespace takes what nobody was promised.
    delete(&cluster, &other, "/instances/a").await;
    cluster.settle().await;
    for name in ["x", "y"] {
        settled(&cluster, &ci, name, &json!({"cpus": 2})).await;
    }
    assert_eq!(used(&cluster, &system, &claim).await[0], 10, "two more than were promised");
    let grown = put(&cluster, &system, &claim, json!({"limit_cpus": 9})).await;
    assert_eq!(grown.status, 200, "it grows towards its use: {}", grown.text);
    cluster.call(&ci, Method::DELETE, "/instances", Some(json!({"confirm": true}))).await;
    cluster.settle().await;
    assert_eq!(used(&cluster, &system, &claim).await, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_claim_promises_nothing_and_keeps_what_it_had_used() {
    let (cluster, [system, ci, other]) = cluster(None).await;
    let claim = granted(&cluster, &system, CI, body(11, 0, 0)).await;
    settled(&cluster, &ci, "mine", &json!({"cpus": 2})).await;
    assert_eq!(try_create(&cluster, &other, "early", 2).await.status, 507);
    assert_eq!(put(&cluster, &system, &claim, json!({"expires_in_seconds": 1})).await.status, 200);
    let expired = wait_for("the claim to expire", async || {
        let record = get(&cluster, &system, &path(&claim)).await.body;
        (record["coverage_state"] == "expired").then_some(record)
    })
    .await;
    settled(&cluster, &other, "late", &json!({"cpus": 2})).await;
    delete(&cluster, &ci, "/instances/mine").await;
    cluster.settle().await;
    assert_eq!(get(&cluster, &system, &path(&claim)).await.body, expired, "two are still said to be used");
    assert_eq!(expired["used_cpus"], 2);
    let answer = put(&cluster, &system, &claim, json!({"expires_in_seconds": 60})).await;
    let why = "this claim is no longer active and cannot be changed, delete it and create a new one";
    assert_eq!(refusal(&answer), (409, why));
    let next = granted(&cluster, &system, CI, body(10, 0, 0)).await;
    assert_eq!(get(&cluster, &system, CI).await.body, json!([expired, next]));
    assert_eq!(delete(&cluster, &system, &path(&claim)).await.body, expired);
    let events = cluster.events(&on_namespace("ci")).await;
    let returned = events.iter().find(|event| event.message == "namespace claim deleted, capacity returned");
    assert_eq!(returned.unwrap().extra["returned_cpus"], 0, "there was nothing left of it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_takes_its_claims_along() {
    let (cluster, [system, _, other]) = cluster(None).await;
    let claim = granted(&cluster, &system, CI, body(12, 0, 0)).await;
    let object = ObjectRef::new(ObjectType::NamespaceClaim, claim["uuid"].as_str().unwrap());
    assert_eq!(try_create(&cluster, &other, "early", 2).await.status, 507);
    assert_eq!(delete(&cluster, &system, "/auth/namespaces/ci").await.status, 200);
    assert_eq!(refusal(&get(&cluster, &system, &path(&claim)).await), (404, "namespace not found"));
    settled(&cluster, &other, "late", &json!({"cpus": 2})).await;
    assert!(!cluster.messages(&object).await.is_empty());
    let mut tx = cluster.app.store.begin().await.unwrap();
    tx.execute("UPDATE namespaces SET updated = 1.0 WHERE name = 'ci'", &[]).await.unwrap();
    tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
    reconcile::cleaner::run(&cluster.app).await.unwrap();
    cluster.settle().await;
    assert_eq!(cluster.count("namespace_claims", "1 = 1").await, 0);
    assert!(cluster.messages(&object).await.is_empty());
}

/// Many want the one claim of a namespace, and many place instances while others are promised something.
async fn all_at_once(url: Option<&str>) {
    let (cluster, [system, ci, other]) = cluster(url).await;
    let cluster = Arc::new(cluster);
    let call = |token: &str, path: &str, body: Value| {
        let (cluster, token, path) = (Arc::clone(&cluster), token.to_owned(), path.to_owned());
        tokio::spawn(async move { post(&cluster, &token, &path, body).await })
    };
    let claims: Vec<_> = (0..6).map(|_| call(&system, CI, body(5, 0, 0))).collect();
    let first: Vec<_> =
        (0..10).map(|n| call(&other, "/instances", small(&format!("first-{n}"), &json!({})))).collect();
    let (mut held, mut placed) = (0, 0);
    for claim in claims {
        let answer = claim.await.unwrap();
        match answer.status.as_u16() {
            200 => held += 1,
            409 => assert_eq!(answer.body["error"], "this namespace already holds an active claim"),
            507 => {}
            _ => panic!("{}", answer.text),
        }
    }
    for one in first {
        let answer = one.await.unwrap();
        assert!([200, 507].contains(&answer.status.as_u16()), "{}", answer.text);
        placed += i64::from(answer.status == 200);
    }
    assert!(held <= 1, "one claim for one namespace");
    assert!(placed + 5 * held <= 12, "{placed} were placed beside {held} claims for five");
    assert_eq!(cluster.count("namespace_claims", "1 = 1").await, held);

    // From here on it is certain that there is one, and that seven are left for the others.
    cluster.call(&other, Method::DELETE, "/instances", Some(json!({"confirm": true}))).await;
    cluster.settle().await;
    if held == 0 {
        granted(&cluster, &system, CI, body(5, 0, 0)).await;
    }
    let theirs: Vec<_> =
        (0..12).map(|n| call(&other, "/instances", small(&format!("n{n}"), &json!({})))).collect();
    let ours: Vec<_> = (0..5).map(|n| call(&ci, "/instances", small(&format!("n{n}"), &json!({})))).collect();
    for one in ours {
        let answer = one.await.unwrap();
        assert_eq!(answer.status, 200, "it was promised: {}", answer.text);
    }
    let mut placed = 0;
    for one in theirs {
        placed += i64::from(one.await.unwrap().status == 200);
    }
    assert_eq!(placed, 7);
    let claim = get(&cluster, &system, CI).await.body[0].clone();
    assert_eq!(used(&cluster, &system, &claim).await, [5, 5 * 512, 5]);
    cluster.call(&ci, Method::DELETE, "/instances", Some(json!({"confirm": true}))).await;
    cluster.settle().await;
    assert_eq!(used(&cluster, &system, &claim).await, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn promises_hold_when_all_come_at_once() {
    all_at_once(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn promises_hold_when_all_come_at_once_on_mariadb() {
    match muster_testing::database_url() {
        Some(url) => all_at_once(Some(&url)).await,
        None => muster_testing::skipped("mariadb-server"),
    }
}
