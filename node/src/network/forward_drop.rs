//! Finds rule sets of others that drop forwarded packets, and with them those between guests and the external network.
//! Docker is the most common owner of such a rule set.

use muster_types::Result;
use nix::libc;

use super::names::{EGRESS_BRIDGE_PREFIX, ROUTER_TABLE};
use super::netlink::{NetlinkRequest, NetlinkSocket, NfGenMsg, attributes, attributes_after, read_string};
use super::nftables::{GET_CHAIN, GET_RULE};

// Attribute types from `linux/netfilter/nf_tables.h`.
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_POLICY: u16 = 5;
const NFTA_HOOK_HOOKNUM: u16 = 1;
const NFTA_RULE_TABLE: u16 = 1;

/// The chain that Docker leaves to the administrator.
const DOCKER_CHAIN: &str = "DOCKER-USER";

/// A chain whose policy drops forwarded packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ForwardDrop {
    pub(crate) family: &'static str,
    pub(crate) table: String,
    pub(crate) chain: String,
    /// Whether the table has a chain of Docker.
    pub(crate) is_docker: bool,
}

impl ForwardDrop {
    /// Returns the command that accepts the packets of guests.
    pub(crate) fn fix(&self) -> String {
        let Self { family, table, chain, is_docker } = self;
        let bridges = EGRESS_BRIDGE_PREFIX;
        if *is_docker {
            return format!(
                "iptables -I {DOCKER_CHAIN} -i {bridges}+ -j ACCEPT && iptables -I {DOCKER_CHAIN} -o {bridges}+ -j ACCEPT"
            );
        }
        let rule = |direction| {
            format!("nft 'insert rule {family} {table} {chain} {direction} \"{bridges}*\" accept'")
        };
        format!("{} && {}", rule("iifname"), rule("oifname"))
    }
}

/// Returns the first chain of others that drops forwarded packets and has no rule for the egress bridges.
pub(crate) fn forward_drop() -> Result<Option<ForwardDrop>> {
    let mut socket = NetlinkSocket::netfilter()?;
    for (family, number) in [("ip", libc::NFPROTO_IPV4), ("inet", libc::NFPROTO_INET)] {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the numbers are below 16"
        )]
        let request = NetlinkRequest::new::<NfGenMsg>().set(0, &[number as u8]);
        let chains: Vec<Chain> =
            socket.dump(GET_CHAIN, &request)?.iter().map(|payload| Chain::parse(payload)).collect();
        for chain in chains.iter().filter(|chain| chain.drops_forwarded_packets()) {
            let rules = socket.dump(GET_RULE, &request)?;
            if rules.iter().any(|rule| is_rule_for_egress(rule, &chain.table)) {
                continue;
            }
            let is_docker =
                chains.iter().any(|other| other.table == chain.table && other.name == DOCKER_CHAIN);
            let (table, chain) = (chain.table.clone(), chain.name.clone());
            return Ok(Some(ForwardDrop { family, table, chain, is_docker }));
        }
    }
    Ok(None)
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Chain {
    table: String,
    name: String,
    hook: Option<u32>,
    policy: Option<u32>,
}

impl Chain {
    fn parse(payload: &[u8]) -> Self {
        let number = |value: &[u8]| value.try_into().ok().map(u32::from_be_bytes);
        let mut chain = Self::default();
        for (attribute, value) in attributes_after::<NfGenMsg>(payload) {
            match attribute {
                NFTA_CHAIN_TABLE => chain.table = read_string(value),
                NFTA_CHAIN_NAME => chain.name = read_string(value),
                NFTA_CHAIN_HOOK => chain.hook = attributes(value).value(NFTA_HOOK_HOOKNUM).and_then(number),
                NFTA_CHAIN_POLICY => chain.policy = number(value),
                _ => {}
            }
        }
        chain
    }

    fn drops_forwarded_packets(&self) -> bool {
        let is_ours = self.table == ROUTER_TABLE || self.table.starts_with(&format!("{ROUTER_TABLE}-"));
        !is_ours
            && self.hook == u32::try_from(libc::NF_INET_FORWARD).ok()
            && self.policy == u32::try_from(libc::NF_DROP).ok()
    }
}

/// Returns whether a rule of this table compares the name of a device with that of egress bridges.
fn is_rule_for_egress(payload: &[u8], table: &str) -> bool {
    let prefix = EGRESS_BRIDGE_PREFIX.as_bytes();
    let is_in_table = attributes_after::<NfGenMsg>(payload)
        .value(NFTA_RULE_TABLE)
        .is_some_and(|name| read_string(name) == table);
    is_in_table && payload.windows(prefix.len()).any(|part| part == prefix)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::namespace;
    use super::*;

    #[test]
    fn finds_policies_of_others_until_a_rule_accepts_guests() {
        let has_nft = Command::new("nft").arg("--version").output().is_ok();
        if !nix::unistd::geteuid().is_root() || !has_nft {
            return muster_testing::skipped("root and nft");
        }
        namespace::in_thread(|| {
            namespace::unshare_network().unwrap();
            let nft = |script: &str| {
                assert!(Command::new("sh").args(["-c", script]).status().unwrap().success(), "{script}");
            };
            assert_eq!(forward_drop().unwrap(), None);
            let chain = "{ type filter hook forward priority 0; policy drop; }";
            nft(&format!("nft add table inet muster-x && nft 'add chain inet muster-x c {chain}'"));
            assert_eq!(forward_drop().unwrap(), None, "our own rule set");
            nft(&format!("nft add table inet strict && nft 'add chain inet strict limit-all {chain}'"));
            let found = forward_drop().unwrap().unwrap();
            assert_eq!((found.family, &*found.table, &*found.chain), ("inet", "strict", "limit-all"));
            nft(&found.fix());
            assert_eq!(forward_drop().unwrap(), None, "after the fix");
            nft(&format!(
                "nft add table ip filter && nft 'add chain ip filter FORWARD {chain}' && nft add chain ip filter {DOCKER_CHAIN}"
            ));
            let found = forward_drop().unwrap().unwrap();
            assert!(found.is_docker && found.fix().contains("-I DOCKER-USER -i egr-br-+"), "{found:?}");
        });
    }
}
