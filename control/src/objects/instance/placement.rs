//! Places instances: queries the scheduler, and allocates capacity from the ledger of a candidate. See
//! docs/decisions/0019.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::ids::{InstanceId, NodeId, StorageId};
use muster_types::node::NodeState;
use muster_types::object::ObjectType;
use muster_types::quota::QuotaName;
use muster_types::scheduling::SchedulingStage;
use muster_types::spec::parse_affinity;
use muster_types::time::now;
use muster_types::{Error, Result};
use serde_json::json;

use super::object;
use crate::app::App;
use crate::auth::Caller;
use crate::objects::claim;
use crate::objects::quota;
use crate::scheduler::{
    self, NodeFacts, PlacementOutcome, PlacementRefusal, PlacementRequest, SchedulerPolicy, StorageRequest,
};
use crate::state::NodeCapacity;
use muster_store::instances::InstanceRow;
use muster_store::node_ledgers::LockedLedger;
use muster_store::{StoreError, Tx, TxError, instances, metadata, node_ledgers};
use muster_types::capacity::{Capacity, CommittedCapacity};

/// The maximum number of candidates whose ledgers one attempt tries.
const MAX_CANDIDATES: usize = 32;

/// The nodes that the scheduler proposes, with the facts that it used.
#[derive(Debug)]
pub(crate) struct Candidates {
    outcome: PlacementOutcome,
    nodes: Arc<NodeCapacity>,
}

/// Returns what an instance needs that is placed again. The node that its creation requested is not required: it is lost. One
/// whose disks come from a replica needs the node of the replica.
pub(crate) async fn request_again(app: &App, row: &InstanceRow) -> Result<PlacementRequest> {
    request_of(row, &metadata::get(&*app.store, ObjectType::Instance, &row.id.to_string()).await?)
}

/// Returns what an instance with this metadata needs, on any node.
pub(crate) fn request_of(
    row: &InstanceRow,
    metadata: &serde_json::Map<String, serde_json::Value>,
) -> Result<PlacementRequest> {
    let affinity = metadata.get("affinity").map(parse_affinity).transpose()?;
    Ok(PlacementRequest {
        cpus: row.spec.cpus,
        memory_mb: row.spec.memory,
        disk_gb: row.committed.disk_gb,
        required_node: row.spec.restore_from,
        affinity: affinity.map(|(affinity, _)| affinity).unwrap_or_default(),
        storage: match row.spec.storage_uuid {
            Some(storage) => StorageRequest::Shared(storage),
            None if row.spec.restore_from.is_some() => StorageRequest::Replica,
            None => StorageRequest::Local,
        },
    })
}

/// Queries the scheduler. A refusal is only final with facts that are not cached.
pub(crate) async fn find(app: &App, namespace: &str, request: &PlacementRequest) -> Result<Candidates> {
    let candidates = query_scheduler(app, namespace, request, false).await?;
    if candidates.outcome.result.is_ok() {
        Ok(candidates)
    } else {
        query_scheduler(app, namespace, request, true).await
    }
}

/// Queries the scheduler with facts that are not cached.
pub(crate) async fn find_uncached(
    app: &App,
    namespace: &str,
    request: &PlacementRequest,
) -> Result<Candidates> {
    query_scheduler(app, namespace, request, true).await
}

async fn query_scheduler(
    app: &App,
    namespace: &str,
    request: &PlacementRequest,
    fresh: bool,
) -> Result<Candidates> {
    let max_age = if fresh { 0 } else { app.settings.scheduler_cache_timeout };
    let nodes = app.placement.get(&app.store, Duration::from_secs(max_age)).await?;
    let mut tags_by_node: HashMap<NodeId, Vec<Vec<String>>> = HashMap::new();
    if request.affinity != muster_types::spec::Affinity::default() {
        for (node, tags) in instances::tags(&*app.store, namespace).await? {
            let tags = muster_types::spec::parse_tags(&tags).unwrap_or_default();
            tags_by_node.entry(node).or_default().push(tags);
        }
    }
    let policy = SchedulerPolicy::from(&app.settings);
    let outcome = scheduler::candidates(request, &nodes, &tags_by_node, &policy, &mut random_fraction);
    Ok(Candidates { outcome, nodes })
}

/// Returns a random number in [0, 1).
#[expect(clippy::cast_precision_loss, reason = "any number will do")]
fn random_fraction() -> f64 {
    let bits = uuid::Uuid::new_v4().as_u128() & u128::from(u32::MAX);
    bits as f64 / (f64::from(u32::MAX) + 1.0)
}

