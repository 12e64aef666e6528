//! Nodes, and the interface between the control plane and a node. See docs/decisions/0011.
//!
//! ```text
//! created ◀──check-in──▶ stopping ──▶ stopped
//!    │  ▲
//!    ▼  │ check-in
//! missing ──ten times as long──▶ error        any state but deleted ──delete──▶ deleted
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
use crate::object::{Reference, string_enum};
use crate::storage::StorageApi;
use crate::vm::{DisplayIdentity, VmApi};

string_enum! {
    /// The lifecycle state of a node.
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
    /// Returns whether a node may change from this state to `next`.
    #[must_use]
    pub fn can_transition_to(self, next: Self) -> bool {
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

/// The identity that a node announces when it joins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeIdentity {
    pub id: NodeId,
    pub name: String,
    pub ip: Ipv4Addr,
    pub release: String,
    pub simulated: bool,
    pub is_hypervisor: bool,
    pub is_network_node: bool,
    pub is_database_node: bool,
}

/// A node's current observations of its host.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct NodeReport {
    /// The `resources` event: CPUs, memory, disks, load.
    pub resources: Map<String, Value>,
    /// CPU usage of the daemon.
    pub process_metrics: Map<String, Value>,
    /// The features that the host lacks, each with the reason.
    #[serde(default)]
    pub limits: BTreeMap<HostFeature, String>,
    /// The MTU of the path to the other nodes.
    #[serde(default)]
    pub mesh_mtu: Option<u32>,
    /// The URL at which the node's daemon serves the API to the other nodes.
    #[serde(default)]
    pub api_url: String,
    /// Set on a node that serves displays over TLS.
    #[serde(default, rename = "screens")]
    pub display: Option<DisplayIdentity>,
}

string_enum! {
    /// A feature that a host may lack.
    HostFeature {
        /// Bridges, tunnels, firewall rules, DHCP and DNS.
        Networks = "networks",
        /// Tap devices, which connect guests to networks.
        Taps = "taps",
        /// Inspecting and converting disk images.
        Images = "images",
        /// Running VMs.
        Vms = "machines",
        /// Running VMs with hardware virtualization.
        Kvm = "kvm",
    }
}

/// The future returned by every call to a node.
pub type NodeFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// The interface between the control plane and a node. Implemented by this host and by simulated nodes.
pub trait NodeApi: Send + Sync {
    fn identity(&self) -> &NodeIdentity;

    /// Inspects the host.
    fn report(&self) -> NodeFuture<'_, NodeReport>;

    /// Reconciles networks with their plans, independently of each other: one failure does not affect the others.
    /// Networks that are in sync are not touched, so this may be called at any time.
    fn ensure_networks<'a>(&'a self, plans: &'a [NetworkPlan]) -> NodeFuture<'a, Vec<Result<NetworkReport>>>;

    /// Removes everything that this node has of a network. Succeeds if there is nothing.
    fn remove_network(&self, network: FoundNetwork) -> NodeFuture<'_, ()>;

    /// Returns every network of which this node has at least some devices or rules, expected or not.
    fn list_networks(&self) -> NodeFuture<'_, Vec<FoundNetwork>>;

    /// Pings an address from the router of a network.
    fn ping(&self, network: NetworkId, address: Ipv4Addr) -> NodeFuture<'_, PingResult>;

    /// Returns the node's storage.
    fn storage(&self) -> &dyn StorageApi;

    /// Returns the node's VMs.
    fn vms(&self) -> &dyn VmApi;

    /// Returns the agents inside the node's VMs.
    fn guests(&self) -> &dyn GuestApi;

    /// Returns the traffic counters of a network's router, or `None` if the router is not on this node.
    fn network_usage(&self, network: FoundNetwork) -> NodeFuture<'_, Option<NetworkUsage>>;
}

/// A network of which a node has at least some devices or rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FoundNetwork {
    pub id: NetworkId,
    pub vxid: u32,
}

/// A node in API responses.
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
    /// Whether the node is simulated (`--simulate`).
    pub simulated: bool,
    /// The certificate subject by which viewers verify the displays of the node's instances.
    #[serde(default)]
    pub spice_server_cert_subject: Option<String>,
    /// The features that the host lacks, each with the reason.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub limits: BTreeMap<String, String>,
    #[schema(value_type = Object)]
    pub references_to: BTreeMap<String, Vec<Reference>>,
    #[schema(value_type = Object)]
    pub references_from: BTreeMap<String, Vec<Reference>>,
}
