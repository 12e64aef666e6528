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
            Self::PreSchedule | Self::IsHypervisor | Self::CpuMaxPerInstance | Self::AffinityConstraints => {
                false
            }
        }
    }
}
