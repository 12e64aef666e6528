//! What the kernel has at this moment, read over netlink: devices, addresses, routes, neighbours.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::Ipv4Addr;

use muster_types::Result;
use muster_types::network::{NetworkPlan, NetworkUsage};

use super::names::{EGRESS_BRIDGE, Names, vxid_of_device};
use super::netlink::{Request, Socket, attributes, number, short, text};

const NEW_LINK: u16 = 16;
const GET_LINK: u16 = 18;
const GET_ADDRESS: u16 = 22;
const GET_ROUTE: u16 = 26;
const GET_NEIGHBOUR: u16 = 30;

const FAMILY_INET: u8 = 2;
const FAMILY_BRIDGE: u8 = 7;
const UP: u32 = 1;
const FLAG_SELF: u8 = 2;
const FLAG_PROXY: u8 = 8;
const MAIN_TABLE: u32 = 254;
const UNICAST: u8 = 1;
const BY_THE_KERNEL: u8 = 2;
/// Leave the counters out of a list of devices.
const WITHOUT_STATISTICS: u32 = 1 << 3;

/// A device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) alias: String,
    pub(crate) mtu: u32,
    /// The bridge that it is in; 0 for none.
    pub(crate) master: u32,
    /// The other end of a pair, by its number in its own namespace.
    pub(crate) peer: u32,
    pub(crate) up: bool,
    pub(crate) mac: Vec<u8>,
    /// Whether it passes on packets that are not for the machine.
    pub(crate) forwarding: bool,
    /// Whether it refuses packets whose sender is elsewhere; 1 is strictly.
    pub(crate) reverse_path: u32,
    pub(crate) vxlan: Option<Vxlan>,
    /// Of a bridge: whether it waits before it passes frames on, runs the spanning tree protocol, or listens to
    /// multicast.
    pub(crate) meddles: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Vxlan {
    pub(crate) id: u32,
    pub(crate) local: Ipv4Addr,
    pub(crate) port: u16,
    pub(crate) learning: bool,
}

/// Where a VXLAN sends frames for a hardware address; all zeroes is for those that are not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Destination {
    pub(crate) mac: [u8; 6],
    pub(crate) node: Ipv4Addr,
}

/// Devices of the node: all of them, or those around one network.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    links: Vec<Link>,
    by_name: HashMap<String, usize>,
    by_master: HashMap<u32, Vec<usize>>,
    destinations: HashMap<u32, Vec<Destination>>,
    /// The devices that have an address of any kind; only known if there is a device without a marker.
    addressed: BTreeSet<u32>,
}

impl Snapshot {
    /// Everything.
    pub(crate) fn whole(socket: &mut Socket) -> Result<Self> {
        let mut snapshot = Self::of(links(socket)?);
        let all =
            socket.dump(GET_NEIGHBOUR, &Request::new(&[FAMILY_BRIDGE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]))?;
        snapshot.add_destinations(&all);
        snapshot.add_addressed(socket)?;
        Ok(snapshot)
    }

    /// Only what concerns one network, which is quicker when there are many.
    pub(crate) fn around(
        socket: &mut Socket,
        names: &Names,
        egress_bridge: &str,
        plan: &NetworkPlan,
    ) -> Result<Self> {
        let mut found: BTreeMap<u32, Link> = BTreeMap::new();
        let devices = names.devices().map(|(name, _)| name.to_owned());
        let ports = plan.ports.iter().map(|port| port.interface.device());
        for name in devices.into_iter().chain([egress_bridge.to_owned()]).chain(ports) {
            if let Some(link) = link(socket, &name)? {
                found.insert(link.index, link);
            }
        }
        let index = |name: &str| found.values().find(|link| link.name == name).map(|link| link.index);
        let (bridge, vxlan) = (index(&names.bridge), index(&names.vxlan));
        if let Some(bridge) = bridge {
            let request = link_request().with(10, &bridge.to_ne_bytes());
            let members = socket.dump(GET_LINK, &request)?;
            found.extend(members.iter().map(|payload| parse_link(payload)).map(|link| (link.index, link)));
        }
        let mut snapshot = Self::of(found.into_values().collect());
        if let Some(vxlan) = vxlan {
            let mut fixed = vec![FAMILY_BRIDGE, 0, 0, 0];
            fixed.extend(vxlan.to_ne_bytes());
            fixed.extend([0; 8]);
            snapshot.add_destinations(&socket.dump(GET_NEIGHBOUR, &Request::new(&fixed))?);
        }
        snapshot.add_addressed(socket)?;
        Ok(snapshot)
    }

