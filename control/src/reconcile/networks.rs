//! Follows networks on the nodes of this daemon: makes what the database wants, repairs what was damaged, removes
//! what it wants no longer.
//!
//! Nothing else touches a node's networks. Whoever changes a network writes rows, notifies the [`NetworkNotifier`](crate::state::NetworkNotifier), and may wait
//! for the nodes' own rows to say that they followed.

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

use crate::app::App;
use crate::objects::network::object;
use crate::objects::network::plan::{NetworkFacts, NetworkTopology};
use muster_store::node_networks::{self, NodeNetworkRow};
use muster_store::nodes;
use muster_store::{networks, transaction};

/// How often the database is asked whether another daemon changed something.
pub(super) const RECONCILE_INTERVAL: Duration = Duration::from_millis(500);
/// In how many ticks every network was looked at once.
const ROUND: usize = 6;
/// Longest pause before something that failed is tried again, in seconds.
const LONGEST_PAUSE: u64 = 30;
/// Networks removed at once.
const REMOVALS: usize = 8;
/// Leftovers removed in one look.
const MOST_LEFTOVERS: usize = 50;

/// How long what was read counts, even if nothing seems to have changed.
const STALE: Duration = Duration::from_secs(30);

/// What a node has, by network.
type Known = BTreeMap<NetworkId, NodeNetworkRow>;

/// Follows for as long as the daemon lives.
pub async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let mut follower = Follower::default();
    let mut ticked: Option<Instant> = None;
    while !*stop.borrow() {
        let tick = ticked.is_none_or(|last| last.elapsed() >= RECONCILE_INTERVAL);
        if tick {
            ticked = Some(Instant::now());
        }
        if let Err(error) = follower.pass(&app, tick).await {
            tracing::warn!(%error, "networks could not be followed");
        }
        tokio::select! {
            () = app.networks.wait_changed() => {}
            () = tokio::time::sleep(RECONCILE_INTERVAL) => {}
            _ = stop.changed() => {}
        }
    }
}

/// What a daemon remembers between two looks. All of it may be forgotten.
#[derive(Debug, Default)]
pub struct Follower {
    /// What the database said, at which state of it, and when.
    facts: Option<((i64, i64), Instant, NetworkFacts)>,
    /// Which part of the networks is looked at next.
    round: usize,
    /// What failed: how often, for which generation, and when to try again.
    failures: HashMap<(NodeId, NetworkId), Failure>,
    /// What was found on a node at the last look and should not be there.
    suspects: BTreeMap<NodeId, BTreeSet<FoundNetwork>>,
}

#[derive(Debug)]
struct Failure {
    generation: i64,
    count: u32,
    again: Instant,
}

impl Follower {
    /// One look. With `check` a part of what is unchanged is looked at, too.
    pub async fn pass(&mut self, app: &App, check: bool) -> Result<()> {
        let pulse = networks::generation_summary(&*app.store).await?;
        let current =
            |facts: &((i64, i64), Instant, NetworkFacts)| facts.0 == pulse && facts.1.elapsed() < STALE;
        let (facts, known) = match self.facts.take().filter(current) {
            Some(facts) => (facts, true),
            None => ((pulse, Instant::now(), NetworkFacts::read(&*app.store).await?), false),
        };
        let outcome = if known && !check && self.failures.values().all(|f| f.again > Instant::now()) {
            Ok(())
        } else {
            self.look(app, &facts.2, check).await
        };
        self.facts = Some(facts);
        outcome
    }

    async fn look(&mut self, app: &App, facts: &NetworkFacts, check: bool) -> Result<()> {
        let picture = NetworkTopology::new(facts, nodes::list(&*app.store).await?, &app.settings);
        if check {
            self.round = (self.round + 1) % ROUND;
        }
        let own: Vec<NodeId> = app.nodes.iter().map(|node| node.identity().id).collect();
        let mut known: HashMap<NodeId, Known> = HashMap::new();
        for row in node_networks::of_nodes(&*app.store, &own).await? {
            known.entry(row.node).or_default().insert(row.network, row);
        }
        for node in &app.nodes {
            let known = known.remove(&node.identity().id).unwrap_or_default();
            self.look_after(app, &picture, node, &known, check).await?;
        }
        Ok(())
    }

