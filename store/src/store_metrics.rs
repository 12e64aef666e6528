//! How long statements and transactions take, and how they fail. Kept in memory.

use std::time::Instant;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use crate::error::StoreError;

/// The limits of the buckets of durations, in seconds.
const BUCKETS: [f64; 10] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0];

/// What a store has measured since the daemon started.
#[derive(Debug, Clone)]
pub struct StoreMetrics {
    /// The seconds that single statements took.
    pub statements: Histogram,
    /// The seconds from the beginning to the end of transactions.
    pub transactions: Histogram,
    /// Failed statements and commits by the kind of their error.
    pub errors: Family<[(&'static str, &'static str); 1], Counter>,
}

impl Default for StoreMetrics {
    fn default() -> Self {
        Self {
            statements: Histogram::new(BUCKETS),
            transactions: Histogram::new(BUCKETS),
            errors: Family::default(),
        }
    }
}

impl StoreMetrics {
    /// Measures a statement, and counts its error.
    pub(crate) fn measure<T>(
        &self,
        started: Instant,
        outcome: Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.statements.observe(started.elapsed().as_secs_f64());
        outcome.inspect_err(|error| self.failed(error))
    }

    /// Counts an error, unless it is an expected outcome of a statement.
    pub(crate) fn failed(&self, error: &StoreError) {
        let kind = match error {
            StoreError::Duplicate(_) | StoreError::DuplicateColumn(_) | StoreError::TooLong(_) => return,
            StoreError::Conflict(_) => "conflict",
            StoreError::StaleEpoch(_) => "stale_epoch",
            StoreError::Unavailable(_) => "unavailable",
            StoreError::OutcomeUnknown(_) => "outcome_unknown",
            StoreError::DiskFull(_) => "disk_full",
            StoreError::ReadOnly(_) => "read_only",
            StoreError::Internal(_) => "internal",
        };
        self.errors.get_or_create(&[("kind", kind)]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_errors_that_are_not_expected() {
        let metrics = StoreMetrics::default();
        let failed = |error| metrics.measure::<()>(Instant::now(), Err(error)).is_err();
        assert!(failed(StoreError::Duplicate("key".into())) && failed(StoreError::Unavailable("x".into())));
        assert_eq!(metrics.errors.get_or_create(&[("kind", "unavailable")]).get(), 1);
        assert!(metrics.errors.get(&[("kind", "duplicate")]).is_none());
    }
}
