//! A guest that sends arbitrary bytes to its host.

use muster_test_cluster::{Host, enter_vm_namespaces, single_vm_host};
use muster_testing::wait_for;
use serde_json::json;

use super::{Operation, console, create_ready, request, run, wait_until_ready};
use crate::TIMEOUT;
use crate::instance::Instance;

/// The maximum growth of the daemon's memory caused by one hostile guest, in MiB.
const MAX_MEMORY_GROWTH: u64 = 96;

/// Returns the resident memory of the only daemon in this namespace, in MiB.
fn daemon_memory() -> u64 {
    let resident = std::fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
        let line = std::fs::read_to_string(entry.path().join("cmdline")).ok()?;
        line.contains("\0serve\0").then_some(())?;
        let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
        let kibibytes =
            status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?.trim().split(' ').next()?;
        kibibytes.parse::<u64>().ok()
    });
    resident.unwrap() >> 10
}

/// Asserts that the agent of a guest runs commands.
fn assert_works(host: &Host, instance: &Instance) {
    assert_eq!(run(host, instance, "echo well"), "well\n");
}

#[test]
fn hostile_guest_affects_only_its_own_operations() {
    if !enter_vm_namespaces("agent::hostile::hostile_guest_affects_only_its_own_operations") {
        return;
    }
    let cluster = single_vm_host(&[]);
    let host = cluster.host(1);
    let changes = json!({ "side_channels": ["sf-agent"] });
    let [good, bad] = ["good", "bad"].map(|name| Instance::request(host, name, &changes));
    for instance in [&good, &bad] {
        instance.wait_for_state(host, "created");
        wait_until_ready(host, instance);
    }
    let mut console = console(host, &bad);
    let before = daemon_memory();

    // A running operation ends at its deadline, whatever the guest sends instead of a reply.
    let body = json!({ "command_line": "sleep 4711", "deadline_seconds": 20 });
    let operation: Operation = request(host, &bad, "execute", body);
    operation.wait_for(host, "executing");
    console.run("mv /usr/bin/muster-agent /usr/bin/away; killall muster-agent; sleep 1");
    let port = "/dev/virtio-ports/sf-agent";
    let header = |length: u32| format!("printf '*SFv001[%08d]' {length}");
    for command in [
        // A flood of garbage.
        format!("timeout 6 cat /dev/urandom >{port}"),
        format!("timeout 6 sh -c 'yes \"*SFv001[00000002]{{}}\" >{port}'"),
        // Packets that are too large, and packets of the maximum size.
        format!(
            "(while :; do {}; head -c 3000000 /dev/zero; done) | timeout 6 cat >{port}",
            header(99_999_999)
        ),
        format!(
            "(while :; do {}; head -c 31000000 /dev/zero; done) | timeout 6 cat >{port}",
            header(31_000_000)
        ),
        // Unexpected and malformed replies.
        format!(
            "timeout 6 sh -c 'while :; do for body in \
             \"{{\\\"command\\\":\\\"execute-response\\\",\\\"unique\\\":[1,{{}}]}}    \" \
             \"{{\\\"command\\\":\\\"get-file-response\\\",\\\"unique\\\":\\\"1\\\"}}  \" \
             \"{{\\\"command\\\":7}}                            \" \
             \"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\"; \
             do printf \"*SFv001[%08d]%s\" ${{#body}} \"$body\"; done; done >{port}'"
        ),
    ] {
        console.run(&format!("{command} 2>/dev/null; true"));
        assert_works(host, &good);
        let after = daemon_memory();
        assert!(after < before + MAX_MEMORY_GROWTH, "{command}: {before} MB became {after} MB");
    }
    // The guest is silent now.
    wait_for("the bad guest not to be ready", TIMEOUT, || {
        let record = bad.record(host);
        (!record["agent_state"].as_str()?.starts_with("ready")).then_some(())
    });
    let record = operation.wait_for(host, "expired");
    assert_eq!(record["expiry_reason"], "deadline", "{record}");
    assert_works(host, &good);

    // The guest works again with a proper agent.
    console.run("mv /usr/bin/away /usr/bin/muster-agent");
    wait_until_ready(host, &bad);
    assert_works(host, &bad);
    create_ready(host, "third", &changes);
}
