//! What the agent is for.

use muster_test_cluster::{enter_vm_namespaces, qemu_processes, single_vm_host};
use serde_json::json;

use super::{ask, execute, ready, roomy, said, wait_until_ready};
use crate::instance::{bytes, now};

#[test]
fn commands_run_and_files_move_both_ways() {
    if !enter_vm_namespaces("agent::work::commands_run_and_files_move_both_ways") {
        return;
    }
    let world = single_vm_host(&[]);
    let machine = world.host(1);
    let began = now();
    let one = ready(machine, "one", &roomy());
    let record = one.record(machine);
    let boot = record["agent_system_boot_time"].as_f64().unwrap();
    assert!((began - 60.0..now() + 60.0).contains(&boot), "{record}");

    // Commands, with what they write and how they end.
    let result = execute(machine, &one, "echo here; echo there >&2; exit 3");
    assert_eq!(
        result,
        json!({
            "command-line": "echo here; echo there >&2; exit 3", "result": true, "return-code": 3,
            "stdout": "here\n", "stderr": "there\n",
        })
    );
    let absent = execute(machine, &one, "no-such-program --at-all");
    assert_eq!(absent["return-code"], 127, "{absent}");
    assert!(absent["stderr"].as_str().unwrap().contains("not found"), "{absent}");
    // Nothing is made of what looks like a command line within one.
    assert_eq!(said(machine, &one, "echo '$(id) `id` \"quoted\" ; id'"), "$(id) `id` \"quoted\" ; id\n");

    // What is long comes as a blob.
    let long = execute(machine, &one, "seq 1 720000");
    let expected: String = (1..=720_000).map(|number| format!("{number}\n")).collect();
    assert!(expected.len() > 4_900_000, "{}", expected.len());
    assert!(long.get("stdout").is_none(), "{long}");
    let blob = long["stdout_blob"].as_str().unwrap();
    assert!(bytes(machine, &format!("/blobs/{blob}/data")) == expected.as_bytes(), "5 MB arrive as they are");

    // 50 MB out of the guest, and in again.
    said(machine, &one, "head -c 50000000 /dev/urandom >/root/out");
    let sum = said(machine, &one, "sha512sum </root/out | cut -d ' ' -f 1");
    let got = ask(machine, &one, "get", json!({ "path": "/root/out" })).wait_for(machine, "complete");
    let result = &got["results"]["0"];
    assert_eq!((&result["path"], &result["stat_result"]["size"]), (&json!("/root/out"), &json!(50_000_000)));
    let blob = result["content_blob"].as_str().unwrap();
    let record = machine.get(&format!("/blobs/{blob}"));
    assert_eq!(record["sha512"].as_str(), Some(sum.trim()), "{record}");
    assert_eq!(got["references_from"]["agent_output"][0]["target_uuid"], blob, "{got}");
    let put = json!({ "blob_uuid": blob, "path": "/root/in", "mode": 0o640 });
    let put = ask(machine, &one, "put", put).wait_for(machine, "complete");
    assert_eq!(put["results"]["0"]["path"], "/root/in", "{put}");
    assert_eq!(said(machine, &one, "sha512sum </root/in | cut -d ' ' -f 1"), sum);
    assert_eq!(said(machine, &one, "stat -c %a /root/in"), "640\n");
    said(machine, &one, "rm /root/in /root/out");

    // Permissions in words, and what cannot be.
    let small = ask(machine, &one, "get", json!({ "path": "/etc/passwd" })).wait_for(machine, "complete");
    let small = small["results"]["0"]["content_blob"].clone();
    let put = json!({ "blob_uuid": small, "path": "/root/an \"odd\" 'name", "mode": "u=rw,go=r" });
    ask(machine, &one, "put", put).wait_for(machine, "complete");
    assert_eq!(said(machine, &one, "stat -c '%a %n' /root/an*"), "644 /root/an \"odd\" 'name\n");
    let absent = ask(machine, &one, "get", json!({ "path": "/root/absent" })).wait_for(machine, "error");
    assert_eq!(absent["results"]["0"]["result"], false, "{absent}");
    assert!(absent["error_message"].as_str().unwrap().contains("/root/absent"), "{absent}");
    let nowhere = json!({ "blob_uuid": small, "path": "/no/such/folder/file", "mode": 420 });
    ask(machine, &one, "put", nowhere).wait_for(machine, "error");

    // What it says of itself.
    let facts = machine.get(&one.path("/agent/facts"));
    assert!(facts["mounts"].as_array().is_some_and(|mounts| !mounts.is_empty()), "{facts}");

    // An agent that ends comes back, and nothing is the worse for it.
    let asked = ask(machine, &one, "execute", json!({ "command_line": "killall muster-agent; sleep 1" }));
    asked.wait_for(machine, "error");
    wait_until_ready(machine, &one);
    assert_eq!(said(machine, &one, "echo again"), "again\n");
    one.delete(machine);
    assert_eq!(qemu_processes(), []);
}
