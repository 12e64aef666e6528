//! Nodes, and the seam between the control plane and a node.
//!
//! ```text
//! created ◀──check-in──▶ stopping ──▶ stopped
//!    │  ▲
//!    ▼  │ check-in
//! missing ──ten times as long──▶ error        any but deleted ──delete──▶ deleted
//! ```

use std::future::Future;
use std::pin::Pin;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::Result;
use crate::ids::NodeId;
use crate::object::{Reference, words};

words! {
    /// The life of a node.
    NodeState {
        Created = "created",
        Stopping = "stopping",
        Stopped = "stopped",
        Missing = "missing",
        Error = "error",
        Deleted = "deleted",
    }
}

impl NodeState {
    /// Whether a node may go from here to `next`.
    #[must_use]
    pub fn may_become(self, next: Self) -> bool {
        match (self, next) {
            (Self::Deleted, _) => false,
            (_, Self::Deleted) => true,
            (Self::Created, Self::Stopping | Self::Missing) => true,
            (Self::Stopping, Self::Stopped | Self::Created | Self::Missing) => true,
            (Self::Stopped | Self::Missing | Self::Error, Self::Created) => true,
            (Self::Missing, Self::Error) => true,
            (Self::Created, Self::Created | Self::Stopped | Self::Error)
            | (Self::Stopping, Self::Stopping | Self::Error)
            | (Self::Stopped, Self::Stopped | Self::Stopping | Self::Missing | Self::Error)
            | (Self::Missing, Self::Missing | Self::Stopping | Self::Stopped)
            | (Self::Error, Self::Error | Self::Stopping | Self::Stopped | Self::Missing) => false,
        }
    }
}

/// Who a node is: what it says of itself when it joins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeIdentity {
    pub id: NodeId,
    pub name: String,
    pub ip: String,
    pub release: String,
    pub simulated: bool,
    pub is_hypervisor: bool,
    pub is_network_node: bool,
    pub is_database_node: bool,
}

/// What a node observed of itself just now.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct NodeReport {
    /// The `resources` event: processors, memory, disks, load.
    pub resources: Map<String, Value>,
    /// Processor use of the daemon's processes.
    pub process_metrics: Map<String, Value>,
}

/// A future that a node hands out.
pub type NodeFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// Everything that the control plane may ask of a node. Implemented by this machine, by another machine
/// over HTTP, and by a simulated node.
pub trait NodeApi: Send + Sync {
    fn identity(&self) -> &NodeIdentity;

    /// Looks at the machine and reports.
    fn report(&self) -> NodeFuture<'_, NodeReport>;
}

/// A node as the API answers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NodeRecord {
    pub uuid: NodeId,
    pub name: String,
    pub fqdn: String,
    pub ip: String,
    pub state: NodeState,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    pub version: i64,
    /// Unix time of the last check-in.
    pub lastseen: f64,
    pub release: String,
    pub is_hypervisor: bool,
    pub is_network_node: bool,
    pub is_database_node: bool,
    pub is_etcd_master: bool,
    pub is_eventlog_node: bool,
    pub is_cluster_maintainer: bool,
    /// Whether the node is made up by `--simulate`.
    pub simulated: bool,
    #[schema(value_type = Object)]
    pub references_to: std::collections::BTreeMap<String, Vec<Reference>>,
    #[schema(value_type = Object)]
    pub references_from: std::collections::BTreeMap<String, Vec<Reference>>,
}
