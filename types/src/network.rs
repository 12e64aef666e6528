//! Networks, and what a network needs on one node.
//!
//! ```text
//! initial ──carried by the network node──▶ created
//!    │  └──────cannot be carried──▶ error ◀──┘ │
//!    └─────────────────┬──────────────┴────────┘
//!                   delete
//!                      ▼
//!                 delete-wait ──nothing of it left──▶ deleted ──cleaner──▶ (row gone)
//! ```

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;
use uuid::{Uuid, uuid};

use crate::address::{MacAddress, Netblock};
use crate::ids::{InterfaceId, NetworkId};
use crate::object::{self, Reference, words};
use crate::operation::OperationHandle;
use crate::{Error, Result};

/// The network whose addresses float. It belongs to no namespace.
pub const FLOATING: NetworkId = NetworkId(FLOATING_UUID);
const FLOATING_UUID: Uuid = uuid!("f10a7f10-a7f1-4a7f-a10a-7f10a7f10a7f");

/// The largest number that tells VXLANs apart.
pub const MAX_VXID: u32 = (1 << 24) - 1;
/// What VXLAN adds to every frame.
pub const VXLAN_OVERHEAD: u32 = 50;

words! {
    /// The life of a network.
    NetworkState {
        Initial = "initial",
        Created = "created",
        Error = "error",
        DeleteWait = "delete-wait",
        Deleted = "deleted",
    }
}

impl NetworkState {
    /// Whether a network may go from here to `next`.
    #[must_use]
    pub fn may_become(self, next: Self) -> bool {
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

/// Refuses a name that no network may have.
pub fn check_name(name: &str) -> Result<()> {
    let bad = |why: &str| Err(Error::Invalid(format!("name: {why}")));
    if name.parse::<NetworkId>().is_ok() {
        return bad("must not be a UUID");
    }
    // One is part of a path, the other the name of the network whose addresses float.
    if name == "networks" || name == "floating" {
        return bad("must not be \"networks\" or \"floating\"");
    }
    object::check_name("name", name)
}

/// A network as the API answers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NetworkRecord {
    pub uuid: NetworkId,
    pub name: String,
    /// Nothing for the floating network.
    pub namespace: Option<String>,
    #[schema(value_type = String)]
    pub netblock: Netblock,
    pub provide_dhcp: bool,
    pub provide_nat: bool,
    pub provide_dns: bool,
    /// The address that the outside sees when the network speaks.
    #[schema(value_type = Option<String>)]
    pub floating_gateway: Option<Ipv4Addr>,
    /// Which VXLAN carries it.
    pub vxid: i64,
    /// The same as `vxid`.
    pub vxlan_id: i64,
    pub state: NetworkState,
    /// Why the state is `error`.
    pub error_message: Option<String>,
    pub last_cluster_operation: Option<OperationHandle>,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    pub version: i64,
    #[schema(value_type = Object)]
    pub references_to: BTreeMap<String, Vec<Reference>>,
    #[schema(value_type = Object)]
    pub references_from: BTreeMap<String, Vec<Reference>>,
}

/// What a ping printed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PingResult {
    pub stdout: Vec<String>,
    pub stderr: Vec<String>,
}

/// What a network needs on one node, whole: whatever is not in it does not belong there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkPlan {
    pub id: NetworkId,
    pub vxid: u32,
    /// Counts the changes; a node refuses an older one than it has.
    pub generation: i64,
    pub netblock: Netblock,
    /// The largest packet inside the network.
    pub mtu: u32,
    /// This node's address towards the others.
    pub mesh_address: Ipv4Addr,
    /// The other nodes that take part.
    pub peers: Vec<Ipv4Addr>,
    /// The interfaces on this node.
    pub ports: Vec<InterfacePlan>,
    /// Addresses that any interface of the network may use beside its own.
    pub routed: Vec<Ipv4Addr>,
    /// Whether frames from interfaces are checked for forged senders.
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
    /// The resolver that is asked, or handed to guests.
    pub dns_server: String,
    /// Every interface with an address, wherever it is.
    pub leases: Vec<DhcpLease>,
    /// Further names.
    pub names: Vec<(String, Ipv4Addr)>,
    pub egress: EgressPlan,
}

/// How the network meets the world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressPlan {
    /// The floating network.
    pub netblock: Netblock,
    /// The network's own address there.
    pub gateway: Option<Ipv4Addr>,
    /// Floating address and the inner address that it stands for.
    pub floating: Vec<(Ipv4Addr, Ipv4Addr)>,
    /// Whether the node hides the floating network behind its own address.
    pub masquerade: bool,
    /// The addresses of the other nodes, of which guests reach as much as of this one.
    pub nodes: Vec<Ipv4Addr>,
}

/// Who gets which address, and its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DhcpLease {
    pub mac: MacAddress,
    pub address: Ipv4Addr,
    pub name: String,
}

/// Packets of a network since its devices exist, as the kernel counts them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NetworkUsage {
    pub rx: BTreeMap<&'static str, u64>,
    pub tx: BTreeMap<&'static str, u64>,
}

/// What a node found and did when it looked after a network.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NetworkReport {
    /// What had to be put right, in words for an event; empty when all was as it should be.
    pub repaired: Vec<String>,
    /// Why the DHCP and DNS server had to be started again, when it had died.
    pub server_died: Option<String>,
}
