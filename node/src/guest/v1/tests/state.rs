//! The agent state, timeouts and invalid data.

use std::time::Duration;

use muster_agent::{FEATURE_MEMORY, FEATURE_PIECES};
use muster_types::guest::{AgentState, GuestApi, GuestError};
use muster_types::instance::SideChannel;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::command;
use super::fake_agent::FakeVm;

fn is_approximately(since: Instant, seconds: u64) -> bool {
    let elapsed = since.elapsed();
    elapsed >= Duration::from_secs(seconds) && elapsed < Duration::from_millis(seconds * 1000 + 300)
}

#[tokio::test(start_paused = true)]
async fn queries_guest_with_backoff_until_it_is_ready() {
    let mut vm = FakeVm::new();
    assert_eq!(vm.report().state, AgentState::NoContact);
    let mut agent = vm.accept().await;
    let mut request = agent.expect("is-system-running").await;
    for pause in [1, 2, 4, 8, 16, 30, 30] {
        let since = Instant::now();
        let rest = "x".repeat(usize::try_from(pause).unwrap() * 10);
        let message = format!("starting\u{1b}\n{rest}");
        let answer = json!({ "result": false, "message": message, "system_boot_time": 1000.5 });
        agent.reply(&request, "is-system-running-response", answer).await;
        let shown = format!("starting{rest}").chars().take(100).collect();
        vm.wait_for(&AgentState::NotReady(shown)).await;
        request = loop {
            let packet = agent.receive().await.unwrap();
            if packet["command"] != "ping" {
                break packet;
            }
            agent.reply(&packet, "pong", json!({})).await;
        };
        assert_eq!(request["command"], "is-system-running");
        assert!(is_approximately(since, pause), "{pause}: {:?}", since.elapsed());
    }
    let report = vm.report();
    assert_eq!((report.system_boot_time, report.boot_id.as_deref()), (Some(1000.5), Some("1000")));
    assert_eq!((report.agent_start_time, report.agent_version), (None, None));
    let degraded = json!({ "result": false, "message": "degraded", "system_boot_time": 1001 });
    agent.reply(&request, "is-system-running-response", degraded).await;
    vm.wait_for(&AgentState::Degraded).await;
    assert_eq!(vm.report().boot_id.as_deref(), Some("1000"));
    // A ready guest is only pinged.
    for _ in 0..20 {
        let ping = agent.expect("ping").await;
        agent.reply(&ping, "pong", json!({})).await;
    }
}

#[tokio::test(start_paused = true)]
async fn follows_starts_and_stops_of_the_agent() {
    let mut vm = FakeVm::new();
    let mut agent = vm.accept().await;
    agent.expect("is-system-running").await;
    sleep(Duration::from_secs(20)).await;
    let start = json!({ "command": "agent-start", "message": "version 0.4.1", "system_boot_time": 1000.5, "unique": "x" });
    agent.send(&start).await;
    vm.wait_for(&AgentState::Startup).await;
    let report = vm.report();
    assert!(
        report.agent_start_time.is_some() && report.agent_version.as_deref() == Some("0.4.1"),
        "{report:?}"
    );
    let since = Instant::now();
    agent.report_ready(&[]).await;
    assert!(since.elapsed() < Duration::from_millis(300));
    vm.wait_for(&AgentState::Ready).await;
    let first = vm.report().boot_id;
    let guests = vm.guests.clone();
    let (id, sent_command) = (vm.id, command("sleep 9"));
    let running = tokio::spawn(async move { guests.execute(id, &sent_command).await });
    agent.expect("execute").await;
    // The restarted agent does not know the command.
    agent.send(&start).await;
    assert!(matches!(running.await.unwrap(), Err(GuestError::Unreachable(_))));
    vm.wait_for(&AgentState::Startup).await;
    agent.report_ready(&[]).await;
    vm.wait_for(&AgentState::Ready).await;
    assert_ne!(vm.report().boot_id, first);
    agent.send(&json!({ "command": "agent-stop", "system_boot_time": 5.0 })).await;
    vm.wait_for(&AgentState::Stopped).await;
    assert!(matches!(vm.guests.facts(vm.id).await, Err(GuestError::Unreachable(_))));
    // The silence timeout does not change the state.
    agent.wait_for_close().await;
    assert_eq!(vm.report().state, AgentState::Stopped);
    let mut agent = vm.accept().await;
    agent.send(&json!({ "command": "agent-start", "message": "version 0.3.15" })).await;
    vm.wait_for(&AgentState::TooOld).await;
    agent.report_ready(&[]).await;
    agent.send(&json!({ "command": "ping", "unique": 65535 })).await;
    while agent.receive().await.unwrap()["command"] != "pong" {}
    assert_eq!(vm.report().state, AgentState::TooOld);
    assert!(matches!(vm.guests.facts(vm.id).await, Err(GuestError::Unreachable(_))));
}

