//! Nodes, and the interface between the control plane and a node. See docs/decisions/0011.
//!
//! ```text
//! created ◀──check-in──▶ stopping ──▶ stopped
//!    │  ▲
//!    ▼  │ check-in
//! missing ──ten times as long──▶ error        any state but deleted ──delete──▶ deleted
//! ```

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::Result;
use crate::guest::GuestApi;
use crate::host_check::HostCheck;
use crate::ids::{ClusterId, InstanceId, NetworkId, NodeId, StorageId};
use crate::network::{NetworkPlan, NetworkReport, NetworkUsage, PingResult};
pub use crate::node_future::NodeFuture;
use crate::object::{Reference, string_enum};
use crate::operation::OperationHandle;
use crate::shared_storage::SharedStorageRecord;
use crate::storage::StorageApi;
use crate::time::BootTime;
use crate::vm::{DisplayIdentity, VmApi};

string_enum! {
    /// The lifecycle state of a node.
    NodeState {
        /// It is alive.
        Created = "created",
        /// Its daemon is shutting down.
        Stopping = "stopping",
        /// Its daemon was shut down.
        Stopped = "stopped",
        /// It has not checked in recently.
        Missing = "missing",
        /// It has been missing for a long time.
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
    /// The checks of the host that did not pass.
    #[serde(default)]
    pub checks: Vec<HostCheck>,
    /// The MTU of the path to the other nodes.
    #[serde(default)]
    pub mesh_mtu: Option<u32>,
    /// The URL at which the node's daemon serves the API to the other nodes.
    #[serde(default)]
    pub api_url: String,
    /// The address at which the node's daemon serves the calls of other daemons.
    #[serde(default)]
    pub node_address: Option<SocketAddr>,
    /// Set while the node reaches the database but not its peers.
    #[serde(default)]
    pub degraded: Option<NodeDegradation>,
    /// Set on a node that serves displays over TLS.
    #[serde(default, rename = "screens")]
    pub display: Option<DisplayIdentity>,
    /// The number of seconds after its last check-in when a watchdog stops the VMs of the node whose instances follow the
    /// policy of the cluster; unset if they keep running.
    #[serde(default)]
    pub fencing_lease: Option<f64>,
    /// The same for the VMs whose instances have their own policy `self`; unset without a watchdog.
    #[serde(default)]
    pub instance_fencing_lease: Option<f64>,
    /// The address of the TCP ports of consoles, if it is not the node's address.
    #[serde(default)]
    pub console_address: Option<Ipv4Addr>,
    /// The storage that the node shares with others; unset without `SHARED_STORAGE`.
    #[serde(default)]
    pub shared_storage: Option<SharedStorageRecord>,
}

/// Why a node gets no new instances although it is alive.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NodeDegradation {
    /// What is wrong.
    pub reason: String,
    /// Unix time since when.
    pub since: f64,
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
        /// Serving the API to the other nodes.
        Api = "api",
    }
}

/// The interface between the control plane and a node. Implemented by this host and by simulated nodes.
pub trait NodeApi: Send + Sync {
    fn identity(&self) -> &NodeIdentity;

    /// Inspects the host.
    fn report(&self) -> NodeFuture<'_, NodeReport>;

    /// Inspects the shared storage of the node; `None` if it has none. `registered` is the storage that the cluster knows at its
    /// path. Without one, the storage gets its marker if it has none.
    fn inspect_shared_storage(
        &self,
        cluster: ClusterId,
        registered: Option<StorageId>,
    ) -> NodeFuture<'_, Option<SharedStorageRecord>>;

    /// Renews the fencing lease of the node after a successful check-in, which began at `began`.
    fn renew_fencing_lease(&self, began: BootTime) -> Result<()>;

    /// Ends the fencing lease, because the daemon stops: VMs keep running.
    fn end_fencing_lease(&self) -> Result<()>;

    /// Reconciles networks with their plans, independently of each other: one failure does not affect the others.
    /// Networks that are in sync are not touched, so this may be called at any time.
    fn ensure_networks<'a>(&'a self, plans: &'a [NetworkPlan]) -> NodeFuture<'a, Vec<Result<NetworkReport>>>;

    /// Opens or closes the gate of this node's routers. Opening it also acquires the virtual address of the cluster and
    /// announces the addresses of the routers; closing it releases the virtual address.
    fn set_router_gate(&self, gate: RouterGate) -> NodeFuture<'_, ()>;

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

/// Whether the routers of a node may send and receive packets. See docs/decisions/0054.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterGate {
    /// They may not.
    Closed,
    /// They may until `close_at`. The kernel closes the gate by itself then, even if the daemon does not run.
    OpenUntil {
        close_at: Instant,
        /// The time from which on another node may open its gate.
        lease_end: Instant,
    },
    /// They may, also while the daemon does not run. No other node can take over.
    Open,
}

