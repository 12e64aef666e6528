//! The names of a network's devices, rule sets and files on a host, and the marker that identifies them as Muster's.

use std::path::{Path, PathBuf};

use muster_types::ids::NetworkId;
use muster_types::network::MAX_VXID;

/// The parent of the networks' directories. Like the devices, it does not survive a reboot.
const NETWORKS_DIR: &str = "/run/muster/networks";
const RUNTIME_DIR: &str = "/run/muster";
/// The maximum length of a device name in the kernel.
const MAX_DEVICE_NAME: usize = 15;
const MARKER_PREFIX: &str = "muster:";
/// The prefix of the names of egress bridges.
pub(crate) const EGRESS_BRIDGE_PREFIX: &str = "egr-br-";

/// The UDP port of VXLAN. A sender that reaches it can inject frames into every network.
pub(crate) const VXLAN_PORT: u16 = 4789;

/// The rule set in a router.
pub(crate) const ROUTER_TABLE: &str = "muster";
/// The rule set on the host for the egress bridge: it filters traffic from the bridge, and masquerades.
pub(crate) const EGRESS_TABLE: &str = "muster-egress";

/// The rule set on the host that lets only nodes of the cluster send VXLAN packets to it.
pub(crate) const MESH_TABLE: &str = "muster-mesh";

/// The rule sets on the host that let routers send and receive packets only on the active network node.
pub(crate) const GATE_TABLE: &str = "muster-gate";

/// The names of one network's devices and rule set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NetworkNames {
    pub(crate) bridge: String,
    pub(crate) vxlan: String,
    /// The veth pair between the bridge and the router: `outer` on the host, `inner` in the router.
    pub(crate) veth_outer: String,
    pub(crate) veth_inner: String,
    /// The veth pair between the egress bridge and the router.
    pub(crate) egress_outer: String,
    pub(crate) egress_inner: String,
    /// The rule set on the host.
    pub(crate) table: String,
}

impl NetworkNames {
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

    /// Returns the devices on the host with their kinds, in the order in which they are removed.
    pub(crate) fn devices(&self) -> [(&str, &'static str); 4] {
        [
            (&self.egress_outer, "veth"),
            (&self.veth_outer, "veth"),
            (&self.vxlan, "vxlan"),
            (&self.bridge, "bridge"),
        ]
    }
}

/// Returns the VXLAN id in the name of a device.
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

/// Returns the VXLAN id in the name of a rule set.
pub(crate) fn vxid_of_table(name: &str) -> Option<u32> {
    vxid(name.strip_prefix("muster-")?)
}

fn vxid(digits: &str) -> Option<u32> {
    let is_canonical =
        digits.len() == 6 && digits.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c));
    u32::from_str_radix(digits, 16).ok().filter(|vxid| is_canonical && *vxid <= MAX_VXID)
}

/// Returns the name of the egress bridge for a network card.
pub(crate) fn egress_bridge(nic: &str) -> String {
    format!("{EGRESS_BRIDGE_PREFIX}{nic}").chars().take(MAX_DEVICE_NAME).collect()
}

/// Returns the alias of the devices of a network.
pub(crate) fn marker(network: NetworkId) -> String {
    format!("{MARKER_PREFIX}{network}")
}

/// Returns the network that a device belongs to, by its alias.
pub(crate) fn network_of_marker(alias: &str) -> Option<NetworkId> {
    alias.strip_prefix(MARKER_PREFIX)?.parse().ok()
}

/// Returns the directory of a network.
pub(crate) fn network_dir(network: NetworkId) -> PathBuf {
    Path::new(NETWORKS_DIR).join(network.to_string())
}

/// Returns the parent of the networks' directories.
pub(crate) fn networks_dir() -> &'static Path {
    Path::new(NETWORKS_DIR)
}

/// Returns the directory of files that all networks share.
pub(crate) fn runtime_dir() -> &'static Path {
    Path::new(RUNTIME_DIR)
}

/// Returns the MAC address of a router in its network. It does not depend on the host, so that guests do not notice when
/// the router moves.
pub(crate) fn router_mac(network: NetworkId) -> [u8; 6] {
    mac(0x0a, network)
}

/// Returns the MAC address of a router on the egress bridge.
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
    fn device_names_contain_the_vxlan_id() {
        let names = NetworkNames::new(0x0a_bc);
        assert_eq!(names.bridge, "br-vxlan-000abc");
        for name in [&names.bridge, &names.vxlan, &names.veth_outer, &names.veth_inner, &names.egress_inner] {
            assert!(name.len() <= MAX_DEVICE_NAME);
            assert_eq!(vxid_of_device(name), Some(0x0a_bc), "{name}");
        }
        assert_eq!(vxid_of_table(&names.table), Some(0x0a_bc));
        for name in
            ["br-vxlan-", "vxlan-1", "vxlan-00000G", "vxlan-00000A", "veth-000001-x", "eth0", "vxlan-0000001"]
        {
            assert_eq!(vxid_of_device(name), None, "{name}");
        }
        assert_eq!([EGRESS_TABLE, MESH_TABLE, GATE_TABLE].map(vxid_of_table), [None; 3]);
    }

    #[test]
    fn marker_identifies_the_network() {
        let network = NetworkId::new();
        assert_eq!(network_of_marker(&marker(network)), Some(network));
        assert_eq!(network_of_marker("muster:"), None);
        assert_eq!(network_of_marker("uplink"), None);
        assert_eq!(egress_bridge("enp130s0f0np0"), "egr-br-enp130s0");
    }
}
