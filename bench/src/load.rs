//! A minimal load generator: keep-alive HTTP/1.1 on loopback.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// The timeout of a series of requests.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Returns the bytes of a request.
pub(crate) fn request(method: &str, path: &str, token: Option<&str>, body: Option<&Value>) -> Arc<[u8]> {
    let body = body.map(Value::to_string).unwrap_or_default();
    let mut text = format!("{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n");
    if let Some(token) = token {
        text += &format!("authorization: Bearer {token}\r\n");
    }
    if !body.is_empty() {
        text += &format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len());
    }
    text += "\r\n";
    text += &body;
    text.into_bytes().into()
}

/// A response of the server.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    /// Whether the body was sent with chunked transfer encoding.
    pub(crate) chunked: bool,
    pub(crate) body: Vec<u8>,
}

impl Response {
    /// Returns the body, or an error if the status is not 200.
    pub(crate) fn ok(self) -> anyhow::Result<Vec<u8>> {
        ensure!(self.status == 200, "status {}: {}", self.status, String::from_utf8_lossy(&self.body));
        Ok(self.body)
    }
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    /// Received bytes that are not consumed yet.
    buffer: Vec<u8>,
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: Vec::with_capacity(4096) })
    }

    pub(crate) async fn call(&mut self, request: &[u8]) -> anyhow::Result<Response> {
        self.stream.write_all(request).await?;
        let head = self.find_end(b"\r\n\r\n").await?;
        let head: Vec<u8> = self.buffer.drain(..head).collect();
        let head = std::str::from_utf8(&head)?.to_ascii_lowercase();
        let mut lines = head.lines();
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).context("no status")?.parse()?;
        let (mut length, mut chunked) = (0, false);
        for (name, value) in lines.filter_map(|line| line.split_once(": ")) {
            match name {
                "content-length" => length = value.parse()?,
                "transfer-encoding" => chunked = value == "chunked",
                _ => {}
            }
        }
        let body = if chunked { self.read_chunked().await? } else { self.read_exact(length).await? };
        Ok(Response { status, chunked, body })
    }

    async fn read_chunked(&mut self) -> anyhow::Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let line = self.find_end(b"\r\n").await?;
            let line: Vec<u8> = self.buffer.drain(..line).collect();
            let size = usize::from_str_radix(std::str::from_utf8(&line)?.trim(), 16)?;
            let chunk = self.read_exact(size + 2).await?;
            if size == 0 {
                return Ok(body);
            }
            body.extend_from_slice(&chunk[..size]);
        }
    }

    /// Returns the number of bytes up to and including `end`.
    async fn find_end(&mut self, end: &[u8]) -> anyhow::Result<usize> {
        loop {
            if let Some(at) = self.buffer.windows(end.len()).position(|window| window == end) {
                return Ok(at + end.len());
            }
            self.fill().await?;
        }
    }

    async fn read_exact(&mut self, length: usize) -> anyhow::Result<Vec<u8>> {
        while self.buffer.len() < length {
            self.fill().await?;
        }
        Ok(self.buffer.drain(..length).collect())
    }

    async fn fill(&mut self) -> anyhow::Result<()> {
        ensure!(self.stream.read_buf(&mut self.buffer).await? > 0, "the server closed the connection");
        Ok(())
    }
}

/// Sends one request on a new connection.
pub(crate) async fn call(address: SocketAddr, request: &[u8]) -> anyhow::Result<Response> {
    Connection::open(address).await?.call(request).await
}

/// A set of open connections.
#[derive(Debug)]
pub(crate) struct Pool(Vec<Connection>);

impl Pool {
    pub(crate) async fn open(address: SocketAddr, size: usize) -> anyhow::Result<Self> {
        let mut connections = Vec::with_capacity(size);
        for _ in 0..size {
            connections.push(Connection::open(address).await?);
        }
        Ok(Self(connections))
    }

    /// Sends `count` requests, `rate` per second or as fast as the server responds, and returns the elapsed time.
    /// Fails if a response is not 200.
    pub(crate) async fn run<R>(
        &mut self,
        count: usize,
        rate: Option<f64>,
        request: R,
    ) -> anyhow::Result<Duration>
    where
        R: Fn(usize) -> Arc<[u8]> + Send + Sync + 'static,
    {
        let (request, next, start) = (Arc::new(request), Arc::new(AtomicUsize::new(0)), Instant::now());
        let mut callers = JoinSet::new();
        for mut connection in self.0.drain(..) {
            let (request, next) = (Arc::clone(&request), Arc::clone(&next));
            callers.spawn(async move {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return anyhow::Ok(connection);
                    }
                    if let Some(rate) = rate {
                        #[expect(clippy::cast_precision_loss, reason = "a count of calls")]
                        let due = number as f64 / rate;
                        tokio::time::sleep_until(start + Duration::from_secs_f64(due)).await;
                    }
                    connection.call(&request(number)).await?.ok()?;
                }
            });
        }
        let finish = async {
            while let Some(caller) = callers.join_next().await {
                self.0.push(caller??);
            }
            anyhow::Ok(())
        };
        match tokio::time::timeout(TIMEOUT, finish).await {
            Ok(finished) => finished?,
            Err(_) => bail!("timed out after {TIMEOUT:?} with {count} requests"),
        }
        Ok(start.elapsed())
    }
}
