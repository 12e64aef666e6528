//! The blobs whose files this daemon is writing.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use muster_types::ids::{BlobId, NodeId};
use muster_types::{Error, Result};
use parking_lot::Mutex;

/// How long to wait for another task that stores the same content.
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

/// The blobs that are being written, by node. An incomplete blob that is not in this set belongs to a daemon that died.
/// See docs/decisions/0015.
#[derive(Debug, Default)]
pub struct BlobsInProgress(Mutex<HashSet<(NodeId, BlobId)>>);

impl BlobsInProgress {
    pub(crate) fn contains(&self, node: NodeId, blob: BlobId) -> bool {
        self.0.lock().contains(&(node, blob))
    }

    /// Marks a blob as being written on a node until the mark is dropped. Returns `None` if it is marked already.
    pub(crate) fn begin(&self, node: NodeId, blob: BlobId) -> Option<BlobInProgress<'_>> {
        let id = (node, blob);
        let new = self.0.lock().insert(id);
        // Created only for a new entry, because dropping the mark removes the entry.
        if new { Some(BlobInProgress { blobs: self, id }) } else { None }
    }

    /// Like [`begin`](Self::begin), but waits for the task that has marked the blob.
    pub(crate) async fn begin_after_others(&self, node: NodeId, blob: BlobId) -> Result<BlobInProgress<'_>> {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some(mark) = self.begin(node, blob) {
                return Ok(mark);
            }
            if Instant::now() > deadline {
                return Err(Error::Unavailable("the same content is being stored, please retry".into()));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Marks a blob as being written.
#[derive(Debug)]
pub struct BlobInProgress<'a> {
    blobs: &'a BlobsInProgress,
    id: (NodeId, BlobId),
}

impl Drop for BlobInProgress<'_> {
    fn drop(&mut self) {
        self.blobs.0.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_task_writes_a_blob_on_a_node() {
        let (blobs, node, id) = (BlobsInProgress::default(), NodeId::new(), BlobId::new());
        let mark = blobs.begin(node, id).unwrap();
        assert!(blobs.begin(node, id).is_none());
        assert!(blobs.contains(node, id), "a rejected second task does not remove the mark of the first");
        assert!(blobs.begin(NodeId::new(), id).is_some(), "another node has its own copy");
        drop(mark);
        assert!(!blobs.contains(node, id) && blobs.begin(node, id).is_some());
    }
}
