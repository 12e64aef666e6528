//! The bridge where routers meet the world. All networks of a node share it; it is there while one needs it.

use muster_types::Result;
use muster_types::network::{Egress, FLOATING};

use super::names::{EGRESS_TABLE, marker};
use super::netlink::Socket;
use super::nftables::{self, Family, fingerprint};
use super::view::{self, Link, Snapshot};
use super::{Networks, changes, lock, namespace, rules};
use crate::command::{QUICK, Tool};

/// How often bridges are looked for and removed.
const ROUNDS: usize = 3;

/// What is remembered of the way out.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// How many passes rely on it just now.
    users: usize,
    /// Fingerprints of the rule set's text and of what the kernel made of it.
    rules: Option<[u64; 2]>,
    /// When that was last compared, in changes of rule sets.
    generation: Option<u32>,
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
    /// Makes the way out and holds it.
    pub(crate) fn use_egress(&self, egress: &Egress) -> Result<Use<'_>> {
        let mut state = lock(&self.egress);
        let mut repaired = Vec::new();
        let mut socket = Socket::route()?;
        let link = view::link(&mut socket, &self.around.egress_bridge)?;
        let lines = self.bridge_lines(egress, link.as_ref(), &mut socket, &mut repaired)?;
        self.batch(Tool::Ip, &lines)?;
        if namespace::get("ipv4/ip_forward").is_some_and(|value| value != "1") {
            namespace::set("ipv4/ip_forward", "1")?;
            repaired.push("the node did not pass packets on".into());
        }
        self.egress_rules(egress, &mut state, &mut repaired)?;
        state.users += 1;
        Ok(Use { networks: Some(self), repaired })
    }

    fn bridge_lines(
        &self,
        egress: &Egress,
        link: Option<&Link>,
        socket: &mut Socket,
        repaired: &mut Vec<String>,
    ) -> Result<Vec<String>> {
        let name = &self.around.egress_bridge;
        let (address, prefix) = (egress.netblock.router(), egress.netblock.prefix());
        let mut lines = Vec::new();
        let Some(link) = link else {
            repaired.push(format!("bridge {name} was missing"));
            lines.push(format!("link add {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"));
            lines.push(format!("link set dev {name} alias {}{}", marker(FLOATING), self.around.quiet()));
            lines.push(format!("addr add {address}/{prefix} dev {name}"));
            lines.push(format!("link set dev {name} up"));
            return Ok(lines);
        };
        changes::own(link, "bridge", FLOATING)?;
        if link.alias.is_empty() || !link.up {
            repaired.push(format!("bridge {name} was down or not marked"));
            lines.push(format!("link set dev {name} alias {} up", marker(FLOATING)));
        }
        let addresses = view::addresses(socket)?;
        let own = addresses.iter().filter(|(index, _, _)| *index == link.index);
        for (_, other, length) in
            own.clone().filter(|(_, other, length)| (*other, *length) != (address, prefix))
        {
            repaired.push(format!("bridge {name} had address {other}"));
            lines.push(format!("addr del {other}/{length} dev {name}"));
        }
        if own.clone().all(|(_, other, length)| (*other, *length) != (address, prefix)) {
            repaired.push(format!("bridge {name} had no address {address}"));
            lines.push(format!("addr add {address}/{prefix} dev {name}"));
        }
        Ok(lines)
    }

    fn egress_rules(&self, egress: &Egress, state: &mut State, repaired: &mut Vec<String>) -> Result<()> {
        let mut socket = Socket::netfilter()?;
        let generation = nftables::generation(&mut socket)?;
        let text = rules::egress_rules(egress, &self.around.egress_bridge);
        let wanted = egress.masquerade.then(|| fingerprint(&text));
        let unchanged = state.generation == Some(generation) && state.rules.map(|[text, _]| text) == wanted;
        if unchanged {
            return Ok(());
        }
        let mut found =
            || Ok(nftables::tables(&mut socket, Family::Ip, Some(EGRESS_TABLE))?.remove(EGRESS_TABLE));
        let table = found()?;
        let in_force = table.as_ref().zip(wanted).map(|(table, text)| [text, table.fingerprint]);
        if wanted.is_none() {
            if table.is_some() {
                repaired.push(format!("rule set {EGRESS_TABLE} was there"));
                self.nft(&rules::without("ip", EGRESS_TABLE))?;
            }
            state.rules = None;
        } else if in_force.is_none() || in_force != state.rules {
            repaired.push(format!("rule set {EGRESS_TABLE} was missing or had been changed"));
            self.nft(&text)?;
            let table = found()?.filter(|table| table.rules == rules::count(&text));
            state.rules = table.zip(wanted).map(|(table, text)| [text, table.fingerprint]);
        }
        state.generation = Some(generation);
        Ok(())
    }

    /// Takes the way out away when nobody uses it.
    pub(crate) fn sweep_egress(&self) -> Result<()> {
        let link = view::link(&mut Socket::route()?, &self.around.egress_bridge)?;
        let ours = link.is_some_and(|link| is_egress(&link));
        if ours || has_egress_table()? { self.sweep_every_egress() } else { Ok(()) }
    }

    /// The same by a look at all devices: also a bridge that had its name from another card.
    pub(crate) fn sweep_every_egress(&self) -> Result<()> {
        let mut state = lock(&self.egress);
        if state.users > 0 {
            return Ok(());
        }
        let mut result = Ok(());
        for _ in 0..ROUNDS {
            let node = Snapshot::of(view::links(&mut Socket::route()?)?);
            let (used, unused): (Vec<&Link>, Vec<&Link>) = node
                .links()
                .iter()
                .filter(|link| is_egress(link))
                .partition(|link| node.members(link.index).next().is_some());
            if used.is_empty() {
                *state = State::default();
                if has_egress_table()? {
                    self.nft(&rules::without("ip", EGRESS_TABLE))?;
                }
            }
            if unused.is_empty() {
                return Ok(());
            }
            let lines: Vec<String> =
                unused.iter().map(|link| format!("link del dev {}", link.name)).collect();
            result = self.batch(Tool::Ip, &lines);
        }
        result
    }

    pub(crate) fn nft(&self, text: &str) -> Result<()> {
        self.commands.run(Tool::Nft, &["-f", "-"], text, QUICK).map(|_| ())
    }
}

fn is_egress(link: &Link) -> bool {
    link.kind == "bridge" && link.alias == marker(FLOATING)
}

fn has_egress_table() -> Result<bool> {
    let tables = nftables::tables(&mut Socket::netfilter()?, Family::Ip, Some(EGRESS_TABLE))?;
    Ok(tables.contains_key(EGRESS_TABLE))
}
