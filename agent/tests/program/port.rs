//! The port: facts about the guest, invalid input, and hosts that do not read.

use std::io::Write as _;
use std::process::Command;

use muster_agent::frame;
use serde_json::json;

use crate::host::{Host, random_bytes, wait_until};

#[test]
fn reports_facts_about_the_guest() {
    let mut host = Host::new();
    let reply = host.call(json!({ "command": "is-system-running" }));
    assert_eq!(reply["command"], "is-system-running-response");
    assert!(reply["result"].is_boolean() && reply["message"].is_string());
    assert_eq!(reply["features"], json!(["memory", "pieces", "terminal"]));
    assert!(reply["system_boot_time"].is_number() && reply["boot-id"].is_string());
    let reply = host.call(json!({ "command": "gather-facts" }));
    assert_eq!(reply["command"], "gather-facts-response");
    assert!(reply["result"]["distribution"]["id"].is_string());
    let mounts = reply["result"]["mounts"].as_array().unwrap();
    assert!(mounts.iter().any(|mount| mount["mount_point"] == "/proc" && mount["vfs_type"] == "proc"));
    assert!(reply["result"]["ssh-host-keys"].is_object());
}

#[test]
fn sends_agent_stop_on_sigterm() {
    let mut host = Host::new();
    assert_eq!(host.stop_agent(), Some(0));
    let packets = host.receive_all();
    assert_eq!(packets.len(), 1);
    assert_eq!(packets[0]["command"], "agent-stop");
    assert!(packets[0]["system_boot_time"].is_number());
}

#[test]
fn skips_or_rejects_invalid_input() {
    let mut host = Host::new();
    host.stream.write_all(b"login: *SFv001[99999999]*SFv001[0000000x]\xff\0").unwrap();
    host.stream.write_all(&random_bytes(100_000)).unwrap();
    assert_eq!(host.call(json!({ "command": "ping" }))["command"], "pong");
    host.stream.write_all(&frame::encode(b"{\"command\"")).unwrap();
    assert_eq!(host.receive()["command"], "json-decode-failure");
    for packet in [json!([1]), json!({}), json!({ "command": 7 })] {
        host.send(&packet);
        assert_eq!(host.receive()["command"], "command-error", "{packet}");
    }
    let reply = host.call(json!({ "command": "dance" }));
    assert_eq!(
        (&reply["command"], &reply["message"]),
        (&json!("unknown-command"), &json!("dance is an unknown command"))
    );
    // Replies and packets of unknown transfers are ignored.
    for command in ["pong", "unknown-command", "command-error", "get-file-more", "abandon", "x-response"] {
        host.request(json!({ "command": command, "offset": 1 }));
    }
    // The preamble of 2023 has another asterisk, and frames may arrive byte by byte.
    let mut bytes = frame::encode(br#"{"command": "ping", "unique": 5}"#);
    bytes.insert(7, b'*');
    for byte in bytes {
        host.stream.write_all(&[byte]).unwrap();
    }
    let reply = host.receive();
    assert_eq!((&reply["command"], &reply["unique"]), (&json!("pong"), &json!(5)));
}

#[test]
fn drops_partial_frame_on_reconnection() {
    let mut host = Host::new();
    host.stream.write_all(b"*SFv001[00001000]{\"command\": ").unwrap();
    host.reconnect();
    assert_eq!(host.call(json!({ "command": "ping" }))["command"], "pong");
}

#[test]
fn tolerates_a_host_that_does_not_read() {
    let mut host = Host::new();
    let big = host.path_text("big");
    std::fs::File::create(&big).unwrap().set_len(50 << 20).unwrap();
    host.request(json!({ "command": "execute", "command-line": "head -c 4000000 /dev/zero" }));
    for window in [json!(null), json!(50 << 20)] {
        host.request(json!({ "command": "get-file", "path": big, "window": window }));
    }
    // The agent still reads requests whose replies are not read.
    let long = "x".repeat(2000);
    for _ in 0..20_000 {
        host.request(json!({ "command": "ping", "more": long }));
    }
    let mark = host.path_text("mark");
    host.request(json!({ "command": "execute", "command-line": format!("echo > {mark}"), "key": "k" }));
    wait_until("a command runs", || std::fs::exists(&mark).unwrap());
    let memory = host.agent_memory_kib();
    assert!(memory < 80 << 10, "{memory} KiB");

    host.reconnect();
    let reply = host.execute_keyed("k", "", true);
    assert_eq!(reply["return-code"], 0);
}

#[test]
fn limits_concurrent_transfers() {
    let mut host = Host::new();
    let requests: Vec<_> = (0..200)
        .map(|_| host.request(json!({ "command": "get-file", "path": "/dev/zero", "window": 1 })))
        .collect();
    let rejected = requests.iter().filter(|unique| host.reply(unique)["result"] == false).count();
    assert_eq!(rejected, 200 - 16);
    let puts: Vec<_> = (0..20)
        .map(|number| {
            let path = host.path_text(&format!("file-{number}"));
            host.request(
                json!({ "command": "put-file", "path": path, "stat_result": {}, "offset": 0, "chunk": "" }),
            )
        })
        .collect();
    for unique in &puts[8..] {
        assert_eq!(host.reply(unique)["command"], "command-error");
    }
    assert_eq!(host.call(json!({ "command": "ping" }))["command"], "pong");
}

#[test]
fn second_agent_fails_without_harming_the_first() {
    let mut host = Host::new();
    let second = Command::new(env!("CARGO_BIN_EXE_muster-agent"))
        .arg("--port")
        .arg(host.path("port"))
        .arg("--spool")
        .arg(host.path("spool"))
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&second.stderr).contains("another agent is using this directory"));
    assert_eq!(host.call(json!({ "command": "ping" }))["command"], "pong");
    assert!(host.agent_id() > 0);
}
