//! The uses of blobs that this daemon has recorded recently. A download of a blob consists of many requests.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use muster_types::ids::BlobId;
use parking_lot::Mutex;

/// The minimum time between two records of a namespace's use of a blob.
const RECORD_INTERVAL: Duration = Duration::from_secs(60);
/// The maximum number of remembered uses.
const MAX_USES: usize = 4096;

#[derive(Debug, Default)]
pub struct BlobUses {
    recorded: Mutex<HashMap<(BlobId, String), Instant>>,
}

impl BlobUses {
    /// Returns whether a use has to be recorded, and remembers it if so.
    pub(crate) fn begin(&self, blob: BlobId, namespace: &str) -> bool {
        self.begin_at(blob, namespace, Instant::now())
    }

    fn begin_at(&self, blob: BlobId, namespace: &str, now: Instant) -> bool {
        let mut recorded = self.recorded.lock();
        let key = (blob, namespace.to_owned());
        let is_recent = |at: &Instant| now.duration_since(*at) < RECORD_INTERVAL;
        if recorded.get(&key).is_some_and(is_recent) {
            return false;
        }
        if recorded.len() >= MAX_USES {
            recorded.retain(|_, at| is_recent(at));
        }
        if recorded.len() < MAX_USES {
            recorded.insert(key, now);
        }
        true
    }

    /// Forgets a use that could not be recorded.
    pub(crate) fn forget(&self, blob: BlobId, namespace: &str) {
        self.recorded.lock().remove(&(blob, namespace.to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_of_namespace_is_recorded_once_per_interval() {
        let (uses, blob, start) = (BlobUses::default(), BlobId::new(), Instant::now());
        assert!(uses.begin_at(blob, "a", start));
        assert!(!uses.begin_at(blob, "a", start + RECORD_INTERVAL / 2));
        assert!(uses.begin_at(blob, "b", start), "another namespace");
        assert!(uses.begin_at(blob, "a", start + RECORD_INTERVAL));
        uses.forget(blob, "a");
        assert!(uses.begin_at(blob, "a", start + RECORD_INTERVAL));
        (0..2 * MAX_USES).for_each(|_| assert!(uses.begin_at(BlobId::new(), "a", start)));
        assert!(uses.recorded.lock().len() <= MAX_USES);
    }
}
