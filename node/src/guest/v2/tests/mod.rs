//! Tests of protocol 2 with agents that follow it and agents that violate it.

mod fake_agent;

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use muster_types::Error;
use muster_types::guest::{AgentState, CommandKey, CommandOutput, CommandResult, GuestCommand, GuestError};
use muster_types::ids::AgentOperationId;
use muster_types::storage::ByteStream;
use parking_lot::Mutex;
use prost::Message;
use serde_json::json;
use tokio::time::{sleep, timeout};

use self::fake_agent::{TestGuest, wait_until};
use super::message::{ChunkAcknowledgement, ReplyBody, RequestBody, SystemRunning};
use crate::guest::channel::AgentClient;

const TIMEOUT: Duration = Duration::from_secs(60);

fn command(line: &str) -> GuestCommand {
    GuestCommand {
        key: CommandKey { operation: AgentOperationId::new(), index: 0 },
        line: line.into(),
        sent_boot_id: None,
    }
}

fn result(return_code: i32, stdout: &str, stderr: &str) -> CommandResult {
    let output = |text: &str| CommandOutput::Inline(text.to_owned().into());
    CommandResult { return_code, stdout: output(stdout), stderr: output(stderr) }
}

/// A stream of chunks.
struct Chunks(std::vec::IntoIter<Bytes>);

impl Stream for Chunks {
    type Item = muster_types::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.next().map(Ok))
    }
}

fn chunks(bytes: &[u8], size: usize) -> ByteStream {
    let mut chunks = vec![Bytes::new()];
    chunks.extend(bytes.chunks(size).map(Bytes::copy_from_slice));
    Box::pin(Chunks(chunks.into_iter()))
}

async fn next(stream: &mut ByteStream) -> Option<muster_types::Result<Bytes>> {
    poll_fn(|context| stream.as_mut().poll_next(context)).await
}

async fn collect(mut stream: ByteStream) -> muster_types::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while let Some(chunk) = next(&mut stream).await {
        bytes.extend_from_slice(&chunk?);
    }
    Ok(bytes)
}

async fn refusal(client: &Arc<dyn AgentClient>, path: &str) -> String {
    match client.get(path).await {
        Err(GuestError::Refused(reason)) => reason,
        Err(error) => panic!("{error:?}"),
        Ok(_) => panic!("the file was sent"),
    }
}

#[tokio::test(start_paused = true)]
async fn queries_guest_until_it_is_ready() {
    let mut guest = TestGuest::new();
    *guest.agent.system_states.lock() = vec!["starting", "", "\u{1b}degrading\n", "degraded"];
    let report = guest.wait_for(|report| report.state != AgentState::NoContact).await;
    assert_eq!(report.state, AgentState::Startup);
    assert_eq!(
        (report.agent_version.as_deref(), report.boot_id.as_deref()),
        (Some("1.0.1"), Some("1700000000"))
    );
    assert_eq!(report.system_boot_time, Some(1_700_000_000.0));
    let started = report.agent_start_time.unwrap();
    for state in ["starting", "unknown", "degrading"] {
        guest.wait_for(|report| report.state == AgentState::NotReady(state.into())).await;
    }
    let report = guest.wait_for(|report| report.state.is_ready()).await;
    assert_eq!((report.state, report.agent_start_time), (AgentState::Degraded, Some(started)));
    // A ready guest is only pinged.
    let pings = Arc::new(Mutex::new(0));
    let counter = pings.clone();
    guest.override_replies(move |request| {
        assert!(matches!(request.body, Some(RequestBody::Ping(_))), "{request:?}");
        *counter.lock() += 1;
        None
    });
    sleep(Duration::from_secs(600)).await;
    assert_eq!(guest.channel.report().state, AgentState::Degraded);
    assert!((100..=120).contains(&*pings.lock()), "{pings:?}");
}

