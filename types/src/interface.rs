//! Network interfaces of instances.
//!
//! ```text
//! initial ──instance built──▶ created ──▶ deleted ──cleaner──▶ (row removed)
//!    └────────────┬──────────────┘  ▲
//!                 └──▶ error ───────┘ (deleted)
//! ```

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::address::MacAddress;
use crate::ids::{InstanceId, InterfaceId, NetworkId};
use crate::object::string_enum;

string_enum! {
    /// The lifecycle of an interface.
    InterfaceState {
        Initial = "initial",
        Created = "created",
        Error = "error",
        Deleted = "deleted",
    }
}

impl InterfaceState {
    /// Returns whether an interface may change from this state to `next`.
    #[must_use]
    pub fn can_transition_to(self, next: Self) -> bool {
        match (self, next) {
            (Self::Initial, Self::Created | Self::Error | Self::Deleted)
            | (Self::Created, Self::Error | Self::Deleted)
            | (Self::Error, Self::Deleted) => true,
            (Self::Initial, Self::Initial)
            | (Self::Created, Self::Initial | Self::Created)
            | (Self::Error, Self::Initial | Self::Created | Self::Error)
            | (Self::Deleted, _) => false,
        }
    }
}

impl InterfaceId {
    /// Returns the name of the tap device on the node.
    #[must_use]
    pub fn device(self) -> String {
        // The kernel allows 15 characters.
        format!("tap{}", &self.0.simple().to_string()[..12])
    }
}

/// An interface as the API returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct InterfaceRecord {
    /// UUID of the interface.
    pub uuid: InterfaceId,
    /// The instance that has the interface.
    pub instance_uuid: InstanceId,
    /// The network that the interface is connected to.
    pub network_uuid: NetworkId,
    /// The MAC address.
    #[schema(value_type = String)]
    pub macaddr: MacAddress,
    /// `null` if the interface was requested without an address.
    #[schema(value_type = Option<String>)]
    pub ipv4: Option<Ipv4Addr>,
    /// The floating address that is translated to `ipv4`.
    #[schema(value_type = Option<String>)]
    pub floating: Option<Ipv4Addr>,
    /// The model of the network card, such as `virtio`.
    pub model: String,
    /// The position among the interfaces of the instance; the first is 0.
    pub order: i64,
    /// The state of the interface.
    pub state: InterfaceState,
    /// User-defined metadata: any JSON values by key.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    /// The version of the record format; released clients expect it.
    pub version: i64,
}
