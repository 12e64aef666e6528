//! Why a node cannot take an instance. The text is only formatted for reports.

use std::fmt;

use muster_types::ids::StorageId;
use muster_types::node::{CordonReason, NodeState};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum RejectReason<'a> {
    State(NodeState),
    Cordoned(CordonReason),
    NotReported,
    Stale {
        seconds: f64,
    },
    Degraded(&'a str),
    NotHypervisor,
    VmsUnavailable(&'a str),
    NoSharedStorage,
    SharedStorageUnusable {
        path: &'a str,
        problem: &'a str,
    },
    OtherSharedStorage {
        path: &'a str,
        wanted: StorageId,
    },
    CpuPerInstance {
        max: f64,
        requested: i64,
    },
    Cpu {
        taken: f64,
        /// Whether `taken` is measured rather than committed.
        is_measured: bool,
        limit: f64,
        requested: i64,
    },
    MemoryFree {
        free: f64,
        requested: i64,
    },
    MemoryUsed {
        used: f64,
        limit: f64,
        requested: i64,
    },
    MemoryCommitted {
        committed: i64,
        limit: f64,
        requested: i64,
    },
    DiskFree {
        free: f64,
        requested: i64,
    },
    SharedStorageFull {
        path: &'a str,
        free: f64,
        requested: i64,
    },
    DiskCommitted {
        committed: i64,
        limit: f64,
        requested: i64,
    },
    /// Other namespaces have claims on the free capacity of the cluster.
    ClaimedByOthers {
        resource: &'a str,
        free: f64,
        claimed: i64,
        requested: i64,
    },
    TagMissing(&'a str),
    TagUnwanted(&'a str),
    QueuedOperations(f64),
    DiskBusy {
        ms: f64,
    },
    Demand {
        expected: f64,
        added: f64,
        target: f64,
    },
}

impl fmt::Display for RejectReason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::State(state) => write!(f, "its state is {state}"),
            Self::Cordoned(CordonReason::Drain) => f.write_str("it is being drained"),
            Self::Cordoned(CordonReason::Maintenance) => f.write_str("it is in maintenance"),
            Self::NotReported => f.write_str("it has not reported its resources"),
            Self::Stale { seconds } => write!(f, "its last check-in was {seconds:.0} seconds ago"),
            Self::Degraded(reason) => write!(f, "it is degraded: {reason}"),
            Self::NotHypervisor => f.write_str("it is not a hypervisor"),
            Self::VmsUnavailable(reason) => write!(f, "it cannot run VMs: {reason}"),
            Self::NoSharedStorage => f.write_str("it has no shared storage (SHARED_STORAGE)"),
            Self::SharedStorageUnusable { path, problem } => {
                write!(f, "its shared storage {path} cannot be used: {problem}")
            }
            Self::OtherSharedStorage { path, wanted } => {
                write!(f, "its shared storage {path} is not {wanted}, which has the disks")
            }
            Self::SharedStorageFull { path, free, requested } => {
                write!(f, "{free:.1} GB are free on its shared storage {path}, {requested} GB are requested")
            }
            Self::CpuPerInstance { max, requested } => {
                write!(f, "an instance may have {max} vCPUs, {requested} are requested")
            }
            Self::Cpu { taken, is_measured, limit, requested } => {
                let how = if is_measured { "in use" } else { "committed" };
                write!(f, "{taken} of {limit} vCPUs are {how}, {requested} more are requested")
            }
            Self::MemoryFree { free, requested } => {
                write!(f, "{free:.0} MB of memory are free beyond the reserve, {requested} MB are requested")
            }
            Self::MemoryUsed { used, limit, requested } => {
                write!(
                    f,
                    "instances use {used:.0} of {limit:.0} MB of memory, {requested} MB more are requested"
                )
            }
            Self::MemoryCommitted { committed, limit, requested } => {
                write!(
                    f,
                    "{committed} of {limit:.0} MB of memory are committed, {requested} MB more are requested"
                )
            }
            Self::DiskFree { free, requested } => {
                write!(f, "{free:.1} GB of disk are free beyond the reserve, {requested} GB are requested")
            }
            Self::DiskCommitted { committed, limit, requested } => {
                write!(
                    f,
                    "{committed} of {limit:.1} GB of disk are committed, {requested} GB more are requested"
                )
            }
            Self::ClaimedByOthers { resource, free, claimed, requested } => write!(
                f,
                "{claimed} of the {free:.0} {resource} that are free in the cluster are claimed by other namespaces, \
                 {requested} are requested"
            ),
            Self::TagMissing(tag) => write!(f, "it has no instance with the tag {tag:?}"),
            Self::TagUnwanted(tag) => write!(f, "it has an instance with the tag {tag:?}"),
            Self::QueuedOperations(count) => write!(f, "{count} operations are queued for it"),
            Self::DiskBusy { ms } => write!(f, "its disks are busy for {ms:.0} ms per second"),
            Self::Demand { expected, added, target } => {
                write!(
                    f,
                    "the expected load of {expected:.1} plus {added:.1} exceeds the target of {target:.1}"
                )
            }
        }
    }
}
