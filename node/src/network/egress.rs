//! The egress bridge, which connects routers to the external network. All networks of a host share it; it exists while
//! one of them needs it.

use std::net::Ipv4Addr;

use muster_types::address::Netblock;
use muster_types::network::{EgressPlan, FLOATING_NETWORK_ID};
use muster_types::{Error, Result};

use super::host_table::{HostTable, TableChange};
use super::names::{EGRESS_TABLE, marker};
use super::netlink::NetlinkSocket;
use super::nftables::NftFamily;
use super::observed::{self, HostSnapshot, Link};
use super::{Networks, changes, namespace, rules};
use crate::command::{COMMAND_TIMEOUT, Tool};

/// The maximum number of attempts at removing all unused bridges.
const MAX_PASSES: usize = 3;

/// In-memory state of the egress bridge.
#[derive(Debug)]
pub(crate) struct EgressState {
    /// The number of reconcile passes that use it at the moment.
    users: usize,
    table: HostTable,
}

impl Default for EgressState {
    fn default() -> Self {
        Self { users: 0, table: HostTable::new(NftFamily::Ip, EGRESS_TABLE, "egress-rules") }
    }
}

/// Protects the egress bridge from being removed.
#[derive(Debug)]
pub(crate) struct EgressGuard<'a> {
    networks: Option<&'a Networks>,
    pub(crate) repaired: Vec<String>,
}

impl EgressGuard<'_> {
    pub(crate) fn unused() -> Self {
        Self { networks: None, repaired: Vec::new() }
    }
}

impl Drop for EgressGuard<'_> {
    fn drop(&mut self) {
        if let Some(networks) = self.networks {
            networks.egress.lock().users -= 1;
        }
    }
}

impl Networks {
    /// Creates or repairs the egress bridge and protects it from removal while the guard exists. The rules are applied
    /// first, so that no packet passes without them.
    pub(crate) fn acquire_egress(&self, egress: &EgressPlan) -> Result<EgressGuard<'_>> {
        let mut state = self.egress.lock();
        let mut repaired = Vec::new();
        let mut socket = NetlinkSocket::route()?;
        let link = observed::link(&mut socket, &self.host.egress_bridge)?;
        if link.as_ref().is_some_and(is_egress) {
            // An existing bridge is protected even if the rest of this fails.
            self.egress_rules(egress, &mut state, &mut repaired)?;
        }
        let lines = self.bridge_lines(egress, link.as_ref(), &mut socket, &mut repaired)?;
        self.egress_rules(egress, &mut state, &mut repaired)?;
        self.batch(Tool::Ip, &lines)?;
        if namespace::get_sysctl("ipv4/ip_forward").is_some_and(|value| value != "1") {
            namespace::set_sysctl("ipv4/ip_forward", "1")?;
            repaired.push("IPv4 forwarding was disabled on the host".into());
        }
        state.users += 1;
        Ok(EgressGuard { networks: Some(self), repaired })
    }

    fn bridge_lines(
        &self,
        egress: &EgressPlan,
        link: Option<&Link>,
        socket: &mut NetlinkSocket,
        repaired: &mut Vec<String>,
    ) -> Result<Vec<String>> {
        let name = &self.host.egress_bridge;
        let (address, prefix) = (egress.netblock.router(), egress.netblock.prefix());
        let mut lines = Vec::new();
        let Some(link) = link else {
            require_no_overlap(socket, egress.netblock, None)?;
            repaired.push(format!("bridge {name} was missing"));
            return Ok(self.new_bridge_lines(egress));
        };
        if link.alias != marker(FLOATING_NETWORK_ID) {
            changes::require_ownership(
                &HostSnapshot::read_devices(socket)?,
                link,
                "bridge",
                FLOATING_NETWORK_ID,
            )?;
        }
        let addresses = observed::addresses(socket)?;
        let own: Vec<(Ipv4Addr, u8)> = addresses
            .iter()
            .filter(|(index, _, _)| *index == link.index)
            .map(|(_, address, prefix)| (*address, *prefix))
            .collect();
        let lacks_address = !own.contains(&(address, prefix));
        if lacks_address {
            require_no_overlap(socket, egress.netblock, Some(link.index))?;
        }
        if link.alias.is_empty() {
            repaired.push(format!("bridge {name} was not marked"));
            lines.push(format!(
                "link set dev {name} alias {}{}",
                marker(FLOATING_NETWORK_ID),
                self.host.addrgenmode_option()
            ));
        }
        for (other, length) in own.iter().filter(|other| **other != (address, prefix)) {
            repaired.push(format!("bridge {name} had address {other}"));
            lines.push(format!("addr del {other}/{length} dev {name}"));
        }
        if lacks_address {
            repaired.push(format!("bridge {name} had no address {address}"));
            lines.push(format!("addr add {address}/{prefix} dev {name}"));
        }
        match self.is_gate_open() {
            Some(true) if !link.up => {
                repaired.push(format!("bridge {name} was down"));
                lines.push(format!("link set dev {name} up"));
            }
            Some(false) if link.up => lines.push(format!("link set dev {name} down")),
            _ => {}
        }
        Ok(lines)
    }

    /// Returns the commands that create the bridge.
    fn new_bridge_lines(&self, egress: &EgressPlan) -> Vec<String> {
        let name = &self.host.egress_bridge;
        let (address, prefix) = (egress.netblock.router(), egress.netblock.prefix());
        let marker = marker(FLOATING_NETWORK_ID);
        let mut lines = vec![
            format!("link add {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"),
            format!("link set dev {name} alias {marker}{}", self.host.addrgenmode_option()),
            format!("addr add {address}/{prefix} dev {name}"),
        ];
        if self.is_gate_open() == Some(true) {
            lines.push(format!("link set dev {name} up"));
        }
        lines
    }

    fn egress_rules(
        &self,
        egress: &EgressPlan,
        state: &mut EgressState,
        repaired: &mut Vec<String>,
    ) -> Result<()> {
        let text = rules::egress_rules(egress, &self.host.egress_bridge, self.api_port.get().copied());
        if state.table.ensure(self, &text)? != TableChange::None {
            repaired.push(format!("rule set {EGRESS_TABLE} was missing or had been changed"));
        }
        Ok(())
    }

    /// Removes the egress bridge if no network uses it.
    pub(crate) fn remove_unused_egress(&self) -> Result<()> {
        let link = observed::link(&mut NetlinkSocket::route()?, &self.host.egress_bridge)?;
        let is_ours = link.is_some_and(|link| link.alias.is_empty() || is_egress(&link));
        let has_table = self.egress.lock().table.exists()?;
        if is_ours || has_table { self.remove_unused_egress_bridges() } else { Ok(()) }
    }

    /// Removes all unused egress bridges, also those named after another network card. The rules are removed last.
    pub(crate) fn remove_unused_egress_bridges(&self) -> Result<()> {
        let mut state = self.egress.lock();
        if state.users > 0 {
            return Ok(());
        }
        let mut result = Ok(());
        for _ in 0..MAX_PASSES {
            let snapshot = HostSnapshot::read_devices(&mut NetlinkSocket::route()?)?;
            // This program may have been killed between creating and marking the bridge.
            let is_ours_unmarked = |link: &Link| {
                link.name == self.host.egress_bridge
                    && changes::is_unmarked_and_unused(&snapshot, link, "bridge")
            };
            let (used, unused): (Vec<&Link>, Vec<&Link>) = snapshot
                .links()
                .iter()
                .filter(|link| is_egress(link) || is_ours_unmarked(link))
                .partition(|link| snapshot.members(link.index).next().is_some());
            if unused.is_empty() {
                if used.is_empty() {
                    state.table.remove(self)?;
                }
                return Ok(());
            }
            let lines: Vec<String> =
                unused.iter().map(|link| format!("link del dev {}", link.name)).collect();
            result = self.batch(Tool::Ip, &lines);
        }
        result
    }

    pub(crate) fn nft(&self, text: &str) -> Result<()> {
        self.commands.run(Tool::Nft, &["-f", "-"], text, COMMAND_TIMEOUT).map(|_| ())
    }
}

