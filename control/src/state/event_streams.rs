//! The event streams that clients of this daemon have open. See docs/decisions/0080.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use bytes::Bytes;
use muster_types::object::ObjectRef;
use muster_types::{Error, Result};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, mpsc};

/// The maximum number of streams of one key.
const MAX_KEY_STREAMS: usize = 20;
/// The maximum number of streams of this daemon.
const MAX_STREAMS: usize = 2000;
/// The maximum number of messages that wait for a client. A client that is slower is disconnected.
const MAX_QUEUED: usize = 1024;
/// The maximum number of concurrent reads of earlier events for the streams of one namespace.
const MAX_NAMESPACE_REPLAYS: usize = 2;
/// Seconds after which a caller with too many streams should retry.
const RETRY_AFTER: u64 = 15;

/// Identifies the key of a caller: namespace and name.
pub type StreamKey = (String, String);

/// Returns what a stream sends of a message, if anything.
pub type MessageFilter = Box<dyn Fn(&StreamMessage) -> Option<Bytes> + Send + Sync>;

/// A message for the clients of streams.
#[derive(Debug, Clone)]
pub struct StreamMessage {
    /// UUID of the event; `None` for a change without an event.
    pub event: Option<String>,
    pub object: ObjectRef,
    /// The namespace of the object, if it has one.
    pub owner: Option<String>,
    /// The namespace that caused the event.
    pub cause: Option<String>,
    /// The message as it is sent.
    pub text: Bytes,
    /// What the namespace of the object receives if it may not see the event: that the object has changed.
    pub notice: Option<Bytes>,
}

/// What a stream receives.
#[derive(Debug, Clone)]
pub enum StreamItem {
    /// The stream is complete from now on. Events that were stored before this time may have been omitted.
    Started(f64),
    Message {
        /// UUID of the event, if it is one.
        event: Option<String>,
        text: Bytes,
    },
    /// The stream has received all events that were stored before this time.
    Position(f64),
}

/// The streams of this daemon.
#[derive(Debug, Clone, Default)]
pub struct EventStreams {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    streams: Mutex<Streams>,
    /// Limits the reads of earlier events of each namespace that reads some.
    replays: Mutex<HashMap<String, Weak<Semaphore>>>,
    /// Notified when a stream is to be started.
    opened: Notify,
    is_closed: AtomicBool,
}

#[derive(Debug, Default)]
struct Streams {
    next: u64,
    open: HashMap<u64, OpenStream>,
    of_key: HashMap<StreamKey, usize>,
}

struct OpenStream {
    key: StreamKey,
    /// The nonce of the key.
    nonce: Option<String>,
    /// The only namespace whose objects the stream is about.
    namespace: Option<String>,
    filter: MessageFilter,
    sender: mpsc::Sender<StreamItem>,
    is_ended: Arc<AtomicBool>,
    state: StreamState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamState {
    /// The client receives earlier events first.
    Opened,
    /// The client waits for the start.
    Starting,
    Started,
}

impl fmt::Debug for OpenStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenStream").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Streams {
    fn remove(&mut self, id: u64) {
        let Some(stream) = self.open.remove(&id) else { return };
        stream.is_ended.store(true, Ordering::Relaxed);
        if let Some(count) = self.of_key.get_mut(&stream.key) {
            *count -= 1;
            if *count == 0 {
                self.of_key.remove(&stream.key);
            }
        }
    }

    fn remove_all(&mut self, is_removed: impl Fn(&OpenStream) -> bool) {
        let ids: Vec<u64> =
            self.open.iter().filter(|(_, stream)| is_removed(stream)).map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.remove(id));
    }
}

/// The receiving end of a stream, which is open while this exists.
#[derive(Debug)]
pub struct EventSubscription {
    streams: EventStreams,
    id: u64,
    receiver: mpsc::Receiver<StreamItem>,
    is_ended: Arc<AtomicBool>,
}

impl EventSubscription {
    /// Requests the current messages. The next item is the start.
    pub fn start(&self) {
        let inner = &self.streams.inner;
        if let Some(stream) = inner.streams.lock().open.get_mut(&self.id) {
            stream.state = StreamState::Starting;
        }
        inner.opened.notify_one();
    }

