//! Files on their way in and out, with both kinds of agent.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use futures_core::Stream;
use muster_agent::{FEATURE_MEMORY, FEATURE_PIECES, MAX_CHUNK_SIZE};
use muster_types::Error;
use muster_types::guest::{AgentState, GuestApi, GuestError, GuestFileInfo};
use muster_types::storage::ByteStream;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::execute_tests::collect;
use super::fake::{FakeAgent, World};

const BOTH: &[&str] = &[FEATURE_MEMORY, FEATURE_PIECES];
const MANY: usize = 40 * MAX_CHUNK_SIZE + 5;

fn data(size: usize) -> Vec<u8> {
    (0..size).map(|number| u8::try_from(number % 253).unwrap()).collect()
}

/// Bytes in parts of 100 kB, which counts what was taken.
struct Source {
    rest: Bytes,
    taken: Arc<AtomicUsize>,
    fails: bool,
}

impl Source {
    fn stream(size: usize, fails: bool) -> (ByteStream, Arc<AtomicUsize>) {
        let taken = Arc::new(AtomicUsize::new(0));
        (Box::pin(Self { rest: data(size).into(), taken: taken.clone(), fails }), taken)
    }
}

impl Stream for Source {
    type Item = muster_types::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let most = self.rest.len().min(100_000);
        if most == 0 {
            return Poll::Ready(self.fails.then(|| Err(Error::Internal("a worn disk".into()))));
        }
        self.taken.fetch_add(most, Ordering::Relaxed);
        Poll::Ready(Some(Ok(self.rest.split_to(most))))
    }
}

fn put(world: &World, size: u64, data: ByteStream) -> JoinHandle<Result<(), GuestError>> {
    let (guests, id) = (world.guests.clone(), world.id);
    tokio::spawn(async move { guests.put(id, "/tmp/x", size, None, data).await })
}

type Got = Result<(GuestFileInfo, ByteStream), GuestError>;

fn get(world: &World) -> JoinHandle<Got> {
    let (guests, id) = (world.guests.clone(), world.id);
    tokio::spawn(async move { guests.get(id, "/tmp/x").await })
}

fn bytes(packet: &Value) -> Vec<u8> {
    BASE64.decode(packet["chunk"].as_str().unwrap()).unwrap()
}

/// What the host says until it says nothing for a while.
async fn all(agent: &mut FakeAgent) -> Vec<Value> {
    let mut heard = Vec::new();
    while let Ok(packet) = timeout(Duration::from_millis(100), agent.hear()).await {
        heard.push(packet.unwrap());
    }
    heard
}

