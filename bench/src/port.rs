//! The agent of a guest without us: its port, spoken with directly.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use muster_agent::frame::{Frames, encode};
use muster_agent::{PIECE, PIECES, packet};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// How long a guest may take to boot, and to answer.
const PATIENCE: Duration = Duration::from_secs(300);
/// Between two questions whether a guest is up.
const LOOK: Duration = Duration::from_secs(1);
/// The longest frame that is read.
const LONGEST: usize = 1 << 20;
/// Bytes of a file that may be under way.
const WINDOW: u64 = 1 << 20;

/// A connection to an agent, of which one thing is asked at a time.
#[derive(Debug)]
pub(crate) struct Port {
    stream: UnixStream,
    frames: Frames,
    buffer: Vec<u8>,
    /// The number of the last request.
    last: u64,
}

impl Port {
    /// Connects, and waits until the guest is up.
    pub(crate) async fn open(path: &Path) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(path).await.with_context(|| path.display().to_string())?;
        let mut port = Self { stream, frames: Frames::new(LONGEST), buffer: Vec::new(), last: 0 };
        let began = Instant::now();
        loop {
            ensure!(began.elapsed() < PATIENCE, "the agent is not ready in time");
            let unique = port.ask(json!({ "command": "is-system-running" })).await?;
            match timeout(LOOK, port.answer(unique)).await {
                Err(_) => {}
                Ok(answer) => {
                    let answer = answer?;
                    if answer["result"] == true {
                        let able =
                            answer["features"].as_array().is_some_and(|all| all.contains(&json!(PIECES)));
                        ensure!(able, "the agent does not move files in pieces: {answer}");
                        return Ok(port);
                    }
                    tokio::time::sleep(LOOK).await;
                }
            }
        }
    }

    /// Sends a request, and answers its number.
    async fn ask(&mut self, mut packet: Value) -> anyhow::Result<u64> {
        self.last += 1;
        packet["unique"] = json!(self.last.to_string());
        self.say(&packet).await?;
        Ok(self.last)
    }

    async fn say(&mut self, packet: &Value) -> anyhow::Result<()> {
        Ok(self.stream.write_all(&encode(packet.to_string().as_bytes())).await?)
    }

    /// The next answer to a request.
    async fn answer(&mut self, unique: u64) -> anyhow::Result<Value> {
        let unique = unique.to_string();
        loop {
            while let Some(frame) = self.frames.next_frame() {
                let packet: Value = serde_json::from_slice(&frame)?;
                if packet["command"] == "ping" {
                    self.say(&json!({ "command": "pong", "unique": packet["unique"] })).await?;
                } else if packet["unique"] == json!(unique) {
                    ensure!(packet["command"] != "command-error", "the agent said {packet}");
                    return Ok(packet);
                }
            }
            self.buffer.clear();
            self.buffer.reserve(PIECE);
            let read = timeout(PATIENCE, self.stream.read_buf(&mut self.buffer)).await;
            ensure!(read.context("the agent is silent")?? > 0, "the port was closed");
            self.frames.feed(&self.buffer);
        }
    }

    /// Runs a command line, which must end well.
    pub(crate) async fn execute(&mut self, line: &str) -> anyhow::Result<()> {
        let packet = json!({ "command": "execute", "command-line": line, "block-for-result": true });
        let unique = self.ask(packet).await?;
        let answer = self.answer(unique).await?;
        ensure!(answer["return-code"] == 0, "{line}: {answer}");
        Ok(())
    }

    /// Writes a file.
    pub(crate) async fn put(&mut self, path: &str, content: &[u8]) -> anyhow::Result<()> {
        let facts = json!({ "mode": 0o644, "size": content.len() });
        let unique = self
            .ask(json!({ "command": "put-file", "path": path, "stat_result": facts, "pieces": true }))
            .await?;
        let (mut offset, mut written) = (0, 0);
        for piece in content.chunks(PIECE) {
            while offset - written >= WINDOW {
                written = self.answer(unique).await?["offset"].as_u64().context("the file ended early")?;
            }
            self.say(&json!({
                "command": "put-file", "path": path, "unique": unique.to_string(), "offset": offset,
                "encoding": "base64", "chunk": packet::chunk(piece),
            }))
            .await?;
            offset += piece.len() as u64;
        }
        self.say(&json!({
            "command": "put-file", "path": path, "unique": unique.to_string(), "offset": offset, "chunk": null,
        }))
        .await?;
        while !self.answer(unique).await?["offset"].is_null() {}
        Ok(())
    }

    /// Reads a file, and answers how long it is.
    pub(crate) async fn get(&mut self, path: &str) -> anyhow::Result<u64> {
        let unique = self.ask(json!({ "command": "get-file", "path": path, "window": WINDOW })).await?;
        let mut read = 0;
        loop {
            let answer = self.answer(unique).await?;
            ensure!(answer["result"] != false, "the agent said {answer}");
            match answer.get("chunk") {
                // The first one only has facts.
                None => {}
                Some(Value::Null) => return Ok(read),
                Some(Value::String(chunk)) => {
                    read += BASE64.decode(chunk)?.len() as u64;
                    let more =
                        json!({ "command": "get-file-more", "unique": unique.to_string(), "offset": read });
                    self.say(&more).await?;
                }
                Some(other) => bail!("a chunk is {other}"),
            }
        }
    }
}
