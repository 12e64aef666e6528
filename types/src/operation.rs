//! Cluster operations: queued work, visible to the caller.
//!
//! ```text
//!           ┌────────────── retry, or the worker died ─────────────┐
//!           ▼                                                      │
//! (new) ▶ queued ──claimed──▶ executing ──every step done──▶ complete ──cleaner──▶ (row gone)
//!           │                     │  └─ attempts or time used up ─▶ error ──┘
//!           └─ a parent failed ───┴──────────────────────────────▶ abort ──┘
//! ```

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::{NodeId, OperationId};
use crate::object::string_enum;

string_enum! {
    /// The life of an operation.
    OperationState {
        Queued = "queued",
        Executing = "executing",
        Complete = "complete",
        Error = "error",
        Abort = "abort",
    }
}

impl OperationState {
    /// Whether nothing more will happen.
    #[must_use]
    pub fn is_final(self) -> bool {
        match self {
            Self::Queued | Self::Executing => false,
            Self::Complete | Self::Error | Self::Abort => true,
        }
    }

    /// Whether an operation may go from here to `next`.
    #[must_use]
    pub fn can_transition_to(self, next: Self) -> bool {
        match (self, next) {
            (Self::Queued, Self::Executing | Self::Error | Self::Abort)
            | (Self::Executing, Self::Queued | Self::Complete | Self::Error | Self::Abort) => true,
            (Self::Queued, Self::Queued | Self::Complete) | (Self::Executing, Self::Executing) => false,
            (Self::Complete | Self::Error | Self::Abort, _) => false,
        }
    }
}

string_enum! {
    /// What an operation is about; a path segment of the read calls.
    OperationType {
        /// Work on a namespace.
        Namespace = "namespace_op",
        /// Work on a network.
        Network = "net_op",
        /// Fetching an artifact.
        ArtifactFetch = "artifact_fetch_op",
        /// Work on the converted copy of an image.
        ImageCache = "imgcache_op",
        /// Work on an instance, on its node.
        Instance = "node_inst_op",
        /// Adding an interface to an instance.
        InstanceInterface = "node_inst_net_iface_op",
        /// Copying disks of an instance.
        InstanceSnapshot = "node_inst_snap_op",
    }
}

/// Points at an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OperationHandle {
    pub op_type: OperationType,
    pub op_uuid: OperationId,
}

/// Why an operation failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ErrorReport {
    /// A stable word for programs, such as `internal.unknown`.
    pub code: String,
    /// A sentence for people.
    pub message: String,
    #[schema(value_type = Object)]
    pub details: Map<String, Value>,
}

/// How far an operation has come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OperationProgress {
    /// What is done of it, in bytes.
    pub done: i64,
    /// What it will be, in bytes, once that is known.
    pub total: Option<i64>,
    /// What the source called the part that is here, so that another attempt can ask for the rest of the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validator: Option<String>,
    /// The node that has that part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
}

/// An operation as the API answers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OperationRecord {
    pub uuid: OperationId,
    /// Always `clusteroperation`.
    pub object_type: String,
    pub operation_type: OperationType,
    pub state: OperationState,
    /// Names of the steps, in order.
    pub tasks: Vec<String>,
    pub depends_on: Vec<OperationHandle>,
    pub error_report: Option<ErrorReport>,
    pub namespace: Option<String>,
    pub target_object_type: String,
    pub target_uuid: String,
    /// How often a worker has taken it up.
    pub attempts: i64,
    /// How far it has come, of one that moves bytes.
    pub progress: Option<OperationProgress>,
    /// Unix time.
    pub created: f64,
    /// Unix time.
    pub updated: f64,
    pub version: i64,
}
