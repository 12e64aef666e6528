//! How long leases have not been renewed, by the clock of this daemon.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use muster_store::leases::Lease;
use parking_lot::Mutex;

/// Since when this daemon has seen leases unrenewed, by its monotonic clock. The clock of the database, by which leases expire, may
/// be set. See docs/decisions/0050.
#[derive(Debug, Default)]
pub struct LeaseObservations(Mutex<HashMap<String, ObservedLease>>);

#[derive(Debug, Clone)]
struct ObservedLease {
    lease: Lease,
    since: Instant,
}

impl ObservedLease {
    fn is(&self, lease: &Lease) -> bool {
        // A lease that was released and acquired again may have the same version.
        (self.lease.version, self.lease.expires.to_bits()) == (lease.version, lease.expires.to_bits())
            && self.lease.owner == lease.owner
    }
}

impl LeaseObservations {
    /// Records all leases of the cluster, which were received from the database at `received_at`. They may have been renewed until
    /// then.
    pub(crate) fn observe(&self, leases: &[Lease], received_at: Instant) {
        let mut observed = self.0.lock();
        let current = leases.iter().map(|lease| {
            let before = observed.remove(&lease.name).filter(|before| before.is(lease));
            let first = || ObservedLease { lease: lease.clone(), since: received_at };
            (lease.name.clone(), before.unwrap_or_else(first))
        });
        *observed = current.collect();
    }

    /// Returns the version of a lease if this daemon has seen it unrenewed for `length`, the duration of the lease: its owner no longer
    /// acts by it, whatever the clock of the database says.
    pub(crate) fn unrenewed(&self, lease: &Lease, length: Duration) -> Option<i64> {
        let observed = self.0.lock();
        let last = observed.get(&lease.name).filter(|last| last.is(lease))?;
        (last.since.elapsed() >= length).then_some(lease.version)
    }

    /// Returns the time until a lease counts as unrenewed unless its owner renews it.
    pub(crate) fn remaining(&self, lease: &Lease, length: Duration) -> Option<Duration> {
        let observed = self.0.lock();
        let last = observed.get(&lease.name).filter(|last| last.is(lease))?;
        Some(length.saturating_sub(last.since.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    const LENGTH: Duration = Duration::from_secs(12);

    fn lease(version: i64, expires: f64) -> Lease {
        let (name, owner, node) = ("job".to_owned(), "a".to_owned(), "n1".to_owned());
        Lease { name, owner, node, pid: 1, expires, version }
    }

    fn ago(seconds: u64) -> Instant {
        Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap()
    }

    #[test]
    fn lease_is_unrenewed_after_its_duration_by_the_clock_of_this_daemon() {
        let leases = LeaseObservations::default();
        // It has expired long ago by the clock of the database.
        let expired = lease(7, 0.0);
        assert_eq!(leases.unrenewed(&expired, LENGTH), None, "not observed");
        leases.observe(slice::from_ref(&expired), ago(11));
        leases.observe(slice::from_ref(&expired), ago(0));
        assert_eq!(leases.unrenewed(&expired, LENGTH), None, "observed for 11 seconds");
        let remaining = leases.remaining(&expired, LENGTH).unwrap();
        assert!(remaining <= Duration::from_secs(1), "{remaining:?}");
        // It expires in the far future.
        let renewed = lease(8, 1e12);
        leases.observe(slice::from_ref(&renewed), ago(13));
        assert_eq!(leases.unrenewed(&expired, LENGTH), None, "renewed");
        assert_eq!(leases.unrenewed(&renewed, LENGTH), Some(8));
        assert_eq!(leases.unrenewed(&lease(8, 5.0), LENGTH), None, "released and acquired again");
        leases.observe(&[], ago(0));
        assert_eq!(leases.unrenewed(&renewed, LENGTH), None, "released");
    }
}
