//! Transfers against a server that breaks connections, forgets and lies.

use std::collections::VecDeque;
use std::fs;
use std::io::Cursor;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_lc_rs::digest::digest;
use muster_types::blob::BlobRecord;
use muster_types::key::Secret;
use serde_json::{from_value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::api::Client;
use crate::credentials::Credentials;

const UPLOADS: [&str; 2] = ["0d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"];
const BLOB: &str = "2d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";

fn policy() -> Policy {
    let pause = Duration::from_millis(1);
    Policy { tries: 3, shortest_pause: pause, longest_pause: pause, patience: Duration::from_secs(10) }
}

/// What the server has, what it will do, and what it was asked.
#[derive(Default)]
struct World {
    /// The bytes of the current upload.
    upload: Vec<u8>,
    /// How many uploads were begun; only the last of them is there.
    begun: usize,
    /// No upload is there.
    lost: bool,
    blob: Vec<u8>,
    /// After how many bytes of a body the next connections break.
    breaks: VecDeque<usize>,
    /// Statuses of the next answers to what is sent.
    refusals: VecDeque<u16>,
    requests: Vec<String>,
}

type Shared = Arc<Mutex<World>>;

async fn serve(world: World) -> (Client, Shared) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let apiurl = format!("http://{}", listener.local_addr().unwrap());
    let world = Arc::new(Mutex::new(world));
    let shared = Arc::clone(&world);
    tokio::spawn(async move {
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            let shared = Arc::clone(&shared);
            tokio::spawn(async move { answer(socket, &shared).await });
        }
    });
    let credentials = Credentials { namespace: "ci".into(), key: Secret::new("hunter2"), apiurl };
    (Client::new(credentials).unwrap(), world)
}

