//! Replicas: copies of the disks of an instance on another node, and what their source needs from the control plane. See
//! docs/decisions/0074.
//!
//! ```text
//! initial ──first copy──▶ complete ──evacuation──▶ restoring
//!    └───────────────────────┴──────────────────────────┴──▶ deleting ──files removed──▶ (row removed)
//! ```

use std::os::unix::net::UnixStream;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::node_future::NodeFuture;
use crate::object::string_enum;

/// The maximum number of replicas of an instance.
pub const MAX_REPLICAS: i64 = 1;

string_enum! {
    /// The state of a replica.
    ReplicaState {
        /// It has no complete copy yet.
        Initial = "initial",
        /// It has the disks as of one point in time.
        Complete = "complete",
        /// It becomes the disks of the instance, whose host is lost.
        Restoring = "restoring",
        /// Its node removes it.
        Deleting = "deleting",
    }
}

/// The replica of an instance in API responses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ReplicaRecord {
    /// The name of the node that has the replica.
    pub node: Option<String>,
    /// The state of the replica.
    pub state: ReplicaState,
    /// Unix time that the content of the replica dates from; `null` without a complete copy.
    pub last_complete: Option<f64>,
    /// The whole seconds since then: the changes of this time would be lost with the host now. `null` without a complete copy.
    pub seconds_behind: Option<i64>,
    /// The bytes that the guest has written since then, which would be lost as well: measured about every ten seconds. `null` if
    /// that is not known. 0 if the instance is off and was copied since.
    #[serde(default)]
    pub bytes_behind: Option<i64>,
    /// Why the last copy failed; `null` if it did not.
    pub error: Option<String>,
}

/// A copy of all disks of a VM to its replica.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReplicaCopy {
    /// The time of the control plane's clock that the copy dates from, or a little earlier.
    pub time: f64,
    /// The number of bytes that were sent.
    pub bytes: u64,
    /// Whether only changes since the last copy were sent.
    pub incremental: bool,
}

/// What the source of a replica needs from the control plane.
pub trait ReplicaDriver: Send + Sync {
    /// Opens a connection to the replica.
    fn connect(&self) -> NodeFuture<'_, UnixStream>;

    /// Returns the time.
    fn now(&self) -> f64;
}
