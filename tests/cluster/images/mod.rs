//! Images and blobs on real daemons: uploads, fetches, conversions, damage, full disks and crashes.

mod disk_failures;
mod kill;
mod multi_node;
mod publish;
mod released_client;
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

/// One MiB, which is also the size of the chunks that nodes verify.
const MIB: u64 = 1 << 20;

/// A client of the API that can be used across restarts of the daemon.
#[derive(Debug, Clone)]
struct Client {
    url: String,
    token: String,
    http: reqwest::Client,
}

impl Client {
    async fn new(daemon: &Daemon, key: &str) -> Self {
        let token = daemon.log_in("system", key).await;
        let http = reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap();
        Self { url: daemon.url.clone(), token, http }
    }

    /// Returns the same client for another daemon of the cluster.
    fn at(&self, daemon: &Daemon) -> Self {
        Self { url: daemon.url.clone(), ..self.clone() }
    }

    /// Returns status and body, or `None` without a response.
    async fn try_call(&self, method: Method, path: &str, body: Option<Value>) -> Option<(u16, Value)> {
        let mut request = self.http.request(method, format!("{}{path}", self.url)).bearer_auth(&self.token);
        if let Some(body) = body {
            request = request.json(&body);
        }
        response_of(request).await
    }

    async fn call(&self, method: Method, path: &str, body: Option<Value>) -> (u16, Value) {
        self.try_call(method, path, body).await.expect("a response")
    }

    /// Gets an object that must exist.
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

    /// Appends bytes to an upload whose size must be `at`.
    async fn try_send(&self, upload: &str, at: u64, bytes: Vec<u8>) -> Option<(u16, Value)> {
        let url = format!("{}/upload/{upload}?offset={at}", self.url);
        response_of(self.http.post(url).bearer_auth(&self.token).body(bytes)).await
    }

    async fn send(&self, upload: &str, at: u64, bytes: Vec<u8>) -> (u16, Value) {
        self.try_send(upload, at, bytes).await.expect("a response")
    }

    /// Uploads a new version of an artifact and returns the record of the artifact.
    async fn upload(&self, name: &str, kind: &str, bytes: &[u8]) -> Value {
        let upload = text(&self.post("/upload", json!({})).await, "uuid");
        let (status, size) = self.send(&upload, 0, bytes.to_vec()).await;
        assert_eq!((status, size), (200, json!(bytes.len())));
        let body = json!({"upload_uuid": upload, "artifact_type": kind});
        self.post(&format!("/artifacts/upload/{name}"), body).await
    }

    /// Returns the status, the received bytes of a blob and whether they are complete, or `None` without a response.
    async fn try_data(&self, blob: &str) -> Option<(u16, Vec<u8>, bool)> {
        let url = format!("{}/blobs/{blob}/data", self.url);
        let mut response = self.http.get(url).bearer_auth(&self.token).send().await.ok()?;
        let status = response.status().as_u16();
        let mut bytes = Vec::new();
        loop {
            match response.chunk().await {
                Ok(Some(more)) => bytes.extend_from_slice(&more),
                Ok(None) => return Some((status, bytes, true)),
                Err(_) => return Some((status, bytes, false)),
            }
        }
    }

    /// Returns all bytes of a blob.
    async fn data(&self, blob: &str) -> Vec<u8> {
        let (status, bytes, complete) = self.try_data(blob).await.expect("a response");
        assert!(
            status == 200 && complete,
            "blob {blob}: {status}: {}",
            String::from_utf8_lossy(&bytes[..bytes.len().min(200)])
        );
        bytes
    }

    /// Downloads a blob and returns its checksum, without keeping the bytes in memory.
    async fn checksum(&self, blob: &str) -> String {
        let url = format!("{}/blobs/{blob}/data", self.url);
        let mut response = self.http.get(url).bearer_auth(&self.token).send().await.unwrap();
        assert_eq!(response.status(), 200);
        let mut checksum = Context::new(&SHA512);
        while let Some(bytes) = response.chunk().await.unwrap() {
            checksum.update(&bytes);
        }
        hex(checksum.finish().as_ref())
    }

