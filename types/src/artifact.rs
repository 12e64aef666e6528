//! Artifacts: named things with versions, each of which is a blob.
//!
//! ```text
//! initial ──first version──▶ created ──delete, or the last version goes──▶ deleted ──cleaner──▶ (row gone)
//!    └─ its source failed ──▶ error ──a later fetch works──▶ created        any ──delete──▶ deleted
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::blob::BlobRecord;
use crate::ids::{ArtifactId, BlobId, InstanceId};
use crate::object::{Reference, string_enum};
use crate::operation::OperationHandle;

string_enum! {
    /// The life of an artifact.
    ArtifactState {
        Initial = "initial",
        Created = "created",
        Error = "error",
        Deleted = "deleted",
    }
}

impl ArtifactState {
    /// Whether an artifact may go from here to `next`.
    #[must_use]
    pub fn can_transition_to(self, next: Self) -> bool {
        match (self, next) {
            (Self::Initial, Self::Created | Self::Error | Self::Deleted)
            | (Self::Created, Self::Deleted)
            | (Self::Error, Self::Created | Self::Deleted) => true,
            (Self::Initial, Self::Initial)
            | (Self::Created, Self::Initial | Self::Created | Self::Error)
            | (Self::Error, Self::Initial | Self::Error)
            | (Self::Deleted, _) => false,
        }
    }
}

string_enum! {
    /// What an artifact is.
    ArtifactType {
        /// A disk image.
        Image = "image",
        /// A disk of an instance, as it was.
        Snapshot = "snapshot",
        /// A name for a blob.
        Label = "label",
        /// Anything else.
        Other = "other",
    }
}

/// One version, within an artifact.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ArtifactVersion {
    pub uuid: BlobId,
    pub size: i64,
    pub reference_count: i64,
    pub depends_on: Option<BlobId>,
    /// The instances that use it; only when one artifact is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instances: Option<Vec<InstanceId>>,
}

/// One version, in the list of an artifact's versions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VersionRecord {
    pub index: i64,
    #[serde(flatten)]
    pub blob: BlobRecord,
}

/// An artifact as the API answers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ArtifactRecord {
    pub uuid: ArtifactId,
    pub name: String,
    pub namespace: String,
    pub artifact_type: ArtifactType,
    pub state: ArtifactState,
    /// Why it is in `error`, why its source could last not be fetched, or why its image cannot be used.
    pub error_message: Option<String>,
    pub source_url: String,
    pub shared: bool,
    pub max_versions: i64,
    /// Number of the newest version; 0 when there is none.
    pub index: i64,
    /// The newest version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob_uuid: Option<BlobId>,
    /// The versions by their number.
    #[schema(value_type = Object)]
    pub blobs: BTreeMap<i64, ArtifactVersion>,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    pub version: i64,
    pub last_cluster_operation: Option<OperationHandle>,
    #[schema(value_type = Object)]
    pub references_to: BTreeMap<String, Vec<Reference>>,
    #[schema(value_type = Object)]
    pub references_from: BTreeMap<String, Vec<Reference>>,
}
