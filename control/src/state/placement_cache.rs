//! A cache of the nodes' facts and committed capacity for the scheduler.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::{Store, node_ledgers, nodes};
use muster_types::Result;
use muster_types::capacity::CommittedCapacity;
use muster_types::ids::NodeId;
use muster_types::node::NodeState;
use parking_lot::Mutex;

use crate::scheduler::NodeFacts;

/// The nodes that are up, with their committed capacity.
pub type NodeCapacity = Vec<(Arc<NodeFacts>, CommittedCapacity)>;

/// A cache of the facts about the nodes. It may be slightly stale: the ledger's row decides. See docs/decisions/0019.
#[derive(Debug, Default)]
pub struct PlacementCache {
    entry: Mutex<Option<Entry>>,
    /// Locked while the nodes are read, so that concurrent readers share one read.
    reading: tokio::sync::Mutex<()>,
}

#[derive(Debug, Clone)]
struct Entry {
    read_at: Instant,
    nodes: Arc<NodeCapacity>,
}

impl PlacementCache {
    /// Updates the committed capacity of a node after a transaction that changed it.
    pub(crate) fn update(&self, node: NodeId, committed: CommittedCapacity) {
        if let Some(entry) = self.entry.lock().as_mut() {
            let nodes = Arc::make_mut(&mut entry.nodes);
            if let Some(cached) = nodes.iter_mut().find(|(facts, _)| facts.id == node) {
                cached.1 = committed;
            }
        }
    }

    /// Returns the nodes as they were at most `max_age` ago.
    pub(crate) async fn get(&self, store: &Store, max_age: Duration) -> Result<Arc<NodeCapacity>> {
        let requested = Instant::now();
        let usable = |entry: &Entry| entry.read_at >= requested || entry.read_at.elapsed() < max_age;
        if let Some(entry) = self.entry.lock().clone().filter(usable) {
            return Ok(entry.nodes);
        }
        let _reading = self.reading.lock().await;
        if let Some(entry) = self.entry.lock().clone().filter(usable) {
            return Ok(entry.nodes);
        }
        let read_at = Instant::now();
        let mut ledgers = node_ledgers::list(store).await?;
        let rows = nodes::list_with_silence(store).await?;
        let up = rows.iter().filter(|(row, _)| row.state == NodeState::Created);
        let nodes: NodeCapacity = up
            .map(|(row, silence)| {
                let committed = ledgers.remove(&row.identity.id).unwrap_or_default();
                (Arc::new(NodeFacts::from_row(row, *silence)), committed)
            })
            .collect();
        let nodes = Arc::new(nodes);
        *self.entry.lock() = Some(Entry { read_at, nodes: Arc::clone(&nodes) });
        Ok(nodes)
    }
}
