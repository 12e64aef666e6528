//! Agent operations: what a caller wants done inside a guest.
//!
//! ```text
//! (put) preflight ──the blob is on the node──▶ queued ──its turn──▶ executing ──▶ complete
//!           │                                    │ ▲                    │ └─ it failed ─▶ error
//!           │                                    │ └─ a stall, again ───┤
//!           └────────── a budget ran out ────────┴──────────────────────┴──▶ expired
//!  any ──▶ deleted ──cleaner──▶ (row gone)
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::{AgentOperationId, BlobId, InstanceId};
use crate::object::{Reference, string_enum};

string_enum! {
    /// The life of an agent operation.
    AgentOperationState {
        /// Its blob is on the way to the node.
        Preflight = "preflight",
        /// It waits for those before it, or for the agent.
        Queued = "queued",
        Executing = "executing",
        Complete = "complete",
        Error = "error",
        /// A budget of the caller ran out.
        Expired = "expired",
        Deleted = "deleted",
    }
}

impl AgentOperationState {
    /// Whether nothing more is done about it.
    #[must_use]
    pub fn is_final(self) -> bool {
        match self {
            Self::Preflight | Self::Queued | Self::Executing => false,
            Self::Complete | Self::Error | Self::Expired | Self::Deleted => true,
        }
    }

    /// Whether an operation may go from here to `next`.
    #[must_use]
    pub fn can_transition_to(self, next: Self) -> bool {
        match (self, next) {
            (Self::Deleted, _) => false,
            (_, Self::Deleted) => true,
            (Self::Preflight | Self::Queued | Self::Executing, Self::Error | Self::Expired)
            | (Self::Preflight | Self::Executing, Self::Queued)
            | (Self::Queued, Self::Executing)
            | (Self::Executing, Self::Complete) => true,
            (Self::Preflight, Self::Preflight | Self::Executing | Self::Complete)
            | (Self::Queued, Self::Preflight | Self::Queued | Self::Complete)
            | (Self::Executing, Self::Preflight | Self::Executing)
            | (Self::Complete | Self::Error | Self::Expired, _) => false,
        }
    }
}

string_enum! {
    /// Which budget ran out.
    ExpiryReason {
        Deadline = "deadline",
        Progress = "progress",
    }
}

/// One command of an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "command")]
pub enum AgentCommand {
    #[serde(rename = "execute")]
    Execute {
        commandline: String,
        #[serde(rename = "block-for-result")]
        block_for_result: bool,
    },
    #[serde(rename = "put-blob")]
    PutBlob { blob_uuid: BlobId, path: String },
    #[serde(rename = "chmod")]
    Chmod { path: String, mode: ChmodMode },
    #[serde(rename = "get-file")]
    GetFile { path: String },
}

/// Permissions of a file: a number, or words such as `ugo+r`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum ChmodMode {
    Number(u32),
    Symbolic(String),
}

/// An agent operation as the API answers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AgentOperationRecord {
    pub uuid: AgentOperationId,
    pub instance_uuid: InstanceId,
    pub namespace: String,
    pub state: AgentOperationState,
    pub commands: Vec<AgentCommand>,
    /// By the number of the command.
    #[schema(value_type = Object)]
    pub results: BTreeMap<String, Map<String, Value>>,
    /// How often it was begun.
    pub attempts: i64,
    /// Unix time at which its time is over; 0 without an end.
    pub deadline: f64,
    /// Seconds that a transfer may stand still; 0 without an end.
    pub progress_timeout: f64,
    /// Unix time.
    pub last_progress: Option<f64>,
    pub expiry_reason: Option<ExpiryReason>,
    /// Why the state is `error`.
    pub error_message: Option<String>,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    pub version: i64,
    #[schema(value_type = Object)]
    pub references_to: BTreeMap<String, Vec<Reference>>,
    #[schema(value_type = Object)]
    pub references_from: BTreeMap<String, Vec<Reference>>,
}