/// Refuses a floating network that overlaps a network on another device of this host, whose neighbours would become
/// unreachable. `own` is the index of the egress bridge.
fn require_no_overlap(socket: &mut NetlinkSocket, block: Netblock, own: Option<u32>) -> Result<()> {
    let links = observed::links(socket)?;
    let occupied = observed::addresses(socket)?.into_iter().chain(observed::on_link_routes(socket)?);
    let mut others = occupied
        .filter(|(_, address, prefix)| overlaps(block, *address, *prefix))
        .filter(|(device, ..)| Some(*device) != own)
        .filter_map(|(device, address, prefix)| {
            let link = links.iter().find(|link| link.index == device && !is_egress(link))?;
            Some(format!("{address}/{prefix} of device {}", link.name))
        });
    match others.next() {
        Some(other) => Err(Error::Conflict(format!(
            "the floating network {block} overlaps {other}, which this host is already connected to"
        ))),
        None => Ok(()),
    }
}

/// Returns whether an address or a route covers a part of a block. A default route, or half of it, covers everything
/// and does not count.
fn overlaps(block: Netblock, address: Ipv4Addr, prefix: u8) -> bool {
    let shorter = u32::from(block.prefix().min(prefix));
    let difference = u32::from(address) ^ u32::from(block.network());
    prefix > 1 && difference.leading_zeros() >= shorter
}

fn is_egress(link: &Link) -> bool {
    link.kind == "bridge" && link.alias == marker(FLOATING_NETWORK_ID)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_routes_into_the_block_overlap_it() {
        let block = "192.168.20.0/24".parse().unwrap();
        for (address, prefix, expected) in [
            ("192.168.20.200", 32, true),
            ("192.168.20.200", 24, true),
            ("192.168.20.128", 25, true),
            ("192.168.0.0", 16, true),
            ("192.168.21.1", 24, false),
            ("192.168.21.1", 23, true),
            ("10.0.0.1", 8, false),
            ("0.0.0.0", 0, false),
            ("128.0.0.0", 1, false),
        ] {
            assert_eq!(overlaps(block, address.parse().unwrap(), prefix), expected, "{address}/{prefix}");
        }
    }
}
