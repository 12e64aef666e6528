//! Reading events, and which requests record them.

use std::sync::Arc;

use axum::http::Method;
use muster_control::App;
use muster_test_cluster::{Cluster, wait_for};
use muster_testing::web_server::{Reply, WebServer};
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Map, Value, json};

#[tokio::test(flavor = "multi_thread")]
async fn events_have_the_fields_clients_read() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    cluster.events(&ObjectRef::namespace("system")).await;
    let list = cluster.call(&token, Method::GET, "/auth/namespaces/system/events", None).await.body;
    let event = &list[0];
    for field in [
        "event_uuid",
        "request_id",
        "timestamp",
        "event_type",
        "type",
        "message",
        "extra",
        "node",
        "fqdn",
        "duration",
    ] {
        assert!(event.get(field).is_some(), "{field}: {event}");
    }
    assert_eq!((&event["type"], &event["node"]), (&event["event_type"], &event["fqdn"]));
    assert!(event["extra"].is_object() && event["timestamp"].is_f64());
    let times: Vec<f64> = list.as_array().unwrap().iter().map(|e| e["timestamp"].as_f64().unwrap()).collect();
    assert!(times.is_sorted_by(|a, b| a >= b), "newest first");
}

#[tokio::test(flavor = "multi_thread")]
async fn limit_is_bounded_and_accepted_in_body_or_query() {
    let cluster = Cluster::new().await;
    cluster.allow_undocumented_requests("released clients send the limit as a string");
    let token = cluster.token("system").await;
    let object = ObjectRef::namespace("system");
    for n in 0..1100 {
        cluster.app.events.record(muster_types::event::Event::audit(object.clone(), format!("{n}")));
    }
    cluster.events(&object).await;
    let path = "/auth/namespaces/system/events";
    let count = async |path: &str, body| {
        cluster.call(&token, Method::GET, path, body).await.body.as_array().map(Vec::len)
    };
    for (body, expected) in [
        (json!({}), 100),
        (json!({"limit": 0}), 100),
        (json!({"limit": -5}), 100),
        (json!({"limit": 5000}), 1000),
        (json!({"limit": "10"}), 10),
        (json!({"limit": 10, "event_type": "audit"}), 10),
        (json!({"event_type": "status"}), 0),
        (json!({"event_type": "nonsense"}), 0),
    ] {
        assert_eq!(count(path, Some(body.clone())).await, Some(expected), "{body}");
    }
    assert_eq!(count(&format!("{path}?limit=7"), None).await, Some(7));
    assert_eq!(
        count(&format!("{path}?limit=7"), Some(json!({"limit": 3}))).await,
        Some(3),
        "the body takes precedence"
    );
    let bad = cluster.call(&token, Method::GET, path, Some(json!({"limit": "many"}))).await;
    assert_eq!((bad.status.as_u16(), &bad.body["error"]), (400, &json!("limit: Not a valid integer.")));
}

