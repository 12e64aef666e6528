//! Agent operations interrupted by daemon kills, guest resets, pauses and deadlines.

use muster_test_cluster::{enter_vm_namespaces, single_vm_host};
use muster_testing::wait_for;
use reqwest::Method;
use serde_json::{Value, json};

use super::{console, create_ready, large_disk, request, run, wait_until_ready};
use crate::TIMEOUT;
use crate::instance::console_without_daemon;

/// The size of files, large enough to interrupt their transfer.
const FILE_SIZE: u32 = 50_000_000;

#[test]
fn interrupted_operations_finish_once_or_expire() {
    if !enter_vm_namespaces("agent::interrupted::interrupted_operations_finish_once_or_expire") {
        return;
    }
    let mut cluster = single_vm_host(&[]);
    let one = create_ready(cluster.host(1), "one", &large_disk());
    let directory = one.vm_dir(&cluster, 1);
    let host = &mut cluster.hosts[0];

    // A command continues and runs only once.
    let line = "echo ran >>/root/ran; while [ ! -e /root/go ]; do sleep 0.1; done; echo done; exit 4";
    let command = request(host, &one, "execute", json!({ "command_line": line }));
    let queued_behind =
        request(host, &one, "execute", json!({ "command_line": "echo behind; cat /root/ran" }));
    command.wait_for(host, "executing");
    console(host, &one).run_until("[ -e /root/ran ]");
    host.kill();
    host.start();
    assert_eq!(command.record(host)["state"], "executing");
    one.console(host).run("touch /root/go");
    let ended = command.wait_for(host, "complete");
    assert_eq!(ended["results"]["0"]["return-code"], 4, "{ended}");
    assert_eq!(ended["results"]["0"]["stdout"], "done\n", "{ended}");
    let queued_behind = queued_behind.wait_for(host, "complete");
    assert_eq!(queued_behind["results"]["0"]["stdout"], "behind\nran\n", "{queued_behind}");

    // A command ends while no daemon runs, with more output than fits into a record.
    let line = "rm /root/go; seq 1 720000; echo ran >>/root/second; exit 5";
    let command = request(host, &one, "execute", json!({ "command_line": line }));
    command.wait_for(host, "executing");
    host.kill();
    console_without_daemon(&directory).run_until("[ -e /root/second ]");
    host.start();
    let ended = command.wait_for(host, "complete");
    assert_eq!(ended["results"]["0"]["return-code"], 5, "{ended}");
    let blob = ended["results"]["0"]["stdout_blob"].as_str().unwrap();
    assert_eq!(host.get(&format!("/blobs/{blob}"))["size"], (1..=720_000).map(line_length).sum::<u64>());
    assert_eq!(one.console(host).run("cat /root/second"), "ran\n");

    // File transfers in both directions.
    run(host, &one, &format!("head -c {FILE_SIZE} /dev/urandom >/root/out"));
    let checksum = run(host, &one, "sha512sum </root/out | cut -d ' ' -f 1");
    let get = request(host, &one, "get", json!({ "path": "/root/out" }));
    get.wait_for_progress(host);
    host.kill();
    host.start();
    let got = get.wait_for(host, "complete");
    assert_eq!(got["attempts"], 2, "{got}");
    let blob = got["results"]["0"]["content_blob"].clone();
    let record = host.get(&format!("/blobs/{}", blob.as_str().unwrap()));
    assert_eq!(record["sha512"].as_str(), Some(checksum.trim()), "{record}");
    let put = |path: &str| json!({ "blob_uuid": blob, "path": path, "mode": 416 });
    let put_operation = request(host, &one, "put", put("/root/in"));
    put_operation.wait_for_progress(host);
    host.kill();
    host.start();
    let record = put_operation.wait_for(host, "complete");
    assert_eq!(record["attempts"], 2, "{record}");
    assert_eq!(run(host, &one, "sha512sum </root/in | cut -d ' ' -f 1"), checksum);
    // The first attempt left no files.
    assert_eq!(run(host, &one, "ls -A /root | grep -c muster || true"), "0\n");

    // A reset: the command may have run and is not repeated, the file transfer is.
    run(host, &one, "rm /root/in");
    let command = request(
        host,
        &one,
        "execute",
        json!({ "command_line": "echo ran >>/root/third; sync; touch /root/synced; sleep 600" }),
    );
    let queued_behind = request(host, &one, "put", put("/root/in"));
    command.wait_for(host, "executing");
    one.console(host).run_until("[ -e /root/synced ]");
    one.post(host, "/reboothard");
    let record = command.wait_for(host, "error");
    assert!(record["error_message"].as_str().unwrap().contains("restarted"), "{record}");
    queued_behind.wait_for_progress(host);
    one.post(host, "/reboothard");
    queued_behind.wait_for(host, "complete");
    assert_eq!(run(host, &one, "sha512sum </root/in | cut -d ' ' -f 1"), checksum);
    assert_eq!(run(host, &one, "cat /root/third"), "ran\n");

    // A paused guest: the transfer expires after several attempts without progress.
    let body =
        json!({ "blob_uuid": blob, "path": "/root/late", "mode": 416, "progress_timeout_seconds": 1.5 });
    let stalled = request(host, &one, "put", body);
    stalled.wait_for_progress(host);
    one.post(host, "/pause");
    let record = stalled.wait_for(host, "expired");
    assert_eq!(record["expiry_reason"], "progress", "{record}");
    assert!(record["attempts"].as_i64().unwrap() > 1, "{record}");
    one.post(host, "/unpause");
    wait_until_ready(host, &one);
    assert_eq!(run(host, &one, "ls /root/late 2>/dev/null | wc -l"), "0\n");

    // Deadlines of a running and of a queued command. The running one is terminated in the guest.
    let line = json!({ "command_line": "sleep 4711", "deadline_seconds": 4 });
    let running = request(host, &one, "execute", line);
    running.wait_for(host, "executing");
    let queued =
        request(host, &one, "execute", json!({ "command_line": "touch /root/never", "deadline_seconds": 1 }));
    let record = queued.wait_for(host, "expired");
    assert_eq!((&record["expiry_reason"], &record["attempts"]), (&json!("deadline"), &json!(0)), "{record}");
    assert_eq!(running.record(host)["state"], "executing");
    let record = running.wait_for(host, "expired");
    assert_eq!(record["expiry_reason"], "deadline", "{record}");
    assert_eq!(
        run(host, &one, "ps | grep 'sleep 471[1]' | wc -l; ls /root/never 2>/dev/null | wc -l"),
        "0\n0\n"
    );
    wait_for("the events of the expired operations", TIMEOUT, || {
        let has_expired = |messages: Vec<String>| messages.iter().any(|message| message.contains("expired"));
        let of_instance: Vec<String> = host
            .get(&one.path("/events?limit=1000"))
            .as_array()
            .unwrap()
            .iter()
            .map(|event: &Value| event["message"].as_str().unwrap().to_owned())
            .collect();
        (has_expired(running.messages(host)) && has_expired(of_instance)).then_some(())
    });

    // A deleted operation is terminated in the guest, and the next one runs.
    let deleted = request(host, &one, "execute", json!({ "command_line": "sleep 4712" }));
    deleted.wait_for(host, "executing");
    deleted.delete(host);
    assert_eq!(run(host, &one, "ps | grep 'sleep 471[2]' | wc -l"), "0\n");
    assert_eq!(host.call(Method::GET, &one.path("/agentoperations"), None).1, json!([]));
    one.delete(host);
}

/// Returns the length of a line with a number.
fn line_length(number: u64) -> u64 {
    u64::from(number.ilog10()) + 2
}
