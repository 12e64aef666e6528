//! Whether the node of an instance can be reached.

use muster_store::nodes::NodeRow;
use muster_types::node::NodeState;
use muster_types::time::format_utc;
use muster_types::{Error, Result};

/// Returns why the state of a node's VMs is unknown.
pub(super) fn silence(node: &str, lastseen: f64) -> String {
    format!("node {node} has not checked in since {}; the VM may still be running", format_utc(lastseen))
}

/// Rejects a request that only a node can answer that does not check in.
pub(super) fn require_reachable(node: &NodeRow) -> Result<()> {
    match node.state {
        NodeState::Created | NodeState::Stopping | NodeState::Deleted => Ok(()),
        NodeState::Stopped | NodeState::Missing | NodeState::Error => {
            let reason = silence(&node.identity.name, node.lastseen);
            Err(Error::Unavailable(format!("{reason}. Retry when the node is back")))
        }
    }
}