    async fn look_after(
        &mut self,
        app: &App,
        picture: &NetworkTopology<'_>,
        node: &Arc<dyn NodeApi>,
        known: &Known,
        check: bool,
    ) -> Result<()> {
        let id = node.identity().id;
        let mut plans = Vec::new();
        let mut new = Vec::new();
        for (at, network) in picture.networks_on(id).enumerate() {
            let row = known.get(&network.id);
            let followed = row.is_some_and(|r| r.generation == network.generation && r.error.is_none());
            let turn = check && at % ROUND == self.round;
            if (followed && !turn) || self.waits(id, network.id, network.generation) {
                continue;
            }
            if row.is_none() {
                new.push(NodeNetworkRow { node: id, network: network.id, generation: 0, error: None });
            }
            plans.extend(picture.plan(network, id, &app.settings));
        }
        if !new.is_empty() {
            // Written before the first device, so that none can be left without a row that tells of it.
            transaction!(app.store, |tx| {
                for row in &new {
                    node_networks::put(tx, row).await?;
                }
                Ok(())
            })?;
        }
        // Once a round even without any: what networks share may be left of the last one.
        let last = check && self.round == 0 && picture.is_empty();
        if !plans.is_empty() || last {
            let outcomes = match node.ensure_networks(&plans).await {
                Ok(outcomes) => outcomes,
                // What fails as a whole fails for each of them, with the same reason.
                Err(error) => plans.iter().map(|_| Err(Error::Unavailable(reason(&error)))).collect(),
            };
            self.write_down(app, id, known, &plans, outcomes).await?;
        }
        let unwanted: Vec<NetworkId> =
            known.keys().copied().filter(|network| !picture.takes_part(*network, id)).collect();
        self.remove(app, node, &unwanted).await?;
        if check && self.round == 0 {
            self.sweep(app, picture, node, known).await?;
        }
        Ok(())
    }

    /// Whether a network that failed is left alone for now.
    fn waits(&self, node: NodeId, network: NetworkId, generation: i64) -> bool {
        self.failures
            .get(&(node, network))
            .is_some_and(|failure| failure.generation >= generation && failure.again > Instant::now())
    }

    /// Writes down how a node followed, where that is news.
    async fn write_down(
        &mut self,
        app: &App,
        node: NodeId,
        known: &Known,
        plans: &[NetworkPlan],
        outcomes: Vec<Result<NetworkReport>>,
    ) -> Result<()> {
        let mut news = Vec::new();
        for (plan, outcome) in plans.iter().zip(outcomes) {
            let before = known.get(&plan.id);
            let error = match outcome {
                Ok(care) => {
                    self.failures.remove(&(node, plan.id));
                    let again =
                        before.is_some_and(|row| row.generation == plan.generation && row.error.is_none());
                    announce(app, node, plan.id, care, again);
                    None
                }
                Err(error) => {
                    self.failed(node, plan.id, plan.generation);
                    tracing::warn!(network = %plan.id, %error, "a network cannot be carried");
                    Some(reason(&error))
                }
            };
            let row = NodeNetworkRow { node, network: plan.id, generation: plan.generation, error };
            if before != Some(&row) {
                if let Some(why) = &row.error
                    && before.is_none_or(|before| before.error != row.error)
                {
                    app.events.record(
                        Event::new(EventType::Status, object(plan.id), "network cannot be carried by a node")
                            .with_object(ObjectRef::new(ObjectType::Node, node))
                            .with("reason", why.as_str()),
                    );
                }
                news.push(row);
            }
        }
        if !news.is_empty() {
            transaction!(app.store, |tx| {
                for row in &news {
                    node_networks::put(tx, row).await?;
                }
                Ok(())
            })?;
            app.networks.notify_applied();
        }
        Ok(())
    }

    fn failed(&mut self, node: NodeId, network: NetworkId, generation: i64) {
        let before = self.failures.get(&(node, network)).filter(|failure| failure.generation == generation);
        let count = before.map_or(0, |failure| failure.count);
        let pause = (1u64 << count.min(10)).min(LONGEST_PAUSE);
        let again = Instant::now() + Duration::from_secs(pause);
        self.failures.insert((node, network), Failure { generation, count: count + 1, again });
    }

