//! Permits for expensive work on images, fair to namespaces. See docs/decisions/0042.

use std::collections::VecDeque;
use std::sync::Arc;

use muster_types::fair_share::FairShare;
use muster_types::{Error, Result};
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// A semaphore whose permits are shared by namespaces.
#[derive(Debug)]
pub(super) struct FairSemaphore(Mutex<State>);

#[derive(Debug)]
struct State {
    share: FairShare,
    /// First come first.
    waiting: VecDeque<(String, oneshot::Sender<FairPermit>)>,
}

/// A permit, until it is dropped.
#[derive(Debug)]
pub(super) struct FairPermit {
    semaphore: Arc<FairSemaphore>,
    namespace: String,
}

impl FairSemaphore {
    pub(super) fn new(permits: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State { share: FairShare::new(permits), waiting: VecDeque::new() })))
    }

    /// Waits for a permit of a namespace.
    pub(super) async fn acquire(self: &Arc<Self>, namespace: &str) -> Result<FairPermit> {
        let receiver = {
            let mut state = self.0.lock();
            if state.share.occupy(namespace) {
                return Ok(FairPermit { semaphore: Arc::clone(self), namespace: namespace.to_owned() });
            }
            let (sender, receiver) = oneshot::channel();
            state.waiting.push_back((namespace.to_owned(), sender));
            receiver
        };
        receiver.await.map_err(|error| Error::Internal(format!("failed to acquire a permit: {error}")))
    }

    /// Gives a free permit to the namespace with the fewest, if one waits that may have it.
    fn assign_next(self: &Arc<Self>) -> bool {
        let (sender, permit) = {
            let mut state = self.0.lock();
            state.waiting.retain(|(_, sender)| !sender.is_closed());
            let admitted = state.waiting.iter().enumerate().filter(|(_, (name, _))| state.share.admits(name));
            let next = admitted.min_by_key(|(_, (name, _))| state.share.occupied_by(name)).map(|(at, _)| at);
            let Some((namespace, sender)) = next.and_then(|at| state.waiting.remove(at)) else {
                return false;
            };
            state.share.occupy(&namespace);
            (sender, FairPermit { semaphore: Arc::clone(self), namespace })
        };
        // If the receiver was dropped meanwhile, the permit is dropped here and assigned again.
        drop(sender.send(permit));
        true
    }
}

impl Drop for FairPermit {
    fn drop(&mut self) {
        self.semaphore.0.lock().share.free(&self.namespace);
        while self.semaphore.assign_next() {}
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;

    use futures_util::FutureExt as _;

    use super::*;

    type Waiting = Pin<Box<dyn Future<Output = Result<FairPermit>> + Send>>;

    /// Requests a permit, and polls once.
    fn request(
        semaphore: &Arc<FairSemaphore>,
        namespace: &'static str,
    ) -> std::result::Result<FairPermit, Waiting> {
        let semaphore = Arc::clone(semaphore);
        let mut waiting: Waiting = Box::pin(async move { semaphore.acquire(namespace).await });
        match waiting.as_mut().now_or_never() {
            Some(permit) => Ok(permit.unwrap()),
            None => Err(waiting),
        }
    }

    #[test]
    fn slow_work_of_one_namespace_does_not_delay_another() {
        let semaphore = FairSemaphore::new(2);
        let slow: Vec<_> = (0..6).map(|_| request(&semaphore, "slow")).collect();
        assert_eq!(slow.iter().filter(|permit| permit.is_ok()).count(), 2);
        let other = request(&semaphore, "other").ok().unwrap();
        let mut second = request(&semaphore, "other").err().unwrap();
        assert!(second.as_mut().now_or_never().is_none(), "only one while all permits are taken");
        drop(other);
        assert!(second.as_mut().now_or_never().unwrap().is_ok());
    }

    #[test]
    fn assigns_permits_to_namespaces_with_the_fewest() {
        let semaphore = FairSemaphore::new(2);
        let a = request(&semaphore, "a").ok().unwrap();
        let b = request(&semaphore, "b").ok().unwrap();
        let mut waiting_a = request(&semaphore, "a").err().unwrap();
        let mut waiting_b = request(&semaphore, "b").err().unwrap();
        drop(b);
        assert!(waiting_a.as_mut().now_or_never().is_none());
        let b = waiting_b.as_mut().now_or_never().unwrap().unwrap();
        drop((a, b));
        assert!(waiting_a.as_mut().now_or_never().unwrap().is_ok());
    }

    #[test]
    fn permits_of_cancelled_requests_are_passed_on() {
        let semaphore = FairSemaphore::new(1);
        let permit = request(&semaphore, "a").ok().unwrap();
        drop(request(&semaphore, "a").err().unwrap());
        let unnoticed = request(&semaphore, "a").err().unwrap();
        drop(permit);
        drop(unnoticed);
        assert!(request(&semaphore, "a").is_ok());
    }
}
