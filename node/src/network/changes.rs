//! What has to be done on a node so that a network is as its plan says: a pure comparison of plan and kernel. No
//! difference gives no commands.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use muster_types::ids::NetworkId;
use muster_types::network::{NetworkPlan, RouterPlan};
use muster_types::{Error, Result};

use super::names::{Names, VXLAN_PORT, egress_mac, marked, marker, router_mac, vxid_of_device};
use super::view::{Destination, Inside, Link, Route, Snapshot};

const FLOOD: [u8; 6] = [0; 6];
/// The largest packet between a router and the world, which is not the business of the network's own limit.
const EGRESS_MTU: u32 = 1500;

/// Commands, in the order in which they are to be run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// What was wrong, in words.
    pub(crate) repaired: Vec<String>,
    /// Commands for `ip` that come before the new rule set.
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

/// What is the same for all networks of a node.
#[derive(Debug, Clone)]
pub(crate) struct Surroundings {
    pub(crate) egress_bridge: String,
    /// Whether devices would give themselves IPv6 addresses.
    pub(crate) ipv6: bool,
}

impl Surroundings {
    /// Keeps a device from speaking IPv6 by itself, if said before it comes up.
    pub(crate) fn quiet(&self) -> &'static str {
        if self.ipv6 { " addrgenmode none" } else { "" }
    }
}

/// Whether the router of a network has a way to the world.
pub(crate) fn has_egress(plan: &NetworkPlan) -> bool {
    let way =
        |router: &RouterPlan| router.nat || !router.egress.floating.is_empty() || !plan.routed.is_empty();
    plan.router.as_ref().is_some_and(way)
}

/// Compares the devices on the node. `inside` is what the router has, if it has a namespace.
pub(crate) fn on_node(
    plan: &NetworkPlan,
    names: &Names,
    around: &Surroundings,
    node: &Snapshot,
    inside: Option<&Inside>,
) -> Result<Changes> {
    let mut work = Work { plan, around, node, changes: Changes::default() };
    work.bridge(names)?;
    let bridge = node.link(&names.bridge);
    work.vxlan(names, bridge)?;
    work.ports(names, bridge);
    let peer = |name: &str| inside.and_then(|inside| inside.link(name));
    let inner = peer(&names.veth_inner);
    let wanted = plan.router.is_some();
    work.pair(wanted, [&names.veth_outer, &names.veth_inner], plan.mtu, inner, (&names.bridge, bridge))?;
    let inner = peer(&names.egress_inner);
    let bridge = node.link(&around.egress_bridge);
    let bridge = (around.egress_bridge.as_str(), bridge);
    work.pair(has_egress(plan), [&names.egress_outer, &names.egress_inner], EGRESS_MTU, inner, bridge)?;
    Ok(work.changes)
}

struct Work<'a> {
    plan: &'a NetworkPlan,
    around: &'a Surroundings,
    node: &'a Snapshot,
    changes: Changes,
}

