//! IPv4 addresses of networks: netblocks, MAC addresses and address allocations.
//! See docs/decisions/0012.

#[cfg(test)]
mod tests;

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::ids::NetworkId;
use crate::object::string_enum;
use crate::{Error, Result};

/// The maximum prefix length of a network, which leaves eight addresses.
pub const MAX_PREFIX_LEN: u8 = 29;
/// The minimum prefix length of a network.
pub const MIN_PREFIX_LEN: u8 = 8;

/// A block of IPv4 addresses, such as `10.0.0.0/24`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Netblock {
    first: u32,
    prefix: u8,
}

impl Netblock {
    /// Returns the network address, at index 0.
    #[must_use]
    pub fn network(self) -> Ipv4Addr {
        self.first.into()
    }

    #[must_use]
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    #[must_use]
    pub fn netmask(self) -> Ipv4Addr {
        self.mask().into()
    }

    /// Returns the number of addresses.
    #[must_use]
    pub fn size(self) -> u32 {
        1 << (32 - self.prefix)
    }

    /// Returns the router's address, at index 1.
    #[must_use]
    pub fn router(self) -> Ipv4Addr {
        (self.first + 1).into()
    }

    /// Returns the broadcast address, at the last index.
    #[must_use]
    pub fn broadcast(self) -> Ipv4Addr {
        (self.first + (self.size() - 1)).into()
    }

    #[must_use]
    pub fn contains(self, address: Ipv4Addr) -> bool {
        u32::from(address) & self.mask() == self.first
    }

    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.contains(other.network()) || other.contains(self.network())
    }

    fn mask(self) -> u32 {
        u32::MAX << (32 - self.prefix)
    }

    /// Parses a netblock that a network may have; the error names the field.
    pub fn check(text: &str) -> Result<Self> {
        let refuse = |why: String| Err(Error::Invalid(why));
        let bad = |why: &str| refuse(format!("cannot parse netblock: {why}"));
        let (address, prefix) = text.split_once('/').unwrap_or((text, "32"));
        let Ok(address) = address.parse::<Ipv4Addr>() else {
            if address.parse::<std::net::Ipv6Addr>().is_ok() {
                return bad(&format!("{} is not an IPv4 network", quoted(text)));
            }
            return bad(&format!("{} is not of the form 10.0.0.0/24", quoted(text)));
        };
        let number = prefix.parse::<u8>().ok().filter(|p| *p <= 32 && prefix == p.to_string());
        let Some(prefix) = number else {
            return bad(&format!("{} does not end in a prefix length of 0 to 32", quoted(text)));
        };
        if prefix > MAX_PREFIX_LEN {
            return refuse(format!("netblock: network is below minimum size of /{MAX_PREFIX_LEN}"));
        }
        if prefix < MIN_PREFIX_LEN {
            return refuse(format!("netblock: network is above maximum size of /{MIN_PREFIX_LEN}"));
        }
        let block = Self { first: u32::from(address), prefix };
        if block.first & !block.mask() != 0 {
            return bad(&format!("{text} has host bits set"));
        }
        for (special, what) in [
            ("0.0.0.0/8", "addresses of this host"),
            ("127.0.0.0/8", "loopback addresses"),
            ("169.254.0.0/16", "link-local addresses"),
            ("224.0.0.0/3", "multicast addresses"),
        ] {
            let special: Self = special.parse()?;
            if special.overlaps(block) {
                return refuse(format!("netblock: {text} holds {what}, which cannot be assigned"));
            }
        }
        Ok(block)
    }
}

/// Quotes the beginning of a client's text for an error message.
fn quoted(text: &str) -> String {
    format!("{:?}", text.chars().take(64).collect::<String>())
}

impl FromStr for Netblock {
    type Err = Error;

    /// Parses any block without host bits, also one that no network may have.
    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::Invalid(format!("{} is not an IPv4 block such as 10.0.0.0/24", quoted(text)));
        let (address, prefix) = text.split_once('/').ok_or_else(bad)?;
        let address: Ipv4Addr = address.parse().map_err(|_| bad())?;
        let prefix: u8 = prefix.parse().ok().filter(|p| (1..=32).contains(p)).ok_or_else(bad)?;
        let block = Self { first: u32::from(address), prefix };
        if block.first & !block.mask() == 0 { Ok(block) } else { Err(bad()) }
    }
}

