//! Capacity claims: capacity of the cluster that is reserved for a namespace until the claim expires.
//! See docs/decisions/0023.
//!
//! ```text
//! active ──expires_at──▶ expired          either ──delete──▶ (row removed)
//! ```

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::ClaimId;
use crate::object::string_enum;

string_enum! {
    /// Whether a claim still reserves capacity. Derived from its expiry time.
    CoverageState { Active = "active", Expired = "expired" }
}

string_enum! {
    /// The lifecycle of a claim, whose row is removed on deletion.
    ClaimState { Created = "created" }
}

/// A claim as the API returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ClaimRecord {
    pub uuid: ClaimId,
    pub namespace: String,
    pub state: ClaimState,
    pub coverage_state: CoverageState,
    pub limit_cpus: i64,
    pub limit_memory_mb: i64,
    pub limit_disk_gb: i64,
    /// The usage of the namespace's instances, now or when the claim expired. It may exceed the limit.
    pub used_cpus: i64,
    pub used_memory_mb: i64,
    pub used_disk_gb: i64,
    /// Unix time.
    pub expires_at: f64,
    /// The Unix time of the last change of limits, usage or expiry.
    pub updated_at: f64,
    pub version: i64,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
}
