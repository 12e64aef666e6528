//! Waits for nodes to apply changes of networks, which `reconcile/networks.rs` does on each of them.

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

use super::USABLE;
use crate::app::App;
use crate::objects::node::network_node;

/// The longest time that an operation occupies its worker while it waits for a node.
const POLL_TIMEOUT: Duration = Duration::from_secs(3);
/// How often the database is read again: a node of another daemon does not notify this one.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// The number of seconds without an answer of the node after which an operation fails.
const NODE_TIMEOUT: f64 = 120.0;

/// Waits a moment for the network node to have what the database wants, and fails with the node's reason. An
/// operation that it makes wait is asked again; it was queued at `since`.
pub(crate) async fn follow(app: &App, network: NetworkId, since: f64) -> Result<()> {
    let rows = node_networks::of_network(&*app.store, network).await?;
    if rows.iter().any(|row| row.error.is_some()) {
        // A new number makes the node try again at once, whatever it said before.
        transaction!(app.store, |tx| {
            networks::bump_generation(tx, network, USABLE).await?;
            Ok(())
        })?;
    }
    settled(wait_for_node(app, network, POLL_TIMEOUT).await?, since)
}

/// What an operation makes of how its wait ended.
fn settled(waited: Waited, since: f64) -> Result<()> {
    match waited {
        Waited::Followed => Ok(()),
        // What the machine cannot do today it cannot do in a minute either.
        Waited::Failed(node, why) if node.report.limits.contains_key(&HostFeature::Networks) => {
            Err(Error::Conflict(format!("node {}: {why}", node.identity.name)))
        }
        Waited::Failed(node, why) => Err(Error::Unavailable(format!("node {}: {why}", node.identity.name))),
        Waited::Late(node) if now() - since > NODE_TIMEOUT => Err(Error::Conflict(late(&node))),
        Waited::Late(node) => Err(Error::NotReady(late(&node))),
    }
}

/// Waits for the network node to follow a change that is committed. One that takes long is no failure.
pub(crate) async fn wait_applied(app: &App, network: NetworkId) -> Result<()> {
    let patience = Duration::from_secs(app.settings.api_async_wait);
    match wait_for_node(app, network, patience).await? {
        Waited::Followed => Ok(()),
        Waited::Failed(node, why) => Err(Error::Unavailable(format!(
            "the change is recorded, but network node {} could not follow it yet: {why}",
            node.identity.name
        ))),
        Waited::Late(node) => {
            tracing::warn!(%network, why = late(&node), "a change waits for the network node");
            Ok(())
        }
    }
}

/// How waiting for the network node ended.
enum Waited {
    Followed,
    Failed(NodeRow, String),
    Late(NodeRow),
}

fn late(node: &NodeRow) -> String {
    format!("node {} has not answered in time", node.identity.name)
}

/// Waits a moment for a node to have what an interface there needs, and fails with the node's reason. An operation that
/// it makes wait is asked again; it was queued at `since`.
pub(crate) async fn follow_on(app: &App, network: NetworkId, node: NodeId, since: f64) -> Result<()> {
    let row = nodes::get(&*app.store, &NameOrId::Id(node)).await?;
    let row = row.ok_or_else(|| Error::Internal("a node without a row".into()))?;
    settled(wait_for(app, network, row, POLL_TIMEOUT).await?, since)
}

/// The same for all interfaces of an instance.
pub(crate) async fn follow_instance(app: &App, instance: InstanceId, node: NodeId, since: f64) -> Result<()> {
    for interface in interfaces::of_instances(&*app.store, &[instance]).await? {
        follow_on(app, interface.network, node, since).await?;
    }
    Ok(())
}

/// Waits a moment for a node to have nothing any more of an interface that is gone. One that takes longer follows
/// later.
pub(crate) async fn wait_left(app: &App, network: NetworkId, node: NodeId) -> Result<()> {
    let mut wait = Wait::new(app, POLL_TIMEOUT);
    loop {
        let Some(row) = networks::get(&*app.store, network).await? else { return Ok(()) };
        let rows = node_networks::of_network(&*app.store, network).await?;
        let behind =
            rows.iter().any(|own| own.node == node && own.generation < row.generation && own.error.is_none());
        if !behind || !wait.again().await {
            return Ok(());
        }
    }
}

async fn wait_for_node(app: &App, network: NetworkId, patience: Duration) -> Result<Waited> {
    wait_for(app, network, network_node(app).await?, patience).await
}

async fn wait_for(app: &App, network: NetworkId, node: NodeRow, patience: Duration) -> Result<Waited> {
    let mut wait = Wait::new(app, patience);
    let row = networks::get(&*app.store, network).await?.filter(|row| row.wanted);
    let Some(row) = row else { return Ok(Waited::Followed) };
    // What others change meanwhile is not waited for: on a busy network that would never end.
    let generation = row.generation;
    loop {
        if networks::get(&*app.store, network).await?.is_none_or(|row| !row.wanted) {
            return Ok(Waited::Followed);
        }
        let rows = node_networks::of_network(&*app.store, network).await?;
        match rows.into_iter().find(|own| own.node == node.identity.id && own.generation >= generation) {
            Some(NodeNetworkRow { error: Some(why), .. }) => return Ok(Waited::Failed(node, why)),
            Some(_) => return Ok(Waited::Followed),
            None if wait.again().await => {}
            None => return Ok(Waited::Late(node)),
        }
    }
}

/// Waits a moment until no node of the cluster has anything of a network; an operation that it makes wait is asked
/// again. A node that is away removes it when it is back.
pub(crate) async fn wait_removed(app: &App, network: NetworkId) -> Result<()> {
    let mut wait = Wait::new(app, POLL_TIMEOUT);
    loop {
        let left: BTreeSet<NodeId> =
            node_networks::of_network(&*app.store, network).await?.iter().map(|row| row.node).collect();
        let nodes = nodes::list(&*app.store).await?;
        let mut present = nodes.iter().filter(|row| row.state == NodeState::Created);
        let Some(busy) = present.find(|row| left.contains(&row.identity.id)) else { return Ok(()) };
        if !wait.again().await {
            return Err(Error::NotReady(format!("node {} has not removed it yet", busy.identity.name)));
        }
    }
}

/// Rings, and then waits for nodes to say that they followed.
struct Wait {
    followed: watch::Receiver<u64>,
    end: Instant,
}

impl Wait {
    fn new(app: &App, patience: Duration) -> Self {
        let followed = app.networks.subscribe_applied();
        app.networks.notify_changed();
        Self { followed, end: Instant::now() + patience }
    }

    /// Waits until it makes sense to look again; `false` when the time is over.
    async fn again(&mut self) -> bool {
        let left = self.end.saturating_duration_since(Instant::now());
        // A node of another daemon rings no bell here.
        let _ = tokio::time::timeout(left.min(POLL_INTERVAL), self.followed.changed()).await;
        !left.is_zero()
    }
}
