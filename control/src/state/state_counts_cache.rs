//! Facts about the whole cluster, for metrics. Several servers may scrape them, each every few seconds.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::Store;
use muster_store::nodes::{self, NodeRow};
use muster_store::state_counts::{self, StateCounts};
use muster_types::Result;
use tokio::sync::Mutex;

/// The time for which the counts are reused.
const CACHE_TTL: Duration = Duration::from_secs(10);

/// Facts about the whole cluster.
#[derive(Debug)]
pub struct ClusterFacts {
    /// The number of objects in each state.
    pub counts: StateCounts,
    /// The age of the oldest unfinished operation by state, in seconds.
    pub operation_ages: Vec<(String, f64)>,
    /// The number of running instances by the state of their agent.
    pub agents: Vec<(String, i64)>,
    /// The nodes, and the seconds since their last check-in.
    pub nodes: Vec<(NodeRow, f64)>,
}

/// Caches the facts. Concurrent requests wait for one query.
#[derive(Debug, Default)]
pub struct StateCountsCache {
    cached: Mutex<Option<(Instant, Arc<ClusterFacts>)>>,
}

impl StateCountsCache {
    /// Returns the facts of a few seconds ago or less.
    pub(crate) async fn get(&self, store: &Store) -> Result<Arc<ClusterFacts>> {
        let mut cached = self.cached.lock().await;
        if let Some((at, facts)) = &*cached
            && at.elapsed() < CACHE_TTL
        {
            return Ok(Arc::clone(facts));
        }
        let facts = Arc::new(ClusterFacts {
            counts: state_counts::by_state(store).await?,
            operation_ages: state_counts::operation_ages(store).await?,
            agents: state_counts::agents_by_state(store).await?,
            nodes: nodes::list_with_silence(store).await?,
        });
        *cached = Some((Instant::now(), Arc::clone(&facts)));
        Ok(facts)
    }
}
