//! Commands and what they wrote, with both kinds of agent.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use muster_agent::{FEATURE_MEMORY, FEATURE_PIECES, MAX_CHUNK_SIZE};
use muster_types::guest::{
    AgentState, CommandOutput, CommandResult, GuestApi, GuestCommand, GuestError, OutputName,
};
use muster_types::storage::ByteStream;
use serde_json::json;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::fake::{FakeAgent, World, command};

const BOTH: &[&str] = &[FEATURE_MEMORY, FEATURE_PIECES];

fn execute(world: &World, order: &GuestCommand) -> JoinHandle<Result<CommandResult, GuestError>> {
    let (guests, id, order) = (world.guests.clone(), world.id, order.clone());
    tokio::spawn(async move { guests.execute(id, &order).await })
}

fn here(text: &str) -> CommandOutput {
    CommandOutput::Here(text.to_owned().into())
}

pub(super) async fn collect(mut stream: ByteStream) -> muster_types::Result<Vec<u8>> {
    let mut all = Vec::new();
    while let Some(bytes) = std::future::poll_fn(|context| stream.as_mut().poll_next(context)).await {
        all.extend_from_slice(&bytes?);
    }
    Ok(all)
}

/// Answers one `read-output`, with at most `most` bytes.
async fn give_output(agent: &mut FakeAgent, data: &[u8], most: usize) -> u64 {
    let asked = agent.expect("read-output").await;
    let offset = asked["offset"].as_u64().unwrap();
    let rest = data.get(usize::try_from(offset).unwrap()..).unwrap_or_default();
    let chunk = BASE64.encode(&rest[..rest.len().min(most).min(MAX_CHUNK_SIZE)]);
    let fields = json!({ "offset": offset, "encoding": "base64", "chunk": chunk });
    agent.reply(&asked, "read-output-response", fields).await;
    offset
}

#[tokio::test(start_paused = true)]
async fn a_plain_agent_runs_a_command_and_may_be_silent_meanwhile() {
    let (world, mut agent) = World::ready(&[]).await;
    let order = command("uptime", None);
    let running = execute(&world, &order);
    let asked = agent.expect("execute").await;
    assert_eq!((&asked["command-line"], &asked["block-for-result"]), (&json!("uptime"), &json!(true)));
    assert!(asked.get("key").is_none());
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(world.report().state, AgentState::Ready);
    let long = "ä".repeat(1 << 20);
    let ended = json!({ "result": false, "stdout": long, "stderr": "oh", "return-code": 3 });
    agent.reply(&asked, "execute-response", ended).await;
    let ended = running.await.unwrap().unwrap();
    assert_eq!((ended.return_code, ended.stderr), (3, here("oh")));
    assert_eq!(ended.stdout, here(&long));
    // What happened before it cannot know.
    let again = GuestCommand { again: Some("1000".into()), ..order.clone() };
    assert_eq!(execute(&world, &again).await.unwrap(), Err(GuestError::Forgetful));
    let before = GuestCommand { again: Some("900".into()), ..order.clone() };
    assert!(matches!(execute(&world, &before).await.unwrap(), Err(GuestError::Restarted(_))));
    assert_eq!(
        world.guests.output(world.id, order.key, OutputName::Stdout).await.err(),
        Some(GuestError::Forgetful)
    );
    assert!(matches!(world.guests.cancel(world.id, order.key).await, Err(GuestError::Refused(_))));
    world.guests.forget(world.id, order.key).await.unwrap();
    // It does not say what its errors are about.
    let running = execute(&world, &order);
    while agent.hear().await.unwrap()["command"] != "execute" {}
    agent.say(&json!({ "command": "command-error", "message": "command execute raised an error: no" })).await;
    let Err(GuestError::Refused(why)) = running.await.unwrap() else { panic!("it refused") };
    assert!(why.ends_with("error: no"), "{why}");
}

#[tokio::test(start_paused = true)]
async fn a_command_without_a_result_is_refused_and_a_long_frame_of_nobody_is_skipped() {
    let (world, mut agent) = World::ready(&[]).await;
    let running = execute(&world, &command("true", None));
    let asked = agent.expect("execute").await;
    agent.reply(&asked, "execute-response", json!({ "result": true, "return-code": "0" })).await;
    assert!(matches!(running.await.unwrap(), Err(GuestError::Refused(_))));
    // Nothing runs: this is garbage.
    let long = json!({ "stdout": "x".repeat(1 << 20), "return-code": 0 });
    agent.reply(&asked, "execute-response", long).await;
    let (guests, id) = (world.guests.clone(), world.id);
    let asking = tokio::spawn(async move { guests.facts(id).await });
    let asked = agent.expect("gather-facts").await;
    agent.reply(&asked, "gather-facts-response", json!({ "result": [] })).await;
    assert!(matches!(asking.await.unwrap(), Err(GuestError::Refused(_))));
}

