//! Replicas of the disks of an instance: where they are, copies to them, and restoring an instance from one. See
//! docs/decisions/0074.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use muster_store::instance_replicas::{self, ReplicaRow};
use muster_store::instances::{self, InstanceRow};
use muster_store::nodes::{self, NodeRow};
use muster_store::transaction;
use muster_types::event::{Event, EventType};
use muster_types::ids::{InstanceId, NodeId};
use muster_types::instance::{DiskSpecRecord, InstanceState, PowerState};
use muster_types::migration::{MigrationChannel, MigrationConnection};
use muster_types::node::{CordonReason, NodeApi, NodeFuture, NodeState};
use muster_types::replica::{MAX_REPLICAS, ReplicaDriver, ReplicaState};
use muster_types::shared_storage::StorageType;
use muster_types::spec::DiskType;
use muster_types::time::format_utc;
use muster_types::vm::VmPlan;
use muster_types::{Error, Result};

use super::outgoing::connect_peer;
use super::{object, placement};
use crate::app::App;
use crate::objects::node_location::NodeLocation;
use crate::scheduler::PlacementRequest;

/// How long a QEMU may take to say how much a replica is behind.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(2);

/// Checks the number of replicas that a request asks for.
pub(super) fn parse(
    replicas: Option<i64>,
    storage: StorageType,
    disposable: bool,
    disks: &[DiskSpecRecord],
) -> Result<i64> {
    let invalid = |text: String| Err(Error::Invalid(text));
    let replicas = replicas.unwrap_or(0);
    if !(0..=MAX_REPLICAS).contains(&replicas) {
        return invalid(format!("replicas: {replicas} is neither 0 nor 1"));
    }
    if replicas == 0 {
        return Ok(0);
    }
    if storage == StorageType::Shared {
        return invalid(
            "replicas: disks on shared storage have no replicas, because all hosts have them".into(),
        );
    }
    if disposable {
        return invalid(
            "replicas: a disposable instance is created again from its images, and has no replicas".into(),
        );
    }
    let is_disk = |disk: &DiskSpecRecord| disk.spec.disk_type == DiskType::Disk;
    if !disks.iter().any(is_disk) {
        return invalid("replicas: the instance has no disk".into());
    }
    // A restored disk does not have its image as a base, which would determine its size.
    match disks.iter().position(|disk| is_disk(disk) && disk.spec.size.is_none()) {
        Some(number) => {
            invalid(format!("disk[{number}].size: an instance with replicas needs the sizes of its disks"))
        }
        None => Ok(replicas),
    }
}

/// Returns the replica of an instance that receives copies: on another node that is up and is not drained.
pub(crate) fn target<'a>(
    row: &InstanceRow,
    replicas: &'a [ReplicaRow],
    nodes: &[NodeRow],
) -> Option<&'a ReplicaRow> {
    let is_usable = |id: NodeId| {
        let node = nodes.iter().find(|node| node.identity.id == id);
        node.is_some_and(|node| {
            let is_drained = node.cordon.as_ref().is_some_and(|cordon| cordon.reason == CordonReason::Drain);
            // A daemon that was stopped on purpose is expected to return.
            let is_expected =
                matches!(node.state, NodeState::Created | NodeState::Stopping | NodeState::Stopped);
            is_expected && !is_drained
        })
    };
    replicas.iter().find(|replica| {
        replica.instance == row.id
            && matches!(replica.state, ReplicaState::Initial | ReplicaState::Complete)
            && Some(replica.node) != row.node
            && is_usable(replica.node)
    })
}

