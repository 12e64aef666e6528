//! WebSocket connections that carry the bytes of another connection: RFC 6455 without extensions, for the server and for its
//! clients. Messages have no meaning of their own, so nothing is buffered beyond a part of a frame. See docs/decisions/0080.

#[cfg(test)]
mod tests;

use std::io;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// The protocol of the header `Upgrade`.
pub const WEBSOCKET: &str = "websocket";
/// The subprotocol of the frames: bytes.
pub const BINARY: &str = "binary";
/// The prefix of the subprotocol that is a ticket. Pages can set no other header of a WebSocket.
pub const TICKET_PREFIX: &str = "muster-ticket.";

/// What RFC 6455 appends to the key of a client.
const ACCEPT_SUFFIX: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

const BUFFER_SIZE: usize = 16 << 10;
/// The maximum payload of a control frame.
const MAX_CONTROL_BYTES: usize = 125;
/// The interval at which the other side is asked for a sign of life.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// The time after which another side that sends nothing is disconnected.
const PING_TIMEOUT: Duration = Duration::from_secs(90);
/// How long to wait for the close frame of another side to which nothing can be sent.
const CLOSE_FRAME_TIMEOUT: Duration = Duration::from_secs(1);
/// The time after which a connection that carries no data is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3600);

const CONTINUATION: u8 = 0;
const BINARY_FRAME: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// The statuses of close frames.
const STATUS_NORMAL: u16 = 1000;
const STATUS_PROTOCOL_ERROR: u16 = 1002;
const STATUS_INTERNAL_ERROR: u16 = 1011;

/// A side of a WebSocket. Only clients mask their frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Client,
    Server,
}

/// Why a WebSocket ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RelayEnd {
    /// The connection whose bytes the WebSocket carries was closed.
    PeerClosed,
    /// The connection whose bytes the WebSocket carries failed.
    PeerFailed,
    /// No data was transferred for an hour.
    Idle,
    /// The other side closed the WebSocket as intended.
    Closed,
    /// The other side closed the WebSocket for this reason.
    ClosedWith(String),
    /// The other side sent a frame that is not valid.
    InvalidFrame,
    /// The connection of the WebSocket ended before the WebSocket was closed.
    Lost,
    /// The other side sent no sign of life.
    Unresponsive,
}

impl RelayEnd {
    /// Returns the payload of the close frame.
    fn close_payload(&self) -> Vec<u8> {
        let (status, reason) = match self {
            Self::PeerFailed => (STATUS_INTERNAL_ERROR, "the connection to the node of the instance failed"),
            Self::Idle => (STATUS_NORMAL, "no data was transferred for an hour"),
            Self::InvalidFrame => (STATUS_PROTOCOL_ERROR, ""),
            Self::PeerClosed | Self::Closed | Self::ClosedWith(_) | Self::Lost | Self::Unresponsive => {
                (STATUS_NORMAL, "")
            }
        };
        [&status.to_be_bytes(), reason.as_bytes()].concat()
    }

    /// Returns what the payload of a close frame means.
    fn of_close_payload(payload: &[u8]) -> Self {
        let (status, reason) = match payload {
            [high, low, reason @ ..] => (u16::from_be_bytes([*high, *low]), String::from_utf8_lossy(reason)),
            _ => (STATUS_NORMAL, "".into()),
        };
        match (status, &*reason) {
            (STATUS_NORMAL, "") => Self::Closed,
            (status, "") => Self::ClosedWith(format!("status {status}")),
            (_, reason) => Self::ClosedWith(reason.to_owned()),
        }
    }
}

/// Returns a new key for the header `Sec-WebSocket-Key`.
///
/// # Panics
/// If the random number generator fails.
#[must_use]
pub fn generate_key() -> String {
    STANDARD.encode(random_bytes::<16>())
}

/// Returns what proves to a client with this key that the server knows the protocol.
#[must_use]
pub fn accept_key(key: &str) -> String {
    use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
    STANDARD.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, format!("{key}{ACCEPT_SUFFIX}").as_bytes()))
}

