//! A connection to an agent: requests that await replies, and the queue of frames to write.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use muster_agent::frame;
use muster_types::guest::GuestError;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::packet::Packet;

/// The maximum number of queued packets that were sent with a [`SendPermit`].
const MAX_QUEUED_PACKETS: usize = 16;

/// The maximum number of queued packets that may be dropped.
const MAX_QUEUED_OPTIONAL_PACKETS: usize = 64;

/// The maximum size of the replies that a call buffers, which exceeds every transfer window.
const MAX_BUFFERED_BYTES: u32 = 4 << 20;

/// The buffer space that every reply is charged for in addition to its size.
const REPLY_OVERHEAD: usize = 256;

/// The maximum frame size of a plain agent, which sends all output of a command in one frame. It applies only while such
/// a command runs: the memory that a guest can use up is bounded by this and [`MAX_BUFFERED_BYTES`] per call.
const MAX_LONG_FRAME: usize = 16 << 20;

/// The protocol extensions of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct AgentFeatures {
    pub(super) remembers_commands: bool,
    /// Files are transferred in large, acknowledged chunks.
    pub(super) windowed_transfers: bool,
    pub(super) terminals: bool,
}

/// What the agent reported about itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct AgentInfo {
    pub(super) features: AgentFeatures,
    pub(super) boot_id: Option<String>,
}

#[derive(Debug)]
pub(super) struct Connection {
    /// The prefix of all request IDs, which tells them apart from those of earlier connections.
    id_prefix: String,
    last_number: AtomicU64,
    write_queue: mpsc::UnboundedSender<QueuedFrame>,
    send_permits: Arc<Semaphore>,
    optional_permits: Arc<Semaphore>,
    calls: Mutex<PendingCalls>,
    agent: Mutex<AgentInfo>,
    /// The number of running commands whose output arrives in one frame.
    long_replies: Arc<AtomicUsize>,
    /// The number of requests during which the agent sends nothing.
    silent_requests: Arc<AtomicUsize>,
}

#[derive(Debug)]
pub(super) struct QueuedFrame {
    pub(super) bytes: Vec<u8>,
    _permit: Option<OwnedSemaphorePermit>,
}

#[derive(Debug, Default)]
struct PendingCalls {
    by_number: BTreeMap<u64, PendingCall>,
    /// Why the connection was closed.
    close_reason: Option<String>,
}

#[derive(Debug, Clone)]
struct PendingCall {
    command: &'static str,
    flow: ReplyFlow,
    replies: mpsc::UnboundedSender<BufferedReply>,
    buffer_space: Arc<Semaphore>,
}

type BufferedReply = Result<(Packet, Option<OwnedSemaphorePermit>), GuestError>;

/// How many replies a request has, and how they are limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReplyFlow {
    /// One reply.
    Single,
    /// Several replies, limited by a window. Exceeding the buffer fails the call.
    Windowed,
    /// Any number of replies. Nothing is read from the connection while the buffer is full.
    Unlimited,
}

/// A request that receives replies until it is dropped.
#[derive(Debug)]
pub(super) struct Call {
    connection: Arc<Connection>,
    command: &'static str,
    number: u64,
    replies: mpsc::UnboundedReceiver<BufferedReply>,
    buffer_space: Arc<Semaphore>,
    abandon_on_drop: bool,
}

/// Increments a counter for its lifetime.
#[derive(Debug)]
pub(super) struct CountGuard(Arc<AtomicUsize>);

/// Permission to send one packet.
#[derive(Debug)]
pub(super) struct SendPermit<'a>(&'a Connection, OwnedSemaphorePermit);

impl Connection {
    pub(super) fn new() -> (Arc<Self>, mpsc::UnboundedReceiver<QueuedFrame>) {
        let (write_queue, queued_frames) = mpsc::unbounded_channel();
        let connection = Self {
            id_prefix: format!("{:x}", uuid::Uuid::new_v4().as_u64_pair().0),
            last_number: AtomicU64::new(0),
            write_queue,
            send_permits: Arc::new(Semaphore::new(MAX_QUEUED_PACKETS)),
            optional_permits: Arc::new(Semaphore::new(MAX_QUEUED_OPTIONAL_PACKETS)),
            calls: Mutex::default(),
            agent: Mutex::default(),
            long_replies: Arc::default(),
            silent_requests: Arc::default(),
        };
        (Arc::new(connection), queued_frames)
    }

