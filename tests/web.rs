//! A web server under the test's control, which can stall, break off, lie and change its mind.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// In how many pieces a slow body comes.
const PIECES: usize = 40;

/// What a client asked.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) path: String,
    head: String,
}

impl Asked {
    /// A header's value.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let name = format!("{}:", name.to_lowercase());
        self.head
            .lines()
            .find(|line| line.to_lowercase().starts_with(&name))
            .map(|line| line[name.len()..].trim())
    }

    /// Where the asked range begins.
    pub(crate) fn start(&self) -> Option<usize> {
        self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// What the server answers; nothing at all if it has no status.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Break off after so many bytes of the body.
    pub(crate) cut: Option<usize>,
    /// Say nothing more after that, instead of hanging up.
    pub(crate) stall: bool,
    /// Do not say how long the body is.
    pub(crate) endless: bool,
    /// Take this long for the body, which comes in many pieces.
    pub(crate) slow: Option<Duration>,
}

impl Reply {
    pub(crate) fn ok(body: &[u8]) -> Self {
        Self { status: 200, body: body.to_vec(), ..Self::default() }
    }

    pub(crate) fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// The rest of a content from where the client wants it.
    pub(crate) fn part(content: &[u8], start: usize) -> Self {
        let last = content.len() - 1;
        let range = format!("bytes {start}-{last}/{}", content.len());
        Self { status: 206, ..Self::ok(&content[start..]) }.with("Content-Range", &range)
    }

    pub(crate) fn cut(mut self, after: usize) -> Self {
        self.cut = Some(after);
        self
    }

    pub(crate) fn slow(mut self, time: Duration) -> Self {
        self.slow = Some(time);
        self
    }
}

pub(crate) type Answer = Box<dyn FnMut(&Asked, usize) -> Reply + Send>;

pub(crate) struct Web {
    pub(crate) address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Web {
    /// `answer` is given what is asked, and how often anything was asked before.
    pub(crate) async fn new(answer: impl FnMut(&Asked, usize) -> Reply + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked: Arc<Mutex<Vec<Asked>>> = Arc::default();
        let answer: Arc<Mutex<Answer>> = Arc::new(Mutex::new(Box::new(answer)));
        let seen = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&answer), Arc::clone(&seen)));
            }
        });
        Self { address, asked }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

async fn serve(mut stream: TcpStream, answer: Arc<Mutex<Answer>>, seen: Arc<Mutex<Vec<Asked>>>) {
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
    let asked = Asked { path, head };
    let reply = {
        let mut seen = seen.lock().unwrap();
        let reply = answer.lock().unwrap()(&asked, seen.len());
        seen.push(asked);
        reply
    };
    if reply.status == 0 {
        // Not a word, until the client gives up.
        let _ = stream.read(&mut [0]).await;
        return;
    }
    let mut text = format!("HTTP/1.1 {} Whatever\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    let told = reply.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    if !reply.endless && !told && reply.status != 304 {
        text.push_str(&format!("Content-Length: {}\r\n", reply.body.len()));
    }
    text.push_str("\r\n");
    let _ = stream.write_all(text.as_bytes()).await;
    let sent = reply.cut.unwrap_or(reply.body.len()).min(reply.body.len());
    match reply.slow {
        None => drop(stream.write_all(&reply.body[..sent]).await),
        Some(time) => {
            for piece in reply.body[..sent].chunks(sent.div_ceil(PIECES).max(1)) {
                tokio::time::sleep(time / PIECES as u32).await;
                if stream.write_all(piece).await.is_err() {
                    return;
                }
            }
        }
    }
    let _ = stream.flush().await;
    if reply.stall {
        // Until the client gives up.
        let _ = stream.read(&mut [0]).await;
    }
    let _ = stream.shutdown().await;
}
