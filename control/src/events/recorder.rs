//! Records events into the local queue.

use std::path::Path;
use std::sync::Arc;

use muster_types::event::Event;
use muster_types::settings::Settings;

use super::metrics::Metrics;
use super::spool::{Appended, Spool};
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
}

impl Events {
    /// Creates a queue below `directory`. Every event names `node`.
    pub fn open(directory: &Path, node: &str, settings: &Settings) -> std::io::Result<Self> {
        let spool = Spool::create(directory, settings.spool_high_water_mark)?;
        Ok(Self { inner: Arc::new(Inner { spool, node: node.to_owned(), metrics: Metrics::new() }) })
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
            Ok(Appended::Queued) => {}
            Ok(Appended::Full) => {
                self.inner.metrics.dropped.inc();
            }
            Err(error) => {
                self.inner.metrics.dropped.inc();
                tracing::error!(%error, "failed to write to the event queue");
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
