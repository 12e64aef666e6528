//! Reconciles the networks on the nodes of this daemon with the database: applies plans, repairs drift, removes
//! unwanted networks.
//!
//! Nothing else modifies a node's networks. A request that changes a network writes rows, notifies the
//! [`NetworkNotifier`](crate::state::NetworkNotifier), and may wait until the rows of the nodes show that they applied
//! it. See docs/decisions/0011.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_types::event::{Event, EventType};
use muster_types::ids::{NetworkId, NodeId};
use muster_types::network::{NetworkPlan, NetworkReport};
use muster_types::node::{FoundNetwork, NodeApi};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::{Error, Result};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::changes::MAX_SUMMARY_AGE;
use crate::app::App;
use crate::objects::network::object;
use crate::objects::network::plan::{NetworkFacts, NetworkTopology};
use crate::objects::node_location::network_owner;
use muster_store::leases::{Lease, NETWORK_NODE_LEASE};
use muster_store::networks::{self, NetworkRow};
use muster_store::node_networks::{self, NodeNetworkRow};
use muster_store::nodes::NodeRow;
use muster_store::transaction;

/// The interval between checks of the networks of the nodes. The changes of other daemons are notified.
pub(super) const RECONCILE_INTERVAL: Duration = Duration::from_millis(500);
/// The number of passes in which every unchanged network is checked once.
const PASSES_PER_SWEEP: usize = 6;
/// The maximum delay before a failed network is retried, in seconds.
const MAX_BACKOFF: u64 = 30;
/// The maximum number of concurrent removals.
const MAX_CONCURRENT_REMOVALS: usize = 8;
/// The maximum number of orphaned networks removed in one pass.
const MAX_ORPHANS: usize = 50;

/// The time after which cached facts are read again, even if no generation changed.
const CACHE_TTL: Duration = Duration::from_secs(300);

/// The time after which the nodes are read again, even if their number did not change.
const NODES_TTL: Duration = Duration::from_secs(30);

/// All nodes, and the active network node.
type NodesAndOwner = (Arc<Vec<NodeRow>>, Option<NodeId>);

/// The recorded state of a node's networks.
type NodeNetworks = BTreeMap<NetworkId, NodeNetworkRow>;

/// Reconciles networks until `stop` is set.
pub async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let mut reconciler = NetworkReconciler::default();
    let mut last_check: Option<Instant> = None;
    let mut notified = true;
    tokio::select! {
        () = app.networks.wait_role_known() => {}
        _ = stop.changed() => {}
    }
    while !*stop.borrow() {
        let check = last_check.is_none_or(|last| last.elapsed() >= RECONCILE_INTERVAL);
        if check {
            last_check = Some(Instant::now());
        }
        let started = Instant::now();
        let outcome = reconciler.pass(&app, check, notified).await;
        app.metrics.passed("networks", started, outcome.is_ok());
        if let Err(error) = outcome {
            tracing::warn!(%error, "failed to reconcile networks");
        }
        notified = tokio::select! {
            () = app.networks.wait_changed() => true,
            () = tokio::time::sleep(RECONCILE_INTERVAL) => false,
            _ = stop.changed() => false,
        };
    }
}

/// In-memory state kept between passes. All of it may be lost.
#[derive(Debug, Default)]
struct NetworkReconciler {
    cache: Option<CachedFacts>,
    /// The nodes and the active network node.
    nodes: Option<(Instant, NodesAndOwner)>,
    /// Whether a change was notified since the nodes were read.
    nodes_changed: bool,
    /// The rows of this daemon's nodes, until one of them is written.
    recorded: Option<HashMap<NodeId, NodeNetworks>>,
    /// Whether the pass wrote rows of this daemon's nodes.
    wrote_rows: bool,
    /// The part of the unchanged networks that this pass checks, below [`PASSES_PER_SWEEP`].
    sweep_part: usize,
    failures: HashMap<(NodeId, NetworkId), Failure>,
    /// Networks that the last sweep found on a node and that should not be there.
    suspects: BTreeMap<NodeId, BTreeSet<FoundNetwork>>,
    /// Networks that were found and that the database does not know.
    unknown: BTreeSet<FoundNetwork>,
}

/// The facts of the database when it had a generation summary.
#[derive(Debug)]
struct CachedFacts {
    generations: (i64, i64),
    read_at: Instant,
    facts: NetworkFacts,
}