#[tokio::test(start_paused = true)]
async fn what_an_agent_remembers_is_fetched_if_it_is_small() {
    let (world, mut agent) = World::ready(BOTH).await;
    let order = command("ls", None);
    let running = execute(&world, &order);
    let asked = agent.expect("execute").await;
    assert_eq!(asked["key"], order.key.to_string());
    assert!(asked.get("again").is_none());
    let ended =
        json!({ "result": true, "key": asked["key"], "return-code": 0, "stdout-size": 5, "stderr-size": 0 });
    agent.reply(&asked, "execute-response", ended).await;
    // It comes in two parts, and more of it than was said.
    give_output(&mut agent, b"hello and more", 3).await;
    give_output(&mut agent, b"hello and more", 30).await;
    let expected = CommandResult { return_code: 0, stdout: here("hello"), stderr: here("") };
    assert_eq!(running.await.unwrap().unwrap(), expected);

    let running = execute(&world, &order);
    let asked = agent.expect("execute").await;
    let ended = json!({ "return-code": 1, "stdout-size": 10241, "stderr-size": 7, "stderr-cut": true });
    agent.reply(&asked, "execute-response", ended).await;
    let (stdout, stderr) =
        (CommandOutput::There { size: 10241, cut: false }, CommandOutput::There { size: 7, cut: true });
    assert_eq!(running.await.unwrap().unwrap(), CommandResult { return_code: 1, stdout, stderr });
}

#[tokio::test(start_paused = true)]
async fn a_command_goes_on_over_another_connection() {
    let (mut world, mut agent) = World::ready(BOTH).await;
    let order = command("make", None);
    let running = execute(&world, &order);
    agent.expect("execute").await;
    drop(agent);
    assert!(matches!(running.await.unwrap(), Err(GuestError::Away(_))));
    world.wait_for(&AgentState::Unresponsive).await;
    let mut agent = world.connected().await;
    agent.be_ready(BOTH).await;
    world.wait_for(&AgentState::Ready).await;
    let again = GuestCommand { again: world.report().boot, ..order.clone() };
    let running = execute(&world, &again);
    let asked = agent.expect("execute").await;
    assert_eq!((&asked["again"], &asked["key"]), (&json!(true), &json!(order.key.to_string())));
    agent
        .reply(&asked, "execute-response", json!({ "return-code": 2, "stdout-size": 0, "stderr-size": 0 }))
        .await;
    assert_eq!(running.await.unwrap().unwrap().return_code, 2);

    let before = GuestCommand { again: Some("zeroth".into()), ..order.clone() };
    for (order, reason, is_unknown) in [
        (&again, "unknown", true),
        (&before, "unknown", false),
        (&again, "lost", false),
        (&before, "lost", false),
    ] {
        let running = execute(&world, order);
        let asked = agent.expect("execute").await;
        agent.reply(&asked, "execute-response", json!({ "result": false, "reason": reason })).await;
        match running.await.unwrap() {
            Err(GuestError::Unknown) => assert!(is_unknown, "{reason}"),
            Err(GuestError::Restarted(_)) => assert!(!is_unknown, "{reason}"),
            other => panic!("{other:?}"),
        }
    }
    let ending = {
        let (guests, id, key) = (world.guests.clone(), world.id, order.key);
        tokio::spawn(async move { guests.cancel(id, key).await })
    };
    let asked = agent.expect("cancel").await;
    agent.reply(&asked, "cancel-response", json!({})).await;
    ending.await.unwrap().unwrap();
    world.guests.forget(world.id, order.key).await.unwrap();
    assert_eq!(agent.expect("forget").await["key"], order.key.to_string());
}

#[tokio::test(start_paused = true)]
async fn output_is_read_from_its_first_to_its_last_byte() {
    let (world, mut agent) = World::ready(BOTH).await;
    let order = command("x", None);
    for (size, most) in
        [(0, MAX_CHUNK_SIZE), (5 * MAX_CHUNK_SIZE + 7, MAX_CHUNK_SIZE), (3 * MAX_CHUNK_SIZE, 50_000)]
    {
        let data: Vec<u8> = (0..size).map(|number| u8::try_from(number % 251).unwrap()).collect();
        let (guests, id) = (world.guests.clone(), world.id);
        let reading = tokio::spawn(async move {
            collect(guests.output(id, order.key, OutputName::Stderr).await.unwrap()).await.unwrap()
        });
        loop {
            if give_output(&mut agent, &data, most).await >= size as u64 && reading.is_finished() {
                break;
            }
            tokio::task::yield_now().await;
            sleep(Duration::from_millis(1)).await;
            if reading.is_finished() {
                break;
            }
        }
        assert!(reading.await.unwrap() == data, "{size} bytes differ");
        // What was asked for in vain.
        while let Ok(heard) = tokio::time::timeout(Duration::from_millis(10), agent.hear()).await {
            assert_eq!(heard.unwrap()["command"], "read-output");
        }
    }
    let (guests, id) = (world.guests.clone(), world.id);
    let reading = tokio::spawn(async move { guests.output(id, order.key, OutputName::Stdout).await.err() });
    let asked = agent.expect("read-output").await;
    agent.reply(&asked, "command-error", json!({ "message": "no such command" })).await;
    assert_eq!(reading.await.unwrap(), Some(GuestError::Refused("no such command".into())));
}
