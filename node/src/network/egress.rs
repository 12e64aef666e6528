//! The bridge where routers meet the world. All networks of a node share it; it is there while one needs it.

use std::fs;
use std::net::Ipv4Addr;

use muster_types::address::Netblock;
use muster_types::network::{EgressPlan, FLOATING};
use muster_types::{Error, Result};

use super::names::{self, EGRESS_TABLE, marker};
use super::netlink::Socket;
use super::nftables::{self, Family, fingerprint};
use super::view::{self, Link, Snapshot};
use super::{Networks, changes, lock, namespace, rules, server};
use crate::command::{COMMAND_TIMEOUT, Tool};

/// How often bridges are looked for and removed.
const ROUNDS: usize = 3;

/// The file that says which rule set is in force, so that a restart need not replace it.
const RULES: &str = "egress-rules";

/// What is remembered of the way out.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// How many passes rely on it just now.
    users: usize,
    /// Whether the file was read.
    read: bool,
    /// Fingerprints of the rule set's text and of what the kernel made of it.
    rules: Option<[u64; 2]>,
    /// When that was last compared, in changes of rule sets.
    generation: Option<u32>,
}

impl State {
    fn read(&mut self) {
        if !self.read {
            let text = fs::read_to_string(names::common_folder().join(RULES)).unwrap_or_default();
            let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            self.rules = numbers.try_into().ok();
            self.read = true;
        }
    }

    fn write(&self) -> Result<()> {
        let folder = names::common_folder();
        match self.rules {
            Some([text, table]) => {
                fs::create_dir_all(folder)
                    .map_err(|error| Error::Internal(format!("cannot make {}: {error}", folder.display())))?;
                server::write(folder, RULES, &format!("{text} {table}\n"))
            }
            None => {
                let _ = fs::remove_file(folder.join(RULES));
                Ok(())
            }
        }
    }
}

/// Keeps the way out from being removed.
#[derive(Debug)]
pub(crate) struct Use<'a> {
    networks: Option<&'a Networks>,
    pub(crate) repaired: Vec<String>,
}

impl Use<'_> {
    pub(crate) fn nothing() -> Self {
        Self { networks: None, repaired: Vec::new() }
    }
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        if let Some(networks) = self.networks {
            lock(&networks.egress).users -= 1;
        }
    }
}

