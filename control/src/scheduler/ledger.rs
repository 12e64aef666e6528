//! What a node has promised, and whether it can promise more.

use muster_types::capacity::CommittedCapacity;

use super::shortage::Shortage;
use super::{Facts, Policy, Wish};

/// The decay of expected demand: after the whole time, e to the minus third is left, 5 %.
const DECAY: f64 = 3.0;

/// Returns the load still expected of new instances at `now`. The load of older instances is in the measured load.
fn expected_demand(committed: &CommittedCapacity, policy: &Policy, now: f64) -> f64 {
    // Clocks of two daemons may differ.
    let age = (now - committed.demand_at).max(0.0);
    if policy.demand_decay_seconds <= 0.0 {
        return 0.0;
    }
    committed.demand * (-DECAY * age / policy.demand_decay_seconds).exp()
}

/// Why a node does not promise it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denied {
    pub reason: String,
    /// Whether it has room and merely expects to be busy.
    pub only_demand: bool,
}

impl Denied {
    pub(super) fn new(shortage: &Shortage<'_>, only_demand: bool) -> Self {
        Self { reason: shortage.to_string(), only_demand }
    }
}

/// Promises an instance what it wishes: the new ledger, to be written while nobody else can change the old one.
pub fn claim(
    wish: &Wish,
    facts: &Facts,
    committed: &CommittedCapacity,
    policy: &Policy,
    now: f64,
    heed_demand: bool,
) -> Result<CommittedCapacity, Denied> {
    cpu_per_instance(wish, facts)
        .and_then(|()| cpu(wish, facts, committed, policy))
        .and_then(|()| memory(wish, facts, committed, policy))
        .and_then(|()| disk(wish, facts, committed, policy))
        .map_err(|shortage| Denied::new(&shortage, false))?;
    let expected = expected_demand(committed, policy, now);
    let more = wish.cpus as f64 * policy.demand_per_vcpu;
    let aim = facts.cpu_max * policy.target_load;
    if heed_demand && facts.load_1 + expected + more > aim {
        return Err(Denied::new(&Shortage::Demand { expected: facts.load_1 + expected, aim, more }, true));
    }
    Ok(CommittedCapacity {
        cpus: committed.cpus.saturating_add(wish.cpus),
        memory_mb: committed.memory_mb.saturating_add(wish.memory_mb),
        disk_gb: committed.disk_gb.saturating_add(wish.disk_gb),
        demand: expected + more,
        demand_at: now,
    })
}

/// Takes back what was promised to an instance. The load that is expected of it fades by itself.
#[must_use]
pub fn release(committed: &CommittedCapacity, cpus: i64, memory_mb: i64, disk_gb: i64) -> CommittedCapacity {
    let less = |from: i64, by: i64| from.saturating_sub(by).max(0);
    CommittedCapacity {
        cpus: less(committed.cpus, cpus),
        memory_mb: less(committed.memory_mb, memory_mb),
        disk_gb: less(committed.disk_gb, disk_gb),
        ..*committed
    }
}

/// What may be promised of something of which `total` is there and `reserved` is kept for the machine.
fn limit(total: f64, reserved: f64, overcommit: f64) -> f64 {
    (total - reserved).max(0.0) * overcommit
}

/// What a node may promise in all: processors, megabytes, gigabytes.
pub(super) fn limits(facts: &Facts, policy: &Policy) -> [f64; 3] {
    [
        limit(facts.cpu_schedulable, 0.0, policy.cpu_overcommit),
        limit(facts.memory_max_mb, facts.memory_reserved_mb, policy.memory_overcommit),
        limit(facts.disk_total_gb, facts.disk_reserved_gb, policy.disk_overcommit),
    ]
}

pub(super) fn cpu_per_instance<'a>(wish: &Wish, facts: &'a Facts) -> Result<(), Shortage<'a>> {
    let (most, wanted) = (facts.cpu_max_per_instance, wish.cpus);
    if wanted as f64 > most { Err(Shortage::CpuPerInstance { most, wanted }) } else { Ok(()) }
}

pub(super) fn cpu<'a>(
    wish: &Wish,
    facts: &'a Facts,
    committed: &CommittedCapacity,
    policy: &Policy,
) -> Result<(), Shortage<'a>> {
    let [limit, _, _] = limits(facts, policy);
    let (promised, wanted) = (committed.cpus as f64, wish.cpus);
    let taken = promised.max(facts.measured_vcpus);
    if taken + wanted as f64 > limit {
        return Err(Shortage::Cpu { taken, promised: promised >= taken, limit, wanted });
    }
    Ok(())
}

pub(super) fn memory<'a>(
    wish: &Wish,
    facts: &'a Facts,
    committed: &CommittedCapacity,
    policy: &Policy,
) -> Result<(), Shortage<'a>> {
    let wanted = wish.memory_mb;
    let free = facts.memory_available_mb - facts.memory_reserved_mb;
    if wanted as f64 > free {
        return Err(Shortage::MemoryFree { free: free.max(0.0), wanted });
    }
    let (used, limit_used) = (facts.memory_actual_mb, facts.memory_max_mb * policy.memory_overcommit);
    if used + wanted as f64 > limit_used {
        return Err(Shortage::MemoryUsed { used, limit: limit_used, wanted });
    }
    let [_, limit, _] = limits(facts, policy);
    let promised = committed.memory_mb;
    if promised as f64 + wanted as f64 > limit {
        return Err(Shortage::MemoryPromised { promised, limit, wanted });
    }
    Ok(())
}

pub(super) fn disk<'a>(
    wish: &Wish,
    facts: &'a Facts,
    committed: &CommittedCapacity,
    policy: &Policy,
) -> Result<(), Shortage<'a>> {
    let wanted = wish.disk_gb;
    let free = facts.disk_free_gb - facts.disk_reserved_gb;
    if wanted as f64 > free {
        return Err(Shortage::DiskFree { free: free.max(0.0), wanted });
    }
    let [_, _, limit] = limits(facts, policy);
    let promised = committed.disk_gb;
    if promised as f64 + wanted as f64 > limit {
        return Err(Shortage::DiskPromised { promised, limit, wanted });
    }
    Ok(())
}