impl RouterGate {
    /// Returns whether the gate is open now.
    #[must_use]
    pub fn is_open(self) -> bool {
        match self {
            Self::Closed => false,
            Self::OpenUntil { close_at, .. } => Instant::now() < close_at,
            Self::Open => true,
        }
    }
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
    /// UUID of the node.
    pub uuid: NodeId,
    /// The name of the node.
    pub name: String,
    /// The same as `name`.
    pub fqdn: String,
    /// The address of the node on the mesh.
    pub ip: String,
    /// The state of the node.
    pub state: NodeState,
    /// User-defined metadata: any JSON values by key.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    /// The version of the record format; released clients expect it.
    pub version: i64,
    /// Unix time of the last check-in.
    pub lastseen: f64,
    /// The version of Muster that the node runs.
    pub release: String,
    /// Whether the node runs instances.
    pub is_hypervisor: bool,
    /// Whether the node runs the routers of networks.
    pub is_network_node: bool,
    /// Whether the node is configured as a database node (`NODE_IS_DATABASE_NODE`).
    pub is_database_node: bool,
    /// Always false; released clients expect it.
    pub is_etcd_master: bool,
    /// Always false; released clients expect it.
    pub is_eventlog_node: bool,
    /// Whether the daemon of the node runs the tasks that run once per cluster.
    pub is_cluster_maintainer: bool,
    /// Whether the node is the active network node: its routers send and receive packets.
    #[serde(default)]
    pub is_active_network_node: bool,
    /// Whether the node is simulated (`--simulate`).
    pub simulated: bool,
    /// The certificate subject by which viewers verify the displays of the node's instances.
    #[serde(default)]
    pub spice_server_cert_subject: Option<String>,
    /// The seconds by which the clock of the host is ahead of that of the database, measured at the last check-in. Above 1
    /// a warning is recorded; above 5 the node acquires no leases and creates no tokens.
    #[serde(default)]
    pub clock_skew: f64,
    /// The number that is incremented when the daemon of the node starts, and when the cluster fences the node.
    #[serde(default)]
    pub epoch: i64,
    /// Unix time at which the daemon of the node started.
    #[serde(default)]
    pub started: f64,
    /// The features that the host lacks, each with the reason.
    #[serde(default)]
    pub limits: BTreeMap<String, String>,
    /// The checks of the host that did not pass, with what fixes them.
    #[serde(default)]
    pub checks: Vec<HostCheck>,
    /// Set while the node is alive but does not reach its peers. It gets no new instances then.
    #[serde(default)]
    pub degraded: Option<NodeDegradation>,
    /// Set while the node gets no new instances by request.
    #[serde(default)]
    pub cordon: Option<NodeCordon>,
    /// The number of seconds after its last check-in when watchdogs stop its VMs with self-fencing; `null` if it has none or that
    /// is not certain.
    #[serde(default)]
    pub fencing_lease: Option<f64>,
    /// The storage that the node shares with others; `null` without `SHARED_STORAGE`.
    #[serde(default)]
    pub shared_storage: Option<SharedStorageRecord>,
    /// The objects that refer to this one, by relationship.
    pub references_to: BTreeMap<String, Vec<Reference>>,
    /// The objects that this one refers to, by relationship.
    pub references_from: BTreeMap<String, Vec<Reference>>,
}

string_enum! {
    /// Why a node gets no new instances by request.
    CordonReason {
        /// Its instances move to other nodes.
        Drain = "drain",
        /// Its instances stay.
        Maintenance = "maintenance",
    }
}

/// A request that a node gets no new instances.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NodeCordon {
    /// Why it gets none.
    pub reason: CordonReason,
    /// Unix time of the request.
    pub since: f64,
    /// Whether instances that cannot be migrated while they run are powered off, and started on other nodes.
    pub stop: bool,
}

string_enum! {
    /// What happens to an instance of a node that is drained.
    DrainOutcome {
        /// It is migrated while it runs.
        Migrate = "migrate",
        /// It is off: its disks are copied.
        Copy = "copy",
        /// It is powered off, copied, and started on its new node.
        Restart = "restart",
        /// Another operation of it is not finished: it is migrated later.
        Wait = "wait",
        /// It stays on the node.
        Blocked = "blocked",
    }
}

/// What happens to one instance of a node that is drained.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainedInstance {
    /// UUID of the instance.
    pub instance_uuid: InstanceId,
    /// The name of the instance.
    pub name: String,
    /// The namespace that owns it.
    pub namespace: String,
    /// What happens to it.
    pub outcome: DrainOutcome,
    /// The name of the node that it is expected to move to; `null` if it has none.
    pub node: Option<String>,
    /// Why it waits or stays; `null` if it does not.
    pub reason: Option<String>,
}

/// The forecast of a drain, and its operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainRecord {
    /// What happens to each instance of the node.
    pub instances: Vec<DrainedInstance>,
    /// The operation that completes when the node has no instances; `null` for a forecast only.
    pub operation: Option<OperationHandle>,
}

string_enum! {
    /// What happens to an instance of a dead node.
    EvacuationOutcome {
        /// It is being created again on another node.
        Evacuating = "evacuating",
        /// It stays on the dead node, because no other node can run it or its evacuation failed; repeat the request later.
        Waiting = "waiting",
        /// It is in `error`, because its disks cannot be restored.
        Failed = "error",
        /// It was being deleted, and is deleted.
        Deleted = "deleted",
    }
}

/// What happens to one instance of a dead node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EvacuationRecord {
    /// UUID of the instance.
    pub instance_uuid: InstanceId,
    /// The name of the instance.
    pub name: String,
    /// The namespace that owns it.
    pub namespace: String,
    /// What happens to it.
    pub outcome: EvacuationOutcome,
    /// The name of its new node; `null` if it has none.
    pub node: Option<String>,
    /// What its disks are created from, or why it is not evacuated.
    pub reason: String,
}
