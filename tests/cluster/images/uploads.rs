//! Large uploads over connections that break.

use std::sync::Arc;

use muster_testing::Daemon;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{Caller, Content, Dice, MIB, text};
use crate::setup;

const UPLOADS: u64 = 10;
const SMALL: u64 = 10 * MIB;
const LARGE: u64 = 200 * MIB;

/// Sends a piece, or only its beginning before the connection is reset. What was answered.
async fn send(caller: &Caller, path: &str, bytes: &[u8], cut: Option<usize>) -> Option<(u16, Value)> {
    let mut stream = TcpStream::connect(caller.url.trim_start_matches("http://")).await.unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n",
        caller.token,
        bytes.len()
    );
    stream.write_all(head.as_bytes()).await.ok()?;
    stream.write_all(&bytes[..cut.unwrap_or(bytes.len())]).await.ok()?;
    if cut.is_some() {
        stream.set_zero_linger().unwrap();
        return None;
    }
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.ok()?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, serde_json::from_str(body).unwrap_or(Value::Null)))
}

/// Asks, and reads no more than the beginning of the answer.
async fn ask(caller: &Caller, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(caller.url.trim_start_matches("http://")).await.unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\n\r\n", caller.token);
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut status = [0; 12];
    stream.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
    stream
}

/// How an uploader goes on after its connection broke.
#[derive(Debug, Clone, Copy)]
enum Protocol {
    /// As the released client does: cut to what was acknowledged, and send that piece again.
    Truncate,
    /// Ask how much has arrived, and go on there.
    Ask,
}

/// Sends a content over connections of which many break; how many did.
async fn upload(caller: &Caller, upload: &str, content: &Content, protocol: Protocol, dice: &Dice) -> usize {
    let (mut have, mut most, mut breaks) = (0, 0, 0);
    while have < content.size {
        let end = (have + 1 + dice.below(8 * MIB)).min(content.size);
        let bytes = content.part(have, end);
        most = end.max(most);
        let cut = (dice.below(10) < 3).then(|| dice.below(bytes.len() as u64) as usize);
        let path = match protocol {
            Protocol::Truncate => format!("/upload/{upload}"),
            Protocol::Ask => format!("/upload/{upload}?offset={have}"),
        };
        match send(caller, &path, &bytes, cut).await {
            Some((200, size)) if size == json!(end) => {
                have = end;
                continue;
            }
            Some((409, body)) => assert!(matches!(protocol, Protocol::Ask), "{body}"),
            Some((status, body)) => panic!("{status} {body}"),
            None => breaks += 1,
        }
        match protocol {
            Protocol::Truncate => {
                let path = format!("/upload/{upload}/truncate/{have}");
                let (status, body) = caller.call(Method::POST, &path, None).await;
                assert_eq!(status, 200, "{body}");
            }
            Protocol::Ask => {
                let size = caller.get(&format!("/upload/{upload}")).await["size"].as_u64().unwrap();
                assert!((have..=most).contains(&size), "{size} is not between {have} and {most}");
                have = size;
            }
        }
    }
    breaks
}

/// The most memory that a daemon has ever had, in MiB.
fn peak(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

/// Ten uploads at once; what was sent and the blobs that it became, and how many connections broke.
async fn upload_all(caller: &Caller, first: u64, size: u64) -> (Vec<(Content, String)>, usize) {
    let dice = Arc::new(Dice::new());
    let mut tasks = Vec::new();
    for number in first..first + UPLOADS {
        let (caller, dice) = (caller.clone(), Arc::clone(&dice));
        tasks.push(tokio::spawn(async move {
            let content = Content::new(number, size + number);
            let protocol = if number % 2 == 0 { Protocol::Truncate } else { Protocol::Ask };
            let id = text(&caller.post("/upload", json!({})).await, "uuid");
            let breaks = upload(&caller, &id, &content, protocol, &dice).await;
            let body = json!({"upload_uuid": id, "artifact_type": "other"});
            let made = caller.post(&format!("/artifacts/upload/large-{number}"), body).await;
            (content, text(&made, "blob_uuid"), breaks)
        }));
    }
    let (mut made, mut breaks) = (Vec::new(), 0);
    for task in tasks {
        let (content, blob, broke) = task.await.unwrap();
        made.push((content, blob));
        breaks += broke;
    }
    (made, breaks)
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_uploads_at_once_over_breaking_connections_arrive_whole_and_take_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = setup(folder.path()).arguments(&[]).start();
    let caller = Caller::new(&daemon, &daemon.system_key()).await;
    // Each upload has a few pieces of its own in memory, and so it shall stay however long it is.
    upload_all(&caller, 100, SMALL).await;
    let before = peak(&daemon);
    let (made, breaks) = upload_all(&caller, 200, LARGE).await;
    let uploaded = peak(&daemon);
    // Those who ask and then do not read are not served out of memory either.
    let mut silent = Vec::new();
    for (_, blob) in &made {
        silent.push(ask(&caller, &format!("/blobs/{blob}/data")).await);
    }
    for (content, blob) in made {
        let record = caller.get(&format!("/blobs/{blob}")).await;
        let sum = content.sum();
        assert_eq!((&record["size"], &record["sha512"]), (&json!(content.size), &json!(sum)));
        assert_eq!(caller.sum(&blob).await, sum);
    }
    let read = peak(&daemon);
    drop(silent);
    println!("{breaks} connections broke; the daemon's peak was {before}, {uploaded} and {read} MiB");
    assert!(breaks >= 10, "only {breaks} connections broke");
    assert!(uploaded < before + 100, "memory grew from {before} to {uploaded} MiB");
    assert!(read < uploaded + 60, "memory grew from {uploaded} to {read} MiB");
    let drafts = std::fs::read_dir(daemon.data.join("drafts")).unwrap().count();
    assert_eq!(drafts, 0, "nothing is left of the uploads");
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
}
