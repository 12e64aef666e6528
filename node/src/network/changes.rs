//! The commands that bring a network in line with its plan: a pure comparison of plan and kernel state. Without a
//! difference there are no commands.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use muster_types::ids::NetworkId;
use muster_types::network::{NetworkPlan, RouterPlan};
use muster_types::{Error, Result};

use super::names::{
    NetworkNames, VXLAN_PORT, egress_mac, marker, network_of_marker, router_mac, vxid_of_device,
};
use super::observed::{FdbEntry, HostSnapshot, Link, Route, RouterSnapshot};

const FLOOD_MAC: [u8; 6] = [0; 6];
/// The MTU between a router and the external network, independent of the network's own.
const EGRESS_MTU: u32 = 1500;

/// The commands to run, in this order.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// Descriptions of the differences.
    pub(crate) repaired: Vec<String>,
    /// Commands for `ip` that are run before the new rule set is applied.
    pub(crate) detach: Vec<String>,
    /// Commands for `ip`.
    pub(crate) ip: Vec<String>,
    /// Commands for `bridge`.
    pub(crate) bridge: Vec<String>,
    /// Settings below `/proc/sys/net`.
    pub(crate) settings: Vec<(String, &'static str)>,
}

impl Changes {
    pub(crate) fn is_empty(&self) -> bool {
        self.repaired.is_empty()
    }
}

/// Properties of the host that all networks share.
#[derive(Debug, Clone)]
pub(crate) struct HostContext {
    pub(crate) egress_bridge: String,
    /// Whether the kernel has IPv6 and would configure addresses on new devices.
    pub(crate) ipv6: bool,
}

impl HostContext {
    /// Returns the option of `ip link` that keeps a device from configuring IPv6 addresses when it comes up.
    pub(crate) fn addrgenmode_option(&self) -> &'static str {
        if self.ipv6 { " addrgenmode none" } else { "" }
    }
}

/// Returns whether the router of a network is connected to the external network.
pub(crate) fn has_egress(plan: &NetworkPlan) -> bool {
    let has_egress =
        |router: &RouterPlan| router.nat || !router.egress.floating.is_empty() || !plan.routed.is_empty();
    plan.router.as_ref().is_some_and(has_egress)
}

/// Compares the devices of the host with the plan. `router_snapshot` is set if the router has a namespace.
pub(crate) fn host_changes(
    plan: &NetworkPlan,
    names: &NetworkNames,
    host: &HostContext,
    snapshot: &HostSnapshot,
    router_snapshot: Option<&RouterSnapshot>,
) -> Result<Changes> {
    let mut diff = HostDiff { plan, host, snapshot, changes: Changes::default() };
    diff.compare_bridge(names)?;
    let bridge = snapshot.link(&names.bridge);
    diff.compare_vxlan(names, bridge)?;
    diff.compare_ports(names, bridge);
    let peer = |name: &str| router_snapshot.and_then(|router_snapshot| router_snapshot.link(name));
    let inner = peer(&names.veth_inner);
    let wanted = plan.router.is_some();
    diff.compare_veth_pair(
        wanted,
        [&names.veth_outer, &names.veth_inner],
        plan.mtu,
        inner,
        (&names.bridge, bridge),
    )?;
    let inner = peer(&names.egress_inner);
    let bridge = snapshot.link(&host.egress_bridge);
    let bridge = (host.egress_bridge.as_str(), bridge);
    diff.compare_veth_pair(
        has_egress(plan),
        [&names.egress_outer, &names.egress_inner],
        EGRESS_MTU,
        inner,
        bridge,
    )?;
    Ok(diff.changes)
}

struct HostDiff<'a> {
    plan: &'a NetworkPlan,
    host: &'a HostContext,
    snapshot: &'a HostSnapshot,
    changes: Changes,
}

