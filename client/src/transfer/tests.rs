//! Transfers with a server that closes connections, loses uploads and sends wrong content.

use std::collections::VecDeque;
use std::fs;
use std::io::Cursor;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::digest::{SHA512, digest};
use muster_types::blob::BlobRecord;
use muster_types::key::Secret;
use parking_lot::Mutex;
use serde_json::{from_value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::api::Client;
use crate::credentials::Credentials;

const UPLOADS: [&str; 2] = ["0d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"];
const BLOB: &str = "2d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";

fn policy() -> RetryPolicy {
    let backoff = Duration::from_millis(1);
    RetryPolicy {
        max_retries: 3,
        min_backoff: backoff,
        max_backoff: backoff,
        stall_timeout: Duration::from_secs(10),
    }
}

/// The contents of the server, its planned failures, and the requests that it received.
#[derive(Default)]
struct ServerState {
    /// The content of the current upload.
    upload: Vec<u8>,
    /// The number of uploads created; only the last one exists.
    created: usize,
    /// The current upload does not exist.
    lost: bool,
    blob: Vec<u8>,
    /// After how many bytes of a body the next connections are closed.
    disconnects: VecDeque<usize>,
    /// Statuses of the next responses to appended data.
    refusals: VecDeque<u16>,
    requests: Vec<String>,
}

type SharedState = Arc<Mutex<ServerState>>;

async fn serve(state: ServerState) -> (Client, SharedState) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let apiurl = format!("http://{}", listener.local_addr().unwrap());
    let state = Arc::new(Mutex::new(state));
    let shared = Arc::clone(&state);
    tokio::spawn(async move {
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            let shared = Arc::clone(&shared);
            tokio::spawn(async move { handle(socket, &shared).await });
        }
    });
    let credentials = Credentials { namespace: "ci".into(), key: Secret::new("hunter2"), apiurl };
    (Client::new(credentials).unwrap(), state)
}

