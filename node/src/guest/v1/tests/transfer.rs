//! File transfers.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use futures_core::Stream;
use muster_agent::MAX_CHUNK_SIZE;
use muster_types::Error;
use muster_types::guest::{AgentState, GuestApi, GuestError, GuestFileInfo};
use muster_types::storage::ByteStream;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::fake_agent::{FakeAgent, FakeVm};
use super::{ALL_FEATURES, collect};

const LARGE: usize = 40 * MAX_CHUNK_SIZE + 5;

fn data(size: usize) -> Vec<u8> {
    (0..size).map(|number| u8::try_from(number % 253).unwrap()).collect()
}

/// A stream in chunks of 100 kB that counts the bytes consumed from it.
struct Source {
    rest: Bytes,
    consumed: Arc<AtomicUsize>,
    fails: bool,
}

impl Source {
    fn stream(size: usize, fails: bool) -> (ByteStream, Arc<AtomicUsize>) {
        let consumed = Arc::new(AtomicUsize::new(0));
        (Box::pin(Self { rest: data(size).into(), consumed: consumed.clone(), fails }), consumed)
    }
}

impl Stream for Source {
    type Item = muster_types::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let size = self.rest.len().min(100_000);
        if size == 0 {
            return Poll::Ready(self.fails.then(|| Err(Error::Internal("disk error".into()))));
        }
        self.consumed.fetch_add(size, Ordering::Relaxed);
        Poll::Ready(Some(Ok(self.rest.split_to(size))))
    }
}

fn put(vm: &FakeVm, size: u64, data: ByteStream) -> JoinHandle<Result<(), GuestError>> {
    let (guests, id) = (vm.guests.clone(), vm.id);
    tokio::spawn(async move { guests.put(id, "/tmp/x", size, None, data).await })
}

type Download = Result<(GuestFileInfo, ByteStream), GuestError>;

fn get(vm: &FakeVm) -> JoinHandle<Download> {
    let (guests, id) = (vm.guests.clone(), vm.id);
    tokio::spawn(async move { guests.get(id, "/tmp/x").await })
}

fn bytes(packet: &Value) -> Vec<u8> {
    BASE64.decode(packet["chunk"].as_str().unwrap()).unwrap()
}

/// Receives packets until the host is silent for a while.
async fn receive_all(agent: &mut FakeAgent) -> Vec<Value> {
    let mut packets = Vec::new();
    while let Ok(packet) = timeout(Duration::from_millis(100), agent.receive()).await {
        packets.push(packet.unwrap());
    }
    packets
}

