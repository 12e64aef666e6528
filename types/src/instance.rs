//! Instances: virtual machines as the API knows them.
//!
//! ```text
//! initial ──▶ preflight ──▶ creating ──▶ created
//!    │            │            │            │
//!    ├────────────┴────────────┴────────────┴──delete──▶ delete-wait ──nothing of it left──▶ deleted ──cleaner──▶ (row gone)
//!    ▼            ▼            ▼            ▼                │  ▲
//! initial-error preflight-error creating-error created-error │  │ delete
//!    └────────────┴──────┬─────┴────────────┘                ▼  │
//!                        └──what it had is given back──▶ error ─┘   (delete-wait-error ──▶ error)
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::agent_operation::AgentOperationRecord;
use crate::ids::{BlobId, InstanceId};
use crate::interface::InterfaceRecord;
use crate::object::{Reference, string_enum};
use crate::operation::OperationHandle;
use crate::spec::{DiskBus, DiskSpec, VideoSpec};

string_enum! {
    /// The life of an instance.
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
    /// Whether an instance may go from here to `next`.
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

    /// The state that says that what was under way here failed, if anything can fail here.
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

    /// Whether it is on its way to run, or runs.
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
    /// Whether a machine is switched on.
    PowerState {
        /// It was never switched on.
        Initial = "initial",
        On = "on",
        Off = "off",
        Paused = "paused",
        /// It ended although nobody switched it off.
        Crashed = "crashed",
    }
}

string_enum! {
    /// The kinds of mainboard.
    MachineType {
        Pc = "pc",
        Q35 = "q35",
    }
}

string_enum! {
    /// What an instance learns of itself.
    ConfigDriveType {
        OpenStackDisk = "openstack-disk",
        None = "none",
    }
}

string_enum! {
    /// Ways into a guest beside its network.
    SideChannel {
        /// A serial port.
        Agent = "sf-agent",
        /// A socket of its own family.
        Agent2 = "sf-agent2",
    }
}

/// A disk as it was laid out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskRecord {
    /// Its name in the guest, such as `vda`.
    pub device: String,
    pub bus: DiskBus,
    /// In gigabytes; nothing for the config drive.
    pub size: Option<u64>,
    /// What it began as.
    pub blob_uuid: Option<BlobId>,
    /// Whether snapshots leave it out.
    pub snapshot_ignores: bool,
}

/// A disk as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskSpecRecord {
    #[serde(flatten)]
    pub spec: DiskSpec,
    /// The content that its base stood for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob_uuid: Option<BlobId>,
}

/// An instance as the API answers it.
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
    /// Empty until they are laid out.
    pub disks: Vec<DiskRecord>,
    pub video: VideoSpec,
    pub ssh_key: Option<String>,
    /// As it was sent: base64.
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
    /// The serial console on the node, a telnet server.
    pub console_port: Option<u16>,
    /// The screen on the node.
    pub vdi_port: Option<u16>,
    /// The same, encrypted.
    pub vdi_tls_port: Option<u16>,
    /// Name of the node that it is on.
    pub node: Option<String>,
    /// Where the caller wanted it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_placement: Option<String>,
    pub interfaces: Vec<InterfaceRecord>,
    pub last_cluster_operation: Option<OperationHandle>,
    /// What is to be done inside it, in order.
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
    agent_state.is_some_and(|state| state.starts_with("ready"))
}