    pub(super) fn agent_info(&self) -> AgentInfo {
        self.agent.lock().clone()
    }

    pub(super) fn features(&self) -> AgentFeatures {
        self.agent.lock().features
    }

    pub(super) fn set_agent_info(&self, info: AgentInfo) {
        *self.agent.lock() = info;
    }

    fn next_number(&self) -> u64 {
        self.last_number.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn request_id(&self, number: u64) -> String {
        format!("{}-{number}", self.id_prefix)
    }

    /// Returns the number and the ID of a request without a [`Call`].
    pub(super) fn new_request_id(&self) -> (u64, String) {
        let number = self.next_number();
        (number, self.request_id(number))
    }

    /// Returns the number of the request that a packet replies to, if it is one of this connection.
    pub(super) fn request_number(&self, packet: &Packet) -> Option<u64> {
        let number = packet.unique()?.strip_prefix(self.id_prefix.as_str())?.strip_prefix('-')?;
        number.parse().ok().filter(|number| *number <= self.last_number.load(Ordering::Relaxed))
    }

    /// Returns the maximum frame size to accept now.
    pub(super) fn max_frame_size(&self) -> usize {
        if self.long_replies.load(Ordering::Relaxed) > 0 { MAX_LONG_FRAME } else { frame::DEFAULT_MAX_LENGTH }
    }

    /// Returns whether the agent may be silent because it executes a request.
    pub(super) fn expects_silence(&self) -> bool {
        self.silent_requests.load(Ordering::Relaxed) > 0
    }

    /// Accepts long frames until the guard is dropped.
    pub(super) fn allow_long_frames(&self) -> CountGuard {
        CountGuard::new(&self.long_replies)
    }

    /// Disables the silence timeout until the guard is dropped.
    pub(super) fn allow_silence(&self) -> CountGuard {
        CountGuard::new(&self.silent_requests)
    }

    /// Waits until the write queue has space for a packet.
    pub(super) async fn send_permit(&self) -> Result<SendPermit<'_>, GuestError> {
        match self.send_permits.clone().acquire_owned().await {
            Ok(permit) => Ok(SendPermit(self, permit)),
            Err(_) => Err(self.closed_error()),
        }
    }

    /// Queues a packet without a limit. Only for packets whose number is bounded otherwise.
    pub(super) fn send_now(&self, packet: &Value) {
        self.enqueue(packet, None);
    }

    /// Queues a packet, or drops it if too many such packets are queued.
    pub(super) fn send_optional(&self, packet: &Value) {
        if let Ok(permit) = self.optional_permits.clone().try_acquire_owned() {
            self.enqueue(packet, Some(permit));
        }
    }

    fn enqueue(&self, packet: &Value, permit: Option<OwnedSemaphorePermit>) {
        let body = serde_json::to_vec(packet).expect("a JSON value always serializes");
        // If the write loop has ended, the close of the connection fails all pending calls.
        let _ = self.write_queue.send(QueuedFrame { bytes: frame::encode(&body), _permit: permit });
    }

    /// Registers a request, whose packets the caller sends.
    pub(super) fn call(self: &Arc<Self>, command: &'static str, flow: ReplyFlow) -> Result<Call, GuestError> {
        let (sender, replies) = mpsc::unbounded_channel();
        let buffer_space = Arc::new(Semaphore::new(MAX_BUFFERED_BYTES as usize));
        let number = self.next_number();
        let mut calls = self.calls.lock();
        if let Some(reason) = &calls.close_reason {
            return Err(GuestError::Unreachable(reason.clone()));
        }
        let pending = PendingCall { command, flow, replies: sender, buffer_space: buffer_space.clone() };
        calls.by_number.insert(number, pending);
        Ok(Call { connection: self.clone(), command, number, replies, buffer_space, abandon_on_drop: false })
    }

    /// Sends a request and waits for its only reply.
    pub(super) async fn request(
        self: &Arc<Self>,
        command: &'static str,
        fields: Value,
    ) -> Result<Packet, GuestError> {
        let mut call = self.call(command, ReplyFlow::Single)?;
        let packet = call.packet(fields);
        self.send_permit().await?.send(&packet);
        call.next().await
    }

