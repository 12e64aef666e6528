//! Restarts the instances of a dead node on other nodes. An operator declares that the host is dead, because this cannot be
//! observed: a VM that still runs there would run twice. See docs/decisions/0052.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use muster_store::instance_replicas::{self, ReplicaRow};
use muster_store::instances::{self, InstanceRow, InstanceSpec};
use muster_store::nodes::NodeRow;
use muster_store::{
    StoreError, Tx, TxError, agent_operations, artifacts, blob_locations, blobs, interfaces, networks, nodes,
    operations, transaction,
};
use muster_types::blob::{BlobState, CopyState};
use muster_types::event::{Event, EventType};
use muster_types::ids::{BlobId, NodeId};
use muster_types::instance::{InstanceState, PowerState, RestartPolicy};
use muster_types::node::{EvacuationOutcome, EvacuationRecord, NodeState};
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::replica::ReplicaState;
use muster_types::spec::DiskType;
use muster_types::time::format_utc;
use muster_types::{Error, Result};

use super::create::reference_blobs_in;
use super::placement::{self, Allocation, Candidates};
use super::snapshot::{NVRAM, source_url};
use super::state::record_state_change;
use super::{agent, delete, fence, lost, object, operation_on, plan};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::network::state::PRESENT;
use crate::objects::{blob_copy, version};
use crate::queue::EvacuateInstance;
use crate::scheduler::PlacementRequest;

/// The content of the disks of an evacuated instance.
struct RestoredDisks {
    spec: InstanceSpec,
    source: String,
    /// The replica that becomes its disks.
    replica: Option<ReplicaRow>,
}

impl RestoredDisks {
    fn new(spec: InstanceSpec, source: &str) -> Self {
        Self { spec, source: source.to_owned(), replica: None }
    }
}

/// Why the disks of an instance cannot be restored.
struct MissingDisks {
    reason: String,
    /// Whether they may be available later.
    is_temporary: bool,
}

/// Evacuates a node that does not check in and that the caller declares to be dead. May be repeated.
pub async fn evacuate(
    app: &App,
    caller: &Caller,
    node: &NodeRow,
    dead: bool,
) -> Result<Vec<EvacuationRecord>> {
    require_dead(node, dead)?;
    let event =
        Event::audit(ObjectRef::new(ObjectType::Node, node.identity.id), "evacuation request from REST API");
    app.record(caller, event.with("dead", dead));
    let mut records = Vec::new();
    for row in instances::of_node(&*app.store, node.identity.id).await? {
        if row.state == InstanceState::Error {
            // It has no VM.
            continue;
        }
        let row = fence::with_unfenced(app, row, node);
        let (outcome, target, reason) =
            evacuate_instance(app, caller, node, &row).await.unwrap_or_else(|error| failure(&row, error));
        record_outcome(app, caller, node, &row, outcome, target.clone(), &reason);
        records.push(EvacuationRecord {
            instance_uuid: row.id,
            name: row.name,
            namespace: row.namespace,
            outcome,
            node: target,
            reason,
        });
    }
    app.networks.notify_changed();
    app.queue.wake();
    Ok(records)
}

/// Restarts the instances with `restart: elsewhere` of nodes whose watchdog has certainly stopped their VMs: the lease has
/// ended both by the clock of the database and by that of this daemon, because the former may be set. Instances whose disks
/// cannot be restored, or for which no node has capacity, remain on their node. `silent` are the nodes that do not check in, each
/// with the time since its last check-in.
pub(crate) async fn restart_fenced(app: &App, silent: &[(NodeRow, f64)]) -> Result<()> {
    let caller = Caller::daemon("maintainer");
    for (node, silence) in silent {
        if !matches!(node.state, NodeState::Missing | NodeState::Error)
            || node.report.instance_fencing_lease.or(node.report.fencing_lease).is_none()
        {
            continue;
        }
        let silence = silence.min(app.silences.unchanged(node).as_secs_f64());
        for row in instances::of_node(&*app.store, node.identity.id).await? {
            let end = fence::certain_end(&row.spec, &node.report);
            if !row.state.is_active()
                || row.spec.restart != RestartPolicy::Elsewhere
                || end.is_none_or(|end| silence < end)
            {
                continue;
            }
            let restarted = async {
                match restore_disks(app, &row).await? {
                    Ok(restored) => place_elsewhere(app, &caller, node, &row, &restored).await,
                    Err(missing) => Ok((EvacuationOutcome::Waiting, None, missing.reason)),
                }
            };
            let (outcome, target, reason) = restarted.await.unwrap_or_else(|error| failure(&row, error));
            if outcome == EvacuationOutcome::Evacuating {
                record_outcome(app, &caller, node, &row, outcome, target, &reason);
                app.networks.notify_changed();
                app.queue.wake();
            }
        }
    }
    Ok(())
}

