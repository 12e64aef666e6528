//! GuestApi that speak protocol 2: as they should, and otherwise.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use muster_types::Error;
use muster_types::guest::{AgentState, CommandKey, CommandOutput, CommandResult, GuestCommand, GuestError};
use muster_types::ids::AgentOperationId;
use muster_types::storage::ByteStream;
use prost::Message;
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::fake::{self, Host, until};
use super::message::{Answer, ChunkReply, Question, SystemRunning};
use crate::guest::contact::Speaker;

const PATIENCE: Duration = Duration::from_secs(60);

fn command(line: &str) -> GuestCommand {
    GuestCommand {
        key: CommandKey { operation: AgentOperationId::new(), index: 0 },
        line: line.into(),
        again: None,
    }
}

fn here(return_code: i32, stdout: &str, stderr: &str) -> CommandResult {
    let output = |text: &str| CommandOutput::Here(text.to_owned().into());
    CommandResult { return_code, stdout: output(stdout), stderr: output(stderr) }
}

/// A stream of these pieces.
struct Given(std::vec::IntoIter<Bytes>);

impl Stream for Given {
    type Item = muster_types::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.next().map(Ok))
    }
}

fn given(bytes: &[u8], size: usize) -> ByteStream {
    let mut pieces = vec![Bytes::new()];
    pieces.extend(bytes.chunks(size).map(Bytes::copy_from_slice));
    Box::pin(Given(pieces.into_iter()))
}

async fn next(stream: &mut ByteStream) -> Option<muster_types::Result<Bytes>> {
    poll_fn(|context| stream.as_mut().poll_next(context)).await
}

async fn all(mut stream: ByteStream) -> muster_types::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while let Some(piece) = next(&mut stream).await {
        bytes.extend_from_slice(&piece?);
    }
    Ok(bytes)
}

