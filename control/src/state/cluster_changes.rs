//! The last summary of the database, by which a daemon notices the changes of others.

use muster_store::changes::ChangeSummary;
use tokio::sync::watch;

/// The summary that the task `changes` read last.
#[derive(Debug, Default)]
pub struct ClusterChanges {
    latest: watch::Sender<Option<ChangeSummary>>,
}

impl ClusterChanges {
    /// Returns the last summary, at most about a second old; `None` before the first one.
    pub(crate) fn latest(&self) -> Option<ChangeSummary> {
        *self.latest.borrow()
    }

    /// Stores a summary and returns the previous one.
    pub(crate) fn replace(&self, summary: ChangeSummary) -> Option<ChangeSummary> {
        self.latest.send_replace(Some(summary))
    }

    /// Returns whether there may be unfinished operations of guest agents.
    pub(crate) fn may_have_agent_operations(&self) -> bool {
        self.latest().is_none_or(|summary| summary.agent_operations > 0)
    }

    /// Waits until blobs or copies were added or removed.
    pub(crate) async fn wait_blobs_changed(&self) {
        let mut latest = self.latest.subscribe();
        let before = latest.borrow().map(|summary| summary.blobs);
        // The sender lives as long as this.
        let _ = latest.wait_for(|summary| summary.map(|summary| summary.blobs) != before).await;
    }
}