/// A network that failed on a node.
#[derive(Debug)]
struct Failure {
    generation: i64,
    count: u32,
    retry_at: Instant,
}

impl NetworkReconciler {
    /// Runs one pass. With `check`, it also checks a part of the unchanged networks. Unless it was `notified`, the
    /// database has not changed.
    async fn pass(&mut self, app: &App, check: bool, notified: bool) -> Result<()> {
        let cache = self.cache.take().filter(|cache| cache.read_at.elapsed() < CACHE_TTL);
        let generations = match &cache {
            Some(cache) if !notified => cache.generations,
            _ => networks::generation_summary(&*app.store).await?,
        };
        let (cache, unchanged) = match cache.filter(|cache| cache.generations == generations) {
            Some(cache) => (cache, true),
            None => {
                self.recorded = None;
                let (read_at, facts) = (Instant::now(), NetworkFacts::read(&*app.store).await?);
                (CachedFacts { generations, read_at, facts }, false)
            }
        };
        if notified {
            self.nodes = None;
            self.nodes_changed = true;
            self.recorded = None;
        }
        let outcome = if unchanged && !check && self.failures.values().all(|f| f.retry_at > Instant::now()) {
            Ok(())
        } else {
            self.reconcile(app, &cache.facts, check).await
        };
        self.cache = Some(cache);
        outcome
    }

    async fn reconcile(&mut self, app: &App, facts: &NetworkFacts, check: bool) -> Result<()> {
        let (read_at, nodes) = match self.nodes.take().filter(|(read_at, _)| read_at.elapsed() < NODES_TTL) {
            Some(nodes) => nodes,
            None => (Instant::now(), self.read_nodes(app).await?),
        };
        let (rows, owner) = nodes.clone();
        let topology = NetworkTopology::new(facts, &rows, owner, &app.settings);
        self.nodes = Some((read_at, nodes));
        if check {
            self.sweep_part = (self.sweep_part + 1) % PASSES_PER_SWEEP;
        }
        let own: Vec<NodeId> = app.nodes.iter().map(|node| node.identity().id).collect();
        let recorded = match self.recorded.take() {
            Some(recorded) => recorded,
            None => {
                let mut recorded: HashMap<NodeId, NodeNetworks> = HashMap::new();
                for row in node_networks::of_nodes(&*app.store, &own).await? {
                    recorded.entry(row.node).or_default().insert(row.network, row);
                }
                recorded
            }
        };
        self.wrote_rows = false;
        for node in &app.nodes {
            let none = NodeNetworks::new();
            let recorded = recorded.get(&node.identity().id).unwrap_or(&none);
            self.reconcile_node(app, &topology, node, recorded, check).await?;
        }
        self.recorded = Some(recorded).filter(|_| !self.wrote_rows);
        Ok(())
    }

    /// Reads the nodes and the active network node. Without a change, those are sufficient that other tasks have read.
    async fn read_nodes(&mut self, app: &App) -> Result<NodesAndOwner> {
        let max_age = if self.nodes_changed { Duration::ZERO } else { NODES_TTL };
        let rows = app.node_cache.get(&app.store, max_age).await?;
        let owner = if self.nodes_changed { network_owner(app).await? } else { recent_owner(app).await? };
        self.nodes_changed = false;
        Ok((rows, owner))
    }