    /// Returns whether an object has an event with this message.
    async fn has_event(&self, object: &str, message: &str) -> bool {
        let events = self.get(&format!("{object}/events?limit=1000")).await;
        events.as_array().unwrap().iter().any(|event| event["message"] == message)
    }
}

async fn response_of(request: reqwest::RequestBuilder) -> Option<(u16, Value)> {
    let response = request.send().await.ok()?;
    let status = response.status().as_u16();
    let bytes = response.bytes().await.ok()?;
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

/// A pseudorandom number generator, seeded by the clock.
#[derive(Debug)]
pub(crate) struct Random(AtomicU64);

impl Random {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self(AtomicU64::new(clock.subsec_nanos() as u64 ^ (clock.as_secs() << 32) ^ number))
    }

    /// Returns a number below `limit`.
    pub(crate) fn below(&self, limit: u64) -> u64 {
        let state = self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        mix(state) % limit
    }
}

fn mix(mut number: u64) -> u64 {
    number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// Generated content whose blocks all differ, also from those of contents with other numbers.
#[derive(Clone)]
struct Content {
    block: Arc<Vec<u8>>,
    /// Whether the block is the complete content instead of being repeated with block numbers.
    is_literal: bool,
    size: u64,
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Content").field("size", &self.size).finish_non_exhaustive()
    }
}

impl Content {
    fn new(number: u64, size: u64) -> Self {
        let words = (0..MIB / 8).flat_map(|n| mix(number.wrapping_mul(MIB) + n).to_le_bytes());
        Self { block: Arc::new(words.collect()), is_literal: false, size }
    }

    /// Creates a content of these bytes.
    fn of(bytes: Vec<u8>) -> Self {
        Self { size: bytes.len() as u64, block: Arc::new(bytes), is_literal: true }
    }

    fn part(&self, from: u64, to: u64) -> Vec<u8> {
        if self.is_literal {
            return self.block[from as usize..to as usize].to_vec();
        }
        let mut bytes = Vec::with_capacity((to - from) as usize);
        let mut at = from;
        while at < to {
            let (block, within) = (at / MIB, at % MIB);
            let end = (within + (to - at)).min(MIB);
            let start = bytes.len();
            bytes.extend_from_slice(&self.block[within as usize..end as usize]);
            // Every block starts with its number.
            for (offset, byte) in (0..8u64).zip(block.to_be_bytes()) {
                if (within..end).contains(&offset) {
                    bytes[start + (offset - within) as usize] = byte;
                }
            }
            at += end - within;
        }
        bytes
    }

    fn bytes(&self) -> Vec<u8> {
        self.part(0, self.size)
    }

    fn checksum(&self) -> String {
        let mut checksum = Context::new(&SHA512);
        for from in (0..self.size).step_by(MIB as usize) {
            checksum.update(&self.part(from, (from + MIB).min(self.size)));
        }
        hex(checksum.finish().as_ref())
    }
}

/// Returns a disk image of a content, or `None` without `qemu-img`.
fn qcow2(directory: &Path, content: &Content) -> Option<Vec<u8>> {
    let directory = tempfile::tempdir_in(directory).unwrap();
    let (raw, image) = (directory.path().join("raw"), directory.path().join("qcow2"));
    std::fs::write(&raw, content.bytes()).unwrap();
    let converted = Command::new("qemu-img")
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .args([&raw, &image])
        .status()
        .ok()?
        .success();
    assert!(converted, "qemu-img failed");
    Some(std::fs::read(&image).unwrap())
}

fn gzip(directory: &Path, bytes: &[u8]) -> Vec<u8> {
    let file = tempfile::NamedTempFile::new_in(directory).unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let output = Command::new("gzip").arg("-c").arg(file.path()).output().unwrap();
    assert!(output.status.success());
    output.stdout
}

/// Returns the path of a blob in the storage of a node.
fn blob_file(storage: &Path, blob: &str) -> PathBuf {
    storage.join("blobs").join(&blob[..2]).join(blob)
}
