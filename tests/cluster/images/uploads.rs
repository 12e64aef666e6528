//! Large uploads over unreliable connections.

use std::sync::Arc;

use muster_testing::Daemon;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{Client, Content, MIB, Random, text};
use crate::setup;

const UPLOADS: u64 = 10;
const SMALL: u64 = 10 * MIB;
const LARGE: u64 = 200 * MIB;

/// Sends a chunk, or resets the connection after `cut` bytes of it. Returns the response.
async fn send(client: &Client, path: &str, bytes: &[u8], cut: Option<usize>) -> Option<(u16, Value)> {
    let mut stream = TcpStream::connect(client.url.trim_start_matches("http://")).await.unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n",
        client.token,
        bytes.len()
    );
    stream.write_all(head.as_bytes()).await.ok()?;
    stream.write_all(&bytes[..cut.unwrap_or(bytes.len())]).await.ok()?;
    if cut.is_some() {
        stream.set_zero_linger().unwrap();
        return None;
    }
    let mut response = Vec::new();
    stream.read_to_end(&mut response).await.ok()?;
    let response = String::from_utf8_lossy(&response).into_owned();
    let (head, body) = response.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, serde_json::from_str(body).unwrap_or(Value::Null)))
}

/// Sends a request and reads only the status of the response.
async fn read_status_only(client: &Client, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(client.url.trim_start_matches("http://")).await.unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\n\r\n", client.token);
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut status = [0; 12];
    stream.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
    stream
}

/// How an upload is resumed after its connection broke.
#[derive(Debug, Clone, Copy)]
enum ResumeProtocol {
    /// As the released client does: truncate to the acknowledged size and send the chunk again.
    Truncate,
    /// Query the received size and continue there.
    QuerySize,
}

/// Uploads a content over connections of which some break. Returns the number of broken ones.
async fn upload(
    client: &Client,
    upload: &str,
    content: &Content,
    protocol: ResumeProtocol,
    random: &Random,
) -> usize {
    let (mut size_sent, mut max_sent, mut breaks) = (0, 0, 0);
    while size_sent < content.size {
        let end = (size_sent + 1 + random.below(8 * MIB)).min(content.size);
        let bytes = content.part(size_sent, end);
        max_sent = end.max(max_sent);
        let cut = (random.below(10) < 3).then(|| random.below(bytes.len() as u64) as usize);
        let path = match protocol {
            ResumeProtocol::Truncate => format!("/upload/{upload}"),
            ResumeProtocol::QuerySize => format!("/upload/{upload}?offset={size_sent}"),
        };
        match send(client, &path, &bytes, cut).await {
            Some((200, size)) if size == json!(end) => {
                size_sent = end;
                continue;
            }
            Some((409, body)) => assert!(matches!(protocol, ResumeProtocol::QuerySize), "{body}"),
            Some((status, body)) => panic!("{status} {body}"),
            None => breaks += 1,
        }
        match protocol {
            ResumeProtocol::Truncate => {
                let path = format!("/upload/{upload}/truncate/{size_sent}");
                let (status, body) = client.call(Method::POST, &path, None).await;
                assert_eq!(status, 200, "{body}");
            }
            ResumeProtocol::QuerySize => {
                let size = client.get(&format!("/upload/{upload}")).await["size"].as_u64().unwrap();
                assert!(
                    (size_sent..=max_sent).contains(&size),
                    "{size} is not between {size_sent} and {max_sent}"
                );
                size_sent = size;
            }
        }
    }
    breaks
}

/// Returns the peak of a daemon's resident memory in MiB.
fn peak_memory(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

/// Runs ten concurrent uploads. Returns the contents with their blobs, and the number of broken connections.
async fn upload_all(client: &Client, first: u64, size: u64) -> (Vec<(Content, String)>, usize) {
    let random = Arc::new(Random::new());
    let mut tasks = Vec::new();
    for number in first..first + UPLOADS {
        let (client, random) = (client.clone(), Arc::clone(&random));
        tasks.push(tokio::spawn(async move {
            let content = Content::new(number, size + number);
            let protocol = if number % 2 == 0 { ResumeProtocol::Truncate } else { ResumeProtocol::QuerySize };
            let id = text(&client.post("/upload", json!({})).await, "uuid");
            let breaks = upload(&client, &id, &content, protocol, &random).await;
            let body = json!({"upload_uuid": id, "artifact_type": "other"});
            let created = client.post(&format!("/artifacts/upload/large-{number}"), body).await;
            (content, text(&created, "blob_uuid"), breaks)
        }));
    }
    let (mut created, mut breaks) = (Vec::new(), 0);
    for task in tasks {
        let (content, blob, broke) = task.await.unwrap();
        created.push((content, blob));
        breaks += broke;
    }
    (created, breaks)
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_uploads_resume_with_bounded_memory() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).arguments(&[]).start();
    let client = Client::new(&daemon, &daemon.system_key()).await;
    // Each upload buffers a few chunks, regardless of its size.
    upload_all(&client, 100, SMALL).await;
    let before = peak_memory(&daemon);
    let (created, breaks) = upload_all(&client, 200, LARGE).await;
    let uploaded = peak_memory(&daemon);
    // Responses that are not read are not buffered either.
    let mut stalled = Vec::new();
    for (_, blob) in &created {
        stalled.push(read_status_only(&client, &format!("/blobs/{blob}/data")).await);
    }
    for (content, blob) in created {
        let record = client.get(&format!("/blobs/{blob}")).await;
        let checksum = content.checksum();
        assert_eq!((&record["size"], &record["sha512"]), (&json!(content.size), &json!(checksum)));
        assert_eq!(client.checksum(&blob).await, checksum);
    }
    let read = peak_memory(&daemon);
    drop(stalled);
    println!("{breaks} connections broke; the daemon's peak was {before}, {uploaded} and {read} MiB");
    assert!(breaks >= 10, "only {breaks} connections broke");
    assert!(uploaded < before + 100, "memory grew from {before} to {uploaded} MiB");
    assert!(read < uploaded + 60, "memory grew from {uploaded} to {read} MiB");
    let drafts = std::fs::read_dir(daemon.data.join("drafts")).unwrap().count();
    assert_eq!(drafts, 0, "drafts of uploads remain");
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
}
