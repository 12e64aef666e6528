//! One connection: what was asked over it and waits for replies, and what is still to be written.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use muster_agent::frame;
use muster_types::guest::GuestError;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::packet::Packet;

/// How many packets of those who wait for their turn may be on the way to the socket.
const AHEAD: usize = 16;

/// How many of those that nobody misses.
const CHATTER: usize = 64;

/// How many bytes of replies may wait for whoever asked. That is more than anybody asks for at once.
const ROOM: usize = 4 << 20;

/// The longest frame of a plain agent, which sends all that a command wrote in one. Nobody else needs it, and only while
/// such a command runs it is taken: what a guest can make us hold is bounded by this and some [`ROOM`].
const LONG: usize = 16 << 20;

/// What an agent can do beyond the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Features {
    pub(super) memory: bool,
    pub(super) pieces: bool,
}

/// What is known of the agent at the other end.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Known {
    pub(super) features: Features,
    pub(super) boot: Option<String>,
}

#[derive(Debug)]
pub(super) struct Line {
    /// Begins the name of each request: replies to those of an earlier connection have another.
    prefix: String,
    last: AtomicU64,
    queue: mpsc::UnboundedSender<Frame>,
    turns: Arc<Semaphore>,
    chatter: Arc<Semaphore>,
    calls: Mutex<Calls>,
    known: Mutex<Known>,
    /// How many commands run whose output comes in one frame.
    long: Arc<AtomicUsize>,
    /// How many things the agent does during which it says nothing.
    silent: Arc<AtomicUsize>,
}

/// Something to write.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) bytes: Vec<u8>,
    _turn: Option<OwnedSemaphorePermit>,
}

#[derive(Debug, Default)]
struct Calls {
    waiting: BTreeMap<u64, Waiting>,
    /// Why the connection is of no use any more.
    lost: Option<String>,
}

#[derive(Debug, Clone)]
struct Waiting {
    command: &'static str,
    flow: Flow,
    replies: mpsc::UnboundedSender<Reply>,
    room: Arc<Semaphore>,
}

type Reply = Result<(Packet, Option<OwnedSemaphorePermit>), GuestError>;

/// How the replies to a request come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    /// There is one.
    Once,
    /// There are more, but no more than were asked for.
    Window,
    /// There are more, as many as the guest likes: it is not listened to while there is no room for them.
    Unasked,
}

/// A request that waits for its replies, until it is dropped.
#[derive(Debug)]
pub(super) struct Call {
    line: Arc<Line>,
    command: &'static str,
    number: u64,
    replies: mpsc::UnboundedReceiver<Reply>,
    room: Arc<Semaphore>,
    /// Whether the guest goes on with it until it is told not to.
    lasting: bool,
}

/// Something counts for as long as this is there.
#[derive(Debug)]
pub(super) struct Counted(Arc<AtomicUsize>);

/// The right to send a packet.
#[derive(Debug)]
pub(super) struct Turn<'a>(&'a Line, OwnedSemaphorePermit);

impl Line {
    pub(super) fn new() -> (Arc<Self>, mpsc::UnboundedReceiver<Frame>) {
        let (queue, queued) = mpsc::unbounded_channel();
        let line = Self {
            prefix: format!("{:x}", uuid::Uuid::new_v4().as_u64_pair().0),
            last: AtomicU64::new(0),
            queue,
            turns: Arc::new(Semaphore::new(AHEAD)),
            chatter: Arc::new(Semaphore::new(CHATTER)),
            calls: Mutex::default(),
            known: Mutex::default(),
            long: Arc::default(),
            silent: Arc::default(),
        };
        (Arc::new(line), queued)
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn known(&self) -> Known {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn features(&self) -> Features {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).features
    }

    pub(super) fn set_known(&self, known: Known) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = known;
    }

    fn number(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn name(&self, number: u64) -> String {
        format!("{}-{number}", self.prefix)
    }

    /// A name for something that no call waits for.
    pub(super) fn new_name(&self) -> (u64, String) {
        let number = self.number();
        (number, self.name(number))
    }

    /// The number of the request of this connection that a packet replies to.
    pub(super) fn asked(&self, packet: &Packet) -> Option<u64> {
        let number = packet.unique()?.strip_prefix(self.prefix.as_str())?.strip_prefix('-')?;
        number.parse().ok().filter(|number| *number <= self.last.load(Ordering::Relaxed))
    }

    /// The longest frame to read now.
    pub(super) fn longest(&self) -> usize {
        if self.long.load(Ordering::Relaxed) > 0 { LONG } else { frame::DEFAULT_MAX_LENGTH }
    }

    /// Whether the agent may be silent because it does something else.
    pub(super) fn is_busy(&self) -> bool {
        self.silent.load(Ordering::Relaxed) > 0
    }

    /// Expects a long frame.
    pub(super) fn expect_long(&self) -> Counted {
        Counted::new(&self.long)
    }

    /// Expects silence.
    pub(super) fn expect_silence(&self) -> Counted {
        Counted::new(&self.silent)
    }

    /// Waits for the right to send a packet, which is not given while the guest takes none.
    pub(super) async fn turn(&self) -> Result<Turn<'_>, GuestError> {
        match self.turns.clone().acquire_owned().await {
            Ok(permit) => Ok(Turn(self, permit)),
            Err(_) => Err(self.lost()),
        }
    }

    /// Sends a packet right away. There are few of those.
    pub(super) fn say(&self, packet: &Value) {
        self.push(packet, None);
    }