    /// Waits for the next item. Returns `None` at the end of the stream, without what is still queued.
    pub async fn next(&mut self) -> Option<StreamItem> {
        let item = self.receiver.recv().await;
        item.filter(|_| !self.is_ended.load(Ordering::Relaxed))
    }
}

impl Drop for EventSubscription {
    fn drop(&mut self) {
        self.streams.inner.streams.lock().remove(self.id);
    }
}

impl EventStreams {
    /// Opens a stream, unless the key or the daemon has too many.
    pub fn open(
        &self,
        key: StreamKey,
        nonce: Option<String>,
        namespace: Option<String>,
        filter: MessageFilter,
    ) -> Result<EventSubscription> {
        if self.inner.is_closed.load(Ordering::Relaxed) {
            return Err(Error::Unavailable("this daemon is stopping, please retry at another node".into()));
        }
        let mut streams = self.inner.streams.lock();
        let of_key = streams.of_key.get(&key).copied().unwrap_or_default();
        if of_key >= MAX_KEY_STREAMS || streams.open.len() >= MAX_STREAMS {
            let text = format!(
                "the key has {of_key} event streams of at most {MAX_KEY_STREAMS}, and the daemon {} of at most {MAX_STREAMS}",
                streams.open.len()
            );
            return Err(Error::TooManyRequests { text, retry_after: RETRY_AFTER });
        }
        let (sender, receiver) = mpsc::channel(MAX_QUEUED);
        let (id, is_ended) = (streams.next, Arc::new(AtomicBool::new(false)));
        streams.next += 1;
        *streams.of_key.entry(key.clone()).or_default() += 1;
        let stream_ended = Arc::clone(&is_ended);
        let open = OpenStream {
            key,
            nonce,
            namespace,
            filter,
            sender,
            is_ended: stream_ended,
            state: StreamState::Opened,
        };
        streams.open.insert(id, open);
        Ok(EventSubscription { streams: self.clone(), id, receiver, is_ended })
    }

    /// Returns what limits the concurrent reads of earlier events for a namespace.
    pub(crate) fn replays(&self, namespace: &str) -> Arc<Semaphore> {
        let mut replays = self.inner.replays.lock();
        if let Some(known) = replays.get(namespace).and_then(Weak::upgrade) {
            return known;
        }
        replays.retain(|_, known| known.strong_count() > 0);
        let new = Arc::new(Semaphore::new(MAX_NAMESPACE_REPLAYS));
        replays.insert(namespace.to_owned(), Arc::downgrade(&new));
        new
    }

    /// Returns the number of open streams.
    #[must_use]
    pub fn count(&self) -> usize {
        self.inner.streams.lock().open.len()
    }

    /// Waits until a stream was to be started since the last call.
    pub(crate) async fn opened(&self) {
        self.inner.opened.notified().await;
    }

    /// Sends messages to the streams that they belong to. A stream whose client does not keep up ends.
    pub(crate) fn publish(&self, messages: &[StreamMessage]) {
        let mut streams = self.inner.streams.lock();
        let mut slow = Vec::new();
        for (id, stream) in streams.open.iter().filter(|(_, stream)| stream.state == StreamState::Started) {
            for message in messages {
                let Some(text) = (stream.filter)(message) else { continue };
                let item = StreamItem::Message { event: message.event.clone(), text };
                if stream.sender.try_send(item).is_err() {
                    slow.push(*id);
                    break;
                }
            }
        }
        slow.into_iter().for_each(|id| streams.remove(id));
    }

    /// Sends the position of the streams to their clients.
    pub(crate) fn publish_position(&self, stored: f64) {
        for stream in
            self.inner.streams.lock().open.values().filter(|stream| stream.state == StreamState::Started)
        {
            // A full queue has messages with positions.
            let _ = stream.sender.try_send(StreamItem::Position(stored));
        }
    }

    /// Starts the streams that wait for it. They receive every message that is published later.
    pub(crate) fn start_new(&self, stored: f64) {
        let mut streams = self.inner.streams.lock();
        for stream in streams.open.values_mut().filter(|stream| stream.state == StreamState::Starting) {
            stream.state = StreamState::Started;
            // Its queue is empty.
            let _ = stream.sender.try_send(StreamItem::Started(stored));
        }
    }

