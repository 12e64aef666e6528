//! Competes for the role of the active network node, for the nodes of this daemon. See docs/decisions/0054.
//!
//! The owner of a lease opens the gate of its routers and renews the lease. The kernel closes the gate before the lease
//! expires, unless it was renewed; so the next owner can open its own. While a node is the only candidate, its lease does
//! not expire and its gate stays open, also without the daemon.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::leases::{self, Lease, LeaseOwner, NETWORK_NODE_LEASE};
use muster_store::nodes::{self, NetworkCandidate};
use muster_store::{cluster_values, networks, transaction};
use muster_types::event::{Event, EventType};
use muster_types::ids::NodeId;
use muster_types::node::{NodeApi, NodeState, RouterGate};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use tokio::sync::watch;

use crate::app::App;
use crate::objects::network_handover::LEAVE_LEASE;
use crate::objects::node_location::{NetworkNodes, is_able, network_candidate, sort_candidates};

/// The lease by which the owner announces that it is about to release its lease.
const HANDOVER_LEASE: &str = "network node handover";
/// The lease of the node that waits to take over from an owner that announced it.
const SUCCESSOR_LEASE: &str = "network node successor";
/// The duration of these two leases, in seconds.
const HANDOVER_SECONDS: f64 = 5.0;
/// The cluster value with the name of the last active network node.
const LAST_OWNER: &str = "NETWORK_NODE_LAST_OWNER";
/// The maximum time that an owner waits for a successor before it releases its lease. An idle standby reads the leases every
/// 2.5 seconds.
pub(super) const HANDOVER_TIMEOUT: Duration = Duration::from_secs(4);
/// The interval of reads of the database during a handover.
const HANDOVER_POLL: Duration = Duration::from_millis(25);
/// The duration of the lease of the only candidate, in seconds: to any clock of the database, it does not expire.
const SOLE_LEASE: f64 = 7900.0 * 365.0 * 86400.0;
/// The maximum interval at which candidates check whether the lease is vacant.
const MAX_POLL: Duration = Duration::from_secs(1);
/// The minimum interval.
const MIN_POLL: Duration = Duration::from_millis(10);
/// The delay with which a summary of changes may arrive.
const MAX_SUMMARY_DELAY: Duration = Duration::from_millis(500);
/// The time for which a candidate without routers leaves a vacant lease to one that has them.
const UNPREPARED_DELAY: Duration = Duration::from_secs(2);
/// The number of failures to open the gate after which a node releases the lease.
const MAX_OPEN_FAILURES: u32 = 3;
/// The time for which a candidate that failed to open its gate leaves the lease to others.
const FAILURE_BACKOFF: Duration = Duration::from_secs(30);

/// Returns the interval at which the owner renews its lease.
pub(super) fn renew_interval(settings: &Settings) -> Duration {
    LeaseTimes::new(settings).length / 4
}

/// Competes until `stop` is set, then hands the role over.
pub(super) async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    let mut competitors: Vec<Competitor> =
        app.nodes.iter().map(|node| Competitor::new(Arc::clone(node))).collect();
    while !*stop.borrow() {
        let mut pause = renew_interval(&app.settings);
        for competitor in &mut competitors {
            pause = pause.min(competitor.pass(&app).await);
        }
        app.networks.notify_role_known();
        // A summary of changes contains the leases, so a node that waits for a vacant one need not read them.
        let waits = competitors.iter().any(|competitor| competitor.owned.is_none());
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = app.cluster_changes.wait_next(), if waits => {}
            () = app.cluster_changes.wait_lease(LEAVE_LEASE), if !waits => {}
            _ = stop.changed() => {}
        }
    }
    for competitor in &mut competitors {
        if let Err(error) = competitor.hand_over(&app).await {
            tracing::warn!(%error, "failed to hand over the role of the network node");
        }
    }
}

/// The durations that depend on `NETWORK_NODE_LEASE`.
#[derive(Debug, Clone, Copy)]
struct LeaseTimes {
    /// The duration of the lease.
    length: Duration,
    /// The time from the start of a renewal to the closing of the gate.
    gate: Duration,
    /// The interval at which candidates check whether the lease is vacant.
    poll: Duration,
}

impl LeaseTimes {
    fn new(settings: &Settings) -> Self {
        let length = Duration::from_secs_f64(settings.network_node_lease);
        Self { length, gate: length.mul_f64(5.0 / 6.0), poll: MAX_POLL.min(length / 8) }
    }

