//! Agent operations: commands and file transfers inside a guest. See docs/decisions/0022.
//!
//! ```text
//! (put) preflight ──blob is on the node──▶ queued ──first in queue──▶ executing ──▶ complete
//!           │                                │ ▲                        │ └─ failure ─▶ error
//!           │                                │ └─ retry after a stall ──┤
//!           └─────── deadline or timeout ────┴──────────────────────────┴──▶ expired
//!  any ──▶ deleted ──cleaner──▶ (row removed)
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::{AgentOperationId, BlobId, InstanceId};
use crate::object::{Reference, string_enum};

string_enum! {
    /// The lifecycle of an agent operation.
    AgentOperationState {
        /// Its blob is being copied to the node.
        Preflight = "preflight",
        /// It waits for earlier operations or for the agent.
        Queued = "queued",
        Executing = "executing",
        Complete = "complete",
        Error = "error",
        /// Its deadline or progress timeout passed.
        Expired = "expired",
        Deleted = "deleted",
    }
}

impl AgentOperationState {
    /// Returns whether the state is terminal.
    #[must_use]
    pub fn is_final(self) -> bool {
        match self {
            Self::Preflight | Self::Queued | Self::Executing => false,
            Self::Complete | Self::Error | Self::Expired | Self::Deleted => true,
        }
    }

    /// Returns whether an operation may change from this state to `next`.
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
    /// Why an operation expired.
    ExpiryReason {
        /// Its deadline passed.
        Deadline = "deadline",
        /// It made no progress for too long.
        Progress = "progress",
    }
}

/// A command of an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "command")]
pub enum AgentCommand {
    /// Executes a command line in the shell of the guest.
    #[serde(rename = "execute")]
    Execute {
        /// The command line.
        commandline: String,
        /// Whether the operation waits until the command exits; always true.
        #[serde(rename = "block-for-result")]
        block_for_result: bool,
    },
    /// Writes a blob to a file.
    #[serde(rename = "put-blob")]
    PutBlob {
        /// The content of the file.
        blob_uuid: BlobId,
        /// The absolute path of the file in the guest.
        path: String,
    },
    /// Changes the permissions of a file.
    #[serde(rename = "chmod")]
    Chmod {
        /// The absolute path of the file in the guest.
        path: String,
        /// The new permissions.
        mode: ChmodMode,
    },
    /// Reads a file into a blob.
    #[serde(rename = "get-file")]
    GetFile {
        /// The absolute path of the file in the guest.
        path: String,
    },
}

/// The permissions of a file: a number, or a symbolic mode such as `ugo+r`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
#[schema(as = Mode)]
pub enum ChmodMode {
    /// A decimal number.
    Number(u32),
    /// A symbolic mode.
    Symbolic(String),
}

/// An agent operation as the API returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AgentOperationRecord {
    /// UUID of the agent operation.
    pub uuid: AgentOperationId,
    /// The instance in which it is executed.
    pub instance_uuid: InstanceId,
    /// The namespace that owns it.
    pub namespace: String,
    /// The state of the operation.
    pub state: AgentOperationState,
    /// The commands, in order of execution.
    pub commands: Vec<AgentCommand>,
    /// By the index of the command.
    #[schema(value_type = Object)]
    pub results: BTreeMap<String, Map<String, Value>>,
    /// The number of attempts so far.
    pub attempts: i64,
    /// The deadline as Unix time; 0 means no deadline.
    pub deadline: f64,
    /// The maximum number of seconds without progress of a transfer; 0 if unlimited.
    pub progress_timeout: f64,
    /// The Unix time of the last progress.
    pub last_progress: Option<f64>,
    /// Why the state is `expired`; `null` in other states.
    pub expiry_reason: Option<ExpiryReason>,
    /// Why the state is `error`.
    pub error_message: Option<String>,
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