impl HostDiff<'_> {
    fn compare_bridge(&mut self, names: &NetworkNames) -> Result<()> {
        let name = &names.bridge;
        let link = self.snapshot.link(name);
        let Some(link) = link else {
            self.drifted(format!("bridge {name} was missing"));
            self.ip(format!("link add {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"));
            self.mark_and_enable(name, self.plan.mtu, "");
            return Ok(());
        };
        require_ownership(self.snapshot, link, "bridge", self.plan.id)?;
        if link.has_unwanted_bridge_settings {
            self.drifted(format!("bridge {name} had other settings"));
            // In two steps: the kernel refuses a forward delay of 0 while STP is enabled.
            self.ip(format!("link set dev {name} type bridge stp_state 0"));
            self.ip(format!("link set dev {name} type bridge forward_delay 0 mcast_snooping 0"));
        }
        self.repair_device(link, self.plan.mtu, None);
        Ok(())
    }

    /// Frames to unknown addresses are flooded to all peers. The device learns from the answers where an address is;
    /// otherwise every frame would be flooded. Entries that lead to nodes outside the network are deleted.
    fn compare_vxlan(&mut self, names: &NetworkNames, bridge: Option<&Link>) -> Result<()> {
        let (name, plan) = (&names.vxlan, self.plan);
        let peers: BTreeSet<Ipv4Addr> =
            plan.peers.iter().copied().filter(|peer| *peer != plan.mesh_address).collect();
        let mut link = self.snapshot.link(name);
        if let Some(found) = link {
            require_ownership(self.snapshot, found, "vxlan", plan.id)?;
            let matches_plan = found.vxlan.is_some_and(|vxlan| {
                (vxlan.id, vxlan.local, vxlan.port, vxlan.learning)
                    == (plan.vxid, plan.mesh_address, VXLAN_PORT, true)
            });
            if !matches_plan {
                self.drifted(format!("tunnel {name} had other settings"));
                self.ip(format!("link del dev {name}"));
                link = None;
            }
        } else {
            self.drifted(format!("tunnel {name} was missing"));
        }
        let entries: &[FdbEntry] = match link {
            Some(link) => {
                self.repair_device(link, plan.mtu, Some((&names.bridge, bridge)));
                self.snapshot.fdb_entries(link.index)
            }
            None => {
                self.ip(format!(
                    "link add {name} type vxlan id {} local {} dstport {VXLAN_PORT} learning",
                    plan.vxid, plan.mesh_address
                ));
                self.mark_and_enable(name, plan.mtu, &format!("master {} ", names.bridge));
                &[]
            }
        };
        let flooded: BTreeSet<Ipv4Addr> =
            entries.iter().filter(|entry| entry.mac == FLOOD_MAC).map(|entry| entry.node).collect();
        for peer in peers.difference(&flooded) {
            if link.is_some() {
                self.drifted(format!("tunnel {name} lacked peer {peer}"));
            }
            self.changes.bridge.push(format!("fdb append {} dev {name} dst {peer} self", mac(&FLOOD_MAC)));
        }
        for entry in entries.iter().filter(|entry| !peers.contains(&entry.node)) {
            if entry.mac == FLOOD_MAC {
                self.drifted(format!("tunnel {name} had peer {}", entry.node));
            } else {
                self.drifted(format!("tunnel {name} had an entry for {} at {}", mac(&entry.mac), entry.node));
            }
            let line = format!("fdb del {} dev {name} dst {} self", mac(&entry.mac), entry.node);
            self.changes.bridge.push(line);
        }
        Ok(())
    }

    fn compare_ports(&mut self, names: &NetworkNames, bridge: Option<&Link>) {
        let devices: BTreeSet<String> = self.plan.ports.iter().map(|port| port.interface.device()).collect();
        for link in bridge.into_iter().flat_map(|bridge| self.snapshot.members(bridge.index)) {
            if link.name.starts_with("tap") && !devices.contains(&link.name) {
                self.drifted(format!("device {} was attached to the network", link.name));
                self.changes.detach.push(format!("link set dev {} nomaster", link.name));
            }
        }
        for link in devices.iter().filter_map(|name| self.snapshot.link(name)) {
            self.attach(link, self.plan.mtu, (&names.bridge, bridge));
        }
    }

    /// Compares a veth pair with one end in a bridge and the other in the router.
    fn compare_veth_pair(
        &mut self,
        wanted: bool,
        [outer, inner]: [&str; 2],
        mtu: u32,
        inner_link: Option<&Link>,
        bridge: (&str, Option<&Link>),
    ) -> Result<()> {
        let link = self.snapshot.link(outer);
        if let Some(link) = link {
            require_ownership(self.snapshot, link, "veth", self.plan.id)?;
            if !wanted {
                self.drifted(format!("device {outer} was not needed"));
                self.ip(format!("link del dev {outer}"));
                return Ok(());
            }
            if inner_link.is_some_and(|inner_link| inner_link.index == link.peer) {
                self.repair_device(link, mtu, Some(bridge));
                return Ok(());
            }
            self.ip(format!("link del dev {outer}"));
        }
        if wanted {
            self.drifted(format!("device {outer} had no peer in the router"));
            let network = self.plan.id;
            self.ip(format!("link add {outer} type veth peer name {inner} netns {network}"));
            self.mark_and_enable(outer, mtu, &format!("master {} ", bridge.0));
        }
        Ok(())
    }

    /// Marks a new device before anything else, then enables it.
    fn mark_and_enable(&mut self, name: &str, mtu: u32, options: &str) {
        self.ip(format!(
            "link set dev {name} alias {}{}",
            marker(self.plan.id),
            self.host.addrgenmode_option()
        ));
        self.ip(format!("link set dev {name} mtu {mtu} {options}up"));
    }

    /// Repairs an existing device.
    fn repair_device(&mut self, link: &Link, mtu: u32, bridge: Option<(&str, Option<&Link>)>) {
        if link.alias.is_empty() {
            self.drifted(format!("device {} was not marked", link.name));
            let marker = marker(self.plan.id);
            self.ip(format!("link set dev {} alias {marker}{}", link.name, self.host.addrgenmode_option()));
        }
        match bridge {
            Some(bridge) => self.attach(link, mtu, bridge),
            None if link.mtu != mtu || !link.up => {
                self.drifted(format!("device {} was down or had the wrong MTU", link.name));
                self.ip(format!("link set dev {} mtu {mtu} up", link.name));
            }
            None => {}
        }
    }

    fn attach(&mut self, link: &Link, mtu: u32, (name, bridge): (&str, Option<&Link>)) {
        if bridge.is_none_or(|bridge| bridge.index != link.master) || link.mtu != mtu || !link.up {
            self.drifted(format!("device {} was not connected", link.name));
            if self.host.ipv6 && !link.up {
                self.ip(format!("link set dev {}{}", link.name, self.host.addrgenmode_option()));
            }
            self.ip(format!("link set dev {} mtu {mtu} master {name} up", link.name));
        }
    }

    fn drifted(&mut self, difference: String) {
        self.changes.repaired.push(difference);
    }

    fn ip(&mut self, line: String) {
        self.changes.ip.push(line);
    }
}

