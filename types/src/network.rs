//! Networks, and the plan of a network for one node. See docs/decisions/0011 and 0013.
//!
//! ```text
//! initial ─────set up on the network node────▶ created
//!    │  └────────setup failed────────▶ error ◀──┘ │
//!    └─────────────────┬────────────────┴─────────┘
//!                   delete
//!                      ▼
//!                 delete-wait ──removed everywhere──▶ deleted ──cleaner──▶ (row removed)
//! ```

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;
use uuid::{Uuid, uuid};

use crate::address::{MacAddress, Netblock};
use crate::ids::{InterfaceId, NetworkId};
use crate::object::{self, Reference, string_enum};
use crate::operation::OperationHandle;
use crate::{Error, Result};

/// The network of floating addresses. It belongs to no namespace.
pub const FLOATING_NETWORK_ID: NetworkId = NetworkId(FLOATING_UUID);
const FLOATING_UUID: Uuid = uuid!("f10a7f10-a7f1-4a7f-a10a-7f10a7f10a7f");

/// The maximum VXLAN id.
pub const MAX_VXID: u32 = (1 << 24) - 1;
/// The number of bytes that VXLAN adds to every frame.
pub const VXLAN_OVERHEAD: u32 = 50;

string_enum! {
    /// The lifecycle of a network.
    NetworkState {
        /// It is being set up.
        Initial = "initial",
        /// It can be used.
        Created = "created",
        /// Its setup failed; see `error_message`.
        Error = "error",
        /// It is deleted once its interfaces are.
        DeleteWait = "delete-wait",
        Deleted = "deleted",
    }
}

impl NetworkState {
    /// Returns whether a network may change from this state to `next`.
    #[must_use]
    pub fn can_transition_to(self, next: Self) -> bool {
        match (self, next) {
            (Self::Initial, Self::Created | Self::Error | Self::DeleteWait)
            | (Self::Created, Self::Error | Self::DeleteWait)
            | (Self::Error, Self::DeleteWait)
            | (Self::DeleteWait, Self::Deleted) => true,
            (Self::Initial, Self::Initial | Self::Deleted)
            | (Self::Created, Self::Initial | Self::Created | Self::Deleted)
            | (Self::Error, Self::Initial | Self::Created | Self::Error | Self::Deleted)
            | (Self::DeleteWait, Self::Initial | Self::Created | Self::Error | Self::DeleteWait)
            | (Self::Deleted, _) => false,
        }
    }
}

/// Checks the name of a new network.
pub fn check_name(name: &str) -> Result<()> {
    let bad = |why: &str| Err(Error::Invalid(format!("name: {why}")));
    if name.parse::<NetworkId>().is_ok() {
        return bad("must not be a UUID");
    }
    // `networks` is part of an API path, `floating` the name of the floating network.
    if name == "networks" || name == "floating" {
        return bad("must not be \"networks\" or \"floating\"");
    }
    object::check_name("name", name)
}

/// A network as the API returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NetworkRecord {
    /// UUID of the network.
    pub uuid: NetworkId,
    /// The name of the network.
    pub name: String,
    /// `null` for the floating network.
    pub namespace: Option<String>,
    /// The addresses of the network in CIDR notation, such as `10.0.0.0/24`.
    #[schema(value_type = String)]
    pub netblock: Netblock,
    /// Whether instances get their addresses by DHCP.
    pub provide_dhcp: bool,
    /// Whether instances reach external networks through NAT.
    pub provide_nat: bool,
    /// Whether the router resolves the names of instances and DNS entries.
    pub provide_dns: bool,
    /// The source address of the network's NAT on the external network.
    #[schema(value_type = Option<String>)]
    pub floating_gateway: Option<Ipv4Addr>,
    /// The VXLAN id of the network.
    pub vxid: i64,
    /// The same as `vxid`.
    pub vxlan_id: i64,
    /// The state of the network.
    pub state: NetworkState,
    /// Why the state is `error`.
    pub error_message: Option<String>,
    /// The last operation on it; `null` without one.
    pub last_cluster_operation: Option<OperationHandle>,
    /// User-defined metadata: any JSON values by key.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    /// The version of the record format; released clients expect it.
    pub version: i64,
    /// The objects that refer to this one, by relationship.
    pub references_to: BTreeMap<String, Vec<Reference>>,
    /// The objects that this one refers to, by relationship.
    pub references_from: BTreeMap<String, Vec<Reference>>,
}

/// The output of a ping.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PingResult {
    /// The output of `ping`, by line.
    pub stdout: Vec<String>,
    /// The error output of `ping`, by line.
    pub stderr: Vec<String>,
}

/// The complete desired state of a network on one node: anything else is removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkPlan {
    pub id: NetworkId,
    pub vxid: u32,
    /// Incremented with every change; a node refuses an older plan than it has applied.
    pub generation: i64,
    pub netblock: Netblock,
    /// The MTU inside the network.
    pub mtu: u32,
    /// This node's address in the mesh of nodes.
    pub mesh_address: Ipv4Addr,
    /// The mesh addresses of the other nodes of the network.
    pub peers: Vec<Ipv4Addr>,
    /// The mesh addresses of all nodes of the cluster. The host accepts VXLAN packets from these only.
    pub cluster_nodes: Vec<Ipv4Addr>,
    /// The interfaces on this node.
    pub ports: Vec<InterfacePlan>,
    /// Routed addresses, which any interface of the network may use.
    pub routed: Vec<Ipv4Addr>,
    /// Whether frames with forged sender addresses are dropped.
    pub check_senders: bool,
    /// Only on the network node.
    pub router: Option<RouterPlan>,
}

/// An interface on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfacePlan {
    pub interface: InterfaceId,
    pub mac: MacAddress,
    pub address: Option<Ipv4Addr>,
}

/// The services of a network on the network node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouterPlan {
    pub dhcp: bool,
    pub dns: bool,
    pub nat: bool,
    /// The DNS domain of the network.
    pub domain: String,
    /// The upstream resolver, or that of guests if the network has no DNS.
    pub dns_server: Ipv4Addr,
    /// Every interface with an address, on whichever node.
    pub leases: Vec<DhcpLease>,
    /// Additional host names.
    pub names: Vec<(String, Ipv4Addr)>,
    pub egress: EgressPlan,
}

/// The connection of a network to the external network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressPlan {
    /// The floating network.
    pub netblock: Netblock,
    /// The network's own address on the floating network.
    pub gateway: Option<Ipv4Addr>,
    /// Floating addresses and the inner addresses that they are translated to.
    pub floating: Vec<(Ipv4Addr, Ipv4Addr)>,
    /// Whether the node masquerades the floating network with its own address.
    pub masquerade: bool,
    /// The addresses of the other nodes, which are protected from guests like this one.
    pub nodes: Vec<Ipv4Addr>,
}

/// A static DHCP lease with a host name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DhcpLease {
    pub mac: MacAddress,
    pub address: Ipv4Addr,
    pub name: String,
}

/// The traffic of a network since its devices were created, as counted by the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NetworkUsage {
    pub rx: BTreeMap<&'static str, u64>,
    pub tx: BTreeMap<&'static str, u64>,
}

/// The result of reconciling a network on a node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NetworkReport {
    /// The repairs, in words for an event; empty if the network was in sync.
    pub repaired: Vec<String>,
    /// Why the DHCP and DNS server was restarted, if it had died.
    pub server_died: Option<String>,
}
