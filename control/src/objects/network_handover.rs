//! Moves the role of the active network node away from a node that is going to be deleted. See docs/decisions/0054.

use std::time::{Duration, Instant};

use muster_store::leases::{self, LeaseOwner};
use muster_store::nodes::{self, NodeRow};
use muster_types::Result;

use super::node_location::{is_able, network_candidate, network_owner, sort_candidates};
use crate::app::App;

/// The lease by which a node is asked to hand its role over. Its owner's id is that of the node.
pub(crate) const LEAVE_LEASE: &str = "network node leave";
/// The duration of this lease, in seconds.
const LEAVE_SECONDS: f64 = 15.0;
/// The maximum time to wait for the new owner: idle daemons read the leases every 2.5 seconds, first the owner, then its
/// successor.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(10);
/// The interval of reads of the owner.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Asks a node to hand the role over, if it has it and another candidate is able to take over, and waits until it has done so. A
/// node that does not respond keeps the role until its lease expires.
pub(super) async fn leave(app: &App, node: &NodeRow) -> Result<()> {
    let id = node.identity.id;
    if network_owner(app).await? != Some(id) {
        return Ok(());
    }
    let rows = nodes::list(&*app.store).await?;
    let candidates = sort_candidates(app.settings.network_node_ip, rows.iter().filter_map(network_candidate));
    if !candidates.iter().any(|candidate| candidate.id != id && is_able(candidate)) {
        return Ok(());
    }
    let leaving = LeaseOwner { id: id.to_string(), ..LeaseOwner::new(&node.identity.name) };
    leases::acquire(&app.store, LEAVE_LEASE, &leaving, LEAVE_SECONDS).await?;
    let deadline = Instant::now() + LEAVE_TIMEOUT;
    while network_owner(app).await? == Some(id) {
        if Instant::now() >= deadline {
            tracing::warn!(node = node.identity.name, "the network node did not hand its role over in time");
            break;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    leases::release(&app.store, LEAVE_LEASE, &leaving).await
}
