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
    /// UUID of the claim.
    pub uuid: ClaimId,
    /// The namespace that the capacity is reserved for.
    pub namespace: String,
    /// The state of the claim.
    pub state: ClaimState,
    /// Whether the claim still reserves capacity.
    pub coverage_state: CoverageState,
    /// The reserved number of virtual CPUs.
    pub limit_cpus: i64,
    /// The reserved memory in megabytes.
    pub limit_memory_mb: i64,
    /// The reserved disk space in gigabytes.
    pub limit_disk_gb: i64,
    /// The usage of the namespace's instances, now or when the claim expired. It may exceed the limit.
    pub used_cpus: i64,
    /// The memory of the namespace's instances in megabytes, as for `used_cpus`.
    pub used_memory_mb: i64,
    /// The disk space of the namespace's instances in gigabytes, as for `used_cpus`.
    pub used_disk_gb: i64,
    /// Unix time.
    pub expires_at: f64,
    /// The Unix time of the last change of limits, usage or expiry.
    pub updated_at: f64,
    /// The version of the record format; released clients expect it.
    pub version: i64,
    /// User-defined metadata: any JSON values by key.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
}
