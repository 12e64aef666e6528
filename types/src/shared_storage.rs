//! Storage that the operator has mounted on several hosts. See docs/decisions/0073.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::ids::StorageId;
use crate::object::string_enum;

string_enum! {
    /// Where the disks of an instance are.
    StorageType {
        /// On its node.
        Local = "local",
        /// On storage that several nodes have mounted (`SHARED_STORAGE`).
        Shared = "shared",
    }
}

/// Returns the storage of instances that did not request one.
#[must_use]
pub fn local_storage() -> StorageType {
    StorageType::Local
}

/// The shared storage of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SharedStorageRecord {
    /// The path at which the node has mounted it (`SHARED_STORAGE`).
    pub path: String,
    /// UUID of the storage, the same on every node that has mounted it; `null` while the node does not have it.
    pub uuid: Option<StorageId>,
    /// Its size in bytes.
    pub total: i64,
    /// Its free space in bytes.
    pub free: i64,
    /// Why no disks can be created on it; `null` if they can.
    pub problem: Option<String>,
}
