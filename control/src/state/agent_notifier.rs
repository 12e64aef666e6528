//! Notifications between requests for agent operations and the reconciler that performs them. See docs/decisions/0022.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use muster_types::ids::InstanceId;
use muster_types::node::NodeApi;
use parking_lot::Mutex;
use tokio::sync::{MutexGuard, Notify, watch};

/// How often the state of a guest is polled without a notification.
const READY_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Notifies the agent operations reconciler of changed operations, and waiters of guest reports.
#[derive(Debug)]
pub struct AgentNotifier {
    changed: Mutex<HashSet<InstanceId>>,
    notify: Notify,
    /// Counts the reports of guests.
    reports: watch::Sender<u64>,
    /// Locked while a report is written, so that the last one wins.
    writing: tokio::sync::Mutex<()>,
}

impl Default for AgentNotifier {
    fn default() -> Self {
        Self {
            changed: Mutex::default(),
            notify: Notify::new(),
            reports: watch::Sender::new(0),
            writing: tokio::sync::Mutex::default(),
        }
    }
}

impl AgentNotifier {
    /// Notifies the reconciler that the agent operations of an instance changed. Call it after the transaction.
    pub fn notify_changed(&self, id: InstanceId) {
        self.changed.lock().insert(id);
        self.notify.notify_one();
    }

    /// Waits until agent operations may have changed.
    pub(crate) async fn wait_changed(&self) {
        self.notify.notified().await;
    }

    /// Takes the instances whose agent operations changed.
    pub(crate) fn take_changed(&self) -> HashSet<InstanceId> {
        std::mem::take(&mut *self.changed.lock())
    }

    /// Notifies waiters that a guest reported.
    pub(crate) fn notify_reported(&self, id: InstanceId) {
        self.reports.send_modify(|count| *count += 1);
        self.notify_changed(id);
    }

    /// Locks the writing of guest reports.
    pub(crate) async fn lock_writing(&self) -> MutexGuard<'_, ()> {
        self.writing.lock().await
    }

    /// Waits until the agent of a guest is ready.
    pub(crate) async fn wait_ready(&self, node: &Arc<dyn NodeApi>, id: InstanceId) {
        let mut reports = self.reports.subscribe();
        while !Self::is_ready(node, id) {
            let _ = tokio::time::timeout(READY_POLL_INTERVAL, reports.changed()).await;
        }
    }

    /// Returns whether the agent of a guest is ready.
    pub(crate) fn is_ready(node: &Arc<dyn NodeApi>, id: InstanceId) -> bool {
        node.guests().report(id).is_some_and(|report| report.state.is_ready())
    }
}
