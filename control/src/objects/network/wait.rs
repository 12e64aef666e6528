//! Waits for nodes to apply changes of networks. `reconcile/networks.rs` applies them on each node. See
//! docs/decisions/0011.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use muster_store::node_networks::{self, NodeNetworkRow};
use muster_store::nodes::{self, NodeRow};
use muster_store::{interfaces, networks, transaction};
use muster_types::ids::{InstanceId, NetworkId, NodeId};
use muster_types::node::{HostFeature, NodeState};
use muster_types::object::NameOrId;
use muster_types::time::now;
use muster_types::{Error, Result};
use tokio::sync::watch;

use super::state::USABLE;
use crate::app::App;
use crate::objects::node_location::network_node;

/// The longest time that an operation occupies its worker while it waits for a node.
const POLL_TIMEOUT: Duration = Duration::from_secs(3);
/// How often the database is polled: a node of another daemon does not notify this one.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// The number of seconds without a response of the node after which an operation fails.
const NODE_TIMEOUT: f64 = 120.0;

/// Waits up to [`POLL_TIMEOUT`] for the network node to apply a network, and fails with the node's error. The operation
/// was queued at `since` and is retried on [`Error::NotReady`].
pub(crate) async fn wait_network_node(app: &App, network: NetworkId, since: f64) -> Result<()> {
    let rows = node_networks::of_network(&*app.store, network).await?;
    if rows.iter().any(|row| row.error.is_some()) {
        // A new generation makes the node retry immediately.
        transaction!(app.store, |tx| {
            networks::bump_generation(tx, network, USABLE).await?;
            Ok(())
        })?;
    }
    into_result(wait_for_node(app, network, POLL_TIMEOUT).await?, since)
}

/// Converts the outcome of a wait into the result of an operation.
fn into_result(waited: WaitOutcome, since: f64) -> Result<()> {
    match waited {
        WaitOutcome::Applied => Ok(()),
        // A host that lacks the feature will still lack it on the next attempt.
        WaitOutcome::Failed(node, reason) if node.report.limits.contains_key(&HostFeature::Networks) => {
            Err(Error::Conflict(format!("node {}: {reason}", node.identity.name)))
        }
        WaitOutcome::Failed(node, reason) => {
            Err(Error::Unavailable(format!("node {}: {reason}", node.identity.name)))
        }
        WaitOutcome::TimedOut(node) if now() - since > NODE_TIMEOUT => Err(Error::Conflict(timed_out(&node))),
        WaitOutcome::TimedOut(node) => Err(Error::NotReady(timed_out(&node))),
    }
}

/// Waits for the network node to apply a committed change. A timeout is not an error.
pub(crate) async fn wait_applied(app: &App, network: NetworkId) -> Result<()> {
    let timeout = Duration::from_secs(app.settings.api_async_wait);
    match wait_for_node(app, network, timeout).await? {
        WaitOutcome::Applied => Ok(()),
        WaitOutcome::Failed(node, reason) => Err(Error::Unavailable(format!(
            "the change is recorded, but network node {} failed to apply it: {reason}",
            node.identity.name
        ))),
        WaitOutcome::TimedOut(node) => {
            tracing::warn!(%network, reason = timed_out(&node), "network node has not applied a change yet");
            Ok(())
        }
    }
}

/// How waiting for a node ended.
enum WaitOutcome {
    Applied,
    Failed(NodeRow, String),
    TimedOut(NodeRow),
}

fn timed_out(node: &NodeRow) -> String {
    format!("node {} did not respond in time", node.identity.name)
}

/// Waits up to [`POLL_TIMEOUT`] for a node to apply a network that an interface there needs. The operation was queued
/// at `since` and is retried on [`Error::NotReady`].
pub(crate) async fn wait_network_on_node(
    app: &App,
    network: NetworkId,
    node: NodeId,
    since: f64,
) -> Result<()> {
    let row = nodes::get(&*app.store, &NameOrId::Id(node)).await?;
    let row = row.ok_or_else(|| Error::Internal("the node has no row".into()))?;
    into_result(wait_for(app, network, row, POLL_TIMEOUT).await?, since)
}

