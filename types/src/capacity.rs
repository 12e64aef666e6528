//! Amounts of compute capacity, and the capacity ledger of a node.

/// An amount of virtual CPUs, memory and disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capacity {
    pub cpus: i64,
    pub memory_mb: i64,
    pub disk_gb: i64,
}

impl Capacity {
    /// The API's names of the dimensions, in the order of [`parts`](Self::parts).
    pub const NAMES: [&'static str; 3] = ["cpus", "memory_mb", "disk_gb"];

    #[must_use]
    pub fn parts(&self) -> [i64; 3] {
        [self.cpus, self.memory_mb, self.disk_gb]
    }

    /// Adds `other` per dimension, saturating.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        self.zip(other, i64::saturating_add)
    }

    /// Subtracts `other` per dimension, stopping at zero.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        self.zip(other, |have, less| have.saturating_sub(less).max(0))
    }

    fn zip(&self, other: &Self, combine: impl Fn(i64, i64) -> i64) -> Self {
        Self {
            cpus: combine(self.cpus, other.cpus),
            memory_mb: combine(self.memory_mb, other.memory_mb),
            disk_gb: combine(self.disk_gb, other.disk_gb),
        }
    }
}

/// The capacity that a node has committed to its instances: its capacity ledger. See docs/decisions/0019.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CommittedCapacity {
    pub cpus: i64,
    pub memory_mb: i64,
    pub disk_gb: i64,
    /// The load expected of new instances, as of `demand_at`.
    pub demand: f64,
    /// Unix time of `demand`.
    pub demand_at: f64,
}
