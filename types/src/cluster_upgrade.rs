//! Rolling upgrades: what the nodes run, and what remains to be done. See docs/decisions/0072.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::node::NodeState;

/// The progress of an upgrade of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterUpgradeRecord {
    /// The schema version of the database.
    pub schema_version: i64,
    /// The oldest schema version whose daemons can use the database.
    pub minimum_schema_version: i64,
    /// What the nodes run, by name. Deleted nodes are omitted.
    pub nodes: Vec<NodeUpgradeRecord>,
    /// The migrations that are held back, because older daemons cannot use the database afterwards.
    pub held_migrations: Vec<HeldMigrationRecord>,
    /// What to do next.
    pub next_step: String,
}

/// What a node runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeUpgradeRecord {
    /// The name of the node.
    pub name: String,
    /// The state of the node.
    pub state: NodeState,
    /// The version of Muster that its daemon runs, or ran last.
    pub release: String,
    /// The schema version of that daemon; `null` if its release does not record it.
    pub schema_version: Option<i64>,
    /// Whether it is older than the daemon of another node.
    pub is_outdated: bool,
}

/// A migration that is applied when all nodes support it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HeldMigrationRecord {
    /// The schema version that the migration leads to.
    pub number: i64,
    /// The names of the nodes that must be upgraded or deleted first.
    pub waits_for: Vec<String>,
}