impl TryFrom<String> for Netblock {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Netblock> for String {
    fn from(block: Netblock) -> Self {
        block.to_string()
    }
}

impl fmt::Display for Netblock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network(), self.prefix)
    }
}

/// An IPv4 address of a device with its prefix length, such as `192.0.2.9/24`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterfaceAddress {
    pub address: Ipv4Addr,
    pub prefix: u8,
}

impl FromStr for InterfaceAddress {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let bad =
            || format!("{text:?} is not an address of a device with prefix length, such as 192.0.2.9/24");
        let (address, prefix) = text.split_once('/').ok_or_else(bad)?;
        let address: Ipv4Addr = address.parse().map_err(|_| bad())?;
        let prefix: u8 = prefix.parse().ok().filter(|prefix| (1..=32).contains(prefix)).ok_or_else(bad)?;
        let host_bits = u32::MAX.checked_shr(prefix.into()).unwrap_or(0);
        let host = address.to_bits() & host_bits;
        // The first and the last address of a block belong to no device, except in blocks of one or two addresses.
        let is_reserved = prefix < 31 && (host == 0 || host == host_bits);
        let is_unicast = !address.is_unspecified() && !address.is_multicast() && !address.is_broadcast();
        if is_reserved || !is_unicast || address.is_loopback() {
            return Err(bad());
        }
        Ok(Self { address, prefix })
    }
}

impl fmt::Display for InterfaceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// The MAC address of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// Creates a random address of the form `02:00:00:xx:xx:xx`.
    #[must_use]
    pub fn random() -> Self {
        let [a, b, c, ..] = uuid::Uuid::new_v4().into_bytes();
        Self([0x02, 0, 0, a, b, c])
    }
}

impl FromStr for MacAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::Invalid("macaddress: String does not match expected pattern.".into());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part =
                parts.next().filter(|part| part.len() == 2 && part.chars().all(|c| c.is_ascii_hexdigit()));
            *byte = part.and_then(|part| u8::from_str_radix(part, 16).ok()).ok_or_else(bad)?;
        }
        if parts.next().is_some() { Err(bad()) } else { Ok(Self(bytes)) }
    }
}

impl TryFrom<String> for MacAddress {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<MacAddress> for String {
    fn from(mac: MacAddress) -> Self {
        mac.to_string()
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

string_enum! {
    /// The purpose of an allocated address.
    AddressType {
        Network = "network",
        Broadcast = "broadcast",
        /// The network's router, or on the floating network the external address of a network's NAT.
        Gateway = "gateway",
        /// The floating address of an interface, on the floating network.
        Floating = "floating",
        /// Routed to a network without translation.
        Routed = "routed",
        /// The address of an instance's interface.
        Instance = "instance",
        /// Reserved by a user.
        Manual = "manual",
        /// Released recently and quarantined, so that its old and its new owner are not confused.
        Halo = "deletion-halo",
    }
}

/// An allocated address as the API returns it, with all field names that released clients read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AddressRecord {
    /// The IPv4 address.
    #[schema(value_type = String)]
    pub address: Ipv4Addr,
    /// What the address is used for.
    #[serde(rename = "type")]
    pub kind: AddressType,
    /// The same as `type`.
    pub reservation_type: AddressType,
    /// The type and id of its owner; empty without one, because released clients join the elements.
    pub user: Vec<String>,
    /// The type of the object that uses the address, such as `instance`; `null` without one.
    pub user_type: Option<String>,
    /// The id of the object that uses the address; `null` without one.
    pub user_uuid: Option<String>,
    /// The purpose of a manual reservation; empty for others.
    pub comment: String,
    /// Unix time.
    pub when: f64,
    /// The same as `when`.
    pub reserved_at: f64,
    /// The network that the address belongs to.
    pub ipam_uuid: NetworkId,
}