#[tokio::test(start_paused = true)]
async fn a_file_goes_in_pieces_as_fast_as_the_guest_writes_them() {
    let (world, mut agent) = World::ready(BOTH).await;
    let (source, taken) = Source::stream(MANY, false);
    let putting = put(&world, MANY as u64, source);
    let first = agent.expect("put-file").await;
    assert_eq!((&first["path"], &first["pieces"]), (&json!("/tmp/x"), &json!(true)));
    assert_eq!(first["stat_result"]["size"], MANY);
    let mut got = Vec::new();
    let pieces = all(&mut agent).await;
    for piece in &pieces {
        assert_eq!(piece["offset"], got.len());
        got.extend(bytes(piece));
    }
    // No more than that before the guest has written something, and no more taken from the disk.
    assert!((15 * MAX_CHUNK_SIZE..=17 * MAX_CHUNK_SIZE).contains(&got.len()), "{}", got.len());
    assert!(taken.load(Ordering::Relaxed) <= 19 * MAX_CHUNK_SIZE, "{}", taken.load(Ordering::Relaxed));
    let last = loop {
        agent.reply(&first, "put-file-response", json!({ "offset": got.len() })).await;
        let piece = agent.expect("put-file").await;
        assert_eq!((&piece["offset"], &piece["unique"]), (&json!(got.len()), &first["unique"]));
        if piece["chunk"].is_null() {
            break piece;
        }
        got.extend(bytes(&piece));
    };
    assert!(got == data(MANY) && !putting.is_finished());
    agent.reply(&last, "put-file-response", json!({ "offset": MANY })).await;
    agent.reply(&last, "put-file-response", json!({ "path": "/tmp/x" })).await;
    putting.await.unwrap().unwrap();
    // It is over: there is nothing to give up.
    assert!(all(&mut agent).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_file_that_is_given_up_or_does_not_fit_is_abandoned() {
    let (world, mut agent) = World::ready(BOTH).await;
    let (source, _) = Source::stream(MANY, false);
    let putting = put(&world, MANY as u64, source);
    let first = agent.expect("put-file").await;
    putting.abort();
    let last = all(&mut agent).await.pop().unwrap();
    assert_eq!((&last["command"], &last["unique"]), (&json!("abandon"), &first["unique"]));

    for (size, said, fails) in [(1000, 1001, false), (1000, 999, false), (1000, 1001, true)] {
        let putting = put(&world, said, Source::stream(size, fails).0);
        let heard = all(&mut agent).await;
        assert!(matches!(putting.await.unwrap(), Err(GuestError::Host(_))), "{size} {said}");
        assert_eq!(heard.last().unwrap()["command"], "abandon");
        assert!(heard.iter().all(|packet| !packet.get("chunk").is_some_and(Value::is_null)));
    }
    // An empty one is one, too.
    let putting = put(&world, 0, Source::stream(0, false).0);
    agent.expect("put-file").await;
    let last = agent.expect("put-file").await;
    assert!(last["chunk"].is_null());
    agent.reply(&last, "put-file-response", json!({ "path": "/tmp/x" })).await;
    putting.await.unwrap().unwrap();
    // What the guest refuses it has given up itself.
    let putting = put(&world, MANY as u64, Source::stream(MANY, false).0);
    let first = agent.expect("put-file").await;
    agent.reply(&first, "command-error", json!({ "message": "/tmp/x: no space" })).await;
    assert_eq!(putting.await.unwrap(), Err(GuestError::Refused("/tmp/x: no space".into())));
    assert!(all(&mut agent).await.iter().all(|packet| packet["command"] == "put-file"));
    // More than was sent cannot have been written.
    let putting = put(&world, 10, Source::stream(10, false).0);
    let first = agent.expect("put-file").await;
    agent.reply(&first, "put-file-response", json!({ "offset": 11 })).await;
    assert!(matches!(putting.await.unwrap(), Err(GuestError::Refused(_))));
}

#[tokio::test(start_paused = true)]
async fn a_plain_agent_gets_a_file_in_small_pieces_and_takes_its_time() {
    let (world, mut agent) = World::ready(&[]).await;
    let (source, taken) = Source::stream(MANY, false);
    let putting = put(&world, MANY as u64, source);
    // Whatever somebody left half done is over before it begins.
    let end = agent.expect("put-file").await;
    assert!(end["chunk"].is_null() && end.get("stat_result").is_none());
    agent.reply(&end, "put-file-response", json!({ "path": "/tmp/x" })).await;
    let first = agent.expect("put-file").await;
    assert!(first.get("pieces").is_none() && first.get("chunk").is_none());
    assert_ne!(first["unique"], end["unique"]);
    // It does not read: nothing more is taken from the disk.
    sleep(Duration::from_secs(60)).await;
    assert_eq!(world.report().state, AgentState::Ready);
    let before = taken.load(Ordering::Relaxed);
    assert!(before < MANY / 2, "{before}");
    let mut got = Vec::new();
    let last = loop {
        let piece = agent.expect("put-file").await;
        assert_eq!(piece["offset"], got.len());
        if piece["chunk"].is_null() {
            break piece;
        }
        assert!(bytes(&piece).len() <= 16 << 10);
        got.extend(bytes(&piece));
    };
    assert!(got == data(MANY));
    agent.reply(&last, "put-file-response", json!({ "path": "/tmp/x" })).await;
    putting.await.unwrap().unwrap();

    let putting = put(&world, 10, Source::stream(10, false).0);
    agent.expect("put-file").await;
    agent
        .say(&json!({ "command": "command-error", "message": "command put-file raised an error: no" }))
        .await;
    assert!(matches!(putting.await.unwrap(), Err(GuestError::Refused(_))));
}

async fn give(agent: &mut FakeAgent, asked: &Value, offset: usize, data: &[u8]) {
    let fields =
        json!({ "result": true, "offset": offset, "encoding": "base64", "chunk": BASE64.encode(data) });
    agent.reply(asked, "get-file-response", fields).await;
}

async fn give_facts(agent: &mut FakeAgent, asked: &Value, size: usize) {
    let stat =
        json!({ "mode": 33188, "size": size, "uid": 1, "gid": 2, "atime": 3.5, "mtime": 4, "ctime": 5 });
    agent.reply(asked, "get-file-response", json!({ "result": true, "stat_result": stat })).await;
}

#[tokio::test(start_paused = true)]
async fn a_file_comes_as_fast_as_it_is_taken() {
    let (world, mut agent) = World::ready(BOTH).await;
    let getting = get(&world);
    let asked = agent.expect("get-file").await;
    assert_eq!((&asked["path"], &asked["window"]), (&json!("/tmp/x"), &json!(16 * MAX_CHUNK_SIZE)));
    give_facts(&mut agent, &asked, MANY).await;
    let (facts, stream) = getting.await.unwrap().unwrap();
    assert_eq!((facts.mode, facts.size, facts.atime, facts.gid), (33188, MANY as u64, 3.5, 2));
    let data = data(MANY);
    let (mut sent, mut allowed) = (0, 16 * MAX_CHUNK_SIZE);
    let mut stream = Some(stream);
    let mut taking = None;
    while sent < MANY {
        while sent < allowed.min(MANY) {
            let end = (sent + MAX_CHUNK_SIZE).min(MANY);
            give(&mut agent, &asked, sent, &data[sent..end]).await;
            sent = end;
        }
        // Nobody takes anything at first, and it is not told to send more.
        if let Some(stream) = stream.take() {
            assert!(timeout(Duration::from_secs(1), agent.hear()).await.is_err());
            taking = Some(tokio::spawn(collect(stream)));
        }
        if sent < MANY {
            let more = agent.expect("get-file-more").await;
            assert_eq!(more["unique"], asked["unique"]);
            allowed = 16 * MAX_CHUNK_SIZE + usize::try_from(more["offset"].as_u64().unwrap()).unwrap();
        }
    }
    agent.reply(&asked, "get-file-response", json!({ "offset": MANY, "chunk": null })).await;
    assert!(taking.unwrap().await.unwrap().unwrap() == data);
    assert!(all(&mut agent).await.iter().all(|packet| packet["command"] == "get-file-more"));
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_sends_too_much_or_the_wrong_thing_loses_only_that_file() {
    let (world, mut agent) = World::ready(BOTH).await;
    let piece = data(MAX_CHUNK_SIZE);
    for (offset, chunk, count) in [
        (json!(0), json!(BASE64.encode(&piece)), 100),
        (json!(7), json!(BASE64.encode(&piece)), 1),
        (json!(0), json!("%"), 1),
        (json!(0), json!(7), 1),
        (json!(7), json!(null), 1),
    ] {
        let getting = get(&world);
        let asked = agent.expect("get-file").await;
        give_facts(&mut agent, &asked, 10).await;
        let (_, stream) = getting.await.unwrap().unwrap();
        for _ in 0..count {
            agent.reply(&asked, "get-file-response", json!({ "offset": offset, "chunk": chunk })).await;
        }
        sleep(Duration::from_millis(1)).await;
        let taken = collect(stream).await;
        assert!(matches!(taken, Err(Error::Conflict(_) | Error::Unavailable(_))), "{chunk}: {taken:?}");
        let last = all(&mut agent).await.pop().unwrap();
        assert_eq!((&last["command"], &last["unique"]), (&json!("abandon"), &asked["unique"]));
    }
    let getting = get(&world);
    let asked = agent.expect("get-file").await;
    agent
        .reply(&asked, "get-file-response", json!({ "result": false, "message": "/tmp/x: not there" }))
        .await;
    assert_eq!(getting.await.unwrap().err(), Some(GuestError::Refused("/tmp/x: not there".into())));
    let getting = get(&world);
    let asked = agent.expect("get-file").await;
    agent.reply(&asked, "get-file-response", json!({ "result": true, "stat_result": 7 })).await;
    assert!(matches!(getting.await.unwrap().err(), Some(GuestError::Refused(_))));
    // In the middle of it.
    assert_eq!(agent.expect("abandon").await["unique"], asked["unique"]);
    let getting = get(&world);
    let asked = agent.expect("get-file").await;
    give_facts(&mut agent, &asked, 10).await;
    let (_, stream) = getting.await.unwrap().unwrap();
    agent.reply(&asked, "get-file-response", json!({ "result": false, "message": "worn" })).await;
    assert!(matches!(collect(stream).await, Err(Error::Conflict(why)) if why.contains("worn")));
    assert_eq!(world.report().state, AgentState::Ready);
}

#[tokio::test(start_paused = true)]
async fn a_plain_agent_is_not_listened_to_while_nobody_takes_what_it_sends() {
    let (mut world, mut agent) = World::ready(&[]).await;
    let getting = get(&world);
    let asked = agent.expect("get-file").await;
    assert!(asked.get("window").is_none());
    const SIZE: usize = 8 << 20;
    let data = data(SIZE);
    give_facts(&mut agent, &asked, SIZE).await;
    let (_, stream) = getting.await.unwrap().unwrap();
    let (count, given) = (Arc::new(AtomicUsize::new(0)), data.clone());
    let counted = count.clone();
    let giving = tokio::spawn(async move {
        for (number, piece) in given.chunks(1024).enumerate() {
            give(&mut agent, &asked, number * 1024, piece).await;
            counted.fetch_add(1024, Ordering::Relaxed);
        }
        agent.reply(&asked, "get-file-response", json!({ "offset": SIZE, "chunk": null })).await;
        agent
    });
    // Longer than any silence would be borne.
    sleep(Duration::from_secs(60)).await;
    let before = count.load(Ordering::Relaxed);
    assert!(before > 0 && before < SIZE / 2, "{before}");
    assert_eq!(world.report().state, AgentState::Ready);
    assert!(collect(stream).await.unwrap() == data);
    let mut agent = giving.await.unwrap();
    // One that nobody takes at all keeps nobody else waiting once it is given up.
    let getting = get(&world);
    let asked = loop {
        let heard = agent.hear().await.unwrap();
        if heard["command"] == "get-file" {
            break heard;
        }
    };
    give_facts(&mut agent, &asked, SIZE).await;
    let (_, stream) = getting.await.unwrap().unwrap();
    let giving = tokio::spawn(async move {
        for (number, piece) in data.chunks(1024).enumerate() {
            give(&mut agent, &asked, number * 1024, piece).await;
        }
        agent
    });
    sleep(Duration::from_secs(1)).await;
    assert!(!giving.is_finished());
    // A reset is noticed meanwhile.
    world.contact.as_ref().unwrap().tell_reset();
    world.wait_for(&AgentState::NoContact).await;
    assert!(matches!(collect(stream).await, Err(Error::Unavailable(_))));
    giving.abort();
}