    /// The same, unless the guest has too much to read already.
    pub(super) fn mention(&self, packet: &Value) {
        if let Ok(turn) = self.chatter.clone().try_acquire_owned() {
            self.push(packet, Some(turn));
        }
    }

    fn push(&self, packet: &Value, turn: Option<OwnedSemaphorePermit>) {
        let bytes = frame::encode(&serde_json::to_vec(packet).unwrap_or_default());
        // Whoever waits for a reply learns it if nobody writes any more.
        let _ = self.queue.send(Frame { bytes, _turn: turn });
    }

    /// Makes room for replies.
    pub(super) fn call(self: &Arc<Self>, command: &'static str, flow: Flow) -> Result<Call, GuestError> {
        let (sender, replies) = mpsc::unbounded_channel();
        let room = Arc::new(Semaphore::new(ROOM));
        let number = self.number();
        let mut calls = self.calls();
        if let Some(why) = &calls.lost {
            return Err(GuestError::Away(why.clone()));
        }
        calls.waiting.insert(number, Waiting { command, flow, replies: sender, room: room.clone() });
        Ok(Call { line: self.clone(), command, number, replies, room, lasting: false })
    }

    /// Asks for something that has one reply.
    pub(super) async fn ask(
        self: &Arc<Self>,
        command: &'static str,
        fields: Value,
    ) -> Result<Packet, GuestError> {
        let mut call = self.call(command, Flow::Once)?;
        let packet = call.packet(fields);
        self.turn().await?.send(&packet);
        call.next().await
    }

    /// Hands a packet to whoever asked for it. Whether anybody did.
    pub(super) async fn deliver(&self, packet: Packet, size: usize) -> bool {
        let Some((number, waiting)) = self.waiting_for(&packet) else { return false };
        // Every packet takes up something, however little is in it.
        let permits = u32::try_from((size + 256).min(ROOM)).unwrap_or(u32::MAX);
        let permit = match waiting.flow {
            Flow::Once => {
                self.calls().waiting.remove(&number);
                None
            }
            Flow::Window => match waiting.room.try_acquire_many_owned(permits) {
                Ok(permit) => Some(permit),
                Err(_) => {
                    self.calls().waiting.remove(&number);
                    let much = GuestError::Refused("the guest sent more than was asked for".into());
                    let _ = waiting.replies.send(Err(much));
                    return true;
                }
            },
            Flow::Unasked => match waiting.room.acquire_many_owned(permits).await {
                Ok(permit) => Some(permit),
                // Nobody wants it any more.
                Err(_) => return true,
            },
        };
        let _ = waiting.replies.send(Ok((packet, permit)));
        true
    }

    fn waiting_for(&self, packet: &Packet) -> Option<(u64, Waiting)> {
        let calls = self.calls();
        if let Some(number) = self.asked(packet) {
            return calls.waiting.get(&number).map(|waiting| (number, waiting.clone()));
        }
        // Plain agents do not say what went wrong but by its name, and do one thing after the other.
        if !packet.is_error() || packet.has("unique") {
            return None;
        }
        let message = packet.text("message").unwrap_or_default();
        let named = |waiting: &Waiting| message.split_whitespace().any(|word| word == waiting.command);
        let found = calls.waiting.iter().find(|(_, waiting)| named(waiting));
        found.map(|(number, waiting)| (*number, waiting.clone()))
    }

    /// Everything that waits fails: whoever was asked is not there any more.
    pub(super) fn fail(&self, why: &str) {
        for (_, waiting) in std::mem::take(&mut self.calls().waiting) {
            let _ = waiting.replies.send(Err(GuestError::Away(why.to_owned())));
        }
    }

    /// The connection is of no use any more.
    pub(super) fn lose(&self, why: &str) {
        self.calls().lost.get_or_insert_with(|| why.to_owned());
        self.turns.close();
        self.fail(why);
    }

    fn lost(&self) -> GuestError {
        let why = self.calls().lost.clone();
        GuestError::Away(why.unwrap_or_else(|| "the connection to the guest's agent ended".into()))
    }
}

impl Turn<'_> {
    pub(super) fn send(self, packet: &Value) {
        self.0.push(packet, Some(self.1));
    }
}

impl Call {
    /// A packet of this call: its command, its name, and these fields.
    pub(super) fn packet(&self, mut fields: Value) -> Value {
        fields["command"] = self.command.into();
        fields["unique"] = self.unique().into();
        fields
    }

    /// The guest goes on with it until it is told not to, which happens when this is dropped.
    pub(super) fn set_lasting(&mut self, lasting: bool) {
        self.lasting = lasting;
    }

    pub(super) fn line(&self) -> &Arc<Line> {
        &self.line
    }

    pub(super) fn unique(&self) -> String {
        self.line.name(self.number)
    }

    /// The next reply.
    pub(super) async fn next(&mut self) -> Result<Packet, GuestError> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Result<Packet, GuestError>> {
        Poll::Ready(match ready!(self.replies.poll_recv(context)) {
            Some(reply) => reply.map(|(packet, _)| packet),
            None => Err(self.line.lost()),
        })
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.line.calls().waiting.remove(&self.number);
        self.room.close();
        if self.lasting {
            self.line.say(&json!({ "command": "abandon", "unique": self.unique() }));
        }
    }
}

impl Counted {
    fn new(counter: &Arc<AtomicUsize>) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Self(counter.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
