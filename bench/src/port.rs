//! A client for the port of a guest agent, without Muster in between.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use muster_agent::frame::{FrameDecoder, encode};
use muster_agent::{FEATURE_PIECES, MAX_CHUNK_SIZE, packet};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// The timeout for booting the guest, and for each reply.
const TIMEOUT: Duration = Duration::from_secs(300);
/// How often a booting guest is polled.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum length of a received frame.
const MAX_FRAME_LENGTH: usize = 1 << 20;
/// The maximum number of bytes in flight.
const WINDOW: u64 = 1 << 20;

/// A connection to an agent, with one request at a time.
#[derive(Debug)]
pub(crate) struct Port {
    stream: UnixStream,
    decoder: FrameDecoder,
    buffer: Vec<u8>,
    /// The number of the last request.
    last_request: u64,
}

impl Port {
    /// Connects, and waits until the guest is up.
    pub(crate) async fn open(path: &Path) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(path).await.with_context(|| path.display().to_string())?;
        let mut port = Self {
            stream,
            decoder: FrameDecoder::new(MAX_FRAME_LENGTH),
            buffer: Vec::new(),
            last_request: 0,
        };
        let began = Instant::now();
        loop {
            ensure!(began.elapsed() < TIMEOUT, "timed out waiting for the agent");
            let unique = port.request(json!({ "command": "is-system-running" })).await?;
            match timeout(POLL_INTERVAL, port.reply(unique)).await {
                Err(_) => {}
                Ok(reply) => {
                    let reply = reply?;
                    if reply["result"] == true {
                        let has_feature = reply["features"]
                            .as_array()
                            .is_some_and(|all| all.contains(&json!(FEATURE_PIECES)));
                        ensure!(has_feature, "the agent lacks the feature pieces: {reply}");
                        return Ok(port);
                    }
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
            }
        }
    }

    /// Sends a request and returns its number.
    async fn request(&mut self, mut packet: Value) -> anyhow::Result<u64> {
        self.last_request += 1;
        packet["unique"] = json!(self.last_request.to_string());
        self.send(&packet).await?;
        Ok(self.last_request)
    }

    async fn send(&mut self, packet: &Value) -> anyhow::Result<()> {
        Ok(self.stream.write_all(&encode(packet.to_string().as_bytes())).await?)
    }

    /// Returns the next reply to a request.
    async fn reply(&mut self, unique: u64) -> anyhow::Result<Value> {
        let unique = unique.to_string();
        loop {
            while let Some(frame) = self.decoder.next_frame() {
                let packet: Value = serde_json::from_slice(&frame)?;
                if packet["command"] == "ping" {
                    self.send(&json!({ "command": "pong", "unique": packet["unique"] })).await?;
                } else if packet["unique"] == json!(unique) {
                    ensure!(packet["command"] != "command-error", "the agent replied {packet}");
                    return Ok(packet);
                }
            }
            self.buffer.clear();
            self.buffer.reserve(MAX_CHUNK_SIZE);
            let read = timeout(TIMEOUT, self.stream.read_buf(&mut self.buffer)).await;
            ensure!(
                read.context("timed out waiting for a reply of the agent")?? > 0,
                "the agent closed the port"
            );
            self.decoder.feed(&self.buffer);
        }
    }

    /// Runs a command line, which must exit with 0.
    pub(crate) async fn execute(&mut self, line: &str) -> anyhow::Result<()> {
        let packet = json!({ "command": "execute", "command-line": line, "block-for-result": true });
        let unique = self.request(packet).await?;
        let reply = self.reply(unique).await?;
        ensure!(reply["return-code"] == 0, "{line}: {reply}");
        Ok(())
    }

    /// Writes a file.
    pub(crate) async fn put(&mut self, path: &str, content: &[u8]) -> anyhow::Result<()> {
        let stat = json!({ "mode": 0o644, "size": content.len() });
        let unique = self
            .request(json!({ "command": "put-file", "path": path, "stat_result": stat, "pieces": true }))
            .await?;
        let (mut offset, mut written) = (0, 0);
        for chunk in content.chunks(MAX_CHUNK_SIZE) {
            while offset - written >= WINDOW {
                written = self.reply(unique).await?["offset"]
                    .as_u64()
                    .context("the acknowledgement has no offset")?;
            }
            self.send(&json!({
                "command": "put-file", "path": path, "unique": unique.to_string(), "offset": offset,
                "encoding": "base64", "chunk": packet::encode_chunk(chunk),
            }))
            .await?;
            offset += chunk.len() as u64;
        }
        self.send(&json!({
            "command": "put-file", "path": path, "unique": unique.to_string(), "offset": offset, "chunk": null,
        }))
        .await?;
        while !self.reply(unique).await?["offset"].is_null() {}
        Ok(())
    }

    /// Reads a file and returns its size.
    pub(crate) async fn get(&mut self, path: &str) -> anyhow::Result<u64> {
        let unique = self.request(json!({ "command": "get-file", "path": path, "window": WINDOW })).await?;
        let mut read = 0;
        loop {
            let reply = self.reply(unique).await?;
            ensure!(reply["result"] != false, "the agent replied {reply}");
            match reply.get("chunk") {
                // The first reply has only `stat_result`.
                None => {}
                Some(Value::Null) => return Ok(read),
                Some(Value::String(chunk)) => {
                    read += BASE64.decode(chunk)?.len() as u64;
                    let more =
                        json!({ "command": "get-file-more", "unique": unique.to_string(), "offset": read });
                    self.send(&more).await?;
                }
                Some(other) => bail!("unexpected chunk: {other}"),
            }
        }
    }
}
