//! Migration: the connections between two nodes, and what the source of a migration needs from the control plane. See
//! docs/decisions/0070.

use std::os::unix::net::UnixStream;

use serde::{Deserialize, Serialize};

use crate::key::Secret;
use crate::node_future::NodeFuture;
use crate::object::string_enum;

/// The protocol to which connections between daemons change for the data of a migration: the bytes of QEMU.
pub const MIGRATION_PROTOCOL: &str = "muster-migration";

/// The downtime in milliseconds that a migration aims at by default.
pub const DEFAULT_DOWNTIME_LIMIT: u64 = 300;

string_enum! {
    /// The data that a connection of a migration carries.
    MigrationChannel {
        /// The memory and the devices of the VM. There is one such connection.
        Memory = "memory",
        /// NBD, for the content of one disk.
        Disk = "disk",
        /// Files: the log of the serial console, and the disks of a VM that is off.
        Files = "files",
        /// Copies of the disks for a replica, which is not part of a migration. See docs/decisions/0074.
        Replica = "replica",
    }
}

/// A connection to the VM on the target.
#[derive(Debug, Clone)]
pub struct MigrationConnection {
    pub channel: MigrationChannel,
    /// The password that the display keeps; only with [`MigrationChannel::Memory`].
    pub display_password: Option<Secret>,
}

/// What of a VM is migrated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigrationMode {
    /// A guest that runs or is paused, with its memory.
    Live,
    /// The disks of a VM that is off.
    Off,
}

/// How a VM is migrated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MigrationSettings {
    /// The downtime in milliseconds that is expected when the guest is stopped.
    pub downtime_limit_ms: Option<u64>,
    /// The maximum bandwidth in megabits per second.
    pub bandwidth_limit_mbps: Option<u64>,
    /// Whether the CPUs of the guest are slowed down if it changes memory faster than it is copied.
    pub auto_converge: bool,
}

/// The progress of a migration, in bytes of disks and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MigrationProgress {
    pub done: u64,
    pub total: u64,
}

/// The state of a VM that waits for its memory, or for the files of one that is off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IncomingState {
    /// It has not received everything.
    Waiting,
    /// It has received everything, and can continue.
    Loaded,
    /// It cannot continue, for this reason.
    Failed(String),
}

/// The outcome of [`MigrationDriver::switch_over`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SwitchOver {
    /// The instance is on the target. The VM on the source must not run again.
    Moved,
    /// The instance is still on the source, for this reason.
    Refused(String),
}

/// What the source of a migration needs from the control plane.
pub trait MigrationDriver: Send + Sync {
    /// Opens a connection to the VM on the target.
    fn connect(&self, connection: MigrationConnection) -> NodeFuture<'_, UnixStream>;

    /// Reports progress. An error cancels the migration.
    fn report_progress(&self, progress: MigrationProgress) -> NodeFuture<'_, ()>;

    /// Called while the guest is stopped and can still continue on the source. An error cancels the migration.
    fn prepare_switch_over(&self) -> NodeFuture<'_, ()>;

    /// Moves the instance to the target, which has received everything. The guest is stopped or off, and QEMU does not resume it by
    /// itself. An error means that the outcome is unknown: the guest stays stopped.
    fn switch_over(&self) -> NodeFuture<'_, SwitchOver>;
}
