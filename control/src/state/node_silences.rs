//! How long nodes have not checked in, by the clock of this daemon.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use muster_store::nodes::NodeRow;
use muster_types::ids::NodeId;
use parking_lot::Mutex;

/// Since when this daemon has seen the last check-ins of nodes unchanged, by its monotonic clock. The clock of the database,
/// which dates check-ins, may be set. See docs/decisions/0052.
#[derive(Debug, Default)]
pub struct NodeSilences(Mutex<HashMap<NodeId, ObservedCheckIn>>);

#[derive(Debug, Clone, Copy)]
struct ObservedCheckIn {
    epoch: i64,
    lastseen: f64,
    since: Instant,
    /// Added by tests.
    elapsed_before: Duration,
}

impl ObservedCheckIn {
    fn first(row: &NodeRow) -> Self {
        Self {
            epoch: row.epoch,
            lastseen: row.lastseen,
            since: Instant::now(),
            elapsed_before: Duration::ZERO,
        }
    }

    fn is_last_of(&self, row: &NodeRow) -> bool {
        self.epoch == row.epoch && self.lastseen.to_bits() == row.lastseen.to_bits()
    }
}

impl NodeSilences {
    /// Records the last check-ins of nodes whose rows were just read, and forgets all other nodes.
    pub(crate) fn observe<'a>(&self, rows: impl IntoIterator<Item = &'a NodeRow>) {
        let mut observed = self.0.lock();
        let current = rows.into_iter().map(|row| {
            let before = observed.get(&row.identity.id).filter(|before| before.is_last_of(row));
            (row.identity.id, before.copied().unwrap_or_else(|| ObservedCheckIn::first(row)))
        });
        *observed = current.collect();
    }

    /// Returns how long this daemon has known the last check-in of a node, if that is still the last one.
    pub(crate) fn unchanged(&self, row: &NodeRow) -> Duration {
        let observed = self.0.lock();
        let last = observed.get(&row.identity.id).filter(|last| last.is_last_of(row));
        last.map_or(Duration::ZERO, |last| last.elapsed_before + last.since.elapsed())
    }

    /// Makes all observations older, for tests.
    pub fn advance(&self, by: Duration) {
        for observed in self.0.lock().values_mut() {
            observed.elapsed_before += by;
        }
    }
}
