//! Events: recorded at once into a local durable queue, written to the database by a drainer.
//!
//! Recording never waits for the database. An event survives the death of the process from the moment
//! `record` returns; leftover queues of dead processes are drained at the next start.

mod drain;
pub mod metrics;
mod prune;
mod spool;

use std::path::Path;
use std::sync::Arc;

use muster_types::event::Event;
use muster_types::settings::Settings;

pub use drain::Drainer;
pub use metrics::Metrics;
pub(crate) use prune::clear_events;
pub use prune::{PruneOutcome, prune};

use spool::Spool;

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
    /// Opens the local queue below `directory`; `node` is named in every event.
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
                tracing::error!(%error, "event cannot be written");
                return;
            }
        };
        line.push(b'\n');
        match self.inner.spool.append(&line) {
            Ok(true) => {}
            Ok(false) => {
                self.inner.metrics.dropped.inc();
            }
            Err(error) => {
                self.inner.metrics.dropped.inc();
                tracing::error!(%error, "event queue cannot be written");
            }
        }
    }

    /// Records an event of which there may be floods, unless the queue is nearly full: what is left of it is
    /// kept for the others.
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

    /// All metrics as text, with the depth of the queue as it is now.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        self.inner.metrics.depth.set(self.depth());
        self.inner.metrics.text()
    }

    /// Events that wait for the database.
    #[must_use]
    pub fn depth(&self) -> i64 {
        self.inner.spool.depth()
    }

    /// The name of this node, as events give it.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.inner.node
    }
}
