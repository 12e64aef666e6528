//! WebSocket connections that carry the bytes of another connection: the server's part of RFC 6455, without extensions.
//! Messages have no meaning of their own, so nothing is buffered beyond a part of a frame. See docs/decisions/0080.

#[cfg(test)]
mod tests;

use std::io;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use muster_types::key::Secret;
use muster_types::{Error, Result};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::browser_session::NoForeignOrigin;
use crate::error::ApiError;
use crate::upgrade::{RequestedUpgrade, Upgrade};

/// The protocol of the header `Upgrade`.
const WEBSOCKET: &str = "websocket";
/// The subprotocol of the frames: bytes.
const BINARY: &str = "binary";
/// The prefix of the subprotocol that is a ticket. Pages can set no other header of a WebSocket.
const TICKET_PREFIX: &str = "muster-ticket.";
/// What RFC 6455 appends to the key of a client.
const ACCEPT_SUFFIX: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

const BUFFER_SIZE: usize = 16 << 10;
/// The maximum payload of a control frame.
const MAX_CONTROL_BYTES: usize = 125;
/// The interval at which the client is asked for a sign of life.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// The time after which a client that sends nothing is disconnected.
const PING_TIMEOUT: Duration = Duration::from_secs(90);
/// The time after which a connection that carries no data is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3600);

const CONTINUATION: u8 = 0;
const TEXT: u8 = 1;
const BINARY_FRAME: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// The status of a close frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CloseStatus {
    Normal = 1000,
    ProtocolError = 1002,
}

/// Extracts the WebSocket that a client requests with a ticket. A page of another server cannot request one.
#[derive(Debug)]
pub(crate) struct TicketSocket {
    upgrade: Upgrade,
    accept: HeaderValue,
    pub(crate) ticket: Secret,
}

impl<S: Sync> FromRequestParts<S> for TicketSocket {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        NoForeignOrigin::from_request_parts(parts, state).await?;
        let Ok(upgrade) = RequestedUpgrade::from_request_parts(parts, state).await;
        let upgrade = upgrade.require(WEBSOCKET)?;
        let (accept, ticket) = read_headers(&parts.headers)?;
        Ok(Self { upgrade, accept, ticket })
    }
}

impl TicketSocket {
    /// Accepts the upgrade, and exchanges bytes with `peer` until one side closes its connection or neither sends any.
    pub(crate) fn relay(self, peer: impl AsyncRead + AsyncWrite + Send + 'static) -> Response {
        let mut response = self.upgrade.accept(move |client| relay(client, peer));
        response.headers_mut().insert(header::SEC_WEBSOCKET_ACCEPT, self.accept);
        response.headers_mut().insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(BINARY));
        response
    }
}

/// Reads the headers of a request, which must offer the subprotocols `binary` and `muster-ticket.TICKET`. Returns the
/// response to the key of the client, and the ticket.
fn read_headers(headers: &HeaderMap) -> Result<(HeaderValue, Secret)> {
    let invalid = |text: &str| Err(Error::Invalid(text.to_owned()));
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    if text(header::SEC_WEBSOCKET_VERSION) != Some("13") {
        return invalid("Sec-WebSocket-Version: must be 13");
    }
    let key = text(header::SEC_WEBSOCKET_KEY).unwrap_or_default();
    if !STANDARD.decode(key).is_ok_and(|bytes| bytes.len() == 16) {
        return invalid("Sec-WebSocket-Key: must be 16 bytes in base64");
    }
    let offered = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter();
    let offered = offered.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    let offered: Vec<&str> = offered.map(str::trim).collect();
    let ticket = offered.iter().find_map(|protocol| protocol.strip_prefix(TICKET_PREFIX));
    let Some(ticket) = ticket.filter(|_| offered.contains(&BINARY)) else {
        return invalid("Sec-WebSocket-Protocol: must be binary and muster-ticket.TICKET");
    };
    let accept =
        HeaderValue::from_str(&accept_key(key)).expect("base64 consists of visible ASCII characters");
    Ok((accept, Secret::new(ticket)))
}

