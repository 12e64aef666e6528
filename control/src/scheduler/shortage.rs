//! Why a node cannot take an instance. Most nodes can: the sentence is only made when somebody reads it.

use std::fmt;

use muster_types::node::NodeState;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Shortage<'a> {
    State(NodeState),
    NoFacts,
    /// For so many seconds.
    Silent(f64),
    NoHypervisor,
    Refuses(&'a str),
    CpuPerInstance {
        most: f64,
        wanted: i64,
    },
    Cpu {
        taken: f64,
        /// Or measured.
        promised: bool,
        limit: f64,
        wanted: i64,
    },
    MemoryFree {
        free: f64,
        wanted: i64,
    },
    MemoryUsed {
        used: f64,
        limit: f64,
        wanted: i64,
    },
    MemoryPromised {
        promised: i64,
        limit: f64,
        wanted: i64,
    },
    DiskFree {
        free: f64,
        wanted: i64,
    },
    DiskPromised {
        promised: i64,
        limit: f64,
        wanted: i64,
    },
    /// Of the whole cluster, to other namespaces.
    PromisedElsewhere {
        what: &'a str,
        free: f64,
        promised: i64,
        wanted: i64,
    },
    TagMissing(&'a str),
    TagUnwanted(&'a str),
    Waiting(f64),
    DiskBusy(f64),
    Demand {
        expected: f64,
        aim: f64,
        more: f64,
    },
}

impl fmt::Display for Shortage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::State(state) => write!(f, "its state is {state}"),
            Self::NoFacts => f.write_str("it has not reported its resources"),
            Self::Silent(seconds) => write!(f, "it was last heard of {seconds:.0} seconds ago"),
            Self::NoHypervisor => f.write_str("it is not a hypervisor"),
            Self::Refuses(reason) => write!(f, "it cannot run machines: {reason}"),
            Self::CpuPerInstance { most, wanted } => {
                write!(f, "an instance may have {most} vCPUs, {wanted} are wanted")
            }
            Self::Cpu { taken, promised, limit, wanted } => {
                let how = if promised { "promised" } else { "in use" };
                write!(f, "{taken} of {limit} vCPUs are {how}, {wanted} more are wanted")
            }
            Self::MemoryFree { free, wanted } => {
                write!(f, "{free:.0} MB of memory are free beside the reserve, {wanted} MB are wanted")
            }
            Self::MemoryUsed { used, limit, wanted } => write!(
                f,
                "instances use {used:.0} MB of memory where {limit:.0} MB are allowed, {wanted} MB more are wanted"
            ),
            Self::MemoryPromised { promised, limit, wanted } => {
                write!(f, "{promised} of {limit:.0} MB of memory are promised, {wanted} MB more are wanted")
            }
            Self::DiskFree { free, wanted } => {
                write!(f, "{free:.1} GB of disk are free beside the reserve, {wanted} GB are wanted")
            }
            Self::DiskPromised { promised, limit, wanted } => {
                write!(f, "{promised} of {limit:.1} GB of disk are promised, {wanted} GB more are wanted")
            }
            Self::PromisedElsewhere { what, free, promised, wanted } => write!(
                f,
                "{promised} of the {free:.0} {what} that are free in the cluster are promised to other namespaces, \
                 {wanted} are wanted"
            ),
            Self::TagMissing(tag) => write!(f, "no instance with the tag {tag:?} is here"),
            Self::TagUnwanted(tag) => write!(f, "an instance with the tag {tag:?} is here"),
            Self::Waiting(jobs) => write!(f, "{jobs} jobs wait for it"),
            Self::DiskBusy(busy) => write!(f, "its disks are busy for {busy:.0} ms of a second"),
            Self::Demand { expected, aim, more } => {
                write!(
                    f,
                    "a load of {expected:.1} is expected, {more:.1} would be added, {aim:.1} is the aim"
                )
            }
        }
    }
}