impl Work<'_> {
    fn bridge(&mut self, names: &Names) -> Result<()> {
        let name = &names.bridge;
        let link = self.node.link(name);
        let Some(link) = link else {
            self.wrong(format!("bridge {name} was missing"));
            self.ip(format!("link add {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"));
            self.finish(name, self.plan.mtu, "");
            return Ok(());
        };
        own(self.node, link, "bridge", self.plan.id)?;
        if link.meddles {
            self.wrong(format!("bridge {name} had other settings"));
            // In two steps: with the protocol a delay of 0 is not allowed.
            self.ip(format!("link set dev {name} type bridge stp_state 0"));
            self.ip(format!("link set dev {name} type bridge forward_delay 0 mcast_snooping 0"));
        }
        self.device(link, self.plan.mtu, None);
        Ok(())
    }

    /// Frames for an address that is not known go to every other node, which also tells where the address is: the
    /// device learns, or every frame would go to every node for ever. What it learned about a node that takes no
    /// part is forgotten.
    fn vxlan(&mut self, names: &Names, bridge: Option<&Link>) -> Result<()> {
        let (name, plan) = (&names.vxlan, self.plan);
        let peers: BTreeSet<Ipv4Addr> =
            plan.peers.iter().copied().filter(|peer| *peer != plan.mesh_address).collect();
        let mut link = self.node.link(name);
        if let Some(found) = link {
            own(self.node, found, "vxlan", plan.id)?;
            let right = found.vxlan.is_some_and(|vxlan| {
                (vxlan.id, vxlan.local, vxlan.port, vxlan.learning)
                    == (plan.vxid, plan.mesh_address, VXLAN_PORT, true)
            });
            if !right {
                self.wrong(format!("tunnel {name} had other settings"));
                self.ip(format!("link del dev {name}"));
                link = None;
            }
        } else {
            self.wrong(format!("tunnel {name} was missing"));
        }
        let known: &[Destination] = match link {
            Some(link) => {
                self.device(link, plan.mtu, Some((&names.bridge, bridge)));
                self.node.destinations(link.index)
            }
            None => {
                self.ip(format!(
                    "link add {name} type vxlan id {} local {} dstport {VXLAN_PORT} learning",
                    plan.vxid, plan.mesh_address
                ));
                self.finish(name, plan.mtu, &format!("master {} ", names.bridge));
                &[]
            }
        };
        let flooded: BTreeSet<Ipv4Addr> =
            known.iter().filter(|entry| entry.mac == FLOOD).map(|entry| entry.node).collect();
        for peer in peers.difference(&flooded) {
            if link.is_some() {
                self.wrong(format!("tunnel {name} did not lead to {peer}"));
            }
            self.changes.bridge.push(format!("fdb append {} dev {name} dst {peer} self", mac(&FLOOD)));
        }
        for entry in known.iter().filter(|entry| !peers.contains(&entry.node)) {
            if entry.mac == FLOOD {
                self.wrong(format!("tunnel {name} led to {}", entry.node));
            } else {
                self.wrong(format!("tunnel {name} looked for {} at {}", mac(&entry.mac), entry.node));
            }
            let line = format!("fdb del {} dev {name} dst {} self", mac(&entry.mac), entry.node);
            self.changes.bridge.push(line);
        }
        Ok(())
    }

    fn ports(&mut self, names: &Names, bridge: Option<&Link>) {
        let devices: BTreeSet<String> = self.plan.ports.iter().map(|port| port.interface.device()).collect();
        for link in bridge.into_iter().flat_map(|bridge| self.node.members(bridge.index)) {
            if link.name.starts_with("tap") && !devices.contains(&link.name) {
                self.wrong(format!("device {} was in the network", link.name));
                self.changes.detach.push(format!("link set dev {} nomaster", link.name));
            }
        }
        for link in devices.iter().filter_map(|name| self.node.link(name)) {
            self.attach(link, self.plan.mtu, (&names.bridge, bridge));
        }
    }

    /// A pair of devices of which one end is in a bridge and the other in the router.
    fn pair(
        &mut self,
        wanted: bool,
        [outer, inner]: [&str; 2],
        mtu: u32,
        inside: Option<&Link>,
        bridge: (&str, Option<&Link>),
    ) -> Result<()> {
        let link = self.node.link(outer);
        if let Some(link) = link {
            own(self.node, link, "veth", self.plan.id)?;
            if !wanted {
                self.wrong(format!("device {outer} was there"));
                self.ip(format!("link del dev {outer}"));
                return Ok(());
            }
            if inside.is_some_and(|inside| inside.index == link.peer) {
                self.device(link, mtu, Some(bridge));
                return Ok(());
            }
            self.ip(format!("link del dev {outer}"));
        }
        if wanted {
            self.wrong(format!("device {outer} had no end in the router"));
            let network = self.plan.id;
            self.ip(format!("link add {outer} type veth peer name {inner} netns {network}"));
            self.finish(outer, mtu, &format!("master {} ", bridge.0));
        }
        Ok(())
    }

    /// Marks a new device before anything else, then switches it on.
    fn finish(&mut self, name: &str, mtu: u32, further: &str) {
        self.ip(format!("link set dev {name} alias {}{}", marker(self.plan.id), self.around.quiet()));
        self.ip(format!("link set dev {name} mtu {mtu} {further}up"));
    }

    /// Puts a device right that exists.
    fn device(&mut self, link: &Link, mtu: u32, bridge: Option<(&str, Option<&Link>)>) {
        if link.alias.is_empty() {
            self.wrong(format!("device {} was not marked", link.name));
            let marker = marker(self.plan.id);
            self.ip(format!("link set dev {} alias {marker}{}", link.name, self.around.quiet()));
        }
        match bridge {
            Some(bridge) => self.attach(link, mtu, bridge),
            None if link.mtu != mtu || !link.up => {
                self.wrong(format!("device {} was down or had another limit", link.name));
                self.ip(format!("link set dev {} mtu {mtu} up", link.name));
            }
            None => {}
        }
    }

    fn attach(&mut self, link: &Link, mtu: u32, (name, bridge): (&str, Option<&Link>)) {
        if bridge.is_none_or(|bridge| bridge.index != link.master) || link.mtu != mtu || !link.up {
            self.wrong(format!("device {} was not connected", link.name));
            if self.around.ipv6 && !link.up {
                self.ip(format!("link set dev {}{}", link.name, self.around.quiet()));
            }
            self.ip(format!("link set dev {} mtu {mtu} master {name} up", link.name));
        }
    }

    fn wrong(&mut self, words: String) {
        self.changes.repaired.push(words);
    }

    fn ip(&mut self, line: String) {
        self.changes.ip.push(line);
    }
}

/// Refuses to touch a device that is somebody else's.
pub(crate) fn own(node: &Snapshot, link: &Link, kind: &str, network: NetworkId) -> Result<()> {
    let name = &link.name;
    if link.alias == marker(network) || is_bare(node, link, kind) {
        return Ok(());
    }
    Err(Error::Conflict(match marked(&link.alias) {
        Some(other) => format!("device {name} belongs to network {other}"),
        None => format!("device {name} exists and is not Muster's"),
    }))
}

