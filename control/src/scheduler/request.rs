//! What an instance needs of a node.

use muster_types::ids::{NodeId, StorageId};
use muster_types::spec::Affinity;

/// Where the disks of an instance are to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StorageRequest {
    /// On its node.
    #[default]
    Local,
    /// On any shared storage.
    AnyShared,
    /// On this shared storage, which may have them already.
    Shared(StorageId),
    /// On its node, which has them already: as a replica.
    Replica,
}

/// The requirements of an instance that is to be placed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PlacementRequest {
    pub cpus: i64,
    pub memory_mb: i64,
    /// The sum of the disk sizes that are known.
    pub disk_gb: i64,
    /// The only node that is acceptable.
    pub required_node: Option<NodeId>,
    pub affinity: Affinity,
    pub storage: StorageRequest,
}

impl PlacementRequest {
    /// Returns the disk space that the instance needs on its node.
    #[must_use]
    pub fn node_disk_gb(&self) -> i64 {
        match self.storage {
            StorageRequest::Local | StorageRequest::Replica => self.disk_gb,
            StorageRequest::AnyShared | StorageRequest::Shared(_) => 0,
        }
    }
}
