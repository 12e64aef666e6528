//! Change notifications: a subscriber learns which VMs may have changed. Repeated changes of one VM are coalesced, so a
//! slow subscriber costs at most one entry per VM.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures_core::Stream;
use muster_types::ids::InstanceId;
use muster_types::vm::ChangeStream;
use parking_lot::Mutex;

/// Notifies at most one subscriber of changed VMs.
#[derive(Debug, Clone, Default)]
pub(crate) struct ChangeNotifier(Arc<Mutex<NotifierState>>);

#[derive(Debug, Default)]
struct NotifierState {
    /// The number of subscriptions so far; only the latest is active.
    subscriptions: u64,
    subscribed: bool,
    changed: BTreeSet<InstanceId>,
    waker: Option<Waker>,
}

struct Subscription {
    number: u64,
    notifier: ChangeNotifier,
}

impl ChangeNotifier {
    pub(crate) fn notify(&self, vm: InstanceId) {
        let mut state = self.0.lock();
        if !state.subscribed {
            return;
        }
        state.changed.insert(vm);
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
    }

    /// Subscribes to changes from now on. The stream of an earlier subscriber ends.
    pub(crate) fn subscribe(&self) -> ChangeStream {
        let mut state = self.0.lock();
        state.subscriptions += 1;
        state.subscribed = true;
        state.changed.clear();
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
        Box::pin(Subscription { number: state.subscriptions, notifier: self.clone() })
    }
}

impl Stream for Subscription {
    type Item = InstanceId;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut state = self.notifier.0.lock();
        if state.subscriptions != self.number {
            return Poll::Ready(None);
        }
        if let Some(vm) = state.changed.pop_first() {
            return Poll::Ready(Some(vm));
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut state = self.notifier.0.lock();
        if state.subscriptions == self.number {
            state.subscribed = false;
            state.changed.clear();
            state.waker = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn next(changes: &mut ChangeStream) -> Option<InstanceId> {
        std::future::poll_fn(|context| changes.as_mut().poll_next(context)).await
    }

    #[tokio::test]
    async fn coalesces_changes_and_notifies_only_the_latest_subscriber() {
        let notifier = ChangeNotifier::default();
        let (one, other) = (InstanceId::new(), InstanceId::new());
        notifier.notify(one);
        let mut first = notifier.subscribe();
        notifier.notify(other);
        notifier.notify(other);
        assert_eq!(next(&mut first).await, Some(other));
        let waiting = tokio::spawn(async move { next(&mut first).await });
        tokio::task::yield_now().await;
        let mut second = notifier.subscribe();
        assert_eq!(waiting.await.unwrap(), None);
        let waiting = tokio::spawn(async move { next(&mut second).await });
        tokio::task::yield_now().await;
        notifier.notify(one);
        assert_eq!(waiting.await.unwrap(), Some(one));
        // Without a subscriber, changes are discarded.
        notifier.notify(other);
        assert!(notifier.0.lock().changed.is_empty());
    }
}