#[tokio::test(start_paused = true)]
async fn silent_agent_is_unresponsive_after_15_seconds() {
    let (mut vm, mut agent) = FakeVm::ready(&[]).await;
    let since = Instant::now();
    let ping = agent.expect("ping").await;
    assert!(is_approximately(since, 5), "{:?}", since.elapsed());
    agent.reply(&ping, "pong", json!({})).await;
    agent.expect("ping").await;
    assert!(is_approximately(since, 10), "{:?}", since.elapsed());
    agent.expect("ping").await;
    vm.wait_for(&AgentState::Unresponsive).await;
    assert!(is_approximately(since, 20), "{:?}", since.elapsed());
    agent.wait_for_close().await;
    let mut agent = vm.accept().await;
    agent.report_ready(&[]).await;
    vm.wait_for(&AgentState::Ready).await;
}

#[tokio::test(start_paused = true)]
async fn reconnects_if_the_agent_never_sends_anything() {
    let vm = FakeVm::new();
    let since = Instant::now();
    let mut agent = vm.accept().await;
    let mut queries = 0;
    while let Some(packet) = agent.receive().await {
        assert_eq!(packet["command"], "is-system-running");
        queries += 1;
    }
    assert!(is_approximately(since, 300), "{:?}", since.elapsed());
    assert_eq!((queries, vm.report().state), (10, AgentState::NoContact));
    vm.accept().await.expect("is-system-running").await;
}

#[tokio::test(start_paused = true)]
async fn no_timeouts_apply_to_a_paused_vm() {
    let (mut vm, mut agent) = FakeVm::ready(&[]).await;
    vm.handle.as_ref().unwrap().set_paused(true);
    sleep(Duration::from_secs(5000)).await;
    assert_eq!(vm.report().state.to_string(), "not ready (instance paused)");
    vm.handle.as_ref().unwrap().set_paused(false);
    assert_eq!(vm.report().state, AgentState::Ready);
    let since = Instant::now();
    // No pings were sent while it was paused.
    agent.expect("ping").await;
    assert!(is_approximately(since, 5), "{:?}", since.elapsed());
    vm.wait_for(&AgentState::Unresponsive).await;
    assert!(is_approximately(since, 15), "{:?}", since.elapsed());
}

#[tokio::test(start_paused = true)]
async fn reset_fails_requests_and_starts_a_new_boot() {
    let (mut vm, mut agent) = FakeVm::ready(&[]).await;
    assert_eq!(vm.report().boot_id.as_deref(), Some("1000"));
    let (guests, id) = (vm.guests.clone(), vm.id);
    let sent_command = command("sleep 9");
    let running = tokio::spawn(async move { guests.execute(id, &sent_command).await });
    agent.expect("execute").await;
    vm.handle.as_ref().unwrap().notify_reset();
    let Err(GuestError::Unreachable(reason)) = running.await.unwrap() else {
        panic!("the request survived the reset")
    };
    assert!(reason.contains("reset"), "{reason}");
    vm.wait_for(&AgentState::NoContact).await;
    assert_eq!(vm.report().boot_id, None);
    agent.wait_for_close().await;
    let mut agent = vm.accept().await;
    agent.report_ready(&[]).await;
    vm.wait_for(&AgentState::Ready).await;
    assert_eq!(vm.report().boot_id.as_deref(), Some("1000+1"));
}

#[tokio::test(start_paused = true)]
async fn new_boot_id_starts_a_new_boot() {
    let (mut vm, mut agent) = FakeVm::ready(&[FEATURE_MEMORY, FEATURE_PIECES]).await;
    assert_eq!(vm.report().boot_id.as_deref(), Some("first"));
    let start = json!({ "command": "agent-start", "message": "version 1.0.0", "boot-id": "first", "features": [FEATURE_MEMORY] });
    agent.send(&start).await;
    vm.wait_for(&AgentState::Startup).await;
    assert_eq!(vm.report().boot_id.as_deref(), Some("first"));
    let request = agent.expect("is-system-running").await;
    let answer =
        json!({ "result": true, "message": "running", "boot-id": "second", "features": [FEATURE_MEMORY] });
    agent.reply(&request, "is-system-running-response", answer).await;
    vm.wait_for(&AgentState::Ready).await;
    assert_eq!(vm.report().boot_id.as_deref(), Some("second"));
}

