//! Daemons that are killed, guests that are restarted or halted, and budgets that run out, in the middle of something.

use muster_test_cluster::{enter_vm_namespaces, single_vm_host};
use muster_testing::wait_for;
use reqwest::Method;
use serde_json::{Value, json};

use super::{ask, console, ready, roomy, said, wait_until_ready};
use crate::PATIENCE;

/// How large files are here: enough to be in the middle of.
const SIZE: u32 = 50_000_000;

#[test]
fn what_is_under_way_when_the_daemon_is_killed_is_finished_once() {
    if !enter_vm_namespaces(
        "agent::interrupted::what_is_under_way_when_the_daemon_is_killed_is_finished_once",
    ) {
        return;
    }
    let mut world = single_vm_host(&[]);
    let machine = &mut world.hosts[0];
    let one = ready(machine, "one", &roomy());

    // A command goes on, and ran once.
    let line = "echo ran >>/root/ran; while [ ! -e /root/go ]; do sleep 0.1; done; echo done; exit 4";
    let command = ask(machine, &one, "execute", json!({ "command_line": line }));
    let behind = ask(machine, &one, "execute", json!({ "command_line": "echo behind; cat /root/ran" }));
    command.wait_for(machine, "executing");
    let mut console = console(machine, &one);
    console.run_until("[ -e /root/ran ]");
    machine.kill();
    machine.start();
    assert_eq!(command.record(machine)["state"], "executing");
    console.run("touch /root/go");
    let ended = command.wait_for(machine, "complete");
    assert_eq!(ended["results"]["0"]["return-code"], 4, "{ended}");
    assert_eq!(ended["results"]["0"]["stdout"], "done\n", "{ended}");
    let behind = behind.wait_for(machine, "complete");
    assert_eq!(behind["results"]["0"]["stdout"], "behind\nran\n", "{behind}");

    // One that ended while nobody listened, with more output than fits into a record.
    let line = "rm /root/go; seq 1 720000; echo ran >>/root/second; exit 5";
    let command = ask(machine, &one, "execute", json!({ "command_line": line }));
    command.wait_for(machine, "executing");
    machine.kill();
    console.run_until("[ -e /root/second ]");
    machine.start();
    let ended = command.wait_for(machine, "complete");
    assert_eq!(ended["results"]["0"]["return-code"], 5, "{ended}");
    let blob = ended["results"]["0"]["stdout_blob"].as_str().unwrap();
    assert_eq!(machine.get(&format!("/blobs/{blob}"))["size"], (1..=720_000).map(digits).sum::<u64>());
    assert_eq!(console.run("cat /root/second"), "ran\n");

    // Files, on their way out and in.
    said(machine, &one, &format!("head -c {SIZE} /dev/urandom >/root/out"));
    let sum = said(machine, &one, "sha512sum </root/out | cut -d ' ' -f 1");
    let get = ask(machine, &one, "get", json!({ "path": "/root/out" }));
    get.wait_for_progress(machine);
    machine.kill();
    machine.start();
    let got = get.wait_for(machine, "complete");
    assert_eq!(got["attempts"], 2, "{got}");
    let blob = got["results"]["0"]["content_blob"].clone();
    let record = machine.get(&format!("/blobs/{}", blob.as_str().unwrap()));
    assert_eq!(record["sha512"].as_str(), Some(sum.trim()), "{record}");
    let put = |path: &str| json!({ "blob_uuid": blob, "path": path, "mode": 416 });
    let in_again = ask(machine, &one, "put", put("/root/in"));
    in_again.wait_for_progress(machine);
    machine.kill();
    machine.start();
    let record = in_again.wait_for(machine, "complete");
    assert_eq!(record["attempts"], 2, "{record}");
    assert_eq!(said(machine, &one, "sha512sum </root/in | cut -d ' ' -f 1"), sum);
    // Nothing of the first attempt is left.
    assert_eq!(said(machine, &one, "ls -A /root | grep -c muster || true"), "0\n");

    // Reset in the middle: a command may have run and is not run again, a file is moved again.
    said(machine, &one, "rm /root/in");
    let command =
        ask(machine, &one, "execute", json!({ "command_line": "echo ran >>/root/third; sync; sleep 600" }));
    let behind = ask(machine, &one, "put", put("/root/in"));
    command.wait_for(machine, "executing");
    console.run_until("[ -s /root/third ]");
    one.post(machine, "/reboothard");
    let record = command.wait_for(machine, "error");
    assert!(record["error_message"].as_str().unwrap().contains("restarted"), "{record}");
    behind.wait_for_progress(machine);
    one.post(machine, "/reboothard");
    behind.wait_for(machine, "complete");
    assert_eq!(said(machine, &one, "sha512sum </root/in | cut -d ' ' -f 1"), sum);
    assert_eq!(said(machine, &one, "cat /root/third"), "ran\n");

    // Halted until it has stood still for too long, thrice.
    let patient =
        json!({ "blob_uuid": blob, "path": "/root/late", "mode": 416, "progress_timeout_seconds": 1.5 });
    let stalled = ask(machine, &one, "put", patient);
    stalled.wait_for_progress(machine);
    one.post(machine, "/pause");
    let record = stalled.wait_for(machine, "expired");
    assert_eq!(record["expiry_reason"], "progress", "{record}");
    assert!(record["attempts"].as_i64().unwrap() > 1, "{record}");
    one.post(machine, "/unpause");
    wait_until_ready(machine, &one);
    assert_eq!(said(machine, &one, "ls /root/late 2>/dev/null | wc -l"), "0\n");

    // Deadlines of one that runs and of one behind it; what ran is gone from the guest.
    let line = json!({ "command_line": "sleep 4711", "deadline_seconds": 4 });
    let running = ask(machine, &one, "execute", line);
    running.wait_for(machine, "executing");
    let queued =
        ask(machine, &one, "execute", json!({ "command_line": "touch /root/never", "deadline_seconds": 1 }));
    let record = queued.wait_for(machine, "expired");
    assert_eq!((&record["expiry_reason"], &record["attempts"]), (&json!("deadline"), &json!(0)), "{record}");
    assert_eq!(running.record(machine)["state"], "executing");
    let record = running.wait_for(machine, "expired");
    assert_eq!(record["expiry_reason"], "deadline", "{record}");
    assert_eq!(
        said(machine, &one, "ps | grep 'sleep 471[1]' | wc -l; ls /root/never 2>/dev/null | wc -l"),
        "0\n0\n"
    );
    wait_for("the events of what expired", PATIENCE, || {
        let told = |messages: Vec<String>| messages.iter().any(|message| message.contains("expired"));
        let of_instance: Vec<String> = machine
            .get(&one.path("/events?limit=1000"))
            .as_array()
            .unwrap()
            .iter()
            .map(|event: &Value| event["message"].as_str().unwrap().to_owned())
            .collect();
        (told(running.messages(machine)) && told(of_instance)).then_some(())
    });

    // Deleted while it runs: the next one's turn comes, and nothing of it is left.
    let deleted = ask(machine, &one, "execute", json!({ "command_line": "sleep 4712" }));
    deleted.wait_for(machine, "executing");
    deleted.delete(machine);
    assert_eq!(said(machine, &one, "ps | grep 'sleep 471[2]' | wc -l"), "0\n");
    assert_eq!(machine.call(Method::GET, &one.path("/agentoperations"), None).1, json!([]));
    one.delete(machine);
}

/// How long a line with a number is.
fn digits(number: u64) -> u64 {
    u64::from(number.ilog10()) + 2
}
