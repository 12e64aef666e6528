//! The rows of all nodes, which several periodic tasks of a daemon need.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::nodes::{self, NodeRow};
use muster_store::{Store, StoreError};
use parking_lot::Mutex;

/// Caches the rows, so that the tasks share one read. The task `changes` clears it when nodes are added or change their state.
#[derive(Debug, Default)]
pub struct NodeCache {
    state: Mutex<CacheState>,
    /// Locked while the rows are read, so that concurrent callers share one read.
    reading: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct CacheState {
    /// When the rows were read, and the rows.
    rows: Option<(Instant, Arc<Vec<NodeRow>>)>,
    /// A read that began earlier may lack the change.
    cleared_at: Option<Instant>,
}

impl NodeCache {
    /// Returns the rows, ordered by name, as they were at most `max_age` ago.
    pub(crate) async fn get(
        &self,
        store: &Store,
        max_age: Duration,
    ) -> Result<Arc<Vec<NodeRow>>, StoreError> {
        let requested = Instant::now();
        let cached = || {
            let state = self.state.lock();
            let (read_at, rows) = state.rows.as_ref()?;
            let is_current = state.cleared_at.is_none_or(|cleared_at| *read_at > cleared_at);
            (is_current && *read_at + max_age > requested).then(|| Arc::clone(rows))
        };
        if let Some(rows) = cached() {
            return Ok(rows);
        }
        let _reading = self.reading.lock().await;
        if let Some(rows) = cached() {
            return Ok(rows);
        }
        let read_at = Instant::now();
        let rows = Arc::new(nodes::list(store).await?);
        self.state.lock().rows = Some((read_at, Arc::clone(&rows)));
        Ok(rows)
    }

    /// Makes the next call read the rows.
    pub(crate) fn clear(&self) {
        self.state.lock().cleared_at = Some(Instant::now());
    }
}
