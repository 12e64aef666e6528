//! The steps of an operation and how they are reverted.

use std::future::Future;
use std::pin::Pin;
use std::str::FromStr;

use muster_store::operations::OperationRow;
use muster_types::{Error, Result};

use crate::app::App;
use crate::queue::OperationKind;

/// The future returned by a step.
pub type StepFuture<'a> = Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>>;

/// The code of a step or of its undo.
pub type StepFn = for<'a> fn(&'a App, &'a OperationRow) -> StepFuture<'a>;

/// A named step of an operation.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// The name of the task in the API.
    pub name: &'static str,
    pub run: StepFn,
    pub undo: Undo,
}

/// How a step is reverted when its operation fails permanently.
#[derive(Debug, Clone, Copy)]
pub enum Undo {
    Run(StepFn),
    /// Why nothing needs to be reverted.
    NotNeeded(&'static str),
}

/// A kind of operation with the code of its steps.
#[derive(Debug, Clone, Copy)]
pub struct Implementation {
    pub kind: OperationKind,
    pub steps: &'static [Step],
}

impl Implementation {
    /// Creates an implementation. Fails to compile if the steps are not those that the kind declares.
    #[must_use]
    pub const fn new(kind: OperationKind, steps: &'static [Step]) -> Self {
        assert!(kind.steps.len() == steps.len(), "an implementation has the steps that its kind declares");
        let mut index = 0;
        while index < steps.len() {
            assert!(
                is_equal(kind.steps[index].as_bytes(), steps[index].name.as_bytes()),
                "an implementation has the steps that its kind declares, in the same order"
            );
            index += 1;
        }
        Self { kind, steps }
    }
}

/// Returns whether two byte strings are equal. `==` is not available in a constant context.
const fn is_equal(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    let mut index = 0;
    while index < one.len() {
        if one[index] != other[index] {
            return false;
        }
        index += 1;
    }
    true
}

/// Parses the id of the target of an operation.
pub(super) fn parse_target_id<T: FromStr>(row: &OperationRow) -> Result<T> {
    let target = &row.target;
    target.id.parse().map_err(|_| {
        let kind = target.object_type;
        Error::Internal(format!("operation {}: {:?} is not the id of a {kind}", row.id, target.id))
    })
}

/// Returns the message of the error that ended an operation, for the undo of its steps.
pub(super) fn failure_message(row: &OperationRow) -> &str {
    row.error_report.as_ref().map_or("unknown", |report| report.message.as_str())
}
