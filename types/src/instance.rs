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
//!
//! An instance that is evacuated from a dead node goes from `creating` or `created` to `preflight` again, on another node.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::agent_operation::AgentOperationRecord;
use crate::guest::AgentState;
use crate::ids::{BlobId, InstanceId, StorageId};
use crate::interface::InterfaceRecord;
use crate::object::{Reference, string_enum};
use crate::operation::OperationHandle;
use crate::replica::ReplicaRecord;
use crate::shared_storage::{StorageType, local_storage};
use crate::spec::{DiskBus, DiskSpec, VideoSpec};

string_enum! {
    /// The lifecycle of an instance.
    InstanceState {
        /// Accepted; its creation is queued.
        Initial = "initial",
        InitialError = "initial-error",
        /// Its images and networks are being prepared.
        Preflight = "preflight",
        PreflightError = "preflight-error",
        /// Its disks are being created and its VM is being started.
        Creating = "creating",
        CreatingError = "creating-error",
        /// It is complete; see `power_state` for whether it runs.
        Created = "created",
        CreatedError = "created-error",
        /// It is being deleted.
        DeleteWait = "delete-wait",
        DeleteWaitError = "delete-wait-error",
        /// It cannot be used, only deleted; see `error_message`.
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
                matches!(
                    next,
                    S::Created | S::DeleteWait | S::Deleted | S::CreatingError | S::Error | S::Preflight
                )
            }
            S::Created => {
                matches!(next, S::DeleteWait | S::Deleted | S::CreatedError | S::Error | S::Preflight)
            }
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
        /// Its node does not check in: the VM may run or not.
        Unknown = "unknown",
    }
}

string_enum! {
    /// What happens to an instance when its host is lost.
    RestartPolicy {
        /// An operator evacuates it.
        Manual = "manual",
        /// It restarts on another node when its host has certainly stopped its VM. Requires self-fencing.
        Elsewhere = "elsewhere",
    }
}

string_enum! {
    /// What happens to a VM when its node cannot reach the database.
    FencingPolicy {
        /// It keeps running, and only an operator can declare the host dead.
        None = "none",
        /// A watchdog on its host stops it when the lease of the node expires (`FENCING_LEASE`).
        Own = "self",
    }
}

string_enum! {
    /// The machine type of a VM.
    MachineType {
        /// The i440FX chipset.
        Pc = "pc",
        /// The Q35 chipset, which secure boot requires.
        Q35 = "q35",
    }
}

string_enum! {
    /// How an instance gets its metadata.
    ConfigDriveType {
        /// A config drive in the format of OpenStack.
        OpenStackDisk = "openstack-disk",
        /// Not at all.
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
    /// The bus that the disk is attached to.
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
    /// UUID of the instance.
    pub uuid: InstanceId,
    /// The name of the instance, which is also its host name.
    pub name: String,
    /// The namespace that owns it.
    pub namespace: String,
    /// The state of the instance.
    pub state: InstanceState,
    /// Why the state is `error`.
    pub error_message: Option<String>,
    /// Whether the instance runs. `unknown` while its node does not check in: the VM may run or not.
    pub power_state: PowerState,
    /// Unix time since when `power_state` has its value; `null` if it has not changed since an earlier release.
    #[serde(default)]
    pub power_state_since: Option<f64>,
    /// The number of times that the instance was placed on a node. A VM of an earlier generation must not run.
    #[serde(default = "first_generation")]
    pub generation: i64,
    /// The number of virtual CPUs.
    pub cpus: i64,
    /// In megabytes.
    pub memory: i64,
    /// The disks as requested.
    pub disk_spec: Vec<DiskSpecRecord>,
    /// Empty until devices are assigned.
    pub disks: Vec<DiskRecord>,
    /// The video device.
    pub video: VideoSpec,
    /// The SSH public key that cloud-init installs.
    pub ssh_key: Option<String>,
    /// As it was sent, in base64.
    pub user_data: Option<String>,
    /// Whether the instance boots with UEFI firmware.
    pub uefi: bool,
    /// Whether UEFI secure boot is enabled.
    pub secure_boot: bool,
    /// How cloud-init gets its data.
    pub configdrive: ConfigDriveType,
    /// The initial content of the UEFI variables, as requested.
    pub nvram_template: Option<String>,
    /// The machine type of the VM.
    pub machine_type: MachineType,
    /// The channels to the agent in the guest.
    pub side_channels: Vec<SideChannel>,
    /// The state of the agent in the guest, such as `ready` or `not ready (no contact)`; `unknown` while the node does
    /// not check in, `null` until the instance has run.
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
    /// Whether the instance may be created again from its images when its host is lost.
    #[serde(default)]
    pub disposable: bool,
    /// Where its disks are.
    #[serde(default = "local_storage")]
    pub storage: StorageType,
    /// UUID of the shared storage that its disks are on; `null` for local disks and before it is placed.
    #[serde(default)]
    pub storage_uuid: Option<StorageId>,
    /// The number of replicas of its disks on other nodes.
    #[serde(default)]
    pub replicas: i64,
    /// The replica of its disks; `null` without one.
    #[serde(default)]
    pub replica: Option<ReplicaRecord>,
    /// What happens when its host is lost.
    #[serde(default = "manual_restart")]
    pub restart: RestartPolicy,
    /// What happens when its node cannot reach the database; `null`: the policy of the cluster (`FENCING`).
    #[serde(default)]
    pub fencing: Option<FencingPolicy>,
    /// The network interfaces, in order.
    pub interfaces: Vec<InterfaceRecord>,
    /// The last operation on it; `null` without one.
    pub last_cluster_operation: Option<OperationHandle>,
    /// The pending agent operations, in order.
    pub agent_operations_queue: Vec<AgentOperationRecord>,
    /// User-defined metadata: any JSON values by key.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    /// The version of the record format; released clients expect it.
    pub version: i64,
    /// The objects that refer to this one, by relationship.
    pub references_to: BTreeMap<String, Vec<Reference>>,
    /// The objects that this one refers to, by relationship.
    pub references_from: BTreeMap<String, Vec<Reference>>,
}

/// Returns the policy of instances that did not request one.
#[must_use]
pub fn manual_restart() -> RestartPolicy {
    RestartPolicy::Manual
}

/// Returns the generation of VMs that were started by a release without generations.
#[must_use]
pub fn first_generation() -> i64 {
    1
}

/// Returns whether an agent state, such as `ready (degraded)`, means that the agent accepts operations.
#[must_use]
pub fn agent_is_ready(agent_state: Option<&str>) -> bool {
    agent_state.is_some_and(|state| AgentState::from(state).is_ready())
}
