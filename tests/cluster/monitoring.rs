//! The metrics of a daemon, and the reference, the dashboard and the alert rules that name them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use muster_testing::{Daemon, free_port};
use reqwest::Method;
use serde_json::{Value, json};

use crate::{setup, wait_for};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A daemon, and the ports of its metrics: of the daemon, of the cluster and of the nodes.
struct Metrics {
    daemon: Daemon,
    ports: [u16; 3],
    _directory: tempfile::TempDir,
}

impl Metrics {
    /// Starts a daemon that has done something of everything that is counted.
    async fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let ports = [free_port(), free_port(), free_port()];
        let daemon = setup(directory.path())
            .set("NODE_DISK_RESERVATION_GB", "0")
            .set("MARIADB_GATEWAY_METRICS_PORT", &ports[0].to_string())
            .set("CLUSTER_METRICS_PORT", &ports[1].to_string())
            .set("RESOURCES_METRICS_PORT", &ports[2].to_string())
            .start();
        let token = daemon.log_in("system", &daemon.system_key()).await;
        let instance =
            |cpus: u32| json!({ "name": "web", "cpus": cpus, "memory": 128, "disk": [{ "size": 1 }] });
        let (status, created) = daemon.call(&token, Method::POST, "/instances", Some(instance(1))).await;
        assert_eq!(status, 200, "{created}");
        let path = format!("/instances/{}", created["uuid"].as_str().unwrap());
        wait_for("the instance", async || {
            let (_, instance) = daemon.call(&token, Method::GET, &path, None).await;
            (instance["state"] == "created").then_some(())
        })
        .await;
        let (status, refused) = daemon.call(&token, Method::POST, "/instances", Some(instance(1000))).await;
        assert!(status.as_u16() >= 400, "{refused}");
        let exchange = json!({ "namespace": "system", "rule": "none", "token": "a.b.c" });
        assert_eq!(daemon.call("", Method::POST, "/auth/federated", Some(exchange)).await.0, 401);
        assert_eq!(daemon.call("", Method::GET, "/nothing/here", None).await.0, 404);
        let wrong = json!({ "namespace": "system", "key": "wrong" });
        assert_eq!(daemon.call("", Method::POST, "/auth", Some(wrong)).await.0, 401);
        Self { daemon, ports, _directory: directory }
    }

    async fn text(&self, port: usize) -> String {
        let url = format!("http://127.0.0.1:{}/metrics", self.ports[port]);
        wait_for("the metrics", async || reqwest::get(&url).await.ok()?.text().await.ok()).await
    }

    /// Returns the types of all metrics of a port by name, once all that take a while are there.
    async fn types(&self, port: usize) -> BTreeMap<String, String> {
        let text = self.text(port).await;
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        types.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect()
    }
}

/// Returns the metrics of the table under a heading of the reference: name and type.
fn documented(page: &str, heading: &str) -> BTreeMap<String, String> {
    let section = page.split(&format!("\n## {heading}\n")).nth(1).unwrap_or_else(|| panic!("no {heading}"));
    let section = section.split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        (cells[1].trim_matches('`').to_owned(), cells[2].to_owned())
    })
    .collect()
}

/// Returns the words of a PromQL expression that are names of metrics.
fn metrics_in(expression: &str) -> BTreeSet<String> {
    let mut text = String::new();
    // Without strings, label matchers, ranges and lists of labels.
    let mut depth = 0;
    for character in expression.chars() {
        match character {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            other if depth == 0 => text.push(other),
            _ => {}
        }
    }
    let mut outside = String::new();
    let mut rest = text.as_str();
    while let Some((before, after)) = rest.split_once(" by (") {
        outside.push_str(before);
        outside.push(' ');
        rest = after.split_once(')').map_or("", |(_, after)| after);
    }
    outside.push_str(rest);
    let words = outside.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let functions = [
        "sum",
        "rate",
        "max",
        "count",
        "increase",
        "time",
        "histogram_quantile",
        "topk",
        "and",
        "or",
        "up",
        "abs",
    ];
    words
        .filter(|word| word.starts_with(|c: char| c.is_ascii_lowercase()) && !functions.contains(word))
        .map(str::to_owned)
        .collect()
}

#[test]
fn finds_the_metrics_of_an_expression() {
    let expression = "histogram_quantile(0.9, sum by (le, task) (rate(a_bucket{x=\"y\"}[5m]))) > 1 and time() - b_total > 0";
    assert_eq!(metrics_in(expression), BTreeSet::from(["a_bucket".to_owned(), "b_total".to_owned()]));
}