    /// Returns the gate of an owner whose renewal started at `started`.
    fn gate_from(self, started: Instant) -> RouterGate {
        RouterGate::OpenUntil { close_at: started + self.gate, lease_end: started + self.length }
    }
}

/// What the database says about the role.
struct RoleView {
    /// In order of preference.
    candidates: Vec<NetworkCandidate>,
    /// The leases that have not expired.
    leases: Vec<Lease>,
    /// The version of the lease of the active network node, if its owner has not renewed it for its whole duration.
    unrenewed: Option<i64>,
}

impl RoleView {
    /// The lease of the active network node expires by the clock of this daemon, the others by that of the database.
    fn new(app: &App, times: LeaseTimes, candidates: Vec<NetworkCandidate>, mut leases: Vec<Lease>) -> Self {
        let time = app.store.membership.database_time();
        let mut unrenewed = None;
        leases.retain(|lease| {
            if lease.name != NETWORK_NODE_LEASE {
                return lease.expires > time;
            }
            if !lease.is_unlimited(time) {
                unrenewed = app.lease_observations.unrenewed(lease, times.length);
            }
            unrenewed.is_none()
        });
        Self { candidates, leases, unrenewed }
    }

    fn lease(&self, name: &str) -> Option<&Lease> {
        self.leases.iter().find(|lease| lease.name == name)
    }

    fn candidate(&self, node: NodeId) -> Option<&NetworkCandidate> {
        self.candidates.iter().find(|candidate| candidate.id == node)
    }

    /// Returns whether a node has the routers of all networks.
    fn is_prepared(&self, node: NodeId) -> Result<bool> {
        let owner = self.lease(NETWORK_NODE_LEASE).map(Lease::owner_node).transpose()?;
        Ok(NetworkNodes::choose(owner, &self.candidates).iter().any(|prepared| prepared == node))
    }

    /// Returns the time until the next poll: at the latest when the lease of the other node has not been renewed for its whole
    /// duration.
    fn next_poll(&self, app: &App, times: LeaseTimes) -> Duration {
        let time = app.store.membership.database_time();
        let lease = self.lease(NETWORK_NODE_LEASE).filter(|lease| !lease.is_unlimited(time));
        let remaining = lease.and_then(|lease| app.lease_observations.remaining(lease, times.length));
        remaining.map_or(times.poll, |remaining| times.poll.min(remaining.max(MIN_POLL)))
    }

    fn has_other_able(&self, node: NodeId) -> bool {
        self.candidates.iter().any(|candidate| candidate.id != node && is_able(candidate))
    }
}

/// How a node owns the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ownership {
    /// It does not expire.
    Sole,
    /// It expires unless it is renewed; the gate closes at this time.
    Until(Instant),
}

/// A node of this daemon that competes for the role.
struct Competitor {
    node: Arc<dyn NodeApi>,
    owner: LeaseOwner,
    owned: Option<Ownership>,
    /// Whether the networks have an event of the last acquisition.
    is_announced: bool,
    /// Whether the gate was closed since the node does not own the lease.
    is_closed: bool,
    /// When it last acquired or lost the lease. Earlier summaries of changes do not show that.
    changed_at: Instant,
    /// Whether the owner announced that it is about to release its lease.
    is_handover: bool,
    vacant_since: Option<Instant>,
    /// The number of consecutive failures to open the gate.
    open_failures: u32,
    /// Why the gate was not opened at the last attempt.
    gate_problem: Option<String>,
    retry_at: Option<Instant>,
}

impl Competitor {
    fn new(node: Arc<dyn NodeApi>) -> Self {
        let identity = node.identity();
        // The restarted daemon of a node still owns the lease of the node.
        let owner = LeaseOwner { id: identity.id.to_string(), ..LeaseOwner::new(&identity.name) };
        Self {
            node,
            owner,
            owned: None,
            is_announced: false,
            is_closed: false,
            changed_at: Instant::now(),
            is_handover: false,
            vacant_since: None,
            open_failures: 0,
            gate_problem: None,
            retry_at: None,
        }
    }

    fn id(&self) -> NodeId {
        self.node.identity().id
    }

