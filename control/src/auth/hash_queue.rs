//! Limits how many expensive hashes are computed at a time, and assigns the slots fairly: in turn to the sources that wait,
//! and within a source in turn to its namespaces.

use std::collections::VecDeque;
use std::sync::Arc;

use muster_types::{Error, Result};
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// The maximum number of waiting hashes of one source for one namespace.
const MAX_WAITING_PER_NAMESPACE: usize = 32;
/// The maximum number of waiting hashes.
const MAX_WAITING: usize = 256;
/// Seconds after which a rejected caller should retry.
const RETRY_AFTER: u64 = 5;

/// On whose behalf a hash is computed.
#[derive(Debug, Clone, Copy)]
pub struct HashRequester<'a> {
    /// The address of a caller without a token, or the namespace of one with a token; empty for the cluster itself.
    pub source: &'a str,
    /// The namespace of the key.
    pub namespace: &'a str,
}

impl<'a> HashRequester<'a> {
    /// Returns the requester for keys that the cluster itself creates.
    #[must_use]
    pub const fn cluster(namespace: &'a str) -> Self {
        Self { source: "", namespace }
    }
}

/// Assigns slots in turn: to each source, and within a source to each namespace.
#[derive(Debug)]
pub(super) struct HashQueue {
    state: Mutex<HashQueueState>,
}

#[derive(Debug)]
struct HashQueueState {
    free: usize,
    /// The sources with waiting hashes; the next slot is for the first one.
    sources: VecDeque<SourceQueue>,
}

#[derive(Debug)]
struct SourceQueue {
    source: String,
    /// The next slot of the source is for the first one.
    namespaces: VecDeque<NamespaceQueue>,
}

#[derive(Debug)]
struct NamespaceQueue {
    namespace: String,
    waiting: VecDeque<oneshot::Sender<HashSlot>>,
}

/// The permission to compute a hash, until it is dropped.
#[derive(Debug)]
pub(super) struct HashSlot(Option<Arc<HashQueue>>);

impl Drop for HashSlot {
    fn drop(&mut self) {
        if let Some(queue) = self.0.take() {
            queue.assign_slot();
        }
    }
}

impl HashQueue {
    pub(super) fn new(slots: usize) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(HashQueueState { free: slots, sources: VecDeque::new() }) })
    }

    /// Waits for a slot. Fails if too many hashes of the requester wait, or if there are too many in total and no
    /// other source has more than the requester.
    pub(super) async fn acquire(self: &Arc<Self>, requester: HashRequester<'_>) -> Result<HashSlot> {
        let waiting = {
            let mut state = self.state.lock();
            if state.free > 0 {
                state.free -= 1;
                return Ok(HashSlot(Some(Arc::clone(self))));
            }
            state.enqueue(requester).ok_or_else(too_many)?
        };
        // The sender is dropped if another source needs the place in the queue.
        waiting.await.map_err(|_| too_many())
    }

    /// Passes a slot on to the next requester that still waits.
    fn assign_slot(self: &Arc<Self>) {
        loop {
            let next = {
                let mut state = self.state.lock();
                let next = state.next();
                if next.is_none() {
                    state.free += 1;
                }
                next
            };
            let Some(next) = next else { return };
            match next.send(HashSlot(Some(Arc::clone(self)))) {
                Ok(()) => return,
                Err(mut unsent) => unsent.0 = None,
            }
        }
    }
}

impl HashQueueState {
    fn enqueue(&mut self, requester: HashRequester<'_>) -> Option<oneshot::Receiver<HashSlot>> {
        if self.waiting() >= MAX_WAITING {
            self.make_room(requester.source)?;
        }
        let source = match self.sources.iter_mut().position(|queue| queue.source == requester.source) {
            Some(at) => &mut self.sources[at],
            None => {
                self.sources.push_back(SourceQueue {
                    source: requester.source.to_owned(),
                    namespaces: VecDeque::new(),
                });
                self.sources.back_mut()?
            }
        };
        let namespaces = &mut source.namespaces;
        let namespace = match namespaces.iter_mut().position(|queue| queue.namespace == requester.namespace) {
            Some(at) => &mut namespaces[at],
            None => {
                let namespace = requester.namespace.to_owned();
                namespaces.push_back(NamespaceQueue { namespace, waiting: VecDeque::new() });
                namespaces.back_mut()?
            }
        };
        if namespace.waiting.len() >= MAX_WAITING_PER_NAMESPACE {
            namespace.waiting.retain(|waiting| !waiting.is_closed());
            if namespace.waiting.len() >= MAX_WAITING_PER_NAMESPACE {
                return None;
            }
        }
        let (sender, receiver) = oneshot::channel();
        namespace.waiting.push_back(sender);
        Some(receiver)
    }

    fn waiting(&self) -> usize {
        self.sources.iter().map(SourceQueue::len).sum()
    }

