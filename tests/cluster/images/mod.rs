//! Images and data on real daemons: sent, fetched, converted, damaged, and what a full disk or a kill does to them.

mod client;
mod disk;
mod kill;
mod offer;
mod several;
mod uploads;

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aws_lc_rs::digest::{Context, SHA512, digest};
use muster_testing::Daemon;
use reqwest::Method;
use serde_json::{Value, json};

/// One MiB, which is also the piece in which nodes check what they read.
const MIB: u64 = 1 << 20;

/// A caller who stays the same while the daemon that it talks to is killed and started again.
#[derive(Debug, Clone)]
struct Caller {
    url: String,
    token: String,
    client: reqwest::Client,
}

impl Caller {
    async fn new(daemon: &Daemon, key: &str) -> Self {
        let token = daemon.log_in("system", key).await;
        let client = reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap();
        Self { url: daemon.url.clone(), token, client }
    }

    /// The same caller at another daemon of the cluster.
    fn at(&self, daemon: &Daemon) -> Self {
        Self { url: daemon.url.clone(), ..self.clone() }
    }

    /// Status and JSON; nothing when there is no answer.
    async fn try_call(&self, method: Method, path: &str, body: Option<Value>) -> Option<(u16, Value)> {
        let mut request = self.client.request(method, format!("{}{path}", self.url)).bearer_auth(&self.token);
        if let Some(body) = body {
            request = request.json(&body);
        }
        answer_of(request).await
    }

    async fn call(&self, method: Method, path: &str, body: Option<Value>) -> (u16, Value) {
        self.try_call(method, path, body).await.expect("an answer")
    }

    /// What is there; it must be.
    async fn get(&self, path: &str) -> Value {
        let (status, body) = self.call(Method::GET, path, None).await;
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let (status, body) = self.call(Method::POST, path, Some(body)).await;
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// Sends bytes to an upload, which must be as long as `at` says.
    async fn try_send(&self, upload: &str, at: u64, bytes: Vec<u8>) -> Option<(u16, Value)> {
        let url = format!("{}/upload/{upload}?offset={at}", self.url);
        answer_of(self.client.post(url).bearer_auth(&self.token).body(bytes)).await
    }

    async fn send(&self, upload: &str, at: u64, bytes: Vec<u8>) -> (u16, Value) {
        self.try_send(upload, at, bytes).await.expect("an answer")
    }

    /// Sends a content and makes it a version of the artifact of that name; its record.
    async fn upload(&self, name: &str, kind: &str, bytes: &[u8]) -> Value {
        let upload = text(&self.post("/upload", json!({})).await, "uuid");
        let (status, size) = self.send(&upload, 0, bytes.to_vec()).await;
        assert_eq!((status, size), (200, json!(bytes.len())));
        let body = json!({"upload_uuid": upload, "artifact_type": kind});
        self.post(&format!("/artifacts/upload/{name}"), body).await
    }

    /// The bytes of a blob for as far as they come, and whether they are all that was promised; nothing when there
    /// is no answer.
    async fn try_data(&self, blob: &str) -> Option<(u16, Vec<u8>, bool)> {
        let url = format!("{}/blobs/{blob}/data", self.url);
        let mut answer = self.client.get(url).bearer_auth(&self.token).send().await.ok()?;
        let status = answer.status().as_u16();
        let mut bytes = Vec::new();
        loop {
            match answer.chunk().await {
                Ok(Some(more)) => bytes.extend_from_slice(&more),
                Ok(None) => return Some((status, bytes, true)),
                Err(_) => return Some((status, bytes, false)),
            }
        }
    }

    /// All bytes of a blob.
    async fn data(&self, blob: &str) -> Vec<u8> {
        let (status, bytes, whole) = self.try_data(blob).await.expect("an answer");
        assert!(
            status == 200 && whole,
            "blob {blob}: {status}: {}",
            String::from_utf8_lossy(&bytes[..bytes.len().min(200)])
        );
        bytes
    }

    /// The checksum of all bytes of a blob, which are not kept.
    async fn sum(&self, blob: &str) -> String {
        let url = format!("{}/blobs/{blob}/data", self.url);
        let mut answer = self.client.get(url).bearer_auth(&self.token).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        let mut sum = Context::new(&SHA512);
        while let Some(bytes) = answer.chunk().await.unwrap() {
            sum.update(&bytes);
        }
        hex(sum.finish().as_ref())
    }

    /// Whether an object has an event with this message.
    async fn has_event(&self, object: &str, message: &str) -> bool {
        let events = self.get(&format!("{object}/events?limit=1000")).await;
        events.as_array().unwrap().iter().any(|event| event["message"] == message)
    }
}

async fn answer_of(request: reqwest::RequestBuilder) -> Option<(u16, Value)> {
    let answer = request.send().await.ok()?;
    let status = answer.status().as_u16();
    let bytes = answer.bytes().await.ok()?;
    Some((status, serde_json::from_slice(&bytes).unwrap_or(Value::Null)))
}

fn text(record: &Value, key: &str) -> String {
    record[key].as_str().unwrap_or_else(|| panic!("no {key} in {record}")).to_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sha512(bytes: &[u8]) -> String {
    hex(digest(&SHA512, bytes).as_ref())
}

/// Numbers that look random. Seeded by the clock: what a test does with them is another thing each time.
#[derive(Debug)]
pub(crate) struct Dice(AtomicU64);

impl Dice {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self(AtomicU64::new(clock.subsec_nanos() as u64 ^ (clock.as_secs() << 32) ^ number))
    }

    /// A number below `most`.
    pub(crate) fn below(&self, most: u64) -> u64 {
        let state = self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        mixed(state) % most
    }
}

fn mixed(mut number: u64) -> u64 {
    number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// A content that no part of can be taken for another part, or for one of another number.
#[derive(Clone)]
struct Content {
    block: Arc<Vec<u8>>,
    /// Whether the block is all of it, not what is repeated with numbers.
    given: bool,
    size: u64,
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Content").field("size", &self.size).finish_non_exhaustive()
    }
}

impl Content {
    fn new(number: u64, size: u64) -> Self {
        let words = (0..MIB / 8).flat_map(|n| mixed(number.wrapping_mul(MIB) + n).to_le_bytes());
        Self { block: Arc::new(words.collect()), given: false, size }
    }