#[tokio::test]
async fn runs_commands_in_a_shell() {
    let mut guest = TestGuest::new();
    let client = guest.ready_client().await;
    let execute = async |line: &str| client.execute(&command(line)).await;
    assert_eq!(execute("echo 'a b'; echo c >&2; exit 3").await, Ok(result(3, "a b\n", "c\n")));
    let missing = execute("no-such-program-here").await.unwrap();
    assert_eq!(missing.return_code, 127);
    let Ok(CommandResult { stdout: CommandOutput::Inline(bytes), .. }) =
        execute("head -c 5000000 /dev/zero").await
    else {
        panic!("no output");
    };
    assert!(bytes.len() == 5_000_000 && bytes.iter().all(|byte| *byte == 0));
    // Agents up to 1.0.1 report a missing program themselves.
    guest.override_replies(|request| match &request.body {
        Some(RequestBody::Execute(_)) => Some(fake_agent::error(&request.id, "No such command: /bin/sh")),
        _ => None,
    });
    assert_eq!(execute("true").await, Ok(result(127, "", "No such command: /bin/sh\n")));
    guest.override_replies(|request| match &request.body {
        Some(RequestBody::Execute(_)) => Some(fake_agent::error(&request.id, "\u{1b}it failed")),
        _ => None,
    });
    assert_eq!(execute("true").await, Err(GuestError::Refused("it failed".into())));
}

#[tokio::test]
async fn never_runs_a_resent_command() {
    let mut guest = TestGuest::new();
    let client = guest.ready_client().await;
    guest.override_replies(|request| {
        assert!(!matches!(request.body, Some(RequestBody::Execute(_))));
        None
    });
    let boot = guest.channel.report().boot_id;
    let resent = GuestCommand { sent_boot_id: boot, ..command("true") };
    assert_eq!(client.execute(&resent).await, Err(GuestError::StatelessAgent));
    let resent = GuestCommand { sent_boot_id: Some("another".into()), ..command("true") };
    assert!(matches!(client.execute(&resent).await, Err(GuestError::Restarted(_))));
    client.forget(resent.key).await.unwrap();
    assert!(client.cancel(resent.key).await.is_err());
}

#[tokio::test]
async fn transfers_files() {
    let mut guest = TestGuest::new();
    let client = guest.ready_client().await;
    let bytes: Vec<u8> = (0..1_000_000_u32).map(|number| (number / 7) as u8).collect();
    for (path, size, chunk_size) in [("/large", 1_000_000, 60_001), ("/small", 1, 1), ("/empty", 0, 1)] {
        client.put(path, size as u64, None, chunks(&bytes[..size], chunk_size)).await.unwrap();
        assert!(guest.agent.files.lock()[path] == bytes[..size], "{path} differs in the guest");
        let (info, stream) = client.get(path).await.unwrap();
        assert_eq!((info.size, info.mode, info.mtime, info.uid), (size as u64, 0o100_600, 5.5, 0));
        assert!(collect(stream).await.unwrap() == bytes[..size], "{path} differs after the download");
    }
    assert_eq!(guest.agent.modes.lock()["/large"], 0o644);
    client.change_mode("/large", 0o4755).await.unwrap();
    assert_eq!(guest.agent.modes.lock()["/large"], 0o4755);
    assert_eq!(refusal(&client, "/missing").await, "file not found");
    guest.override_replies(|request| match &request.body {
        Some(RequestBody::GetFile(_)) => {
            Some(fake_agent::error(&request.id, "Parameter to MergeFrom() must be instance of same class"))
        }
        _ => None,
    });
    assert_eq!(refusal(&client, "/missing").await, "file not found");
    assert_eq!(client.facts().await.unwrap()["distribution"], json!({ "id": "debian" }));
    // Only the connection of the session remains.
    wait_until(|| guest.agent.open_connections.load(Ordering::Relaxed) == 1).await;
}

#[tokio::test]
async fn rejects_upload_of_the_wrong_size() {
    let mut guest = TestGuest::new();
    let client = guest.ready_client().await;
    for size in [0, 1, 199_999, 200_001] {
        let put = client.put("/file", size, None, chunks(&[7; 200_000], 1000)).await;
        assert!(matches!(put, Err(GuestError::HostFailed(_))), "{size}: {put:?}");
    }
    assert!(!guest.agent.files.lock().contains_key("/file"));
}

