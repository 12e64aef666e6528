//! The state of the kernel, read over netlink: devices, addresses, routes, neighbours.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem::offset_of;
use std::net::Ipv4Addr;

use linux_raw_sys::netlink as nl;
use linux_raw_sys::netlink::{rtattr_type_t as rta, rtnl_link_stats64};
use muster_types::Result;
use muster_types::network::{NetworkPlan, NetworkUsage};
use nix::libc;

use super::names::{EGRESS_BRIDGE_PREFIX, NetworkNames, vxid_of_device};
use super::netlink::{
    NetlinkRequest, NetlinkSocket, attributes, attributes_after, malformed, read_string, read_u16, read_u32,
    read_u64,
};

/// Declares constants of the kernel's anonymous enums as `u16`, the type of message and attribute types.
macro_rules! u16_constants {
    ($($name:ident),* $(,)?) => { $(const $name: u16 = nl::$name as u16;)* };
}

u16_constants! {
    RTM_NEWLINK, RTM_GETLINK, RTM_GETADDR, RTM_GETROUTE, RTM_GETNEIGH,
    IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_LINK, IFLA_MASTER, IFLA_LINKINFO, IFLA_IFALIAS, IFLA_STATS64,
    IFLA_AF_SPEC, IFLA_EXT_MASK, IFLA_INFO_KIND, IFLA_INFO_DATA, IFLA_INET_CONF,
    IFLA_VXLAN_ID, IFLA_VXLAN_LOCAL, IFLA_VXLAN_LEARNING, IFLA_VXLAN_PORT,
    IFLA_BR_FORWARD_DELAY, IFLA_BR_STP_STATE, IFLA_BR_MCAST_SNOOPING,
    IFA_LOCAL, NDA_DST, NDA_LLADDR,
}

const RTA_DST: u16 = rta::RTA_DST as u16;
const RTA_OIF: u16 = rta::RTA_OIF as u16;
const RTA_GATEWAY: u16 = rta::RTA_GATEWAY as u16;
const RTA_MULTIPATH: u16 = rta::RTA_MULTIPATH as u16;
const RTA_TABLE: u16 = rta::RTA_TABLE as u16;
const RTA_VIA: u16 = rta::RTA_VIA as u16;
const MAIN_TABLE: u32 = nl::rt_class_t::RT_TABLE_MAIN as u32;
const UNICAST: u8 = nl::RTN_UNICAST as u8;
const SET_BY_KERNEL: u8 = nl::RTPROT_KERNEL as u8;
const NTF_SELF: u8 = nl::NTF_SELF as u8;
const NTF_PROXY: u8 = nl::NTF_PROXY as u8;

const FAMILY_INET: u8 = libc::AF_INET as u8;
const FAMILY_BRIDGE: u8 = libc::AF_BRIDGE as u8;
const IFF_UP: u32 = libc::IFF_UP as u32;
/// Indices into `IFLA_INET_CONF`, from `linux/ip.h`; the kernel counts from 1.
const IPV4_DEVCONF_FORWARDING: usize = 1;
const IPV4_DEVCONF_RP_FILTER: usize = 8;

/// A network device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) alias: String,
    pub(crate) mtu: u32,
    /// The index of the bridge that the device is a port of; 0 for none.
    pub(crate) master: u32,
    /// The index of the other end of a veth pair, in the namespace of that end.
    pub(crate) peer: u32,
    pub(crate) up: bool,
    pub(crate) mac: Vec<u8>,
    /// Whether IPv4 forwarding is enabled on the device.
    pub(crate) forwarding: bool,
    /// The reverse path filter of the device; 1 is strict.
    pub(crate) rp_filter: u32,
    pub(crate) vxlan: Option<Vxlan>,
    /// Whether a bridge has a forward delay, the spanning tree protocol or multicast snooping enabled.
    pub(crate) has_unwanted_bridge_settings: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Vxlan {
    pub(crate) id: u32,
    pub(crate) local: Ipv4Addr,
    pub(crate) port: u16,
    pub(crate) learning: bool,
}

/// An entry of a VXLAN's forwarding database: the node behind which a MAC address is. The all-zero address is the
/// entry for unknown addresses and broadcasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FdbEntry {
    pub(crate) mac: [u8; 6],
    pub(crate) node: Ipv4Addr,
}

