//! Who listens learns which machines may have changed: each is named once, however often it changed meanwhile, so
//! that a slow listener costs no more than a name for each machine.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_core::Stream;
use muster_types::ids::InstanceId;
use muster_types::vm::ChangeStream;

/// Where changes are told.
#[derive(Debug, Clone, Default)]
pub(crate) struct Teller(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// How many listeners there were: the last of them is the one.
    listeners: u64,
    listening: bool,
    changed: BTreeSet<InstanceId>,
    waker: Option<Waker>,
}

struct Listener {
    number: u64,
    state: Teller,
}

impl Teller {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn tell(&self, machine: InstanceId) {
        let mut state = self.state();
        if !state.listening {
            return;
        }
        state.changed.insert(machine);
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
    }

    /// Listens from now on. Whoever listened before hears the end.
    pub(crate) fn listen(&self) -> ChangeStream {
        let mut state = self.state();
        state.listeners += 1;
        state.listening = true;
        state.changed.clear();
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
        Box::pin(Listener { number: state.listeners, state: self.clone() })
    }
}

impl Stream for Listener {
    type Item = InstanceId;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut state = self.state.state();
        if state.listeners != self.number {
            return Poll::Ready(None);
        }
        if let Some(machine) = state.changed.pop_first() {
            return Poll::Ready(Some(machine));
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut state = self.state.state();
        if state.listeners == self.number {
            state.listening = false;
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
    async fn each_machine_is_named_once_and_the_last_listener_hears_it() {
        let teller = Teller::default();
        let (one, other) = (InstanceId::new(), InstanceId::new());
        teller.tell(one);
        let mut first = teller.listen();
        teller.tell(other);
        teller.tell(other);
        assert_eq!(next(&mut first).await, Some(other));
        let waiting = tokio::spawn(async move { next(&mut first).await });
        tokio::task::yield_now().await;
        let mut second = teller.listen();
        assert_eq!(waiting.await.unwrap(), None);
        let waiting = tokio::spawn(async move { next(&mut second).await });
        tokio::task::yield_now().await;
        teller.tell(one);
        assert_eq!(waiting.await.unwrap(), Some(one));
        // Nobody listens now: nothing is kept.
        teller.tell(other);
        assert!(teller.state().changed.is_empty());
    }
}
