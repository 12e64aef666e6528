//! Agent operations with two hosts.

use muster_test_cluster::{enter_vm_namespaces, vm_hosts};
use reqwest::Method;
use serde_json::json;

use super::terminal::check_interactive_session;
use super::{create_ready, execute, request};

#[test]
fn any_daemon_serves_operations_of_hosts_that_are_reachable() {
    if !enter_vm_namespaces("agent::multi_host::any_daemon_serves_operations_of_hosts_that_are_reachable") {
        return;
    }
    let Some(mut cluster) = vm_hosts(2, &[("BLOB_REPLICATION_FACTOR", "1")]) else { return };
    let (first, second) = (cluster.host(1), cluster.host(2));
    let here = create_ready(first, "here", &json!({ "placed_on": "m1" }));
    let there = create_ready(first, "there", &json!({ "placed_on": "m2" }));

    // Requests to the daemon of the other host.
    let result = execute(second, &here, "hostname");
    assert_eq!(result["stdout"], "here\n", "{result}");
    let got = request(first, &there, "get", json!({ "path": "/etc/hostname" })).wait_for(first, "complete");
    let blob = got["results"]["0"]["content_blob"].clone();
    let put = |path: &str, seconds: f64| json!({ "blob_uuid": blob, "path": path, "mode": 420, "deadline_seconds": seconds });
    // The blob is copied from the second host to the first.
    request(second, &here, "put", put("/root/there", 60.0)).wait_for(second, "complete");
    assert_eq!(execute(second, &here, "cat /root/there")["stdout"], "there\n");
    assert!(second.get(&here.path("/agent/facts"))["mounts"].is_array());
    check_interactive_session(second, &here);

    // A blob whose only host is unreachable cannot be copied.
    let got = request(first, &there, "get", json!({ "path": "/etc/passwd" })).wait_for(first, "complete");
    let only_there = got["results"]["0"]["content_blob"].clone();
    cluster.hosts[1].stop();
    let first = cluster.host(1);
    let body = json!({ "blob_uuid": only_there, "path": "/root/never", "mode": 420, "deadline_seconds": 3 });
    let waiting = request(first, &here, "put", body);
    assert_eq!(waiting.record(first)["state"], "preflight");
    let record = waiting.wait_for(first, "expired");
    assert_eq!((&record["expiry_reason"], &record["attempts"]), (&json!("deadline"), &json!(0)), "{record}");
    assert_eq!(execute(first, &here, "ls /root/never")["return-code"], 1);
    // Nothing is queued for a guest of an unreachable host.
    let body = json!({ "command_line": "true" });
    let (status, answer) = first.call(Method::POST, &there.path("/agent/execute"), Some(body));
    assert!(status == 503 && answer.to_string().contains("node m2"), "{status}: {answer}");
}