    async fn reconcile_node(
        &mut self,
        app: &App,
        topology: &NetworkTopology<'_>,
        node: &Arc<dyn NodeApi>,
        recorded: &NodeNetworks,
        check: bool,
    ) -> Result<()> {
        let id = node.identity().id;
        let mut plans = Vec::new();
        let mut new = Vec::new();
        for (index, network) in topology.networks_on(id).enumerate() {
            let row = recorded.get(&network.id);
            let applied = row.is_some_and(|r| r.generation == network.generation && r.error.is_none());
            let is_checked = check && index % PASSES_PER_SWEEP == self.sweep_part;
            if (applied && !is_checked) || self.is_backing_off(id, network.id, network.generation) {
                continue;
            }
            if row.is_none() {
                new.push(NodeNetworkRow { node: id, network: network.id, generation: 0, error: None });
            }
            plans.extend(topology.plan(network, id, &app.settings));
        }
        if !new.is_empty() {
            self.wrote_rows = true;
            // Recorded before the first device exists, so that every device has a row.
            transaction!(app.store, |tx| {
                for row in &new {
                    node_networks::put(tx, row).await?;
                }
                Ok(())
            })?;
        }
        // Once per sweep even without a plan: the last network may have left shared devices behind.
        let removes_shared = check && self.sweep_part == 0 && topology.is_empty();
        if !plans.is_empty() || removes_shared {
            let outcomes = match node.ensure_networks(&plans).await {
                Ok(outcomes) => outcomes,
                // All networks failed for the same reason.
                Err(error) => plans.iter().map(|_| Err(Error::Unavailable(public_reason(&error)))).collect(),
            };
            self.record_outcomes(app, id, recorded, &plans, outcomes).await?;
        }
        let unwanted: Vec<NetworkId> =
            recorded.keys().copied().filter(|network| !topology.takes_part(*network, id)).collect();
        self.remove(app, node, &unwanted).await?;
        if check && self.sweep_part == 0 {
            self.remove_orphans(app, topology, node, recorded).await?;
        }
        Ok(())
    }

    /// Returns whether a network failed on a node and is not retried yet.
    fn is_backing_off(&self, node: NodeId, network: NetworkId, generation: i64) -> bool {
        self.failures
            .get(&(node, network))
            .is_some_and(|failure| failure.generation >= generation && failure.retry_at > Instant::now())
    }

    /// Records how a node applied its plans, where that changed.
    async fn record_outcomes(
        &mut self,
        app: &App,
        node: NodeId,
        recorded: &NodeNetworks,
        plans: &[NetworkPlan],
        outcomes: Vec<Result<NetworkReport>>,
    ) -> Result<()> {
        let mut changed = Vec::new();
        for (plan, outcome) in plans.iter().zip(outcomes) {
            let before = recorded.get(&plan.id);
            let error = match outcome {
                Ok(report) => {
                    self.failures.remove(&(node, plan.id));
                    let is_repair =
                        before.is_some_and(|row| row.generation == plan.generation && row.error.is_none());
                    record_repairs(app, node, plan.id, report, is_repair);
                    None
                }
                Err(error) => {
                    self.record_failure(node, plan.id, plan.generation);
                    tracing::warn!(network = %plan.id, %error, "failed to apply a network");
                    Some(public_reason(&error))
                }
            };
            let row = NodeNetworkRow { node, network: plan.id, generation: plan.generation, error };
            if before != Some(&row) {
                if let Some(reason) = &row.error
                    && before.is_none_or(|before| before.error != row.error)
                {
                    app.events.record(
                        Event::new(EventType::Status, object(plan.id), "failed to apply network to a node")
                            .with_object(ObjectRef::new(ObjectType::Node, node))
                            .with("reason", reason.as_str()),
                    );
                }
                changed.push(row);
            }
        }
        if !changed.is_empty() {
            self.wrote_rows = true;
            transaction!(app.store, |tx| {
                for row in &changed {
                    node_networks::put(tx, row).await?;
                }
                Ok(())
            })?;
            app.networks.notify_applied();
        }
        Ok(())
    }

    fn record_failure(&mut self, node: NodeId, network: NetworkId, generation: i64) {
        let before = self.failures.get(&(node, network)).filter(|failure| failure.generation == generation);
        let count = before.map_or(0, |failure| failure.count);
        let delay = (1u64 << count.min(10)).min(MAX_BACKOFF);
        let retry_at = Instant::now() + Duration::from_secs(delay);
        self.failures.insert((node, network), Failure { generation, count: count + 1, retry_at });
    }

    /// Removes networks from a node that the database no longer wants there.
    async fn remove(&mut self, app: &App, node: &Arc<dyn NodeApi>, unwanted: &[NetworkId]) -> Result<()> {
        let id = node.identity().id;
        let mut pending = networks::by_ids(&*app.store, unwanted).await?;
        pending.retain(|row| !self.is_backing_off(id, row.id, row.generation));
        let mut pending = pending.into_iter();
        let mut removals = JoinSet::new();
        loop {
            while removals.len() < MAX_CONCURRENT_REMOVALS
                && let Some(row) = pending.next()
            {
                let (node, network) = (Arc::clone(node), network_on_node(&row));
                removals.spawn(async move { (row, node.remove_network(network).await) });
            }
            let Some(removed) = removals.join_next().await else { return Ok(()) };
            let (row, outcome) = removed.map_err(|error| Error::Internal(error.to_string()))?;
            match outcome {
                Ok(()) => {
                    self.failures.remove(&(id, row.id));
                    self.wrote_rows = true;
                    transaction!(app.store, |tx| { Ok(node_networks::remove(tx, id, row.id).await?) })?;
                    app.networks.notify_applied();
                }
                Err(error) => self.record_failed_removal(app, id, &row, &error),
            }
        }
    }

