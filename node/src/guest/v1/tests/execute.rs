//! Commands and their output.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use muster_agent::MAX_CHUNK_SIZE;
use muster_types::guest::{
    AgentState, CommandOutput, CommandResult, GuestApi, GuestCommand, GuestError, OutputName,
};
use serde_json::json;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::fake_agent::{FakeAgent, FakeVm};
use super::{ALL_FEATURES, collect, command};

fn execute(vm: &FakeVm, sent_command: &GuestCommand) -> JoinHandle<Result<CommandResult, GuestError>> {
    let (guests, id, sent_command) = (vm.guests.clone(), vm.id, sent_command.clone());
    tokio::spawn(async move { guests.execute(id, &sent_command).await })
}

fn inline(text: &str) -> CommandOutput {
    CommandOutput::Inline(text.to_owned().into())
}

/// Replies to one `read-output` with at most `max_size` bytes.
async fn send_output(agent: &mut FakeAgent, data: &[u8], max_size: usize) -> u64 {
    let request = agent.expect("read-output").await;
    let offset = request["offset"].as_u64().unwrap();
    let rest = data.get(usize::try_from(offset).unwrap()..).unwrap_or_default();
    let chunk = BASE64.encode(&rest[..rest.len().min(max_size).min(MAX_CHUNK_SIZE)]);
    let fields = json!({ "offset": offset, "encoding": "base64", "chunk": chunk });
    agent.reply(&request, "read-output-response", fields).await;
    offset
}

