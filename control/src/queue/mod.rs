//! The operation queue: which operations exist, their parameters, and how to enqueue one.
//!
//! An operation is a row; the workers in `operations/` run its steps. See docs/decisions/0004.

mod kinds;
mod operation;

use muster_store::operations::{self, NewOperation as NewRow};
use muster_store::{StoreError, Tx};
use muster_types::ids::NodeId;
use muster_types::object::ObjectRef;
use muster_types::operation::OperationHandle;
use tokio::sync::Notify;

use crate::traces;

pub use kinds::*;
pub use operation::{Lane, Operation, OperationKind};

/// Wakes the workers of this daemon when operations are queued.
#[derive(Debug, Default)]
pub struct Queue {
    /// One for each lane.
    wakers: [Notify; Lane::ALL.len()],
}

impl Queue {
    /// Notifies the workers that an operation was queued. Call it after the transaction.
    pub fn wake(&self) {
        self.wakers.iter().for_each(Notify::notify_one);
    }

    /// Waits until an operation may have been queued for a lane.
    pub(crate) async fn woken(&self, lane: Lane) {
        self.wakers[lane as usize].notified().await;
    }
}

/// An operation to enqueue.
#[derive(Debug, Clone)]
pub struct NewOperation<P> {
    pub parameters: P,
    pub target: ObjectRef,
    pub namespace: Option<String>,
    pub depends_on: Vec<OperationHandle>,
    pub request_id: Option<String>,
    /// The only node that can run it, if not every node can.
    pub node: Option<NodeId>,
}

impl<P: Operation> NewOperation<P> {
    /// Creates an operation on `target` that any node can run and no request caused.
    pub fn new(target: ObjectRef, namespace: Option<String>, parameters: P) -> Self {
        Self { parameters, target, namespace, depends_on: vec![], request_id: None, node: None }
    }

    /// Queues the operation as part of a transaction. Wake the queue afterwards.
    pub async fn enqueue(self, tx: &mut Tx) -> Result<OperationHandle, StoreError> {
        let arguments = serde_json::to_value(&self.parameters)
            .map_err(|error| StoreError::Internal(format!("{}: parameters: {error}", P::KIND.name)))?;
        let new = NewRow {
            operation_type: P::KIND.operation_type,
            name: P::KIND.name,
            tasks: P::KIND.steps.to_vec(),
            arguments,
            depends_on: self.depends_on,
            namespace: self.namespace,
            target: self.target,
            request_id: self.request_id,
            node: self.node,
            trace: traces::of_new_operation(),
        };
        operations::insert(tx, &new).await
    }
}
