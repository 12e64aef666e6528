//! The operation queue: which operations exist, their parameters, and how to enqueue one.
//!
//! An operation is a row; the workers in `operations/` run its steps. See docs/decisions/0004.

mod kinds;

use muster_store::operations::{self, NewOperation as NewRow, OperationRow};
use muster_store::{StoreError, Tx};
use muster_types::ids::NodeId;
use muster_types::object::ObjectRef;
use muster_types::operation::{OperationHandle, OperationType};
use muster_types::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Notify;

pub use kinds::*;

/// A type of operation: its name, its steps and where it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OperationKind {
    pub operation_type: OperationType,
    pub name: &'static str,
    /// Whether the target no longer exists once the operation is complete.
    pub removes_target: bool,
    pub lane: Lane,
    /// The names of its steps, which the API shows as tasks.
    pub steps: &'static [&'static str],
}

/// The parameters of a kind of operation, stored with its row.
pub trait Operation: Serialize + DeserializeOwned + Send + Sync {
    const KIND: OperationKind;

    /// Reads the parameters of a queued operation.
    fn parameters(row: &OperationRow) -> Result<Self> {
        serde_json::from_value(row.arguments.clone())
            .map_err(|error| Error::Internal(format!("operation {}: invalid parameters: {error}", row.id)))
    }
}

/// A group of operations with its own workers, so that slow work never delays another group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// Work that ends soon.
    Quick,
    /// Downloads, whose duration depends on the source.
    Fetch,
    /// CPU and disk intensive work.
    Convert,
    /// Work on VMs.
    Vm,
}

impl Lane {
    pub(crate) const ALL: [Self; 4] = [Self::Quick, Self::Fetch, Self::Convert, Self::Vm];

    /// The number of operations that one daemon runs concurrently in this lane.
    pub(crate) fn workers(self) -> u16 {
        match self {
            Self::Quick | Self::Fetch => 8,
            Self::Convert => 2,
            Self::Vm => 16,
        }
    }
}

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
    /// An operation on `target` that any node can run and no request caused.
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
        };
        operations::insert(tx, &new).await
    }
}
