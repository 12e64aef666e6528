//! A guest that says what it wants to its host.

use muster_test_cluster::{Host, enter_vm_namespaces, single_vm_host};
use muster_testing::wait_for;
use serde_json::json;

use super::{Operation, ask, console, ready, said, wait_until_ready};
use crate::PATIENCE;
use crate::instance::Instance;

/// What the daemon of a machine holds in memory, in megabytes, and what it may come to hold for one bad guest.
const ROOM: u64 = 96;

/// What the one daemon of this world holds.
fn memory() -> u64 {
    let held = std::fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
        let line = std::fs::read_to_string(entry.path().join("cmdline")).ok()?;
        line.contains("\0serve\0").then_some(())?;
        let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
        let held = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?.trim().split(' ').next()?;
        held.parse::<u64>().ok()
    });
    held.unwrap() >> 10
}

/// Runs one command in a guest that is well, which takes no longer than any does.
fn well(machine: &Host, instance: &Instance) {
    assert_eq!(said(machine, instance, "echo well"), "well\n");
}

#[test]
fn a_hostile_guest_harms_nothing_but_what_was_asked_of_it() {
    if !enter_vm_namespaces("agent::hostile::a_hostile_guest_harms_nothing_but_what_was_asked_of_it") {
        return;
    }
    let world = single_vm_host(&[]);
    let machine = world.host(1);
    let only = json!({ "side_channels": ["sf-agent"] });
    let [good, bad] = ["good", "bad"].map(|name| Instance::ask_for(machine, name, &only));
    for instance in [&good, &bad] {
        instance.wait_for_state(machine, "created");
        wait_until_ready(machine, instance);
    }
    let mut console = console(machine, &bad);
    let before = memory();

    // What is under way in it ends with its budget, whatever it says instead of an answer.
    let asked = json!({ "command_line": "sleep 4711", "deadline_seconds": 20 });
    let asked: Operation = ask(machine, &bad, "execute", asked);
    asked.wait_for(machine, "executing");
    console.run("mv /usr/bin/muster-agent /usr/bin/away; killall muster-agent; sleep 1");
    let port = "/dev/virtio-ports/sf-agent";
    let header = |length: u32| format!("printf '*SFv001[%08d]' {length}");
    for says in [
        // Garbage, much of it.
        format!("timeout 6 cat /dev/urandom >{port}"),
        format!("timeout 6 sh -c 'yes \"*SFv001[00000002]{{}}\" >{port}'"),
        // Lengths that nobody has memory for, and more than that.
        format!(
            "(while :; do {}; head -c 3000000 /dev/zero; done) | timeout 6 cat >{port}",
            header(99_999_999)
        ),
        format!(
            "(while :; do {}; head -c 31000000 /dev/zero; done) | timeout 6 cat >{port}",
            header(31_000_000)
        ),
        // Replies to nothing, in shapes that nobody expects.
        format!(
            "timeout 6 sh -c 'while :; do for body in \
             \"{{\\\"command\\\":\\\"execute-response\\\",\\\"unique\\\":[1,{{}}]}}    \" \
             \"{{\\\"command\\\":\\\"get-file-response\\\",\\\"unique\\\":\\\"1\\\"}}  \" \
             \"{{\\\"command\\\":7}}                            \" \
             \"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\"; \
             do printf \"*SFv001[%08d]%s\" ${{#body}} \"$body\"; done; done >{port}'"
        ),
    ] {
        console.run(&format!("{says} 2>/dev/null; true"));
        well(machine, &good);
        let after = memory();
        assert!(after < before + ROOM, "{says}: {before} MB became {after} MB");
    }
    // It says nothing any more.
    wait_for("the bad guest not to be ready", PATIENCE, || {
        let record = bad.record(machine);
        (!record["agent_state"].as_str()?.starts_with("ready")).then_some(())
    });
    let record = asked.wait_for(machine, "expired");
    assert_eq!(record["expiry_reason"], "deadline", "{record}");
    well(machine, &good);

    // Once it has a proper agent again it is as good as any.
    console.run("mv /usr/bin/away /usr/bin/muster-agent");
    wait_until_ready(machine, &bad);
    well(machine, &bad);
    ready(machine, "third", &only);
}
