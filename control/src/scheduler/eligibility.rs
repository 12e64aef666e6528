//! Checks of a node that do not depend on the requested capacity.

use muster_types::node::NodeState;

use super::node_facts::{BYTES_PER_GB, NodeFacts};
use super::policy::SchedulerPolicy;
use super::reject_reason::RejectReason;
use super::request::{PlacementRequest, StorageRequest};

/// The number of queued operations above which a node is busy.
const MAX_QUEUED_OPERATIONS: f64 = 20.0;
/// The disk time per second, summed over all disks, above which a node is busy.
const MAX_DISK_BUSY_MS: f64 = 1200.0;

/// Checks that a node is up, may get new instances, has reported its resources, has checked in recently, and reaches its peers.
pub(super) fn pre_schedule<'a>(
    facts: &'a NodeFacts,
    policy: &SchedulerPolicy,
) -> Result<(), RejectReason<'a>> {
    if facts.state != NodeState::Created {
        return Err(RejectReason::State(facts.state));
    }
    if let Some(reason) = facts.cordon {
        return Err(RejectReason::Cordoned(reason));
    }
    if facts.cpu_max <= 0.0 {
        return Err(RejectReason::NotReported);
    }
    if facts.silence > policy.max_silence {
        return Err(RejectReason::Stale { seconds: facts.silence });
    }
    facts.degraded.as_deref().map_or(Ok(()), |reason| Err(RejectReason::Degraded(reason)))
}

/// Checks that a node can run VMs.
pub(super) fn is_hypervisor(facts: &NodeFacts) -> Result<(), RejectReason<'_>> {
    if !facts.is_hypervisor {
        return Err(RejectReason::NotHypervisor);
    }
    facts.vms_unavailable.as_deref().map_or(Ok(()), |reason| Err(RejectReason::VmsUnavailable(reason)))
}

/// Checks that a node has mounted the shared storage that an instance needs, and that it has space for disks that it does not
/// have yet.
pub(super) fn shared_storage<'a>(
    request: &PlacementRequest,
    facts: &'a NodeFacts,
) -> Result<(), RejectReason<'a>> {
    let wanted = match request.storage {
        StorageRequest::Local | StorageRequest::Replica => return Ok(()),
        StorageRequest::AnyShared => None,
        StorageRequest::Shared(wanted) => Some(wanted),
    };
    let storage = facts.shared_storage.as_ref().ok_or(RejectReason::NoSharedStorage)?;
    let path = storage.path.as_str();
    // A full storage can still be used for the disks that it has.
    if wanted.is_some() && storage.uuid == wanted {
        return Ok(());
    }
    if let Some(problem) = &storage.problem {
        return Err(RejectReason::SharedStorageUnusable { path, problem });
    }
    if let Some(wanted) = wanted {
        return Err(RejectReason::OtherSharedStorage { path, wanted });
    }
    let (free, requested) = (storage.free as f64 / BYTES_PER_GB, request.disk_gb);
    if requested as f64 > free {
        return Err(RejectReason::SharedStorageFull { path, free, requested });
    }
    Ok(())
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
