//! How far nodes may be filled.

use muster_types::settings::Settings;

/// Overcommit ratios and load targets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SchedulerPolicy {
    /// The number of vCPUs that may be committed per schedulable thread.
    pub cpu_overcommit: f64,
    pub memory_overcommit: f64,
    pub disk_overcommit: f64,
    /// The load per thread up to which a node is preferred.
    pub target_load: f64,
    /// The initial load that is expected of each vCPU of a new instance.
    pub demand_per_vcpu: f64,
    /// The time over which the expected load decays.
    pub demand_decay_seconds: f64,
    /// The seconds after its last check-in during which a node is used.
    pub max_silence: f64,
}

impl From<&Settings> for SchedulerPolicy {
    fn from(settings: &Settings) -> Self {
        Self {
            cpu_overcommit: settings.cpu_overcommit_ratio,
            memory_overcommit: settings.ram_overcommit_ratio,
            disk_overcommit: settings.scheduler_disk_overcommit,
            target_load: settings.scheduler_target_load,
            demand_per_vcpu: settings.scheduler_demand_per_vcpu,
            demand_decay_seconds: settings.scheduler_demand_decay_seconds as f64,
            max_silence: settings.node_checkin_maximum as f64 / 2.0,
        }
    }
}
