//! A host for one agent: the other end of its port, which is a socket here.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use muster_agent::frame::{self, Frames};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

/// The longest that anything may take.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Host {
    pub(crate) folder: TempDir,
    listener: UnixListener,
    pub(crate) stream: UnixStream,
    frames: Frames,
    agent: Child,
    number: u64,
    /// Packets that came while another one was waited for.
    others: VecDeque<Value>,
}

impl Host {
    /// Starts an agent, which says that it has started.
    pub(crate) fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let listener = UnixListener::bind(folder.path().join("port")).unwrap();
        let agent = run(&folder);
        let (stream, _) = listener.accept().unwrap();
        let mut host = Self {
            folder,
            listener,
            stream,
            frames: Frames::new(100 << 20),
            agent,
            number: 0,
            others: VecDeque::new(),
        };
        host.expect_start();
        host
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn path_text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    pub(crate) fn expect_start(&mut self) {
        let start = self.receive();
        assert_eq!(start["command"], "agent-start", "{start}");
        assert_eq!(start["message"], "version 1.0.0");
        assert_eq!(start["features"], json!(["memory", "pieces"]));
        assert!(start["system_boot_time"].as_f64().unwrap() > 1e9);
        assert!(!start["boot-id"].as_str().unwrap().is_empty());
    }

    /// Goes away and comes back.
    pub(crate) fn reconnect(&mut self) {
        self.stream.shutdown(std::net::Shutdown::Both).unwrap();
        self.accept();
    }

    fn accept(&mut self) {
        self.stream = self.listener.accept().unwrap().0;
        self.frames = Frames::new(100 << 20);
        self.others.clear();
        self.expect_start();
    }

    /// Kills the agent and starts another one.
    pub(crate) fn restart_agent(&mut self) {
        self.agent.kill().unwrap();
        self.agent.wait().unwrap();
        self.agent = run(&self.folder);
        self.accept();
    }

    /// Asks the agent to end, and returns how it did.
    pub(crate) fn stop_agent(&mut self) -> Option<i32> {
        kill(Pid::from_raw(i32::try_from(self.agent.id()).unwrap()), Signal::SIGTERM).unwrap();
        self.agent.wait().unwrap().code()
    }

    pub(crate) fn agent_id(&self) -> u32 {
        self.agent.id()
    }

    /// Kilobytes of memory that the agent uses.
    pub(crate) fn agent_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.agent.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    pub(crate) fn send(&mut self, packet: &Value) {
        self.stream.write_all(&frame::encode(packet.to_string().as_bytes())).unwrap();
    }

    /// Sends with a `unique` of its own, and returns that.
    pub(crate) fn request(&mut self, mut packet: Value) -> Value {
        self.number += 1;
        packet["unique"] = json!(format!("request-{}", self.number));
        self.send(&packet);
        packet["unique"].clone()
    }

    /// The next packet.
    pub(crate) fn receive(&mut self) -> Value {
        if let Some(packet) = self.others.pop_front() {
            return packet;
        }
        self.receive_new().expect("the agent hung up")
    }