    /// Removes callers that have disconnected, or else the newest hash of the source with the most, if it has more
    /// than `source`.
    fn make_room(&mut self, source: &str) -> Option<()> {
        for queue in &mut self.sources {
            queue.remove_disconnected();
        }
        self.sources.retain(|queue| !queue.namespaces.is_empty());
        if self.waiting() < MAX_WAITING {
            return Some(());
        }
        let own = self.sources.iter().find(|queue| queue.source == source).map_or(0, SourceQueue::len);
        let largest = self.sources.iter_mut().max_by_key(|queue| queue.len())?;
        if largest.len() <= own + 1 {
            return None;
        }
        let namespace = largest.namespaces.iter_mut().max_by_key(|queue| queue.waiting.len())?;
        namespace.waiting.pop_back();
        largest.namespaces.retain(|queue| !queue.waiting.is_empty());
        Some(())
    }

    /// Removes the requester whose turn it is, and moves its source and its namespace to the end.
    fn next(&mut self) -> Option<oneshot::Sender<HashSlot>> {
        let mut source = self.sources.pop_front()?;
        let next = source.next();
        if !source.namespaces.is_empty() {
            self.sources.push_back(source);
        }
        next
    }
}

impl SourceQueue {
    fn len(&self) -> usize {
        self.namespaces.iter().map(|queue| queue.waiting.len()).sum()
    }

    fn next(&mut self) -> Option<oneshot::Sender<HashSlot>> {
        let mut namespace = self.namespaces.pop_front()?;
        let next = namespace.waiting.pop_front();
        if !namespace.waiting.is_empty() {
            self.namespaces.push_back(namespace);
        }
        next
    }

    fn remove_disconnected(&mut self) {
        for queue in &mut self.namespaces {
            queue.waiting.retain(|waiting| !waiting.is_closed());
        }
        self.namespaces.retain(|queue| !queue.waiting.is_empty());
    }
}

fn too_many() -> Error {
    let text =
        "too many logins and new keys of this namespace or address are waiting, please retry".to_owned();
    Error::TooManyRequests { text, retry_after: RETRY_AFTER }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;

    use futures_util::FutureExt as _;

    use super::*;

    type Waiting = Pin<Box<dyn Future<Output = Result<HashSlot>> + Send>>;

    /// Requests a slot and returns it while it waits, or the result.
    fn request(
        queue: &Arc<HashQueue>,
        source: &'static str,
        namespace: &'static str,
    ) -> std::result::Result<Waiting, Result<HashSlot>> {
        let queue = Arc::clone(queue);
        let mut waiting: Waiting =
            Box::pin(async move { queue.acquire(HashRequester { source, namespace }).await });
        match waiting.as_mut().now_or_never() {
            Some(result) => Err(result),
            None => Ok(waiting),
        }
    }

    fn is_too_many(result: &Result<HashSlot>) -> bool {
        matches!(result, Err(Error::TooManyRequests { retry_after: RETRY_AFTER, .. }))
    }

    #[test]
    fn flood_of_one_source_delays_others_by_one_slot() {
        let queue = HashQueue::new(1);
        let running = request(&queue, "flood", "a").err().unwrap().unwrap();
        let mut flood: Vec<_> =
            (0..MAX_WAITING_PER_NAMESPACE).map(|_| request(&queue, "flood", "a").ok().unwrap()).collect();
        assert!(is_too_many(&request(&queue, "flood", "a").err().unwrap()));
        let mut honest = request(&queue, "honest", "a").ok().unwrap();
        let mut neighbour = request(&queue, "flood", "b").ok().unwrap();
        drop(running);
        let first = flood[0].as_mut().now_or_never().unwrap().unwrap();
        drop(first);
        let second = honest.as_mut().now_or_never().unwrap().unwrap();
        drop(second);
        assert!(neighbour.as_mut().now_or_never().unwrap().is_ok(), "another namespace of the same source");
    }

    #[test]
    fn full_queue_makes_room_for_source_with_fewer_hashes() {
        const NAMESPACES: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
        let queue = HashQueue::new(1);
        let _running = request(&queue, "flood", "a").err().unwrap().unwrap();
        let mut flood = Vec::new();
        for namespace in NAMESPACES {
            let more =
                (0..MAX_WAITING_PER_NAMESPACE).map(|_| request(&queue, "flood", namespace).ok().unwrap());
            flood.extend(more);
        }
        assert_eq!(flood.len(), MAX_WAITING);
        assert!(is_too_many(&request(&queue, "flood", "other").err().unwrap()));
        let _honest = request(&queue, "honest", "a").ok().unwrap();
        let rejected = flood.iter_mut().filter_map(|waiting| waiting.as_mut().now_or_never());
        assert_eq!(rejected.filter(Result::is_err).count(), 1);
    }

    #[test]
    fn slots_of_disconnected_callers_are_passed_on() {
        let queue = HashQueue::new(1);
        let running = request(&queue, "x", "a").err().unwrap().unwrap();
        for _ in 0..10 * MAX_WAITING {
            drop(request(&queue, "x", "a").ok().unwrap());
        }
        let mut last = request(&queue, "x", "a").ok().unwrap();
        drop(running);
        drop(last.as_mut().now_or_never().unwrap().unwrap());
        // Assigned, but the caller disconnects before it notices.
        let running = request(&queue, "x", "a").err().unwrap().unwrap();
        let unnoticed = request(&queue, "x", "a").ok().unwrap();
        drop(running);
        drop(unnoticed);
        assert_eq!(queue.state.lock().free, 1);
    }
}
