//! Traces that daemons export to a collector, which the test runs.

use muster_testing::web_server::{Reply, WebServer};
use muster_testing::{Daemon, free_port};
use reqwest::Method;
use serde_json::{Value, json};

use crate::multi_node::member;
use crate::{setup, wait_for};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CALLER: &str = "b7ad6b7169203331";

/// A span, with the name of the node whose daemon exported it.
#[derive(Debug, Clone)]
struct ExportedSpan {
    node: String,
    span: Value,
}

impl ExportedSpan {
    fn text(&self, field: &str) -> &str {
        self.span[field].as_str().unwrap_or_default()
    }

    fn attribute(&self, key: &str) -> &str {
        let attributes = self.span["attributes"].as_array().unwrap();
        let found = attributes.iter().find(|attribute| attribute["key"] == key);
        let value = found.map(|attribute| &attribute["value"]).unwrap_or(&Value::Null);
        value["stringValue"].as_str().or_else(|| value["intValue"].as_str()).unwrap_or_default()
    }

    fn is_part_of(&self, parent: &Self) -> bool {
        self.text("parentSpanId") == parent.text("spanId")
    }
}

/// Returns the spans that a collector has accepted.
fn spans(collector: &WebServer) -> Vec<ExportedSpan> {
    let mut found = Vec::new();
    for request in collector.requests().iter().filter(|request| request.path == "/v1/traces") {
        let body: Value = serde_json::from_slice(&request.body).unwrap();
        let exported = &body["resourceSpans"][0];
        let resource = exported["resource"]["attributes"].as_array().unwrap();
        let node = resource.iter().find(|attribute| attribute["key"] == "service.instance.id").unwrap();
        let node = node["value"]["stringValue"].as_str().unwrap().to_owned();
        for span in exported["scopeSpans"][0]["spans"].as_array().unwrap() {
            found.push(ExportedSpan { node: node.clone(), span: span.clone() });
        }
    }
    found
}

/// Sends a request that belongs to the trace of the test.
async fn call(daemon: &Daemon, token: &str, path: &str, body: &Value) -> Value {
    let request = reqwest::Client::new().post(format!("{}{path}", daemon.url)).bearer_auth(token).json(body);
    let response = request.header("traceparent", format!("00-{TRACE}-{CALLER}-01")).send().await.unwrap();
    let status = response.status();
    let body: Value = response.json().await.unwrap();
    assert_eq!(status, 200, "{body}");
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_has_request_operation_attempts_steps_and_calls_of_other_daemons() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let collector = WebServer::new(|_, _| Reply::ok(b"{}")).await;
    let directory = tempfile::tempdir().unwrap();
    let [one, other] = [("n1", "1"), ("n2", "2")].map(|(name, first)| {
        member(directory.path(), name, &url)
            .arguments(&["--simulate", "1", "--simulate-from", first])
            .set("TRACES_ENDPOINT", &collector.url("/"))
            .set("TRACES_AUTH_HEADER", "Basic c2VjcmV0")
            // Only the traces of callers.
            .set("TRACES_SAMPLE_RATIO", "0")
            .start()
    });
    let token = one.log_in("system", "the first key").await;
    let body = json!({
        "name": "web", "cpus": 1, "memory": 256, "disk": [{"size": 1}], "network": [], "placed_on": "sim-2",
    });
    let created = call(&one, &token, "/instances", &body).await;
    let path = format!("/instances/{}", created["uuid"].as_str().unwrap());
    wait_for("the instance", async || {
        let (_, record) = one.call(&token, Method::GET, &path, None).await;
        (record["state"] == "created").then_some(())
    })
    .await;
    call(&one, &token, &format!("{path}/poweroff"), &json!({})).await;

    let find = async |what: &str, matches: &dyn Fn(&ExportedSpan) -> bool| {
        wait_for(what, async || spans(&collector).into_iter().find(|span| matches(span))).await
    };
    // The request, the operation that it queued, and what another daemon did for it.
    let request = find("the request", &|span| span.text("name") == "POST /instances").await;
    assert_eq!((request.node.as_str(), request.text("parentSpanId")), ("sim-1", CALLER));
    assert_eq!(request.attribute("http.response.status_code"), "200");
    assert_eq!(request.span["kind"], 2);
    let operation = find("the operation", &|span| span.text("name") == "create_instance").await;
    assert!(operation.node == "sim-2" && operation.is_part_of(&request), "{operation:?} {request:?}");
    assert_eq!(operation.attribute("muster.operation_state"), "complete");
    assert_eq!(
        operation.attribute("muster.target"),
        format!("instance {}", created["uuid"].as_str().unwrap())
    );
    let last_step = "instance_start";
    let step = find("the last step", &|span| span.text("name") == last_step).await;
    let attempt = find("the attempt", &|span| step.is_part_of(span)).await;
    assert!(attempt.is_part_of(&operation) && attempt.text("name").starts_with("attempt "), "{attempt:?}");
    for span in [&request, &operation, &attempt, &step] {
        assert_eq!(span.text("traceId"), TRACE);
        let time = |field: &str| span.text(field).parse::<u128>().unwrap();
        assert!(time("startTimeUnixNano") <= time("endTimeUnixNano"), "{span:?}");
    }
    // A request that was forwarded.
    let is_power_off = |span: &ExportedSpan| span.text("name") == "POST /instances/{instance_ref}/poweroff";
    let received = find("the request", &|span| is_power_off(span) && span.node == "sim-1").await;
    let sent =
        find("the call", &|span| span.text("name") == "call daemon" && span.is_part_of(&received)).await;
    assert_eq!(
        (sent.attribute("muster.node"), sent.attribute("http.response.status_code")),
        ("sim-2", "200")
    );
    let executed = find("the forwarded request", &|span| is_power_off(span) && span.is_part_of(&sent)).await;
    assert_eq!(executed.node, "sim-2");
    // Only what belongs to the trace of the caller is exported.
    assert!(spans(&collector).iter().all(|span| span.text("traceId") == TRACE));
    let requests = collector.requests();
    assert!(requests.iter().all(|request| request.header("authorization") == Some("Basic c2VjcmV0")));
    drop(other);
}