impl Candidates {
    /// Returns the candidates, best first, or why there are none.
    pub(crate) fn nodes(&self) -> Result<&[NodeId]> {
        let result = self.outcome.result.as_ref();
        result.map(Vec::as_slice).map_err(|refusal| refusal.clone().into())
    }

    /// Removes candidates that are not acceptable for another reason.
    pub(crate) fn retain(&mut self, mut is_acceptable: impl FnMut(NodeId) -> bool) {
        let Ok(nodes) = &mut self.outcome.result else { return };
        let count = nodes.len();
        nodes.retain(|node| is_acceptable(*node));
        if nodes.is_empty() {
            self.outcome.result = Err(PlacementRefusal::no_capacity(count));
        }
    }

    /// Returns why a stage dropped a node.
    pub(crate) fn dropped(&self, node: &str) -> Option<&str> {
        let mut dropped = self.outcome.stages.iter().flat_map(|report| &report.dropped);
        dropped.find(|(name, _)| name == node).map(|(_, reason)| reason.as_str())
    }

    fn refused_everywhere(&self, reason: &str) -> RefusedNodes {
        let all = self.outcome.result.iter().flatten().take(MAX_CANDIDATES);
        all.filter_map(|node| Some((self.facts(*node)?.name.clone(), reason.to_owned()))).collect()
    }

    fn facts(&self, node: NodeId) -> Option<&NodeFacts> {
        self.nodes.iter().find(|(facts, _)| facts.id == node).map(|(facts, _)| &**facts)
    }
}

/// The capacity that was allocated to an instance.
#[derive(Debug, Clone)]
pub(crate) struct Allocation {
    pub(crate) node: NodeId,
    pub(crate) name: String,
    pub(crate) allocated: Capacity,
    /// The shared storage for the disks, unless they are on the node.
    pub(crate) shared_storage: Option<StorageId>,
    committed: CommittedCapacity,
    refused: RefusedNodes,
}

/// The names of nodes without capacity, with the reasons.
pub(crate) type RefusedNodes = Vec<(String, String)>;

/// Allocates capacity from the first candidate that has it, as part of the transaction that creates the instance. If
/// none has, returns their reasons.
pub(crate) async fn allocate_in(
    app: &App,
    tx: &mut Tx,
    namespace: &str,
    request: &PlacementRequest,
    candidates: &Candidates,
) -> Result<Result<Allocation, RefusedNodes>, TxError> {
    let policy = SchedulerPolicy::from(&app.settings);
    let mut refused = Vec::new();
    let nodes = candidates.nodes()?;
    let wanted = Capacity { cpus: request.cpus, memory_mb: request.memory_mb, disk_gb: request.disk_gb };
    // If only the expected load is in the way, a second pass ignores it.
    for include_demand in [true, false] {
        let mut only_demand_refused = false;
        for node in nodes.iter().take(MAX_CANDIDATES) {
            let Some(facts) = candidates.facts(*node) else { continue };
            // Deleting a node locks this ledger before it reads the instances of the node.
            let LockedLedger { committed: ledger, state, is_cordoned, silence } =
                node_ledgers::lock_with_state(tx, *node).await?;
            if state != Some(NodeState::Created) {
                let state = state.unwrap_or(NodeState::Deleted);
                refused.push((facts.name.clone(), format!("its state is {state}")));
                continue;
            }
            if is_cordoned {
                refused.push((facts.name.clone(), "it is being drained or in maintenance".into()));
                continue;
            }
            if silence > policy.max_silence {
                refused.push((facts.name.clone(), format!("its last check-in was {silence:.0} seconds ago")));
                continue;
            }
            match scheduler::commit_capacity(request, facts, &ledger, &policy, now(), include_demand) {
                Ok(committed) => {
                    // Locks claims after the ledger, because creating a claim locks all ledgers first.
                    match claim::charge_in(app, tx, namespace, &wanted, &candidates.nodes).await? {
                        Ok(()) => {}
                        // The refusal applies to every node.
                        Err(reason) => return Ok(Err(candidates.refused_everywhere(&reason))),
                    }
                    node_ledgers::set(tx, *node, &committed).await?;
                    let name = facts.name.clone();
                    // The first pass may have refused the node because of its expected load.
                    refused.retain(|(node, _)| *node != name);
                    let shared_storage = match request.storage {
                        StorageRequest::Local | StorageRequest::Replica => None,
                        StorageRequest::AnyShared => {
                            facts.shared_storage.as_ref().and_then(|storage| storage.uuid)
                        }
                        StorageRequest::Shared(storage) => Some(storage),
                    };
                    let node = *node;
                    let allocation =
                        Allocation { node, name, allocated: wanted, shared_storage, committed, refused };
                    return Ok(Ok(allocation));
                }
                Err(denied) => {
                    only_demand_refused |= denied.only_demand;
                    refused.push((facts.name.clone(), denied.reason));
                }
            }
        }
        if !only_demand_refused {
            break;
        }
    }
    Ok(Err(refused))
}