    pub(crate) fn of(links: Vec<Link>) -> Self {
        let mut snapshot = Self::default();
        for (at, link) in links.iter().enumerate() {
            snapshot.by_name.insert(link.name.clone(), at);
            if link.master != 0 {
                snapshot.by_master.entry(link.master).or_default().push(at);
            }
        }
        Self { links, ..snapshot }
    }

    fn add_destinations(&mut self, payloads: &[Vec<u8>]) {
        for (index, destination) in payloads.iter().filter_map(|payload| parse_destination(payload)) {
            self.destinations.entry(index).or_default().push(destination);
        }
    }

    /// All devices, and which of them have addresses.
    pub(crate) fn devices(socket: &mut Socket) -> Result<Self> {
        let mut snapshot = Self::of(links(socket)?);
        snapshot.add_addressed(socket)?;
        Ok(snapshot)
    }

    /// Addresses only matter for devices of our names that are not marked, which there hardly ever are.
    fn add_addressed(&mut self, socket: &mut Socket) -> Result<()> {
        let doubtful = |link: &Link| {
            link.alias.is_empty()
                && (vxid_of_device(&link.name).is_some() || link.name.starts_with(EGRESS_BRIDGE))
        };
        if self.links.iter().any(doubtful) {
            let found = socket.dump(GET_ADDRESS, &Request::new(&[0; 8]))?;
            self.addressed =
                found.iter().map(|payload| number(payload.get(4..8).unwrap_or_default())).collect();
        }
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn with_addressed(mut self, index: u32) -> Self {
        self.addressed.insert(index);
        self
    }

    #[cfg(test)]
    pub(crate) fn with_destinations(mut self, index: u32, destinations: Vec<Destination>) -> Self {
        self.destinations.insert(index, destinations);
        self
    }

    pub(crate) fn links(&self) -> &[Link] {
        &self.links
    }

    pub(crate) fn link(&self, name: &str) -> Option<&Link> {
        self.by_name.get(name).map(|at| &self.links[*at])
    }

    /// The devices in a bridge.
    pub(crate) fn members(&self, bridge: u32) -> impl Iterator<Item = &Link> {
        self.by_master.get(&bridge).into_iter().flatten().map(|at| &self.links[*at])
    }

    /// Whether a device without a marker has an address.
    pub(crate) fn has_address(&self, device: u32) -> bool {
        self.addressed.contains(&device)
    }

    pub(crate) fn destinations(&self, vxlan: u32) -> &[Destination] {
        self.destinations.get(&vxlan).map(Vec::as_slice).unwrap_or_default()
    }
}

/// A route of the main table that somebody set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Route {
    pub(crate) to: Ipv4Addr,
    pub(crate) prefix: u8,
    pub(crate) via: Option<Ipv4Addr>,
    pub(crate) device: u32,
}

/// What a router has.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Inside {
    pub(crate) links: Vec<Link>,
    pub(crate) addresses: BTreeSet<(u32, Ipv4Addr, u8)>,
    pub(crate) routes: BTreeSet<Route>,
    /// Addresses that it answers for on a device.
    pub(crate) proxies: BTreeSet<(u32, Ipv4Addr)>,
}

impl Inside {
    /// Looks into the namespace of this thread.
    pub(crate) fn look(socket: &mut Socket) -> Result<Self> {
        Ok(Self {
            links: links(socket)?,
            addresses: addresses(socket)?,
            routes: routes(socket)?,
            proxies: proxies(socket)?,
        })
    }

    pub(crate) fn link(&self, name: &str) -> Option<&Link> {
        self.links.iter().find(|link| link.name == name)
    }
}

pub(crate) fn links(socket: &mut Socket) -> Result<Vec<Link>> {
    let found = socket.dump(GET_LINK, &link_request())?;
    Ok(found.iter().map(|payload| parse_link(payload)).collect())
}

pub(crate) fn link(socket: &mut Socket, name: &str) -> Result<Option<Link>> {
    let found = socket.get(GET_LINK, &link_request().with_text(3, name))?;
    Ok(found.map(|payload| parse_link(&payload)))
}

fn link_request() -> Request {
    Request::new(&[0; 16]).with(29, &WITHOUT_STATISTICS.to_ne_bytes())
}

