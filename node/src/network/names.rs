//! What the parts of a network are called on a node, and the marker that proves that they are Muster's.

use std::path::{Path, PathBuf};

use muster_types::ids::NetworkId;
use muster_types::network::MAX_VXID;

/// Below it every network has a folder. It goes with the machine's memory, as the devices do.
const FOLDERS: &str = "/run/muster/networks";
const COMMON: &str = "/run/muster";
/// The longest name that the kernel takes for a device.
const LONGEST_DEVICE: usize = 15;
const MARKER: &str = "muster:";
/// How the names of bridges begin where routers meet the world.
pub(crate) const EGRESS_BRIDGE: &str = "egr-br-";

/// Where nodes listen for each other's frames. Whoever may speak to it may speak in every network.
pub(crate) const VXLAN_PORT: u16 = 4789;

/// The rule set in a router.
pub(crate) const ROUTER_TABLE: &str = "muster";
/// The rule set on the node around the floating network: what may come from it, and behind whom it hides.
pub(crate) const EGRESS_TABLE: &str = "muster-egress";

/// The names of one network's parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Names {
    pub(crate) bridge: String,
    pub(crate) vxlan: String,
    /// Between the bridge and the router: `outer` on the node, `inner` in the router.
    pub(crate) veth_outer: String,
    pub(crate) veth_inner: String,
    /// Between the egress bridge and the router.
    pub(crate) egress_outer: String,
    pub(crate) egress_inner: String,
    /// The rule set on the node.
    pub(crate) table: String,
}

impl Names {
    pub(crate) fn new(vxid: u32) -> Self {
        Self {
            bridge: format!("br-vxlan-{vxid:06x}"),
            vxlan: format!("vxlan-{vxid:06x}"),
            veth_outer: format!("veth-{vxid:06x}-o"),
            veth_inner: format!("veth-{vxid:06x}-i"),
            egress_outer: format!("egr-{vxid:06x}-o"),
            egress_inner: format!("egr-{vxid:06x}-i"),
            table: format!("muster-{vxid:06x}"),
        }
    }

    /// The devices on the node, with the kind that each is of, in the order in which they may go.
    pub(crate) fn devices(&self) -> [(&str, &'static str); 4] {
        [
            (&self.egress_outer, "veth"),
            (&self.veth_outer, "veth"),
            (&self.vxlan, "vxlan"),
            (&self.bridge, "bridge"),
        ]
    }
}

/// The number of the network that a device of this name belongs to.
pub(crate) fn vxid_of_device(name: &str) -> Option<u32> {
    let middle = |start: &str, end: &str| name.strip_prefix(start)?.strip_suffix(end);
    let digits = middle("br-vxlan-", "")
        .or_else(|| middle("vxlan-", ""))
        .or_else(|| middle("veth-", "-o"))
        .or_else(|| middle("veth-", "-i"))
        .or_else(|| middle("egr-", "-o"))
        .or_else(|| middle("egr-", "-i"))?;
    vxid(digits)
}

/// The number of the network that a rule set of this name belongs to.
pub(crate) fn vxid_of_table(name: &str) -> Option<u32> {
    vxid(name.strip_prefix("muster-")?)
}

fn vxid(digits: &str) -> Option<u32> {
    let lower = digits.len() == 6 && digits.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c));
    u32::from_str_radix(digits, 16).ok().filter(|vxid| lower && *vxid <= MAX_VXID)
}

/// The bridge where routers meet the world.
pub(crate) fn egress_bridge(nic: &str) -> String {
    format!("{EGRESS_BRIDGE}{nic}").chars().take(LONGEST_DEVICE).collect()
}

/// What the alias of a device says if it belongs to this network.
pub(crate) fn marker(network: NetworkId) -> String {
    format!("{MARKER}{network}")
}

/// Whose a device is, by its alias.
pub(crate) fn marked(alias: &str) -> Option<NetworkId> {
    alias.strip_prefix(MARKER)?.parse().ok()
}

/// Where the network's files are.
pub(crate) fn folder(network: NetworkId) -> PathBuf {
    Path::new(FOLDERS).join(network.to_string())
}

pub(crate) fn folders() -> &'static Path {
    Path::new(FOLDERS)
}

/// The folder of what is no network's.
pub(crate) fn common_folder() -> &'static Path {
    Path::new(COMMON)
}

/// The hardware address of a router towards its network. It stays the same wherever the router is made, so that
/// guests need not notice.
pub(crate) fn router_mac(network: NetworkId) -> [u8; 6] {
    mac(0x0a, network)
}

/// The hardware address of a router towards the world.
pub(crate) fn egress_mac(network: NetworkId) -> [u8; 6] {
    mac(0x0e, network)
}

fn mac(first: u8, network: NetworkId) -> [u8; 6] {
    let [a, b, c, d, e, ..] = network.0.into_bytes();
    [first, a, b, c, d, e]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_leads_back_to_its_network() {
        let names = Names::new(0x0a_bc);
        assert_eq!(names.bridge, "br-vxlan-000abc");
        for name in [&names.bridge, &names.vxlan, &names.veth_outer, &names.veth_inner, &names.egress_inner] {
            assert!(name.len() <= LONGEST_DEVICE);
            assert_eq!(vxid_of_device(name), Some(0x0a_bc), "{name}");
        }
        assert_eq!(vxid_of_table(&names.table), Some(0x0a_bc));
        for name in
            ["br-vxlan-", "vxlan-1", "vxlan-00000G", "vxlan-00000A", "veth-000001-x", "eth0", "vxlan-0000001"]
        {
            assert_eq!(vxid_of_device(name), None, "{name}");
        }
        assert_eq!(vxid_of_table(EGRESS_TABLE), None);
    }

    #[test]
    fn a_marker_names_its_network() {
        let network = NetworkId::new();
        assert_eq!(marked(&marker(network)), Some(network));
        assert_eq!(marked("muster:"), None);
        assert_eq!(marked("uplink"), None);
        assert_eq!(egress_bridge("enp130s0f0np0"), "egr-br-enp130s0");
    }
}
