//! A connection to an agent.

use std::io::ErrorKind;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::inbox::{Fault, Inbox};
use super::message::{self, HostWelcome, Nothing, Question, Reply, Request};

/// After how long without a word an agent is asked for one.
const IDLE: Duration = Duration::from_secs(2);

/// How much is read at once.
const READ: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    inbox: Inbox,
    /// What is still to be written.
    outbox: BytesMut,
    /// How much was asked.
    asked: u64,
    /// The agent does not listen any more. It may have said why.
    deaf: bool,
    pinged: bool,
}

impl Connection {
    /// Over which the guest sends no more than that at once.
    pub(super) fn new(stream: UnixStream, most: usize) -> Self {
        let (inbox, outbox) = (Inbox::new(most), BytesMut::new());
        Self { stream, inbox, outbox, asked: 0, deaf: false, pinged: false }
    }

    /// Asks something, presently: it is written while somebody waits for a reply. Answers what the replies repeat.
    pub(super) fn ask(&mut self, question: Question) -> Result<String, Fault> {
        self.asked += 1;
        let id = self.asked.to_string();
        self.say(&id, question)?;
        Ok(id)
    }

    /// Says something that belongs to what was asked before.
    pub(super) fn say(&mut self, id: &str, question: Question) -> Result<(), Fault> {
        if self.deaf {
            return Ok(());
        }
        let request = Request { id: id.to_owned(), question: Some(question) };
        message::write(&request, &mut self.outbox).map_err(|error| Fault::Broken(error.to_string()))
    }

    pub(super) fn welcome(&mut self) -> Result<String, Fault> {
        let version = format!("version {}", env!("CARGO_PKG_VERSION"));
        self.ask(Question::Welcome(HostWelcome { version }))
    }

    pub(super) fn ping(&mut self) -> Result<String, Fault> {
        self.ask(Question::Ping(Nothing {}))
    }

    /// How much is still to be written.
    pub(super) fn unwritten(&self) -> usize {
        self.outbox.len()
    }

    /// The next reply. Whoever drops this loses nothing.
    pub(super) async fn receive(&mut self) -> Result<Reply, Fault> {
        loop {
            if let Some(reply) = self.inbox.next()? {
                return Ok(reply);
            }
            self.exchange().await?;
        }
    }

    /// The same, from an agent that is asked for a sign of life if it takes long; but only once, as it may read nothing
    /// before it is done.
    pub(super) async fn receive_patiently(&mut self) -> Result<Reply, Fault> {
        loop {
            if let Some(reply) = self.inbox.next()? {
                self.pinged = false;
                return Ok(reply);
            }
            if self.pinged {
                self.exchange().await?;
            } else if let Ok(exchanged) = timeout(IDLE, self.exchange()).await {
                exchanged?;
            } else {
                self.pinged = true;
                self.ping()?;
            }
        }
    }

    /// Reads or writes something, as soon as that is possible.
    async fn exchange(&mut self) -> Result<(), Fault> {
        let writes = !self.outbox.is_empty();
        let interest = if writes { Interest::READABLE | Interest::WRITABLE } else { Interest::READABLE };
        let ready = self.stream.ready(interest).await?;
        if ready.is_readable() {
            match self.stream.try_read_buf(self.inbox.room(READ)) {
                Ok(0) => return Err(Fault::Ended),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        if writes && ready.is_writable() {
            match self.stream.try_write(&self.outbox) {
                Ok(size) => self.outbox.advance(size),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // What it said before it went can still be read, and then its end.
                Err(_) => {
                    self.deaf = true;
                    self.outbox.clear();
                }
            }
        }
        Ok(())
    }
}