    fn receive_new(&mut self) -> Option<Value> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            if let Some(body) = self.frames.next_frame() {
                return Some(serde_json::from_slice(&body).unwrap());
            }
            self.stream.set_read_timeout(Some(PATIENCE)).unwrap();
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(count) => self.frames.feed(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => panic!("nothing comes: {error}"),
            }
        }
    }

    /// What comes until the agent hangs up.
    pub(crate) fn rest(&mut self) -> Vec<Value> {
        let mut all: Vec<_> = self.others.drain(..).collect();
        all.extend(std::iter::from_fn(|| self.receive_new()));
        all
    }

    /// The next packet with this `unique`; others are kept.
    pub(crate) fn reply(&mut self, unique: &Value) -> Value {
        if let Some(index) = self.others.iter().position(|packet| packet["unique"] == *unique) {
            return self.others.remove(index).unwrap();
        }
        loop {
            let packet = self.receive_new().expect("the agent hung up");
            if packet["unique"] == *unique {
                return packet;
            }
            self.others.push_back(packet);
        }
    }

    pub(crate) fn ask(&mut self, packet: Value) -> Value {
        let unique = self.request(packet);
        self.reply(&unique)
    }

    pub(crate) fn execute(&mut self, line: &str) -> Value {
        self.ask(json!({ "command": "execute", "command-line": line, "block-for-result": true }))
    }

    pub(crate) fn execute_key(&mut self, key: &str, line: &str, again: bool) -> Value {
        self.ask(json!({ "command": "execute", "command-line": line, "key": key, "again": again }))
    }

    /// All that a command with a key wrote.
    pub(crate) fn output(&mut self, key: &str, name: &str) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let request = json!({
                "command": "read-output", "key": key, "name": name, "offset": all.len(), "length": 65536,
            });
            let reply = self.ask(request);
            assert_eq!(reply["command"], "read-output-response", "{reply}");
            let bytes = decode(&reply["chunk"]);
            if bytes.is_empty() {
                return all;
            }
            all.extend(bytes);
        }
    }

    /// Puts a file in pieces as large as they may be, and returns the last answer.
    pub(crate) fn put(&mut self, path: &str, bytes: &[u8]) -> Value {
        self.put_as(path, &json!({}), bytes)
    }

    /// The same, with what is said of the file.
    pub(crate) fn put_as(&mut self, path: &str, stat: &Value, bytes: &[u8]) -> Value {
        let unique = self.request(json!({
            "command": "put-file", "path": path, "stat_result": stat, "pieces": true,
        }));
        let mut sent = 0;
        for piece in bytes.chunks(muster_agent::PIECE) {
            self.send(&part(&unique, path, sent, Some(piece)));
            sent += piece.len();
            let reply = self.reply(&unique);
            if reply["offset"] != sent {
                return reply;
            }
        }
        self.send(&part(&unique, path, sent, None));
        self.reply(&unique)
    }

    /// Puts a file as hosts do that know no larger pieces.
    pub(crate) fn put_plain(&mut self, path: &str, mode: u32, bytes: &[u8]) -> Value {
        let unique = self.request(json!({
            "command": "put-file", "path": path, "stat_result": { "mode": mode, "size": bytes.len() },
        }));
        let mut sent = 0;
        for piece in bytes.chunks(1024) {
            self.send(&part(&unique, path, sent, Some(piece)));
            sent += piece.len();
        }
        self.send(&part(&unique, path, sent, None));
        self.reply(&unique)
    }

    /// Gets a file: what is said of it, and its bytes; or the answer that refuses it.
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
            let piece = decode(&reply["chunk"]);
            assert!(piece.len() <= if window.is_some() { muster_agent::PIECE } else { 1024 });
            bytes.extend(piece);
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

fn run(folder: &TempDir) -> Child {
    Command::new(env!("CARGO_BIN_EXE_muster-agent"))
        .arg("--port")
        .arg(folder.path().join("port"))
        .arg("--spool")
        .arg(folder.path().join("spool"))
        .spawn()
        .unwrap()
}

pub(crate) fn part(unique: &Value, path: &str, offset: usize, bytes: Option<&[u8]>) -> Value {
    let chunk = bytes.map(|bytes| BASE64.encode(bytes));
    json!({
        "command": "put-file", "unique": unique, "path": path,
        "offset": offset, "encoding": "base64", "chunk": chunk,
    })
}

pub(crate) fn decode(chunk: &Value) -> Vec<u8> {
    BASE64.decode(chunk.as_str().unwrap()).unwrap()
}

/// Bytes that are not all the same.
pub(crate) fn noise(length: usize) -> Vec<u8> {
    let mut state = 7u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// Waits until something is so.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "still not: {what}");
        _ = nix::poll::poll(&mut [], 10u8);
    }
}

/// Whether a process lives.
pub(crate) fn is_alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z")
}