/// Like [`wait_network_on_node`], for all interfaces of an instance.
pub(crate) async fn wait_instance_networks(
    app: &App,
    instance: InstanceId,
    node: NodeId,
    since: f64,
) -> Result<()> {
    for interface in interfaces::of_instances(&*app.store, &[instance]).await? {
        wait_network_on_node(app, interface.network, node, since).await?;
    }
    Ok(())
}

/// Waits up to [`POLL_TIMEOUT`] for a node to remove a deleted interface. A timeout is not an error.
pub(crate) async fn wait_interface_removed(app: &App, network: NetworkId, node: NodeId) -> Result<()> {
    let mut wait = Wait::new(app, POLL_TIMEOUT);
    loop {
        let Some(row) = networks::get(&*app.store, network).await? else { return Ok(()) };
        let rows = node_networks::of_network(&*app.store, network).await?;
        let is_behind =
            rows.iter().any(|own| own.node == node && own.generation < row.generation && own.error.is_none());
        if !is_behind || !wait.again().await {
            return Ok(());
        }
    }
}

async fn wait_for_node(app: &App, network: NetworkId, timeout: Duration) -> Result<WaitOutcome> {
    wait_for(app, network, network_node(app).await?, timeout).await
}

async fn wait_for(app: &App, network: NetworkId, node: NodeRow, timeout: Duration) -> Result<WaitOutcome> {
    let mut wait = Wait::new(app, timeout);
    let row = networks::get(&*app.store, network).await?.filter(|row| row.wanted);
    let Some(row) = row else { return Ok(WaitOutcome::Applied) };
    // Later changes are not waited for: on a busy network the wait would never end.
    let generation = row.generation;
    loop {
        if networks::get(&*app.store, network).await?.is_none_or(|row| !row.wanted) {
            return Ok(WaitOutcome::Applied);
        }
        let rows = node_networks::of_network(&*app.store, network).await?;
        match rows.into_iter().find(|own| own.node == node.identity.id && own.generation >= generation) {
            Some(NodeNetworkRow { error: Some(reason), .. }) => return Ok(WaitOutcome::Failed(node, reason)),
            Some(_) => return Ok(WaitOutcome::Applied),
            None if wait.again().await => {}
            None => return Ok(WaitOutcome::TimedOut(node)),
        }
    }
}

/// Waits up to [`POLL_TIMEOUT`] until all nodes that are up have removed a network; the operation is retried on
/// [`Error::NotReady`]. A node that is down removes it when it is back.
pub(crate) async fn wait_removed(app: &App, network: NetworkId) -> Result<()> {
    let mut wait = Wait::new(app, POLL_TIMEOUT);
    loop {
        let remaining: BTreeSet<NodeId> =
            node_networks::of_network(&*app.store, network).await?.iter().map(|row| row.node).collect();
        let nodes = nodes::list(&*app.store).await?;
        let mut present = nodes.iter().filter(|row| row.state == NodeState::Created);
        let Some(pending) = present.find(|row| remaining.contains(&row.identity.id)) else { return Ok(()) };
        if !wait.again().await {
            return Err(Error::NotReady(format!("node {} has not removed it yet", pending.identity.name)));
        }
    }
}

/// Notifies the nodes of this daemon, then waits for nodes to apply the change.
struct Wait {
    applied: watch::Receiver<u64>,
    end: Instant,
}

impl Wait {
    fn new(app: &App, timeout: Duration) -> Self {
        let applied = app.networks.subscribe_applied();
        app.networks.notify_changed();
        Self { applied, end: Instant::now() + timeout }
    }

    /// Waits until the database should be polled again. Returns `false` after the deadline.
    async fn again(&mut self) -> bool {
        let remaining = self.end.saturating_duration_since(Instant::now());
        // A node of another daemon does not notify this one.
        let _ = tokio::time::timeout(remaining.min(POLL_INTERVAL), self.applied.changed()).await;
        !remaining.is_zero()
    }
}
