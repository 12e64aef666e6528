//! Commands and file transfers.

use muster_test_cluster::{enter_vm_namespaces, qemu_processes, single_vm_host};
use serde_json::json;

use super::terminal::check_interactive_session;
use super::{create_ready, execute, large_disk, request, run, wait_until_ready};
use crate::instance::{bytes, now};

#[test]
fn runs_commands_and_transfers_files() {
    if !enter_vm_namespaces("agent::commands_and_files::runs_commands_and_transfers_files") {
        return;
    }
    let cluster = single_vm_host(&[]);
    let host = cluster.host(1);
    let began = now();
    let one = create_ready(host, "one", &large_disk());
    let record = one.record(host);
    let boot = record["agent_system_boot_time"].as_f64().unwrap();
    assert!((began - 60.0..now() + 60.0).contains(&boot), "{record}");

    // Commands with their output and exit codes.
    let result = execute(host, &one, "echo here; echo there >&2; exit 3");
    assert_eq!(
        result,
        json!({
            "command-line": "echo here; echo there >&2; exit 3", "result": true, "return-code": 3,
            "stdout": "here\n", "stderr": "there\n",
        })
    );
    let absent = execute(host, &one, "no-such-program --at-all");
    assert_eq!(absent["return-code"], 127, "{absent}");
    assert!(absent["stderr"].as_str().unwrap().contains("not found"), "{absent}");
    // Quoted shell syntax is not evaluated.
    assert_eq!(run(host, &one, "echo '$(id) `id` \"quoted\" ; id'"), "$(id) `id` \"quoted\" ; id\n");

    // Large output is stored in a blob.
    let long = execute(host, &one, "seq 1 720000");
    let expected: String = (1..=720_000).map(|number| format!("{number}\n")).collect();
    assert!(expected.len() > 4_900_000, "{}", expected.len());
    assert!(long.get("stdout").is_none(), "{long}");
    let blob = long["stdout_blob"].as_str().unwrap();
    assert!(bytes(host, &format!("/blobs/{blob}/data")) == expected.as_bytes(), "the output differs");

    // Read 50 MB from the guest and write them back.
    run(host, &one, "head -c 50000000 /dev/urandom >/root/out");
    let checksum = run(host, &one, "sha512sum </root/out | cut -d ' ' -f 1");
    let got = request(host, &one, "get", json!({ "path": "/root/out" })).wait_for(host, "complete");
    let result = &got["results"]["0"];
    assert_eq!((&result["path"], &result["stat_result"]["size"]), (&json!("/root/out"), &json!(50_000_000)));
    let blob = result["content_blob"].as_str().unwrap();
    let record = host.get(&format!("/blobs/{blob}"));
    assert_eq!(record["sha512"].as_str(), Some(checksum.trim()), "{record}");
    assert_eq!(got["references_from"]["agent_output"][0]["target_uuid"], blob, "{got}");
    let put = json!({ "blob_uuid": blob, "path": "/root/in", "mode": 0o640 });
    let put = request(host, &one, "put", put).wait_for(host, "complete");
    assert_eq!(put["results"]["0"]["path"], "/root/in", "{put}");
    assert_eq!(run(host, &one, "sha512sum </root/in | cut -d ' ' -f 1"), checksum);
    assert_eq!(run(host, &one, "stat -c %a /root/in"), "640\n");
    run(host, &one, "rm /root/in /root/out");

    // Symbolic modes, and failures.
    let small = request(host, &one, "get", json!({ "path": "/etc/passwd" })).wait_for(host, "complete");
    let small = small["results"]["0"]["content_blob"].clone();
    let put = json!({ "blob_uuid": small, "path": "/root/an \"odd\" 'name", "mode": "u=rw,go=r" });
    request(host, &one, "put", put).wait_for(host, "complete");
    assert_eq!(run(host, &one, "stat -c '%a %n' /root/an*"), "644 /root/an \"odd\" 'name\n");
    let absent = request(host, &one, "get", json!({ "path": "/root/absent" })).wait_for(host, "error");
    assert_eq!(absent["results"]["0"]["result"], false, "{absent}");
    assert!(absent["error_message"].as_str().unwrap().contains("/root/absent"), "{absent}");
    let nowhere = json!({ "blob_uuid": small, "path": "/no/such/folder/file", "mode": 420 });
    request(host, &one, "put", nowhere).wait_for(host, "error");

    check_interactive_session(host, &one);

    // Facts about the guest.
    let facts = host.get(&one.path("/agent/facts"));
    assert!(facts["mounts"].as_array().is_some_and(|mounts| !mounts.is_empty()), "{facts}");

    // The agent works again after it was restarted.
    let operation =
        request(host, &one, "execute", json!({ "command_line": "killall muster-agent; sleep 1" }));
    operation.wait_for(host, "error");
    wait_until_ready(host, &one);
    assert_eq!(run(host, &one, "echo again"), "again\n");
    one.delete(host);
    assert_eq!(qemu_processes(), []);
}