async fn refused(speaker: &Arc<dyn Speaker>, path: &str) -> String {
    match speaker.get(path).await {
        Err(GuestError::Refused(why)) => why,
        Err(error) => panic!("{error:?}"),
        Ok(_) => panic!("there is a file"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_guest_is_ready_when_it_says_so() {
    let mut host = Host::new();
    *host.agent.running.lock().unwrap() = vec!["starting", "", "\u{1b}degrading\n", "degraded"];
    let report = host.wait_for(|report| report.state != AgentState::NoContact).await;
    assert_eq!(report.state, AgentState::Startup);
    assert_eq!((report.version.as_deref(), report.boot.as_deref()), (Some("1.0.1"), Some("1700000000")));
    assert_eq!(report.system_boot_time, Some(1_700_000_000.0));
    let started = report.agent_start_time.unwrap();
    for state in ["starting", "unknown", "degrading"] {
        host.wait_for(|report| report.state == AgentState::NotReady(state.into())).await;
    }
    let report = host.wait_for(|report| report.state.is_ready()).await;
    assert_eq!((report.state, report.agent_start_time), (AgentState::Degraded, Some(started)));
    // Nothing more is asked but for signs of life.
    let asked = Arc::new(Mutex::new(0));
    let counted = asked.clone();
    host.play(move |request| {
        assert!(matches!(request.question, Some(Question::Ping(_))), "{request:?}");
        *counted.lock().unwrap() += 1;
        None
    });
    sleep(Duration::from_secs(600)).await;
    assert_eq!(host.guest.report().state, AgentState::Degraded);
    assert!((100..=120).contains(&*asked.lock().unwrap()), "{asked:?}");
}

#[tokio::test]
async fn commands_run_in_a_shell() {
    let mut host = Host::new();
    let agent = host.ready().await;
    let execute = async |line: &str| agent.execute(&command(line)).await;
    assert_eq!(execute("echo 'a b'; echo c >&2; exit 3").await, Ok(here(3, "a b\n", "c\n")));
    let missing = execute("no-such-program-here").await.unwrap();
    assert_eq!(missing.return_code, 127);
    let Ok(CommandResult { stdout: CommandOutput::Here(bytes), .. }) =
        execute("head -c 5000000 /dev/zero").await
    else {
        panic!("no output");
    };
    assert!(bytes.len() == 5_000_000 && bytes.iter().all(|byte| *byte == 0));
    // Where it is another program, agents up to 1.0.1 look for it and do not find it.
    host.play(|request| match &request.question {
        Some(Question::Execute(_)) => Some(fake::error(&request.id, "No such command: /bin/sh")),
        _ => None,
    });
    assert_eq!(execute("true").await, Ok(here(127, "", "No such command: /bin/sh\n")));
    host.play(|request| match &request.question {
        Some(Question::Execute(_)) => Some(fake::error(&request.id, "\u{1b}it hurts")),
        _ => None,
    });
    assert_eq!(execute("true").await, Err(GuestError::Refused("it hurts".into())));
}

#[tokio::test]
async fn nothing_is_run_twice() {
    let mut host = Host::new();
    let agent = host.ready().await;
    host.play(|request| {
        assert!(!matches!(request.question, Some(Question::Execute(_))));
        None
    });
    let boot = host.guest.report().boot;
    let again = GuestCommand { again: boot, ..command("true") };
    assert_eq!(agent.execute(&again).await, Err(GuestError::Forgetful));
    let again = GuestCommand { again: Some("another".into()), ..command("true") };
    assert!(matches!(agent.execute(&again).await, Err(GuestError::Restarted(_))));
    agent.forget(again.key).await.unwrap();
    assert!(agent.cancel(again.key).await.is_err());
}

#[tokio::test]
async fn files_go_in_and_come_out() {
    let mut host = Host::new();
    let agent = host.ready().await;
    let bytes: Vec<u8> = (0..1_000_000_u32).map(|number| (number / 7) as u8).collect();
    for (path, size, pieces) in [("/large", 1_000_000, 60_001), ("/small", 1, 1), ("/empty", 0, 1)] {
        agent.put(path, size as u64, None, given(&bytes[..size], pieces)).await.unwrap();
        assert!(host.agent.files.lock().unwrap()[path] == bytes[..size], "{path} is another one");
        let (facts, stream) = agent.get(path).await.unwrap();
        assert_eq!((facts.size, facts.mode, facts.mtime, facts.uid), (size as u64, 0o100_600, 5.5, 0));
        assert!(all(stream).await.unwrap() == bytes[..size], "{path} came out another one");
    }
    assert_eq!(host.agent.modes.lock().unwrap()["/large"], 0o644);
    agent.change_mode("/large", 0o4755).await.unwrap();
    assert_eq!(host.agent.modes.lock().unwrap()["/large"], 0o4755);
    assert_eq!(refused(&agent, "/missing").await, "file not found");
    host.play(|request| match &request.question {
        Some(Question::GetFile(_)) => {
            Some(fake::error(&request.id, "Parameter to MergeFrom() must be another one"))
        }
        _ => None,
    });
    assert_eq!(refused(&agent, "/missing").await, "file not found");
    assert_eq!(agent.facts().await.unwrap()["distribution"], json!({ "id": "debian" }));
    // Only the connection that looks after the guest is left.
    until(|| host.agent.open.load(Ordering::Relaxed) == 1).await;
}

#[tokio::test]
async fn a_file_that_is_not_as_long_as_was_said_does_not_arrive() {
    let mut host = Host::new();
    let agent = host.ready().await;
    for size in [0, 1, 199_999, 200_001] {
        let put = agent.put("/file", size, None, given(&[7; 200_000], 1000)).await;
        assert!(matches!(put, Err(GuestError::Host(_))), "{size}: {put:?}");
    }
    assert!(!host.agent.files.lock().unwrap().contains_key("/file"));
}

#[tokio::test]
async fn a_guest_that_writes_slowly_is_not_overrun() {
    let mut host = Host::new();
    let agent = host.ready().await;
    let (asked, mut asks) = tokio::sync::mpsc::unbounded_channel();
    host.play(move |request| match &request.question {
        Some(Question::PutFile(_) | Question::FileChunk(_)) => {
            asked.send(request.id.clone()).unwrap();
            Some(Vec::new())
        }
        _ => None,
    });
    let put = agent.put("/file", 1_000_000, None, given(&[7; 1_000_000], 10_000));
    let count = async {
        for _ in 0..5 {
            asks.recv().await.unwrap();
        }
        timeout(Duration::from_millis(300), asks.recv()).await
    };
    tokio::select! {
        ended = put => panic!("{ended:?}"),
        more = count => assert!(more.is_err(), "more came than may be on the way"),
    }
}

#[tokio::test]
async fn a_file_is_read_as_fast_as_somebody_takes_it() {
    let mut host = Host::new();
    let agent = host.ready().await;
    let size = 8_000_000;
    host.agent.files.lock().unwrap().insert("/file".into(), vec![7; size]);
    let (_, mut stream) = agent.get("/file").await.unwrap();
    next(&mut stream).await.unwrap().unwrap();
    // The guest fills what is between, and no more.
    let sent = || host.agent.sent.load(Ordering::Relaxed);
    let mut before = usize::MAX;
    while before != sent() {
        before = sent();
        sleep(Duration::from_millis(100)).await;
    }
    assert!(before < size / 4, "{before} bytes were sent");
    drop(stream);
    until(|| host.agent.open.load(Ordering::Relaxed) == 1).await;
    let (_, stream) = agent.get("/file").await.unwrap();
    assert_eq!(all(stream).await.unwrap().len(), size);
}

#[tokio::test]
async fn an_agent_that_ends_takes_everything_with_it() {
    let mut host = Host::new();
    let agent = host.ready().await;
    let waits = command("exec sleep 60");
    let executing = agent.execute(&waits);
    let stopping = async {
        until(|| host.agent.open.load(Ordering::Relaxed) == 2).await;
        host.stop_agent();
    };
    let (executed, ()) = tokio::join!(executing, stopping);
    assert!(matches!(executed, Err(GuestError::Away(_))), "{executed:?}");
    let before = host.wait_for(|report| report.state == AgentState::Stopped).await;
    assert!(host.guest.speaker().is_none());
    assert!(matches!(agent.facts().await, Err(GuestError::Away(_))), "an agent that is gone was asked");
    host.start_agent();
    let agent = host.ready().await;
    let after = host.guest.report();
    assert!(after.agent_start_time > before.agent_start_time);
    // The guest itself was not restarted.
    assert_eq!(after.boot, before.boot);
    assert_eq!(agent.execute(&command("true")).await, Ok(here(0, "", "")));
}

#[tokio::test(start_paused = true)]
async fn silence_is_noticed_unless_the_machine_is_paused() {
    let mut host = Host::new();
    let agent = host.ready().await;
    host.guest.set_paused(true);
    host.play(|_| Some(Vec::new()));
    sleep(Duration::from_secs(1000)).await;
    assert_eq!(host.guest.report().state.to_string(), "not ready (instance paused)");
    let waits = command("true");
    let mut executing = agent.execute(&waits);
    assert!(timeout(Duration::from_secs(1), &mut executing).await.is_err());
    host.guest.set_paused(false);
    let resumed = tokio::time::Instant::now();
    assert!(matches!(executing.await, Err(GuestError::Away(_))));
    assert_eq!(resumed.elapsed().as_secs(), 15);
    host.wait_for(|report| report.state == AgentState::Unresponsive).await;
    // What it is asked from now on it forgets.
    sleep(Duration::from_secs(10)).await;
    *host.agent.trick.lock().unwrap() = None;
    host.ready().await;
    assert_eq!(resumed.elapsed().as_secs(), 315);
}

#[tokio::test]
async fn after_a_reset_it_is_another_guest() {
    let mut host = Host::new();
    let agent = host.ready().await;
    let before = host.guest.report().boot.unwrap();
    let waits = command("exec sleep 60");
    let resetting = async {
        until(|| host.agent.open.load(Ordering::Relaxed) == 2).await;
        host.guest.tell_reset();
    };
    let (executed, ()) = tokio::join!(agent.execute(&waits), resetting);
    assert!(matches!(executed, Err(GuestError::Away(_))), "{executed:?}");
    // Even if it says that it booted at the same time.
    let report = host.wait_for(|report| report.boot.as_ref().is_some_and(|boot| *boot != before)).await;
    assert_eq!(report.boot.unwrap(), format!("{before}+1"));
    host.ready().await;
    let known = host.guest.report().boot;
    // One that was reset while nobody saw it.
    host.stop_agent();
    host.wait_for(|report| report.state == AgentState::Stopped).await;
    *host.agent.boot_time.lock().unwrap() += 1000.0;
    host.start_agent();
    host.ready().await;
    assert_ne!(host.guest.report().boot, known);
}

#[tokio::test(start_paused = true)]
async fn a_guest_without_an_agent_has_no_contact_until_it_comes() {
    let mut host = Host::new();
    host.stop_agent();
    sleep(Duration::from_secs(1000)).await;
    assert_eq!(host.guest.report(), muster_types::guest::GuestReport::default());
    host.start_agent();
    let came = tokio::time::Instant::now();
    host.ready().await;
    assert!(came.elapsed() <= Duration::from_secs(16), "{:?}", came.elapsed());
}

#[tokio::test(start_paused = true)]
async fn whatever_is_sent_to_the_one_who_listens_harms_nothing() {
    let ping = fake::item("77", Answer::Ping(Bytes::new()));
    let running = SystemRunning { boot_time: f64::NAN, ..SystemRunning::default() };
    for (what, sent) in [
        ("garbage", vec![0xff; 100]),
        ("a gigantic length", vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f]),
        ("replies to nothing", ping.repeat(1100)),
        ("an answer that is none", fake::item("2", Answer::SystemRunning(vec![0x0a, 0xff].into()))),
        ("another guest", {
            let other = SystemRunning { boot_time: 5.0, ..running.clone() };
            fake::item("2", Answer::SystemRunning(other.encode_to_vec().into()))
        }),
    ] {
        let mut host = Host::new();
        host.play(move |request| match &request.question {
            Some(Question::IsSystemRunning(_)) => Some(sent.clone()),
            _ => None,
        });
        host.wait_for(|report| report.state == AgentState::Unresponsive).await;
        *host.agent.trick.lock().unwrap() = None;
        let better = timeout(PATIENCE, host.ready()).await;
        assert!(better.is_ok(), "{what} is never forgotten");
    }
    // What cannot be a time is none.
    let mut host = Host::new();
    let answer = running.encode_to_vec();
    host.play(move |request| match &request.question {
        Some(Question::IsSystemRunning(_)) => {
            Some(fake::item(&request.id, Answer::SystemRunning(answer.clone().into())))
        }
        _ => None,
    });
    let report = host.wait_for(|report| matches!(report.state, AgentState::NotReady(_))).await;
    assert_eq!(report.system_boot_time, Some(1_700_000_000.0));
}

#[tokio::test]
async fn whatever_is_answered_harms_only_what_was_asked() {
    let mut host = Host::new();
    let agent = host.ready().await;
    let ping = fake::item("77", Answer::Ping(Bytes::new()));
    for (what, sent) in [
        ("garbage", vec![0xff; 100]),
        ("a gigantic length", vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f]),
        ("replies to nothing", ping.repeat(1100)),
        ("another answer", fake::item("2", Answer::Ping(Bytes::new()))),
        ("an unknown command", fake::item("2", Answer::UnknownCommand(Bytes::new()))),
        ("nonsense in all answers", fake::item("2", Answer::Executed(vec![0xff; 3].into()))),
    ] {
        host.play(move |request| match &request.question {
            Some(Question::Welcome(_) | Question::Ping(_)) => None,
            _ => Some(sent.clone()),
        });
        let executed = timeout(PATIENCE, agent.execute(&command("true"))).await.unwrap();
        assert!(matches!(executed, Err(GuestError::Refused(_))), "{what}: {executed:?}");
        assert!(matches!(agent.facts().await, Err(GuestError::Refused(_))), "{what}");
        assert!(matches!(agent.change_mode("/x", 0).await, Err(GuestError::Refused(_))), "{what}");
        assert!(!refused(&agent, "/x").await.is_empty());
        let put =
            timeout(PATIENCE, agent.put("/x", 500_000, None, given(&[7; 500_000], 10_000))).await.unwrap();
        assert!(matches!(put, Err(GuestError::Refused(_))), "{what}: {put:?}");
    }
    *host.agent.trick.lock().unwrap() = None;
    assert_eq!(agent.execute(&command("true")).await, Ok(here(0, "", "")));
    assert_eq!(host.guest.report().state, AgentState::Ready);
}

#[tokio::test]
async fn a_file_whose_parts_do_not_fit_fails() {
    let mut host = Host::new();
    let agent = host.ready().await;
    for (what, wrong) in [
        ("a hole", fake::chunk("2", 7, "aGVsbG8=")),
        ("no base64", fake::chunk("2", 5, "%")),
        ("something else", fake::stat("2", 7)),
        ("an error", fake::error("2", "the disk is gone")),
        ("too much at once", vec![0x0a, 0x81, 0x80, 0x40]),
    ] {
        host.play(move |request| match &request.question {
            Some(Question::GetFile(_)) => {
                let sent = [fake::stat("2", 100), fake::chunk("2", 0, "aGVsbG8="), wrong.clone()];
                Some(sent.concat())
            }
            _ => None,
        });
        let (facts, mut stream) = agent.get("/x").await.unwrap();
        assert_eq!(facts.size, 100);
        assert_eq!(next(&mut stream).await.unwrap().unwrap(), "hello");
        let failed = next(&mut stream).await.unwrap();
        assert!(matches!(failed, Err(Error::Conflict(_))), "{what}: {failed:?}");
        assert!(next(&mut stream).await.is_none());
    }
    host.play(|request| match &request.question {
        Some(Question::PutFile(_)) => {
            let taken = ChunkReply { path: "/x".into(), offset: -1 };
            Some(fake::item(&request.id, Answer::ChunkWritten(taken.encode_to_vec().into())))
        }
        _ => None,
    });
    let put = agent.put("/x", 5, None, given(b"hello", 5)).await;
    assert!(matches!(put, Err(GuestError::Refused(_))), "{put:?}");
    // One that breaks in the middle is not the guest's last word.
    host.play(|request| match &request.question {
        Some(Question::GetFile(_)) => Some([fake::stat("2", 100), fake::chunk("2", 0, "aGVsbG8=")].concat()),
        _ => None,
    });
    let (_, mut stream) = agent.get("/x").await.unwrap();
    assert_eq!(next(&mut stream).await.unwrap().unwrap(), "hello");
    host.stop_agent();
    let failed = next(&mut stream).await.unwrap();
    assert!(matches!(failed, Err(Error::Unavailable(_))), "{failed:?}");
}