/// Reserves disk space of the first candidate that has it, as part of a transaction. Returns `None` if none has.
pub(crate) async fn reserve_disk_in(
    app: &App,
    tx: &mut Tx,
    request: &PlacementRequest,
    candidates: &Candidates,
) -> Result<Option<(NodeId, CommittedCapacity)>, TxError> {
    let policy = SchedulerPolicy::from(&app.settings);
    for node in candidates.nodes()?.iter().take(MAX_CANDIDATES) {
        let Some(facts) = candidates.facts(*node) else { continue };
        let locked = node_ledgers::lock_with_state(tx, *node).await?;
        if locked.state != Some(NodeState::Created)
            || locked.is_cordoned
            || locked.silence > policy.max_silence
        {
            continue;
        }
        if let Ok(committed) = scheduler::commit_disk(request, facts, &locked.committed, &policy) {
            node_ledgers::set(tx, *node, &committed).await?;
            return Ok(Some((*node, committed)));
        }
    }
    Ok(None)
}

/// Commits the disk space that an instance needs more than was known when it was placed, as part of a transaction that has
/// locked the instance: to the ledger of its node, and to the claim and the quota of its namespace. Pass the result to
/// [`PlacementCache::update`](crate::state::PlacementCache::update) afterwards.
pub(crate) async fn add_disk_in(
    app: &App,
    tx: &mut Tx,
    row: &InstanceRow,
    disk_gb: i64,
    nodes: &NodeCapacity,
) -> Result<Option<(NodeId, CommittedCapacity)>, TxError> {
    let added = disk_gb.saturating_sub(row.committed.disk_gb);
    let (Some(node), true) = (row.node, added > 0) else { return Ok(None) };
    let Some((facts, _)) = nodes.iter().find(|(facts, _)| facts.id == node) else {
        return Err(Error::Unavailable("the node of the instance is not up".into()).into());
    };
    let admission = quota::Admission::begin(app, tx, &row.namespace, &[(QuotaName::DiskGb, added)]).await?;
    // A quota is reported rather than a lack of capacity.
    admission.reject_early(tx, &[QuotaName::DiskGb]).await?;
    let no_capacity = |reason: &str| {
        Error::InsufficientCapacity(format!(
            "the disks of the instance need {disk_gb} GB, which was not known before their images were fetched, and \
             {reason}. Set the size of each disk, so that a node with enough space is chosen",
        ))
    };
    let ledger = node_ledgers::lock(tx, node).await?;
    let request = PlacementRequest {
        disk_gb: added,
        storage: row.spec.storage_uuid.map_or(StorageRequest::Local, StorageRequest::Shared),
        ..PlacementRequest::default()
    };
    let policy = SchedulerPolicy::from(&app.settings);
    let committed = scheduler::commit_disk(&request, facts, &ledger, &policy)
        .map_err(|denied| no_capacity(&format!("node {}: {}", facts.name, denied.reason)))?;
    let wanted = Capacity { disk_gb: added, ..Capacity::default() };
    claim::charge_in(app, tx, &row.namespace, &wanted, nodes)
        .await?
        .map_err(|reason| no_capacity(&reason))?;
    node_ledgers::set(tx, node, &committed).await?;
    instances::set_committed_disk(tx, row.id, disk_gb).await?;
    admission.finish(tx).await?;
    Ok(Some((node, committed)))
}

/// Releases disk space of a node as part of a transaction, and returns its ledger.
pub(crate) async fn release_disk_in(
    tx: &mut Tx,
    node: NodeId,
    disk_gb: i64,
) -> Result<(NodeId, CommittedCapacity), StoreError> {
    let ledger = node_ledgers::lock(tx, node).await?;
    let committed = scheduler::release_capacity(&ledger, 0, 0, disk_gb);
    node_ledgers::set(tx, node, &committed).await?;
    Ok((node, committed))
}

