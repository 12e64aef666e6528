//! Namespaces, which are the tenants of a cluster.
//!
//! ```text
//! created ──delete──▶ deleted ──cleaner──▶ (row removed)
//! ```

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::object::{self, string_enum};
use crate::{Error, Result};

/// The namespace that administers the cluster. Every other namespace trusts it.
pub const SYSTEM_NAMESPACE: &str = "system";

string_enum! {
    /// The lifecycle of a namespace.
    NamespaceState { Created = "created", Deleted = "deleted" }
}

impl NamespaceState {
    /// Returns whether a namespace may change from this state to `next`.
    #[must_use]
    pub fn can_transition_to(self, next: Self) -> bool {
        match (self, next) {
            (Self::Created, Self::Deleted) => true,
            (Self::Created, Self::Created) | (Self::Deleted, Self::Created | Self::Deleted) => false,
        }
    }
}

/// A namespace as the API returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NamespaceRecord {
    /// The name of the namespace.
    pub name: String,
    /// The state of the namespace.
    pub state: NamespaceState,
    /// The version of the record format; released clients expect it.
    pub version: i64,
    /// User-defined metadata: any JSON values by key.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    /// The names of the keys that have not expired.
    pub keys: Vec<String>,
    /// The namespaces that this one trusts.
    pub trust: Trust,
}

/// The namespaces that a namespace trusts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Trust {
    /// The names of the trusted namespaces, `system` first.
    pub full: Vec<String>,
}

/// Checks the name of a new namespace. See docs/decisions/0008.
pub fn check_name(name: &str) -> Result<()> {
    if name.is_empty() {
        return Err(Error::Invalid("no namespace specified".into()));
    }
    object::check_name("namespace", name)
}