#[tokio::test(start_paused = true)]
async fn upload_is_limited_by_the_window() {
    let (vm, mut agent) = FakeVm::ready(ALL_FEATURES).await;
    let (source, consumed) = Source::stream(LARGE, false);
    let upload = put(&vm, LARGE as u64, source);
    let first = agent.expect("put-file").await;
    assert_eq!((&first["path"], &first["pieces"]), (&json!("/tmp/x"), &json!(true)));
    assert_eq!(first["stat_result"]["size"], LARGE);
    let mut got = Vec::new();
    let chunks = receive_all(&mut agent).await;
    for chunk in &chunks {
        assert_eq!(chunk["offset"], got.len());
        got.extend(bytes(chunk));
    }
    // One window is sent before the first acknowledgement, and little more is read from the source.
    assert!((15 * MAX_CHUNK_SIZE..=17 * MAX_CHUNK_SIZE).contains(&got.len()), "{}", got.len());
    assert!(consumed.load(Ordering::Relaxed) <= 19 * MAX_CHUNK_SIZE, "{}", consumed.load(Ordering::Relaxed));
    let last = loop {
        agent.reply(&first, "put-file-response", json!({ "offset": got.len() })).await;
        let chunk = agent.expect("put-file").await;
        assert_eq!((&chunk["offset"], &chunk["unique"]), (&json!(got.len()), &first["unique"]));
        if chunk["chunk"].is_null() {
            break chunk;
        }
        got.extend(bytes(&chunk));
    };
    assert!(got == data(LARGE) && !upload.is_finished());
    agent.reply(&last, "put-file-response", json!({ "offset": LARGE })).await;
    agent.reply(&last, "put-file-response", json!({ "path": "/tmp/x" })).await;
    upload.await.unwrap().unwrap();
    // A finished transfer is not abandoned.
    assert!(receive_all(&mut agent).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn aborted_and_invalid_uploads_are_abandoned() {
    let (vm, mut agent) = FakeVm::ready(ALL_FEATURES).await;
    let (source, _) = Source::stream(LARGE, false);
    let upload = put(&vm, LARGE as u64, source);
    let first = agent.expect("put-file").await;
    upload.abort();
    let last = receive_all(&mut agent).await.pop().unwrap();
    assert_eq!((&last["command"], &last["unique"]), (&json!("abandon"), &first["unique"]));

    for (size, announced, fails) in [(1000, 1001, false), (1000, 999, false), (1000, 1001, true)] {
        let upload = put(&vm, announced, Source::stream(size, fails).0);
        let packets = receive_all(&mut agent).await;
        assert!(matches!(upload.await.unwrap(), Err(GuestError::HostFailed(_))), "{size} {announced}");
        assert_eq!(packets.last().unwrap()["command"], "abandon");
        assert!(packets.iter().all(|packet| !packet.get("chunk").is_some_and(Value::is_null)));
    }
    // An empty file.
    let upload = put(&vm, 0, Source::stream(0, false).0);
    agent.expect("put-file").await;
    let last = agent.expect("put-file").await;
    assert!(last["chunk"].is_null());
    agent.reply(&last, "put-file-response", json!({ "path": "/tmp/x" })).await;
    upload.await.unwrap().unwrap();
    // A transfer that the guest refused is not abandoned.
    let upload = put(&vm, LARGE as u64, Source::stream(LARGE, false).0);
    let first = agent.expect("put-file").await;
    agent.reply(&first, "command-error", json!({ "message": "/tmp/x: no space" })).await;
    assert_eq!(upload.await.unwrap(), Err(GuestError::Refused("/tmp/x: no space".into())));
    assert!(receive_all(&mut agent).await.iter().all(|packet| packet["command"] == "put-file"));
    // An acknowledgement beyond the sent data.
    let upload = put(&vm, 10, Source::stream(10, false).0);
    let first = agent.expect("put-file").await;
    agent.reply(&first, "put-file-response", json!({ "offset": 11 })).await;
    assert!(matches!(upload.await.unwrap(), Err(GuestError::Refused(_))));
}

#[tokio::test(start_paused = true)]
async fn upload_to_plain_agent_uses_small_chunks_and_backpressure() {
    let (vm, mut agent) = FakeVm::ready(&[]).await;
    let (source, consumed) = Source::stream(LARGE, false);
    let upload = put(&vm, LARGE as u64, source);
    // An unfinished upload of the same path is finished first.
    let end = agent.expect("put-file").await;
    assert!(end["chunk"].is_null() && end.get("stat_result").is_none());
    agent.reply(&end, "put-file-response", json!({ "path": "/tmp/x" })).await;
    let first = agent.expect("put-file").await;
    assert!(first.get("pieces").is_none() && first.get("chunk").is_none());
    assert_ne!(first["unique"], end["unique"]);
    // The agent does not read, so nothing more is read from the source.
    sleep(Duration::from_secs(60)).await;
    assert_eq!(vm.report().state, AgentState::Ready);
    let before = consumed.load(Ordering::Relaxed);
    assert!(before < LARGE / 2, "{before}");
    let mut got = Vec::new();
    let last = loop {
        let chunk = agent.expect("put-file").await;
        assert_eq!(chunk["offset"], got.len());
        if chunk["chunk"].is_null() {
            break chunk;
        }
        assert!(bytes(&chunk).len() <= 16 << 10);
        got.extend(bytes(&chunk));
    };
    assert!(got == data(LARGE));
    agent.reply(&last, "put-file-response", json!({ "path": "/tmp/x" })).await;
    upload.await.unwrap().unwrap();

    let upload = put(&vm, 10, Source::stream(10, false).0);
    agent.expect("put-file").await;
    agent
        .send(&json!({ "command": "command-error", "message": "command put-file raised an error: no" }))
        .await;
    assert!(matches!(upload.await.unwrap(), Err(GuestError::Refused(_))));
}

async fn send_chunk(agent: &mut FakeAgent, request: &Value, offset: usize, data: &[u8]) {
    let fields =
        json!({ "result": true, "offset": offset, "encoding": "base64", "chunk": BASE64.encode(data) });
    agent.reply(request, "get-file-response", fields).await;
}

async fn send_info(agent: &mut FakeAgent, request: &Value, size: usize) {
    let stat =
        json!({ "mode": 33188, "size": size, "uid": 1, "gid": 2, "atime": 3.5, "mtime": 4, "ctime": 5 });
    agent.reply(request, "get-file-response", json!({ "result": true, "stat_result": stat })).await;
}

#[tokio::test(start_paused = true)]
async fn download_is_limited_by_the_window() {
    let (vm, mut agent) = FakeVm::ready(ALL_FEATURES).await;
    let download = get(&vm);
    let request = agent.expect("get-file").await;
    assert_eq!((&request["path"], &request["window"]), (&json!("/tmp/x"), &json!(16 * MAX_CHUNK_SIZE)));
    send_info(&mut agent, &request, LARGE).await;
    let (info, stream) = download.await.unwrap().unwrap();
    assert_eq!((info.mode, info.size, info.atime, info.gid), (33188, LARGE as u64, 3.5, 2));
    let data = data(LARGE);
    let (mut sent, mut allowed) = (0, 16 * MAX_CHUNK_SIZE);
    let mut stream = Some(stream);
    let mut reading = None;
    while sent < LARGE {
        while sent < allowed.min(LARGE) {
            let end = (sent + MAX_CHUNK_SIZE).min(LARGE);
            send_chunk(&mut agent, &request, sent, &data[sent..end]).await;
            sent = end;
        }
        // The window does not move before the data is consumed.
        if let Some(stream) = stream.take() {
            assert!(timeout(Duration::from_secs(1), agent.receive()).await.is_err());
            reading = Some(tokio::spawn(collect(stream)));
        }
        if sent < LARGE {
            let more = agent.expect("get-file-more").await;
            assert_eq!(more["unique"], request["unique"]);
            allowed = 16 * MAX_CHUNK_SIZE + usize::try_from(more["offset"].as_u64().unwrap()).unwrap();
        }
    }
    agent.reply(&request, "get-file-response", json!({ "offset": LARGE, "chunk": null })).await;
    assert!(reading.unwrap().await.unwrap().unwrap() == data);
    assert!(receive_all(&mut agent).await.iter().all(|packet| packet["command"] == "get-file-more"));
}

#[tokio::test(start_paused = true)]
async fn invalid_chunks_fail_only_their_download() {
    let (vm, mut agent) = FakeVm::ready(ALL_FEATURES).await;
    let chunk = data(MAX_CHUNK_SIZE);
    for (offset, chunk, count) in [
        (json!(0), json!(BASE64.encode(&chunk)), 100),
        (json!(7), json!(BASE64.encode(&chunk)), 1),
        (json!(0), json!("%"), 1),
        (json!(0), json!(7), 1),
        (json!(7), json!(null), 1),
    ] {
        let download = get(&vm);
        let request = agent.expect("get-file").await;
        send_info(&mut agent, &request, 10).await;
        let (_, stream) = download.await.unwrap().unwrap();
        for _ in 0..count {
            agent.reply(&request, "get-file-response", json!({ "offset": offset, "chunk": chunk })).await;
        }
        sleep(Duration::from_millis(1)).await;
        let consumed = collect(stream).await;
        assert!(matches!(consumed, Err(Error::Conflict(_) | Error::Unavailable(_))), "{chunk}: {consumed:?}");
        let last = receive_all(&mut agent).await.pop().unwrap();
        assert_eq!((&last["command"], &last["unique"]), (&json!("abandon"), &request["unique"]));
    }
    let download = get(&vm);
    let request = agent.expect("get-file").await;
    agent
        .reply(&request, "get-file-response", json!({ "result": false, "message": "/tmp/x: not there" }))
        .await;
    assert_eq!(download.await.unwrap().err(), Some(GuestError::Refused("/tmp/x: not there".into())));
    let download = get(&vm);
    let request = agent.expect("get-file").await;
    agent.reply(&request, "get-file-response", json!({ "result": true, "stat_result": 7 })).await;
    assert!(matches!(download.await.unwrap().err(), Some(GuestError::Refused(_))));
    // A failure in the middle of the file.
    assert_eq!(agent.expect("abandon").await["unique"], request["unique"]);
    let download = get(&vm);
    let request = agent.expect("get-file").await;
    send_info(&mut agent, &request, 10).await;
    let (_, stream) = download.await.unwrap().unwrap();
    agent.reply(&request, "get-file-response", json!({ "result": false, "message": "disk error" })).await;
    assert!(matches!(collect(stream).await, Err(Error::Conflict(reason)) if reason.contains("disk error")));
    assert_eq!(vm.report().state, AgentState::Ready);
}

#[tokio::test(start_paused = true)]
async fn plain_agent_is_not_read_while_the_buffer_is_full() {
    let (mut vm, mut agent) = FakeVm::ready(&[]).await;
    let download = get(&vm);
    let request = agent.expect("get-file").await;
    assert!(request.get("window").is_none());
    const SIZE: usize = 8 << 20;
    let data = data(SIZE);
    send_info(&mut agent, &request, SIZE).await;
    let (_, stream) = download.await.unwrap().unwrap();
    let (count, content) = (Arc::new(AtomicUsize::new(0)), data.clone());
    let counted = count.clone();
    let sending = tokio::spawn(async move {
        for (number, chunk) in content.chunks(1024).enumerate() {
            send_chunk(&mut agent, &request, number * 1024, chunk).await;
            counted.fetch_add(1024, Ordering::Relaxed);
        }
        agent.reply(&request, "get-file-response", json!({ "offset": SIZE, "chunk": null })).await;
        agent
    });
    // Longer than the silence timeout.
    sleep(Duration::from_secs(60)).await;
    let before = count.load(Ordering::Relaxed);
    assert!(before > 0 && before < SIZE / 2, "{before}");
    assert_eq!(vm.report().state, AgentState::Ready);
    assert!(collect(stream).await.unwrap() == data);
    let mut agent = sending.await.unwrap();
    // A download that is never consumed.
    let download = get(&vm);
    let request = loop {
        let packet = agent.receive().await.unwrap();
        if packet["command"] == "get-file" {
            break packet;
        }
    };
    send_info(&mut agent, &request, SIZE).await;
    let (_, stream) = download.await.unwrap().unwrap();
    let sending = tokio::spawn(async move {
        for (number, chunk) in data.chunks(1024).enumerate() {
            send_chunk(&mut agent, &request, number * 1024, chunk).await;
        }
        agent
    });
    sleep(Duration::from_secs(1)).await;
    assert!(!sending.is_finished());
    // A reset is handled while the buffer is full.
    vm.handle.as_ref().unwrap().notify_reset();
    vm.wait_for(&AgentState::NoContact).await;
    assert!(matches!(collect(stream).await, Err(Error::Unavailable(_))));
    sending.abort();
}