async fn request_events(cluster: &Cluster, response: &muster_test_cluster::ApiResponse) -> Vec<String> {
    let id = response.headers["x-request-id"].to_str().unwrap();
    cluster.messages(&ObjectRef::new(ObjectType::ApiRequest, id)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn records_request_events_for_changes_errors_and_optionally_reads() {
    for (setting, read_events) in [("false", 0), ("true", 2)] {
        let cluster = Cluster::with(&[("API_REQUEST_EVENTS_FOR_READS", setting)], None).await;
        let token = cluster.token("system").await;
        let read = cluster.call(&token, Method::GET, "/auth/namespaces", None).await;
        assert_eq!(request_events(&cluster, &read).await.len(), read_events);
        let refused = cluster.call(&token, Method::GET, "/auth/namespaces/absent", None).await;
        assert_eq!(
            request_events(&cluster, &refused).await,
            ["GET api response sent", "GET api request received"]
        );
        let body = json!({"namespace": "n"});
        let change = cluster.call(&token, Method::POST, "/auth/namespaces", Some(body)).await;
        assert_eq!(
            request_events(&cluster, &change).await,
            ["POST api response sent", "POST api request received"]
        );
        let health = cluster.call("", Method::GET, "/livez", None).await;
        assert!(request_events(&cluster, &health).await.is_empty());
        // The event of the change refers to the request.
        let events = cluster.events(&ObjectRef::namespace("n")).await;
        assert_eq!(events[0].request_id.as_deref(), change.headers["x-request-id"].to_str().ok());
    }
}

/// Returns the additional fields of the event of a request's arrival.
async fn recorded_request(
    cluster: &Cluster,
    response: &muster_test_cluster::ApiResponse,
) -> Map<String, Value> {
    let id = response.headers["x-request-id"].to_str().unwrap();
    let events = cluster.events(&ObjectRef::new(ObjectType::ApiRequest, id)).await;
    events.into_iter().find(|event| event.message.ends_with("received")).unwrap().extra
}

#[tokio::test(flavor = "multi_thread")]
async fn request_events_are_short_and_without_secrets() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let long = cluster.call("", Method::GET, &format!("/nosuch/{}", "x".repeat(60_000)), None).await;
    assert!(recorded_request(&cluster, &long).await["url"].as_str().unwrap().len() < 1100);
    let body = json!({
        "name": "a", "cpus": 1, "memory": 128, "disk": [{"size": 1}], "network": [],
        "ssh_key": "ssh-rsa PUBLICPART", "user_data": "U0VDUkVU", "configdrive": "openstack-disk",
        "metadata": {"note": "n".repeat(5000)},
    });
    let created = cluster.call(&token, Method::POST, "/instances", Some(body)).await;
    assert_eq!(created.status, 200, "{}", created.text);
    let path = format!("/instances/{}/metadata/x", created.body["uuid"].as_str().unwrap());
    let query = cluster.call(&token, Method::PUT, &format!("{path}?user_data=U0VDUkVU"), None).await;
    assert!(recorded_request(&cluster, &query).await["url"].as_str().unwrap().starts_with(&path));
    let recorded = recorded_request(&cluster, &created).await;
    assert!(recorded["body"].as_str().unwrap().starts_with("{\"configdrive\""), "{recorded:?}");
    cluster.allow_unfinished_operations("the instance is only created");
    for response in [&created, &query] {
        let id = response.headers["x-request-id"].to_str().unwrap();
        for event in cluster.events(&ObjectRef::new(ObjectType::ApiRequest, id)).await {
            let text = serde_json::to_string(&event).unwrap();
            assert!(
                !text.contains("U0VDUkVU") && !text.contains("PUBLICPART") && text.len() < 4096,
                "{text}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn flood_without_token_leaves_few_events() {
    let cluster = Cluster::new().await;
    let wrong = json!({"namespace": "system", "key": format!("sfk_{}", "x".repeat(38))});
    let before = cluster.events(&ObjectRef::namespace("system")).await.len();
    let mut recorded = 0;
    for _ in 0..300 {
        let missing = cluster.call("", Method::GET, "/nosuch", None).await;
        recorded += request_events(&cluster, &missing).await.len();
        assert_eq!(cluster.call("", Method::POST, "/auth", Some(wrong.clone())).await.status, 401);
    }
    let logins = cluster.events(&ObjectRef::namespace("system")).await.len() - before;
    assert!((1..100).contains(&recorded) && (1..100).contains(&logins), "{recorded} {logins}");
    let metrics = cluster.app.events.metrics_text(muster_control::exposition::ExpositionFormat::Prometheus);
    assert!(metrics.contains("api_unauthenticated_refusals_total{kind=\"request\"} 600"), "{metrics}");
    assert!(metrics.contains("api_unauthenticated_refusals_total{kind=\"login\"} 300"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn prunes_by_age_and_resumes_after_time_budget() {
    let settings = [
        ("MAX_AUDIT_EVENT_AGE", "100"),
        ("MAX_API_REQUEST_EVENT_AGE", "10"),
        ("MAX_STATUS_EVENT_AGE", "1000"),
    ];
    let cluster = Cluster::with(&settings, None).await;
    let object = ObjectRef::namespace("system");
    let request = ObjectRef::new(ObjectType::ApiRequest, "r");
    cluster.events(&object).await;
    let aged = |object: &ObjectRef, kind, age: f64| {
        let mut event = muster_types::event::Event::new(kind, object.clone(), format!("{age}"));
        event.timestamp -= age;
        event
    };
    use muster_types::event::EventType::{Audit, Status};
    for event in [
        aged(&object, Audit, 200.0),
        aged(&object, Status, 200.0),
        aged(&request, Audit, 50.0),
        // An event linked to several objects is kept until its last link is pruned.
        aged(&request, Status, 500.0).with_object(object.clone()),
    ] {
        cluster.app.events.record(event);
    }
    let before = cluster.events(&object).await.len();
    let (store, settings, metrics) =
        (&cluster.app.store, &cluster.app.settings, cluster.app.events.metrics());
    let first_outcome =
        muster_control::events::prune(store, settings, metrics, std::time::Duration::ZERO).await.unwrap();
    assert!(first_outcome.cut_short && first_outcome.links == 0);
    let budget = std::time::Duration::from_secs(60);
    let outcome = muster_control::events::prune(store, settings, metrics, budget).await.unwrap();
    assert_eq!((outcome.links, outcome.orphans, outcome.cut_short), (3, 2, false));
    assert_eq!(cluster.events(&object).await.len(), before - 1);
    assert!(cluster.events(&request).await.is_empty());
    let text = metrics.text(muster_control::exposition::ExpositionFormat::Prometheus);
    assert!(text.contains("database_events_pruned_total{event_type=\"audit\"} 1"), "{text}");
    assert!(text.contains("database_events_pruned_total{event_type=\"api-request\"} 2"), "{text}");
    assert!(text.contains("database_orphan_events_pruned_total 2"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sends_events_to_loki_and_retries_when_it_is_unavailable() {
    let loki = WebServer::new(|_, earlier| Reply::status(if earlier == 0 { 503 } else { 204 })).await;
    let settings =
        [("LOKI_BASE_URL", &*loki.url("/")), ("LOKI_TENANT", "ops"), ("LOKI_AUTH_HEADER", "Basic c2VjcmV0")];
    let cluster = Cluster::with(&settings, None).await;
    let object = ObjectRef::namespace("ci");
    cluster.app.events.record(muster_types::event::Event::audit(object, "sent to Loki"));
    let accepted = wait_for("the event", async || {
        // The first request was rejected, and is sent again.
        loki.requests()
            .into_iter()
            .skip(1)
            .find(|request| String::from_utf8_lossy(&request.body).contains("sent to Loki"))
    })
    .await;
    assert_eq!(accepted.path, "/loki/api/v1/push");
    assert_eq!(accepted.header("x-scope-orgid"), Some("ops"));
    assert_eq!(accepted.header("authorization"), Some("Basic c2VjcmV0"));
    let body: Value = serde_json::from_slice(&accepted.body).unwrap();
    assert_eq!(
        body["streams"][0]["stream"],
        json!({"job": "muster", "node": "sim-1", "event_type": "audit"})
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn size_budget_removes_oldest_api_requests_first() {
    let cluster = Cluster::with(&[("EVENT_STORE_MAX_MB", "1")], None).await;
    let object = ObjectRef::namespace("system");
    let request = ObjectRef::new(ObjectType::ApiRequest, "r");
    let aged = |object: &ObjectRef, age: u32| {
        let mut event = muster_types::event::Event::audit(object.clone(), "x".repeat(1500));
        event.timestamp -= f64::from(age);
        event
    };
    for n in 0..200 {
        cluster.app.events.record(aged(&object, 100_000 + n));
        cluster.app.events.record(aged(&request, 40_000 + n));
        cluster.app.events.record(aged(&request, 10 + n));
    }
    let before = cluster.events(&object).await.len();
    let App { store, settings, events, event_budget: budget, .. } = &*cluster.app;
    let removed = budget.enforce(store, settings, events.metrics()).await.unwrap();
    assert_eq!(removed, 200, "about 1.2 MB, of which a third are old requests");
    assert_eq!(cluster.events(&object).await.len(), before, "other events are kept");
    let requests = cluster.events(&request).await;
    assert_eq!(requests.len(), 200);
    assert!(requests.iter().all(|event| event.timestamp > muster_types::time::now() - 1000.0));
    assert_eq!(budget.enforce(store, settings, events.metrics()).await.unwrap(), 0);
    // Later checks account for new events.
    for n in 0..200 {
        cluster.app.events.record(aged(&request, 300 + n));
    }
    assert_eq!(cluster.events(&request).await.len(), 400);
    assert!(budget.enforce(store, settings, events.metrics()).await.unwrap() > 0);
    assert!(cluster.events(&request).await.len() < 400);
    assert_eq!(cluster.events(&object).await.len(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_reports_that_events_cannot_be_stored() {
    let settings = [("SPOOL_HIGH_WATER_MARK", "20"), ("DRAIN_POLL_INTERVAL", "86400")];
    let cluster = Cluster::with(&settings, None).await;
    let App { health, store, .. } = &*cluster.app;
    let check = tokio::spawn(muster_control::health::watch(Arc::clone(health), Arc::clone(store)));
    let readyz = async || {
        wait_for("the health check", async || {
            let response = cluster.call("", Method::GET, "/readyz", None).await;
            (response.text != "not ready").then_some((response.status.as_u16(), response.text))
        })
        .await
    };
    assert_eq!(readyz().await, (200, "ready".to_owned()));
    for _ in 0..30 {
        let event = muster_types::event::Event::audit(ObjectRef::namespace("system"), "x");
        cluster.app.events.record(event);
    }
    let (status, text) = readyz().await;
    assert_eq!((status, text.as_str()), (503, "not ready: events cannot be stored: the event queue is full"));
    check.abort();
}