    /// Runs one pass and returns the time until the next.
    async fn pass(&mut self, app: &App) -> Duration {
        let times = LeaseTimes::new(&app.settings);
        match self.compete(app, times).await {
            Ok(pause) => pause,
            Err(error) => {
                tracing::warn!(node = %self.owner.node, %error, "failed to compete for the role of the network node");
                if let Some(Ownership::Until(close_at)) = self.owned
                    && Instant::now() >= close_at
                {
                    self.lose(app, "the lease could not be renewed").await;
                }
                times.poll
            }
        }
    }

    /// Reads the candidates and the leases, unless a recent summary of changes shows them.
    async fn read(&self, app: &App, times: LeaseTimes) -> Result<RoleView> {
        let max_age = (times.length / 4 + MAX_SUMMARY_DELAY).min(self.changed_at.elapsed());
        let summary = app.cluster_changes.recent(max_age);
        // A summary shows when nodes change their state.
        let max_age = if summary.is_some() { times.length * 2 } else { times.length / 4 };
        let rows = app.node_cache.get(&app.store, max_age).await?;
        let candidates =
            sort_candidates(app.settings.network_node_ip, rows.iter().filter_map(network_candidate));
        let leases = match summary.filter(|_| !self.is_handover) {
            Some(summary) => summary.leases.clone(),
            None => {
                let leases = leases::all(&app.store).await?;
                app.lease_observations.observe(&leases, Instant::now());
                leases
            }
        };
        Ok(RoleView::new(app, times, candidates, leases))
    }

    async fn compete(&mut self, app: &App, times: LeaseTimes) -> Result<Duration> {
        let view = within(times, self.read(app, times)).await?;
        let Some(own) = view.candidate(self.id()) else {
            self.withdraw(app, &view).await?;
            return Ok(times.length / 4);
        };
        if self.owned.is_none() && !self.may_acquire(app, times, &view, own).await? {
            self.is_handover = view.lease(HANDOVER_LEASE).is_some() && view.is_prepared(self.id())?;
            return Ok(if self.is_handover { HANDOVER_POLL } else { view.next_poll(app, times) });
        }
        self.is_handover = false;
        let is_sole = view.candidates.len() == 1;
        let owns_lease = view.lease(NETWORK_NODE_LEASE).is_some_and(|lease| lease.owner == self.owner.id);
        if is_sole && owns_lease && self.owned == Some(Ownership::Sole) && self.is_announced {
            // The lease does not expire, so it is not renewed.
            let opened = self.node.set_router_gate(RouterGate::Open).await;
            self.report_gate(opened);
            return Ok(times.length / 4);
        }
        let is_able = is_able(own) && has_correct_clock(app) && !self.is_leaving(&view);
        if self.owned.is_some() && !is_sole && !is_able && view.has_other_able(self.id()) {
            self.hand_over(app).await?;
            return Ok(times.poll);
        }
        self.acquire(app, times, is_sole, view.unrenewed).await
    }

    /// Returns whether this node should try to acquire the lease. If another node owns it, closes the gate.
    async fn may_acquire(
        &mut self,
        app: &App,
        times: LeaseTimes,
        view: &RoleView,
        own: &NetworkCandidate,
    ) -> Result<bool> {
        match view.lease(NETWORK_NODE_LEASE) {
            Some(lease) if lease.owner == self.owner.id => return Ok(true),
            Some(lease) => {
                self.vacant_since = None;
                self.close().await?;
                release_lease_of_deleted_node(app, times, lease).await?;
                if view.lease(HANDOVER_LEASE).is_some() && is_able(own) && view.is_prepared(self.id())? {
                    leases::acquire(&app.store, SUCCESSOR_LEASE, &self.owner, HANDOVER_SECONDS).await?;
                }
                return Ok(false);
            }
            None => {}
        }
        let vacant_since = *self.vacant_since.get_or_insert_with(Instant::now);
        let is_first = view.is_prepared(self.id())? || vacant_since.elapsed() >= UNPREPARED_DELAY;
        let is_alone = !view.has_other_able(self.id());
        let may_retry = self.retry_at.is_none_or(|time| Instant::now() >= time);
        let is_able = is_able(own) && has_correct_clock(app) && !self.is_leaving(view);
        Ok((is_able && is_first && may_retry) || is_alone)
    }

    /// Returns whether the node is asked to hand the role over.
    fn is_leaving(&self, view: &RoleView) -> bool {
        view.lease(LEAVE_LEASE).is_some_and(|lease| lease.owner == self.owner.id)
    }