fn random_bytes<const COUNT: usize>() -> [u8; COUNT] {
    let mut bytes = [0; COUNT];
    aws_lc_rs::rand::fill(&mut bytes).expect("the random number generator works");
    bytes
}

/// Exchanges the bytes of `peer` over a WebSocket until either side closes its connection or neither sends any.
pub async fn relay(
    socket: impl AsyncRead + AsyncWrite + Send,
    peer: impl AsyncRead + AsyncWrite + Send,
    role: Role,
) -> RelayEnd {
    let (socket_reader, socket_writer) = tokio::io::split(socket);
    let (peer_reader, peer_writer) = tokio::io::split(peer);
    // Another side that sends pings faster than it reads the responses is not read until it has read some.
    let (control, control_receiver) = mpsc::channel(4);
    let (received, received_at) = watch::channel(Instant::now());
    let (data, data_at) = watch::channel(Instant::now());
    let mut sender = FrameSender { writer: Box::pin(socket_writer), role };
    let end = {
        let mut receiver =
            FrameReceiver { reader: Box::pin(socket_reader), role, control, received, in_message: false };
        let send = send(&mut sender, Box::pin(peer_reader), control_receiver, (received_at, &data));
        tokio::select! {
            end = receiver.forward_to(Box::pin(peer_writer), &data) => end,
            end = send => end,
            () = idle(data_at) => RelayEnd::Idle,
        }
    };
    let _ = tokio::time::timeout(PING_INTERVAL, sender.send(CLOSE, &end.close_payload())).await;
    let _ = tokio::time::timeout(PING_INTERVAL, sender.writer.shutdown()).await;
    end
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
) -> RelayEnd {
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
                Ok(0) => return RelayEnd::PeerClosed,
                // A process that ends before it has read everything resets its local connections.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return RelayEnd::PeerClosed,
                Err(_) => return RelayEnd::PeerFailed,
            },
            () = tokio::time::sleep_until(next_ping) => {
                if received_at.borrow().elapsed() > PING_TIMEOUT {
                    return RelayEnd::Unresponsive;
                }
                next_ping = Instant::now() + PING_INTERVAL;
                sender.send(PING, &[]).await
            }
        };
        if sent.is_err() {
            // The other side may have sent why it has closed the connection.
            tokio::time::sleep(CLOSE_FRAME_TIMEOUT).await;
            return RelayEnd::Lost;
        }
    }
}

/// Writes frames.
struct FrameSender<W> {
    writer: W,
    role: Role,
}

impl<W: AsyncWrite + Unpin> FrameSender<W> {
    async fn send(&mut self, opcode: u8, payload: &[u8]) -> io::Result<()> {
        let mut frame = Vec::with_capacity(payload.len() + 8);
        let mask_bit = if self.role == Role::Client { 0x80 } else { 0 };
        frame.push(0x80 | opcode);
        match u16::try_from(payload.len()) {
            Ok(length @ ..126) => frame.push(mask_bit | u8::try_from(length).expect("below 126")),
            Ok(length) => {
                frame.push(mask_bit | 126);
                frame.extend_from_slice(&length.to_be_bytes());
            }
            Err(_) => return Err(io::Error::other("a payload is larger than the buffer")),
        }
        let mask = match self.role {
            Role::Client => random_bytes(),
            Role::Server => [0; 4],
        };
        if self.role == Role::Client {
            frame.extend_from_slice(&mask);
        }
        let start = frame.len();
        frame.extend_from_slice(payload);
        apply_mask(&mut frame[start..], mask, 0);
        self.writer.write_all(&frame).await?;
        self.writer.flush().await
    }
}

/// Reads frames.
struct FrameReceiver<R> {
    reader: R,
    role: Role,
    /// Receives the responses to control frames.
    control: mpsc::Sender<(u8, Vec<u8>)>,
    /// When the other side has last sent a frame.
    received: watch::Sender<Instant>,
    /// Whether the last frame with data was not the last one of its message.
    in_message: bool,
}

