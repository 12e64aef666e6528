//! The host of one agent: the other end of its port, which is a socket here.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use muster_agent::MAX_CHUNK_SIZE;
use muster_agent::frame::{self, FrameDecoder};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

/// How long a test waits for anything.
const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct Host {
    pub(crate) directory: TempDir,
    listener: UnixListener,
    pub(crate) stream: UnixStream,
    decoder: FrameDecoder,
    agent: Child,
    number: u64,
    /// Packets that arrived while the test waited for another one.
    pending: VecDeque<Value>,
}

impl Host {
    /// Starts an agent and waits for its `agent-start`.
    pub(crate) fn new() -> Self {
        let directory = TempDir::new().unwrap();
        let listener = UnixListener::bind(directory.path().join("port")).unwrap();
        let agent = start_agent(&directory);
        let (stream, _) = listener.accept().unwrap();
        let mut host = Self {
            directory,
            listener,
            stream,
            decoder: FrameDecoder::new(100 << 20),
            agent,
            number: 0,
            pending: VecDeque::new(),
        };
        host.expect_start();
        host
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn path_text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    pub(crate) fn expect_start(&mut self) {
        let start = self.receive();
        assert_eq!(start["command"], "agent-start", "{start}");
        assert_eq!(start["message"], "version 1.1.0");
        assert_eq!(start["features"], json!(["memory", "pieces", "terminal"]));
        assert!(start["system_boot_time"].as_f64().unwrap() > 1e9);
        assert!(!start["boot-id"].as_str().unwrap().is_empty());
    }

    /// Closes the connection and accepts the next one.
    pub(crate) fn reconnect(&mut self) {
        self.stream.shutdown(std::net::Shutdown::Both).unwrap();
        self.accept();
    }

    fn accept(&mut self) {
        self.stream = self.listener.accept().unwrap().0;
        self.decoder = FrameDecoder::new(100 << 20);
        self.pending.clear();
        self.expect_start();
    }

    /// Kills the agent and starts another one.
    pub(crate) fn restart_agent(&mut self) {
        self.agent.kill().unwrap();
        self.agent.wait().unwrap();
        self.agent = start_agent(&self.directory);
        self.accept();
    }

    /// Sends SIGTERM to the agent and returns its exit code.
    pub(crate) fn stop_agent(&mut self) -> Option<i32> {
        kill(Pid::from_raw(i32::try_from(self.agent.id()).unwrap()), Signal::SIGTERM).unwrap();
        self.agent.wait().unwrap().code()
    }

    pub(crate) fn agent_id(&self) -> u32 {
        self.agent.id()
    }

    /// Returns the resident memory of the agent in KiB.
    pub(crate) fn agent_memory_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.agent.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    pub(crate) fn send(&mut self, packet: &Value) {
        self.stream.write_all(&frame::encode(packet.to_string().as_bytes())).unwrap();
    }

    /// Sends a packet with a new `unique` and returns the `unique`.
    pub(crate) fn request(&mut self, mut packet: Value) -> Value {
        self.number += 1;
        packet["unique"] = json!(format!("request-{}", self.number));
        self.send(&packet);
        packet["unique"].clone()
    }

    /// Returns the next packet.
    pub(crate) fn receive(&mut self) -> Value {
        if let Some(packet) = self.pending.pop_front() {
            return packet;
        }
        self.receive_new().expect("the agent closed the connection")
    }

    fn receive_new(&mut self) -> Option<Value> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            if let Some(body) = self.decoder.next_frame() {
                return Some(serde_json::from_slice(&body).unwrap());
            }
            self.stream.set_read_timeout(Some(TIMEOUT)).unwrap();
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(count) => self.decoder.feed(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => panic!("no packet arrived: {error}"),
            }
        }
    }

    /// Returns all packets until the agent closes the connection.
    pub(crate) fn receive_all(&mut self) -> Vec<Value> {
        let mut all: Vec<_> = self.pending.drain(..).collect();
        all.extend(std::iter::from_fn(|| self.receive_new()));
        all
    }

    /// Returns the next packet with this `unique` and keeps the others.
    pub(crate) fn reply(&mut self, unique: &Value) -> Value {
        if let Some(index) = self.pending.iter().position(|packet| packet["unique"] == *unique) {
            return self.pending.remove(index).unwrap();
        }
        loop {
            let packet = self.receive_new().expect("the agent closed the connection");
            if packet["unique"] == *unique {
                return packet;
            }
            self.pending.push_back(packet);
        }
    }

    /// Sends a request and returns its reply.
    pub(crate) fn call(&mut self, packet: Value) -> Value {
        let unique = self.request(packet);
        self.reply(&unique)
    }

    pub(crate) fn execute(&mut self, line: &str) -> Value {
        self.call(json!({ "command": "execute", "command-line": line, "block-for-result": true }))
    }

    pub(crate) fn execute_keyed(&mut self, key: &str, line: &str, again: bool) -> Value {
        self.call(json!({ "command": "execute", "command-line": line, "key": key, "again": again }))
    }

    /// Returns the whole output of a command with a key.
    pub(crate) fn output(&mut self, key: &str, name: &str) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let request = json!({
                "command": "read-output", "key": key, "name": name, "offset": all.len(), "length": 65536,
            });
            let reply = self.call(request);
            assert_eq!(reply["command"], "read-output-response", "{reply}");
            let bytes = decode(&reply["chunk"]);
            if bytes.is_empty() {
                return all;
            }
            all.extend(bytes);
        }
    }

    /// Puts a file in chunks of the maximum size and returns the last reply.
    pub(crate) fn put(&mut self, path: &str, bytes: &[u8]) -> Value {
        self.put_with_stat(path, &json!({}), bytes)
    }

    /// Like [`Self::put`], with a `stat_result`.
    pub(crate) fn put_with_stat(&mut self, path: &str, stat: &Value, bytes: &[u8]) -> Value {
        let unique = self.request(json!({
            "command": "put-file", "path": path, "stat_result": stat, "pieces": true,
        }));
        let mut sent = 0;
        for chunk in bytes.chunks(MAX_CHUNK_SIZE) {
            self.send(&chunk_packet(&unique, path, sent, Some(chunk)));
            sent += chunk.len();
            let reply = self.reply(&unique);
            if reply["offset"] != sent {
                return reply;
            }
        }
        self.send(&chunk_packet(&unique, path, sent, None));
        self.reply(&unique)
    }

    /// Puts a file as hosts without the feature `pieces` do.
    pub(crate) fn put_plain(&mut self, path: &str, mode: u32, bytes: &[u8]) -> Value {
        let unique = self.request(json!({
            "command": "put-file", "path": path, "stat_result": { "mode": mode, "size": bytes.len() },
        }));
        let mut sent = 0;
        for chunk in bytes.chunks(1024) {
            self.send(&chunk_packet(&unique, path, sent, Some(chunk)));
            sent += chunk.len();
        }
        self.send(&chunk_packet(&unique, path, sent, None));
        self.reply(&unique)
    }

    /// Gets a file: its `stat_result` and content, or the reply with the error.
    pub(crate) fn get(&mut self, path: &str, window: Option<u64>) -> Result<(Value, Vec<u8>), Value> {
        let mut request = json!({ "command": "get-file", "path": path });
        if let Some(window) = window {
            request["window"] = json!(window);
        }
        let unique = self.request(request);
        let first = self.reply(&unique);
        if first["result"] == false {
            return Err(first);
        }
        let mut bytes = Vec::new();
        loop {
            let reply = self.reply(&unique);
            if reply["result"] == false {
                return Err(reply);
            }
            assert_eq!(reply["offset"], bytes.len(), "{reply}");
            if reply["chunk"].is_null() {
                return Ok((first["stat_result"].clone(), bytes));
            }
            let chunk = decode(&reply["chunk"]);
            assert!(chunk.len() <= if window.is_some() { MAX_CHUNK_SIZE } else { 1024 });
            bytes.extend(chunk);
            if window.is_some() {
                self.send(&json!({ "command": "get-file-more", "unique": unique, "offset": bytes.len() }));
            }
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        _ = self.agent.kill();
        _ = self.agent.wait();
    }
}

fn start_agent(directory: &TempDir) -> Child {
    Command::new(env!("CARGO_BIN_EXE_muster-agent"))
        .arg("--port")
        .arg(directory.path().join("port"))
        .arg("--spool")
        .arg(directory.path().join("spool"))
        .spawn()
        .unwrap()
}

pub(crate) fn chunk_packet(unique: &Value, path: &str, offset: usize, bytes: Option<&[u8]>) -> Value {
    let chunk = bytes.map(|bytes| BASE64.encode(bytes));
    json!({
        "command": "put-file", "unique": unique, "path": path,
        "offset": offset, "encoding": "base64", "chunk": chunk,
    })
}

pub(crate) fn decode(chunk: &Value) -> Vec<u8> {
    BASE64.decode(chunk.as_str().unwrap()).unwrap()
}

/// Returns pseudo-random bytes.
pub(crate) fn random_bytes(length: usize) -> Vec<u8> {
    let mut state = 7u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// Polls a condition until it is true.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting until {what}");
        _ = nix::poll::poll(&mut [], 10u8);
    }
}

/// Returns whether a process runs.
pub(crate) fn is_alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z")
}