/// Returns all expressions of the dashboard and of the alert rules.
fn expressions() -> Vec<String> {
    let read = |name: &str| std::fs::read_to_string(repository().join("monitoring").join(name)).unwrap();
    let dashboard: Value = serde_json::from_str(&read("grafana.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let mut found: Vec<String> = targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect();
    let alerts = read("alerts.yaml");
    let count = found.len();
    found.extend(alerts.lines().filter_map(|line| Some(line.trim().strip_prefix("expr: ")?.to_owned())));
    assert!(count > 20 && found.len() - count > 15, "{found:?}");
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn reference_dashboard_and_alerts_name_the_metrics_of_a_daemon() {
    let metrics = Metrics::start().await;
    let page = std::fs::read_to_string(repository().join("docs/monitoring.md")).unwrap();
    let headings = ["Metrics of a daemon", "Metrics of the cluster", "Metrics of nodes"];
    let mut exposed = BTreeSet::new();
    for (port, heading) in headings.into_iter().enumerate() {
        let expected = documented(&page, heading);
        // Periodic tasks and check-ins have to run once.
        let deadline = std::time::Instant::now() + crate::TIMEOUT;
        let mut types = metrics.types(port).await;
        while types != expected && std::time::Instant::now() < deadline && port != 0 {
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            types = metrics.types(port).await;
        }
        assert_eq!(types, expected, "{heading} of docs/monitoring.md differs from port {port}");
        for (name, kind) in types {
            if kind == "histogram" {
                exposed.extend(["bucket", "sum", "count"].map(|suffix| format!("{name}_{suffix}")));
            } else {
                exposed.insert(name);
            }
        }
    }
    for expression in expressions() {
        for name in metrics_in(&expression) {
            assert!(exposed.contains(&name), "{name} of {expression:?} is not exposed");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_tell_what_happened() {
    let metrics = Metrics::start().await;
    let has =
        |text: &str, start: &str| text.lines().any(|line| line.starts_with(start) && !line.ends_with(" 0"));
    for start in [
        "api_requests_total{method=\"POST\",route=\"/instances\",status=\"200\"} ",
        "api_requests_total{method=\"GET\",route=\"unmatched\",status=\"404\"} ",
        "api_request_duration_seconds_bucket{le=\"30.0\",method=\"GET\",route=\"/instances/{instance_ref}\"} ",
        "database_transaction_duration_seconds_count ",
        "database_statement_duration_seconds_count ",
        "reconcile_last_success_timestamp_seconds{task=\"vms\"} ",
        "reconcile_last_success_timestamp_seconds{task=\"networks\"} ",
        "reconcile_last_success_timestamp_seconds{task=\"storage\"} ",
        "reconcile_last_success_timestamp_seconds{task=\"check-in\"} ",
        "reconcile_last_success_timestamp_seconds{task=\"changes\"} ",
        "operations_finished_total{operation=\"create_instance\",state=\"complete\"} ",
        "placements_total 1",
        "placement_refusals_total{stage=\"cpu_max_per_instance\"} 1",
        "federation_exchanges_total{outcome=\"refused\"} 1",
        "api_unauthenticated_refusals_total{kind=\"login\"} 1",
    ] {
        wait_for(start, async || has(&metrics.text(0).await, start).then_some(())).await;
    }
    for start in [
        "cluster_agents{state=",
        "cluster_capacity{resource=\"cpus\",kind=\"available\"} ",
        "cluster_capacity{resource=\"disk_bytes\",kind=\"total\"} ",
        "cluster_node_silence_seconds{node=\"sim-2\"} ",
        "cluster_instances{state=\"created\"} 1",
    ] {
        wait_for(start, async || has(&metrics.text(1).await, start).then_some(())).await;
    }
    let text = metrics.text(1).await;
    assert!(text.contains("\ncluster_operation_age_seconds{state=\"queued\"} "), "{text}");
    // Nothing that a client names is a label.
    let secret = "/instances/a-name-of-a-client";
    metrics.daemon.call("", Method::GET, secret, None).await;
    assert!(!metrics.text(0).await.contains("a-name-of-a-client"));
}

/// Returns the names of the alerts that `alerts_test.yaml` expects to fire, and of those that it expects not to.
fn tested_alerts(tests: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let (mut firing, mut silent) = (BTreeSet::new(), BTreeSet::new());
    for test in tests.split("eval_time:").skip(1) {
        let Some((_, rest)) = test.split_once("alertname: ") else { continue };
        let name: String = rest.chars().take_while(char::is_ascii_alphanumeric).collect();
        let expected = if test.contains("exp_labels:") { &mut firing } else { &mut silent };
        expected.insert(name);
    }
    (firing, silent)
}

#[test]
fn every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() {
    let read = |name: &str| std::fs::read_to_string(repository().join("monitoring").join(name)).unwrap();
    let (alerts, tests) = (read("alerts.yaml"), read("alerts_test.yaml"));
    let alerts = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let alerts: BTreeSet<String> = alerts.map(str::to_owned).collect();
    assert!(alerts.len() > 20, "{alerts:?}");
    let (firing, silent) = tested_alerts(&tests);
    assert_eq!(firing, alerts);
    assert_eq!(silent, alerts);
}

#[test]
fn alert_rules_and_their_tests_pass() {
    let unpacked = repository().join("target/tools/promtool");
    let program = if unpacked.exists() { unpacked } else { "promtool".into() };
    let promtool = |arguments: &[&str]| {
        Command::new(&program).args(arguments).current_dir(repository().join("monitoring")).output()
    };
    if promtool(&["--version"]).is_err() {
        return muster_testing::skipped("promtool: packaging/install-promtool");
    }
    for arguments in [
        ["check", "rules", "alerts.yaml"].as_slice(),
        ["test", "rules", "alerts_test.yaml"].as_slice(),
        ["check", "config", "--syntax-only", "prometheus.yaml"].as_slice(),
    ] {
        let output = promtool(arguments).unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }
}
