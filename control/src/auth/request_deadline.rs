//! How long the caller of a request waits for its response.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use muster_types::time::now;
use muster_types::{Error, Result};
use parking_lot::Mutex;

/// How often to check whether a caller has given up.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The deadline of a request that another daemon has forwarded. That daemon extends it while its caller waits.
#[derive(Debug)]
pub struct ForwardedDeadline(AtomicU64);

impl ForwardedDeadline {
    fn expires(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Acquire))
    }
}

/// The requests of other daemons that this one works on, by the ids that those daemons chose.
#[derive(Debug, Default)]
pub struct ForwardedRequests(Mutex<HashMap<String, Weak<ForwardedDeadline>>>);

impl ForwardedRequests {
    /// Registers a request until its deadline is dropped.
    pub fn begin(&self, id: &str, expires: f64) -> Arc<ForwardedDeadline> {
        let deadline = Arc::new(ForwardedDeadline(AtomicU64::new(expires.to_bits())));
        let mut requests = self.0.lock();
        requests.retain(|_, deadline| deadline.strong_count() > 0);
        requests.insert(id.to_owned(), Arc::downgrade(&deadline));
        deadline
    }

    /// Extends the deadline of a request, if it has not expired: the request may have been refused since.
    pub fn extend(&self, id: &str, expires: f64) {
        if let Some(deadline) = self.0.lock().get(id).and_then(Weak::upgrade)
            && deadline.expires() > now()
        {
            deadline.0.store(expires.to_bits(), Ordering::Release);
        }
    }
}

/// Until when a request may be started. A request whose caller has given up is not executed: the caller was told, or
/// assumes, that it failed. See docs/decisions/0057.
#[derive(Clone, Default)]
pub struct RequestDeadline {
    expires: Option<f64>,
    /// Replaces `expires` for a request that another daemon has forwarded.
    forwarded: Option<Arc<ForwardedDeadline>>,
    is_connected: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
}

impl fmt::Debug for RequestDeadline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestDeadline").field("expires", &self.expires()).finish_non_exhaustive()
    }
}

impl RequestDeadline {
    /// Creates the deadline of a request from the time that its caller has set, if any, and a function that returns
    /// whether the caller is still connected.
    #[must_use]
    pub fn new(expires: Option<f64>, is_connected: Option<Arc<dyn Fn() -> bool + Send + Sync>>) -> Self {
        Self { expires, forwarded: None, is_connected }
    }

    /// Returns the deadline of a request that another daemon has forwarded, and extends while its caller waits.
    #[must_use]
    pub fn forwarded(self, deadline: Arc<ForwardedDeadline>) -> Self {
        Self { forwarded: Some(deadline), ..self }
    }

    /// Returns the Unix time at which the caller gives up, if it has set one.
    #[must_use]
    pub fn expires(&self) -> Option<f64> {
        self.forwarded.as_ref().map(|deadline| deadline.expires()).or(self.expires)
    }

    /// Waits until the caller has given up, and returns the error of the request.
    pub async fn abandoned(&self) -> Error {
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            if let Err(error) = self.require_waiting() {
                return error;
            }
        }
    }

    /// Refuses the request if its caller has given up. Call it immediately before acting.
    pub fn require_waiting(&self) -> Result<()> {
        let is_expired = self.expires().is_some_and(|expires| expires <= now());
        if is_expired || self.is_connected.as_ref().is_some_and(|is_connected| !is_connected()) {
            return Err(Error::Unavailable(
                "the caller did not wait for this request, nothing was done".into(),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadline_of_a_forwarded_request_is_extended_until_it_expires() {
        let requests = ForwardedRequests::default();
        let begin = |id: &str, expires: f64| {
            RequestDeadline::new(Some(expires), None).forwarded(requests.begin(id, expires))
        };
        let (waiting, expired) = (begin("a", now() + 60.0), begin("b", now() - 1.0));
        let later = now() + 600.0;
        for id in ["a", "b", "unknown"] {
            requests.extend(id, later);
        }
        assert_eq!(waiting.expires(), Some(later));
        assert!(waiting.require_waiting().is_ok());
        assert!(expired.require_waiting().is_err(), "it may have been refused already");
        drop((waiting, expired));
        requests.begin("c", later);
        assert_eq!(requests.0.lock().len(), 1, "ended requests are forgotten");
    }

    #[test]
    fn refuses_expired_and_disconnected_requests() {
        let connected = |connected: bool| -> Option<Arc<dyn Fn() -> bool + Send + Sync>> {
            Some(Arc::new(move || connected))
        };
        for (expires, is_connected, is_refused) in [
            (None, None, false),
            (Some(now() + 60.0), connected(true), false),
            (Some(now() - 1.0), connected(true), true),
            (Some(now() + 60.0), connected(false), true),
            (None, connected(false), true),
        ] {
            let deadline = RequestDeadline::new(expires, is_connected);
            assert_eq!(deadline.require_waiting().is_err(), is_refused, "{expires:?}");
        }
    }
}
