//! Uploads: content that a client sends in parts, until it becomes a version of an artifact.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::UploadId;

/// An upload as the API returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct UploadRecord {
    /// UUID of the upload.
    pub uuid: UploadId,
    /// Always `created`: an upload is removed once it is used.
    pub state: String,
    /// User-defined metadata: any JSON values by key.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    /// The version of the record format; released clients expect it.
    pub version: i64,
    /// The name of the node that stores the content.
    pub node: String,
    /// The Unix time of its creation.
    pub created_at: f64,
    /// The number of bytes received so far.
    pub size: u64,
}
