//! Deletes instances.

use muster_types::event::Event;
use muster_types::ids::{InstanceId, NodeId};
use muster_types::instance::{InstanceRecord, InstanceState};
use muster_types::node::NodeState;
use muster_types::operation::OperationHandle;
use muster_types::{Error, Result};

use super::state::release_lost;
use super::{fence, find_own, lost, object, operation_on, record};
use crate::app::App;
use crate::auth::Caller;
use crate::auth::access::namespace_for_delete_all;
use crate::objects::audit::with_caller;
use crate::queue::{DeleteInstance, NewOperation, Operation as _, SnapshotInstance};
use muster_store::instances::InstanceRow;
use muster_store::nodes::NodeRow;
use muster_store::{StoreError, Tx, TxError, instances, node_ledgers, nodes, operations, transaction};

/// Deletes an instance. An operation removes its VM and then everything else.
pub async fn delete(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<InstanceRecord> {
    let row = find_own(app, caller, reference, namespace).await?;
    if !begin(app, caller, row.id, "deletion request from REST API").await? {
        return Err(Error::not_found("instance"));
    }
    record(app, row.id).await
}

/// Marks an instance for deletion and queues the operation. Returns `false` if it is deleted.
async fn begin(app: &App, caller: &Caller, id: InstanceId, message: &str) -> Result<bool> {
    let queued = transaction!(app.store, |tx| { enqueue(tx, id, Some(caller)).await })?;
    if queued.is_some() {
        app.queue.wake();
        app.record(caller, with_caller(caller, Event::audit(object(id), message)));
    }
    Ok(queued.is_some())
}

/// Marks an instance for deletion and queues the operation as part of a transaction, unless one is pending. Returns
/// `None` if it is deleted.
pub(crate) async fn enqueue(
    tx: &mut Tx,
    id: InstanceId,
    caller: Option<&Caller>,
) -> Result<Option<OperationHandle>, TxError> {
    let Some(row) = instances::get(&mut *tx, id).await? else { return Ok(None) };
    if !instances::lock_placed(tx, &row).await? {
        return Err(StoreError::Conflict("the instance was placed again".into()).into());
    }
    match row.state {
        InstanceState::Deleted => return Ok(None),
        InstanceState::DeleteWait => {
            if let Some(pending) = pending(&mut *tx, &row).await? {
                return Ok(Some(pending));
            }
        }
        InstanceState::DeleteWaitError => {
            // Deletion restarts from the error state.
            instances::set_state(tx, id, row.state, InstanceState::Error, None).await?;
            return Box::pin(enqueue(tx, id, caller)).await;
        }
        _ => {
            if !instances::set_state(tx, id, row.state, InstanceState::DeleteWait, None).await? {
                return Err(StoreError::Conflict("the instance changed".into()).into());
            }
        }
    }
    // Queued operations are no longer needed; a running one notices the new state.
    operations::abort_queued(tx, &object(id), SnapshotInstance::KIND.name).await?;
    let request = caller.map(|caller| caller.request_id.as_str());
    let operation = operation_on(&row, DeleteInstance {}, request);
    let node = operation.node.or(node_with_storage(tx, &row).await?);
    let handle = NewOperation { node, ..operation }.enqueue(tx).await?;
    instances::set_operation(tx, id, &handle).await?;
    Ok(Some(handle))
}

async fn pending(tx: &mut Tx, row: &InstanceRow) -> Result<Option<OperationHandle>, StoreError> {
    let rows = operations::of_target(tx, &object(row.id)).await?;
    let pending = rows.into_iter().find(|op| op.name == DeleteInstance::KIND.name && !op.state.is_final());
    Ok(pending.map(|op| OperationHandle { op_type: op.operation_type, op_uuid: op.id }))
}

/// Aborts the operations that only a deleted node can run, and removes its instances, whose VMs are lost. Instances that were
/// being deleted become deleted, the others enter the error state. Their addresses stay allocated or reserved unless the VMs
/// were certainly stopped.
pub(crate) async fn release_deleted_node(app: &App, node: &NodeRow) -> Result<()> {
    let (id, name) = (node.identity.id, &node.identity.name);
    // Waits for allocations in progress, so that they are found below. Later ones see that the node is deleted.
    transaction!(app.store, |tx| {
        node_ledgers::lock(tx, id).await?;
        Ok(operations::abort_of_node(tx, id).await?)
    })?;
    for row in instances::of_node(&*app.store, id).await? {
        let row = fence::with_unfenced(app, row, node);
        if row.state == InstanceState::DeleteWait {
            finish_lost(app, &row, None).await?;
        } else {
            lost::fail_lost(app, &row, &format!("node {name} was deleted"), None, None).await?;
        }
    }
    Ok(())
}

/// Completes the deletion of an instance whose node is lost. Disks on shared storage are removed by another node. If the node was
/// declared dead, `dead` is the node, which must not have returned.
pub(crate) async fn finish_lost(app: &App, row: &InstanceRow, dead: Option<&NodeRow>) -> Result<()> {
    if row.spec.storage_uuid.is_none() {
        return release_lost(app, row, dead).await;
    }
    lost::delete_elsewhere(app, row, dead).await
}

/// Returns a node that has mounted the shared storage of an instance without a node, if one is up.
async fn node_with_storage(tx: &mut Tx, row: &InstanceRow) -> Result<Option<NodeId>, StoreError> {
    let Some(storage) = row.spec.storage_uuid.filter(|_| row.node.is_none()) else { return Ok(None) };
    let has_storage = |node: &&NodeRow| {
        let found = node.report.shared_storage.as_ref().and_then(|found| found.uuid);
        node.state == NodeState::Created && found == Some(storage)
    };
    Ok(nodes::list(&mut *tx).await?.iter().find(has_storage).map(|node| node.identity.id))
}

/// Deletes every instance of a namespace, by default the caller's own.
pub async fn delete_all(app: &App, caller: &Caller, namespace: Option<&str>) -> Result<Vec<InstanceId>> {
    let named = namespace.filter(|name| !name.is_empty()).unwrap_or(&caller.namespace);
    let namespace = namespace_for_delete_all(&*app.store, caller, Some(named)).await?;
    let mut deleted = Vec::new();
    for row in instances::of_namespace(&*app.store, namespace).await? {
        if begin(app, caller, row.id, "deletion request from REST API").await? {
            deleted.push(row.id);
        }
    }
    Ok(deleted)
}