/// Refuses to touch a device that does not belong to the network.
pub(crate) fn require_ownership(
    snapshot: &HostSnapshot,
    link: &Link,
    kind: &str,
    network: NetworkId,
) -> Result<()> {
    let name = &link.name;
    if link.alias == marker(network) || is_unmarked_and_unused(snapshot, link, kind) {
        return Ok(());
    }
    Err(Error::Conflict(match network_of_marker(&link.alias) {
        Some(other) => format!("device {name} belongs to network {other}"),
        None => format!("device {name} exists and is not Muster's"),
    }))
}

/// Returns whether an unmarked device with one of our names may be ours: this program may have been killed between
/// creating and marking it. Such a device is not in use yet; a device in use belongs to another program.
pub(crate) fn is_unmarked_and_unused(snapshot: &HostSnapshot, link: &Link, kind: &str) -> bool {
    let number = |vxid| vxid_of_device(&link.name) == Some(vxid);
    link.alias.is_empty()
        && link.kind == kind
        && link.master == 0
        && link.vxlan.is_none_or(|vxlan| number(vxlan.id))
        && snapshot.members(link.index).next().is_none()
        && !snapshot.has_address(link.index)
}

/// Compares the configuration of the router with the plan.
pub(crate) fn router_changes(
    plan: &NetworkPlan,
    router: &RouterPlan,
    names: &NetworkNames,
    router_snapshot: &RouterSnapshot,
) -> Changes {
    let mut changes = Changes::default();
    if router_snapshot.link("lo").is_none_or(|lo| !lo.up || lo.alias != marker(plan.id)) {
        changes.repaired.push("the router was not marked".into());
        changes.ip.push(format!("link set dev lo alias {} up", marker(plan.id)));
    }
    let block = plan.netblock;
    let addresses = BTreeSet::from([(block.router(), block.prefix())]);
    let mac = router_mac(plan.id);
    compare_router_device(&mut changes, plan, &names.veth_inner, plan.mtu, mac, &addresses, router_snapshot);

    let mut addresses: BTreeSet<(Ipv4Addr, u8)> =
        router.egress.floating.iter().map(|(address, _)| (*address, 32)).collect();
    let egress = has_egress(plan);
    if egress {
        let gateway = router.egress.gateway.map(|gateway| (gateway, router.egress.netblock.prefix()));
        addresses.extend(gateway);
        let mac = egress_mac(plan.id);
        compare_router_device(
            &mut changes,
            plan,
            &names.egress_inner,
            EGRESS_MTU,
            mac,
            &addresses,
            router_snapshot,
        );
    }
    compare_routes(&mut changes, plan, router, names, router_snapshot);
    changes
}