/// Returns what proves to a client that the server knows the protocol.
fn accept_key(key: &str) -> String {
    use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
    STANDARD.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, format!("{key}{ACCEPT_SUFFIX}").as_bytes()))
}

async fn relay(client: impl AsyncRead + AsyncWrite + Send, peer: impl AsyncRead + AsyncWrite + Send) {
    let (client_reader, client_writer) = tokio::io::split(client);
    let (peer_reader, peer_writer) = tokio::io::split(peer);
    // A client that sends pings faster than it reads the responses is not read until it has read some.
    let (control, control_receiver) = mpsc::channel(4);
    let (received, received_at) = watch::channel(Instant::now());
    let (data, data_at) = watch::channel(Instant::now());
    let mut sender = FrameSender { writer: Box::pin(client_writer) };
    let status = {
        let mut receiver =
            FrameReceiver { reader: Box::pin(client_reader), control, received, in_message: false };
        let send = send(&mut sender, Box::pin(peer_reader), control_receiver, (received_at, &data));
        tokio::select! {
            status = receiver.forward_to(Box::pin(peer_writer), &data) => status,
            () = send => CloseStatus::Normal,
            () = idle(data_at) => CloseStatus::Normal,
        }
    };
    let _ = tokio::time::timeout(PING_INTERVAL, sender.send(CLOSE, &(status as u16).to_be_bytes())).await;
    let _ = tokio::time::timeout(PING_INTERVAL, sender.writer.shutdown()).await;
}

/// Waits until no data was transferred for a while.
async fn idle(mut data_at: watch::Receiver<Instant>) {
    loop {
        let deadline = *data_at.borrow_and_update() + IDLE_TIMEOUT;
        tokio::time::sleep_until(deadline).await;
        if !data_at.has_changed().unwrap_or(false) {
            return;
        }
    }
}

