//! Cluster operations: queued work that clients can observe. See docs/decisions/0004.
//!
//! ```text
//!           ┌─ retry, or worker died ──┐
//!           ▼                          │
//! (new) ▶ queued ──leased──▶ executing ┴─ all steps done ──▶ complete ──cleaner──▶ (row removed)
//!           │                    │ └──── out of attempts ──▶ error ────────┘
//!           └─ parent failed ────┴─────────────────────────▶ abort ────────┘
//! ```

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::{NodeId, OperationId};
use crate::object::string_enum;

string_enum! {
    /// The lifecycle of an operation.
    OperationState {
        /// It waits for a worker or for other operations.
        Queued = "queued",
        Executing = "executing",
        Complete = "complete",
        Error = "error",
        /// Cancelled, because an operation that it depends on failed or its object is deleted.
        Abort = "abort",
    }
}

impl OperationState {
    /// Returns whether the state is terminal.
    #[must_use]
    pub fn is_final(self) -> bool {
        match self {
            Self::Queued | Self::Executing => false,
            Self::Complete | Self::Error | Self::Abort => true,
        }
    }

    /// Returns whether an operation may change from this state to `next`.
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
    /// The type of an operation; a path segment in the API.
    OperationType {
        /// An operation on a namespace.
        Namespace = "namespace_op",
        /// An operation on a network.
        Network = "net_op",
        /// Fetching an artifact.
        ArtifactFetch = "artifact_fetch_op",
        /// An operation on the conversion of an image.
        ImageCache = "imgcache_op",
        /// An operation on an instance, on its node.
        Instance = "node_inst_op",
        /// Adding an interface to an instance.
        InstanceInterface = "node_inst_net_iface_op",
        /// Copying disks of an instance.
        InstanceSnapshot = "node_inst_snap_op",
        /// An operation on one or several nodes.
        Node = "node_op",
    }
}

/// A reference to an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OperationHandle {
    /// The type of the operation.
    pub op_type: OperationType,
    /// UUID of the operation.
    pub op_uuid: OperationId,
}

/// Why an operation failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ErrorReport {
    /// A stable, machine-readable code such as `internal.unknown`.
    pub code: String,
    /// A human-readable message.
    pub message: String,
    /// Further details by name, such as the failed step.
    #[schema(value_type = Object)]
    pub details: Map<String, Value>,
}

/// The progress of an operation that transfers data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Progress)]
pub struct OperationProgress {
    /// The number of bytes transferred.
    pub done: i64,
    /// The total number of bytes, once known.
    pub total: Option<i64>,
    /// The HTTP validator of the partial content, with which a later attempt resumes the download.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validator: Option<String>,
    /// The node that has the partial content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
}

/// An operation as the API returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OperationRecord {
    /// UUID of the operation.
    pub uuid: OperationId,
    /// Always `clusteroperation`.
    pub object_type: String,
    /// The type of the operation.
    pub operation_type: OperationType,
    /// The state of the operation.
    pub state: OperationState,
    /// The names of the steps, in order.
    pub tasks: Vec<String>,
    /// The number of steps that are completed.
    #[serde(default)]
    #[schema(required)]
    pub tasks_completed: i64,
    /// The operations that must complete first.
    pub depends_on: Vec<OperationHandle>,
    /// Why the state is `error`; `null` in other states.
    pub error_report: Option<ErrorReport>,
    /// The namespace that caused the operation; `null` for operations of the cluster itself.
    pub namespace: Option<String>,
    /// The type of the object that the operation changes, such as `instance`.
    pub target_object_type: String,
    /// The id of the object that the operation changes.
    pub target_uuid: String,
    /// The number of attempts so far.
    pub attempts: i64,
    /// Only of operations that transfer data.
    pub progress: Option<OperationProgress>,
    /// Unix time.
    pub created: f64,
    /// Unix time.
    pub updated: f64,
    /// The version of the record format; released clients expect it.
    pub version: i64,
    /// User-defined metadata: any JSON values by key.
    #[serde(default)]
    #[schema(value_type = Object, required)]
    pub metadata: Map<String, Value>,
}
