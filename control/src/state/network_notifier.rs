//! Notifications between requests that change networks and the reconciler that applies them. See docs/decisions/0011.

use tokio::sync::{Notify, SetOnce, watch};

/// Notifies the network reconciler of changes, and waiters of applied changes.
#[derive(Debug)]
pub struct NetworkNotifier {
    changed: Notify,
    applied: watch::Sender<u64>,
    role_known: SetOnce<()>,
}

impl Default for NetworkNotifier {
    fn default() -> Self {
        Self { changed: Notify::new(), applied: watch::Sender::new(0), role_known: SetOnce::new() }
    }
}

impl NetworkNotifier {
    /// Notifies the reconciler that a network was changed. Call it after the transaction.
    pub fn notify_changed(&self) {
        self.changed.notify_one();
    }

    /// Waits until a network may have been changed.
    pub(crate) async fn wait_changed(&self) {
        self.changed.notified().await;
    }

    /// Notifies waiters that a node of this daemon applied changes.
    pub(crate) fn notify_applied(&self) {
        self.applied.send_modify(|count| *count += 1);
    }

    /// Returns a receiver that changes whenever a node of this daemon applied changes.
    pub(crate) fn subscribe_applied(&self) -> watch::Receiver<u64> {
        self.applied.subscribe()
    }

    /// Notifies waiters that this daemon tried for the first time to become the active network node.
    pub fn notify_role_known(&self) {
        // It may be known already.
        let _ = self.role_known.set(());
    }

    /// Waits until it is known whether a node of this daemon is the active network node. Before that, routers would be
    /// reported as complete although their gate is closed.
    pub(crate) async fn wait_role_known(&self) {
        self.role_known.wait().await;
    }
}
