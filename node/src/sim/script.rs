//! Scripts for the behaviour of simulated VMs.

use std::time::Duration;

use super::guests::GuestScript;

/// The behaviour of simulated VMs.
#[derive(Debug, Clone, Default)]
pub struct SimulationScript {
    /// The duration of a start.
    pub start_duration: Duration,
    /// The error with which every start fails.
    pub start_error: Option<String>,
    /// The error with which every build fails.
    pub build_error: Option<String>,
    /// The console output of a boot, in place of the default one.
    pub console_text: Option<String>,
    /// How long a migration copies.
    pub migration_duration: Duration,
    /// The error with which every migration from the node fails.
    pub migration_error: Option<String>,
    /// The error with which every copy from the node to a replica fails.
    pub replica_error: Option<String>,
    /// The bytes that every guest has written since its last copy to a replica, if they are known.
    pub replica_lag: Option<u64>,
    pub guest: GuestScript,
}
