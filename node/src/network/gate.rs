//! The gate of the routers: rule sets of the host that drop all packets from and to routers, and ARP and packets for the
//! virtual address of the cluster, unless this host is the active network node. See docs/decisions/0054.
//!
//! The rules compare the protocol of a packet with the set `open`. While another node may take over, the elements of the
//! set expire: the kernel closes the gate even if this program hangs or was killed. The rule sets exist while the host has
//! a router or the virtual address.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::Instant;

use muster_types::address::{InterfaceAddress, Netblock};
use muster_types::network::NetworkPlan;
use muster_types::node::RouterGate;
use muster_types::{Error, Result};

use super::host_table::{HostTable, TableChange};
use super::names::{GATE_TABLE, NetworkNames, network_of_marker, vxid_of_device};
use super::netlink::NetlinkSocket;
use super::nftables::NftFamily;
use super::{Networks, gratuitous_arp, namespace, observed, rules};
use crate::command::Tool;

/// The number of announcements after the gate was opened, because a broadcast may get lost.
const ANNOUNCEMENT_COUNT: u8 = 3;

/// The addresses that the gate guards.
#[derive(Debug, Clone)]
pub(crate) struct GateConfig {
    /// The device of the external network.
    pub(crate) nic: String,
    pub(crate) virtual_ip: Option<InterfaceAddress>,
    pub(crate) floating_network: Netblock,
}

/// In-memory state of the gate.
#[derive(Debug)]
pub(crate) struct GateState {
    /// The number of reconcile passes that need the rule sets at the moment.
    users: usize,
    bridge: HostTable,
    arp: HostTable,
    ip: HostTable,
    /// The devices of routers that the rule set knows; `None` until it was applied or found in force.
    devices: Option<BTreeSet<String>>,
    /// What was requested last; `None` until the first request. Until then the kernel's state is left alone.
    requested: Option<RouterGate>,
    /// Whether the kernel's sets have the elements of [`RouterGate::Open`].
    is_open_permanently: bool,
    announcements: u8,
}

impl Default for GateState {
    fn default() -> Self {
        Self {
            users: 0,
            bridge: HostTable::new(NftFamily::Bridge, GATE_TABLE, "gate-rules-bridge"),
            arp: HostTable::new(NftFamily::Arp, GATE_TABLE, "gate-rules-arp"),
            ip: HostTable::new(NftFamily::Ip, GATE_TABLE, "gate-rules-ip"),
            devices: None,
            requested: None,
            is_open_permanently: false,
            announcements: 0,
        }
    }
}

impl GateState {
    fn has_any_table(&self) -> Result<bool> {
        Ok(self.bridge.exists()? || self.arp.exists()? || self.ip.exists()?)
    }
}

/// Protects the rule sets from being removed.
#[derive(Debug)]
pub(crate) struct GateGuard<'a>(&'a Networks);

impl Drop for GateGuard<'_> {
    fn drop(&mut self) {
        self.0.gate.lock().users -= 1;
    }
}