#[tokio::test]
async fn limits_unacknowledged_chunks_of_an_upload() {
    let mut guest = TestGuest::new();
    let client = guest.ready_client().await;
    let (sender, mut requests) = tokio::sync::mpsc::unbounded_channel();
    guest.override_replies(move |request| match &request.body {
        Some(RequestBody::PutFile(_) | RequestBody::FileChunk(_)) => {
            sender.send(request.id.clone()).unwrap();
            Some(Vec::new())
        }
        _ => None,
    });
    let put = client.put("/file", 1_000_000, None, chunks(&[7; 1_000_000], 10_000));
    let count = async {
        for _ in 0..5 {
            requests.recv().await.unwrap();
        }
        timeout(Duration::from_millis(300), requests.recv()).await
    };
    tokio::select! {
        ended = put => panic!("{ended:?}"),
        more = count => assert!(more.is_err(), "too many chunks were sent"),
    }
}

#[tokio::test]
async fn download_is_limited_by_the_reader() {
    let mut guest = TestGuest::new();
    let client = guest.ready_client().await;
    let size = 8_000_000;
    guest.agent.files.lock().insert("/file".into(), vec![7; size]);
    let (_, mut stream) = client.get("/file").await.unwrap();
    next(&mut stream).await.unwrap().unwrap();
    // The guest fills the socket buffers and then blocks.
    let sent = || guest.agent.bytes_sent.load(Ordering::Relaxed);
    let mut before = usize::MAX;
    while before != sent() {
        before = sent();
        sleep(Duration::from_millis(100)).await;
    }
    assert!(before < size / 4, "{before} bytes were sent");
    drop(stream);
    wait_until(|| guest.agent.open_connections.load(Ordering::Relaxed) == 1).await;
    let (_, stream) = client.get("/file").await.unwrap();
    assert_eq!(collect(stream).await.unwrap().len(), size);
}

#[tokio::test]
async fn requests_fail_when_the_agent_stops() {
    let mut guest = TestGuest::new();
    let client = guest.ready_client().await;
    let pending_command = command("exec sleep 60");
    let executing = client.execute(&pending_command);
    let stopping = async {
        wait_until(|| guest.agent.open_connections.load(Ordering::Relaxed) == 2).await;
        guest.stop_agent();
    };
    let (executed, ()) = tokio::join!(executing, stopping);
    assert!(matches!(executed, Err(GuestError::Unreachable(_))), "{executed:?}");
    let before = guest.wait_for(|report| report.state == AgentState::Stopped).await;
    assert!(guest.channel.client().is_none());
    assert!(matches!(client.facts().await, Err(GuestError::Unreachable(_))), "a stopped agent replied");
    guest.start_agent();
    let client = guest.ready_client().await;
    let after = guest.channel.report();
    assert!(after.agent_start_time > before.agent_start_time);
    // Only the agent was restarted, not the guest.
    assert_eq!(after.boot_id, before.boot_id);
    assert_eq!(client.execute(&command("true")).await, Ok(result(0, "", "")));
}

#[tokio::test(start_paused = true)]
async fn silent_agent_is_unresponsive_unless_the_vm_is_paused() {
    let mut guest = TestGuest::new();
    let client = guest.ready_client().await;
    guest.channel.set_paused(true);
    guest.override_replies(|_| Some(Vec::new()));
    sleep(Duration::from_secs(1000)).await;
    assert_eq!(guest.channel.report().state.to_string(), "not ready (instance paused)");
    let pending_command = command("true");
    let mut executing = client.execute(&pending_command);
    assert!(timeout(Duration::from_secs(1), &mut executing).await.is_err());
    guest.channel.set_paused(false);
    let resumed = tokio::time::Instant::now();
    assert!(matches!(executing.await, Err(GuestError::Unreachable(_))));
    assert_eq!(resumed.elapsed().as_secs(), 15);
    guest.wait_for(|report| report.state == AgentState::Unresponsive).await;
    // It ignores all requests for now.
    sleep(Duration::from_secs(10)).await;
    *guest.agent.reply_override.lock() = None;
    guest.ready_client().await;
    assert_eq!(resumed.elapsed().as_secs(), 315);
}

