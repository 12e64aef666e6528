//! The stages of scheduling an instance.

use serde::{Deserialize, Serialize};

use crate::object::string_enum;

string_enum! {
    /// The stages in which the scheduler filters nodes, in order.
    SchedulingStage {
        /// The node is known and has checked in recently.
        PreSchedule = "pre_schedule",
        /// The node runs VMs.
        IsHypervisor = "is_hypervisor",
        /// The node has mounted the shared storage of the disks.
        SharedStorage = "shared_storage",
        CpuMaxPerInstance = "cpu_max_per_instance",
        SufficientIdleCpu = "sufficient_idle_cpu",
        SufficientIdleMemory = "sufficient_idle_memory",
        SufficientFreeDisk = "sufficient_free_disk",
        AffinityConstraints = "affinity_constraints",
        QueueState = "queue_state",
        SufficientIdleDisk = "sufficient_idle_disk",
        /// The node's capacity is reserved for the instance.
        CapacityGuard = "capacity_guard",
    }
}

impl SchedulingStage {
    /// Returns whether a retry may succeed without a change of the cluster's configuration.
    #[must_use]
    pub fn is_transient(self) -> bool {
        match self {
            Self::SufficientIdleCpu
            | Self::SufficientIdleMemory
            | Self::SufficientFreeDisk
            | Self::QueueState
            | Self::SufficientIdleDisk
            | Self::CapacityGuard => true,
            Self::PreSchedule
            | Self::IsHypervisor
            | Self::SharedStorage
            | Self::CpuMaxPerInstance
            | Self::AffinityConstraints => false,
        }
    }

    /// Explains why no node passed this stage. `transient` tells whether a later attempt may succeed.
    #[must_use]
    pub fn refusal(self, transient: bool) -> &'static str {
        match self {
            stage if stage.is_too_large(transient) => "no node is large enough",
            Self::PreSchedule => "no node is available",
            Self::IsHypervisor => "no node runs instances",
            Self::SharedStorage => "no node has mounted the shared storage of its disks",
            Self::CpuMaxPerInstance => "it requests more vCPUs than any node allows for one instance",
            Self::SufficientIdleCpu => "no node has enough vCPUs left",
            Self::SufficientIdleMemory => "no node has enough memory left",
            Self::SufficientFreeDisk => "no node has enough disk space left",
            Self::AffinityConstraints => "no node satisfies its affinity rules",
            Self::QueueState => "every node is busy with other operations",
            Self::SufficientIdleDisk => "the disks of every node are busy",
            Self::CapacityGuard => "the nodes filled up in the meantime",
        }
    }

    /// Returns what to do if no node passed this stage. `transient` tells whether a later attempt may succeed.
    #[must_use]
    pub fn advice(self, transient: bool) -> &'static str {
        match self {
            stage if stage.is_too_large(transient) => {
                "request less, or let an administrator add a larger node"
            }
            Self::PreSchedule | Self::IsHypervisor => {
                "an administrator can check the nodes with `muster node list`"
            }
            Self::SharedStorage => {
                "an administrator can check the storage with `muster node show` and set SHARED_STORAGE"
            }
            Self::CpuMaxPerInstance => "request fewer vCPUs",
            Self::AffinityConstraints => "relax --affinity, or create the instances that it requires first",
            Self::QueueState | Self::SufficientIdleDisk => "try again in a minute",
            Self::SufficientIdleCpu
            | Self::SufficientIdleMemory
            | Self::SufficientFreeDisk
            | Self::CapacityGuard => "request less, delete unused instances, or try again later",
        }
    }

    /// Returns whether no node could take the instance even if it had no other one.
    fn is_too_large(self, transient: bool) -> bool {
        self.is_transient() && !transient
    }
}
