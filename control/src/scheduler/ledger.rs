//! The ledger of a node: the capacity that is committed to instances, and whether more can be. See docs/decisions/0019.

use muster_types::capacity::CommittedCapacity;
use muster_types::node::NodeState;

use super::node_facts::NodeFacts;
use super::policy::SchedulerPolicy;
use super::reject_reason::RejectReason;
use super::request::{PlacementRequest, StorageRequest};

/// The decay constant of expected demand: after the decay time, e^-3 (5 %) of it is left.
const DEMAND_DECAY: f64 = 3.0;

/// Returns the load still expected of new instances at `now`. The load of older instances is in the measured load.
fn expected_demand(committed: &CommittedCapacity, policy: &SchedulerPolicy, now: f64) -> f64 {
    // The clocks of two daemons may differ.
    let age = (now - committed.demand_at).max(0.0);
    if policy.demand_decay_seconds <= 0.0 {
        return 0.0;
    }
    committed.demand * (-DEMAND_DECAY * age / policy.demand_decay_seconds).exp()
}

/// Why capacity is not committed to an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapacityDenied {
    pub reason: String,
    /// Whether only the expected load exceeds its target.
    pub only_demand: bool,
}

impl CapacityDenied {
    pub(super) fn new(reason: &RejectReason<'_>, only_demand: bool) -> Self {
        Self { reason: reason.to_string(), only_demand }
    }
}

/// Commits capacity to an instance. Returns the new ledger, which the caller writes while it holds the ledger's lock.
pub fn commit_capacity(
    request: &PlacementRequest,
    facts: &NodeFacts,
    committed: &CommittedCapacity,
    policy: &SchedulerPolicy,
    now: f64,
    include_demand: bool,
) -> Result<CommittedCapacity, CapacityDenied> {
    check_cpu_per_instance(request, facts)
        .and_then(|()| check_cpu(request, facts, committed, policy))
        .and_then(|()| check_memory(request, facts, committed, policy))
        .and_then(|()| check_disk(request, facts, committed, policy))
        .map_err(|reason| CapacityDenied::new(&reason, false))?;
    let expected = expected_demand(committed, policy, now);
    let added = request.cpus as f64 * policy.demand_per_vcpu;
    let target = facts.cpu_max * policy.target_load;
    if include_demand && facts.load_1 + expected + added > target {
        let reason = RejectReason::Demand { expected: facts.load_1 + expected, added, target };
        return Err(CapacityDenied::new(&reason, true));
    }
    Ok(CommittedCapacity {
        cpus: committed.cpus.saturating_add(request.cpus),
        memory_mb: committed.memory_mb.saturating_add(request.memory_mb),
        disk_gb: committed.disk_gb.saturating_add(request.node_disk_gb()),
        demand: expected + added,
        demand_at: now,
    })
}

/// Commits disk space only. Returns the new ledger, which the caller writes while it holds the ledger's lock.
pub fn commit_disk(
    request: &PlacementRequest,
    facts: &NodeFacts,
    committed: &CommittedCapacity,
    policy: &SchedulerPolicy,
) -> Result<CommittedCapacity, CapacityDenied> {
    check_disk(request, facts, committed, policy).map_err(|reason| CapacityDenied::new(&reason, false))?;
    let disk_gb = committed.disk_gb.saturating_add(request.node_disk_gb());
    Ok(CommittedCapacity { disk_gb, ..*committed })
}

/// Releases the capacity of an instance. Its expected demand decays by itself.
#[must_use]
pub fn release_capacity(
    committed: &CommittedCapacity,
    cpus: i64,
    memory_mb: i64,
    disk_gb: i64,
) -> CommittedCapacity {
    let subtract = |from: i64, amount: i64| from.saturating_sub(amount).max(0);
    CommittedCapacity {
        cpus: subtract(committed.cpus, cpus),
        memory_mb: subtract(committed.memory_mb, memory_mb),
        disk_gb: subtract(committed.disk_gb, disk_gb),
        ..*committed
    }
}

/// Returns the limit for a resource of which `reserved` is kept for the host.
fn limit(total: f64, reserved: f64, overcommit: f64) -> f64 {
    (total - reserved).max(0.0) * overcommit
}