#[tokio::test]
async fn reset_starts_a_new_boot() {
    let mut guest = TestGuest::new();
    let client = guest.ready_client().await;
    let before = guest.channel.report().boot_id.unwrap();
    let pending_command = command("exec sleep 60");
    let resetting = async {
        wait_until(|| guest.agent.open_connections.load(Ordering::Relaxed) == 2).await;
        guest.channel.notify_reset();
    };
    let (executed, ()) = tokio::join!(client.execute(&pending_command), resetting);
    assert!(matches!(executed, Err(GuestError::Unreachable(_))), "{executed:?}");
    // Even if the guest reports the same boot time.
    let report = guest.wait_for(|report| report.boot_id.as_ref().is_some_and(|boot| *boot != before)).await;
    assert_eq!(report.boot_id.unwrap(), format!("{before}+1"));
    guest.ready_client().await;
    let before = guest.channel.report().boot_id;
    // A reboot between two sessions.
    guest.stop_agent();
    guest.wait_for(|report| report.state == AgentState::Stopped).await;
    *guest.agent.boot_time.lock() += 1000.0;
    guest.start_agent();
    guest.ready_client().await;
    assert_ne!(guest.channel.report().boot_id, before);
}

#[tokio::test(start_paused = true)]
async fn guest_without_an_agent_has_no_contact() {
    let mut guest = TestGuest::new();
    guest.stop_agent();
    sleep(Duration::from_secs(1000)).await;
    assert_eq!(guest.channel.report(), muster_types::guest::GuestReport::default());
    guest.start_agent();
    let started = tokio::time::Instant::now();
    guest.ready_client().await;
    assert!(started.elapsed() <= Duration::from_secs(16), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn session_recovers_from_invalid_replies() {
    let ping = fake_agent::reply("77", ReplyBody::Ping(Bytes::new()));
    let running = SystemRunning { boot_time: f64::NAN, ..SystemRunning::default() };
    for (what, sent) in [
        ("garbage", vec![0xff; 100]),
        ("a gigantic length", vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f]),
        ("unexpected replies", ping.repeat(1100)),
        ("an invalid reply", fake_agent::reply("2", ReplyBody::SystemRunning(vec![0x0a, 0xff].into()))),
        ("a different boot", {
            let other = SystemRunning { boot_time: 5.0, ..running.clone() };
            fake_agent::reply("2", ReplyBody::SystemRunning(other.encode_to_vec().into()))
        }),
    ] {
        let mut guest = TestGuest::new();
        guest.override_replies(move |request| match &request.body {
            Some(RequestBody::IsSystemRunning(_)) => Some(sent.clone()),
            _ => None,
        });
        guest.wait_for(|report| report.state == AgentState::Unresponsive).await;
        *guest.agent.reply_override.lock() = None;
        let recovered = timeout(TIMEOUT, guest.ready_client()).await;
        assert!(recovered.is_ok(), "no recovery from {what}");
    }
    // An invalid boot time is ignored.
    let mut guest = TestGuest::new();
    let answer = running.encode_to_vec();
    guest.override_replies(move |request| match &request.body {
        Some(RequestBody::IsSystemRunning(_)) => {
            Some(fake_agent::reply(&request.id, ReplyBody::SystemRunning(answer.clone().into())))
        }
        _ => None,
    });
    let report = guest.wait_for(|report| matches!(report.state, AgentState::NotReady(_))).await;
    assert_eq!(report.system_boot_time, Some(1_700_000_000.0));
}

#[tokio::test]
async fn invalid_replies_fail_only_their_request() {
    let mut guest = TestGuest::new();
    let client = guest.ready_client().await;
    let ping = fake_agent::reply("77", ReplyBody::Ping(Bytes::new()));
    for (what, sent) in [
        ("garbage", vec![0xff; 100]),
        ("a gigantic length", vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f]),
        ("unexpected replies", ping.repeat(1100)),
        ("the wrong reply", fake_agent::reply("2", ReplyBody::Ping(Bytes::new()))),
        ("an unknown command", fake_agent::reply("2", ReplyBody::UnknownCommand(Bytes::new()))),
        ("an invalid result", fake_agent::reply("2", ReplyBody::Execute(vec![0xff; 3].into()))),
    ] {
        guest.override_replies(move |request| match &request.body {
            Some(RequestBody::Welcome(_) | RequestBody::Ping(_)) => None,
            _ => Some(sent.clone()),
        });
        let executed = timeout(TIMEOUT, client.execute(&command("true"))).await.unwrap();
        assert!(matches!(executed, Err(GuestError::Refused(_))), "{what}: {executed:?}");
        assert!(matches!(client.facts().await, Err(GuestError::Refused(_))), "{what}");
        assert!(matches!(client.change_mode("/x", 0).await, Err(GuestError::Refused(_))), "{what}");
        assert!(!refusal(&client, "/x").await.is_empty());
        let put =
            timeout(TIMEOUT, client.put("/x", 500_000, None, chunks(&[7; 500_000], 10_000))).await.unwrap();
        assert!(matches!(put, Err(GuestError::Refused(_))), "{what}: {put:?}");
    }
    *guest.agent.reply_override.lock() = None;
    assert_eq!(client.execute(&command("true")).await, Ok(result(0, "", "")));
    assert_eq!(guest.channel.report().state, AgentState::Ready);
}