/// Answers one request. A connection that is to break ends without an answer.
async fn answer(mut socket: TcpStream, world: &Shared) -> Option<()> {
    let (head, mut body) = read_head(&mut socket).await?;
    let line = head.lines().next()?.to_owned();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length: usize = length.map_or(0, |length| length.parse().unwrap());
    let (method, path) = line.split_once(' ')?;
    let path = path.strip_suffix(" HTTP/1.1")?.to_owned();
    if path == "/auth" {
        read_body(&mut socket, &mut body, length).await?;
        return reply(&mut socket, 200, br#"{"access_token": "t0ken"}"#, usize::MAX).await;
    }
    world.lock().unwrap().requests.push(format!("{method} {path}"));
    let (route, query) = path.split_once('?').unwrap_or((&path, ""));
    let offset: Option<usize> = query.strip_prefix("offset=").map(|offset| offset.parse().unwrap());
    let (status, content) = match (method, route) {
        ("POST", "/upload") => {
            let mut world = world.lock().unwrap();
            (world.upload, world.lost) = (vec![], false);
            world.begun += 1;
            (200, record(&world))
        }
        ("POST", _) => {
            let refusal = {
                let mut world = world.lock().unwrap();
                let known = !world.lost && world.begun > 0 && route.ends_with(UPLOADS[world.begun - 1]);
                let fits = offset == Some(world.upload.len());
                if known && fits { world.refusals.pop_front() } else { Some(if known { 409 } else { 404 }) }
            };
            if let Some(status) = refusal {
                let _ = read_body(&mut socket, &mut body, length).await;
                (status, br#"{"error": "upload: no"}"#.to_vec())
            } else {
                let most = world.lock().unwrap().breaks.pop_front();
                let whole = read_body(&mut socket, &mut body, most.unwrap_or(length).min(length)).await;
                world.lock().unwrap().upload.extend_from_slice(&body[..most.unwrap_or(length).min(length)]);
                whole?;
                if most.is_some() {
                    return None;
                }
                (200, world.lock().unwrap().upload.len().to_string().into_bytes())
            }
        }
        ("GET", data) if data.ends_with("/data") => {
            let (rest, most) = {
                let mut world = world.lock().unwrap();
                let rest = world.blob[offset.unwrap_or(0)..].to_vec();
                (rest, world.breaks.pop_front().unwrap_or(usize::MAX))
            };
            return reply(&mut socket, 200, &rest, most).await;
        }
        ("GET", _) => {
            let world = world.lock().unwrap();
            let known = !world.lost && world.begun > 0 && route.ends_with(UPLOADS[world.begun - 1]);
            if known { (200, record(&world)) } else { (404, br#"{"error": "upload not found"}"#.to_vec()) }
        }
        _ => (404, b"{}".to_vec()),
    };
    reply(&mut socket, status, &content, usize::MAX).await
}

fn record(world: &World) -> Vec<u8> {
    json!({ "uuid": UPLOADS[world.begun - 1], "state": "created", "metadata": {}, "version": 3, "node": "sim-1",
            "created_at": 0.0, "size": world.upload.len() })
    .to_string()
    .into_bytes()
}

/// The head of a request in lower case but for its first line, and what came after it.
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

async fn reply(socket: &mut TcpStream, status: u16, body: &[u8], most: usize) -> Option<()> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status} x\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
    socket.write_all(head.as_bytes()).await.ok()?;
    socket.write_all(&body[..length.min(most)]).await.ok()?;
    socket.shutdown().await.ok()
}

/// Content of which no part looks like another.
fn content(length: usize) -> Vec<u8> {
    (0..length / 4 + 1)
        .flat_map(|number| (number as u32).wrapping_mul(2_654_435_761).to_le_bytes())
        .take(length)
        .collect()
}

fn sum(bytes: &[u8]) -> String {
    hex(digest(&SHA512, bytes).as_ref())
}

fn local(folder: &TempDir, bytes: &[u8]) -> LocalFile {
    let path = folder.path().join("image");
    fs::write(&path, bytes).unwrap();
    LocalFile::open(&path).unwrap()
}

fn remembered(folder: &TempDir, client: &Client, local: &LocalFile) -> Remembered {
    Remembered::open(&folder.path().join("uploads"), client, local).unwrap()
}

fn appends(world: &Shared) -> Vec<String> {
    let requests = world.lock().unwrap().requests.clone();
    requests.into_iter().filter(|request| request.contains("offset=")).collect()
}

#[tokio::test]
async fn an_upload_goes_on_after_broken_connections() {
    let (folder, bytes) = (TempDir::new().unwrap(), content(5 << 20));
    let breaks = [1 << 20, 0, 70_000].into();
    let (client, world) = serve(World { breaks, ..World::default() }).await;
    let local = local(&folder, &bytes);
    let mut known = remembered(&folder, &client, &local);
    let uploaded = send_file(&client, &local, &mut known, policy()).await.unwrap();
    assert_eq!((uploaded.upload.to_string().as_str(), uploaded.sha512), (UPLOADS[0], sum(&bytes)));
    assert!(world.lock().unwrap().upload == bytes);
    assert!(appends(&world).len() >= 3, "{:?}", appends(&world));
}

#[tokio::test]
async fn an_upload_goes_on_after_refusals_that_pass_and_ends_at_those_that_do_not() {
    let (folder, bytes) = (TempDir::new().unwrap(), content(100_000));
    let (client, world) = serve(World { refusals: [503, 409, 401].into(), ..World::default() }).await;
    let local = local(&folder, &bytes);
    let mut known = remembered(&folder, &client, &local);
    send_file(&client, &local, &mut known, policy()).await.unwrap();
    assert!(world.lock().unwrap().upload == bytes);
    for (status, hint) in [(507, true), (413, false)] {
        let (client, world) = serve(World { refusals: [status].into(), ..World::default() }).await;
        let mut known = remembered(&folder, &client, &local);
        let error = send_file(&client, &local, &mut known, policy()).await.unwrap_err().to_string();
        assert_eq!(error.contains("run the same command again"), hint, "{error}");
        assert_eq!(appends(&world).len(), 1);
    }
}

#[tokio::test]
async fn an_upload_that_never_gets_on_ends() {
    let (folder, bytes) = (TempDir::new().unwrap(), content(1000));
    let (client, world) = serve(World { breaks: vec![0; 50].into(), ..World::default() }).await;
    let local = local(&folder, &bytes);
    let mut known = remembered(&folder, &client, &local);
    let error = send_file(&client, &local, &mut known, policy()).await.unwrap_err().to_string();
    assert!(error.contains("cannot reach ") && error.contains("to go on"), "{error}");
    assert_eq!(appends(&world).len(), 4);
}

#[tokio::test]
async fn another_run_goes_on_where_the_first_stopped() {
    let (folder, bytes) = (TempDir::new().unwrap(), content(3 << 20));
    let breaks = [2 << 20, 0, 0, 0, 0].into();
    let (client, world) = serve(World { breaks, ..World::default() }).await;
    {
        let local = local(&folder, &bytes);
        let mut known = remembered(&folder, &client, &local);
        assert!(Remembered::open(&folder.path().join("uploads"), &client, &local).is_err(), "no lock");
        send_file(&client, &local, &mut known, policy()).await.unwrap_err();
    }
    let file = fs::read_dir(folder.path().join("uploads")).unwrap().next().unwrap().unwrap();
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    {
        let mut world = world.lock().unwrap();
        assert_eq!(world.upload.len(), 2 << 20);
        world.breaks.clear();
        world.requests.clear();
    }
    // The same file, opened by another run.
    let local = LocalFile::open(&folder.path().join("image")).unwrap();
    let mut known = remembered(&folder, &client, &local);
    let uploaded = send_file(&client, &local, &mut known, policy()).await.unwrap();
    assert_eq!(uploaded.sha512, sum(&bytes));
    assert!(world.lock().unwrap().upload == bytes);
    let expected =
        [format!("GET /upload/{}", UPLOADS[0]), format!("POST /upload/{}?offset={}", UPLOADS[0], 2 << 20)];
    assert_eq!(world.lock().unwrap().requests, expected);
    known.forget();
    assert!(!file.path().exists());
}

#[tokio::test]
async fn a_changed_file_is_not_gone_on_with() {
    let folder = TempDir::new().unwrap();
    let (client, world) = serve(World { breaks: vec![500, 0, 0, 0, 0].into(), ..World::default() }).await;
    let first = local(&folder, &content(1000));
    send_file(&client, &first, &mut remembered(&folder, &client, &first), policy()).await.unwrap_err();
    world.lock().unwrap().breaks.clear();
    let other = content(1001);
    let second = local(&folder, &other);
    assert!(first.require_unchanged().is_err());
    let mut known = remembered(&folder, &client, &second);
    send_file(&client, &second, &mut known, policy()).await.unwrap();
    let world = world.lock().unwrap();
    assert_eq!((world.begun, world.upload == other), (2, true));
}

#[tokio::test]
async fn an_upload_that_is_gone_begins_anew() {
    let (folder, bytes) = (TempDir::new().unwrap(), content(200_000));
    let (client, world) = serve(World { breaks: vec![100_000, 0, 0, 0, 0].into(), ..World::default() }).await;
    let local = local(&folder, &bytes);
    let mut known = remembered(&folder, &client, &local);
    send_file(&client, &local, &mut known, policy()).await.unwrap_err();
    {
        let mut world = world.lock().unwrap();
        (world.lost, world.breaks) = (true, VecDeque::new());
    }
    let uploaded = send_file(&client, &local, &mut known, policy()).await.unwrap();
    assert_eq!((uploaded.upload.to_string().as_str(), uploaded.sha512), (UPLOADS[1], sum(&bytes)));
    assert!(world.lock().unwrap().upload == bytes);
}

#[tokio::test]
async fn standard_input_survives_a_broken_connection_and_nothing_is_something() {
    let bytes = content((9 << 20) + 5);
    let breaks = [1 << 20, 2 << 20].into();
    let (client, world) = serve(World { breaks, ..World::default() }).await;
    let uploaded = send_stdin(&client, Cursor::new(bytes.clone()), policy()).await.unwrap();
    assert_eq!(uploaded.sha512, sum(&bytes));
    assert!(world.lock().unwrap().upload == bytes);

    let (client, world) = serve(World::default()).await;
    let uploaded = send_stdin(&client, Cursor::new(vec![]), policy()).await.unwrap();
    assert_eq!(uploaded.sha512, sum(b""));
    assert_eq!(world.lock().unwrap().begun, 1);
}

#[tokio::test]
async fn a_known_sum_is_not_made_again() {
    let (folder, bytes) = (TempDir::new().unwrap(), content(10_000));
    let (client, _) = serve(World::default()).await;
    let local = local(&folder, &bytes);
    let mut known = remembered(&folder, &client, &local);
    assert_eq!(known.sha512(&local).await.unwrap(), sum(&bytes));
    drop(known);
    let mut known = remembered(&folder, &client, &local);
    assert_eq!(known.entry.sha512, Some(sum(&bytes)));
    let uploaded = send_file(&client, &local, &mut known, policy()).await.unwrap();
    assert_eq!(uploaded.sha512, sum(&bytes));
}

fn blob(bytes: &[u8]) -> BlobRecord {
    from_value(json!({
        "uuid": BLOB, "state": "created", "metadata": {}, "version": 6, "size": bytes.len(), "modified": null,
        "fetched_at": 0.0, "depends_on": null, "transcodes": {}, "locations": ["sim-1"], "reference_count": 1,
        "sha512": sum(bytes), "checksums": {}, "last_used": null, "references_to": {}, "references_from": {}
    }))
    .unwrap()
}

/// The names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[tokio::test]
async fn a_download_goes_on_after_broken_connections() {
    let (folder, bytes) = (TempDir::new().unwrap(), content(3 << 20));
    let breaks = [1 << 20, 0, 1 << 19].into();
    let (client, world) = serve(World { blob: bytes.clone(), breaks, ..World::default() }).await;
    let file = folder.path().join("image");
    download(&client, &blob(&bytes), &Target::new(&file, false).unwrap(), policy()).await.unwrap();
    assert!(fs::read(&file).unwrap() == bytes);
    assert_eq!(names(folder.path()), ["image"]);
    assert_eq!(world.lock().unwrap().requests.len(), 4);
    assert!(Target::new(&file, false).unwrap_err().to_string().ends_with("give --force to replace it"));
    assert!(Target::new(folder.path(), true).is_err() && Target::new(Path::new("/dev/null"), true).is_err());
}

#[tokio::test]
async fn another_run_goes_on_with_what_has_arrived() {
    let (folder, bytes) = (TempDir::new().unwrap(), content(2 << 20));
    let breaks = [1 << 20, 0, 0, 0, 0].into();
    let (client, world) = serve(World { blob: bytes.clone(), breaks, ..World::default() }).await;
    let target = Target::File(folder.path().join("image"));
    let error = download(&client, &blob(&bytes), &target, policy()).await.unwrap_err().to_string();
    assert!(error.starts_with("1.0 MiB of 2.0 MiB have arrived, then: cannot reach"), "{error}");
    assert_eq!(names(folder.path()), [format!(".image.{BLOB}.part")]);
    {
        let mut world = world.lock().unwrap();
        world.breaks.clear();
        world.requests.clear();
    }
    download(&client, &blob(&bytes), &target, policy()).await.unwrap();
    assert!(fs::read(folder.path().join("image")).unwrap() == bytes);
    assert_eq!(world.lock().unwrap().requests, [format!("GET /blobs/{BLOB}/data?offset={}", 1 << 20)]);
    assert_eq!(names(folder.path()), ["image"]);
}

#[tokio::test]
async fn a_damaged_part_of_an_earlier_run_is_thrown_away() {
    let (folder, bytes) = (TempDir::new().unwrap(), content(50_000));
    for part in [vec![7; 20_000], vec![7; 60_000], bytes.clone()] {
        let (client, _) = serve(World { blob: bytes.clone(), ..World::default() }).await;
        fs::write(folder.path().join(format!(".image.{BLOB}.part")), part).unwrap();
        let target = Target::File(folder.path().join("image"));
        download(&client, &blob(&bytes), &target, policy()).await.unwrap();
        assert!(fs::read(folder.path().join("image")).unwrap() == bytes);
        assert_eq!(names(folder.path()), ["image"]);
    }
}

#[tokio::test]
async fn a_corrupted_download_is_refused() {
    let (folder, bytes) = (TempDir::new().unwrap(), content(50_000));
    let mut wrong = bytes.clone();
    wrong[30_000] ^= 1;
    let (client, _) = serve(World { blob: wrong, ..World::default() }).await;
    let target = Target::File(folder.path().join("image"));
    let error = download(&client, &blob(&bytes), &target, policy()).await.unwrap_err().to_string();
    assert!(error.starts_with("what arrived is not blob"), "{error}");
    assert!(names(folder.path()).is_empty());
}

#[tokio::test]
async fn more_than_the_blob_is_refused() {
    let (folder, bytes) = (TempDir::new().unwrap(), content(5000));
    let (client, _) = serve(World { blob: content(6000), ..World::default() }).await;
    let target = Target::File(folder.path().join("image"));
    let error = download(&client, &blob(&bytes), &target, policy()).await.unwrap_err().to_string();
    assert!(error.starts_with("the server sends more than"), "{error}");
}