#[tokio::test(flavor = "multi_thread")]
async fn unresponsive_collector_delays_nothing_and_dropped_spans_are_counted() {
    let collector = WebServer::new(|_, earlier| Reply::status(if earlier == 0 { 400 } else { 0 })).await;
    let directory = tempfile::tempdir().unwrap();
    let metrics = free_port();
    let daemon = setup(directory.path())
        .set("TRACES_ENDPOINT", &collector.url("/"))
        .set("MARIADB_GATEWAY_METRICS_PORT", &metrics.to_string())
        .start();
    // The first spans are rejected. Those of probes and of requests without a valid token are not exported.
    assert_eq!(daemon.call("", Method::DELETE, "/auth/session", None).await.0, 200);
    assert_eq!(daemon.call("", Method::POST, "/auth", Some(json!({}))).await.0, 400);
    assert_eq!(daemon.call("", Method::GET, "/nodes", None).await.0, 401);
    let token = daemon.log_in("system", &daemon.system_key()).await;
    let count = async |name: &str| {
        let url = format!("http://127.0.0.1:{metrics}/metrics");
        let text = reqwest::get(url).await.unwrap().text().await.unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        value.trim().parse::<u64>().unwrap()
    };
    wait_for("the rejection", async || (count("traces_spans_dropped_total").await > 0).then_some(())).await;
    let names: Vec<String> = spans(&collector).iter().map(|span| span.text("name").to_owned()).collect();
    assert_eq!(names, ["POST /auth"]);
    // Then the collector accepts connections and does not respond.
    assert_eq!(daemon.call(&token, Method::GET, "/nodes", None).await.0, 200);
    wait_for("the next export", async || (collector.requests().len() > 1).then_some(())).await;
    for _ in 0..20 {
        assert_eq!(daemon.call(&token, Method::GET, "/nodes", None).await.0, 200);
    }
    // All during one export, which takes ten seconds.
    assert_eq!(collector.requests().len(), 2);
    assert_eq!(count("traces_spans_exported_total").await, 0);
    let log = daemon.log();
    assert!(log.contains("failed to export traces"), "{log}");
    assert!(daemon.stop().success());
}
