//! Rebalances the cluster: plans which instances move from full nodes to empty ones, and migrates them.
//! `operations/rebalance_cluster.rs` runs [`migrate_instances`] until all have moved. See docs/decisions/0075.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use muster_store::instance_migrations::{self, MigrationRow};
use muster_store::instances::{self, InstanceRow};
use muster_store::nodes::NodeRow;
use muster_store::operations::{self, OperationRow};
use muster_store::{metadata, namespaces, nodes, transaction};
use muster_types::capacity::Capacity;
use muster_types::event::{Event, EventType};
use muster_types::ids::{InstanceId, NodeId};
use muster_types::migration::{MigrationMode, MigrationSettings};
use muster_types::namespace::{NamespaceState, SYSTEM_NAMESPACE};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::operation::OperationHandle;
use muster_types::rebalance::{MoveRecord, NodeShareRecord, PlannedMove, RebalanceRecord};
use muster_types::spec::parse_tags;
use muster_types::time::now;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::audit::with_caller;
use crate::objects::instance::migrate;
use crate::objects::instance::migration_batch::{self, MigrationBatch, failure};
use crate::objects::instance::placement;
use crate::queue::{NewOperation, Operation as _, RebalanceCluster};
use crate::scheduler::{
    self, BalancedInstance, BalancedNode, MAX_SPREAD, RebalanceStep, Rebalancer, SchedulerPolicy,
};

/// The number of instances that move if the request does not limit it.
pub const DEFAULT_MAX_MOVES: u64 = 10;
/// The maximum number of instances that one request moves.
const MAX_MOVES: u64 = 100;
/// The number of plans with other moves after which a plan ends before the first move that is refused.
const MAX_PLANS: usize = 20;
/// The number of instances whose metadata one statement reads.
const METADATA_PAGE: usize = 500;

/// Returns the object that a rebalancing concerns: the namespace of the cluster itself.
fn object() -> ObjectRef {
    ObjectRef::namespace(SYSTEM_NAMESPACE)
}

/// Migrates instances from full nodes to empty ones, or with `dry_run` only plans it.
pub async fn start(app: &App, caller: &Caller, dry_run: bool, max_moves: u64) -> Result<RebalanceRecord> {
    if !(1..=MAX_MOVES).contains(&max_moves) {
        return Err(Error::Invalid(format!("max_moves: {max_moves} is not between 1 and {MAX_MOVES}")));
    }
    let (moves, mut record) = plan(app, max_moves).await?;
    if dry_run || moves.is_empty() {
        return Ok(record);
    }
    record.operation = Some(enqueue(app, caller, moves).await?);
    let event = Event::audit(object(), "rebalance request from REST API");
    app.record(caller, with_caller(caller, describe(event, &record)));
    Ok(record)
}

/// Rebalances the cluster, unless it is being rebalanced or `REBALANCE_INTERVAL` is not set.
pub async fn run_periodically(app: &App) -> Result<()> {
    if app.settings.rebalance_interval == 0
        || operations::is_pending(&*app.store, &object(), RebalanceCluster::KIND.name).await?
    {
        return Ok(());
    }
    let (moves, record) = plan(app, DEFAULT_MAX_MOVES).await?;
    if moves.is_empty() {
        return Ok(());
    }
    let caller = Caller::daemon("rebalance");
    enqueue(app, &caller, moves).await?;
    let event = Event::new(EventType::Status, object(), "periodic rebalancing of the cluster");
    app.record(&caller, describe(event, &record));
    Ok(())
}

fn describe(event: Event, record: &RebalanceRecord) -> Event {
    let moves = record.moves.len();
    event.with("moves", moves).with("spread", record.spread).with("spread_after", record.spread_after)
}

/// Queues the operation that moves instances, unless another one is unfinished.
async fn enqueue(app: &App, caller: &Caller, moves: Vec<PlannedMove>) -> Result<OperationHandle> {
    let handle = transaction!(app.store, |tx| {
        // Of two concurrent requests, the second one finds the operation of the first.
        namespaces::lock(tx, SYSTEM_NAMESPACE, NamespaceState::Created).await?;
        if operations::is_pending(&mut *tx, &object(), RebalanceCluster::KIND.name).await? {
            let text = "the cluster is being rebalanced: wait for the operation that `muster operation list \
                        --target-type namespace --target system` shows";
            return Err(Error::Conflict(text.into()).into());
        }
        let new = NewOperation {
            request_id: Some(caller.request_id.clone()),
            ..NewOperation::new(object(), None, RebalanceCluster { moves: moves.clone() })
        };
        Ok(new.enqueue(tx).await?)
    })?;
    app.queue.wake();
    Ok(handle)
}

