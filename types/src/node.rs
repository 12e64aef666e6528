//! Nodes, and the seam between the control plane and a node.
//!
//! ```text
//! created ◀──check-in──▶ stopping ──▶ stopped
//!    │  ▲
//!    ▼  │ check-in
//! missing ──ten times as long──▶ error        any but deleted ──delete──▶ deleted
//! ```

use std::collections::BTreeMap;
use std::future::Future;
use std::net::Ipv4Addr;
use std::pin::Pin;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::Result;
use crate::guest::GuestApi;
use crate::ids::{NetworkId, NodeId};
use crate::network::{NetworkPlan, NetworkReport, NetworkUsage, PingResult};
use crate::object::{Reference, words};
use crate::storage::StorageApi;
use crate::vm::{DisplayIdentity, VmApi};

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
    /// What this machine cannot do, and why.
    #[serde(default)]
    pub limits: BTreeMap<Limit, String>,
    /// The largest frame that the way to the other nodes takes.
    #[serde(default)]
    pub mesh_mtu: Option<u32>,
    /// Where the node's daemon serves the API to the other nodes.
    #[serde(default)]
    pub api_url: String,
    /// Of a node whose screens speak TLS.
    #[serde(default)]
    pub screens: Option<DisplayIdentity>,
}

words! {
    /// Something that not every machine can do.
    Limit {
        /// Bridges, tunnels, rules and name servers.
        Networks = "networks",
        /// Devices that connect a guest to a network.
        Taps = "taps",
        /// Looking at and converting disk images.
        Images = "images",
        /// Running machines.
        VmApi = "machines",
        /// Running machines at full speed.
        Kvm = "kvm",
    }
}

/// A future that a node hands out.
pub type NodeFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// Everything that the control plane may ask of a node. Implemented by this machine, by another machine
/// over HTTP, and by a simulated node.
pub trait NodeApi: Send + Sync {
    fn identity(&self) -> &NodeIdentity;

    /// Looks at the machine and reports.
    fn report(&self) -> NodeFuture<'_, NodeReport>;

    /// Makes networks be as their plans say, each on its own: one that fails does not hold up the others. What
    /// already is as it should be is left alone, so that this may be called at any time.
    fn ensure_networks<'a>(&'a self, plans: &'a [NetworkPlan]) -> NodeFuture<'a, Vec<Result<NetworkReport>>>;

    /// Removes everything that this node has of a network. Nothing there is no error.
    fn remove_network(&self, network: FoundNetwork) -> NodeFuture<'_, ()>;

    /// The networks of which this node has something, whether it should or not.
    fn find_networks(&self) -> NodeFuture<'_, Vec<FoundNetwork>>;

    /// Pings an address from the router of a network.
    fn ping(&self, network: NetworkId, address: Ipv4Addr) -> NodeFuture<'_, PingResult>;

    /// Its disk.
    fn storage(&self) -> &dyn StorageApi;

    /// Its machines.
    fn vms(&self) -> &dyn VmApi;

    /// What runs inside its machines.
    fn guests(&self) -> &dyn GuestApi;

    /// What passed the router of a network; nothing if it is not here.
    fn network_usage(&self, network: FoundNetwork) -> NodeFuture<'_, Option<NetworkUsage>>;
}

/// A network by what is left of it on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FoundNetwork {
    pub id: NetworkId,
    pub vxid: u32,
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
    /// Whom viewers should find behind the screens of the node's instances.
    #[serde(default)]
    pub spice_server_cert_subject: Option<String>,
    /// What the machine cannot do, and why.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub limits: BTreeMap<String, String>,
    #[schema(value_type = Object)]
    pub references_to: BTreeMap<String, Vec<Reference>>,
    #[schema(value_type = Object)]
    pub references_from: BTreeMap<String, Vec<Reference>>,
}
