//! Operations: the kind, the parameters and the lane that runs them.

use muster_store::operations::OperationRow;
use muster_types::operation::OperationType;
use muster_types::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

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

    /// The number of operations that one daemon runs concurrently in this lane, without those that run in addition
    /// because their namespace has no other. See docs/decisions/0042.
    pub(crate) fn workers(self) -> u16 {
        match self {
            Self::Quick | Self::Fetch => 8,
            Self::Convert => 2,
            Self::Vm => 16,
        }
    }
}
