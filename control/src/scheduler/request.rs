//! What an instance needs of a node.

use muster_types::ids::NodeId;
use muster_types::spec::Affinity;

/// The requirements of an instance that is to be placed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PlacementRequest {
    pub cpus: i64,
    pub memory_mb: i64,
    /// The sum of the disk sizes that are given.
    pub disk_gb: i64,
    /// The only node that is acceptable.
    pub required_node: Option<NodeId>,
    pub affinity: Affinity,
}