#[tokio::test(start_paused = true)]
async fn ignores_duplicate_replies_and_limits_agent_restarts() {
    let mut vm = FakeVm::new();
    let mut agent = vm.accept().await;
    let request = agent.expect("is-system-running").await;
    let ready = json!({ "result": true, "message": "running" });
    agent.reply(&request, "is-system-running-response", ready).await;
    vm.wait_for(&AgentState::Ready).await;
    agent.reply(&request, "is-system-running-response", json!({ "result": false, "message": "no" })).await;
    agent.send(&json!({ "command": "ping", "unique": 1 })).await;
    agent.expect("pong").await;
    assert_eq!(vm.report().state, AgentState::Ready);
    let since = Instant::now();
    for _ in 0..51 {
        agent.send(&json!({ "command": "agent-stop" })).await;
        agent.send(&json!({ "command": "agent-start", "message": "version 1.0" })).await;
    }
    vm.wait_for(&AgentState::Unresponsive).await;
    vm.accept().await;
    assert!(is_approximately(since, 10), "{:?}", since.elapsed());
}

#[tokio::test(start_paused = true)]
async fn requests_fail_when_the_vm_is_detached() {
    let (mut vm, mut agent) = FakeVm::ready(&[]).await;
    let (guests, id) = (vm.guests.clone(), vm.id);
    let requesting = tokio::spawn(async move { guests.facts(id).await });
    agent.expect("gather-facts").await;
    vm.handle.take();
    assert!(matches!(requesting.await.unwrap(), Err(GuestError::Unreachable(_))));
    agent.wait_for_close().await;
    assert_eq!(vm.guests.report(id), None);
    assert!(matches!(vm.guests.facts(id).await, Err(GuestError::Unreachable(_))));
    // A VM without an agent channel has no report.
    let (other, handle) = vm.attach_another(&[]);
    assert!(handle.is_none() && vm.guests.report(other).is_none());
    let (other, handle) = vm.attach_another(&[SideChannel::Agent2]);
    assert!(handle.is_some());
    assert_eq!(vm.guests.report(other).unwrap().state, AgentState::NoContact);
}

#[tokio::test(start_paused = true)]
async fn skips_garbage_and_ignores_unexpected_replies() {
    let (vm, mut agent) = FakeVm::ready(&[]).await;
    let (guests, id) = (vm.guests.clone(), vm.id);
    let requesting = tokio::spawn(async move { guests.facts(id).await });
    let request = agent.expect("gather-facts").await;
    for garbage in [
        "*SFv001[99999999]",
        "*SFv001[00000003]{ }",
        "*SFv001[00000000]",
        "*SFv001*[00000002][]",
        "login: *SF",
        "*SFv001[0000001x]",
        "\u{0}\u{1b}*",
    ] {
        agent.write(garbage.as_bytes()).await.unwrap();
    }
    for unique in [json!(null), json!("1"), json!([7]), json!({}), json!("99-99999999999999999999999")] {
        for command in ["gather-facts-response", "execute-response", "pong", "get-file-response", "nonsense"]
        {
            agent.send(&json!({ "command": command, "unique": unique, "result": {} })).await;
        }
    }
    agent.send(&json!({ "command": "is-system-running-response", "unique": "x", "result": false })).await;
    agent.send(&json!({ "command": "command-error", "message": "command put-file raised an error" })).await;
    agent
        .reply(&request, "gather-facts-response", json!({ "result": { "distribution": { "id": "tiny" } } }))
        .await;
    let facts = requesting.await.unwrap().unwrap();
    assert_eq!(facts["distribution"]["id"], "tiny");
    assert_eq!(vm.report().state, AgentState::Ready);
}

#[tokio::test(start_paused = true)]
async fn waits_before_reconnecting_to_a_flooding_agent() {
    let (mut vm, mut agent) = FakeVm::ready(&[]).await;
    let mut garbage = vec![b'x'; 1 << 20];
    garbage[..4].copy_from_slice(b"*SFv");
    let since = Instant::now();
    let mut sent = 0;
    while agent.write(&garbage).await.is_ok() {
        sent += 1;
        assert!(sent < 100, "flooding is not detected");
    }
    assert!(sent >= 60, "the session ended after {sent} MiB");
    vm.wait_for(&AgentState::Unresponsive).await;
    let mut agent = vm.accept().await;
    assert!(is_approximately(since, 10), "{:?}", since.elapsed());
    agent.report_ready(&[]).await;
    vm.wait_for(&AgentState::Ready).await;
    // Valid frames without a request count as well.
    let frame = muster_agent::frame::encode(
        json!({ "command": "pong", "unique": "x".repeat(9999) }).to_string().as_bytes(),
    );
    let frames = frame.repeat((1 << 20) / frame.len());
    let mut sent = 0;
    while agent.write(&frames).await.is_ok() {
        sent += 1;
        assert!(sent < 200, "flooding is not detected");
    }
    vm.wait_for(&AgentState::Unresponsive).await;
}
