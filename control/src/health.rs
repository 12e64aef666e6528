//! Whether this daemon should be sent requests: the database answers, and it is not about to stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use muster_types::time::now;

use crate::app::App;

const POLL: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(2);
/// Failures in a row before the daemon calls itself not ready.
const TOLERATED: u32 = 3;
/// A result older than this counts for nothing, in seconds.
const STALE: u64 = 15;

/// The last word on the database, and whether we are draining.
#[derive(Debug, Default)]
pub struct Health {
    good: AtomicBool,
    /// Unix second of the last look.
    looked: AtomicU64,
    draining: AtomicBool,
}

impl Health {
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.good.load(Ordering::Relaxed)
            && !self.draining.load(Ordering::Relaxed)
            && seconds().saturating_sub(self.looked.load(Ordering::Relaxed)) <= STALE
    }

    /// From now on the daemon is not ready, whatever the database says.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    fn observe(&self, good: bool) {
        self.good.store(good, Ordering::Relaxed);
        self.looked.store(seconds(), Ordering::Relaxed);
    }
}

/// Looks at the database for as long as the daemon lives.
pub async fn watch(app: Arc<App>) {
    let mut failures = 0;
    loop {
        let answer = tokio::time::timeout(PATIENCE, app.store.query("SELECT 1", &[])).await;
        if matches!(answer, Ok(Ok(_))) {
            failures = 0;
            app.health.observe(true);
        } else {
            failures += 1;
            tracing::warn!(failures, "database does not answer");
            if failures >= TOLERATED {
                app.health.observe(false);
            }
        }
        tokio::time::sleep(POLL).await;
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
