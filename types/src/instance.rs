//! Instances: the API's objects for VMs. See docs/decisions/0018 and 0021.
//!
//! ```text
//! initial ──▶ preflight ──▶ creating ──▶ created
//!    │            │            │            │
//!    ├────────────┴────────────┴────────────┴──delete──▶ delete-wait ──everything removed──▶ deleted ──cleaner──▶ (row removed)
//!    ▼            ▼            ▼            ▼                │  ▲
//! initial-error preflight-error creating-error created-error │  │ delete
//!    └────────────┴──────┬─────┴────────────┘                ▼  │
//!                        └──its resources are released─▶ error ─┘   (delete-wait-error ──▶ error)
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::agent_operation::AgentOperationRecord;
use crate::guest::AgentState;
use crate::ids::{BlobId, InstanceId};
use crate::interface::InterfaceRecord;
use crate::object::{Reference, string_enum};
use crate::operation::OperationHandle;
use crate::spec::{DiskBus, DiskSpec, VideoSpec};

string_enum! {
    /// The lifecycle of an instance.
    InstanceState {
        Initial = "initial",
        InitialError = "initial-error",
        Preflight = "preflight",
        PreflightError = "preflight-error",
        Creating = "creating",
        CreatingError = "creating-error",
        Created = "created",
        CreatedError = "created-error",
        DeleteWait = "delete-wait",
        DeleteWaitError = "delete-wait-error",
        Error = "error",
        Deleted = "deleted",
    }
}

impl InstanceState {
    /// Returns whether an instance may change from this state to `next`.
    #[must_use]
    pub fn can_transition_to(self, next: Self) -> bool {
        use InstanceState as S;
        match self {
            S::Initial => matches!(next, S::Preflight | S::DeleteWait | S::Deleted | S::InitialError),
            S::Preflight => matches!(next, S::Creating | S::DeleteWait | S::Deleted | S::PreflightError),
            S::Creating => {
                matches!(next, S::Created | S::DeleteWait | S::Deleted | S::CreatingError | S::Error)
            }
            S::Created => matches!(next, S::DeleteWait | S::Deleted | S::CreatedError | S::Error),
            S::InitialError | S::PreflightError | S::CreatingError | S::CreatedError => {
                matches!(next, S::DeleteWait | S::Deleted | S::Error)
            }
            S::Error => matches!(next, S::DeleteWait | S::Deleted),
            S::DeleteWait => matches!(next, S::Deleted | S::DeleteWaitError),
            S::DeleteWaitError => matches!(next, S::Error),
            S::Deleted => false,
        }
    }

    /// Returns the state after a failure in this state, or `None` if nothing can fail in it.
    #[must_use]
    pub fn error_state(self) -> Option<Self> {
        match self {
            Self::Initial => Some(Self::InitialError),
            Self::Preflight => Some(Self::PreflightError),
            Self::Creating => Some(Self::CreatingError),
            Self::Created => Some(Self::CreatedError),
            Self::DeleteWait => Some(Self::DeleteWaitError),
            Self::InitialError
            | Self::PreflightError
            | Self::CreatingError
            | Self::CreatedError
            | Self::DeleteWaitError
            | Self::Error
            | Self::Deleted => None,
        }
    }

    /// Returns whether the instance is being created or was created, and is not being deleted.
    #[must_use]
    pub fn is_active(self) -> bool {
        match self {
            Self::Initial | Self::Preflight | Self::Creating | Self::Created => true,
            Self::InitialError
            | Self::PreflightError
            | Self::CreatingError
            | Self::CreatedError
            | Self::DeleteWait
            | Self::DeleteWaitError
            | Self::Error
            | Self::Deleted => false,
        }
    }
}

string_enum! {
    /// The power state of an instance.
    PowerState {
        /// It was never powered on.
        Initial = "initial",
        On = "on",
        Off = "off",
        Paused = "paused",
        /// Its VM ended unexpectedly.
        Crashed = "crashed",
    }
}

string_enum! {
    /// The machine type of a VM.
    MachineType {
        Pc = "pc",
        Q35 = "q35",
    }
}

string_enum! {
    /// How an instance gets its metadata.
    ConfigDriveType {
        OpenStackDisk = "openstack-disk",
        None = "none",
    }
}

string_enum! {
    /// Channels to the agent in a guest, independent of its networks.
    SideChannel {
        /// A virtio serial port.
        Agent = "sf-agent",
        /// A vsock socket.
        Agent2 = "sf-agent2",
    }
}

/// A disk of an instance, with its assigned device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskRecord {
    /// Its name in the guest, such as `vda`.
    pub device: String,
    pub bus: DiskBus,
    /// In gigabytes; `null` for the config drive.
    pub size: Option<u64>,
    /// The blob that is its initial content.
    pub blob_uuid: Option<BlobId>,
    /// Whether snapshots omit it.
    pub snapshot_ignores: bool,
}

/// A disk as it was requested.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskSpecRecord {
    #[serde(flatten)]
    pub spec: DiskSpec,
    /// The blob that its base was resolved to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob_uuid: Option<BlobId>,
}

/// An instance as the API returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct InstanceRecord {
    pub uuid: InstanceId,
    pub name: String,
    pub namespace: String,
    pub state: InstanceState,
    /// Why the state is `error`.
    pub error_message: Option<String>,
    pub power_state: PowerState,
    pub cpus: i64,
    /// In megabytes.
    pub memory: i64,
    pub disk_spec: Vec<DiskSpecRecord>,
    /// Empty until devices are assigned.
    pub disks: Vec<DiskRecord>,
    pub video: VideoSpec,
    pub ssh_key: Option<String>,
    /// As it was sent, in base64.
    pub user_data: Option<String>,
    pub uefi: bool,
    pub secure_boot: bool,
    pub configdrive: ConfigDriveType,
    pub nvram_template: Option<String>,
    pub machine_type: MachineType,
    pub side_channels: Vec<SideChannel>,
    pub agent_state: Option<String>,
    /// Unix time.
    pub agent_start_time: Option<f64>,
    /// Unix time.
    pub agent_system_boot_time: Option<f64>,
    /// The port of the serial console on the node, a telnet server.
    pub console_port: Option<u16>,
    /// The port of the display on the node.
    pub vdi_port: Option<u16>,
    /// The port of the display over TLS.
    pub vdi_tls_port: Option<u16>,
    /// The name of its node.
    pub node: Option<String>,
    /// The node that the caller requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_placement: Option<String>,
    pub interfaces: Vec<InterfaceRecord>,
    pub last_cluster_operation: Option<OperationHandle>,
    /// The pending agent operations, in order.
    pub agent_operations_queue: Vec<AgentOperationRecord>,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    pub version: i64,
    #[schema(value_type = Object)]
    pub references_to: BTreeMap<String, Vec<Reference>>,
    #[schema(value_type = Object)]
    pub references_from: BTreeMap<String, Vec<Reference>>,
}

/// Returns whether an agent state, such as `ready (degraded)`, means that the agent accepts operations.
#[must_use]
pub fn agent_is_ready(agent_state: Option<&str>) -> bool {
    agent_state.is_some_and(|state| AgentState::from(state).is_ready())
}