/// The nodes that can take instances. Migrations in progress count as complete.
struct ClusterBalance {
    nodes: Vec<BalancedNode>,
    rows: HashMap<InstanceId, InstanceRow>,
    node_rows: HashMap<NodeId, NodeRow>,
}

impl ClusterBalance {
    /// Reads the nodes, or with `only` those of one move.
    async fn read(app: &App, only: Option<&PlannedMove>) -> Result<Self> {
        let policy = SchedulerPolicy::from(&app.settings);
        let capacity = app.placement.get(&app.store, Duration::ZERO).await?;
        let is_wanted =
            |id: NodeId| only.is_none_or(|planned| [planned.source, planned.target].contains(&id));
        let nodes = capacity
            .iter()
            .filter(|(facts, _)| is_wanted(facts.id) && scheduler::is_balanceable(facts, &policy))
            .map(|(facts, committed)| BalancedNode {
                facts: Arc::clone(facts),
                committed: *committed,
                instances: Vec::new(),
            });
        let node_rows = nodes::list(&*app.store).await?.into_iter().map(|row| (row.identity.id, row));
        let mut balance =
            Self { nodes: nodes.collect(), rows: HashMap::new(), node_rows: node_rows.collect() };
        let migrations = instance_migrations::list(&*app.store).await?;
        balance.read_instances(app, &migrations).await?;
        Ok(balance)
    }

    async fn read_instances(&mut self, app: &App, migrations: &[MigrationRow]) -> Result<()> {
        let ids: Vec<NodeId> = self.nodes.iter().map(|node| node.facts.id).collect();
        let mut rows = Vec::new();
        for id in &ids {
            rows.extend(instances::of_node(&*app.store, *id).await?);
        }
        for migration in migrations.iter().filter(|migration| ids.contains(&migration.target)) {
            if !ids.contains(&migration.source) {
                rows.extend(instances::get(&*app.store, migration.instance).await?);
            }
        }
        for page in rows.chunks(METADATA_PAGE) {
            let names: Vec<String> = page.iter().map(|row| row.id.to_string()).collect();
            let mut metadata = metadata::of_objects(&*app.store, ObjectType::Instance, &names).await?;
            for (row, name) in page.iter().zip(names) {
                let metadata = metadata.remove(&name).unwrap_or_default();
                let migration = migrations.iter().find(|migration| migration.instance == row.id);
                self.add(row, migration, &metadata);
            }
        }
        self.rows = rows.into_iter().map(|row| (row.id, row)).collect();
        Ok(())
    }

    /// Adds an instance to its node or, if it is being migrated, to the target, whose ledger has it already.
    fn add(
        &mut self,
        row: &InstanceRow,
        migration: Option<&MigrationRow>,
        metadata: &serde_json::Map<String, serde_json::Value>,
    ) {
        let request = placement::request_of(row, metadata);
        let instance = BalancedInstance {
            id: row.id,
            namespace: row.namespace.clone(),
            tags: metadata.get("tags").and_then(|tags| parse_tags(tags).ok()).unwrap_or_default(),
            is_movable: migration.is_none() && request.is_ok() && migrate::is_live_migratable(row),
            request: request.unwrap_or_default(),
        };
        if let Some(migration) = migration
            && let Some(source) = self.node_mut(migration.source)
        {
            let Capacity { cpus, memory_mb, disk_gb } = row.committed;
            source.committed = scheduler::release_capacity(&source.committed, cpus, memory_mb, disk_gb);
        }
        let place = migration.map(|migration| migration.target).or(row.node);
        if let Some(node) = place.and_then(|id| self.node_mut(id)) {
            node.instances.push(instance);
        }
    }

    fn node_mut(&mut self, id: NodeId) -> Option<&mut BalancedNode> {
        self.nodes.iter_mut().find(|node| node.facts.id == id)
    }

    /// Returns whether VMs can be migrated between the nodes of a move while they run.
    fn is_compatible(&self, planned: &PlannedMove) -> bool {
        let rows = (self.node_rows.get(&planned.source), self.node_rows.get(&planned.target));
        let (Some(source), Some(target)) = rows else { return false };
        migrate::check_target(source, target, MigrationMode::Live).is_ok()
    }