    /// Removes what a node has of networks that are no longer wanted there, as the database says.
    async fn remove(&mut self, app: &App, node: &Arc<dyn NodeApi>, unwanted: &[NetworkId]) -> Result<()> {
        let id = node.identity().id;
        let mut going = Vec::new();
        for row in networks::by_ids(&*app.store, unwanted).await? {
            if !self.waits(id, row.id, row.generation) {
                going.push(row);
            }
        }
        let mut going = going.into_iter();
        let mut removals = JoinSet::new();
        loop {
            while removals.len() < REMOVALS
                && let Some(row) = going.next()
            {
                let node = Arc::clone(node);
                let found = FoundNetwork { id: row.id, vxid: u32::try_from(row.vxid).unwrap_or(0) };
                removals.spawn(async move { (row, node.remove_network(found).await) });
            }
            let Some(removed) = removals.join_next().await else { return Ok(()) };
            let (row, outcome) = removed.map_err(|error| Error::Internal(error.to_string()))?;
            match outcome {
                Ok(()) => {
                    self.failures.remove(&(id, row.id));
                    transaction!(app.store, |tx| { Ok(node_networks::remove(tx, id, row.id).await?) })?;
                    app.networks.notify_applied();
                }
                Err(error) => {
                    tracing::warn!(network = %row.id, %error, "a network could not be removed from its node");
                    if !self.failures.contains_key(&(id, row.id)) {
                        app.events.record(
                            Event::new(
                                EventType::Status,
                                object(row.id),
                                "network cannot be removed from a node",
                            )
                            .with_object(ObjectRef::new(ObjectType::Node, id))
                            .with("reason", reason(&error)),
                        );
                    }
                    self.failed(id, row.id, row.generation);
                }
            }
        }
    }

    /// Removes leftovers that no row of the node tells of: only what was here at the last look, too, and what the
    /// database knows and does not want here. What it does not know at all is only named.
    async fn sweep(
        &mut self,
        app: &App,
        picture: &NetworkTopology<'_>,
        node: &Arc<dyn NodeApi>,
        known: &Known,
    ) -> Result<()> {
        let id = node.identity().id;
        let found = node.list_networks().await?;
        let suspects: BTreeSet<FoundNetwork> = found
            .into_iter()
            .filter(|found| !known.contains_key(&found.id) && !picture.takes_part(found.id, id))
            .collect();
        let before = self.suspects.insert(id, suspects.clone()).unwrap_or_default();
        let ids: Vec<NetworkId> = suspects.iter().map(|found| found.id).collect();
        let rows = networks::by_ids(&*app.store, &ids).await?;
        let (ours, unknown): (Vec<_>, Vec<_>) =
            suspects.into_iter().partition(|found| rows.iter().any(|row| row.id == found.id));
        for found in unknown.iter().filter(|found| !before.contains(found)) {
            tracing::warn!(network = %found.id, "devices of a network that this cluster does not know are left alone");
        }
        for found in ours.into_iter().filter(|found| before.contains(found)).take(MOST_LEFTOVERS) {
            tracing::info!(network = %found.id, "removing what was left of a network");
            node.remove_network(found).await?;
            app.events.record(
                Event::new(EventType::Status, object(found.id), "leftovers removed from a node")
                    .with_object(ObjectRef::new(ObjectType::Node, id)),
            );
        }
        Ok(())
    }
}

/// What the API may say of a failure on a node.
fn reason(error: &Error) -> String {
    match error {
        Error::Internal(_) => "an internal error, see the log of the node".to_owned(),
        other => other.to_string(),
    }
}

/// Tells of repairs, and of a server that died. What was new anyway is no repair.
fn announce(app: &App, node: NodeId, network: NetworkId, care: NetworkReport, again: bool) {
    let place = || ObjectRef::new(ObjectType::Node, node);
    if let Some(why) = care.server_died {
        let event = Event::new(EventType::Status, object(network), "dnsmasq died and was started again");
        app.events.record(event.with_object(place()).with("reason", why));
    }
    if again && !care.repaired.is_empty() {
        tracing::info!(%network, repaired = ?care.repaired, "a network was repaired");
        let event = Event::new(EventType::Status, object(network), "network repaired");
        app.events.record(event.with_object(place()).with("repaired", care.repaired));
    }
}