/// Returns the outcome of an instance whose evacuation failed, which does not affect the others.
fn failure(row: &InstanceRow, error: Error) -> (EvacuationOutcome, Option<String>, String) {
    tracing::warn!(instance = %row.id, %error, "failed to evacuate instance");
    let reason = match error {
        Error::Internal(_) => "its evacuation failed; see the log".to_owned(),
        error => error.to_string(),
    };
    (EvacuationOutcome::Waiting, None, reason)
}

fn record_outcome(
    app: &App,
    caller: &Caller,
    node: &NodeRow,
    row: &InstanceRow,
    outcome: EvacuationOutcome,
    target: Option<String>,
    reason: &str,
) {
    let name = &node.identity.name;
    let event =
        Event::new(EventType::Status, object(row.id), format!("evacuation from dead node {name}: {outcome}"))
            .with("from_node", name.clone())
            .with("node", target)
            .with("reason", reason);
    app.record(caller, event);
}

fn require_dead(node: &NodeRow, dead: bool) -> Result<()> {
    let name = &node.identity.name;
    let text = match node.state {
        NodeState::Created | NodeState::Stopping => {
            format!("node {name} is alive, and only a dead node can be evacuated")
        }
        NodeState::Deleted => format!("node {name} was deleted, and has no instances"),
        NodeState::Stopped | NodeState::Missing | NodeState::Error if !dead => format!(
            "node {name} has not checked in since {}, but its VMs may still be running, and would run twice. Power off its \
             host, and confirm with `muster node evacuate {name} --dead` (`dead: true`)",
            format_utc(node.lastseen)
        ),
        NodeState::Stopped | NodeState::Missing | NodeState::Error => return Ok(()),
    };
    Err(Error::Conflict(text))
}

async fn evacuate_instance(
    app: &App,
    caller: &Caller,
    node: &NodeRow,
    row: &InstanceRow,
) -> Result<(EvacuationOutcome, Option<String>, String)> {
    let from = &node.identity.name;
    if row.state == InstanceState::DeleteWait {
        delete::finish_lost(app, row, Some(node)).await?;
        return Ok((EvacuationOutcome::Deleted, None, "it was being deleted".into()));
    }
    let restored = match restore_disks(app, row).await? {
        Ok(restored) if row.state.is_active() => restored,
        Ok(_) => {
            let reason = format!("node {from} is dead, and its state was {}", row.state);
            lost::fail_lost(app, row, &reason, Some(node), None).await?;
            return Ok((EvacuationOutcome::Failed, None, reason));
        }
        Err(missing) if missing.is_temporary => {
            return Ok((EvacuationOutcome::Waiting, None, missing.reason));
        }
        Err(missing) => {
            let reason = format!("node {from} is dead: {}", missing.reason);
            lost::fail_lost(app, row, &reason, Some(node), None).await?;
            return Ok((EvacuationOutcome::Failed, None, reason));
        }
    };
    place_elsewhere(app, caller, node, row, &restored).await
}

/// Places an instance on another node, if one has capacity.
async fn place_elsewhere(
    app: &App,
    caller: &Caller,
    node: &NodeRow,
    row: &InstanceRow,
    restored: &RestoredDisks,
) -> Result<(EvacuationOutcome, Option<String>, String)> {
    let from = &node.identity.name;
    let restored_row = InstanceRow { spec: restored.spec.clone(), ..row.clone() };
    let request = placement::request_again(app, &restored_row).await?;
    let candidates = placement::find_uncached(app, &row.namespace, &request).await?;
    if let Err(error) = candidates.nodes() {
        return Ok((EvacuationOutcome::Waiting, None, error.to_string()));
    }
    let moved = transaction!(app.store, |tx| {
        move_in(app, tx, caller, node, row, &request, &candidates, restored).await
    });
    let allocation = match moved {
        Ok(allocation) => allocation,
        Err(error @ Error::Unschedulable { .. }) => {
            return Ok((EvacuationOutcome::Waiting, None, error.to_string()));
        }
        Err(error) => return Err(error),
    };
    placement::update_cache(app, &allocation);
    placement::record_scheduling(app, caller, row.id, &request, &candidates, Ok(&allocation));
    let reason = format!("node {from} is dead");
    record_state_change(app, row.id, row.state, InstanceState::Preflight, Some(&reason));
    Ok((EvacuationOutcome::Evacuating, Some(allocation.name), format!("from {}", restored.source)))
}

