//! Readiness of this daemon: the database responds, and the daemon is not draining.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use muster_types::time::now;

use muster_store::Store;

pub(crate) const CHECK_INTERVAL: Duration = Duration::from_secs(5);
const QUERY_TIMEOUT: Duration = Duration::from_secs(2);
/// Consecutive failures after which the daemon reports that it is not ready.
const MAX_FAILURES: u32 = 3;
/// The age in seconds after which a result no longer counts.
const RESULT_TTL: u64 = 15;

/// The last result of the database check, and whether the daemon is draining.
#[derive(Debug, Default)]
pub struct Health {
    database_ok: AtomicBool,
    /// Unix time of the last check, in seconds.
    checked: AtomicU64,
    draining: AtomicBool,
}

impl Health {
    /// Returns whether the daemon should receive requests.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.database_ok.load(Ordering::Relaxed)
            && !self.draining.load(Ordering::Relaxed)
            && seconds().saturating_sub(self.checked.load(Ordering::Relaxed)) <= RESULT_TTL
    }

    /// Marks the daemon as draining: it is not ready from now on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Returns whether the daemon is draining.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Records that the database responded to a statement, which saves the next check.
    pub(crate) fn database_responded(&self) {
        self.observe(true);
    }

    /// Returns whether the database responded within the interval of the checks.
    fn is_current(&self) -> bool {
        self.database_ok.load(Ordering::Relaxed)
            && seconds().saturating_sub(self.checked.load(Ordering::Relaxed)) < CHECK_INTERVAL.as_secs()
    }

    fn observe(&self, ok: bool) {
        self.database_ok.store(ok, Ordering::Relaxed);
        self.checked.store(seconds(), Ordering::Relaxed);
    }
}

/// Checks the database until the task is aborted.
pub async fn watch(health: Arc<Health>, store: Arc<Store>) {
    let mut failures = 0;
    loop {
        if health.is_current() {
            failures = 0;
            tokio::time::sleep(CHECK_INTERVAL).await;
            continue;
        }
        let error = match tokio::time::timeout(QUERY_TIMEOUT, store.query("SELECT 1", &[])).await {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(timeout) => Some(timeout.to_string()),
        };
        if let Some(error) = error {
            failures += 1;
            tracing::warn!(error, failures, "database health check failed");
            if failures >= MAX_FAILURES {
                health.observe(false);
            }
        } else {
            failures = 0;
            health.observe(true);
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "Unix time is positive and small"
)]
fn seconds() -> u64 {
    now() as u64
}