/// Chooses a node for the replica of an instance, and reserves its disk space there.
pub(crate) async fn place(
    app: &App,
    row: &InstanceRow,
    existing: &[ReplicaRow],
    nodes: &[NodeRow],
) -> Result<ReplicaRow> {
    let request = PlacementRequest { disk_gb: row.committed.disk_gb, ..PlacementRequest::default() };
    let mut candidates = placement::find_uncached(app, &row.namespace, &request).await?;
    let simulated = |id: Option<NodeId>| {
        nodes.iter().find(|node| Some(node.identity.id) == id).map(|node| node.identity.simulated)
    };
    candidates.retain(|id| {
        Some(id) != row.node
            && simulated(Some(id)) == simulated(row.node)
            // Its node has not removed an earlier one.
            && !existing.iter().any(|replica| replica.instance == row.id && replica.node == id)
    });
    candidates.nodes()?;
    let placed = transaction!(app.store, |tx| {
        if !instances::lock_placed(tx, row).await? {
            return Ok(None);
        }
        let Some((node, committed)) = placement::reserve_disk_in(app, tx, &request, &candidates).await?
        else {
            return Ok(None);
        };
        let replica = ReplicaRow {
            instance: row.id,
            node,
            state: ReplicaState::Initial,
            reserved_disk_gb: request.disk_gb,
            generation: row.generation,
            last_complete: None,
            bytes_behind: None,
            error: None,
        };
        if !instance_replicas::insert(tx, &replica).await? {
            return Err(Error::Conflict("the node has a replica of the instance already".into()).into());
        }
        Ok(Some((replica, committed)))
    })?;
    let no_capacity = || Error::InsufficientCapacity("no other node has capacity for the replica".into());
    let (replica, committed) = placed.ok_or_else(no_capacity)?;
    app.placement.update(replica.node, committed);
    let event = Event::new(EventType::Status, object(row.id), "replica placed on a node");
    app.events.record(event.with("node", node_name(nodes, replica.node)));
    Ok(replica)
}

pub(crate) fn node_name(nodes: &[NodeRow], id: NodeId) -> String {
    let node = nodes.iter().find(|node| node.identity.id == id);
    node.map_or_else(|| id.to_string(), |node| node.identity.name.clone())
}

/// The source of a replica.
struct ReplicaSource<'a> {
    app: &'a App,
    instance: InstanceId,
    generation: i64,
    target: NodeLocation,
}

impl ReplicaDriver for ReplicaSource<'_> {
    fn connect(&self) -> NodeFuture<'_, UnixStream> {
        Box::pin(async move {
            match &self.target {
                NodeLocation::Local(node) => node.vms().receive_replica(self.instance, self.generation).await,
                NodeLocation::Remote(node) => {
                    let connection =
                        MigrationConnection { channel: MigrationChannel::Replica, display_password: None };
                    connect_peer(self.app, node, self.instance, self.generation, &connection).await
                }
            }
        })
    }

    fn now(&self) -> f64 {
        self.app.store.membership.database_time()
    }
}

/// Copies the disks of an instance on a node of this daemon to its replica.
pub(crate) async fn copy(
    app: &App,
    node: &Arc<dyn NodeApi>,
    row: &InstanceRow,
    replica: &ReplicaRow,
    target: &NodeRow,
) -> Result<()> {
    let name = target.identity.name.clone();
    let (instance, generation) = (row.id, row.generation);
    let driver = ReplicaSource { app, instance, generation, target: NodeLocation::of(app, target.clone()) };
    let event = |message: &'static str| {
        Event::new(EventType::Status, object(row.id), message).with("node", name.clone())
    };
    let copied = match node.vms().copy_to_replica(row.id, &driver).await {
        Ok(copied) => copied,
        Err(error) => {
            let reason = match &error {
                Error::Internal(_) => "the copy failed; see the log of its node".to_owned(),
                error => error.to_string(),
            };
            if replica.error.as_ref() != Some(&reason) {
                transaction!(app.store, |tx| {
                    Ok(instance_replicas::set_error(tx, replica, &reason).await?)
                })?;
                app.events.record(event("copying the disks to the replica failed").with("reason", reason));
            }
            return Err(error);
        }
    };
    let bytes_behind = if is_off(row) { Some(0) } else { measure(node, row).await };
    let is_recorded = transaction!(app.store, |tx| {
        if !instances::lock_placed(tx, row).await?
            || !instance_replicas::set_complete(tx, replica, generation, copied.time, bytes_behind).await?
        {
            return Ok(false);
        }
        instance_replicas::delete_others(tx, row.id, Some(replica.node)).await?;
        Ok(true)
    })?;
    if is_recorded && (replica.last_complete.is_none() || replica.error.is_some()) {
        app.events.record(event("replica is complete").with("bytes", copied.bytes));
    }
    Ok(())
}