/// Places an instance on another node under the next generation, and queues the operation that creates its VM there.
#[expect(clippy::too_many_arguments, reason = "the parts of one transaction")]
async fn move_in(
    app: &App,
    tx: &mut Tx,
    caller: &Caller,
    node: &NodeRow,
    row: &InstanceRow,
    request: &PlacementRequest,
    candidates: &Candidates,
    restored: &RestoredDisks,
) -> Result<Allocation, TxError> {
    let (id, from) = (row.id, node.identity.id);
    lost::lock_dead_in(tx, node).await?;
    let changed = || StoreError::Conflict("the instance changed".into());
    let current = instances::get(&mut *tx, id).await?.filter(|current| current.state == row.state);
    let current = current.ok_or_else(changed)?;
    placement::release_in(tx, &current).await?;
    match &restored.replica {
        Some(replica) => {
            placement::release_disk_in(tx, replica.node, replica.reserved_disk_gb).await?;
            if !instance_replicas::begin_restore(tx, replica).await? {
                return Err(changed().into());
            }
        }
        // Replicas of the lost disks are not replicas of the restored ones.
        None if restored.spec.restore_from.is_none() => {
            instance_replicas::delete_others(tx, id, None).await?;
        }
        None => {}
    }
    let allocation = placement::allocate_in(app, tx, &row.namespace, request, candidates).await?;
    let allocation = allocation.map_err(|refused| placement::no_capacity(&refused))?;
    instances::set_ports(tx, id, from, None).await?;
    if !instances::place_again(tx, row, allocation.node, &allocation.allocated).await? {
        return Err(changed().into());
    }
    if row.state != InstanceState::Preflight
        && !instances::set_state(tx, id, row.state, InstanceState::Preflight, None).await?
    {
        return Err(changed().into());
    }
    instances::set_power(tx, id, PowerState::Off).await?;
    instances::set_agent_state(tx, id, agent::state_for_power(row, PowerState::Off)).await?;
    for interface in interfaces::of_instances(&mut *tx, &[id]).await? {
        networks::bump_generation(tx, interface.network, PRESENT).await?;
    }
    interfaces::set_node(tx, id, allocation.node).await?;
    reference_blobs_in(tx, id, &restored.spec).await?;
    instances::set_spec(tx, id, &restored.spec, &row.disks).await?;
    agent_operations::fail_all(tx, id, "the host of the instance is dead").await?;
    operations::abort_unfinished(tx, &object(id), None).await?;
    let placed = InstanceRow { node: Some(allocation.node), ..current };
    let operation = EvacuateInstance { from: node.identity.name.clone() };
    let handle = operation_on(&placed, operation, Some(&caller.request_id)).enqueue(tx).await?;
    instances::set_operation(tx, id, &handle).await?;
    Ok(allocation)
}

/// Chooses where the disks of an instance come from. Those on shared storage are used as they are. Others are those of its
/// replica, or created from the latest snapshot of each disk or, if the instance is disposable or was never complete, from its
/// images. Returns the reason if none of these is possible.
async fn restore_disks(app: &App, row: &InstanceRow) -> Result<Result<RestoredDisks, MissingDisks>> {
    if row.spec.has_shared_disks {
        return Ok(Ok(RestoredDisks::new(row.spec.clone(), "its disks on shared storage")));
    }
    if row.spec.restore_from.is_some() {
        // Its evacuation to the node of its replica is not complete.
        return Ok(Ok(RestoredDisks::new(row.spec.clone(), "its replica")));
    }
    let lost = |reason: String| Ok(Err(MissingDisks { reason, is_temporary: false }));
    let live: Vec<NodeId> = blob_copy::live_nodes(app).await?.iter().map(|node| node.identity.id).collect();
    let is_disposable = row.spec.disposable || row.state != InstanceState::Created;
    if let Some(restored) = from_replica(app, row, &live).await? {
        return Ok(restored);
    }
    if let Some(spec) = from_snapshots(app, row, &live).await? {
        return Ok(Ok(RestoredDisks::new(spec, "the latest snapshots")));
    }
    if !is_disposable {
        return lost("no snapshot and not disposable".into());
    }
    let images = row.spec.disks.iter().filter_map(|disk| disk.blob_uuid).chain(row.spec.nvram_template);
    for blob in images {
        if !is_available(app, blob, &live).await? {
            return lost(format!("no other node has a copy of its image, blob {blob}"));
        }
    }
    Ok(Ok(RestoredDisks::new(row.spec.clone(), "its images")))
}