    /// Acquires or renews the lease and opens the gate. The version `unrenewed` of the lease may be taken over.
    async fn acquire(
        &mut self,
        app: &App,
        times: LeaseTimes,
        is_sole: bool,
        unrenewed: Option<i64>,
    ) -> Result<Duration> {
        let started = Instant::now();
        if !is_sole && self.owned == Some(Ownership::Sole) {
            // The gate must be about to close by itself before the lease can expire.
            self.node.set_router_gate(times.gate_from(started)).await?;
        }
        let Some(renewed_at) = within(times, self.acquire_lease(app, times, is_sole, unrenewed)).await?
        else {
            if self.owned.is_some() {
                self.lose(app, "another node acquired the lease").await;
            }
            return Ok(times.poll);
        };
        let (gate, ownership) = if is_sole {
            (RouterGate::Open, Ownership::Sole)
        } else {
            (times.gate_from(renewed_at), Ownership::Until(renewed_at + times.gate))
        };
        self.is_closed = false;
        let opened = self.node.set_router_gate(gate).await;
        // The only candidate keeps the role: no other node can do better.
        if !self.report_gate(opened) && !is_sole {
            self.open_failures += 1;
            if self.open_failures < MAX_OPEN_FAILURES {
                return Ok(times.poll);
            }
            self.retry_at = Some(Instant::now() + FAILURE_BACKOFF);
            self.open_failures = 0;
            self.lose(app, "the node failed to open the gate of its routers").await;
            leases::release(&app.store, NETWORK_NODE_LEASE, &self.owner).await?;
            return Ok(times.poll);
        }
        self.open_failures = 0;
        if self.owned.replace(ownership).is_none() {
            self.changed_at = Instant::now();
            self.retry_at = None;
            self.vacant_since = None;
            self.is_announced = false;
            tracing::info!(node = %self.owner.node, "this node is the active network node");
            self.record(app, "node became the active network node", None);
            app.networks.notify_changed();
            leases::release(&app.store, SUCCESSOR_LEASE, &self.owner).await?;
        }
        if !self.is_announced {
            within(times, announce_move(app, &self.owner.node)).await?;
            self.is_announced = true;
        }
        Ok(times.length / 4)
    }

    /// Acquires or renews the lease. Returns the time from which its duration counts, or `None` if another node owns it.
    async fn acquire_lease(
        &self,
        app: &App,
        times: LeaseTimes,
        is_sole: bool,
        unrenewed: Option<i64>,
    ) -> Result<Option<Instant>> {
        let (store, owner) = (&app.store, &self.owner);
        if is_sole {
            app.leases.forget(NETWORK_NODE_LEASE, owner);
            let acquired =
                leases::acquire_unrenewed(store, NETWORK_NODE_LEASE, owner, SOLE_LEASE, unrenewed).await?;
            return Ok(acquired.then(Instant::now));
        }
        let (seconds, max_age) = (times.length.as_secs_f64(), times.length / 8);
        app.leases.acquire(store, NETWORK_NODE_LEASE, owner, seconds, max_age, unrenewed).await
    }

    /// Releases the lease and closes the gate of a node that is not a candidate.
    async fn withdraw(&mut self, app: &App, view: &RoleView) -> Result<()> {
        if self.owned.is_some() {
            self.lose(app, "the node is not a candidate").await;
        }
        self.close().await?;
        if view.lease(NETWORK_NODE_LEASE).is_some_and(|lease| lease.owner == self.owner.id) {
            leases::release(&app.store, NETWORK_NODE_LEASE, &self.owner).await?;
        }
        Ok(())
    }

    /// Lets another candidate take over, if there is one: waits until it is about to, then closes the gate and releases
    /// the lease. The only candidate keeps both.
    async fn hand_over(&mut self, app: &App) -> Result<()> {
        let times = LeaseTimes::new(&app.settings);
        let Some(Ownership::Until(_)) = self.owned else { return Ok(()) };
        app.node_cache.clear();
        if within(times, self.read(app, times)).await?.has_other_able(self.id()) {
            // The gate must stay open until the successor is ready.
            self.acquire(app, times, false, None).await?;
            let Some(Ownership::Until(close_at)) = self.owned else { return Ok(()) };
            leases::acquire(&app.store, HANDOVER_LEASE, &self.owner, HANDOVER_SECONDS).await?;
            let deadline = close_at.min(Instant::now() + HANDOVER_TIMEOUT);
            while Instant::now() < deadline {
                let successor = leases::owner_id(&app.store, SUCCESSOR_LEASE).await?;
                if successor.is_some_and(|id| id != self.owner.id) {
                    break;
                }
                tokio::time::sleep(HANDOVER_POLL).await;
            }
        }
        self.lose(app, "the node handed its role over").await;
        leases::release(&app.store, NETWORK_NODE_LEASE, &self.owner).await?;
        leases::release(&app.store, HANDOVER_LEASE, &self.owner).await
    }

