//! How long the caller of a request waits for its response.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use muster_types::time::now;
use muster_types::{Error, Result};

/// How often to check whether a caller has given up.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Until when a request may be started. A request whose caller has given up is not executed: the caller was told, or
/// assumes, that it failed. See docs/decisions/0057.
#[derive(Clone, Default)]
pub struct RequestDeadline {
    expires: Option<f64>,
    is_connected: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
}

impl fmt::Debug for RequestDeadline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestDeadline").field("expires", &self.expires).finish_non_exhaustive()
    }
}

impl RequestDeadline {
    /// Creates the deadline of a request from the time that its caller has set, if any, and a function that returns
    /// whether the caller is still connected.
    #[must_use]
    pub fn new(expires: Option<f64>, is_connected: Option<Arc<dyn Fn() -> bool + Send + Sync>>) -> Self {
        Self { expires, is_connected }
    }

    /// Returns the Unix time at which the caller gives up, if it has set one.
    #[must_use]
    pub fn expires(&self) -> Option<f64> {
        self.expires
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
        let is_expired = self.expires.is_some_and(|expires| expires <= now());
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