fn parse_link(payload: &[u8]) -> Link {
    let mut link = Link {
        index: number(payload.get(4..8).unwrap_or_default()),
        up: number(payload.get(8..12).unwrap_or_default()) & UP != 0,
        ..Link::default()
    };
    for (kind, value) in attributes(payload.get(16..).unwrap_or_default()) {
        match kind {
            1 => link.mac = value.to_vec(),
            3 => link.name = text(value),
            4 => link.mtu = number(value),
            5 => link.peer = number(value),
            10 => link.master = number(value),
            18 => parse_kind(value, &mut link),
            20 => link.alias = text(value),
            26 => parse_inet(value, &mut link),
            _ => {}
        }
    }
    link
}

fn parse_kind(info: &[u8], link: &mut Link) {
    for (kind, value) in attributes(info) {
        match (kind, link.kind.as_str()) {
            (1, _) => link.kind = text(value),
            (2, "vxlan") => link.vxlan = Some(parse_vxlan(value)),
            (2, "bridge") => {
                link.meddles = attributes(value).any(|(kind, value)| match kind {
                    1 | 5 => number(value) != 0,
                    23 => value != [0],
                    _ => false,
                });
            }
            _ => {}
        }
    }
}

fn parse_vxlan(data: &[u8]) -> Vxlan {
    let mut vxlan = Vxlan { id: 0, local: Ipv4Addr::UNSPECIFIED, port: 0, learning: false };
    for (kind, value) in attributes(data) {
        match kind {
            1 => vxlan.id = number(value),
            4 => vxlan.local = address(value),
            7 => vxlan.learning = value != [0],
            15 => vxlan.port = short(value).swap_bytes(),
            _ => {}
        }
    }
    vxlan
}

fn parse_inet(families: &[u8], link: &mut Link) {
    let inet = attributes(families).find(|(family, _)| *family == u16::from(FAMILY_INET));
    let settings = inet.and_then(|(_, inner)| attributes(inner).find(|(kind, _)| *kind == 1));
    let setting = |at: usize| {
        let (_, values) = settings?;
        values.get(4 * (at - 1)..4 * at).map(number)
    };
    link.forwarding = setting(1).is_some_and(|value| value != 0);
    link.reverse_path = setting(8).unwrap_or(0);
}

fn parse_destination(payload: &[u8]) -> Option<(u32, Destination)> {
    let index = number(payload.get(4..8)?);
    if payload.get(10)? & FLAG_SELF == 0 {
        return None;
    }
    let mut mac = None;
    let mut node = None;
    for (kind, value) in attributes(payload.get(12..)?) {
        match kind {
            1 if value.len() == 4 => node = Some(address(value)),
            2 => mac = value.try_into().ok(),
            _ => {}
        }
    }
    Some((index, Destination { mac: mac?, node: node? }))
}

/// The IPv4 addresses of all devices, each with its device and prefix.
pub(crate) fn addresses(socket: &mut Socket) -> Result<BTreeSet<(u32, Ipv4Addr, u8)>> {
    let found = socket.dump(GET_ADDRESS, &Request::new(&[FAMILY_INET, 0, 0, 0, 0, 0, 0, 0]))?;
    let parse = |payload: &Vec<u8>| {
        let (prefix, index) = (*payload.get(1)?, number(payload.get(4..8)?));
        let mut local = attributes(payload.get(8..)?).filter(|(kind, _)| *kind == 2);
        Some((index, address(local.next()?.1), prefix))
    };
    Ok(found.iter().filter_map(parse).collect())
}

fn routes(socket: &mut Socket) -> Result<BTreeSet<Route>> {
    let found = socket.dump(GET_ROUTE, &Request::new(&[FAMILY_INET, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]))?;
    Ok(found.iter().filter_map(|payload| parse_route(payload)).collect())
}

fn parse_route(payload: &[u8]) -> Option<Route> {
    let (prefix, protocol, kind) = (*payload.get(1)?, *payload.get(5)?, *payload.get(7)?);
    let mut table = u32::from(*payload.get(4)?);
    let mut route = Route { to: Ipv4Addr::UNSPECIFIED, prefix, via: None, device: 0 };
    for (kind, value) in attributes(payload.get(12..)?) {
        match kind {
            1 => route.to = address(value),
            4 => route.device = number(value),
            5 => route.via = Some(address(value)),
            15 => table = number(value),
            _ => {}
        }
    }
    (table == MAIN_TABLE && kind == UNICAST && protocol != BY_THE_KERNEL).then_some(route)
}

/// The blocks of the main table that are reached through a device without a gateway, each with its device.
pub(crate) fn on_link(socket: &mut Socket) -> Result<BTreeSet<(u32, Ipv4Addr, u8)>> {
    let found = socket.dump(GET_ROUTE, &Request::new(&[FAMILY_INET, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]))?;
    Ok(found.iter().filter_map(|payload| parse_on_link(payload)).collect())
}

