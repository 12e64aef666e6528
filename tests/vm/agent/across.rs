//! Two daemons on one database.

use muster_test_cluster::{enter_vm_namespaces, vm_hosts};
use serde_json::json;

use super::{ask, execute, ready};

#[test]
fn every_daemon_takes_what_is_to_be_done_in_a_guest_and_a_copy_that_never_comes_has_an_end() {
    if !enter_vm_namespaces(
        "agent::across::every_daemon_takes_what_is_to_be_done_in_a_guest_and_a_copy_that_never_comes_has_an_end",
    ) {
        return;
    }
    let Some(mut world) = vm_hosts(2, &[("BLOB_REPLICATION_FACTOR", "1")]) else { return };
    let (first, second) = (world.host(1), world.host(2));
    let here = ready(first, "here", &json!({ "placed_on": "m1" }));
    let there = ready(first, "there", &json!({ "placed_on": "m2" }));

    // Asked of the daemon that does not have the guest.
    let result = execute(second, &here, "hostname");
    assert_eq!(result["stdout"], "here\n", "{result}");
    let got = ask(first, &there, "get", json!({ "path": "/etc/hostname" })).wait_for(first, "complete");
    let blob = got["results"]["0"]["content_blob"].clone();
    let put = |path: &str, seconds: f64| json!({ "blob_uuid": blob, "path": path, "mode": 420, "deadline_seconds": seconds });
    // Its bytes are on the second machine, and come to the first.
    ask(second, &here, "put", put("/root/there", 60.0)).wait_for(second, "complete");
    assert_eq!(execute(second, &here, "cat /root/there")["stdout"], "there\n");
    assert!(second.get(&here.path("/agent/facts"))["mounts"].is_array());

    // Bytes that are only on a machine that is away never come.
    let got = ask(first, &there, "get", json!({ "path": "/etc/passwd" })).wait_for(first, "complete");
    let only_there = got["results"]["0"]["content_blob"].clone();
    world.hosts[1].stop();
    let first = world.host(1);
    let body = json!({ "blob_uuid": only_there, "path": "/root/never", "mode": 420, "deadline_seconds": 3 });
    let waiting = ask(first, &here, "put", body);
    assert_eq!(waiting.record(first)["state"], "preflight");
    let record = waiting.wait_for(first, "expired");
    assert_eq!((&record["expiry_reason"], &record["attempts"]), (&json!("deadline"), &json!(0)), "{record}");
    assert_eq!(execute(first, &here, "ls /root/never")["return-code"], 1);
    // Nor does anybody get to a guest whose daemon is away.
    let lost = ask(first, &there, "execute", json!({ "command_line": "true", "deadline_seconds": 1 }));
    let record = lost.wait_for(first, "expired");
    assert_eq!((&record["expiry_reason"], &record["attempts"]), (&json!("deadline"), &json!(0)), "{record}");
}