    /// Delivers a reply of `size` bytes to its call. Returns whether there was one.
    pub(super) async fn deliver(&self, packet: Packet, size: usize) -> bool {
        let Some((number, pending)) = self.pending_call(&packet) else { return false };
        let permits = (size + REPLY_OVERHEAD).min(MAX_BUFFERED_BYTES as usize);
        let permits = u32::try_from(permits).expect("at most MAX_BUFFERED_BYTES, which is a u32");
        let permit = match pending.flow {
            ReplyFlow::Single => {
                self.calls.lock().by_number.remove(&number);
                None
            }
            ReplyFlow::Windowed => match pending.buffer_space.try_acquire_many_owned(permits) {
                Ok(permit) => Some(permit),
                Err(_) => {
                    self.calls.lock().by_number.remove(&number);
                    let exceeded =
                        GuestError::Refused("the guest's agent exceeded the transfer window".into());
                    let _ = pending.replies.send(Err(exceeded));
                    return true;
                }
            },
            ReplyFlow::Unlimited => match pending.buffer_space.acquire_many_owned(permits).await {
                Ok(permit) => Some(permit),
                // The call was dropped.
                Err(_) => return true,
            },
        };
        let _ = pending.replies.send(Ok((packet, permit)));
        true
    }

    fn pending_call(&self, packet: &Packet) -> Option<(u64, PendingCall)> {
        let calls = self.calls.lock();
        if let Some(number) = self.request_number(packet) {
            return calls.by_number.get(&number).map(|pending| (number, pending.clone()));
        }
        // Errors of plain agents have no request ID: their only reference to a request is the name of its command in the
        // message. Plain agents execute requests in order, so the oldest call of that command is the failed one.
        if !packet.is_error() || packet.has("unique") {
            return None;
        }
        let message = packet.text("message").unwrap_or_default();
        let is_named = |pending: &PendingCall| message.split_whitespace().any(|word| word == pending.command);
        let found = calls.by_number.iter().find(|(_, pending)| is_named(pending));
        found.map(|(number, pending)| (*number, pending.clone()))
    }

    /// Fails all pending calls, for example because the agent was restarted.
    pub(super) fn fail_calls(&self, reason: &str) {
        for (_, pending) in std::mem::take(&mut self.calls.lock().by_number) {
            let _ = pending.replies.send(Err(GuestError::Unreachable(reason.to_owned())));
        }
    }

    /// Fails all pending and future calls.
    pub(super) fn close(&self, reason: &str) {
        self.calls.lock().close_reason.get_or_insert_with(|| reason.to_owned());
        self.send_permits.close();
        self.fail_calls(reason);
    }

    fn closed_error(&self) -> GuestError {
        let reason = self.calls.lock().close_reason.clone();
        GuestError::Unreachable(reason.unwrap_or_else(|| "the connection to the guest's agent ended".into()))
    }
}

impl SendPermit<'_> {
    pub(super) fn send(self, packet: &Value) {
        self.0.enqueue(packet, Some(self.1));
    }
}

impl Call {
    /// Returns a packet of this call with the given fields.
    pub(super) fn packet(&self, mut fields: Value) -> Value {
        fields["command"] = self.command.into();
        fields["unique"] = self.unique().into();
        fields
    }

    /// Sets whether dropping this call tells the agent to abandon the request.
    pub(super) fn set_abandon_on_drop(&mut self, abandon: bool) {
        self.abandon_on_drop = abandon;
    }

    pub(super) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    pub(super) fn unique(&self) -> String {
        self.connection.request_id(self.number)
    }

    /// Waits for the next reply.
    pub(super) async fn next(&mut self) -> Result<Packet, GuestError> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Result<Packet, GuestError>> {
        Poll::Ready(match ready!(self.replies.poll_recv(context)) {
            Some(reply) => reply.map(|(packet, _)| packet),
            None => Err(self.connection.closed_error()),
        })
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.connection.calls.lock().by_number.remove(&self.number);
        self.buffer_space.close();
        if self.abandon_on_drop {
            self.connection.send_now(&json!({ "command": "abandon", "unique": self.unique() }));
        }
    }
}

impl CountGuard {
    fn new(counter: &Arc<AtomicUsize>) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Self(counter.clone())
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
