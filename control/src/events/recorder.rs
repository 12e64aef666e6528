//! Records events into the local queue.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use muster_types::event::Event;
use muster_types::settings::Settings;
use tokio::sync::watch;

use super::metrics::Metrics;
use super::sampling::{RefusalKind, RefusalSampler};
use super::spool::{AppendOutcome, Spool};
use crate::exposition::ExpositionFormat;

/// Records events.
#[derive(Debug, Clone)]
pub struct Events {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    spool: Spool,
    node: String,
    metrics: Metrics,
    refusals: RefusalSampler,
    /// Whether the last write to the queue failed.
    write_failed: AtomicBool,
    /// Notified when a batch has reached the database.
    stored: watch::Sender<()>,
    /// The number of batches that failed to reach the database in a row.
    failed_batches: AtomicU32,
}

/// The number of failed batches after which events count as not stored.
const MAX_FAILED_BATCHES: u32 = 3;

impl Events {
    /// Creates a queue below `directory`. Every event names `node`.
    pub fn open(directory: &Path, node: &str, settings: &Settings) -> std::io::Result<Self> {
        let spool = Spool::create(directory, settings.spool_high_water_mark)?;
        let (node, metrics, refusals) = (node.to_owned(), Metrics::new(), RefusalSampler::default());
        let (write_failed, failed_batches) = (AtomicBool::new(false), AtomicU32::new(0));
        let stored = watch::Sender::default();
        let inner = Inner { spool, node, metrics, refusals, write_failed, stored, failed_batches };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Records an event. Once this returns, the death of this process does not lose it.
    pub fn record(&self, mut event: Event) {
        if event.node.is_empty() {
            event.node.clone_from(&self.inner.node);
        }
        let mut line = match serde_json::to_vec(&event) {
            Ok(line) => line,
            Err(error) => {
                self.inner.metrics.dropped.inc();
                tracing::error!(%error, "failed to serialize an event");
                return;
            }
        };
        line.push(b'\n');
        match self.inner.spool.append(&line) {
            Ok(AppendOutcome::Queued) => self.inner.write_failed.store(false, Ordering::Relaxed),
            Ok(AppendOutcome::Full) => {
                self.inner.metrics.dropped.inc();
            }
            Err(error) => {
                self.inner.metrics.dropped.inc();
                if !self.inner.write_failed.swap(true, Ordering::Relaxed) {
                    tracing::error!(%error, "failed to write to the event queue");
                }
            }
        }
    }

    /// Records an event that callers can cause in large numbers, unless the queue is nearly full. The remaining space
    /// is reserved for other events.
    pub fn record_if_room(&self, event: Event) {
        if self.inner.spool.is_nearly_full() {
            self.inner.metrics.dropped.inc();
        } else {
            self.record(event);
        }
    }

    /// Returns why events cannot be stored at present, if they cannot.
    #[must_use]
    pub fn storage_problem(&self) -> Option<&'static str> {
        if self.inner.write_failed.load(Ordering::Relaxed) {
            Some("the event queue cannot be written")
        } else if self.inner.spool.is_full() {
            Some("the event queue is full")
        } else if self.inner.failed_batches.load(Ordering::Relaxed) >= MAX_FAILED_BATCHES {
            Some("the database does not accept events")
        } else {
            None
        }
    }

    /// Checks after a failure whether the queue can be written again. A daemon that is not ready may not get requests
    /// that would show it.
    pub(super) fn check_storage(&self) {
        if self.inner.write_failed.load(Ordering::Relaxed) && self.inner.spool.probe().is_ok() {
            self.inner.write_failed.store(false, Ordering::Relaxed);
        }
    }

    /// Notes whether a batch reached the database.
    pub(super) fn batch_drained(&self, ok: bool) {
        if ok {
            self.inner.failed_batches.store(0, Ordering::Relaxed);
        } else {
            self.inner.failed_batches.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Notes that events were written to the database.
    pub(super) fn notify_stored(&self) {
        self.inner.stored.send_replace(());
    }

    /// Subscribes to the events of this process that reach the database.
    pub(crate) fn stored(&self) -> watch::Receiver<()> {
        self.inner.stored.subscribe()
    }

    /// Counts a refusal of a source without a valid token. Returns whether to record it: the number of refusals of the
    /// source that were not recorded since the last one that was, or `None`.
    #[must_use]
    pub fn sample_refusal(&self, kind: RefusalKind, source: &str) -> Option<u64> {
        self.inner.metrics.refusals.get_or_create(&[("kind", kind.as_str())]).inc();
        self.inner.refusals.sample(kind, source, Instant::now())
    }

    /// Counts a refusal of a source without a valid token, and records its event if it is sampled, with the number of
    /// those before it that were not.
    pub fn record_refusal(&self, kind: RefusalKind, source: &str, mut event: Event) {
        let Some(suppressed) = self.sample_refusal(kind, source) else { return };
        if suppressed > 0 {
            event = event.with("suppressed", suppressed);
        }
        self.record_if_room(event);
    }

    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    /// Returns all metrics as text, with the current depth of the queue.
    #[must_use]
    pub fn metrics_text(&self, format: ExpositionFormat) -> String {
        self.inner.metrics.depth.set(self.depth());
        self.inner.metrics.text(format)
    }

    /// Returns the number of events that are not in the database yet.
    #[must_use]
    pub fn depth(&self) -> i64 {
        self.inner.spool.depth()
    }

    /// Returns the name of this node in events.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.inner.node
    }

    pub(super) fn spool(&self) -> &Spool {
        &self.inner.spool
    }
}

#[cfg(test)]
mod tests {
    use muster_types::object::ObjectRef;

    use super::*;

    #[test]
    fn reports_queue_that_cannot_be_written_until_it_can() {
        let directory = tempfile::tempdir().unwrap();
        let events = Events::open(directory.path(), "node", &Settings::from_pairs(&[]).unwrap()).unwrap();
        let queue = events.spool().directory().to_owned();
        let event = || Event::audit(ObjectRef::namespace("a"), "x".repeat(3 << 20));
        std::fs::remove_dir_all(&queue).unwrap();
        // The open file still accepts events; the next one cannot be created.
        events.record(event());
        events.record(event());
        assert_eq!(events.storage_problem(), None);
        events.record(event());
        assert!(events.storage_problem().is_some());
        events.check_storage();
        assert!(events.storage_problem().is_some(), "still not writable");
        std::fs::create_dir_all(&queue).unwrap();
        events.check_storage();
        assert_eq!(events.storage_problem(), None);
    }

    #[test]
    fn reports_batches_that_do_not_reach_the_database() {
        let directory = tempfile::tempdir().unwrap();
        let events = Events::open(directory.path(), "node", &Settings::from_pairs(&[]).unwrap()).unwrap();
        (0..MAX_FAILED_BATCHES).for_each(|_| events.batch_drained(false));
        assert!(events.storage_problem().is_some());
        events.batch_drained(true);
        assert_eq!(events.storage_problem(), None);
    }
}