/// Compares one device of the router.
fn compare_router_device(
    changes: &mut Changes,
    plan: &NetworkPlan,
    name: &str,
    mtu: u32,
    expected_mac: [u8; 6],
    addresses: &BTreeSet<(Ipv4Addr, u8)>,
    router_snapshot: &RouterSnapshot,
) {
    let link = router_snapshot.link(name);
    let index = link.map_or(0, |link| link.index);
    let found: BTreeSet<(Ipv4Addr, u8)> = router_snapshot
        .addresses
        .iter()
        .filter(|(device, _, _)| *device == index)
        .map(|(_, address, prefix)| (*address, *prefix))
        .collect();
    for (address, prefix) in found.difference(addresses) {
        changes.repaired.push(format!("router had address {address}"));
        changes.ip.push(format!("addr del {address}/{prefix} dev {name}"));
    }
    for (address, prefix) in addresses.difference(&found) {
        changes.repaired.push(format!("router had no address {address}"));
        changes.ip.push(format!("addr add {address}/{prefix} dev {name}"));
    }
    let matches_plan = link.is_some_and(|link| {
        link.up && link.mtu == mtu && link.mac == expected_mac && link.alias == marker(plan.id)
    });
    if !matches_plan {
        changes.repaired.push(format!("device {name} of the router was not set up"));
        let alias = marker(plan.id);
        changes
            .ip
            .push(format!("link set dev {name} alias {alias} mtu {mtu} address {} up", mac(&expected_mac)));
    }
    if link.is_some_and(|link| !link.forwarding || link.rp_filter != 1) {
        changes.repaired.push(format!("device {name} of the router had wrong forwarding settings"));
        for (setting, value) in [("forwarding", "1"), ("rp_filter", "1")] {
            changes.settings.push((format!("ipv4/conf/{name}/{setting}"), value));
        }
    }
}

/// Compares the routes to the external network and to the routed addresses, for which the router also answers ARP.
fn compare_routes(
    changes: &mut Changes,
    plan: &NetworkPlan,
    router: &RouterPlan,
    names: &NetworkNames,
    router_snapshot: &RouterSnapshot,
) {
    // Index 0 stands for a missing device, so that its routes count as missing.
    let index = |name: &str| router_snapshot.link(name).map_or(0, |link| link.index);
    let (inner, outer) = (index(&names.veth_inner), index(&names.egress_inner));
    let routed: BTreeSet<Ipv4Addr> = plan.routed.iter().copied().collect();
    let mut wanted: Vec<(Route, String)> = Vec::new();
    if has_egress(plan) {
        let (block, device) = (router.egress.netblock, &names.egress_inner);
        // The kernel adds this route along with the gateway's address.
        if router.egress.gateway.is_none() {
            let route = Route { to: block.network(), prefix: block.prefix(), via: None, device: outer };
            wanted.push((route, format!("{block} dev {device} scope link")));
        }
        let via = Some(block.router());
        let route = Route { to: Ipv4Addr::UNSPECIFIED, prefix: 0, via, device: outer };
        wanted.push((route, format!("default via {} dev {device} onlink", block.router())));
    }
    for address in &routed {
        let route = Route { to: *address, prefix: 32, via: None, device: inner };
        wanted.push((route, format!("{address}/32 dev {} scope link", names.veth_inner)));
    }
    for route in
        router_snapshot.routes.iter().filter(|route| !wanted.iter().any(|(wanted, _)| wanted == *route))
    {
        changes.repaired.push(format!("router had a route to {}/{}", route.to, route.prefix));
        changes.ip.push(format!("route del {}/{}", route.to, route.prefix));
    }
    for (route, line) in wanted.iter().filter(|(route, _)| !router_snapshot.routes.contains(route)) {
        changes.repaired.push(format!("router had no route to {}/{}", route.to, route.prefix));
        changes.ip.push(format!("route replace {line}"));
    }
    let proxied: BTreeSet<(u32, Ipv4Addr)> = routed.iter().map(|address| (outer, *address)).collect();
    for (device, address) in router_snapshot.proxies.difference(&proxied) {
        if let Some(link) = router_snapshot.links.iter().find(|link| link.index == *device) {
            changes.repaired.push(format!("router answered ARP for {address}"));
            changes.ip.push(format!("neigh del proxy {address} dev {}", link.name));
        }
    }
    for (_, address) in proxied.difference(&router_snapshot.proxies) {
        changes.repaired.push(format!("router did not answer ARP for {address}"));
        changes.ip.push(format!("neigh add proxy {address} dev {}", names.egress_inner));
    }
}

fn mac(bytes: &[u8; 6]) -> String {
    muster_types::address::MacAddress(*bytes).to_string()
}

#[cfg(test)]
mod tests;
