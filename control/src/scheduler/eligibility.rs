//! Checks of a node that do not depend on the requested capacity.

use muster_types::node::NodeState;

use super::node_facts::NodeFacts;
use super::reject_reason::RejectReason;

/// The age in seconds after which the facts of a node are stale.
const MAX_FACTS_AGE: f64 = 120.0;
/// The number of queued operations above which a node is busy.
const MAX_QUEUED_OPERATIONS: f64 = 20.0;
/// The disk time per second, summed over all disks, above which a node is busy.
const MAX_DISK_BUSY_MS: f64 = 1200.0;

/// Checks that a node is up and has reported recently.
pub(super) fn pre_schedule(facts: &NodeFacts, now: f64) -> Result<(), RejectReason<'_>> {
    if facts.state != NodeState::Created {
        return Err(RejectReason::State(facts.state));
    }
    if facts.cpu_max <= 0.0 {
        return Err(RejectReason::NotReported);
    }
    if now - facts.lastseen > MAX_FACTS_AGE {
        return Err(RejectReason::Stale { seconds: now - facts.lastseen });
    }
    Ok(())
}

/// Checks that a node can run VMs.
pub(super) fn is_hypervisor(facts: &NodeFacts) -> Result<(), RejectReason<'_>> {
    if !facts.is_hypervisor {
        return Err(RejectReason::NotHypervisor);
    }
    facts.vms_unavailable.as_deref().map_or(Ok(()), |reason| Err(RejectReason::VmsUnavailable(reason)))
}

/// Checks that few operations are queued for a node.
pub(super) fn queue_state(facts: &NodeFacts) -> Result<(), RejectReason<'_>> {
    if facts.queued_operations > MAX_QUEUED_OPERATIONS {
        return Err(RejectReason::QueuedOperations(facts.queued_operations));
    }
    Ok(())
}

/// Checks that the disks of a node are not busy.
pub(super) fn sufficient_idle_disk(facts: &NodeFacts) -> Result<(), RejectReason<'_>> {
    if facts.disk_busy_ms > MAX_DISK_BUSY_MS {
        return Err(RejectReason::DiskBusy { ms: facts.disk_busy_ms });
    }
    Ok(())
}
