//! A summary of what other daemons may have changed, read in one statement.
//!
//! A daemon is notified of its own changes. Those of others it notices by polling this summary, instead of polling every
//! table. Nothing is written for it: a row that every change increments would make all changes of the cluster wait for
//! each other.

#[cfg(test)]
mod tests;

use muster_types::ids::NodeId;
use muster_types::time::now;

use super::leases::{Lease, NETWORK_NODE_LEASE};
use super::networks::GENERATIONS;
use super::time::NOW;
use super::{Read, Select as _, StoreError, Union, Value, params, placeholders};

/// What a daemon compares with the previous summary.
#[derive(Debug, Clone, PartialEq)]
pub struct ChangeSummary {
    /// When the first operation that a node of the daemon may run is due. Earlier than now if its worker stopped.
    pub next_operation: Option<f64>,
    /// The number of wanted networks, and a sum of their generations.
    pub networks: (i64, i64),
    /// The number of nodes, of those that are up, and the sum of their epochs, which changes when a daemon starts.
    pub nodes: (i64, i64, i64),
    /// The earliest last check-in of the nodes that should check in.
    pub oldest_checkin: Option<f64>,
    /// The number of nodes that do not check in and are not deleted.
    pub silent_nodes: i64,
    /// The number of nodes that get no new instances by request.
    pub cordoned_nodes: i64,
    /// The number of unfinished operations of guest agents.
    pub agent_operations: i64,
    /// The number of webhooks.
    pub webhooks: i64,
    /// Whether addresses are quarantined.
    pub has_quarantined_addresses: bool,
    /// The number of blobs that exist, and of their copies.
    pub blobs: (i64, i64),
    /// The last owner of the lease of the active network node.
    pub network_owner: Option<NodeId>,
    /// All leases, also expired ones.
    pub leases: Vec<Lease>,
    /// The Unix time of the database.
    pub time: f64,
    /// When this host sent the query, and when it received the result.
    pub queried: (f64, f64),
}

impl ChangeSummary {
    /// Returns an unexpired lease.
    #[must_use]
    pub fn lease(&self, name: &str) -> Option<&Lease> {
        self.leases.iter().find(|lease| lease.name == name && lease.expires > self.time)
    }
}

/// Reads the summary for a daemon with some nodes, at a time of the database.
pub async fn read(db: impl Read, nodes: &[NodeId], time: f64) -> Result<ChangeSummary, StoreError> {
    type Operations = (Option<f64>, Option<f64>, i64);
    type Nodes = ((i64, i64, i64), Option<f64>, (i64, i64), f64);
    type Others = ((i64, i64), (i64, i64), (i64, i64), Option<NodeId>);
    let mut union = Union::default();
    let own = format!("(node_uuid IS NULL OR node_uuid IN ({}))", placeholders(nodes.len()));
    let columns = format!(
        "(SELECT MIN(run_after) FROM operations WHERE state = 'queued' AND {own}), \
         (SELECT MIN(lease_expires) FROM operations WHERE state = 'executing' AND lease_expires <= ? AND {own}), \
         (SELECT COUNT(*) FROM agent_operations WHERE state IN ('preflight', 'queued', 'executing'))"
    );
    let ids = || nodes.iter().map(|id| Value::from(*id));
    let values: Vec<Value> = ids().chain([time.into()]).chain(ids()).collect();
    let operations = union.add(&columns, String::new(), &values);
    let columns = format!(
        "COUNT(*), COALESCE(SUM(CASE state WHEN 'created' THEN 1 ELSE 0 END), 0), COALESCE(SUM(epoch), 0), \
         MIN(CASE WHEN state IN ('created', 'stopping') THEN lastseen END), \
         COALESCE(SUM(CASE WHEN state IN ('stopped', 'missing', 'error') THEN 1 ELSE 0 END), 0), COUNT(cordon), \
         CAST({NOW} AS DOUBLE)"
    );
    let nodes = union.add(&columns, "FROM nodes".into(), &[]);
    let columns = format!(
        "(SELECT COUNT(*) FROM networks WHERE wanted = 1), (SELECT {GENERATIONS} FROM networks WHERE wanted = 1), \
         (SELECT COUNT(*) FROM blobs WHERE state = 'created'), (SELECT COUNT(*) FROM blob_locations), \
         (SELECT COUNT(*) FROM webhooks), \
         (SELECT COUNT(*) FROM (SELECT 1 FROM address_halos LIMIT 1) AS quarantined), \
         (SELECT holder FROM leases WHERE name = ?)"
    );
    let others = union.add(&columns, String::new(), params![NETWORK_NODE_LEASE]);
    let leases = union.add(Lease::COLUMNS, "FROM leases".into(), &[]);

    let sent = now();
    let mut rows = union.fetch(db).await?;
    let queried = (sent, now());
    let absent = || StoreError::Internal("the summary of changes lacks a row".into());
    let (queued, expired, agent_operations) =
        rows.take::<Operations>(operations)?.pop().ok_or_else(absent)?;
    let (nodes, oldest_checkin, (silent_nodes, cordoned_nodes), time) =
        rows.take::<Nodes>(nodes)?.pop().ok_or_else(absent)?;
    let (networks, blobs, (webhooks, quarantined), network_owner) =
        rows.take::<Others>(others)?.pop().ok_or_else(absent)?;
    Ok(ChangeSummary {
        next_operation: [queued, expired].into_iter().flatten().min_by(f64::total_cmp),
        networks,
        nodes,
        oldest_checkin,
        silent_nodes,
        cordoned_nodes,
        agent_operations,
        webhooks,
        has_quarantined_addresses: quarantined > 0,
        blobs,
        network_owner,
        leases: rows.take(leases)?,
        time,
        queried,
    })
}
