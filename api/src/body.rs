//! Reads request bodies, each within its limit and all of them within a memory budget that the callers share fairly.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt as _;
use hyper::body::Body as _;
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use parking_lot::Mutex;

/// The maximum size of a body without a valid token, and of one that only selects objects, in bytes.
pub(crate) const MAX_SMALL_BODY: u64 = 8 << 10;
/// The unit in which memory is reserved, in bytes.
const RESERVATION_UNIT_BYTES: usize = 1 << 10;

/// The limits of a request body.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyLimit {
    /// In bytes.
    pub(crate) max: u64,
    /// Whether a content-length is required even without a body.
    pub(crate) length_required: bool,
}

/// Who sends a body.
#[derive(Debug, Clone, Copy)]
pub(crate) enum BodySender<'a> {
    /// A namespace with a valid token.
    Namespace(&'a str),
    /// An address without a token.
    Source(&'a str),
}

/// The memory of all request bodies in flight: a quarter for bodies without a token, so that callers with one cannot
/// block logins, and the rest for the others.
#[derive(Debug)]
pub(crate) struct BodyMemory {
    authenticated: Arc<BodyPool>,
    unauthenticated: Arc<BodyPool>,
    timeout: Duration,
}

/// Memory that senders share. A sender gets as much as it leaves free, so that slow bodies of one sender never use up
/// the memory. An eighth is only for senders with a small body.
#[derive(Debug)]
struct BodyPool {
    capacity: usize,
    reserved: Mutex<ReservedMemory>,
}

/// The bytes that are reserved in a pool.
#[derive(Debug, Default)]
struct ReservedMemory {
    total: usize,
    by_sender: HashMap<String, usize>,
}

impl BodyPool {
    fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self { capacity, reserved: Mutex::default() })
    }

    /// Reserves memory for a sender, whose bodies have at most `max` bytes each. Returns whether it gets it.
    fn reserve(&self, sender: &str, bytes: usize, max: usize) -> bool {
        let mut reserved = self.reserved.lock();
        let wanted = reserved.by_sender.get(sender).copied().unwrap_or(0) + bytes;
        let total = reserved.total + bytes;
        let is_small = wanted as u64 <= MAX_SMALL_BODY;
        let usable = if is_small { self.capacity } else { self.capacity - self.capacity / 8 };
        // One whole body is accepted as long as there is memory.
        let share = usable.saturating_sub(total).max(max.next_multiple_of(RESERVATION_UNIT_BYTES));
        if total > usable || wanted > share {
            return false;
        }
        reserved.total = total;
        *reserved.by_sender.entry(sender.to_owned()).or_default() = wanted;
        true
    }

    fn release(&self, sender: &str, bytes: usize) {
        let mut reserved = self.reserved.lock();
        reserved.total -= bytes;
        if let Some(count) = reserved.by_sender.get_mut(sender) {
            *count -= bytes;
            if *count == 0 {
                reserved.by_sender.remove(sender);
            }
        }
    }
}

/// A body and the memory that is reserved for it.
struct ReservedBody {
    data: Vec<u8>,
    pool: Arc<BodyPool>,
    sender: String,
    /// In bytes.
    reserved: usize,
}

impl ReservedBody {
    /// Reserves and allocates memory for `size` bytes of data in total.
    fn grow(&mut self, size: usize, max: usize) -> Result<()> {
        // Doubled, so that the data is rarely copied.
        let target = size.max(2 * self.reserved).min(max);
        let bytes = (target - self.reserved).next_multiple_of(RESERVATION_UNIT_BYTES);
        if !self.pool.reserve(&self.sender, bytes, max) {
            return Err(Error::Unavailable("too many request bodies in flight, please retry".into()));
        }
        self.reserved += bytes;
        // Exactly: a vector that grows by itself allocates up to twice as much as is reserved.
        self.data.reserve_exact(self.reserved - self.data.len());
        Ok(())
    }
}

impl Drop for ReservedBody {
    fn drop(&mut self) {
        // Before others may use it.
        self.data = Vec::new();
        self.pool.release(&self.sender, self.reserved);
    }
}

impl AsRef<[u8]> for ReservedBody {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl BodyMemory {
    pub(crate) fn new(settings: &Settings) -> Self {
        let bytes = usize::try_from(settings.api_max_body_memory_mb << 20).unwrap_or(usize::MAX);
        Self {
            authenticated: BodyPool::new(bytes - bytes / 4),
            unauthenticated: BodyPool::new(bytes / 4),
            timeout: Duration::from_secs(settings.api_timeout),
        }
    }