/// The devices of the host: all of them, or those of one network.
#[derive(Debug, Default)]
pub(crate) struct HostSnapshot {
    links: Vec<Link>,
    by_name: HashMap<String, usize>,
    by_master: HashMap<u32, Vec<usize>>,
    fdb_entries: HashMap<u32, Vec<FdbEntry>>,
    /// The devices that have an address of any family; only read if there is a device without a marker.
    addressed_devices: BTreeSet<u32>,
}

impl HostSnapshot {
    /// Reads all devices, forwarding databases and addresses.
    pub(crate) fn read_all(socket: &mut NetlinkSocket) -> Result<Self> {
        let mut snapshot = Self::new(links(socket)?);
        snapshot.add_fdb_entries(&socket.dump(RTM_GETNEIGH, &fdb_request())?)?;
        snapshot.add_addressed_devices(socket)?;
        Ok(snapshot)
    }

    /// Reads only what concerns one network, which is faster when there are many.
    pub(crate) fn read_network(
        socket: &mut NetlinkSocket,
        names: &NetworkNames,
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
            let request = link_request().with(IFLA_MASTER, &bridge.to_ne_bytes());
            let members = parse_links(&socket.dump(RTM_GETLINK, &request)?)?;
            found.extend(members.into_iter().map(|link| (link.index, link)));
        }
        let mut snapshot = Self::new(found.into_values().collect());
        if let Some(vxlan) = vxlan {
            let request = fdb_request().set(offset_of!(nl::ndmsg, ndm_ifindex), &vxlan.to_ne_bytes());
            snapshot.add_fdb_entries(&socket.dump(RTM_GETNEIGH, &request)?)?;
        }
        snapshot.add_addressed_devices(socket)?;
        Ok(snapshot)
    }

    pub(crate) fn new(links: Vec<Link>) -> Self {
        let mut snapshot = Self::default();
        for (index, link) in links.iter().enumerate() {
            snapshot.by_name.insert(link.name.clone(), index);
            if link.master != 0 {
                snapshot.by_master.entry(link.master).or_default().push(index);
            }
        }
        Self { links, ..snapshot }
    }

    fn add_fdb_entries(&mut self, payloads: &[Vec<u8>]) -> Result<()> {
        for payload in payloads {
            let parsed = parse_fdb_entry(payload).ok_or_else(|| malformed("forwarding entries"))?;
            if let Some((index, entry)) = parsed {
                self.fdb_entries.entry(index).or_default().push(entry);
            }
        }
        Ok(())
    }

    /// Reads all devices, and which of them have addresses.
    pub(crate) fn read_devices(socket: &mut NetlinkSocket) -> Result<Self> {
        let mut snapshot = Self::new(links(socket)?);
        snapshot.add_addressed_devices(socket)?;
        Ok(snapshot)
    }

    /// Addresses only matter for unmarked devices with one of our names, which are rare.
    fn add_addressed_devices(&mut self, socket: &mut NetlinkSocket) -> Result<()> {
        let is_unmarked_candidate = |link: &Link| {
            link.alias.is_empty()
                && (vxid_of_device(&link.name).is_some() || link.name.starts_with(EGRESS_BRIDGE_PREFIX))
        };
        if self.links.iter().any(is_unmarked_candidate) {
            let found = socket.dump(RTM_GETADDR, &NetlinkRequest::new::<nl::ifaddrmsg>())?;
            let index = |payload: &Vec<u8>| u32_at(payload, offset_of!(nl::ifaddrmsg, ifa_index));
            self.addressed_devices =
                found.iter().map(index).collect::<Option<_>>().ok_or_else(|| malformed("addresses"))?;
        }
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn with_addressed_device(mut self, index: u32) -> Self {
        self.addressed_devices.insert(index);
        self
    }

    #[cfg(test)]
    pub(crate) fn with_fdb_entries(mut self, index: u32, fdb_entries: Vec<FdbEntry>) -> Self {
        self.fdb_entries.insert(index, fdb_entries);
        self
    }

    pub(crate) fn links(&self) -> &[Link] {
        &self.links
    }

    pub(crate) fn link(&self, name: &str) -> Option<&Link> {
        self.by_name.get(name).map(|index| &self.links[*index])
    }

    /// Returns the ports of a bridge.
    pub(crate) fn members(&self, bridge: u32) -> impl Iterator<Item = &Link> {
        self.by_master.get(&bridge).into_iter().flatten().map(|index| &self.links[*index])
    }

    /// Returns whether a device has an address; only known for devices without a marker.
    pub(crate) fn has_address(&self, device: u32) -> bool {
        self.addressed_devices.contains(&device)
    }

    pub(crate) fn fdb_entries(&self, vxlan: u32) -> &[FdbEntry] {
        self.fdb_entries.get(&vxlan).map(Vec::as_slice).unwrap_or_default()
    }
}