#[tokio::test]
async fn rejects_invalid_chunks() {
    let mut guest = TestGuest::new();
    let client = guest.ready_client().await;
    for (what, wrong) in [
        ("a gap", fake_agent::chunk("2", 7, "aGVsbG8=")),
        ("invalid base64", fake_agent::chunk("2", 5, "%")),
        ("the wrong reply", fake_agent::stat("2", 7)),
        ("an error", fake_agent::error("2", "disk error")),
        ("a too long chunk", vec![0x0a, 0x81, 0x80, 0x40]),
    ] {
        guest.override_replies(move |request| match &request.body {
            Some(RequestBody::GetFile(_)) => {
                let sent = [fake_agent::stat("2", 100), fake_agent::chunk("2", 0, "aGVsbG8="), wrong.clone()];
                Some(sent.concat())
            }
            _ => None,
        });
        let (info, mut stream) = client.get("/x").await.unwrap();
        assert_eq!(info.size, 100);
        assert_eq!(next(&mut stream).await.unwrap().unwrap(), "hello");
        let failed = next(&mut stream).await.unwrap();
        assert!(matches!(failed, Err(Error::Conflict(_))), "{what}: {failed:?}");
        assert!(next(&mut stream).await.is_none());
    }
    guest.override_replies(|request| match &request.body {
        Some(RequestBody::PutFile(_)) => {
            let acknowledgement = ChunkAcknowledgement { path: "/x".into(), offset: -1 };
            Some(fake_agent::reply(
                &request.id,
                ReplyBody::ChunkWritten(acknowledgement.encode_to_vec().into()),
            ))
        }
        _ => None,
    });
    let put = client.put("/x", 5, None, chunks(b"hello", 5)).await;
    assert!(matches!(put, Err(GuestError::Refused(_))), "{put:?}");
    // A connection that breaks in the middle can be retried.
    guest.override_replies(|request| match &request.body {
        Some(RequestBody::GetFile(_)) => {
            Some([fake_agent::stat("2", 100), fake_agent::chunk("2", 0, "aGVsbG8=")].concat())
        }
        _ => None,
    });
    let (_, mut stream) = client.get("/x").await.unwrap();
    assert_eq!(next(&mut stream).await.unwrap().unwrap(), "hello");
    guest.stop_agent();
    let failed = next(&mut stream).await.unwrap();
    assert!(matches!(failed, Err(Error::Unavailable(_))), "{failed:?}");
}