/// Returns the maximum capacity that a node may commit: vCPUs, megabytes, gigabytes.
pub(super) fn limits(facts: &NodeFacts, policy: &SchedulerPolicy) -> [f64; 3] {
    [
        limit(facts.cpu_schedulable, 0.0, policy.cpu_overcommit),
        limit(facts.memory_max_mb, facts.memory_reserved_mb, policy.memory_overcommit),
        limit(facts.disk_total_gb, facts.disk_reserved_gb, policy.disk_overcommit),
    ]
}

/// Returns whether a node could take an instance if it had no other and its whole memory and disk were free.
pub(super) fn fits_empty_node(
    request: &PlacementRequest,
    facts: &NodeFacts,
    policy: &SchedulerPolicy,
) -> bool {
    let is_allowed = request.required_node.is_none_or(|required| required == facts.id)
        && facts.state != NodeState::Deleted
        && facts.is_hypervisor;
    let [cpus, memory, disk] = limits(facts, policy);
    let memory = memory.min(facts.memory_max_mb - facts.memory_reserved_mb);
    let disk = disk.min(facts.disk_total_gb - facts.disk_reserved_gb);
    is_allowed
        && check_cpu_per_instance(request, facts).is_ok()
        && request.cpus as f64 <= cpus
        && request.memory_mb as f64 <= memory
        && request.node_disk_gb() as f64 <= disk
}

pub(super) fn check_cpu_per_instance<'a>(
    request: &PlacementRequest,
    facts: &'a NodeFacts,
) -> Result<(), RejectReason<'a>> {
    let (max, requested) = (facts.cpu_max_per_instance, request.cpus);
    if requested as f64 > max { Err(RejectReason::CpuPerInstance { max, requested }) } else { Ok(()) }
}

pub(super) fn check_cpu<'a>(
    request: &PlacementRequest,
    facts: &'a NodeFacts,
    committed: &CommittedCapacity,
    policy: &SchedulerPolicy,
) -> Result<(), RejectReason<'a>> {
    let [limit, _, _] = limits(facts, policy);
    let (committed, requested) = (committed.cpus as f64, request.cpus);
    let taken = committed.max(facts.measured_vcpus);
    if taken + requested as f64 > limit {
        return Err(RejectReason::Cpu { taken, is_measured: committed < taken, limit, requested });
    }
    Ok(())
}

pub(super) fn check_memory<'a>(
    request: &PlacementRequest,
    facts: &'a NodeFacts,
    committed: &CommittedCapacity,
    policy: &SchedulerPolicy,
) -> Result<(), RejectReason<'a>> {
    let requested = request.memory_mb;
    let free = facts.memory_available_mb - facts.memory_reserved_mb;
    if requested as f64 > free {
        return Err(RejectReason::MemoryFree { free: free.max(0.0), requested });
    }
    let (used, used_limit) = (facts.memory_actual_mb, facts.memory_max_mb * policy.memory_overcommit);
    if used + requested as f64 > used_limit {
        return Err(RejectReason::MemoryUsed { used, limit: used_limit, requested });
    }
    let [_, limit, _] = limits(facts, policy);
    let committed = committed.memory_mb;
    if committed as f64 + requested as f64 > limit {
        return Err(RejectReason::MemoryCommitted { committed, limit, requested });
    }
    Ok(())
}

pub(super) fn check_disk<'a>(
    request: &PlacementRequest,
    facts: &'a NodeFacts,
    committed: &CommittedCapacity,
    policy: &SchedulerPolicy,
) -> Result<(), RejectReason<'a>> {
    if request.storage != StorageRequest::Local {
        return Ok(());
    }
    let requested = request.disk_gb;
    let free = facts.disk_free_gb - facts.disk_reserved_gb;
    if requested as f64 > free {
        return Err(RejectReason::DiskFree { free: free.max(0.0), requested });
    }
    let [_, _, limit] = limits(facts, policy);
    let committed = committed.disk_gb;
    if committed as f64 + requested as f64 > limit {
        return Err(RejectReason::DiskCommitted { committed, limit, requested });
    }
    Ok(())
}