/// Returns the error for a request that no candidate had capacity for.
pub(crate) fn no_capacity(refused: &RefusedNodes) -> Error {
    let nodes: BTreeSet<&str> = refused.iter().map(|(node, _)| node.as_str()).collect();
    PlacementRefusal::no_capacity(nodes.len()).into()
}

/// Updates the cached ledger after the allocation is committed.
pub(crate) fn update_cache(app: &App, allocation: &Allocation) {
    app.placement.update(allocation.node, allocation.committed);
}

/// Releases the capacity of an instance as part of a transaction. Pass the result to
/// [`PlacementCache::update`](crate::state::PlacementCache::update) afterwards.
pub(crate) async fn release_in(
    tx: &mut Tx,
    row: &InstanceRow,
) -> Result<Option<(NodeId, CommittedCapacity)>, StoreError> {
    let (Some(node), allocated) = (row.node, row.committed) else { return Ok(None) };
    if allocated == Capacity::default() {
        return Ok(None);
    }
    let ledger = node_ledgers::lock(tx, node).await?;
    // The ledger has no disks that are elsewhere.
    let disk_gb = if row.spec.storage_uuid.is_some() { 0 } else { allocated.disk_gb };
    let committed = scheduler::release_capacity(&ledger, allocated.cpus, allocated.memory_mb, disk_gb);
    node_ledgers::set(tx, node, &committed).await?;
    claim::refund_in(tx, &row.namespace, &allocated).await?;
    instances::clear_committed(tx, row.id).await?;
    Ok(Some((node, committed)))
}

/// Records how an instance was placed, or why it was not, stage by stage.
pub(crate) fn record_scheduling(
    app: &App,
    caller: &Caller,
    id: InstanceId,
    request: &PlacementRequest,
    candidates: &Candidates,
    allocation: Result<&Allocation, &RefusedNodes>,
) {
    app.metrics.placed(match (&candidates.outcome.result, allocation) {
        (Err(refusal), _) => Some(refusal.stage),
        (Ok(_), Err(_)) => Some(SchedulingStage::CapacityGuard),
        (Ok(_), Ok(_)) => None,
    });
    let event = |message: EventMessage| Event::new(EventType::Status, object(id), message);
    let names = |ids: &[NodeId]| -> Vec<String> {
        ids.iter().take(50).filter_map(|id| Some(candidates.facts(*id)?.name.clone())).collect()
    };
    app.record(caller, event(EventMessage::SchedulingStarted));
    app.record(
        caller,
        event(EventMessage::SchedulingInputs)
            .with("cpus", request.cpus)
            .with("memory", request.memory_mb)
            .with("disk_gb", request.disk_gb)
            .with("placed_on", request.required_node.map(|node| node.to_string()))
            .with("require_with_tag", request.affinity.require_with.clone())
            .with("require_without_tag", request.affinity.require_without.clone())
            .with("prefer_with_tag", request.affinity.prefer_with.clone())
            .with("prefer_without_tag", request.affinity.prefer_without.clone()),
    );
    app.record(
        caller,
        event(EventMessage::SchedulingInitialCandidates).with("candidates", candidates.nodes.len()),
    );
    for stage in &candidates.outcome.stages {
        let dropped: serde_json::Map<String, serde_json::Value> =
            stage.dropped.iter().map(|(node, reason)| (node.clone(), json!(reason))).collect();
        app.record(
            caller,
            event(EventMessage::SchedulingStage(stage.stage))
                .with("remaining", stage.kept)
                .with("dropped", dropped),
        );
    }
    match &candidates.outcome.result {
        Err(refusal) => {
            let message = EventMessage::SchedulingAborted(refusal.stage);
            let aborted = event(message).with("reason", refusal.text.clone());
            app.record(caller, aborted.with("transient", refusal.transient));
        }
        Ok(candidates) => {
            let mut last =
                event(EventMessage::SchedulingFinalCandidates).with("candidates", names(candidates));
            let (chosen, refused) = match allocation {
                Ok(allocation) => (Some(allocation.name.clone()), &allocation.refused),
                Err(refused) => (None, refused),
            };
            let refused: serde_json::Map<String, serde_json::Value> =
                refused.iter().map(|(node, reason)| (node.clone(), json!(reason))).collect();
            last = last.with("chosen", chosen.clone()).with("refused", refused);
            app.record(caller, last);
            if let Some(chosen) = chosen {
                let complete = Event::new(EventType::Status, object(id), "schedule complete");
                app.record(caller, complete.with("node", chosen));
            }
        }
    }
}