    /// Returns the keys that have streams, with the nonces that the streams were opened with.
    pub(crate) fn keys(&self) -> HashSet<(StreamKey, Option<String>)> {
        let streams = self.inner.streams.lock();
        streams.open.values().map(|stream| (stream.key.clone(), stream.nonce.clone())).collect()
    }

    /// Ends the streams of a key with this nonce that are not limited to a namespace which the caller may still see.
    pub(crate) fn end_of_key(&self, key: &StreamKey, nonce: Option<&str>, may_see: impl Fn(&str) -> bool) {
        self.inner.streams.lock().remove_all(|stream| {
            let is_visible = stream.namespace.as_deref().is_none_or(&may_see);
            stream.key == *key && stream.nonce.as_deref() == nonce && !is_visible
        });
    }

    /// Ends the streams of a key with this nonce.
    pub(crate) fn end_all_of_key(&self, key: &StreamKey, nonce: Option<&str>) {
        self.inner.streams.lock().remove_all(|stream| stream.key == *key && stream.nonce.as_deref() == nonce);
    }

    /// Ends all streams, and refuses new ones.
    pub fn close(&self) {
        self.inner.is_closed.store(true, Ordering::Relaxed);
        self.inner.streams.lock().remove_all(|_| true);
    }
}

#[cfg(test)]
mod tests {
    use muster_types::object::ObjectType;

    use super::*;

    fn message(id: &str) -> StreamMessage {
        let object = ObjectRef::new(ObjectType::Instance, id);
        StreamMessage { event: None, object, owner: None, cause: None, text: Bytes::new(), notice: None }
    }

    #[tokio::test]
    async fn streams_are_limited_and_end_when_they_do_not_keep_up() {
        let streams = EventStreams::default();
        let open = |key: &str| {
            let filter: MessageFilter =
                Box::new(|message| (message.object.id == "wanted").then(|| message.text.clone()));
            streams.open(("red".into(), key.into()), None, None, filter)
        };
        let mut all: Vec<_> = (0..MAX_KEY_STREAMS).map(|_| open("a").unwrap()).collect();
        assert!(matches!(open("a"), Err(Error::TooManyRequests { .. })));
        let mut other = open("b").unwrap();
        drop(all.pop());
        all.push(open("a").unwrap());
        streams.publish(&[message("wanted")]);
        streams.start_new(6.0);
        all.iter().chain([&other]).for_each(EventSubscription::start);
        streams.start_new(7.0);
        let first = other.next().await;
        assert!(matches!(first, Some(StreamItem::Started(7.0))), "nothing before the start: {first:?}");
        streams.publish(&vec![message("other"); 2 * MAX_QUEUED]);
        assert_eq!(streams.count(), MAX_KEY_STREAMS + 1);
        streams.publish(&vec![message("wanted"); MAX_QUEUED]);
        assert_eq!(streams.count(), 1, "only the stream that has read has room");
        assert!(all[0].next().await.is_none(), "what is queued is discarded");
        assert!(matches!(other.next().await, Some(StreamItem::Message { .. })));
        streams.end_all_of_key(&("red".into(), "b".into()), None);
        assert!(other.next().await.is_none());
        drop((all, other));
        assert!(streams.inner.streams.lock().of_key.is_empty());
        streams.close();
        assert!(matches!(open("a"), Err(Error::Unavailable(_))));
    }

    #[test]
    fn replays_of_a_namespace_share_a_limit() {
        let streams = EventStreams::default();
        let (red, again, blue) = (streams.replays("red"), streams.replays("red"), streams.replays("blue"));
        let held: Vec<_> = (0..MAX_NAMESPACE_REPLAYS).map(|_| red.try_acquire().unwrap()).collect();
        assert!(again.try_acquire().is_err() && blue.try_acquire().is_ok());
        drop(held);
        assert!(again.try_acquire().is_ok());
        drop((red, again));
        let _new = streams.replays("green");
        let mut known: Vec<String> = streams.inner.replays.lock().keys().cloned().collect();
        known.sort();
        assert_eq!(known, ["blue", "green"], "unused limits are removed");
    }
}
