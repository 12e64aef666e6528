//! Rebalancing: instances move from full nodes to empty ones. See docs/decisions/0075.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::ids::{InstanceId, NodeId};
use crate::operation::OperationHandle;

/// An instance that is to be migrated to balance the nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedMove {
    pub instance: InstanceId,
    pub source: NodeId,
    pub target: NodeId,
}

/// How the nodes of the cluster are balanced.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RebalanceRecord {
    /// The difference between the shares of the fullest and the emptiest node.
    pub spread: f64,
    /// The same when all instances have moved.
    pub spread_after: f64,
    /// The nodes that can take instances, by name. Nodes that are cordoned, degraded or do not check in are omitted.
    pub nodes: Vec<NodeShareRecord>,
    /// The instances that move, in this order.
    pub moves: Vec<MoveRecord>,
    /// Why no instance moves; `null` if some do.
    pub reason: Option<String>,
    /// The operation that moves them; `null` if it was only planned or nothing is to be done.
    pub operation: Option<OperationHandle>,
}

/// The committed share of a node: of its virtual CPUs or of its memory, whichever is larger.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NodeShareRecord {
    /// The name of the node.
    pub name: String,
    /// The share that is committed to instances; 1 is the whole capacity. Migrations in progress count as complete.
    pub share: f64,
    /// The same when all instances have moved.
    pub share_after: f64,
}

/// An instance that moves to another node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MoveRecord {
    /// UUID of the instance.
    pub instance_uuid: InstanceId,
    /// The name of the instance.
    pub name: String,
    /// The namespace of the instance.
    pub namespace: String,
    /// The name of the node that it leaves.
    pub source: String,
    /// The name of the node that it moves to.
    pub target: String,
    /// Why it moves.
    pub reason: String,
}