#[tokio::test(start_paused = true)]
async fn plain_agent_may_be_silent_while_a_command_runs() {
    let (vm, mut agent) = FakeVm::ready(&[]).await;
    let sent_command = command("uptime");
    let running = execute(&vm, &sent_command);
    let request = agent.expect("execute").await;
    assert_eq!((&request["command-line"], &request["block-for-result"]), (&json!("uptime"), &json!(true)));
    assert!(request.get("key").is_none());
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(vm.report().state, AgentState::Ready);
    let long = "ä".repeat(1 << 20);
    let ended = json!({ "result": false, "stdout": long, "stderr": "oh", "return-code": 3 });
    agent.reply(&request, "execute-response", ended).await;
    let ended = running.await.unwrap().unwrap();
    assert_eq!((ended.return_code, ended.stderr), (3, inline("oh")));
    assert_eq!(ended.stdout, inline(&long));
    // A plain agent cannot resume commands.
    let resent = GuestCommand { sent_boot_id: Some("1000".into()), ..sent_command.clone() };
    assert_eq!(execute(&vm, &resent).await.unwrap(), Err(GuestError::StatelessAgent));
    let resent_after_reboot = GuestCommand { sent_boot_id: Some("900".into()), ..sent_command.clone() };
    assert!(matches!(execute(&vm, &resent_after_reboot).await.unwrap(), Err(GuestError::Restarted(_))));
    assert_eq!(
        vm.guests.output(vm.id, sent_command.key, OutputName::Stdout).await.err(),
        Some(GuestError::StatelessAgent)
    );
    assert!(matches!(vm.guests.cancel(vm.id, sent_command.key).await, Err(GuestError::Refused(_))));
    vm.guests.forget(vm.id, sent_command.key).await.unwrap();
    // Its errors do not name a request.
    let running = execute(&vm, &sent_command);
    while agent.receive().await.unwrap()["command"] != "execute" {}
    agent
        .send(&json!({ "command": "command-error", "message": "command execute raised an error: no" }))
        .await;
    let Err(GuestError::Refused(reason)) = running.await.unwrap() else { panic!("the error was lost") };
    assert!(reason.ends_with("error: no"), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn rejects_result_without_exit_status_and_skips_unexpected_long_frame() {
    let (vm, mut agent) = FakeVm::ready(&[]).await;
    let running = execute(&vm, &command("true"));
    let request = agent.expect("execute").await;
    agent.reply(&request, "execute-response", json!({ "result": true, "return-code": "0" })).await;
    assert!(matches!(running.await.unwrap(), Err(GuestError::Refused(_))));
    // No command runs: this frame exceeds the limit.
    let long = json!({ "stdout": "x".repeat(1 << 20), "return-code": 0 });
    agent.reply(&request, "execute-response", long).await;
    let (guests, id) = (vm.guests.clone(), vm.id);
    let requesting = tokio::spawn(async move { guests.facts(id).await });
    let request = agent.expect("gather-facts").await;
    agent.reply(&request, "gather-facts-response", json!({ "result": [] })).await;
    assert!(matches!(requesting.await.unwrap(), Err(GuestError::Refused(_))));
}

#[tokio::test(start_paused = true)]
async fn fetches_small_stored_output_with_the_result() {
    let (vm, mut agent) = FakeVm::ready(ALL_FEATURES).await;
    let sent_command = command("ls");
    let running = execute(&vm, &sent_command);
    let request = agent.expect("execute").await;
    assert_eq!(request["key"], sent_command.key.to_string());
    assert!(request.get("again").is_none());
    let ended = json!({ "result": true, "key": request["key"], "return-code": 0, "stdout-size": 5, "stderr-size": 0 });
    agent.reply(&request, "execute-response", ended).await;
    // The output arrives in two parts and exceeds its reported size.
    send_output(&mut agent, b"hello and more", 3).await;
    send_output(&mut agent, b"hello and more", 30).await;
    let expected = CommandResult { return_code: 0, stdout: inline("hello"), stderr: inline("") };
    assert_eq!(running.await.unwrap().unwrap(), expected);

    let running = execute(&vm, &sent_command);
    let request = agent.expect("execute").await;
    let ended = json!({ "return-code": 1, "stdout-size": 10241, "stderr-size": 7, "stderr-cut": true });
    agent.reply(&request, "execute-response", ended).await;
    let (stdout, stderr) = (
        CommandOutput::Stored { size: 10241, truncated: false },
        CommandOutput::Stored { size: 7, truncated: true },
    );
    assert_eq!(running.await.unwrap().unwrap(), CommandResult { return_code: 1, stdout, stderr });

    let running = execute(&vm, &sent_command);
    let request = agent.expect("execute").await;
    agent.reply(&request, "execute-response", json!({ "return-code": 0, "stderr-size": 0 })).await;
    assert!(matches!(running.await.unwrap(), Err(GuestError::Refused(_))), "the size of stdout is missing");
}

#[tokio::test(start_paused = true)]
async fn resumes_command_over_a_new_connection() {
    let (mut vm, mut agent) = FakeVm::ready(ALL_FEATURES).await;
    let sent_command = command("make");
    let running = execute(&vm, &sent_command);
    agent.expect("execute").await;
    drop(agent);
    assert!(matches!(running.await.unwrap(), Err(GuestError::Unreachable(_))));
    vm.wait_for(&AgentState::Unresponsive).await;
    let mut agent = vm.accept().await;
    agent.report_ready(ALL_FEATURES).await;
    vm.wait_for(&AgentState::Ready).await;
    let resent = GuestCommand { sent_boot_id: vm.report().boot_id, ..sent_command.clone() };
    let running = execute(&vm, &resent);
    let request = agent.expect("execute").await;
    assert_eq!((&request["again"], &request["key"]), (&json!(true), &json!(sent_command.key.to_string())));
    agent
        .reply(&request, "execute-response", json!({ "return-code": 2, "stdout-size": 0, "stderr-size": 0 }))
        .await;
    assert_eq!(running.await.unwrap().unwrap().return_code, 2);

    let resent_after_reboot = GuestCommand { sent_boot_id: Some("zeroth".into()), ..sent_command.clone() };
    for (sent_command, reason, is_unknown) in [
        (&resent, "unknown", true),
        (&resent_after_reboot, "unknown", false),
        (&resent, "lost", false),
        (&resent_after_reboot, "lost", false),
    ] {
        let running = execute(&vm, sent_command);
        let request = agent.expect("execute").await;
        agent.reply(&request, "execute-response", json!({ "result": false, "reason": reason })).await;
        match running.await.unwrap() {
            Err(GuestError::UnknownCommand) => assert!(is_unknown, "{reason}"),
            Err(GuestError::Restarted(_)) => assert!(!is_unknown, "{reason}"),
            other => panic!("{other:?}"),
        }
    }
    let cancelling = {
        let (guests, id, key) = (vm.guests.clone(), vm.id, sent_command.key);
        tokio::spawn(async move { guests.cancel(id, key).await })
    };
    let request = agent.expect("cancel").await;
    agent.reply(&request, "cancel-response", json!({})).await;
    cancelling.await.unwrap().unwrap();
    vm.guests.forget(vm.id, sent_command.key).await.unwrap();
    assert_eq!(agent.expect("forget").await["key"], sent_command.key.to_string());
}

#[tokio::test(start_paused = true)]
async fn reads_stored_output_completely() {
    let (vm, mut agent) = FakeVm::ready(ALL_FEATURES).await;
    let sent_command = command("x");
    for (size, max_size) in
        [(0, MAX_CHUNK_SIZE), (5 * MAX_CHUNK_SIZE + 7, MAX_CHUNK_SIZE), (3 * MAX_CHUNK_SIZE, 50_000)]
    {
        let data: Vec<u8> = (0..size).map(|number| u8::try_from(number % 251).unwrap()).collect();
        let (guests, id) = (vm.guests.clone(), vm.id);
        let reading = tokio::spawn(async move {
            collect(guests.output(id, sent_command.key, OutputName::Stderr).await.unwrap()).await.unwrap()
        });
        loop {
            if send_output(&mut agent, &data, max_size).await >= size as u64 && reading.is_finished() {
                break;
            }
            tokio::task::yield_now().await;
            sleep(Duration::from_millis(1)).await;
            if reading.is_finished() {
                break;
            }
        }
        assert!(reading.await.unwrap() == data, "{size} bytes differ");
        // Requests beyond the end.
        while let Ok(packet) = tokio::time::timeout(Duration::from_millis(10), agent.receive()).await {
            assert_eq!(packet.unwrap()["command"], "read-output");
        }
    }
    let (guests, id) = (vm.guests.clone(), vm.id);
    let reading =
        tokio::spawn(async move { guests.output(id, sent_command.key, OutputName::Stdout).await.err() });
    let request = agent.expect("read-output").await;
    agent.reply(&request, "command-error", json!({ "message": "no such command" })).await;
    assert_eq!(reading.await.unwrap(), Some(GuestError::Refused("no such command".into())));
}