    /// Closes the gate of a node that no longer owns the lease. If that fails, waits until it has closed by itself, because the
    /// lease is released next.
    async fn lose(&mut self, app: &App, reason: &str) {
        app.leases.forget(NETWORK_NODE_LEASE, &self.owner);
        let owned = self.owned.take();
        self.changed_at = Instant::now();
        self.is_closed = false;
        if let Err(error) = self.close().await {
            tracing::warn!(node = %self.owner.node, %error, "failed to close the gate of the routers");
            if let Some(Ownership::Until(close_at)) = owned {
                tokio::time::sleep_until(close_at.into()).await;
            }
        }
        tracing::info!(node = %self.owner.node, reason, "this node lost the role of the active network node");
        self.record(app, "node lost the role of the active network node", Some(reason));
    }

    /// Logs why the gate was not opened, if the reason is new. Returns whether it was opened.
    fn report_gate(&mut self, opened: Result<()>) -> bool {
        let problem = opened.err().map(|error| error.to_string());
        if problem != self.gate_problem {
            match &problem {
                Some(problem) => {
                    tracing::warn!(node = %self.owner.node, problem, "failed to open the gate of the routers");
                }
                None => tracing::info!(node = %self.owner.node, "the gate of the routers is open again"),
            }
            self.gate_problem = problem;
        }
        self.gate_problem.is_none()
    }

    async fn close(&mut self) -> Result<()> {
        if !self.is_closed {
            self.node.set_router_gate(RouterGate::Closed).await?;
            self.is_closed = true;
        }
        Ok(())
    }

    fn record(&self, app: &App, message: &str, reason: Option<&str>) {
        let event = Event::new(EventType::Status, ObjectRef::new(ObjectType::Node, self.id()), message);
        app.events.record(match reason {
            Some(reason) => event.with("reason", reason),
            None => event,
        });
    }
}

/// Records on every network that its gateway has moved to `node`, unless that was the last active network node.
async fn announce_move(app: &App, node: &str) -> Result<()> {
    let last = cluster_values::get(&*app.store, LAST_OWNER).await?;
    if last.as_deref() == Some(node) {
        return Ok(());
    }
    if let Some(last) = last {
        for network in networks::wanted(&*app.store).await? {
            let object = ObjectRef::new(ObjectType::Network, network.id);
            let event = Event::new(EventType::Status, object, "gateway moved to another node");
            app.events.record(event.with("from", last.clone()).with("to", node));
        }
    }
    transaction!(app.store, |tx| { Ok(cluster_values::set(tx, LAST_OWNER, node).await?) })
}

/// Returns whether the clock of this host allows leases. The only able candidate has the role in any case, because nothing
/// else would forward packets.
fn has_correct_clock(app: &App) -> bool {
    app.store.membership.require_clock().is_ok()
}

/// Releases a lease that does not expire and whose owner was deleted from the cluster. Its daemon closes the gate when its
/// check-in is rejected, so the owner must have been silent for as long as an expiring lease would have lasted.
async fn release_lease_of_deleted_node(app: &App, times: LeaseTimes, lease: &Lease) -> Result<()> {
    let length = times.length.as_secs_f64();
    if !lease.is_unlimited(app.store.membership.database_time()) {
        return Ok(());
    }
    let id = lease.owner_node()?;
    let silent = nodes::silent(&*app.store, &[NodeState::Deleted], length).await?;
    let is_gone = nodes::state(&*app.store, id).await?.is_none();
    if is_gone || silent.iter().any(|(row, _)| row.identity.id == id) {
        let owner = LeaseOwner { id: lease.owner.clone(), ..LeaseOwner::new(&lease.node) };
        leases::release(&app.store, NETWORK_NODE_LEASE, &owner).await?;
    }
    Ok(())
}

/// Limits the time of a call to the database, so that it can be repeated before the lease expires.
async fn within<T>(times: LeaseTimes, call: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(times.length / 3, call).await {
        Ok(outcome) => outcome,
        Err(_) => Err(Error::Unavailable("the database did not respond in time".into())),
    }
}
