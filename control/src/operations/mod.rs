//! Queued work as data: every operation is a row with named steps, done by whichever worker holds its lease.
//!
//! A step is idempotent: it may run again after any failure or death. It has an undo, or says why none is
//! needed. A step that must wait for others ([`Error::NotReady`]) is asked again later, without end; a refusal that
//! no other attempt could change ends the operation at once. One file for each operation.
//!
//! [`Error::NotReady`]: muster_types::Error::NotReady

pub mod clean_namespace;
pub mod clean_network;
pub mod convert_image;
pub mod create_instance;
pub mod create_network;
pub mod delete_instance;
pub mod delete_namespace;
pub mod delete_network;
pub mod fetch_artifact;
pub mod plug_interface;
pub mod release_instance;
pub mod snapshot_instance;
pub mod start_instance;
mod worker;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Mutex;

use muster_types::Result;
use muster_types::operation::{OperationHandle, OperationType};
use tokio::sync::Notify;

use crate::app::App;
use crate::store::operations::{NewOperation, OperationRow};
use crate::store::{StoreError, Tx, operations};

pub use worker::{run, run_once};

/// What a step hands out.
pub type StepFuture<'a> = Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>>;

/// What a step does, given the operation.
pub type StepFn = for<'a> fn(&'a App, &'a OperationRow) -> StepFuture<'a>;

/// One named piece of an operation.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// The task's name in the API.
    pub name: &'static str,
    pub run: StepFn,
    pub undo: Undo,
}

/// How a step is taken back when the operation fails for good.
#[derive(Debug, Clone, Copy)]
pub enum Undo {
    Run(StepFn),
    /// Why nothing needs to be taken back.
    NotNeeded(&'static str),
}

/// An operation that exists: its name and its steps.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    pub operation_type: OperationType,
    pub name: &'static str,
    /// Whether its target no longer exists once it is complete.
    pub removes_target: bool,
    /// Beside which others it is done.
    pub lane: Lane,
    pub steps: &'static [Step],
}

/// Operations of one lane never wait for those of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// Work that is soon done.
    Quick,
    /// Bytes from elsewhere, which may take as long as they like.
    Fetch,
    /// Work for the processor and the disk.
    Convert,
    /// Work on machines.
    Machine,
}

impl Lane {
    pub(crate) const ALL: [Self; 4] = [Self::Quick, Self::Fetch, Self::Convert, Self::Machine];

    /// Operations of the lane that one daemon works on at once.
    pub(crate) fn workers(self) -> usize {
        match self {
            Self::Quick | Self::Fetch => 8,
            Self::Convert => 2,
            Self::Machine => 16,
        }
    }
}

/// Every operation that a worker can do.
pub const KINDS: &[Kind] = &[
    delete_namespace::KIND,
    clean_namespace::KIND,
    create_network::KIND,
    delete_network::KIND,
    clean_network::KIND,
    fetch_artifact::KIND,
    convert_image::KIND,
    create_instance::KIND,
    start_instance::KIND,
    release_instance::KIND,
    plug_interface::KIND,
    snapshot_instance::KIND,
    delete_instance::KIND,
];

/// What a test makes happen around a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The step fails instead of running.
    Fail,
    /// The worker vanishes after the step, before it could write down that it was done.
    Die,
}

type Fate = Box<dyn FnMut(&OperationRow, &str) -> Option<Fault> + Send>;

/// The way to the workers: wakes them, and tells them what can be done.
pub struct Queue {
    /// One for each lane.
    wakes: [Notify; Lane::ALL.len()],
    kinds: Vec<Kind>,
    faults: Mutex<Option<Fate>>,
}

impl Default for Queue {
    fn default() -> Self {
        Self::new(KINDS.to_vec())
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("kinds", &self.kinds).finish_non_exhaustive()
    }
}

impl Queue {
    #[must_use]
    pub fn new(kinds: Vec<Kind>) -> Self {
        Self { wakes: Default::default(), kinds, faults: Mutex::new(None) }
    }

    /// Tells the workers that something was queued. Call it after the transaction.
    pub fn wake(&self) {
        self.wakes.iter().for_each(Notify::notify_one);
    }

    /// Waits until something may have been queued for a lane.
    async fn woken(&self, lane: Lane) {
        self.wakes[lane as usize].notified().await;
    }

    /// Makes steps fail on purpose, for tests of the recovery.
    pub fn inject(&self, fate: impl FnMut(&OperationRow, &str) -> Option<Fault> + Send + 'static) {
        *self.faults.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(Box::new(fate));
    }

    fn fault(&self, row: &OperationRow, step: &str) -> Option<Fault> {
        let mut faults = self.faults.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        faults.as_mut().and_then(|fate| fate(row, step))
    }

    fn names(&self, lane: Lane) -> Vec<&'static str> {
        self.kinds.iter().filter(|kind| kind.lane == lane).map(|kind| kind.name).collect()
    }

    fn kind(&self, row: &OperationRow) -> Option<&Kind> {
        self.kinds.iter().find(|kind| kind.name == row.name)
    }
}

impl Kind {
    /// Queues this operation on `target` as part of a transaction. Wake the queue afterwards.
    pub async fn enqueue(&self, tx: &mut Tx, order: Order) -> Result<OperationHandle, StoreError> {
        let new = NewOperation {
            operation_type: self.operation_type,
            name: self.name,
            tasks: self.steps.iter().map(|step| step.name).collect(),
            arguments: order.arguments,
            depends_on: order.depends_on,
            namespace: order.namespace,
            target: order.target,
            request_id: order.request_id,
            node: order.node,
        };
        operations::insert(tx, &new).await
    }
}

/// What an operation is to be done to.
#[derive(Debug, Clone)]
pub struct Order {
    pub target: muster_types::object::ObjectRef,
    pub namespace: Option<String>,
    pub arguments: serde_json::Value,
    pub depends_on: Vec<OperationHandle>,
    pub request_id: Option<String>,
    /// The node that alone can do it, if not every node can.
    pub node: Option<muster_types::ids::NodeId>,
}
