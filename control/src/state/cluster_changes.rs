//! The last summary of the database, by which a daemon notices the changes of others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::changes::ChangeSummary;
use tokio::sync::watch;

/// The summary that the task `changes` read last.
#[derive(Debug, Default)]
pub struct ClusterChanges {
    latest: watch::Sender<Option<(Instant, Arc<ChangeSummary>)>>,
}

impl ClusterChanges {
    /// Returns the last summary, however old it is; `None` before the first one.
    pub(crate) fn latest(&self) -> Option<Arc<ChangeSummary>> {
        self.latest.borrow().as_ref().map(|(_, summary)| Arc::clone(summary))
    }

    /// Returns the last summary if its read began at most `age` ago. It is older while the database does not respond or the
    /// daemon drains.
    pub(crate) fn recent(&self, age: Duration) -> Option<Arc<ChangeSummary>> {
        let latest = self.latest.borrow();
        let recent = latest.as_ref().filter(|(read_at, _)| read_at.elapsed() <= age);
        recent.map(|(_, summary)| Arc::clone(summary))
    }

    /// Stores a summary whose read began at `read_at`.
    pub(crate) fn replace(&self, read_at: Instant, summary: ChangeSummary) {
        self.latest.send_replace(Some((read_at, Arc::new(summary))));
    }

    /// Returns whether there may be unfinished operations of guest agents.
    pub(crate) fn may_have_agent_operations(&self) -> bool {
        self.latest().is_none_or(|summary| summary.agent_operations > 0)
    }

    /// Returns whether there may be webhooks.
    pub(crate) fn may_have_webhooks(&self) -> bool {
        self.latest().is_none_or(|summary| summary.webhooks > 0)
    }

    /// Returns whether addresses may be quarantined.
    pub(crate) fn may_have_quarantined_addresses(&self) -> bool {
        self.latest().is_none_or(|summary| summary.has_quarantined_addresses)
    }

    /// Waits for the next summary.
    pub(crate) async fn wait_next(&self) {
        // The sender lives as long as this.
        let _ = self.latest.subscribe().changed().await;
    }

    /// Waits for the next summary with an unexpired lease.
    pub(crate) async fn wait_lease(&self, name: &str) {
        let mut latest = self.latest.subscribe();
        let has_lease = |latest: &Option<(Instant, Arc<ChangeSummary>)>| {
            latest.as_ref().is_some_and(|(_, summary)| summary.lease(name).is_some())
        };
        while latest.changed().await.is_ok() && !has_lease(&latest.borrow_and_update()) {}
    }

    /// Waits until blobs or copies were added or removed, or copies must move because a node is drained.
    pub(crate) async fn wait_blobs_changed(&self) {
        let blobs = |latest: &Option<(Instant, Arc<ChangeSummary>)>| {
            latest.as_ref().map(|(_, summary)| (summary.blobs, summary.cordoned_nodes))
        };
        let mut latest = self.latest.subscribe();
        let before = blobs(&latest.borrow());
        let _ = latest.wait_for(|latest| blobs(latest) != before).await;
    }
}
