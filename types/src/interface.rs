//! Interfaces: where an instance meets a network.
//!
//! ```text
//! initial ──instance built──▶ created ──▶ deleted ──cleaner──▶ (row gone)
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
    /// The life of an interface.
    InterfaceState {
        Initial = "initial",
        Created = "created",
        Error = "error",
        Deleted = "deleted",
    }
}

impl InterfaceState {
    /// Whether an interface may go from here to `next`.
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
    /// The name of the device on its node.
    #[must_use]
    pub fn device(self) -> String {
        // Fifteen characters are all that the kernel takes.
        format!("tap{}", &self.0.simple().to_string()[..12])
    }
}

/// An interface as the API answers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct InterfaceRecord {
    pub uuid: InterfaceId,
    pub instance_uuid: InstanceId,
    pub network_uuid: NetworkId,
    #[schema(value_type = String)]
    pub macaddr: MacAddress,
    /// Absent for an interface that was asked for without an address.
    #[schema(value_type = Option<String>)]
    pub ipv4: Option<Ipv4Addr>,
    /// The floating address that stands for it.
    #[schema(value_type = Option<String>)]
    pub floating: Option<Ipv4Addr>,
    pub model: String,
    pub order: i64,
    pub state: InterfaceState,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    pub version: i64,
}
