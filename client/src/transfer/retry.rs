//! Retries with exponential backoff.

use std::time::Duration;

use tokio::time::sleep;

use crate::api::Error;
use crate::progress::ProgressMeter;

/// How often a request is retried, and when a connection counts as stalled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RetryPolicy {
    /// The maximum number of consecutive retries without any progress.
    pub(super) max_retries: u32,
    pub(super) min_backoff: Duration,
    pub(super) max_backoff: Duration,
    /// A connection without data for this long is stalled.
    pub(super) stall_timeout: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            max_retries: 8,
            min_backoff: Duration::from_millis(500),
            max_backoff: Duration::from_secs(15),
            stall_timeout: Duration::from_secs(120),
        }
    }
}

/// Counts consecutive failures.
#[derive(Debug)]
pub(crate) struct Retries {
    pub(super) policy: RetryPolicy,
    failures: u32,
}

impl Retries {
    pub(crate) fn new(policy: RetryPolicy) -> Self {
        Self { policy, failures: 0 }
    }

    /// Resets the count after progress.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }

    /// Waits before the next attempt. Returns the error if it is not retryable or occurred too often.
    pub(crate) async fn back_off(
        &mut self,
        error: Error,
        meter: Option<&ProgressMeter>,
    ) -> Result<(), Error> {
        if !error.is_retryable() || self.failures >= self.policy.max_retries {
            return Err(error);
        }
        let backoff = self.policy.min_backoff * 2_u32.saturating_pow(self.failures);
        let backoff = backoff.min(self.policy.max_backoff);
        self.failures += 1;
        if let Some(meter) = meter {
            meter.set_status(&format!("{error}; retrying in {:.0} s", backoff.as_secs_f64().ceil()));
        }
        sleep(backoff).await;
        if let Some(meter) = meter {
            meter.set_status("");
        }
        Ok(())
    }
}