/// Sends the bytes of the peer, responses to control frames, and pings, until either side is closed.
async fn send<W: AsyncWrite + Unpin>(
    sender: &mut FrameSender<W>,
    mut peer: impl AsyncRead + Unpin,
    mut control: mpsc::Receiver<(u8, Vec<u8>)>,
    (received_at, data): (watch::Receiver<Instant>, &watch::Sender<Instant>),
) {
    let mut buffer = vec![0; BUFFER_SIZE];
    let mut next_ping = Instant::now() + PING_INTERVAL;
    loop {
        let sent = tokio::select! {
            Some((opcode, payload)) = control.recv() => sender.send(opcode, &payload).await,
            read = peer.read(&mut buffer) => match read {
                Ok(size @ 1..) => {
                    data.send_replace(Instant::now());
                    sender.send(BINARY_FRAME, &buffer[..size]).await
                }
                Ok(0) | Err(_) => return,
            },
            () = tokio::time::sleep_until(next_ping) => {
                if received_at.borrow().elapsed() > PING_TIMEOUT {
                    return;
                }
                next_ping = Instant::now() + PING_INTERVAL;
                sender.send(PING, &[]).await
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

/// Writes frames, which a server does not mask.
struct FrameSender<W> {
    writer: W,
}

impl<W: AsyncWrite + Unpin> FrameSender<W> {
    async fn send(&mut self, opcode: u8, payload: &[u8]) -> io::Result<()> {
        let mut frame = Vec::with_capacity(payload.len() + 4);
        frame.push(0x80 | opcode);
        match u16::try_from(payload.len()) {
            Ok(length @ ..126) => frame.push(u8::try_from(length).expect("below 126")),
            Ok(length) => {
                frame.push(126);
                frame.extend_from_slice(&length.to_be_bytes());
            }
            Err(_) => return Err(io::Error::other("a payload is larger than the buffer")),
        }
        frame.extend_from_slice(payload);
        self.writer.write_all(&frame).await?;
        self.writer.flush().await
    }
}

/// Reads frames, which a client must mask.
struct FrameReceiver<R> {
    reader: R,
    /// Receives the responses to control frames.
    control: mpsc::Sender<(u8, Vec<u8>)>,
    /// When the client has last sent a frame.
    received: watch::Sender<Instant>,
    /// Whether the last frame with data was not the last one of its message.
    in_message: bool,
}

/// The head of a frame.
struct FrameHead {
    opcode: u8,
    is_final: bool,
    length: u64,
    mask: [u8; 4],
}

impl<R: AsyncRead + Unpin> FrameReceiver<R> {
    /// Forwards the data of frames until either side is closed.
    async fn forward_to(
        &mut self,
        mut peer: impl AsyncWrite + Unpin,
        data: &watch::Sender<Instant>,
    ) -> CloseStatus {
        loop {
            let head = match self.read_head().await {
                Ok(Some(head)) => head,
                Ok(None) => return CloseStatus::ProtocolError,
                Err(_) => return CloseStatus::Normal,
            };
            self.received.send_replace(Instant::now());
            let forwarded = match head.opcode {
                CONTINUATION | TEXT | BINARY_FRAME => {
                    if (head.opcode == CONTINUATION) != self.in_message {
                        return CloseStatus::ProtocolError;
                    }
                    self.in_message = !head.is_final;
                    data.send_replace(Instant::now());
                    self.forward_payload(&head, &mut peer).await
                }
                PING => match self.read_control(&head).await {
                    Ok(payload) => self.control.send((PONG, payload)).await.map_err(io::Error::other),
                    Err(error) => Err(error),
                },
                PONG => self.read_control(&head).await.map(drop),
                CLOSE => return CloseStatus::Normal,
                _ => return CloseStatus::ProtocolError,
            };
            if forwarded.is_err() {
                return CloseStatus::Normal;
            }
        }
    }

    /// Reads the head of a frame. Returns `None` if it is not valid.
    async fn read_head(&mut self) -> io::Result<Option<FrameHead>> {
        let mut start = [0; 2];
        self.reader.read_exact(&mut start).await?;
        let [first, second] = start;
        let (opcode, is_final, is_masked) = (first & 0x0f, first & 0x80 != 0, second & 0x80 != 0);
        let length = match second & 0x7f {
            126 => u64::from(self.reader.read_u16().await?),
            127 => self.reader.read_u64().await?,
            length => u64::from(length),
        };
        let is_valid_control = opcode < CLOSE || is_final && length <= MAX_CONTROL_BYTES as u64;
        // The reserved bits belong to extensions, and the highest bit of a length is zero.
        if first & 0x70 != 0 || !is_masked || !is_valid_control || length >> 63 != 0 {
            return Ok(None);
        }
        let mut mask = [0; 4];
        self.reader.read_exact(&mut mask).await?;
        Ok(Some(FrameHead { opcode, is_final, length, mask }))
    }

    /// Reads the payload of a control frame, whose length is limited.
    async fn read_control(&mut self, head: &FrameHead) -> io::Result<Vec<u8>> {
        let mut payload = vec![0; usize::try_from(head.length).map_err(io::Error::other)?];
        self.reader.read_exact(&mut payload).await?;
        unmask(&mut payload, head.mask, 0);
        Ok(payload)
    }

    async fn forward_payload(
        &mut self,
        head: &FrameHead,
        peer: &mut (impl AsyncWrite + Unpin),
    ) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER_SIZE.min(usize::try_from(head.length).unwrap_or(BUFFER_SIZE))];
        let (mut remaining, mut offset) = (head.length, 0);
        while remaining > 0 {
            let size = buffer.len().min(usize::try_from(remaining).unwrap_or(buffer.len()));
            let size = self.reader.read(&mut buffer[..size]).await?;
            if size == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            unmask(&mut buffer[..size], head.mask, offset);
            peer.write_all(&buffer[..size]).await?;
            offset = (offset + size) % 4;
            remaining -= size as u64;
        }
        peer.flush().await
    }
}

/// Removes the mask from a part of a payload that starts at `offset` modulo 4.
fn unmask(bytes: &mut [u8], mask: [u8; 4], offset: usize) {
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte ^= mask[(offset + index) % 4];
    }
}
