//! Namespaces: the tenants.
//!
//! ```text
//! created ──delete──▶ deleted ──cleaner──▶ (row gone)
//! ```

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::object::{self, string_enum};
use crate::{Error, Result};

/// The namespace that administers the cluster and that every other one trusts.
pub const SYSTEM_NAMESPACE: &str = "system";

string_enum! {
    /// The life of a namespace.
    NamespaceState { Created = "created", Deleted = "deleted" }
}

impl NamespaceState {
    /// Whether a namespace may go from here to `next`.
    #[must_use]
    pub fn can_transition_to(self, next: Self) -> bool {
        match (self, next) {
            (Self::Created, Self::Deleted) => true,
            (Self::Created, Self::Created) | (Self::Deleted, Self::Created | Self::Deleted) => false,
        }
    }
}

/// A namespace as the API answers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NamespaceRecord {
    pub name: String,
    pub state: NamespaceState,
    pub version: i64,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    /// Names of the keys that have not expired.
    pub keys: Vec<String>,
    pub trust: Trust,
}

/// Whom a namespace trusts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Trust {
    /// Names of the trusted namespaces, `system` first.
    pub full: Vec<String>,
}

/// Refuses a name that could not be a path segment or a row.
pub fn check_name(name: &str) -> Result<()> {
    if name.is_empty() {
        return Err(Error::Invalid("no namespace specified".into()));
    }
    object::check_name("namespace", name)
}