    /// Returns the record of a plan that leads to `after`.
    fn record(
        &self,
        rebalancer: &Rebalancer<'_>,
        steps: &[RebalanceStep],
        after: &[BalancedNode],
        refused: &[RefusedMove],
    ) -> RebalanceRecord {
        let shares = |nodes: &[BalancedNode]| -> Vec<f64> {
            nodes.iter().map(|node| rebalancer.share(node)).collect()
        };
        let (before, after) = (shares(&self.nodes), shares(after));
        let (spread, spread_after) = (scheduler::spread(&before), scheduler::spread(&after));
        let each = self.nodes.iter().zip(before).zip(after);
        let mut nodes: Vec<NodeShareRecord> = each
            .map(|((node, share), share_after)| NodeShareRecord {
                name: node.facts.name.clone(),
                share,
                share_after,
            })
            .collect();
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        let moves = steps.iter().filter_map(|step| self.move_record(step)).collect();
        let reason = steps.is_empty().then(|| self.idle_reason(spread, refused));
        RebalanceRecord { spread, spread_after, nodes, moves, reason, operation: None }
    }

    fn move_record(&self, step: &RebalanceStep) -> Option<MoveRecord> {
        let name = |id: NodeId| self.node_rows.get(&id).map(|row| row.identity.name.clone());
        let row = self.rows.get(&step.planned.instance)?;
        let (source, target) = (name(step.planned.source)?, name(step.planned.target)?);
        let (full, empty) = (percent(step.source_share), percent(step.target_share));
        Some(MoveRecord {
            instance_uuid: row.id,
            name: row.name.clone(),
            namespace: row.namespace.clone(),
            reason: format!("{full} of {source} are committed, and {empty} of {target}"),
            source,
            target,
        })
    }

