//! The number of objects in each state, for metrics. Several servers may scrape them, each every few seconds.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::Store;
use muster_store::state_counts::{self, StateCounts};
use muster_types::Result;
use tokio::sync::Mutex;

/// The time for which the counts are reused.
const CACHE_TTL: Duration = Duration::from_secs(10);

/// Caches the counts. Concurrent requests wait for one query.
#[derive(Debug, Default)]
pub struct StateCountsCache {
    cached: Mutex<Option<(Instant, Arc<StateCounts>)>>,
}

impl StateCountsCache {
    /// Returns the counts of a few seconds ago or less.
    pub(crate) async fn get(&self, store: &Store) -> Result<Arc<StateCounts>> {
        let mut cached = self.cached.lock().await;
        if let Some((at, counts)) = &*cached
            && at.elapsed() < CACHE_TTL
        {
            return Ok(Arc::clone(counts));
        }
        let counts = Arc::new(state_counts::by_state(store).await?);
        *cached = Some((Instant::now(), Arc::clone(&counts)));
        Ok(counts)
    }
}
