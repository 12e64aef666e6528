//! Uploads: content on its way in, piece by piece, until it becomes a version of an artifact.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::UploadId;

/// An upload as the API answers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct UploadRecord {
    pub uuid: UploadId,
    /// Always `created`: a used upload is gone.
    pub state: String,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    pub version: i64,
    /// Name of the node that keeps the bytes.
    pub node: String,
    /// Unix time.
    pub created_at: f64,
    /// How many bytes have arrived.
    pub size: u64,
}