/// Handles one request. A planned disconnect ends the connection without a response.
async fn handle(mut socket: TcpStream, state: &SharedState) -> Option<()> {
    let (head, mut body) = read_head(&mut socket).await?;
    let line = head.lines().next()?.to_owned();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length: usize = length.map_or(0, |length| length.parse().unwrap());
    let (method, path) = line.split_once(' ')?;
    let path = path.strip_suffix(" HTTP/1.1")?.to_owned();
    if path == "/auth" {
        read_body(&mut socket, &mut body, length).await?;
        return respond(&mut socket, 200, br#"{"access_token": "t0ken"}"#, usize::MAX).await;
    }
    state.lock().requests.push(format!("{method} {path}"));
    let (route, query) = path.split_once('?').unwrap_or((&path, ""));
    let offset: Option<usize> = query.strip_prefix("offset=").map(|offset| offset.parse().unwrap());
    let (status, content) = match (method, route) {
        ("POST", "/upload") => {
            let mut state = state.lock();
            (state.upload, state.lost) = (vec![], false);
            state.created += 1;
            (200, record(&state))
        }
        ("POST", _) => {
            let refusal = {
                let mut state = state.lock();
                let exists = !state.lost && state.created > 0 && route.ends_with(UPLOADS[state.created - 1]);
                let fits = offset == Some(state.upload.len());
                if exists && fits { state.refusals.pop_front() } else { Some(if exists { 409 } else { 404 }) }
            };
            if let Some(status) = refusal {
                let _ = read_body(&mut socket, &mut body, length).await;
                (status, br#"{"error": "upload: no"}"#.to_vec())
            } else {
                let disconnect = state.lock().disconnects.pop_front();
                let received = disconnect.unwrap_or(length).min(length);
                let read = read_body(&mut socket, &mut body, received).await;
                state.lock().upload.extend_from_slice(&body[..received]);
                read?;
                if disconnect.is_some() {
                    return None;
                }
                (200, state.lock().upload.len().to_string().into_bytes())
            }
        }
        ("GET", data) if data.ends_with("/data") => {
            let (rest, limit) = {
                let mut state = state.lock();
                let rest = state.blob[offset.unwrap_or(0)..].to_vec();
                (rest, state.disconnects.pop_front().unwrap_or(usize::MAX))
            };
            return respond(&mut socket, 200, &rest, limit).await;
        }
        ("GET", _) => {
            let state = state.lock();
            let exists = !state.lost && state.created > 0 && route.ends_with(UPLOADS[state.created - 1]);
            if exists { (200, record(&state)) } else { (404, br#"{"error": "upload not found"}"#.to_vec()) }
        }
        _ => (404, b"{}".to_vec()),
    };
    respond(&mut socket, status, &content, usize::MAX).await
}

fn record(state: &ServerState) -> Vec<u8> {
    json!({ "uuid": UPLOADS[state.created - 1], "state": "created", "metadata": {}, "version": 3, "node": "sim-1",
            "created_at": 0.0, "size": state.upload.len() })
    .to_string()
    .into_bytes()
}

/// Reads the head of a request and the first bytes of its body.
async fn read_head(socket: &mut TcpStream) -> Option<(String, Vec<u8>)> {
    let mut bytes = Vec::new();
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
            return Some((head, bytes[end + 4..].to_vec()));
        }
        if socket.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
}

async fn read_body(socket: &mut TcpStream, body: &mut Vec<u8>, length: usize) -> Option<()> {
    while body.len() < length {
        if socket.read_buf(body).await.ok()? == 0 {
            return None;
        }
    }
    Some(())
}

async fn respond(socket: &mut TcpStream, status: u16, body: &[u8], limit: usize) -> Option<()> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status} x\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
    socket.write_all(head.as_bytes()).await.ok()?;
    socket.write_all(&body[..length.min(limit)]).await.ok()?;
    socket.shutdown().await.ok()
}

/// Returns content without repetitions.
fn content(length: usize) -> Vec<u8> {
    (0..length / 4 + 1)
        .flat_map(|number| (number as u32).wrapping_mul(2_654_435_761).to_le_bytes())
        .take(length)
        .collect()
}

fn sha512(bytes: &[u8]) -> String {
    hex::encode(digest(&SHA512, bytes))
}

fn local(directory: &TempDir, bytes: &[u8]) -> LocalFile {
    let path = directory.path().join("image");
    fs::write(&path, bytes).unwrap();
    LocalFile::open(&path).unwrap()
}

fn open_state(directory: &TempDir, client: &Client, local: &LocalFile) -> UploadState {
    UploadState::open(&directory.path().join("uploads"), client, local).unwrap()
}

fn appends(state: &SharedState) -> Vec<String> {
    let requests = state.lock().requests.clone();
    requests.into_iter().filter(|request| request.contains("offset=")).collect()
}

#[tokio::test]
async fn upload_resumes_after_disconnects() {
    let (directory, bytes) = (TempDir::new().unwrap(), content(5 << 20));
    let disconnects = [1 << 20, 0, 70_000].into();
    let (client, state) = serve(ServerState { disconnects, ..ServerState::default() }).await;
    let local = local(&directory, &bytes);
    let mut upload_state = open_state(&directory, &client, &local);
    let uploaded = send_file(&client, &local, &mut upload_state, policy()).await.unwrap();
    assert_eq!((uploaded.upload.to_string().as_str(), uploaded.sha512), (UPLOADS[0], sha512(&bytes)));
    assert!(state.lock().upload == bytes);
    assert!(appends(&state).len() >= 3, "{:?}", appends(&state));
}

#[tokio::test]
async fn upload_retries_transient_refusals_only() {
    let (directory, bytes) = (TempDir::new().unwrap(), content(100_000));
    let (client, state) =
        serve(ServerState { refusals: [503, 409, 401].into(), ..ServerState::default() }).await;
    let local = local(&directory, &bytes);
    let mut upload_state = open_state(&directory, &client, &local);
    send_file(&client, &local, &mut upload_state, policy()).await.unwrap();
    assert!(state.lock().upload == bytes);
    for (status, hint) in [(507, true), (413, false)] {
        let (client, state) =
            serve(ServerState { refusals: [status].into(), ..ServerState::default() }).await;
        let mut upload_state = open_state(&directory, &client, &local);
        let error = send_file(&client, &local, &mut upload_state, policy()).await.unwrap_err().to_string();
        assert_eq!(error.contains("run the same command again"), hint, "{error}");
        assert_eq!(appends(&state).len(), 1);
    }
}

#[tokio::test]
async fn upload_without_progress_fails() {
    let (directory, bytes) = (TempDir::new().unwrap(), content(1000));
    let (client, state) =
        serve(ServerState { disconnects: vec![0; 50].into(), ..ServerState::default() }).await;
    let local = local(&directory, &bytes);
    let mut upload_state = open_state(&directory, &client, &local);
    let error = send_file(&client, &local, &mut upload_state, policy()).await.unwrap_err().to_string();
    assert!(error.contains("cannot reach ") && error.contains("to resume"), "{error}");
    assert_eq!(appends(&state).len(), 4);
}

#[tokio::test]
async fn another_run_resumes_the_upload() {
    let (directory, bytes) = (TempDir::new().unwrap(), content(3 << 20));
    let disconnects = [2 << 20, 0, 0, 0, 0].into();
    let (client, state) = serve(ServerState { disconnects, ..ServerState::default() }).await;
    {
        let local = local(&directory, &bytes);
        let mut upload_state = open_state(&directory, &client, &local);
        assert!(
            UploadState::open(&directory.path().join("uploads"), &client, &local).is_err(),
            "the lock is missing"
        );
        send_file(&client, &local, &mut upload_state, policy()).await.unwrap_err();
    }
    let file = fs::read_dir(directory.path().join("uploads")).unwrap().next().unwrap().unwrap();
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    {
        let mut state = state.lock();
        assert_eq!(state.upload.len(), 2 << 20);
        state.disconnects.clear();
        state.requests.clear();
    }
    // The same file, opened by another run.
    let local = LocalFile::open(&directory.path().join("image")).unwrap();
    let mut upload_state = open_state(&directory, &client, &local);
    let uploaded = send_file(&client, &local, &mut upload_state, policy()).await.unwrap();
    assert_eq!(uploaded.sha512, sha512(&bytes));
    assert!(state.lock().upload == bytes);
    let expected =
        [format!("GET /upload/{}", UPLOADS[0]), format!("POST /upload/{}?offset={}", UPLOADS[0], 2 << 20)];
    assert_eq!(state.lock().requests, expected);
    upload_state.discard();
    assert!(!file.path().exists());
}

#[tokio::test]
async fn upload_of_a_changed_file_is_not_resumed() {
    let directory = TempDir::new().unwrap();
    let (client, state) =
        serve(ServerState { disconnects: vec![500, 0, 0, 0, 0].into(), ..ServerState::default() }).await;
    let first = local(&directory, &content(1000));
    send_file(&client, &first, &mut open_state(&directory, &client, &first), policy()).await.unwrap_err();
    state.lock().disconnects.clear();
    let other = content(1001);
    let second = local(&directory, &other);
    assert!(first.check_unchanged().is_err());
    let mut upload_state = open_state(&directory, &client, &second);
    send_file(&client, &second, &mut upload_state, policy()).await.unwrap();
    let state = state.lock();
    assert_eq!((state.created, state.upload == other), (2, true));
}

#[tokio::test]
async fn lost_upload_starts_over() {
    let (directory, bytes) = (TempDir::new().unwrap(), content(200_000));
    let (client, state) =
        serve(ServerState { disconnects: vec![100_000, 0, 0, 0, 0].into(), ..ServerState::default() }).await;
    let local = local(&directory, &bytes);
    let mut upload_state = open_state(&directory, &client, &local);
    send_file(&client, &local, &mut upload_state, policy()).await.unwrap_err();
    {
        let mut state = state.lock();
        (state.lost, state.disconnects) = (true, VecDeque::new());
    }
    let uploaded = send_file(&client, &local, &mut upload_state, policy()).await.unwrap();
    assert_eq!((uploaded.upload.to_string().as_str(), uploaded.sha512), (UPLOADS[1], sha512(&bytes)));
    assert!(state.lock().upload == bytes);
}

#[tokio::test]
async fn standard_input_survives_disconnects_and_may_be_empty() {
    let bytes = content((9 << 20) + 5);
    let disconnects = [1 << 20, 2 << 20].into();
    let (client, state) = serve(ServerState { disconnects, ..ServerState::default() }).await;
    let uploaded = send_stdin(&client, Cursor::new(bytes.clone()), policy()).await.unwrap();
    assert_eq!(uploaded.sha512, sha512(&bytes));
    assert!(state.lock().upload == bytes);

    let (client, state) = serve(ServerState::default()).await;
    let uploaded = send_stdin(&client, Cursor::new(vec![]), policy()).await.unwrap();
    assert_eq!(uploaded.sha512, sha512(b""));
    assert_eq!(state.lock().created, 1);
}

#[tokio::test]
async fn saved_checksum_is_reused() {
    let (directory, bytes) = (TempDir::new().unwrap(), content(10_000));
    let (client, _) = serve(ServerState::default()).await;
    let local = local(&directory, &bytes);
    let mut upload_state = open_state(&directory, &client, &local);
    assert_eq!(upload_state.sha512(&local).await.unwrap(), sha512(&bytes));
    drop(upload_state);
    let mut upload_state = open_state(&directory, &client, &local);
    assert_eq!(upload_state.entry.sha512, Some(sha512(&bytes)));
    let uploaded = send_file(&client, &local, &mut upload_state, policy()).await.unwrap();
    assert_eq!(uploaded.sha512, sha512(&bytes));
}

fn blob(bytes: &[u8]) -> BlobRecord {
    from_value(json!({
        "uuid": BLOB, "state": "created", "metadata": {}, "version": 6, "size": bytes.len(), "modified": null,
        "fetched_at": 0.0, "depends_on": null, "transcodes": {}, "locations": ["sim-1"], "reference_count": 1,
        "sha512": sha512(bytes), "checksums": {}, "last_used": null, "references_to": {}, "references_from": {}
    }))
    .unwrap()
}

/// Lists the file names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[tokio::test]
async fn download_resumes_after_disconnects() {
    let (directory, bytes) = (TempDir::new().unwrap(), content(3 << 20));
    let disconnects = [1 << 20, 0, 1 << 19].into();
    let (client, state) =
        serve(ServerState { blob: bytes.clone(), disconnects, ..ServerState::default() }).await;
    let file = directory.path().join("image");
    download(&client, &blob(&bytes), &DownloadTarget::new(&file, false).unwrap(), policy()).await.unwrap();
    assert!(fs::read(&file).unwrap() == bytes);
    assert_eq!(names(directory.path()), ["image"]);
    assert_eq!(state.lock().requests.len(), 4);
    assert!(
        DownloadTarget::new(&file, false).unwrap_err().to_string().ends_with("give --force to replace it")
    );
    assert!(
        DownloadTarget::new(directory.path(), true).is_err()
            && DownloadTarget::new(Path::new("/dev/null"), true).is_err()
    );
}

#[tokio::test]
async fn another_run_resumes_the_download() {
    let (directory, bytes) = (TempDir::new().unwrap(), content(2 << 20));
    let disconnects = [1 << 20, 0, 0, 0, 0].into();
    let (client, state) =
        serve(ServerState { blob: bytes.clone(), disconnects, ..ServerState::default() }).await;
    let target = DownloadTarget::File(directory.path().join("image"));
    let error = download(&client, &blob(&bytes), &target, policy()).await.unwrap_err().to_string();
    assert!(error.starts_with("the download stopped after 1.0 MiB of 2.0 MiB: cannot reach"), "{error}");
    assert_eq!(names(directory.path()), [format!(".image.{BLOB}.part")]);
    {
        let mut state = state.lock();
        state.disconnects.clear();
        state.requests.clear();
    }
    download(&client, &blob(&bytes), &target, policy()).await.unwrap();
    assert!(fs::read(directory.path().join("image")).unwrap() == bytes);
    assert_eq!(state.lock().requests, [format!("GET /blobs/{BLOB}/data?offset={}", 1 << 20)]);
    assert_eq!(names(directory.path()), ["image"]);
}

#[tokio::test]
async fn damaged_part_of_an_earlier_run_is_discarded() {
    let (directory, bytes) = (TempDir::new().unwrap(), content(50_000));
    for part in [vec![7; 20_000], vec![7; 60_000], bytes.clone()] {
        let (client, _) = serve(ServerState { blob: bytes.clone(), ..ServerState::default() }).await;
        fs::write(directory.path().join(format!(".image.{BLOB}.part")), part).unwrap();
        let target = DownloadTarget::File(directory.path().join("image"));
        download(&client, &blob(&bytes), &target, policy()).await.unwrap();
        assert!(fs::read(directory.path().join("image")).unwrap() == bytes);
        assert_eq!(names(directory.path()), ["image"]);
    }
}

#[tokio::test]
async fn rejects_corrupted_download() {
    let (directory, bytes) = (TempDir::new().unwrap(), content(50_000));
    let mut wrong = bytes.clone();
    wrong[30_000] ^= 1;
    let (client, _) = serve(ServerState { blob: wrong, ..ServerState::default() }).await;
    let target = DownloadTarget::File(directory.path().join("image"));
    let error = download(&client, &blob(&bytes), &target, policy()).await.unwrap_err().to_string();
    assert!(error.starts_with("the received content is not blob"), "{error}");
    assert!(names(directory.path()).is_empty());
}

#[tokio::test]
async fn rejects_content_longer_than_the_blob() {
    let (directory, bytes) = (TempDir::new().unwrap(), content(5000));
    let (client, _) = serve(ServerState { blob: content(6000), ..ServerState::default() }).await;
    let target = DownloadTarget::File(directory.path().join("image"));
    let error = download(&client, &blob(&bytes), &target, policy()).await.unwrap_err().to_string();
    assert!(error.starts_with("the server sent more than"), "{error}");
}
