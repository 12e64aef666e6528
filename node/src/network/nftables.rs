//! Detects changes of rule sets without running a program.
//!
//! The kernel has one generation counter for all rule sets of a namespace. While it does not change, nothing needs to
//! be inspected. When it changed, the rule sets in question are read and their fingerprints compared with those taken
//! right after they were applied. Rules with counters would change by themselves, so none of ours has one.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use muster_types::Result;
use nix::libc;

use super::netlink::{NetlinkRequest, NetlinkSocket, NfGenMsg, attributes_after, malformed, read_string};

const GET_TABLE: u16 = message_type(libc::NFT_MSG_GETTABLE);
pub(crate) const GET_CHAIN: u16 = message_type(libc::NFT_MSG_GETCHAIN);
pub(crate) const GET_RULE: u16 = message_type(libc::NFT_MSG_GETRULE);
const GET_GENERATION: u16 = message_type(libc::NFT_MSG_GETGEN);

// Attribute types from `linux/netfilter/nf_tables.h`.
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_TABLE_FLAGS: u16 = 2;
const NFTA_TABLE_HANDLE: u16 = 4;
const NFTA_TABLE_USERDATA: u16 = 6;
/// The table that a chain or a rule belongs to: `NFTA_CHAIN_TABLE` and `NFTA_RULE_TABLE`.
const NFTA_PARENT_TABLE: u16 = 1;
const NFTA_GEN_ID: u16 = 1;
/// The type of a comment in a table's user data, from libnftnl's `udata.h`.
const UDATA_COMMENT: u8 = 0;

const fn message_type(message: libc::c_int) -> u16 {
    ((libc::NFNL_SUBSYS_NFTABLES << 8) | message) as u16
}

/// The address family of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NftFamily {
    Ip = libc::NFPROTO_IPV4 as isize,
    Arp = libc::NFPROTO_ARP as isize,
    Bridge = libc::NFPROTO_BRIDGE as isize,
}

impl NftFamily {
    /// Returns the name of the family for `nft`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::Arp => "arp",
            Self::Bridge => "bridge",
        }
    }
}

/// A table as the kernel has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NftTable {
    pub(crate) comment: String,
    pub(crate) fingerprint: u64,
    pub(crate) rules: usize,
}

/// Returns the fingerprint of a text.
pub(crate) fn fingerprint(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// Returns the generation counter of the rule sets of this thread's namespace.
pub(crate) fn generation(socket: &mut NetlinkSocket) -> Result<u32> {
    let answer = socket.get(GET_GENERATION, &NetlinkRequest::new::<NfGenMsg>())?;
    let id = answer.as_deref().and_then(|answer| attributes_after::<NfGenMsg>(answer).value(NFTA_GEN_ID));
    let id = id.and_then(|value| value.try_into().ok()).map(u32::from_be_bytes);
    id.ok_or_else(|| malformed("the generation of rule sets"))
}

/// Returns the tables of a family, or only one of them.
pub(crate) fn tables(
    socket: &mut NetlinkSocket,
    family: NftFamily,
    only: Option<&str>,
) -> Result<HashMap<String, NftTable>> {
    let all = NetlinkRequest::new::<NfGenMsg>().set(0, &[family as u8]);
    let one = || only.map_or_else(|| all.clone(), |name| all.clone().with_string(NFTA_TABLE_NAME, name));
    let mut hashers: HashMap<String, (NftTable, DefaultHasher)> = HashMap::new();
    let found = match only {
        Some(_) => socket.get(GET_TABLE, &one())?.into_iter().collect(),
        None => socket.dump(GET_TABLE, &all)?,
    };
    for payload in found {
        let (mut name, mut table, mut hasher) = (String::new(), NftTable::default(), DefaultHasher::new());
        for (attribute, value) in attributes_after::<NfGenMsg>(&payload) {
            match attribute {
                NFTA_TABLE_NAME => name = read_string(value),
                NFTA_TABLE_USERDATA => table.comment = comment(value),
                // The flags, of which one disables the table, and the handle, which is never reused.
                NFTA_TABLE_FLAGS | NFTA_TABLE_HANDLE => (attribute, value).hash(&mut hasher),
                _ => {}
            }
        }
        hashers.insert(name, (table, hasher));
    }
    if hashers.is_empty() {
        return Ok(HashMap::new());
    }
    let (chains, rules) = (socket.dump(GET_CHAIN, &all)?, socket.dump(GET_RULE, &one())?);
    let entries = chains.iter().map(|chain| (chain, 0)).chain(rules.iter().map(|rule| (rule, 1)));
    for (payload, count) in entries {
        let parent = attributes_after::<NfGenMsg>(payload).value(NFTA_PARENT_TABLE).map(read_string);
        if let Some((table, hasher)) = parent.and_then(|name| hashers.get_mut(&name)) {
            payload[size_of::<NfGenMsg>()..].hash(hasher);
            table.rules += count;
        }
    }
    let finish = |(name, (table, hasher)): (String, (NftTable, DefaultHasher))| {
        (name, NftTable { fingerprint: hasher.finish(), ..table })
    };
    Ok(hashers.into_iter().map(finish).collect())
}

/// Returns the comment in a table's user data, which is a list of types, lengths and values of one byte each.
fn comment(mut data: &[u8]) -> String {
    while let [kind, length, rest @ ..] = data {
        let length = usize::from(*length).min(rest.len());
        if *kind == UDATA_COMMENT {
            return read_string(&rest[..length]);
        }
        data = &rest[length..];
    }
    String::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_a_comment_behind_other_user_data() {
        assert_eq!(comment(&[5, 2, 9, 9, 0, 3, b'h', b'i', 0]), "hi");
        assert_eq!(comment(&[0, 200, b'h']), "h");
        assert_eq!(comment(&[1]), "");
    }
}
