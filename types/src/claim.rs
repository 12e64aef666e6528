//! Capacity claims: what a namespace was promised of the whole cluster, until a moment.
//!
//! ```text
//! active ──time──▶ expired          either ──delete──▶ (row gone)
//! ```

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::ClaimId;
use crate::object::string_enum;

string_enum! {
    /// Whether a claim still promises something. Nothing moves it: time does.
    CoverageState { Active = "active", Expired = "expired" }
}

string_enum! {
    /// A claim is there or gone.
    ClaimState { Created = "created" }
}

/// A claim as the API answers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ClaimRecord {
    pub uuid: ClaimId,
    pub namespace: String,
    pub state: ClaimState,
    pub coverage_state: CoverageState,
    pub limit_cpus: i64,
    pub limit_memory_mb: i64,
    pub limit_disk_gb: i64,
    /// What the instances of the namespace hold, or held when it expired. May be more than the limit.
    pub used_cpus: i64,
    pub used_memory_mb: i64,
    pub used_disk_gb: i64,
    /// Unix time.
    pub expires_at: f64,
    /// When limits, use or end last changed, as Unix time.
    pub updated_at: f64,
    pub version: i64,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
}
