//! Artifacts: named objects whose versions are blobs. See docs/decisions/0017.
//!
//! ```text
//! initial ──first version──▶ created ──delete, or last version deleted──▶ deleted ──cleaner──▶ (row removed)
//!    └─ fetch failed ───────▶ error ──later fetch succeeds──▶ created        any ──delete──▶ deleted
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
    /// The lifecycle of an artifact.
    ArtifactState {
        Initial = "initial",
        Created = "created",
        Error = "error",
        Deleted = "deleted",
    }
}

impl ArtifactState {
    /// Returns whether an artifact may change from this state to `next`.
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
    /// The type of an artifact.
    ArtifactType {
        /// A disk image.
        Image = "image",
        /// A copy of an instance's disk.
        Snapshot = "snapshot",
        /// A named reference to a blob.
        Label = "label",
        /// Any other content.
        Other = "other",
    }
}

/// A version within an artifact.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ArtifactVersion {
    /// The blob with the content of the version.
    pub uuid: BlobId,
    /// The size in bytes.
    pub size: i64,
    /// The number of objects that reference the blob; 0 once the version is deleted.
    pub reference_count: i64,
    /// The blob that this one contains only the differences to; `null` for a complete image.
    pub depends_on: Option<BlobId>,
    /// The instances that use it; only returned for a single artifact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instances: Option<Vec<InstanceId>>,
}

/// A version in the list of an artifact's versions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VersionRecord {
    /// The number of the version; the first is 1.
    pub index: i64,
    #[serde(flatten)]
    pub blob: BlobRecord,
}

/// An artifact as the API returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ArtifactRecord {
    /// UUID of the artifact.
    pub uuid: ArtifactId,
    /// The name of the artifact.
    pub name: String,
    /// The namespace that owns it.
    pub namespace: String,
    /// The type of the artifact.
    pub artifact_type: ArtifactType,
    /// The state of the artifact.
    pub state: ArtifactState,
    /// Why the state is `error`, why the last fetch failed, or why the image cannot be used.
    pub error_message: Option<String>,
    /// Where the content comes from: the URL of an image, or `sf://…` for snapshots, labels and uploads.
    pub source_url: String,
    /// Whether all namespaces may read the artifact.
    pub shared: bool,
    /// The maximum number of versions to keep.
    pub max_versions: i64,
    /// The number of the newest version; 0 without versions.
    pub index: i64,
    /// The newest version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob_uuid: Option<BlobId>,
    /// The versions by number.
    #[schema(value_type = BTreeMap<String, ArtifactVersion>)]
    pub blobs: BTreeMap<i64, ArtifactVersion>,
    /// User-defined metadata: any JSON values by key.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    /// The version of the record format; released clients expect it.
    pub version: i64,
    /// The last operation on it; `null` without one.
    pub last_cluster_operation: Option<OperationHandle>,
    /// The objects that refer to this one, by relationship.
    pub references_to: BTreeMap<String, Vec<Reference>>,
    /// The objects that this one refers to, by relationship.
    pub references_from: BTreeMap<String, Vec<Reference>>,
}