    /// Reads a body. Its memory is reserved as it arrives, until the last clone of the result is dropped.
    pub(crate) async fn read(
        &self,
        sender: BodySender<'_>,
        limit: BodyLimit,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<Bytes> {
        if body.is_end_stream() && !limit.length_required {
            return Ok(Bytes::new());
        }
        match headers.get(header::CONTENT_LENGTH) {
            None if limit.length_required => {
                return Err(Error::LengthRequired("a content-length is required".into()));
            }
            None => {}
            Some(length) => {
                let length = length.to_str().ok().and_then(|text| text.parse::<u64>().ok());
                if length.is_none_or(|length| length > limit.max) {
                    return Err(too_large());
                }
            }
        }
        let body = tokio::time::timeout(self.timeout, self.collect(sender, limit, body)).await;
        let body = body.map_err(|_| Error::Timeout("the request body did not arrive in time".into()))??;
        Ok(Bytes::from_owner(body))
    }

    async fn collect(
        &self,
        sender: BodySender<'_>,
        limit: BodyLimit,
        mut body: Body,
    ) -> Result<ReservedBody> {
        let (pool, sender) = match sender {
            BodySender::Namespace(name) => (&self.authenticated, name),
            BodySender::Source(address) => (&self.unauthenticated, address),
        };
        let (pool, sender) = (Arc::clone(pool), sender.to_owned());
        let mut received = ReservedBody { data: Vec::new(), pool, sender, reserved: 0 };
        let max = usize::try_from(limit.max).unwrap_or(usize::MAX);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| Error::Invalid("the request body ended early".into()))?;
            let Some(data) = frame.data_ref() else { continue };
            let size = received.data.len() + data.len();
            if size > max {
                return Err(too_large());
            }
            if size > received.reserved {
                received.grow(size, max)?;
            }
            // Copied, because the connection's buffer is larger than the data.
            received.data.extend_from_slice(data);
        }
        Ok(received)
    }
}

fn too_large() -> Error {
    Error::TooLarge("request body too large".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const RED: BodySender = BodySender::Namespace("red");
    const BLUE: BodySender = BodySender::Namespace("blue");
    const LIMIT: BodyLimit = BodyLimit { max: 1 << 20, length_required: false };

    /// 6 MiB for callers with a token and 2 MiB for others.
    fn memory() -> BodyMemory {
        BodyMemory::new(&Settings::from_pairs(&[("API_MAX_BODY_MEMORY_MB", "8")]).unwrap())
    }

    async fn read(memory: &BodyMemory, sender: BodySender<'_>, kib: usize) -> Result<Bytes> {
        memory.read(sender, LIMIT, &HeaderMap::new(), Body::from(vec![b'x'; kib << 10])).await
    }

    /// Reads bodies of 1 MiB until one is rejected.
    async fn fill(memory: &BodyMemory, sender: BodySender<'_>) -> Vec<Bytes> {
        let mut bodies = vec![];
        while let Ok(body) = read(memory, sender, 1024).await {
            bodies.push(body);
        }
        bodies
    }

    #[tokio::test]
    async fn one_sender_leaves_memory_to_others() {
        let memory = memory();
        let red = fill(&memory, RED).await;
        assert_eq!(red.len(), 2, "as much as it leaves free of the part for large bodies");
        assert!(matches!(read(&memory, RED, 1024).await, Err(Error::Unavailable(_))));
        assert_eq!(read(&memory, BLUE, 1024).await.unwrap().len(), 1 << 20);
        assert_eq!(read(&memory, BodySender::Source("192.0.2.1"), 8).await.unwrap().len(), 8 << 10);
        drop(red);
        assert_eq!(memory.authenticated.reserved.lock().total, 0, "everything is returned");
        assert!(memory.authenticated.reserved.lock().by_sender.is_empty());
    }

    #[tokio::test]
    async fn small_bodies_are_accepted_when_large_ones_have_used_their_part() {
        let memory = memory();
        let mut held = vec![];
        for number in 0..10 {
            held.extend(fill(&memory, BodySender::Namespace(&format!("n{number}"))).await);
        }
        assert!(matches!(read(&memory, BLUE, 1024).await, Err(Error::Unavailable(_))));
        assert_eq!(read(&memory, BLUE, 8).await.unwrap().len(), 8 << 10);
    }

    #[tokio::test]
    async fn memory_is_reserved_until_the_last_clone_is_dropped() {
        let memory = memory();
        let body = read(&memory, RED, 100).await.unwrap();
        let clone = body.clone();
        drop(body);
        assert_eq!(memory.authenticated.reserved.lock().total, 100 << 10);
        drop(clone);
        assert_eq!(memory.authenticated.reserved.lock().total, 0);
    }

    #[tokio::test]
    async fn addresses_without_token_share_a_quarter() {
        let memory = memory();
        let held = fill(&memory, BodySender::Source("192.0.2.1")).await;
        assert_eq!(held.len(), 1);
        assert_eq!(read(&memory, BodySender::Source("192.0.2.2"), 8).await.unwrap().len(), 8 << 10);
        assert_eq!(fill(&memory, RED).await.len(), 2, "not affected");
    }

    #[tokio::test]
    async fn allocates_at_most_the_reserved_memory() {
        let memory = memory();
        let frames = (0..100).map(|_| Ok::<_, std::io::Error>(Bytes::from(vec![b'x'; 3000])));
        let body = Body::from_stream(futures_util::stream::iter(frames));
        let received = memory.collect(RED, LIMIT, body).await.unwrap();
        assert_eq!(received.data.len(), 300_000);
        assert_eq!(memory.authenticated.reserved.lock().total, received.reserved);
        let capacity = received.data.capacity();
        assert!(capacity <= received.reserved, "{capacity} > {}", received.reserved);
    }

    #[tokio::test]
    async fn body_without_length_is_limited_while_it_arrives() {
        let memory = memory();
        let small = BodyLimit { max: 4, ..LIMIT };
        let read =
            async |text: &'static str| memory.read(RED, small, &HeaderMap::new(), Body::from(text)).await;
        assert_eq!(read("four").await.unwrap(), "four");
        assert!(matches!(read("fives").await, Err(Error::TooLarge(_))));
    }
}