    /// Returns why no instance moves.
    fn idle_reason(&self, spread: f64, refused: &[RefusedMove]) -> String {
        if self.nodes.len() < 2 {
            return "fewer than two nodes can take instances".into();
        }
        let (found, accepted) = (percent(spread), percent(MAX_SPREAD));
        if spread <= MAX_SPREAD {
            return format!(
                "the nodes are balanced: their shares differ by {found}, up to {accepted} is accepted"
            );
        }
        let text =
            format!("the shares of the nodes differ by {found}, but no move of an instance improves that");
        match refused.first() {
            Some(RefusedMove { planned, reason, .. }) => {
                let name = self.rows.get(&planned.instance).map_or("", |row| row.name.as_str());
                format!("{text}; instance {name} cannot move: {reason}")
            }
            None => text,
        }
    }
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// A move that is not possible.
struct RefusedMove {
    planned: PlannedMove,
    /// Whether the instance cannot move to any node.
    to_any_node: bool,
    reason: String,
}

impl RefusedMove {
    fn covers(&self, planned: &PlannedMove) -> bool {
        self.planned == *planned || (self.to_any_node && self.planned.instance == planned.instance)
    }
}

/// Plans moves until the nodes are balanced, each of which is possible after the earlier ones.
async fn plan(app: &App, max_moves: u64) -> Result<(Vec<PlannedMove>, RebalanceRecord)> {
    let balance = ClusterBalance::read(app, None).await?;
    let policy = SchedulerPolicy::from(&app.settings);
    let mut max_moves = usize::try_from(max_moves).unwrap_or(usize::MAX);
    let mut refused: Vec<RefusedMove> = Vec::new();
    for attempt in 1.. {
        let is_allowed = |planned: &PlannedMove| {
            balance.is_compatible(planned) && !refused.iter().any(|refused| refused.covers(planned))
        };
        let rebalancer = Rebalancer { policy: &policy, now: now(), is_allowed: &is_allowed };
        let mut nodes = balance.nodes.clone();
        let steps = rebalancer.plan(&mut nodes, max_moves);
        let moves: Vec<PlannedMove> = steps.iter().map(|step| step.planned).collect();
        let found = find_refused(app, &balance, &moves).await?;
        if found.is_empty() {
            return Ok((moves, balance.record(&rebalancer, &steps, &nodes, &refused)));
        }
        if attempt >= MAX_PLANS {
            // The moves before it are possible.
            let is_refused = |planned: &PlannedMove| found.iter().any(|refused| refused.planned == *planned);
            max_moves = moves.iter().position(is_refused).unwrap_or(0);
        }
        refused.extend(found);
    }
    Err(Error::Internal("planning ended without a plan".into()))
}

/// Returns the moves that are not possible, by their real allocation, rolled back.
async fn find_refused(
    app: &App,
    balance: &ClusterBalance,
    moves: &[PlannedMove],
) -> Result<Vec<RefusedMove>> {
    let (mut plans, mut refused) = (Vec::new(), Vec::new());
    for planned in moves {
        let rows = (balance.rows.get(&planned.instance), balance.node_rows.get(&planned.target));
        let (Some(row), Some(target)) = rows else { continue };
        let plan = match migrate::require_idle(app, row.id).await {
            Ok(()) => migrate::plan(app, row, Some(target), false).await,
            Err(error) => Err(error),
        };
        match plan {
            Ok(plan) => plans.push((planned, row, plan)),
            Err(error) if is_refusal(&error) => refused.push(RefusedMove {
                planned: *planned,
                to_any_node: matches!(error, Error::NotReady(_)),
                reason: error.to_string(),
            }),
            Err(error) => return Err(error),
        }
    }
    let forecasts: Vec<_> = plans.iter().map(|(_, row, plan)| (*row, plan)).collect();
    let forecasts = migration_batch::forecast(app, &forecasts).await?;
    for ((planned, ..), forecast) in plans.iter().zip(forecasts) {
        if let Err(nodes) = forecast {
            let reason = nodes.into_iter().next().map(|(_, reason)| reason).unwrap_or_default();
            refused.push(RefusedMove { planned: **planned, to_any_node: false, reason });
        }
    }
    Ok(refused)
}

/// Returns whether an error says that an instance cannot move, and not that this could not be determined.
fn is_refusal(error: &Error) -> bool {
    matches!(
        error,
        Error::Conflict(_) | Error::NotReady(_) | Error::NotFound(_) | Error::Unschedulable { .. }
    )
}

/// Starts the migrations of a rebalancing. Returns [`Error::NotReady`] until all have ended, or an error if instances stay that
/// could not be migrated.
pub(crate) async fn migrate_instances(app: &App, operation: &OperationRow) -> Result<()> {
    let RebalanceCluster { moves } = RebalanceCluster::parameters(operation)?;
    let migrations = instance_migrations::list(&*app.store).await?;
    // Those of drains and of other requests count as well: rebalancing is not urgent.
    let mut batch = MigrationBatch::new(migrations.len());
    for planned in &moves {
        if migrations.iter().any(|migration| migration.instance == planned.instance) {
            batch.wait();
            continue;
        }
        let row = instances::get(&*app.store, planned.instance).await?;
        // It has moved, or was deleted.
        let Some(row) = row.filter(|row| row.node == Some(planned.source)) else { continue };
        match migration_batch::failed_since(app, row.id, operation.created).await?.first() {
            Some(last) => batch.block(&row, failure(last)),
            None => batch.start(&row, migrate_instance(app, &row, planned)).await,
        }
    }
    batch.finish()
}

/// Starts the migration of an instance, unless that would not improve the balance any longer.
async fn migrate_instance(app: &App, row: &InstanceRow, planned: &PlannedMove) -> Result<bool> {
    let balance = ClusterBalance::read(app, Some(planned)).await?;
    let policy = SchedulerPolicy::from(&app.settings);
    let is_allowed = |planned: &PlannedMove| balance.is_compatible(planned);
    let rebalancer = Rebalancer { policy: &policy, now: now(), is_allowed: &is_allowed };
    let Some(target) = balance.node_rows.get(&planned.target) else { return Ok(false) };
    if !rebalancer.is_useful(&balance.nodes, planned) {
        return Ok(false);
    }
    let begun = async {
        let plan = migrate::plan(app, row, Some(target), false).await?;
        migrate::require_idle(app, row.id).await?;
        let caller = Caller::daemon("rebalance");
        migrate::begin(app, &caller, row, &plan, MigrationSettings::default(), None).await
    };
    match begun.await {
        Ok(_) => Ok(true),
        // Another operation of the instance may take long, and the next rebalancing finds it.
        Err(error) if is_refusal(&error) => Err(Error::Conflict(error.to_string())),
        Err(error) => Err(error),
    }
}