    fn record_failed_removal(&mut self, app: &App, node: NodeId, row: &NetworkRow, error: &Error) {
        tracing::warn!(network = %row.id, %error, "failed to remove a network from a node");
        if !self.failures.contains_key(&(node, row.id)) {
            app.events.record(
                Event::new(EventType::Status, object(row.id), "failed to remove network from a node")
                    .with_object(ObjectRef::new(ObjectType::Node, node))
                    .with("reason", public_reason(error)),
            );
        }
        self.record_failure(node, row.id, row.generation);
    }

    /// Removes networks from a node that have no row for it, if two consecutive sweeps found them. Networks that the
    /// database does not know may belong to another cluster and are only logged.
    async fn remove_orphans(
        &mut self,
        app: &App,
        topology: &NetworkTopology<'_>,
        node: &Arc<dyn NodeApi>,
        recorded: &NodeNetworks,
    ) -> Result<()> {
        let id = node.identity().id;
        let found = node.list_networks().await?;
        let suspects: BTreeSet<FoundNetwork> = found
            .into_iter()
            .filter(|found| !recorded.contains_key(&found.id) && !topology.takes_part(found.id, id))
            .collect();
        let before = self.suspects.insert(id, suspects.clone()).unwrap_or_default();
        // A network has a row before it has devices, so an unknown one remains unknown.
        let suspects: Vec<FoundNetwork> = suspects.difference(&self.unknown).copied().collect();
        let ids: Vec<NetworkId> = suspects.iter().map(|found| found.id).collect();
        let rows = networks::by_ids(&*app.store, &ids).await?;
        let (orphans, unknown): (Vec<_>, Vec<_>) =
            suspects.into_iter().partition(|found| rows.iter().any(|row| row.id == found.id));
        for found in unknown {
            tracing::warn!(network = %found.id, "ignored devices of an unknown network");
            self.unknown.insert(found);
        }
        for found in orphans.into_iter().filter(|found| before.contains(found)).take(MAX_ORPHANS) {
            tracing::info!(network = %found.id, "removing an orphaned network");
            node.remove_network(found).await?;
            app.events.record(
                Event::new(EventType::Status, object(found.id), "orphaned network removed from a node")
                    .with_object(ObjectRef::new(ObjectType::Node, id)),
            );
        }
        Ok(())
    }
}

/// Returns the active network node as of the last summary of changes, or reads it.
pub(super) async fn recent_owner(app: &App) -> Result<Option<NodeId>> {
    match app.cluster_changes.recent(MAX_SUMMARY_AGE) {
        Some(summary) => Ok(summary.lease(NETWORK_NODE_LEASE).map(Lease::owner_node).transpose()?),
        None => network_owner(app).await,
    }
}

/// Returns how a node identifies a network.
pub(super) fn network_on_node(row: &NetworkRow) -> FoundNetwork {
    FoundNetwork { id: row.id, vxid: row.vxid }
}

/// Returns the reason of a failure for the API. Internal errors are only logged.
fn public_reason(error: &Error) -> String {
    match error {
        Error::Internal(_) => "internal error, see the log of the node".to_owned(),
        other => other.to_string(),
    }
}

/// Records a restarted DHCP server and, if the network was applied before, repairs.
fn record_repairs(app: &App, node: NodeId, network: NetworkId, report: NetworkReport, is_repair: bool) {
    let node = || ObjectRef::new(ObjectType::Node, node);
    if let Some(reason) = report.server_died {
        let event = Event::new(EventType::Status, object(network), "dnsmasq died and was started again");
        app.events.record(event.with_object(node()).with("reason", reason));
    }
    if is_repair && !report.repaired.is_empty() {
        tracing::info!(%network, repaired = ?report.repaired, "repaired a network");
        let event = Event::new(EventType::Status, object(network), "network repaired");
        app.events.record(event.with_object(node()).with("repaired", report.repaired));
    }
}
