//! Whether the VM of an instance is fenced, and when it has certainly stopped. See docs/decisions/0052.

use std::sync::Arc;

use muster_store::instances::{self, InstanceRow, InstanceSpec, UnfencedVm};
use muster_store::nodes::{self, NodeRow};
use muster_store::{StoreError, Tx, TxError, transaction};
use muster_types::event::Event;
use muster_types::ids::{InstanceId, NodeId};
use muster_types::instance::{FencingPolicy, InstanceState, RestartPolicy};
use muster_types::node::{NodeApi, NodeReport, NodeState};
use muster_types::object::NameOrId;
use muster_types::{Error, Result};

use super::{object, placed_again, require_created};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::audit::with_caller;

/// The number of seconds after the end of a fencing lease until a VM has certainly stopped: covers the poll interval of the
/// watchdog, the end of the process, and the difference between the clocks of two hosts.
const FENCING_MARGIN: f64 = 10.0;

/// Returns what happens to the VM of an instance when its node cannot reach the database.
pub(crate) fn policy(app: &App, spec: &InstanceSpec) -> FencingPolicy {
    spec.fencing.unwrap_or(app.settings.fencing)
}

/// Parses the policies of a request. Absent ones have their defaults.
pub(super) fn parse_policies(
    restart: Option<&str>,
    fencing: Option<&str>,
) -> Result<(RestartPolicy, Option<FencingPolicy>)> {
    let restart = restart.filter(|text| !text.is_empty()).map(|text| {
        let invalid = format!("restart: {text:?} is neither \"manual\" nor \"elsewhere\"");
        text.parse().map_err(|_| Error::Invalid(invalid))
    });
    let fencing = fencing.filter(|text| !text.is_empty()).map(|text| {
        let invalid = format!("fencing: {text:?} is neither \"none\" nor \"self\"");
        text.parse().map_err(|_| Error::Invalid(invalid))
    });
    Ok((restart.transpose()?.unwrap_or(RestartPolicy::Manual), fencing.transpose()?))
}

/// Replaces the policies of an instance. Call it on the daemon of the instance's node. The VM is never less fenced than the
/// record says, because other nodes rely on the record.
pub async fn set_policies(
    app: &App,
    caller: &Caller,
    node: &Arc<dyn NodeApi>,
    id: InstanceId,
    restart: Option<&str>,
    fencing: Option<&str>,
) -> Result<()> {
    let (restart, fencing) = parse_policies(restart, fencing)?;
    let _lock = app.instance_locks.lock(id).await;
    let row = instances::get(&*app.store, id).await?.ok_or_else(|| Error::not_found("instance"))?;
    require_created(&row)?;
    if row.node != Some(node.identity().id) {
        return Err(placed_again(id));
    }
    caller.deadline.require_waiting()?;
    let spec = InstanceSpec { restart, fencing, ..row.spec.clone() };
    check_restart(app, &spec)?;
    let policy = policy(app, &spec);
    if policy == FencingPolicy::Own {
        node.vms().set_fencing(id, policy).await?;
    }
    transaction!(app.store, |tx| {
        let is_placed = instances::lock_placed(tx, &row).await?;
        let current = instances::get(&mut *tx, id).await?;
        let Some(current) = current.filter(|row| is_placed && row.state == InstanceState::Created) else {
            return Err(StoreError::Conflict("the instance changed".into()).into());
        };
        let spec = InstanceSpec { restart, fencing, ..current.spec };
        Ok(instances::set_spec(tx, id, &spec, &current.disks).await?)
    })?;
    let event = Event::audit(object(id), "fencing request from REST API").with("restart", restart.as_str());
    app.record(caller, with_caller(caller, event.with("fencing", fencing.map(FencingPolicy::as_str))));
    if policy == FencingPolicy::None {
        node.vms().set_fencing(id, policy).await?;
    }
    Ok(())
}

/// Rejects an instance that would restart elsewhere although its VM may still run.
pub(super) fn check_restart(app: &App, spec: &InstanceSpec) -> Result<()> {
    if spec.restart == RestartPolicy::Elsewhere && policy(app, spec) != FencingPolicy::Own {
        return Err(Error::Invalid(
            "restart: \"elsewhere\" requires self-fencing, without which the VM could run twice. Set fencing to \"self\", or \
             FENCING = self on every node"
                .into(),
        ));
    }
    Ok(())
}

/// Returns the number of seconds after the last check-in of a node when the VM of an instance has certainly stopped, or `None`
/// if it may keep running. The daemon of the node reports a lease only after its VMs have the policies of their instances.
pub(super) fn certain_end(spec: &InstanceSpec, report: &NodeReport) -> Option<f64> {
    let lease = match spec.fencing {
        None => report.fencing_lease,
        Some(FencingPolicy::Own) => report.instance_fencing_lease,
        Some(FencingPolicy::None) => None,
    };
    lease.map(|lease| lease + FENCING_MARGIN)
}

/// Returns the row of an instance that is to be removed from a node which does not check in, with the VM that may still run
/// there, besides those of earlier placements.
pub fn with_unfenced(app: &App, mut row: InstanceRow, node: &NodeRow) -> InstanceRow {
    // A daemon that was stopped on purpose has ended its lease. Of a deleted node, this is unknown.
    let has_lease = matches!(node.state, NodeState::Missing | NodeState::Error);
    let end = certain_end(&row.spec, &node.report).filter(|_| has_lease);
    let vm = UnfencedVm { node: node.identity.id, until: end.map(|end| node.lastseen + end) };
    let others = row.spec.unfenced_vms().filter(|other| other.node != vm.node);
    let vms = others.chain([vm]).filter(|vm| !is_expired(app, vm)).collect();
    row.spec.set_unfenced_vms(vms);
    row
}

fn is_expired(app: &App, vm: &UnfencedVm) -> bool {
    vm.until.is_some_and(|until| app.store.membership.database_time() >= until)
}

/// Rejects an instance with [`Error::NotReady`] whose VM on a lost node stops when the fencing lease expires.
pub(crate) fn require_expired(app: &App, row: &InstanceRow) -> Result<()> {
    match row.spec.unfenced_vms().find(|vm| vm.until.is_some() && !is_expired(app, vm)) {
        Some(_) => Err(Error::NotReady("the fencing lease of its former node has not expired".into())),
        None => Ok(()),
    }
}

/// Returns the nodes on which VMs of an instance may still run. They do not return before the transaction ends.
pub(crate) async fn unfenced_nodes_in(
    app: &App,
    tx: &mut Tx,
    row: &InstanceRow,
) -> Result<Vec<NodeId>, TxError> {
    let mut unfenced = Vec::new();
    for vm in row.spec.unfenced_vms().filter(|vm| !is_expired(app, vm)) {
        if let Some(node) = nodes::get(&mut *tx, &NameOrId::Id(vm.node)).await?
            && nodes::lock_silent(tx, &node).await?
        {
            unfenced.push(vm.node);
            continue;
        }
        let state = nodes::state(&mut *tx, vm.node).await?;
        // A node that checks in has stopped its stale VMs.
        if !matches!(state, Some(NodeState::Created | NodeState::Stopping)) {
            unfenced.push(vm.node);
        }
    }
    Ok(unfenced)
}