/// Whether a device of one of our names may be ours although it has no marker: we were killed after we made it and
/// before we marked it. Nothing was done with such a device yet; one that is used is somebody else's.
pub(crate) fn is_bare(node: &Snapshot, link: &Link, kind: &str) -> bool {
    let number = |vxid| vxid_of_device(&link.name) == Some(vxid);
    link.alias.is_empty()
        && link.kind == kind
        && link.master == 0
        && link.vxlan.is_none_or(|vxlan| number(vxlan.id))
        && node.members(link.index).next().is_none()
        && !node.has_address(link.index)
}

/// Compares what the router has.
pub(crate) fn in_router(plan: &NetworkPlan, router: &RouterPlan, names: &Names, inside: &Inside) -> Changes {
    let mut changes = Changes::default();
    if inside.link("lo").is_none_or(|lo| !lo.up || lo.alias != marker(plan.id)) {
        changes.repaired.push("the router was not marked".into());
        changes.ip.push(format!("link set dev lo alias {} up", marker(plan.id)));
    }
    let block = plan.netblock;
    let addresses = BTreeSet::from([(block.router(), block.prefix())]);
    let mac = router_mac(plan.id);
    side(&mut changes, plan, &names.veth_inner, plan.mtu, mac, &addresses, inside);

    let mut addresses: BTreeSet<(Ipv4Addr, u8)> =
        router.egress.floating.iter().map(|(address, _)| (*address, 32)).collect();
    let egress = has_egress(plan);
    if egress {
        let gateway = router.egress.gateway.map(|gateway| (gateway, router.egress.netblock.prefix()));
        addresses.extend(gateway);
        let mac = egress_mac(plan.id);
        side(&mut changes, plan, &names.egress_inner, EGRESS_MTU, mac, &addresses, inside);
    }
    routes(&mut changes, plan, router, names, inside);
    changes
}

/// One device of the router.
fn side(
    changes: &mut Changes,
    plan: &NetworkPlan,
    name: &str,
    mtu: u32,
    hardware: [u8; 6],
    addresses: &BTreeSet<(Ipv4Addr, u8)>,
    inside: &Inside,
) {
    let link = inside.link(name);
    let index = link.map_or(0, |link| link.index);
    let found: BTreeSet<(Ipv4Addr, u8)> = inside
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
    let right = link.is_some_and(|link| {
        link.up && link.mtu == mtu && link.mac == hardware && link.alias == marker(plan.id)
    });
    if !right {
        changes.repaired.push(format!("device {name} of the router was not set up"));
        let alias = marker(plan.id);
        changes.ip.push(format!("link set dev {name} alias {alias} mtu {mtu} address {} up", mac(&hardware)));
    }
    if link.is_some_and(|link| !link.forwarding || link.reverse_path != 1) {
        changes.repaired.push(format!("device {name} of the router did not pass packets on"));
        for (setting, value) in [("forwarding", "1"), ("rp_filter", "1")] {
            changes.settings.push((format!("ipv4/conf/{name}/{setting}"), value));
        }
    }
}

/// The ways to the world and to the routed addresses, for which the router also answers in the world.
fn routes(changes: &mut Changes, plan: &NetworkPlan, router: &RouterPlan, names: &Names, inside: &Inside) {
    // A device that is not there yet has no number; 0 is none's, so that its routes count as missing.
    let index = |name: &str| inside.link(name).map_or(0, |link| link.index);
    let (inner, outer) = (index(&names.veth_inner), index(&names.egress_inner));
    let routed: BTreeSet<Ipv4Addr> = plan.routed.iter().copied().collect();
    let mut wanted: Vec<(Route, String)> = Vec::new();
    if has_egress(plan) {
        let (block, device) = (router.egress.netblock, &names.egress_inner);
        // The kernel adds this way by itself along with the gateway's address.
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
    for route in inside.routes.iter().filter(|route| !wanted.iter().any(|(wanted, _)| wanted == *route)) {
        changes.repaired.push(format!("router had a route to {}/{}", route.to, route.prefix));
        changes.ip.push(format!("route del {}/{}", route.to, route.prefix));
    }
    for (route, line) in wanted.iter().filter(|(route, _)| !inside.routes.contains(route)) {
        changes.repaired.push(format!("router had no route to {}/{}", route.to, route.prefix));
        changes.ip.push(format!("route replace {line}"));
    }
    let answers: BTreeSet<(u32, Ipv4Addr)> = routed.iter().map(|address| (outer, *address)).collect();
    for (device, address) in inside.proxies.difference(&answers) {
        if let Some(link) = inside.links.iter().find(|link| link.index == *device) {
            changes.repaired.push(format!("router answered for {address}"));
            changes.ip.push(format!("neigh del proxy {address} dev {}", link.name));
        }
    }
    for (_, address) in answers.difference(&inside.proxies) {
        changes.repaired.push(format!("router did not answer for {address}"));
        changes.ip.push(format!("neigh add proxy {address} dev {}", names.egress_inner));
    }
}

fn mac(bytes: &[u8; 6]) -> String {
    muster_types::address::MacAddress(*bytes).to_string()
}

#[cfg(test)]
#[path = "changes_tests.rs"]
mod tests;