/// The head of a frame.
struct FrameHead {
    opcode: u8,
    is_final: bool,
    length: u64,
    /// Zero if the frame is not masked.
    mask: [u8; 4],
}

/// Why a payload was not forwarded.
enum ForwardError {
    Socket,
    Peer,
}

impl<R: AsyncRead + Unpin> FrameReceiver<R> {
    /// Forwards the data of frames until either side is closed.
    async fn forward_to(
        &mut self,
        mut peer: impl AsyncWrite + Unpin,
        data: &watch::Sender<Instant>,
    ) -> RelayEnd {
        loop {
            let head = match self.read_head().await {
                Ok(Some(head)) => head,
                Ok(None) => return RelayEnd::InvalidFrame,
                Err(_) => return RelayEnd::Lost,
            };
            self.received.send_replace(Instant::now());
            if head.opcode < CLOSE {
                if head.opcode > BINARY_FRAME || (head.opcode == CONTINUATION) != self.in_message {
                    return RelayEnd::InvalidFrame;
                }
                self.in_message = !head.is_final;
                data.send_replace(Instant::now());
                match self.forward_payload(&head, &mut peer).await {
                    Ok(()) => continue,
                    Err(ForwardError::Socket) => return RelayEnd::Lost,
                    Err(ForwardError::Peer) => return RelayEnd::PeerClosed,
                }
            }
            let Ok(payload) = self.read_control(&head).await else { return RelayEnd::Lost };
            match head.opcode {
                // The receiver exists as long as this sender.
                PING => drop(self.control.send((PONG, payload)).await),
                PONG => {}
                CLOSE => return RelayEnd::of_close_payload(&payload),
                _ => return RelayEnd::InvalidFrame,
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
        let is_valid_mask = is_masked == (self.role == Role::Server);
        // The reserved bits belong to extensions, and the highest bit of a length is zero.
        if first & 0x70 != 0 || !is_valid_mask || !is_valid_control || length >> 63 != 0 {
            return Ok(None);
        }
        let mut mask = [0; 4];
        if is_masked {
            self.reader.read_exact(&mut mask).await?;
        }
        Ok(Some(FrameHead { opcode, is_final, length, mask }))
    }

    /// Reads the payload of a control frame, whose length is limited.
    async fn read_control(&mut self, head: &FrameHead) -> io::Result<Vec<u8>> {
        let mut payload = vec![0; usize::try_from(head.length).map_err(io::Error::other)?];
        self.reader.read_exact(&mut payload).await?;
        apply_mask(&mut payload, head.mask, 0);
        Ok(payload)
    }

    async fn forward_payload(
        &mut self,
        head: &FrameHead,
        peer: &mut (impl AsyncWrite + Unpin),
    ) -> Result<(), ForwardError> {
        let mut buffer = vec![0; BUFFER_SIZE.min(usize::try_from(head.length).unwrap_or(BUFFER_SIZE))];
        let (mut remaining, mut offset) = (head.length, 0);
        while remaining > 0 {
            let size = buffer.len().min(usize::try_from(remaining).unwrap_or(buffer.len()));
            let Ok(size @ 1..) = self.reader.read(&mut buffer[..size]).await else {
                return Err(ForwardError::Socket);
            };
            apply_mask(&mut buffer[..size], head.mask, offset);
            peer.write_all(&buffer[..size]).await.map_err(|_| ForwardError::Peer)?;
            offset = (offset + size) % 4;
            remaining -= size as u64;
        }
        peer.flush().await.map_err(|_| ForwardError::Peer)
    }
}

/// Adds or removes the mask of a part of a payload that starts at `offset` modulo 4.
fn apply_mask(bytes: &mut [u8], mask: [u8; 4], offset: usize) {
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte ^= mask[(offset + index) % 4];
    }
}
