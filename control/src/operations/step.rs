//! The steps of an operation and how they are reverted.

use std::future::Future;
use std::pin::Pin;

use muster_store::operations::OperationRow;
use muster_types::Result;

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

/// How a step is reverted when its operation fails for good.
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
        let mut at = 0;
        while at < steps.len() {
            assert!(
                is_equal(kind.steps[at].as_bytes(), steps[at].name.as_bytes()),
                "an implementation has the steps that its kind declares, in the same order"
            );
            at += 1;
        }
        Self { kind, steps }
    }
}

/// Compares two byte strings, in a constant context.
const fn is_equal(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    let mut at = 0;
    while at < one.len() {
        if one[at] != other[at] {
            return false;
        }
        at += 1;
    }
    true
}
