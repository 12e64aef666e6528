//! Requests to an agent that speaks protocol 2. Every request has its own connection.

use std::sync::Arc;

use muster_types::guest::GuestError;
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::address::AgentAddress;
use super::connection::Connection;
use super::message::{CommandError, CommandErrorKind, ReplyBody, RequestBody};
use super::reader::ConnectionError;
use crate::guest::channel::VM_DETACHED;

/// The maximum number of connections to one guest, not counting that of the session.
const MAX_CONNECTIONS: usize = 4;

/// The maximum size of a reply to most requests.
pub(super) const MAX_REPLY: usize = 256 << 10;

/// The maximum number of replies to other requests than the call's.
const MAX_STRAY_REPLIES: u32 = 1000;

/// Opens the connections of calls.
#[derive(Debug)]
pub(super) struct Caller {
    address: AgentAddress,
    /// The reason why the session ended, once it has.
    session_end: watch::Receiver<Option<String>>,
    connections: Arc<Semaphore>,
}

/// A request that receives replies until it is dropped.
#[derive(Debug)]
pub(super) struct Call {
    connection: Connection,
    id: String,
    session_end: watch::Receiver<Option<String>>,
    stray_replies: u32,
    _permit: OwnedSemaphorePermit,
}

/// Why a call failed.
#[derive(Debug)]
pub(super) enum CallError {
    /// The agent reported an error.
    Command(CommandErrorKind),
    Guest(GuestError),
}

impl From<ConnectionError> for CallError {
    fn from(error: ConnectionError) -> Self {
        Self::Guest(error.into())
    }
}

impl From<CallError> for GuestError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Command(
                CommandErrorKind::ProgramNotFound(reason)
                | CommandErrorKind::FileNotFound(reason)
                | CommandErrorKind::Other(reason),
            ) => Self::Refused(reason),
            CallError::Guest(error) => error,
        }
    }
}

impl Caller {
    pub(super) fn new(address: AgentAddress, session_end: watch::Receiver<Option<String>>) -> Self {
        Self { address, session_end, connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)) }
    }

    /// Sends a request whose replies have at most `max_reply` bytes.
    pub(super) async fn call(&self, request: RequestBody, max_reply: usize) -> Result<Call, GuestError> {
        let mut session_end = self.session_end.clone();
        let opened = async {
            let permit = self.connections.clone().acquire_owned().await.map_err(unreachable)?;
            Ok::<_, GuestError>((self.address.connect().await.map_err(unreachable)?, permit))
        };
        let (stream, permit) = tokio::select! {
            biased;
            error = session_ended(&mut session_end) => return Err(error),
            opened = opened => opened?,
        };
        let mut connection = Connection::new(stream, max_reply);
        connection.welcome()?;
        let id = connection.request(request)?;
        Ok(Call { connection, id, session_end, stray_replies: 0, _permit: permit })
    }

    /// Sends a request and waits for its only reply.
    pub(super) async fn request(
        &self,
        request: RequestBody,
        max_reply: usize,
    ) -> Result<ReplyBody, CallError> {
        self.call(request, max_reply).await.map_err(CallError::Guest)?.next().await
    }
}

impl Call {
    /// Waits for the next reply. Cancel safe.
    pub(super) async fn next(&mut self) -> Result<ReplyBody, CallError> {
        let Self { connection, id, session_end, stray_replies, .. } = self;
        let reply = async {
            loop {
                let reply = connection.receive_with_ping().await?;
                if reply.id == id.as_bytes()
                    && let Some(body) = reply.body
                {
                    return Ok(body);
                }
                *stray_replies += 1;
                if *stray_replies > MAX_STRAY_REPLIES {
                    return Err(CallError::from(ConnectionError::InvalidData));
                }
            }
        };
        let reply = tokio::select! {
            biased;
            error = session_ended(session_end) => Err(CallError::Guest(error)),
            reply = reply => reply,
        };
        match reply? {
            ReplyBody::CommandError(bytes) => {
                let error = CommandError::decode(bytes).map_err(|_| ConnectionError::InvalidData)?;
                Err(CallError::Command(error.kind()))
            }
            ReplyBody::UnknownCommand(_) => {
                let unsupported = "the guest's agent does not support the request";
                Err(CallError::Guest(GuestError::Refused(unsupported.into())))
            }
            body => Ok(body),
        }
    }

    /// Sends a further message of the request.
    pub(super) fn send(&mut self, message: RequestBody) -> Result<(), GuestError> {
        Ok(self.connection.send(&self.id, message)?)
    }

    /// Returns the number of bytes that are not written to the socket.
    pub(super) fn unwritten(&self) -> usize {
        self.connection.unwritten()
    }
}

/// Waits for the end of the session and returns it as an error.
async fn session_ended(session_end: &mut watch::Receiver<Option<String>>) -> GuestError {
    let reason = session_end.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
    // The session was dropped without an end.
    GuestError::Unreachable(reason.unwrap_or_else(|| VM_DETACHED.into()))
}

fn unreachable(error: impl std::fmt::Display) -> GuestError {
    GuestError::Unreachable(format!("the guest's agent cannot be reached: {error}"))
}

impl From<ConnectionError> for GuestError {
    fn from(error: ConnectionError) -> Self {
        match error {
            ConnectionError::Closed | ConnectionError::Io(_) => Self::Unreachable(error.to_string()),
            // A retry would fail in the same way.
            ConnectionError::ReplyTooLong(_) | ConnectionError::InvalidData => {
                Self::Refused(error.to_string())
            }
        }
    }
}