impl Networks {
    /// Makes the way out and holds it. The rules come first: nothing may pass before them.
    pub(crate) fn use_egress(&self, egress: &EgressPlan) -> Result<Use<'_>> {
        let mut state = lock(&self.egress);
        let mut repaired = Vec::new();
        let mut socket = Socket::route()?;
        let link = view::link(&mut socket, &self.around.egress_bridge)?;
        if link.as_ref().is_some_and(is_egress) {
            // Whatever else cannot be: a bridge that is there is guarded.
            self.egress_rules(egress, &mut state, &mut repaired)?;
        }
        let lines = self.bridge_lines(egress, link.as_ref(), &mut socket, &mut repaired)?;
        self.egress_rules(egress, &mut state, &mut repaired)?;
        self.batch(Tool::Ip, &lines)?;
        if namespace::get("ipv4/ip_forward").is_some_and(|value| value != "1") {
            namespace::set("ipv4/ip_forward", "1")?;
            repaired.push("the node did not pass packets on".into());
        }
        state.users += 1;
        Ok(Use { networks: Some(self), repaired })
    }

    fn bridge_lines(
        &self,
        egress: &EgressPlan,
        link: Option<&Link>,
        socket: &mut Socket,
        repaired: &mut Vec<String>,
    ) -> Result<Vec<String>> {
        let name = &self.around.egress_bridge;
        let (address, prefix) = (egress.netblock.router(), egress.netblock.prefix());
        let mut lines = Vec::new();
        let Some(link) = link else {
            require_free(socket, egress.netblock, None)?;
            repaired.push(format!("bridge {name} was missing"));
            lines.push(format!("link add {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"));
            lines.push(format!("link set dev {name} alias {}{}", marker(FLOATING), self.around.quiet()));
            lines.push(format!("addr add {address}/{prefix} dev {name}"));
            lines.push(format!("link set dev {name} up"));
            return Ok(lines);
        };
        if link.alias != marker(FLOATING) {
            changes::own(&Snapshot::devices(socket)?, link, "bridge", FLOATING)?;
        }
        let addresses = view::addresses(socket)?;
        let own: Vec<(Ipv4Addr, u8)> = addresses
            .iter()
            .filter(|(index, _, _)| *index == link.index)
            .map(|(_, address, prefix)| (*address, *prefix))
            .collect();
        let lacks_address = !own.contains(&(address, prefix));
        if lacks_address {
            require_free(socket, egress.netblock, Some(link.index))?;
        }
        if link.alias.is_empty() {
            repaired.push(format!("bridge {name} was not marked"));
            lines.push(format!("link set dev {name} alias {}{}", marker(FLOATING), self.around.quiet()));
        }
        for (other, length) in own.iter().filter(|other| **other != (address, prefix)) {
            repaired.push(format!("bridge {name} had address {other}"));
            lines.push(format!("addr del {other}/{length} dev {name}"));
        }
        if lacks_address {
            repaired.push(format!("bridge {name} had no address {address}"));
            lines.push(format!("addr add {address}/{prefix} dev {name}"));
        }
        if !link.up {
            repaired.push(format!("bridge {name} was down"));
            lines.push(format!("link set dev {name} up"));
        }
        Ok(lines)
    }

    fn egress_rules(&self, egress: &EgressPlan, state: &mut State, repaired: &mut Vec<String>) -> Result<()> {
        state.read();
        let mut socket = Socket::netfilter()?;
        let generation = nftables::generation(&mut socket)?;
        let text = rules::egress_rules(egress, &self.around.egress_bridge, self.api_port.get().copied());
        let wanted = fingerprint(&text);
        if state.generation == Some(generation) && state.rules.is_some_and(|[text, _]| text == wanted) {
            return Ok(());
        }
        let mut found =
            || Ok(nftables::tables(&mut socket, Family::Ip, Some(EGRESS_TABLE))?.remove(EGRESS_TABLE));
        let in_force = found()?.map(|table| [wanted, table.fingerprint]);
        if in_force.is_none() || in_force != state.rules {
            repaired.push(format!("rule set {EGRESS_TABLE} was missing or had been changed"));
            self.nft(&text)?;
            let table = found()?.filter(|table| table.rules == rules::count(&text));
            state.rules = table.map(|table| [wanted, table.fingerprint]);
            state.write()?;
        }
        state.generation = Some(generation);
        Ok(())
    }

    /// Takes the way out away when nobody uses it.
    pub(crate) fn sweep_egress(&self) -> Result<()> {
        let link = view::link(&mut Socket::route()?, &self.around.egress_bridge)?;
        let ours = link.is_some_and(|link| link.alias.is_empty() || is_egress(&link));
        if ours || has_egress_table()? { self.sweep_every_egress() } else { Ok(()) }
    }

    /// The same by a look at all devices: also a bridge that had its name from another card. The rules go last.
    pub(crate) fn sweep_every_egress(&self) -> Result<()> {
        let mut state = lock(&self.egress);
        if state.users > 0 {
            return Ok(());
        }
        let mut result = Ok(());
        for _ in 0..ROUNDS {
            let node = Snapshot::devices(&mut Socket::route()?)?;
            // One that was made and not marked yet is ours, too.
            let begun = |link: &Link| {
                link.name == self.around.egress_bridge && changes::is_bare(&node, link, "bridge")
            };
            let (used, unused): (Vec<&Link>, Vec<&Link>) = node
                .links()
                .iter()
                .filter(|link| is_egress(link) || begun(link))
                .partition(|link| node.members(link.index).next().is_some());
            if unused.is_empty() {
                if used.is_empty() {
                    *state = State { read: true, ..State::default() };
                    state.write()?;
                    if has_egress_table()? {
                        self.nft(&rules::without("ip", EGRESS_TABLE))?;
                    }
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

/// Refuses a floating network that another device of this machine leads to: its neighbours there could no longer be
/// reached. `own` is the bridge that is meant to have it.
fn require_free(socket: &mut Socket, block: Netblock, own: Option<u32>) -> Result<()> {
    let links = view::links(socket)?;
    let taken = view::addresses(socket)?.into_iter().chain(view::on_link(socket)?);
    let mut others = taken
        .filter(|(_, address, prefix)| leads_into(block, *address, *prefix))
        .filter(|(device, ..)| Some(*device) != own)
        .filter_map(|(device, address, prefix)| {
            let link = links.iter().find(|link| link.index == device && !is_egress(link))?;
            Some(format!("{address}/{prefix} of device {}", link.name))
        });
    match others.next() {
        Some(other) => Err(Error::Conflict(format!(
            "the floating network {block} overlaps {other}, which this machine has already"
        ))),
        None => Ok(()),
    }
}

/// Whether an address or a route covers a part of a block. The default route, or half of it, covers everything and is
/// nobody's in particular.
fn leads_into(block: Netblock, address: Ipv4Addr, prefix: u8) -> bool {
    let shorter = u32::from(block.prefix().min(prefix));
    let difference = u32::from(address) ^ u32::from(block.network());
    prefix > 1 && difference.leading_zeros() >= shorter
}

fn is_egress(link: &Link) -> bool {
    link.kind == "bridge" && link.alias == marker(FLOATING)
}

fn has_egress_table() -> Result<bool> {
    let tables = nftables::tables(&mut Socket::netfilter()?, Family::Ip, Some(EGRESS_TABLE))?;
    Ok(tables.contains_key(EGRESS_TABLE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_covers_a_part_of_the_block_is_in_its_way() {
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
            assert_eq!(leads_into(block, address.parse().unwrap(), prefix), expected, "{address}/{prefix}");
        }
    }
}
