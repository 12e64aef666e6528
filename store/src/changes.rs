//! A summary of what other daemons may have changed, read in one statement.
//!
//! A daemon is notified of its own changes. Those of others it notices by polling this summary, instead of polling every
//! table. Nothing is written for it: a row that every change increments would make all changes of the cluster wait for
//! each other.

#[cfg(test)]
mod tests;

use muster_types::ids::NodeId;

use super::leases::NETWORK_NODE_LEASE;
use super::{Read, StoreError, Value, placeholders};

/// What a daemon compares with the previous summary.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChangeSummary {
    /// When the first operation that a node of the daemon may run is due. Earlier than now if its worker stopped.
    pub next_operation: Option<f64>,
    /// The number of wanted networks and the sum of their generations.
    pub networks: (i64, i64),
    /// The number of nodes, and of those that are up.
    pub nodes: (i64, i64),
    /// The number of unfinished operations of guest agents.
    pub agent_operations: i64,
    /// The number of blobs that exist, and of their copies.
    pub blobs: (i64, i64),
    /// The last owner of the lease of the active network node.
    pub network_owner: Option<NodeId>,
}

/// Reads the summary for a daemon with some nodes, at a time of the database.
pub async fn read(mut db: impl Read, nodes: &[NodeId], time: f64) -> Result<ChangeSummary, StoreError> {
    type Summary = ((Option<f64>, Option<f64>, (i64, i64)), (i64, i64), i64, ((i64, i64), Option<NodeId>));
    let own = format!("(node_uuid IS NULL OR node_uuid IN ({}))", placeholders(nodes.len()));
    let sql = format!(
        "SELECT (SELECT MIN(run_after) FROM operations WHERE state = 'queued' AND {own}), \
         (SELECT MIN(lease_expires) FROM operations WHERE state = 'executing' AND lease_expires <= ? AND {own}), \
         (SELECT COUNT(*) FROM networks WHERE wanted = 1), \
         (SELECT CAST(COALESCE(SUM(generation), 0) AS SIGNED) FROM networks WHERE wanted = 1), \
         (SELECT COUNT(*) FROM nodes), (SELECT COUNT(*) FROM nodes WHERE state = 'created'), \
         (SELECT COUNT(*) FROM agent_operations WHERE state IN ('preflight', 'queued', 'executing')), \
         (SELECT COUNT(*) FROM blobs WHERE state = 'created'), (SELECT COUNT(*) FROM blob_locations), \
         (SELECT holder FROM leases WHERE name = ?)"
    );
    let ids: Vec<Value> = nodes.iter().map(|id| (*id).into()).collect();
    let mut values = ids.clone();
    values.push(time.into());
    values.extend(ids);
    values.push(NETWORK_NODE_LEASE.into());
    let ((queued, expired, networks), nodes, agent_operations, (blobs, network_owner)) =
        db.fetch_one::<Summary>(&sql, &values).await?;
    let next_operation = [queued, expired].into_iter().flatten().min_by(f64::total_cmp);
    Ok(ChangeSummary { next_operation, networks, nodes, agent_operations, blobs, network_owner })
}
