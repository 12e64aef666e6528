//! An HTTP server whose responses a test controls: they can stall, be truncated, be wrong, and differ per request.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// The number of chunks of a slow body.
const SLOW_BODY_CHUNKS: usize = 40;

/// A request that the server received.
#[derive(Debug, Clone)]
pub struct ReceivedRequest {
    pub path: String,
    head: String,
    pub body: Vec<u8>,
}

impl ReceivedRequest {
    /// Returns the value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        let name = format!("{}:", name.to_lowercase());
        self.head
            .lines()
            .find(|line| line.to_lowercase().starts_with(&name))
            .map(|line| line[name.len()..].trim())
    }

    /// Returns the first byte of the requested range.
    pub fn range_start(&self) -> Option<usize> {
        self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// A response. With status 0 the server sends nothing and waits until the client disconnects.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Disconnects after this many bytes of the body.
    pub cut: Option<usize>,
    /// Keeps the connection open after the body until the client disconnects.
    pub stall: bool,
    /// Omits `Content-Length`.
    pub without_length: bool,
    /// The time over which the body is sent.
    pub slow: Option<Duration>,
}

impl Reply {
    pub fn ok(body: &[u8]) -> Self {
        Self { status: 200, body: body.to_vec(), ..Self::default() }
    }

    pub fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Returns a partial response with the content from `start` on.
    pub fn part(content: &[u8], start: usize) -> Self {
        let last = content.len() - 1;
        let range = format!("bytes {start}-{last}/{}", content.len());
        Self { status: 206, ..Self::ok(&content[start..]) }.with("Content-Range", &range)
    }

    pub fn cut(mut self, after: usize) -> Self {
        self.cut = Some(after);
        self
    }

    pub fn slow(mut self, time: Duration) -> Self {
        self.slow = Some(time);
        self
    }
}

/// Computes the response to a request; the number is how many requests came before it.
pub type RequestHandler = Box<dyn FnMut(&ReceivedRequest, usize) -> Reply + Send>;

/// A running server. It ends with the test's runtime.
#[derive(Debug)]
pub struct WebServer {
    pub address: SocketAddr,
    requests: Arc<Mutex<Vec<ReceivedRequest>>>,
}

impl WebServer {
    /// Starts a server. See [`RequestHandler`].
    pub async fn new(handler: impl FnMut(&ReceivedRequest, usize) -> Reply + Send + 'static) -> Self {
        Self::at("127.0.0.1", handler).await
    }

    /// Like [`new`](Self::new), on an address of this host that other hosts reach.
    pub async fn at(
        address: &str,
        handler: impl FnMut(&ReceivedRequest, usize) -> Reply + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind((address, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let requests: Arc<Mutex<Vec<ReceivedRequest>>> = Arc::default();
        let handler: Arc<Mutex<RequestHandler>> = Arc::new(Mutex::new(Box::new(handler)));
        let received = Arc::clone(&requests);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&handler), Arc::clone(&received)));
            }
        });
        Self { address, requests }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Returns the requests received so far.
    pub fn requests(&self) -> Vec<ReceivedRequest> {
        self.requests.lock().expect("not poisoned").clone()
    }
}

async fn serve(
    mut stream: TcpStream,
    handler: Arc<Mutex<RequestHandler>>,
    received: Arc<Mutex<Vec<ReceivedRequest>>>,
) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        match stream.read(&mut byte).await {
            Ok(1) => head.push(byte[0]),
            _ => return,
        }
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let path = head.split_whitespace().nth(1).unwrap_or("/").to_owned();
    let mut request = ReceivedRequest { path, head, body: vec![] };
    let length = request.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    request.body.resize(length, 0);
    if stream.read_exact(&mut request.body).await.is_err() {
        return;
    }
    let reply = {
        let mut received = received.lock().expect("not poisoned");
        let reply = handler.lock().expect("not poisoned")(&request, received.len());
        received.push(request);
        reply
    };
    if reply.status == 0 {
        let _ = stream.read(&mut [0]).await;
        return;
    }
    let mut text = format!("HTTP/1.1 {} Status\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    let has_length = reply.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    if !reply.without_length && !has_length && reply.status != 304 {
        text.push_str(&format!("Content-Length: {}\r\n", reply.body.len()));
    }
    text.push_str("\r\n");
    let _ = stream.write_all(text.as_bytes()).await;
    let sent = reply.cut.unwrap_or(reply.body.len()).min(reply.body.len());
    match reply.slow {
        None => drop(stream.write_all(&reply.body[..sent]).await),
        Some(time) => {
            for chunk in reply.body[..sent].chunks(sent.div_ceil(SLOW_BODY_CHUNKS).max(1)) {
                tokio::time::sleep(time / SLOW_BODY_CHUNKS as u32).await;
                if stream.write_all(chunk).await.is_err() {
                    return;
                }
            }
        }
    }
    let _ = stream.flush().await;
    if reply.stall {
        let _ = stream.read(&mut [0]).await;
    }
    let _ = stream.shutdown().await;
}
