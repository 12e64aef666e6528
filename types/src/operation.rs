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

use crate::ids::OperationId;
use crate::object::words;

words! {
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
    pub fn may_become(self, next: Self) -> bool {
        match (self, next) {
            (Self::Queued, Self::Executing | Self::Error | Self::Abort)
            | (Self::Executing, Self::Queued | Self::Complete | Self::Error | Self::Abort) => true,
            (Self::Queued, Self::Queued | Self::Complete) | (Self::Executing, Self::Executing) => false,
            (Self::Complete | Self::Error | Self::Abort, _) => false,
        }
    }
}

words! {
    /// What an operation is about; a path segment of the read calls.
    OperationType {
        /// Work on a namespace.
        Namespace = "namespace_op",
        /// Work on a network.
        Network = "net_op",
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
    /// Unix time.
    pub created: f64,
    /// Unix time.
    pub updated: f64,
    pub version: i64,
}