    /// Just these bytes.
    fn of(bytes: Vec<u8>) -> Self {
        Self { size: bytes.len() as u64, block: Arc::new(bytes), given: true }
    }

    fn part(&self, from: u64, to: u64) -> Vec<u8> {
        if self.given {
            return self.block[from as usize..to as usize].to_vec();
        }
        let mut bytes = Vec::with_capacity((to - from) as usize);
        let mut at = from;
        while at < to {
            let (block, within) = (at / MIB, at % MIB);
            let end = (within + (to - at)).min(MIB);
            let start = bytes.len();
            bytes.extend_from_slice(&self.block[within as usize..end as usize]);
            // Every block begins with its number.
            for (place, byte) in (0..8u64).zip(block.to_be_bytes()) {
                if (within..end).contains(&place) {
                    bytes[start + (place - within) as usize] = byte;
                }
            }
            at += end - within;
        }
        bytes
    }

    fn bytes(&self) -> Vec<u8> {
        self.part(0, self.size)
    }

    fn sum(&self) -> String {
        let mut sum = Context::new(&SHA512);
        for from in (0..self.size).step_by(MIB as usize) {
            sum.update(&self.part(from, (from + MIB).min(self.size)));
        }
        hex(sum.finish().as_ref())
    }
}

/// A disk image of a content; nothing without `qemu-img`.
fn qcow2(folder: &Path, content: &Content) -> Option<Vec<u8>> {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let (raw, image) = (folder.path().join("raw"), folder.path().join("qcow2"));
    std::fs::write(&raw, content.bytes()).unwrap();
    let made = Command::new("qemu-img")
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .args([&raw, &image])
        .status()
        .ok()?
        .success();
    assert!(made, "qemu-img failed");
    Some(std::fs::read(&image).unwrap())
}

fn gzip(folder: &Path, bytes: &[u8]) -> Vec<u8> {
    let file = tempfile::NamedTempFile::new_in(folder).unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let output = Command::new("gzip").arg("-c").arg(file.path()).output().unwrap();
    assert!(output.status.success());
    output.stdout
}

/// Where a node keeps a blob.
fn blob_file(storage: &Path, blob: &str) -> PathBuf {
    storage.join("blobs").join(&blob[..2]).join(blob)
}