impl Networks {
    /// Applies the rule sets before the routers of these plans exist, and protects them from removal while the guard
    /// exists.
    pub(crate) fn acquire_gate(&self, plans: &[NetworkPlan]) -> Result<GateGuard<'_>> {
        let mut state = self.gate.lock();
        self.ensure_gate_tables(&mut state)?;
        let devices = plans.iter().filter(|plan| plan.router.is_some()).flat_map(|plan| {
            let names = NetworkNames::new(plan.vxid);
            [names.veth_outer, names.egress_outer]
        });
        self.add_gate_devices(&mut state, &devices.collect())?;
        state.users += 1;
        drop(state);
        Ok(GateGuard(self))
    }

    /// Returns whether the gate is open, or `None` before this program opened or closed it.
    pub(crate) fn is_gate_open(&self) -> Option<bool> {
        self.gate.lock().requested.map(RouterGate::is_open)
    }

    /// Opens or closes the gate.
    pub(crate) fn set_gate(&self, gate: RouterGate) -> Result<()> {
        let mut state = self.gate.lock();
        let was_open = state.requested.is_some_and(RouterGate::is_open);
        state.requested = Some(gate);
        // This program may have been killed before it had applied or removed all of them.
        if state.has_any_table()? {
            self.ensure_gate_tables(&mut state)?;
        }
        if !gate.is_open() {
            state.announcements = 0;
            self.apply_gate(&mut state)?;
            drop(state);
            self.set_virtual_address(false)?;
            return self.set_egress_link(false);
        }
        if self.gate_config.virtual_ip.is_some() {
            self.ensure_gate_tables(&mut state)?;
            self.set_virtual_address(true)?;
        }
        self.set_egress_link(true)?;
        self.apply_gate(&mut state)?;
        if !was_open {
            state.announcements = ANNOUNCEMENT_COUNT;
        }
        let announces = state.announcements > 0;
        state.announcements = state.announcements.saturating_sub(1);
        drop(state);
        if announces {
            self.announce_routers();
        }
        Ok(())
    }

    /// Removes the rule sets if the host has no router and does not need the virtual address.
    pub(crate) fn remove_unused_gate(&self) -> Result<()> {
        let mut state = self.gate.lock();
        let needs_virtual_ip =
            self.gate_config.virtual_ip.is_some() && state.requested.is_none_or(RouterGate::is_open);
        if state.users > 0 || needs_virtual_ip || !state.has_any_table()? || !router_devices()?.is_empty() {
            return Ok(());
        }
        state.devices = None;
        state.is_open_permanently = false;
        state.arp.remove(self)?;
        state.ip.remove(self)?;
        state.bridge.remove(self)
    }

    /// Applies the rule sets. New ones are closed, so the requested state is applied again.
    fn ensure_gate_tables(&self, state: &mut GateState) -> Result<()> {
        let config = &self.gate_config;
        let changes = [
            state.bridge.ensure(self, &rules::bridge_gate_rules())?,
            state.arp.ensure(self, &rules::arp_gate_rules(config.floating_network, config.virtual_ip))?,
            state.ip.ensure(self, &rules::ip_gate_rules(&self.host.egress_bridge, config.virtual_ip))?,
        ];
        let is_unchanged = changes.iter().all(|change| *change == TableChange::None);
        if is_unchanged && state.devices.is_none() {
            // An earlier process applied the rule sets. It added each device before it created the device.
            state.devices = Some(router_devices()?);
        }
        if is_unchanged {
            return Ok(());
        }
        state.devices = Some(BTreeSet::new());
        state.is_open_permanently = false;
        self.add_gate_devices(state, &router_devices()?)?;
        self.apply_gate(state)
    }

    fn add_gate_devices(&self, state: &mut GateState, devices: &BTreeSet<String>) -> Result<()> {
        let known = state.devices.get_or_insert_default();
        let new: BTreeSet<String> = devices.difference(known).cloned().collect();
        if new.is_empty() {
            return Ok(());
        }
        self.nft(&rules::add_gate_devices(&new))?;
        known.extend(new);
        Ok(())
    }

    /// Applies the requested state to the rule sets, if they exist.
    fn apply_gate(&self, state: &mut GateState) -> Result<()> {
        let Some(requested) = state.requested else { return Ok(()) };
        let is_in_force = requested == RouterGate::Open && state.is_open_permanently;
        if is_in_force || !state.has_any_table()? {
            return Ok(());
        }
        state.is_open_permanently = false;
        let began = Instant::now();
        match requested {
            RouterGate::Open => {
                self.nft(&rules::open_gate(None))?;
                state.is_open_permanently = true;
            }
            RouterGate::OpenUntil { close_at, lease_end } if began < close_at => {
                self.nft(&rules::open_gate(Some(close_at - began)))?;
                // The kernel counts from when it received the command, which may have been delayed.
                if began.elapsed() > lease_end - close_at {
                    self.nft(rules::CLOSE_GATE)?;
                    return Err(Error::Unavailable("opening the gate of the routers took too long".into()));
                }
            }
            RouterGate::OpenUntil { .. } | RouterGate::Closed => self.nft(rules::CLOSE_GATE)?,
        }
        Ok(())
    }

    /// Adds the virtual address to the device of the external network, or removes it.
    fn set_virtual_address(&self, wanted: bool) -> Result<()> {
        let Some(virtual_ip) = self.gate_config.virtual_ip else { return Ok(()) };
        let nic = &self.gate_config.nic;
        let mut socket = NetlinkSocket::route()?;
        let Some(link) = observed::link(&mut socket, nic)? else {
            let reason =
                format!("NETWORK_VIRTUAL_IP needs device {nic} of NODE_EGRESS_NIC, which does not exist");
            return if wanted { Err(Error::Conflict(reason)) } else { Ok(()) };
        };
        let found = observed::addresses(&mut socket)?;
        let address = virtual_ip.address;
        let is_present = found.contains(&(link.index, address, virtual_ip.prefix));
        match (wanted, is_present) {
            (true, false) => {
                let line = format!("addr add {virtual_ip} dev {nic}");
                self.batch(Tool::Ip, &[line])
            }
            (false, true) => self.batch(Tool::Ip, &[format!("addr del {virtual_ip} dev {nic}")]),
            _ => Ok(()),
        }
    }

    /// Brings the egress bridge up or down, if it exists. While it is down, the host has no route to the floating
    /// network through it, so that this host reaches floating addresses by way of the active network node.
    fn set_egress_link(&self, up: bool) -> Result<()> {
        let name = &self.host.egress_bridge;
        let link = observed::link(&mut NetlinkSocket::route()?, name)?;
        if link.is_none_or(|link| link.up == up || network_of_marker(&link.alias).is_none()) {
            return Ok(());
        }
        self.batch(Tool::Ip, &[format!("link set dev {name} {}", if up { "up" } else { "down" })])
    }

    /// Announces the virtual address and the addresses of all routers.
    fn announce_routers(&self) {
        let announce = |network: Option<_>, is_announced: &dyn Fn(&str, Ipv4Addr) -> bool| {
            if let Err(error) = gratuitous_arp::announce(is_announced) {
                tracing::warn!(?network, %error, "failed to announce addresses");
            }
        };
        if let Some(virtual_ip) = self.gate_config.virtual_ip {
            announce(None, &|device, address| {
                device == self.gate_config.nic && address == virtual_ip.address
            });
        }
        namespace::in_thread(|| {
            for network in namespace::list_names() {
                if namespace::inode(network).is_some() && namespace::enter(network).is_ok() {
                    announce(Some(network), &|device, _| vxid_of_device(device).is_some());
                }
            }
        });
    }
}

/// Returns the devices on this host that belong to routers.
fn router_devices() -> Result<BTreeSet<String>> {
    let links = observed::links(&mut NetlinkSocket::route()?)?;
    let ours = links.into_iter().filter(|link| {
        link.name.ends_with("-o")
            && vxid_of_device(&link.name).is_some()
            && network_of_marker(&link.alias).is_some()
    });
    Ok(ours.map(|link| link.name).collect())
}
