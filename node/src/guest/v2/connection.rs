//! A connection to an agent.

use std::io::ErrorKind;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::message::{self, Empty, HostWelcome, Reply, Request, RequestBody};
use super::reader::{ConnectionError, ReplyReader};

/// The time without a reply after which the agent is pinged.
const PING_DELAY: Duration = Duration::from_secs(2);

const READ_SIZE: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    reader: ReplyReader,
    write_buffer: BytesMut,
    /// The number of requests so far.
    request_count: u64,
    /// A write failed. Replies that the agent sent before may still be readable.
    write_closed: bool,
    pinged: bool,
}

impl Connection {
    /// Creates a connection that accepts replies of up to `max_reply` bytes.
    pub(super) fn new(stream: UnixStream, max_reply: usize) -> Self {
        let (reader, write_buffer) = (ReplyReader::new(max_reply), BytesMut::new());
        Self { stream, reader, write_buffer, request_count: 0, write_closed: false, pinged: false }
    }

    /// Buffers a request, which is written while a reply is awaited. Returns its ID.
    pub(super) fn request(&mut self, body: RequestBody) -> Result<String, ConnectionError> {
        self.request_count += 1;
        let id = self.request_count.to_string();
        self.send(&id, body)?;
        Ok(id)
    }

    /// Buffers a message that belongs to an earlier request.
    pub(super) fn send(&mut self, id: &str, body: RequestBody) -> Result<(), ConnectionError> {
        if self.write_closed {
            return Ok(());
        }
        let request = Request { id: id.to_owned(), body: Some(body) };
        message::write(&request, &mut self.write_buffer)
            .map_err(|error| ConnectionError::Io(error.to_string()))
    }

    pub(super) fn welcome(&mut self) -> Result<String, ConnectionError> {
        let version = format!("version {}", env!("CARGO_PKG_VERSION"));
        self.request(RequestBody::Welcome(HostWelcome { version }))
    }

    pub(super) fn ping(&mut self) -> Result<String, ConnectionError> {
        self.request(RequestBody::Ping(Empty {}))
    }

    /// Returns the number of buffered bytes that are not written.
    pub(super) fn unwritten(&self) -> usize {
        self.write_buffer.len()
    }

    /// Waits for the next reply. Cancel safe.
    pub(super) async fn receive(&mut self) -> Result<Reply, ConnectionError> {
        loop {
            if let Some(reply) = self.reader.next()? {
                return Ok(reply);
            }
            self.transfer().await?;
        }
    }

    /// Waits for the next reply, and pings a slow agent once: it may not read while it is busy. Cancel safe.
    pub(super) async fn receive_with_ping(&mut self) -> Result<Reply, ConnectionError> {
        loop {
            if let Some(reply) = self.reader.next()? {
                self.pinged = false;
                return Ok(reply);
            }
            if self.pinged {
                self.transfer().await?;
            } else if let Ok(transferred) = timeout(PING_DELAY, self.transfer()).await {
                transferred?;
            } else {
                self.pinged = true;
                self.ping()?;
            }
        }
    }

    /// Waits until the socket is ready, then reads and writes what it can.
    async fn transfer(&mut self) -> Result<(), ConnectionError> {
        let writes = !self.write_buffer.is_empty();
        let interest = if writes { Interest::READABLE | Interest::WRITABLE } else { Interest::READABLE };
        let ready = self.stream.ready(interest).await?;
        if ready.is_readable() {
            match self.stream.try_read_buf(self.reader.buffer(READ_SIZE)) {
                Ok(0) => return Err(ConnectionError::Closed),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        if writes && ready.is_writable() {
            match self.stream.try_write(&self.write_buffer) {
                Ok(size) => self.write_buffer.advance(size),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // What the agent sent before it closed the connection can still be read.
                Err(_) => {
                    self.write_closed = true;
                    self.write_buffer.clear();
                }
            }
        }
        Ok(())
    }
}