/// Returns the configuration with the latest replica as the content of the disks, or `None` without a complete replica.
async fn from_replica(
    app: &App,
    row: &InstanceRow,
    live: &[NodeId],
) -> Result<Option<Result<RestoredDisks, MissingDisks>>> {
    let mut replicas = instance_replicas::of_instance(&*app.store, row.id).await?;
    replicas.retain(|replica| replica.state == ReplicaState::Complete && Some(replica.node) != row.node);
    // The latest of those that can be used now is the last.
    replicas.sort_by(|a, b| {
        let order = |replica: &ReplicaRow| live.contains(&replica.node);
        order(a).cmp(&order(b)).then(a.last_complete.partial_cmp(&b.last_complete).unwrap_or(Ordering::Equal))
    });
    let Some(replica) = replicas.pop() else { return Ok(None) };
    let wait = |reason: String| Ok(Some(Err(MissingDisks { reason, is_temporary: true })));
    if !live.contains(&replica.node) {
        let node = nodes::get(&*app.store, &NameOrId::Id(replica.node)).await?;
        let name = node.map_or_else(|| replica.node.to_string(), |node| node.identity.name);
        return wait(format!("its replica is on node {name}, which does not check in"));
    }
    let mut spec = row.spec.clone();
    for disk in &mut spec.disks {
        match disk.blob_uuid {
            Some(blob) if disk.spec.disk_type == DiskType::Cdrom => {
                if !is_available(app, blob, live).await? {
                    return wait(format!("no other node has a copy of its image, blob {blob}"));
                }
            }
            // The replica has the whole content of a disk.
            _ => disk.blob_uuid = None,
        }
    }
    spec.nvram_template = None;
    spec.restore_from = Some(replica.node);
    let source = format!("its replica of {}", format_utc(replica.last_complete.unwrap_or_default()));
    Ok(Some(Ok(RestoredDisks { spec, source, replica: Some(replica) })))
}

/// Returns the configuration with the latest snapshots as the content of the disks, or `None` if a disk has no snapshot.
async fn from_snapshots(app: &App, row: &InstanceRow, live: &[NodeId]) -> Result<Option<InstanceSpec>> {
    let mut latest: BTreeMap<String, BlobId> = BTreeMap::new();
    for artifact in artifacts::snapshots_of(&*app.store, &row.id.to_string()).await? {
        for blob in version::versions_in(&*app.store, artifact.id).await?.into_values().rev() {
            if is_available(app, blob, live).await? {
                latest.insert(artifact.source_url.clone(), blob);
                break;
            }
        }
    }
    let snapshot = |device: &str| latest.get(&source_url(row.id, device)).copied();
    let mut spec = row.spec.clone();
    for (device, number) in plan::disk_devices(&row.spec) {
        let disk = &mut spec.disks[number];
        if disk.spec.disk_type == DiskType::Cdrom {
            continue;
        }
        let Some(blob) = snapshot(&device) else { return Ok(None) };
        disk.blob_uuid = Some(blob);
    }
    if let Some(blob) = snapshot(NVRAM) {
        spec.nvram_template = Some(blob);
    }
    Ok(Some(spec))
}

/// Returns whether a node that is up has a complete copy of a blob and of the blobs that it depends on.
async fn is_available(app: &App, blob: BlobId, live: &[NodeId]) -> Result<bool> {
    let mut next = Some(blob);
    while let Some(id) = next {
        let row = blobs::get(&*app.store, id).await?.filter(|row| row.state == BlobState::Created);
        let Some(row) = row else { return Ok(false) };
        let copies = blob_locations::of_blob(&*app.store, id).await?;
        if !copies.iter().any(|copy| copy.state == CopyState::Complete && live.contains(&copy.node)) {
            return Ok(false);
        }
        next = row.depends_on;
    }
    Ok(true)
}