fn is_off(row: &InstanceRow) -> bool {
    matches!(row.power_state, PowerState::Off | PowerState::Crashed)
}

/// Returns whether a replica has the disks of an instance that is off.
pub(crate) fn is_final(row: &InstanceRow, replica: &ReplicaRow) -> bool {
    is_off(row)
        && replica.last_complete.is_some_and(|time| row.power_state_since.is_some_and(|since| time >= since))
}

/// Returns how many bytes the guest of an instance on a node of this daemon has written since its last copy, if that is known.
async fn measure(node: &Arc<dyn NodeApi>, row: &InstanceRow) -> Option<i64> {
    let lag = tokio::time::timeout(MEASURE_TIMEOUT, node.vms().replica_lag(row.id)).await;
    i64::try_from(lag.ok()?.ok()??).ok()
}

/// Records how much a replica is behind.
pub(crate) async fn update_lag(
    app: &App,
    node: &Arc<dyn NodeApi>,
    row: &InstanceRow,
    replica: &ReplicaRow,
) -> Result<()> {
    let bytes_behind = measure(node, row).await;
    if bytes_behind == replica.bytes_behind {
        return Ok(());
    }
    transaction!(app.store, |tx| {
        Ok(instance_replicas::set_bytes_behind(tx, replica, bytes_behind).await?)
    })
}

/// Opens a connection to the replica of an instance on a node of this daemon.
pub(super) async fn accept(app: &App, id: InstanceId, generation: i64) -> Result<UnixStream> {
    let absent = || Error::Conflict("the instance has no replica on this node that receives copies".into());
    let row = instances::get(&*app.store, id).await?;
    let row = row.filter(|row| row.state == InstanceState::Created && row.generation == generation);
    let row = row.ok_or_else(absent)?;
    let replicas = instance_replicas::of_instance(&*app.store, id).await?;
    let replica = target(&row, &replicas, &nodes::list(&*app.store).await?).ok_or_else(absent)?;
    let node = app.nodes.iter().find(|node| node.identity().id == replica.node).ok_or_else(absent)?;
    node.vms().receive_replica(id, generation).await
}

/// Makes the replica of an evacuated instance its disks, if they come from one.
pub(super) async fn restore(
    app: &App,
    node: &Arc<dyn NodeApi>,
    row: &InstanceRow,
    plan: &VmPlan,
) -> Result<()> {
    let Some(from) = row.spec.restore_from else { return Ok(()) };
    if from != node.identity().id {
        return Err(Error::Conflict(format!("the replica of the disks is on node {from}")));
    }
    let time = node.vms().restore_replica(plan).await?;
    let event = Event::new(EventType::Status, object(row.id), "disks restored from the replica");
    let event = event.with("point_in_time", format_utc(time)).with("time", time);
    app.events.record(event.with("node", node.identity().name.clone()));
    Ok(())
}

/// Removes a replica that is not needed any longer from a node of this daemon.
pub(crate) async fn remove(app: &App, node: &Arc<dyn NodeApi>, replica: &ReplicaRow) -> Result<()> {
    node.vms().remove_replica(replica.instance).await?;
    let released = transaction!(app.store, |tx| {
        if !instance_replicas::remove(tx, replica).await? {
            return Ok(None);
        }
        Ok(Some(placement::release_disk_in(tx, replica.node, replica.reserved_disk_gb).await?))
    })?;
    if let Some((node, committed)) = released {
        app.placement.update(node, committed);
    }
    Ok(())
}