fn parse_on_link(payload: &[u8]) -> Option<(u32, Ipv4Addr, u8)> {
    let (prefix, kind) = (*payload.get(1)?, *payload.get(7)?);
    let mut table = u32::from(*payload.get(4)?);
    let (mut to, mut device, mut gateway) = (Ipv4Addr::UNSPECIFIED, 0, false);
    for (kind, value) in attributes(payload.get(12..)?) {
        match kind {
            1 => to = address(value),
            4 => device = number(value),
            // A gateway, several of them, or one of another family.
            5 | 9 | 18 => gateway = true,
            15 => table = number(value),
            _ => {}
        }
    }
    (table == MAIN_TABLE && kind == UNICAST && !gateway && device != 0).then_some((device, to, prefix))
}

fn proxies(socket: &mut Socket) -> Result<BTreeSet<(u32, Ipv4Addr)>> {
    let request = Request::new(&[FAMILY_INET, 0, 0, 0, 0, 0, 0, 0, 0, 0, FLAG_PROXY, 0]);
    let parse = |payload: &Vec<u8>| {
        let index = number(payload.get(4..8)?);
        let mut target = attributes(payload.get(12..)?).filter(|(kind, _)| *kind == 1);
        Some((index, address(target.next()?.1)))
    };
    Ok(socket.dump(GET_NEIGHBOUR, &request)?.iter().filter_map(parse).collect())
}

/// What passed a device, as seen from its other end.
pub(crate) fn usage_of_peer(socket: &mut Socket, name: &str) -> Result<Option<NetworkUsage>> {
    let request = Request::new(&[0; 16]).with_text(3, name);
    let Some(payload) = socket.get(GET_LINK, &request)? else { return Ok(None) };
    let mut found = attributes(payload.get(16..).unwrap_or_default()).filter(|(kind, _)| *kind == 23);
    let Some((_, counters)) = found.next() else { return Ok(None) };
    let counter = |at: usize| {
        let bytes = counters.get(8 * at..8 * at + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_ne_bytes)
    };
    // In the order of the kernel's list; what this end sent is what the other end received.
    Ok(Some(NetworkUsage {
        rx: [
            ("packets", counter(1)),
            ("bytes", counter(3)),
            ("errors", counter(5)),
            ("dropped", counter(7)),
            ("multicast", counter(8)),
            ("over_errors", counter(11)),
        ]
        .into(),
        tx: [
            ("packets", counter(0)),
            ("bytes", counter(2)),
            ("errors", counter(4)),
            ("dropped", counter(6)),
            ("collisions", counter(9)),
            ("carrier_errors", counter(17)),
        ]
        .into(),
    }))
}

/// Marks the loopback device of this thread's namespace and switches it on.
pub(crate) fn mark_loopback(socket: &mut Socket, marker: &str) -> Result<()> {
    let mut fixed = vec![0; 4];
    fixed.extend(1_u32.to_ne_bytes());
    fixed.extend(UP.to_ne_bytes());
    fixed.extend(UP.to_ne_bytes());
    socket.change(NEW_LINK, &Request::new(&fixed).with(20, marker.as_bytes()))
}

/// Makes a device of a kind that is of no use; false if the kernel has no such kind.
pub(crate) fn try_kind(socket: &mut Socket, kind: &str) -> Result<bool> {
    let mut info = Request::new(&[]).with_text(1, kind);
    if kind == "vxlan" {
        info = info.with_inner(2, &Request::new(&[]).with(1, &1_u32.to_ne_bytes()));
    }
    socket.create(NEW_LINK, &Request::new(&[0; 16]).with_text(3, kind).with_inner(18, &info))
}

fn address(value: &[u8]) -> Ipv4Addr {
    value
        .get(..4)
        .and_then(|bytes| <[u8; 4]>::try_from(bytes).ok())
        .map_or(Ipv4Addr::UNSPECIFIED, Ipv4Addr::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_device_of_this_machine_is_found() {
        let socket = &mut Socket::route().unwrap();
        let lo = link(socket, "lo").unwrap().unwrap();
        assert_eq!((lo.index, lo.name.as_str(), lo.master), (1, "lo", 0));
        assert!(links(socket).unwrap().contains(&lo));
        assert!(link(socket, "no-such-device").unwrap().is_none());
        assert!(usage_of_peer(socket, "lo").unwrap().unwrap().rx.contains_key("multicast"));
    }
}