/// A unicast route of the main table that the kernel did not add by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Route {
    pub(crate) to: Ipv4Addr,
    pub(crate) prefix: u8,
    pub(crate) via: Option<Ipv4Addr>,
    pub(crate) device: u32,
}

/// The network configuration of a router's namespace.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct RouterSnapshot {
    pub(crate) links: Vec<Link>,
    pub(crate) addresses: BTreeSet<(u32, Ipv4Addr, u8)>,
    pub(crate) routes: BTreeSet<Route>,
    /// Addresses that it answers ARP requests for, each with the device.
    pub(crate) proxies: BTreeSet<(u32, Ipv4Addr)>,
}

impl RouterSnapshot {
    /// Reads the namespace of this thread.
    pub(crate) fn read(socket: &mut NetlinkSocket) -> Result<Self> {
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

pub(crate) fn links(socket: &mut NetlinkSocket) -> Result<Vec<Link>> {
    parse_links(&socket.dump(RTM_GETLINK, &link_request())?)
}

pub(crate) fn link(socket: &mut NetlinkSocket, name: &str) -> Result<Option<Link>> {
    let found = socket.get(RTM_GETLINK, &link_request().with_string(IFLA_IFNAME, name))?;
    Ok(parse_links(found.as_slice())?.pop())
}

/// Requests devices without their counters.
fn link_request() -> NetlinkRequest {
    let filter = nl::RTEXT_FILTER_SKIP_STATS;
    NetlinkRequest::new::<nl::ifinfomsg>().with(IFLA_EXT_MASK, &filter.to_ne_bytes())
}

fn fdb_request() -> NetlinkRequest {
    NetlinkRequest::new::<nl::ndmsg>().set(offset_of!(nl::ndmsg, ndm_family), &[FAMILY_BRIDGE])
}

fn parse_links(payloads: &[Vec<u8>]) -> Result<Vec<Link>> {
    let links = payloads.iter().map(|payload| parse_link(payload));
    links.collect::<Option<_>>().ok_or_else(|| malformed("devices"))
}

fn parse_link(payload: &[u8]) -> Option<Link> {
    let mut link = Link {
        index: u32_at(payload, offset_of!(nl::ifinfomsg, ifi_index))?,
        up: u32_at(payload, offset_of!(nl::ifinfomsg, ifi_flags))? & IFF_UP != 0,
        ..Link::default()
    };
    for (attribute, value) in attributes_after::<nl::ifinfomsg>(payload) {
        match attribute {
            IFLA_ADDRESS => link.mac = value.to_vec(),
            IFLA_IFNAME => link.name = read_string(value),
            IFLA_MTU => link.mtu = read_u32(value)?,
            IFLA_LINK => link.peer = read_u32(value)?,
            IFLA_MASTER => link.master = read_u32(value)?,
            IFLA_LINKINFO => parse_kind(value, &mut link)?,
            IFLA_IFALIAS => link.alias = read_string(value),
            IFLA_AF_SPEC => parse_inet(value, &mut link),
            _ => {}
        }
    }
    Some(link)
}

fn parse_kind(info: &[u8], link: &mut Link) -> Option<()> {
    for (attribute, value) in attributes(info) {
        match (attribute, link.kind.as_str()) {
            (IFLA_INFO_KIND, _) => link.kind = read_string(value),
            (IFLA_INFO_DATA, "vxlan") => link.vxlan = Some(parse_vxlan(value)?),
            (IFLA_INFO_DATA, "bridge") => {
                let is_unwanted = |(attribute, value): (u16, &[u8])| match attribute {
                    IFLA_BR_FORWARD_DELAY | IFLA_BR_STP_STATE => read_u32(value) != Some(0),
                    IFLA_BR_MCAST_SNOOPING => value != [0],
                    _ => false,
                };
                link.has_unwanted_bridge_settings = attributes(value).any(is_unwanted);
            }
            _ => {}
        }
    }
    Some(())
}

fn parse_vxlan(data: &[u8]) -> Option<Vxlan> {
    let mut vxlan = Vxlan { id: 0, local: Ipv4Addr::UNSPECIFIED, port: 0, learning: false };
    for (attribute, value) in attributes(data) {
        match attribute {
            IFLA_VXLAN_ID => vxlan.id = read_u32(value)?,
            IFLA_VXLAN_LOCAL => vxlan.local = read_ipv4(value)?,
            IFLA_VXLAN_LEARNING => vxlan.learning = value != [0],
            IFLA_VXLAN_PORT => vxlan.port = u16::from_be(read_u16(value)?),
            _ => {}
        }
    }
    Some(vxlan)
}

/// Reads the IPv4 settings of a device; the loopback device of some namespaces has none.
fn parse_inet(families: &[u8], link: &mut Link) {
    let inet = attributes(families).value(u16::from(FAMILY_INET));
    let settings = inet.and_then(|inet| attributes(inet).value(IFLA_INET_CONF));
    let setting = |index: usize| settings.and_then(|values| u32_at(values, 4 * (index - 1)));
    link.forwarding = setting(IPV4_DEVCONF_FORWARDING).is_some_and(|value| value != 0);
    link.rp_filter = setting(IPV4_DEVCONF_RP_FILTER).unwrap_or(0);
}

/// Returns `Some(None)` for an entry that does not lead to another node by IPv4.
fn parse_fdb_entry(payload: &[u8]) -> Option<Option<(u32, FdbEntry)>> {
    let index = u32_at(payload, offset_of!(nl::ndmsg, ndm_ifindex))?;
    if payload.get(offset_of!(nl::ndmsg, ndm_flags))? & NTF_SELF == 0 {
        return Some(None);
    }
    let attributes = attributes_after::<nl::ndmsg>(payload);
    let node = attributes.clone().value(NDA_DST).filter(|value| value.len() == 4).and_then(read_ipv4);
    let mac = attributes.value(NDA_LLADDR).and_then(|value| value.try_into().ok());
    Some(node.zip(mac).map(|(node, mac)| (index, FdbEntry { mac, node })))
}

/// Returns the IPv4 addresses of all devices, each with its device and prefix length.
pub(crate) fn addresses(socket: &mut NetlinkSocket) -> Result<BTreeSet<(u32, Ipv4Addr, u8)>> {
    let request =
        NetlinkRequest::new::<nl::ifaddrmsg>().set(offset_of!(nl::ifaddrmsg, ifa_family), &[FAMILY_INET]);
    let parse = |payload: &Vec<u8>| {
        let prefix = *payload.get(offset_of!(nl::ifaddrmsg, ifa_prefixlen))?;
        let index = u32_at(payload, offset_of!(nl::ifaddrmsg, ifa_index))?;
        Some((index, read_ipv4(attributes_after::<nl::ifaddrmsg>(payload).value(IFA_LOCAL)?)?, prefix))
    };
    let found = socket.dump(RTM_GETADDR, &request)?;
    found.iter().map(parse).collect::<Option<_>>().ok_or_else(|| malformed("addresses"))
}

/// A route as the kernel reports it.
struct KernelRoute {
    table: u32,
    kind: u8,
    protocol: u8,
    to: Ipv4Addr,
    prefix: u8,
    via: Option<Ipv4Addr>,
    /// Whether there is a gateway of any kind: one of IPv4, one of another family, or several.
    has_gateway: bool,
    device: u32,
}

fn kernel_routes(socket: &mut NetlinkSocket) -> Result<Vec<KernelRoute>> {
    let request = NetlinkRequest::new::<nl::rtmsg>().set(offset_of!(nl::rtmsg, rtm_family), &[FAMILY_INET]);
    let routes = socket.dump(RTM_GETROUTE, &request)?;
    let routes = routes.iter().map(|payload| parse_route(payload));
    routes.collect::<Option<_>>().ok_or_else(|| malformed("routes"))
}

fn parse_route(payload: &[u8]) -> Option<KernelRoute> {
    let mut route = KernelRoute {
        table: u32::from(*payload.get(offset_of!(nl::rtmsg, rtm_table))?),
        kind: *payload.get(offset_of!(nl::rtmsg, rtm_type))?,
        protocol: *payload.get(offset_of!(nl::rtmsg, rtm_protocol))?,
        to: Ipv4Addr::UNSPECIFIED,
        prefix: *payload.get(offset_of!(nl::rtmsg, rtm_dst_len))?,
        via: None,
        has_gateway: false,
        device: 0,
    };
    for (attribute, value) in attributes_after::<nl::rtmsg>(payload) {
        match attribute {
            RTA_DST => route.to = read_ipv4(value)?,
            RTA_OIF => route.device = read_u32(value)?,
            RTA_GATEWAY => (route.via, route.has_gateway) = (Some(read_ipv4(value)?), true),
            RTA_MULTIPATH | RTA_VIA => route.has_gateway = true,
            RTA_TABLE => route.table = read_u32(value)?,
            _ => {}
        }
    }
    Some(route)
}

fn routes(socket: &mut NetlinkSocket) -> Result<BTreeSet<Route>> {
    let set_by_us = |route: &KernelRoute| {
        route.table == MAIN_TABLE && route.kind == UNICAST && route.protocol != SET_BY_KERNEL
    };
    let routes = kernel_routes(socket)?.into_iter().filter(set_by_us);
    Ok(routes.map(|KernelRoute { to, prefix, via, device, .. }| Route { to, prefix, via, device }).collect())
}

/// Returns the blocks of the main table that are reached through a device without a gateway, each with its device.
pub(crate) fn on_link_routes(socket: &mut NetlinkSocket) -> Result<BTreeSet<(u32, Ipv4Addr, u8)>> {
    let is_on_link = |route: &KernelRoute| {
        route.table == MAIN_TABLE && route.kind == UNICAST && !route.has_gateway && route.device != 0
    };
    let routes = kernel_routes(socket)?.into_iter().filter(is_on_link);
    Ok(routes.map(|route| (route.device, route.to, route.prefix)).collect())
}

fn proxies(socket: &mut NetlinkSocket) -> Result<BTreeSet<(u32, Ipv4Addr)>> {
    let request = NetlinkRequest::new::<nl::ndmsg>()
        .set(offset_of!(nl::ndmsg, ndm_family), &[FAMILY_INET])
        .set(offset_of!(nl::ndmsg, ndm_flags), &[NTF_PROXY]);
    let parse = |payload: &Vec<u8>| {
        let index = u32_at(payload, offset_of!(nl::ndmsg, ndm_ifindex))?;
        Some((index, read_ipv4(attributes_after::<nl::ndmsg>(payload).value(NDA_DST)?)?))
    };
    let found = socket.dump(RTM_GETNEIGH, &request)?;
    found.iter().map(parse).collect::<Option<_>>().ok_or_else(|| malformed("proxied neighbours"))
}

/// Returns the counters of a device as its other end counts them: what one end sends, the other receives.
pub(crate) fn usage_of_peer(socket: &mut NetlinkSocket, name: &str) -> Result<Option<NetworkUsage>> {
    let request = NetlinkRequest::new::<nl::ifinfomsg>().with_string(IFLA_IFNAME, name);
    let Some(payload) = socket.get(RTM_GETLINK, &request)? else { return Ok(None) };
    let Some(counters) = attributes_after::<nl::ifinfomsg>(&payload).value(IFLA_STATS64) else {
        return Ok(None);
    };
    let counter = |offset: usize| {
        counters.get(offset..).and_then(read_u64).ok_or_else(|| malformed("counters of a device"))
    };
    macro_rules! counters {
        ($($name:literal: $field:ident),*) => {
            [$(($name, counter(offset_of!(rtnl_link_stats64, $field))?)),*].into()
        };
    }
    Ok(Some(NetworkUsage {
        rx: counters!("packets": tx_packets, "bytes": tx_bytes, "errors": tx_errors, "dropped": tx_dropped,
            "multicast": multicast, "over_errors": rx_over_errors),
        tx: counters!("packets": rx_packets, "bytes": rx_bytes, "errors": rx_errors, "dropped": rx_dropped,
            "collisions": collisions, "carrier_errors": tx_carrier_errors),
    }))
}

/// Marks the loopback device of this thread's namespace and enables it.
pub(crate) fn mark_loopback(socket: &mut NetlinkSocket, marker: &str) -> Result<()> {
    const LOOPBACK_INDEX: u32 = 1;
    let request = NetlinkRequest::new::<nl::ifinfomsg>()
        .set(offset_of!(nl::ifinfomsg, ifi_index), &LOOPBACK_INDEX.to_ne_bytes())
        .set(offset_of!(nl::ifinfomsg, ifi_flags), &IFF_UP.to_ne_bytes())
        .set(offset_of!(nl::ifinfomsg, ifi_change), &IFF_UP.to_ne_bytes());
    socket.change(RTM_NEWLINK, &request.with(IFLA_IFALIAS, marker.as_bytes()))
}

/// Creates a device of a kind, named after it; returns `false` if the kernel does not support the kind.
pub(crate) fn probe_link_kind(socket: &mut NetlinkSocket, kind: &str) -> Result<bool> {
    let mut info = NetlinkRequest::nested().with_string(IFLA_INFO_KIND, kind);
    if kind == "vxlan" {
        let data = NetlinkRequest::nested().with(IFLA_VXLAN_ID, &1_u32.to_ne_bytes());
        info = info.with_nested(IFLA_INFO_DATA, &data);
    }
    let request = NetlinkRequest::new::<nl::ifinfomsg>().with_string(IFLA_IFNAME, kind);
    socket.create(RTM_NEWLINK, &request.with_nested(IFLA_LINKINFO, &info))
}

fn u32_at(payload: &[u8], offset: usize) -> Option<u32> {
    payload.get(offset..).and_then(read_u32)
}

fn read_ipv4(value: &[u8]) -> Option<Ipv4Addr> {
    value.first_chunk::<4>().map(|octets| Ipv4Addr::from(*octets))
}

#[cfg(test)]
mod tests {
    use super::super::namespace;
    use super::*;
    use crate::command::{COMMAND_TIMEOUT, Commands, Tool};

    #[test]
    fn finds_the_loopback_device() {
        let socket = &mut NetlinkSocket::route().unwrap();
        let lo = link(socket, "lo").unwrap().unwrap();
        assert_eq!((lo.index, lo.name.as_str(), lo.master), (1, "lo", 0));
        assert!(links(socket).unwrap().contains(&lo));
        assert!(link(socket, "no-such-device").unwrap().is_none());
        assert!(usage_of_peer(socket, "lo").unwrap().unwrap().rx.contains_key("multicast"));
    }

    #[test]
    fn reads_what_ip_configured() {
        let commands = Commands::find();
        if !nix::unistd::geteuid().is_root()
            || !commands.is_installed(Tool::Ip)
            || !commands.is_installed(Tool::Bridge)
        {
            return muster_testing::skipped("root, ip and bridge");
        }
        namespace::in_thread(|| {
            namespace::unshare_network().unwrap();
            let run =
                |tool, lines: &str| commands.run(tool, &["-batch", "-"], lines, COMMAND_TIMEOUT).unwrap();
            run(
                Tool::Ip,
                "link set dev lo up\nlink add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0\n\
                 link add br1 type bridge stp_state 0 forward_delay 0 mcast_snooping 1\n\
                 link add vx0 type vxlan id 77 local 127.0.0.1 dstport 4789 learning\n\
                 link set dev vx0 alias muster:x mtu 1400 master br0 up\nlink set dev br0 up\n\
                 addr add 10.7.0.1/24 dev br0\nroute add 10.8.0.0/16 via 10.7.0.2\n\
                 route add 10.9.0.0/16 dev br0\nneigh add proxy 10.7.0.9 dev br0\n",
            );
            run(Tool::Bridge, "fdb append 00:00:00:00:00:00 dev vx0 dst 10.99.0.2 self\n");
            let socket = &mut NetlinkSocket::route().unwrap();
            let host = HostSnapshot::read_all(socket).unwrap();
            let (bridge, vxlan) = (host.link("br0").unwrap(), host.link("vx0").unwrap());
            assert!(
                !bridge.has_unwanted_bridge_settings
                    && host.link("br1").unwrap().has_unwanted_bridge_settings
            );
            assert_eq!((bridge.kind.as_str(), bridge.up, bridge.mac.len()), ("bridge", true, 6));
            assert_eq!((vxlan.alias.as_str(), vxlan.mtu, vxlan.master), ("muster:x", 1400, bridge.index));
            let local = Ipv4Addr::LOCALHOST;
            assert_eq!(vxlan.vxlan, Some(Vxlan { id: 77, local, port: 4789, learning: true }));
            let address = |text: &str| text.parse::<Ipv4Addr>().unwrap();
            assert_eq!(host.fdb_entries(vxlan.index), [FdbEntry { mac: [0; 6], node: address("10.99.0.2") }]);
            let router = RouterSnapshot::read(socket).unwrap();
            assert!(router.addresses.contains(&(bridge.index, address("10.7.0.1"), 24)));
            let (via, device) = (Some(address("10.7.0.2")), bridge.index);
            let routed = Route { to: address("10.8.0.0"), prefix: 16, via, device };
            let direct = Route { to: address("10.9.0.0"), prefix: 16, via: None, device };
            assert_eq!(router.routes, [routed, direct].into());
            assert_eq!(router.proxies, [(device, address("10.7.0.9"))].into());
            let on_link = on_link_routes(socket).unwrap();
            assert_eq!(on_link, [(device, address("10.7.0.0"), 24), (device, direct.to, 16)].into());
        });
    }
}
